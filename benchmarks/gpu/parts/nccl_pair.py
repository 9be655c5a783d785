"""Part 7: NCCL with two ranks, two processes, on one GPU, if the NCCL at hand can be made to.

A rank that waits in a collective for the other is freed, and its tensor is not written afterwards;
FSDP2 over the group, rolled back in the middle, ends with the same bits.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch.distributed as dist

from benchmarks.gpu.findings import Pen, read
from benchmarks.gpu.part import Setting
from benchmarks.gpu.parts.rings import RINGS

SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
WAYS: dict[str, dict[str, list[dict[str, str]]]] = {
    "cuda": {
        "NCCL_MULTI_RANK_GPU_ENABLE=1": [{"NCCL_MULTI_RANK_GPU_ENABLE": "1"}] * 2,
        "NCCL_HOSTID for each rank, over sockets": [
            {"NCCL_HOSTID": f"trial-{rank}", **SOCKETS} for rank in range(2)
        ],
    },
    "cpu": {"gloo": [{}, {}]},
}
"""How two ranks may be let share a device: the environment of each. NCCL refuses a GPU else
("Duplicate GPU detected")."""
_TRIAL_S = 40.0


def run(pen: Pen, setting: Setting) -> None:
    """By the first way that connects, with each sort of group."""
    rings, ways = list(RINGS[setting.device]), WAYS[setting.device]
    connects = (name for name in ways if _works(pen, setting, name, "connects", rings[0]))
    way = next(connects, None)
    if way is None:
        pen.absent("two ranks on one GPU", "this NCCL connects them in no way that is known")
        return
    for ring in rings:
        with pen.trial(f"a blocked rank, by {ring}"):
            _works(pen, setting, way, "blocked", ring)
    with pen.trial(f"FSDP2 over {rings[-1]}"):
        _works(pen, setting, way, "fsdp", rings[-1])


def _works(pen: Pen, setting: Setting, way: str, trial: str, ring: str) -> bool:
    """Run a trial in two processes, and pass on what they found; whether all of it holds."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ways = WAYS[setting.device]
    name = f"{trial} {ring}".replace(" ", "-")
    folder = setting.folder / f"{name}-{list(ways).index(way)}"
    folder.mkdir()
    words = [sys.executable, "-m", "benchmarks.gpu.parts.nccl_rank", "--folder", str(folder)]
    words += ["--trial", trial, "--port", str(store.port), "--ring", ring]
    words += ["--device", setting.device]
    ranks, logs = [], [(folder / f"rank{rank}.txt") for rank in range(2)]
    for rank, env in enumerate(ways[way]):
        with logs[rank].open("wb") as out:
            ranks.append(
                subprocess.Popen(
                    [*words, "--rank", str(rank)], stdout=out, stderr=out, env={**os.environ, **env}
                )
            )
    codes: list[int | None] = []
    for process in ranks:
        try:
            codes.append(process.wait(_TRIAL_S))
        except subprocess.TimeoutExpired:
            codes.append(None)
            process.kill()
            process.wait()
    findings = [f for rank in range(2) for f in read(folder / f"rank{rank}.jsonl")]
    pen.pass_on(findings)
    holds = codes == [0, 0] and all(found["status"] != "failed" for found in findings)
    text = "" if codes == [0, 0] else f"exit codes {codes}: {_ends(logs)}"
    if trial == "connects":
        pen.measured(f"two ranks connect by {way}", "yes" if holds else f"no; {text}")
    elif codes != [0, 0]:
        pen.check(f"{name}: both processes come to their end", False, text)
    return holds


def _ends(logs: list[os.PathLike[str]]) -> str:
    """The last lines of what the ranks have said, those about NCCL before others."""
    found = []
    for path in logs:
        with open(path, errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
        about = [line for line in lines if "NCCL" in line or "Duplicate" in line]
        found += (about or lines)[-2:]
    return " | ".join(found)
