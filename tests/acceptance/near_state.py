"""Kills of all trainers of a job at random moments, and what each of them costs.

A job of 2 x 2 FSDP2 ranks with 100 MB of state each runs under `fft run` with a copy in memory of
each step (``memory``), or with durable checkpoints (``disk``). All trainers are killed at random
moments, also in the midst of a copy, and once together with `fft run`, whose command is then given
again. For each kill the driver prints the steps lost and the seconds to the next commit; at the end
whether the state has the bits of an undisturbed run, and the verdict of the audit.

With ``--hosts`` each group runs on a host of its own, a network namespace with shared memory of its
own (root and `ip` are needed). At every third kill one host also loses its `fft run` and its
memory, and at every third both lose their `fft run`; the same commands are then given again. A rank
whose host has lost its memory has its shard from the other host, and its random states anew, so the
bits are compared only if no host loses its memory (``--keep-memory``).

``python -m tests.acceptance.near_state --kills 20 --mb 100 --tier memory``
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fft
from fft.trace.audit import read_lines
from fft.trace.resumed import audit_job
from fft.trace.starts import start_folders
from tests.namespaces import Host, hosts_of_one_network

LIMIT_S = 1800
TIERS = {
    "memory": ["--memory", "1"],
    "auto": [],
    "disk": ["--memory", "off", "--checkpoint", "{}", "--every", "10"],
}


def train(out: Path, steps: int, mb: int, pause_s: float) -> None:
    """Train as one rank. Most of the state is frozen, so that a step is not a copy of it."""
    (out / f"pid-{os.getpid()}").touch()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shard_pg = fft.ShardProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = fft.ManagerFFT(shard_pg=shard_pg, min_replica_size=2)
    mesh = manager.shard_mesh()
    trained = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 1))
    fully_shard(trained, mesh=mesh)
    held = nn.ParameterList(nn.Parameter(torch.randn(mb * 10**6 // 32)) for _ in range(8))
    held.requires_grad_(False)
    model = nn.ModuleList([trained, held])
    manager.register(model, torch.optim.AdamW(trained.parameters(), lr=1e-3))
    manager.sync_gradients(model)
    data = torch.randn(4096, 64)
    for txn in manager.transactions(fft.CursorLoader(data, batch_size=8), max_steps=steps):
        with txn:
            trained(txn.batch).square().mean().backward()
            time.sleep(pause_s)
    rank = f"{os.environ['REPLICA_GROUP_ID']}-{os.environ['RANK']}"
    (out / f"final-{rank}").write_text(manager.digest())
    manager.shutdown()


def commits(traces: Path) -> dict[str, list[tuple[float, int]]]:
    """Return the commits of each start: the wall clock in s, and the number of committed steps."""
    found: dict[str, list[tuple[float, int]]] = {}
    for folder in filter(lambda folder: any(folder.glob("*.jsonl")), start_folders(traces)):
        lines = read_lines(folder, lambda line: line.get("note") == "consumed")
        times = sorted((line["wall"], line["data"]["step"] + 1) for line in lines)
        if times:
            found[folder.name] = times
    return found


def newest(traces: Path) -> tuple[float, int]:
    """Return the time and the number of the newest commit."""
    return max(itertools.chain(*commits(traces).values()), default=(0.0, 0))


class Job:
    """The `fft run` of all hosts, by the same commands whenever they are started."""

    def __init__(self, root: Path, args: argparse.Namespace, undo: ExitStack) -> None:
        self.out, self.traces, self._log = root / "out", root / "traces", root / "log"
        self.out.mkdir(parents=True)
        self.hosts: list[Host] = []
        options = [each.format(root / "kept") for each in TIERS[args.tier]]
        self._command = [sys.executable, "-m", "fft.cli", "run", "--no-progress", "--ranks", "2"]
        self._command += ["--trace-dir", str(self.traces), "--resume", *options]
        self._script = [__file__, "--train", str(self.out), "--steps", str(args.steps)]
        self._script += ["--mb", str(args.mb)]
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        undo.callback(self.end)
        if args.hosts:
            self._serve(root, undo)

    def _serve(self, root: Path, undo: ExitStack) -> None:
        """Make the hosts, and serve the bus on the first one."""
        self.hosts = undo.enter_context(hosts_of_one_network(root, 3))
        token = root / "token"
        command = ["serve", "--host", "10.77.0.1", "--token-file", str(token), "--no-lighthouse"]
        line = [sys.executable, "-m", "fft.cli", *command]
        enter = self.hosts[0].enter
        server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
        undo.callback(server.wait)
        undo.callback(server.kill)
        assert server.stdout is not None
        while "FFT_BUS=" not in (line_of := server.stdout.readline()):
            assert line_of, "fft serve has ended"
        settings = (word.partition("=") for word in line_of.split() if word.startswith("FFT_"))
        os.environ.update({name: value for name, _, value in settings})

    @property
    def numbers(self) -> list[int]:
        """The numbers of the hosts with groups; [0] for a job on this host alone."""
        return [1, 2] if self.hosts else [0]

    def start(self, *numbers: int) -> None:
        """Start `fft run` on these hosts."""
        for number in numbers or self.numbers:
            shape, enter = ["--groups", "2"], None
            if number:
                shape = ["--join", "--groups", "1", "--first-group", str(number - 1)]
                shape, enter = [*shape, "--all-groups", "2"], self.hosts[number].enter
            line = [*self._command, *shape, *self._script]
            with self._log.open("ab") as log:
                self._running[number] = subprocess.Popen(
                    line, stdout=log, stderr=log, preexec_fn=enter
                )

    def kill(self) -> None:
        """SIGKILL all trainers."""
        for mark in self.out.glob("pid-*"):
            with suppress(ProcessLookupError):
                os.kill(int(mark.name.removeprefix("pid-")), signal.SIGKILL)
            mark.unlink()

    def end(self, *numbers: int) -> None:
        """SIGKILL `fft run` on these hosts."""
        for number in numbers or list(self._running):
            self._running[number].kill()
            self._running[number].wait()

    def check(self) -> None:
        """Raise AssertionError if an `fft run` has ended."""
        codes = [each.poll() for each in self._running.values()]
        assert codes == [None] * len(codes), f"ended with {codes}"

    def wait(self) -> list[int]:
        """Return the exit statuses."""
        return [each.wait(LIMIT_S) for each in self._running.values()]


def strike(job: Job, number: int, kills: int, keep_memory: bool) -> float:
    """Kill all trainers, and what else is due at this kill; return the time of the kill."""
    if job.hosts:
        ended = [(), (1 + number // 3 % 2,), (1, 2)][number % 3]
    else:
        ended = (0,) if number == kills // 2 else ()
    if ended:
        job.end(*ended)
    killed_at = time.time()
    job.kill()
    if len(ended) == 1 and job.hosts and not keep_memory:
        job.hosts[ended[0]].forget()
    if ended:
        job.start(*ended)
    return killed_at


def run(root: Path, args: argparse.Namespace, kills: int) -> dict[str, object]:
    """Run a job to its end with so many kills, and return what they cost."""
    with ExitStack() as undo:
        return run_job(Job(root, args, undo), root, args, kills)


def run_job(job: Job, root: Path, args: argparse.Namespace, kills: int) -> dict[str, object]:
    """See `run`."""
    traces, dice, costs = job.traces, random.Random(args.seed), []
    job.start()
    try:
        for number in range(kills):
            began = newest(traces)[1]
            while newest(traces)[1] < began + 3:  # so that each start makes some progress
                job.check()
                time.sleep(0.02)
            time.sleep(dice.uniform(0.0, args.within))
            killed_at = strike(job, number, kills, args.keep_memory)
            _, reached = newest(traces)
            known = set(commits(traces))
            while not (later := [c for n, c in commits(traces).items() if n not in known]):
                job.check()
                time.sleep(0.02)
            at, step = min(later[0])
            costs.append({"at": reached, "lost": reached - step + 1, "s": at - killed_at})
            print(costs[-1], flush=True)
        codes = job.wait()
    except AssertionError as error:
        error.add_note((root / "log").read_text()[-4000:])
        raise
    assert not any(codes), f"exit status {codes}"
    finals = {path.name: path.read_text() for path in sorted(job.out.glob("final-*"))}
    assert len(finals) == 4
    return {"costs": costs, "finals": finals, "audit": audit_job(traces).ok}


def main() -> None:
    """Run a job with kills, and one without for its bits; print a summary, exit 1 on a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mb", type=int, default=100, help="state of each rank")
    parser.add_argument("--tier", choices=TIERS, default="memory")
    parser.add_argument("--within", type=float, default=1.0, metavar="S", help="moment of a kill")
    parser.add_argument("--hosts", action="store_true", help="run each group on another host")
    parser.add_argument("--keep-memory", action="store_true", help="no host loses its memory")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, args.steps, args.mb, 0.05)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder, "killed"), args, args.kills)
        still = run(Path(folder, "still"), args, 0)
    costs = found["costs"]
    assert isinstance(costs, list)
    lost, seconds = [cost["lost"] for cost in costs], sorted(cost["s"] for cost in costs)
    is_bare = args.hosts and args.kills > 1 and not args.keep_memory
    same = is_bare or found["finals"] == still["finals"]
    summary = {
        "tier": args.tier,
        "mb": args.mb,
        "kills": len(costs),
        "same_bits": None if is_bare else same,
    }
    summary |= {"audit": found["audit"], "most_lost": max(lost), "lost": statistics.mean(lost)}
    summary |= {"median_s": statistics.median(seconds), "most_s": seconds[-1]}
    print(json.dumps(summary))
    sys.exit(0 if same and found["audit"] and (args.tier != "memory" or max(lost) <= 1) else 1)


if __name__ == "__main__":
    main()
