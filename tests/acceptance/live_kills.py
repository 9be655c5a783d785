"""Programs of live blocks whose processes are killed at random.

``python -m tests.acceptance.live_kills collectives.py training.py --kills 200`` runs jobs with one
seed after another until that many processes were killed. Each program checks its own output. The
audit of each job includes the history checker, which judges every entry of a block.
``--torch-loaded`` starts processes by a fork, as the tests do, so that a restart takes no seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

from fft.trace.audit import AuditReport, audit_dir

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "live_set"
GROUPS = 4
_TRACE = re.compile(r"g(\d+)r0i(\d+)\.jsonl")
_MEAN_S = 1.0
"""Mean time between two kills, in seconds."""
_END_S = 60.0
"""Limit for the end of a job whose rounds are finished, in seconds."""


class Job(Protocol):
    """A running ``fft run``, as a context manager that ends it."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *raised: object) -> None: ...

    @property
    def runs(self) -> bool:
        """Whether it still runs."""

    def wait(self, within: float) -> int:
        """Return its exit status."""

    def tail(self) -> str:
        """Return the end of its output."""


Start = Callable[[list[str], Path], Job]


class Command:
    """A job that is started as users start it."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self._log = folder / "job.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fft.cli", *arguments], stdout=log, stderr=log
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()  # its ranks die with it
        self._process.wait()

    @property
    def runs(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def wait(self, within: float) -> int:
        """Return its exit status."""
        return self._process.wait(within)

    def tail(self) -> str:
        """Return the end of its output."""
        return self._log.read_text()[-4000:]


def newest(traces: Path) -> dict[str, tuple[int, Path]]:
    """Return for each group the pid of its newest process that has joined, and its trace."""
    found: dict[str, tuple[int, Path]] = {}
    for path in traces.glob("g*.jsonl"):
        match = _TRACE.fullmatch(path.name)
        if match is not None and int(match[2]) > found.get(match[1], (0, path))[0]:
            found[match[1]] = int(match[2]), path
    pids: dict[str, tuple[int, Path]] = {}
    for group, (_, path) in found.items():
        with path.open() as lines:
            if (first := lines.readline()).endswith("\n"):
                pids[group] = json.loads(first)["config"]["pid"], path
    return pids


def progress(traces: Path) -> int:
    """Return the last round that a process has finished."""
    texts = (log.read_text()[-300:] for log in (traces / "logs").glob("*.log"))
    return max(
        (int(n) for text in texts for n in re.findall(r"^round (\d+):", text, re.M)), default=0
    )


def kill_at_random(
    program: Path, kills: int, seed: int, folder: Path, start: Start = Command
) -> tuple[int, Path]:
    """Run a program and kill any of its processes, but never the last one that has the state.

    Returns:
        The number of processes that were killed, and the folder of the traces.
    """
    rng, gone = random.Random(seed), set[int]()
    traces = folder / f"{program.stem}-{seed}"
    rounds = 40 + 12 * kills
    command = ["run", "--groups", str(GROUPS), "--trace-dir", str(traces), "--max-restarts", "9999"]
    command += ["--no-progress", str(program), "--rounds", str(rounds), "--pause", "0.05"]
    with start(command, folder) as job:
        due = time.monotonic()
        while job.runs:
            time.sleep(0.05)  # poll: no event tells that a process has joined
            if len(gone) >= kills or time.monotonic() < due or progress(traces) > rounds - 20:
                continue
            there = {pid: path for pid, path in newest(traces).values() if pid not in gone}
            have = [pid for pid, path in there.items() if '"what":"finished"' in path.read_text()]
            victim = rng.choice(sorted(there)) if there else 0
            if len(there) == GROUPS and [pid for pid in have if pid != victim]:
                os.kill(victim, signal.SIGKILL)
                gone.add(victim)
            due = time.monotonic() + rng.expovariate(1 / _MEAN_S)
        code = job.wait(within=_END_S)
        if code != 0:
            raise RuntimeError(f"{program.name} with seed {seed} ended with {code}: {job.tail()}")
    return len(gone), traces


def judged(traces: Path) -> AuditReport:
    """Audit a run, and raise RuntimeError for a finding."""
    found = audit_dir(traces)
    if not found.ok:
        raise RuntimeError(f"{traces}: {found.render()}")
    return found


def failed_blocks(traces: Path) -> int:
    """Return the number of failures of a block that processes have traced."""
    return sum(path.read_text().count('"what":"failed"') for path in traces.glob("*.jsonl"))


def _forked(arguments: list[str], folder: Path) -> Job:
    sys.path.insert(0, str(ROOT / "tests"))
    from forked_run import running

    return running(*arguments, folder=folder)  # type: ignore[no-any-return]


def main() -> None:
    """Run the programs in turn until enough processes were killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "programs", nargs="+", choices=sorted(p.name for p in EXAMPLES.glob("*.py"))
    )
    parser.add_argument("--kills", type=int, default=200, help="processes to kill in all")
    parser.add_argument(
        "--each", type=int, default=10, help="processes to kill in one job, at most"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first job")
    parser.add_argument("--torch-loaded", action="store_true", help="fork processes; needs tests/")
    args = parser.parse_args()
    start = _forked if args.torch_loaded else Command
    total, seed, failures, entries = 0, args.seed, 0, 0
    with tempfile.TemporaryDirectory(prefix="live-kills-") as made:
        while total < args.kills:
            program = EXAMPLES / args.programs[(seed - args.seed) % len(args.programs)]
            wanted = min(args.each, args.kills - total)
            killed, traces = kill_at_random(program, wanted, seed, Path(made), start)
            found = judged(traces)
            barriers = next(f for f in found.findings if f.name == "barriers")
            total, failures = total + killed, failures + failed_blocks(traces)
            entries += barriers.checks
            print(
                f"{program.name}, seed {seed}: {killed} killed, audit: no violation; in all "
                f"{total} killed, {entries} answers of barriers judged, {failures} failures of "
                "blocks seen",
                flush=True,
            )
            seed += 1


if __name__ == "__main__":
    main()
