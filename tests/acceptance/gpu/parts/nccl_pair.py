"""Part 7: NCCL with two ranks in two processes on one GPU, if the installed NCCL permits it.

A rank that waits in a collective for the other is freed, and its tensor is not written afterwards.
FSDP2 over the group, rolled back in the middle, ends with the same bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.acceptance.gpu.findings import Pen, read
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts.rings import RINGS

SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
TWO_GPUS = "a GPU for each rank"


def visible_gpus() -> list[str]:
    """Return the first two devices that this process may use, as CUDA names them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return [name.strip() for name in names][:2]


WAYS: dict[str, dict[str, list[dict[str, str]]]] = {
    "cuda": {
        "NCCL_MULTI_RANK_GPU_ENABLE=1": [{"NCCL_MULTI_RANK_GPU_ENABLE": "1"}] * 2,
        "NCCL_HOSTID for each rank, over sockets": [
            {"NCCL_HOSTID": f"trial-{rank}", **SOCKETS} for rank in range(2)
        ],
        TWO_GPUS: [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible_gpus()],
    },
    "cpu": {"gloo": [{}, {}]},
}
"""Ways to run two ranks: the environment of each. All but the last share a device, which NCCL
refuses otherwise ("Duplicate GPU detected")."""
_TRIAL_S = {"connects": 15.0, "blocked": 25.0, "fsdp": 30.0}
"""Maximum seconds for both ranks together; twice as long without a GPU, on few cores."""
_KILL_S = 5.0
_REFUSED = ("Duplicate GPU", "invalid usage", "invalid argument", "ncclInvalid")
"""NCCL's error texts if two ranks may not share a GPU; other errors are not the machine's."""


def run(pen: Pen, setting: Setting, ways: Sequence[str] = ()) -> None:
    """Use the first of the ways that connects, with each kind of group."""
    rings = list(RINGS[setting.device])
    ways = ways or [name for name in WAYS[setting.device] if name != TWO_GPUS]
    way = None
    for name in ways:
        ended = _run(setting, name, "connects", rings[0])
        pen.measured(f"two ranks connect by {name}", "yes" if ended.holds else f"no; {ended.text}")
        if ended.holds:
            way = name
            break
        if not ended.is_refused:
            pen.check(f"two ranks connect by {name}, or NCCL says why not", False, ended.text)
    if way is None:
        pen.absent("two ranks", "this NCCL connects them in no way that is known")
        return
    for ring in rings:
        with pen.trial(f"a blocked rank, by {ring}"):
            _tell(pen, f"a blocked rank, by {ring}", _run(setting, way, "blocked", ring))
    with pen.trial(f"FSDP2 over {rings[-1]}"):
        _tell(pen, f"FSDP2 over {rings[-1]}", _run(setting, way, "fsdp", rings[-1]))


@dataclass(frozen=True)
class Ended:
    """A trial that is over."""

    codes: list[int | None]
    """The exit codes of its processes; None for one that was ended at the time limit."""
    findings: list[dict[str, Any]]
    text: str
    """The reason for which it did not reach its end; empty if it did."""
    is_refused: bool
    """Whether NCCL refuses this and reports so."""

    @property
    def holds(self) -> bool:
        """Whether both processes reached their end without a failure."""
        return not self.text and all(each["status"] != "failed" for each in self.findings)


def _tell(pen: Pen, what: str, ended: Ended) -> None:
    """Record its findings, and a failure if it did not reach its end or tested nothing."""
    pen.pass_on(ended.findings)
    if ended.text:
        pen.check(f"{what}: both processes come to their end", False, ended.text)
    elif not any(each["status"] in ("ok", "failed", "not here") for each in ended.findings):
        pen.check(f"{what}: something was tried", False, "both processes ended without a finding")


def _run(setting: Setting, way: str, trial: str, ring: str) -> Ended:
    """Run a trial in two processes with one deadline."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ways = WAYS[setting.device]
    name = f"{trial} {ring}".replace(" ", "-")
    folder = setting.folder / f"{name}-{list(ways).index(way)}"
    folder.mkdir()
    words = [sys.executable, "-m", "tests.acceptance.gpu.parts.nccl_rank", "--folder", str(folder)]
    words += ["--trial", trial, "--port", str(store.port), "--ring", ring]
    words += ["--device", setting.device]
    logs = [folder / f"rank{rank}.txt" for rank in range(2)]
    limit_s = _TRIAL_S[trial] * (1 if setting.device == "cuda" else 2)
    limit_s = min(limit_s, setting.left())
    words += ["--limit", str(limit_s)]
    codes = run_ranks(
        [[*words, "--rank", str(rank)] for rank in range(2)],
        [{"NCCL_DEBUG": "WARN", **os.environ, **env} for env in ways[way]],
        logs,
        limit_s,
    )
    findings = [f for rank in range(2) for f in read(folder / f"rank{rank}.jsonl")]
    text = "" if codes == [0, 0] else f"exit codes {codes}: {_ends(logs)}"
    if None in codes:
        text = f"not over after {limit_s:.1f} s; {text}"
    said = "".join(log.read_text(errors="replace") for log in logs)
    return Ended(codes, findings, text, any(word in said for word in _REFUSED))


def run_ranks(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    logs: Sequence[Path],
    limit_s: float,
) -> list[int | None]:
    """Run the processes in parallel; return their exit codes.

    Those that still run after ``limit_s`` in all are killed and have None.
    """
    ends = time.monotonic() + limit_s
    ranks = []
    for command, environment, log in zip(commands, environments, logs, strict=True):
        with log.open("wb") as out:
            ranks.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
    codes: list[int | None] = []
    for process in ranks:
        try:
            codes.append(process.wait(max(0.0, ends - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in ranks:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that waits in a driver may stay
            process.wait(_KILL_S)
    return codes


def _ends(logs: list[Path]) -> str:
    """Return the last lines of the ranks' output, those about NCCL first."""
    found = []
    for path in logs:
        with open(path, errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
        about = [line for line in lines if "NCCL" in line or "Duplicate" in line]
        found += (about or lines)[-2:]
    return " | ".join(found)
