"""Goodput under a seeded stream of faults, of FFT and of others.

The work is that of `benchmarks.side_by_side`: three groups of one rank, whose step computes 200 ms,
so that the cores are idle for most of it and a step takes equally long with fewer groups.
Faults come at exponentially distributed intervals. Half are SIGKILL, and the process is restarted
at once; the others are exceptions in backward, and SIGSTOP for two seconds. Goodput is the number
of committed samples that count once, divided by that of the same system without faults. A fault
whose group is away is missed. NVRx replaces no killed process: it goes on with fewer, and ends with
the last one.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import nvrx
from benchmarks.side_by_side.events import LAUNCHER, Event
from benchmarks.side_by_side.launch import BECOME, WORKER, Launch
from benchmarks.side_by_side.model import BATCH
from benchmarks.side_by_side.rows import FFT_TXN_RUN, NVRX, TORCHFT, TUNED, Fault, Row, System
from fft.util import pidfd
from tools.pages import fill, markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
PLOT = PAGE.with_name("goodput.svg")
LENGTHS = {0.0: 0.25, 10.0: 0.5, 30.0: 0.5, 120.0: 1.0}
"""Length of the run with each mean time between faults, relative to the longest; 0: no faults."""
RATES_S = tuple(filter(None, LENGTHS))
"""Mean times between faults, in seconds."""
LLAMA_MTBF_S = 54 * 86400 / 419
"""Mean time between interruptions of a training on 16,384 GPUs: 419 in 54 days (Llama Team, "The
Llama 3 Herd of Models", 2024, section 3.3.4)."""
STOPPED_S = 2.0
SIGNALS = {"kill": signal.SIGKILL, "exception": signal.SIGUSR2, "stop": signal.SIGSTOP}
STREAM = Row("goodput", "a stream of faults", (), Fault("stream"), groups=3, pace_s=0.2)
FFT_SPARES = replace(FFT_TXN_RUN, name="fft-spares", title="FFT under fft run, one spare")
TORCHRUN = System("torchrun", "torchrun, checkpoint every 25 steps", "torchft")
SYSTEMS = (FFT_TXN_RUN, FFT_SPARES, TORCHFT, TUNED, NVRX, TORCHRUN)
CHECKPOINT_WORKER = Path(__file__).with_name("goodput_worker.py")
WARM_STEPS = 10
"""Steps of all groups together before the time is measured."""


@dataclass(frozen=True)
class Result:
    """The figures of one run.

    Attributes:
        samples: committed samples that count once, per second.
        faults: injected faults.
        missed: faults that found their group away.
        repeated: samples of steps that one group committed more than once.
        seconds: length of the run.
    """

    samples: float
    faults: int
    missed: int
    repeated: int
    seconds: float


Results = dict[tuple[System, float], Result]
"""By system and mean time between faults in seconds; 0: without faults."""


def stream(mtbf_s: float, seconds: float, seed: int) -> Iterator[tuple[float, str, int]]:
    """Yield the faults: seconds from the start, kind and group; equal for every system."""
    source, at = random.Random(seed), 0.0
    while mtbf_s and (at := at + source.expovariate(1 / mtbf_s)) < seconds:
        kind = source.choice(("kill", "kill", "exception", "stop"))
        yield at, kind, source.randrange(STREAM.groups)


class Stream(Launch):
    """A run under faults; the launcher restarts killed processes, unless the system does."""

    def __init__(self, system: System, directory: Path, faults: Sequence[Any], seconds: float):
        super().__init__(STREAM, system, directory, seconds)
        self._faults, self._seconds = faults, seconds
        self._until: float | None = None
        self._restarts_itself = system.supervised or system in (NVRX, TORCHRUN)

    def _start(self) -> None:
        shape = [] if self.system is not FFT_SPARES else ["--spares", "1"]
        if self.system is TORCHRUN:
            program = ["torch.distributed.run", "--nproc-per-node", str(STREAM.groups)]
            program += ["--max-restarts", "1000", "--monitor-interval", "0.1"]
            program += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
            program += [str(CHECKPOINT_WORKER)]
        elif self.system.supervised:
            program = ["fft.cli", "run", "--no-progress", "--groups", str(STREAM.groups), *shape]
            program += ["--max-restarts", "1000", "--trace-dir", str(self.directory / "traces")]
            program += [str(WORKER)]
        else:
            super()._start()
            return
        self._child(LAUNCHER, LAUNCHER, [str(BECOME), sys.executable, "-m", *program], {})

    def _over(self) -> bool:
        if self._until is None:
            whole = {e["step"] for e in self.events if e["e"] == "commit" and e["n"] == 3}
            if len(whole) < WARM_STEPS:
                self._check_start()
                return False
            self._pen.say("measured")
            now = time.monotonic()
            self._until = now + self._seconds
            for at, kind, group in self._faults:
                self._later.append((now + at, partial(self._inject, kind, group)))
        has_ended = all(child.dies_within(0) for child in self._children)
        return has_ended or time.monotonic() > self._until

    def _on_death(self, pid: int) -> None:
        place = self._places[pid]
        self._pen.say("died", of=list(place), pid_of=pid)
        if not self._restarts_itself:
            self._start_group(place[0])

    def _inject(self, kind: str, group: int) -> None:
        """Inject a fault into the group's newest process, unless the group is away."""
        pids = [e["pid"] for e in self.events if e["e"] == "commit" and e["g"] == group]
        fd = self._watched.get(pids[-1]) if pids else None
        if fd is None or pidfd.ends_within(fd, 0):
            self._pen.say("missed", kind=kind, of=group)
            return
        self._pen.say("fault", kind=kind, pid_of=pids[-1])
        pidfd.send(fd, SIGNALS[kind])
        if kind == "stop":
            back = partial(pidfd.send, fd, signal.SIGCONT)
            self._later.append((time.monotonic() + STOPPED_S, back))


def result(events: Sequence[Event], seconds: float) -> Result:
    """Compute the figures from the events of a run."""
    began = next(e["m"] for e in events if e["e"] == "measured")
    end = began + seconds * 1e9
    commits = [e for e in events if e["e"] == "commit" and began < e["m"] <= end]
    contributors = {e["step"]: e["n"] for e in sorted(commits, key=lambda e: int(e["m"]))}
    times = Counter((e["g"], e["step"]) for e in commits)
    return Result(
        samples=sum(contributors.values()) * BATCH / seconds,
        faults=sum(e["e"] == "fault" for e in events),
        missed=sum(e["e"] == "missed" for e in events),
        repeated=sum(count - 1 for count in times.values()) * BATCH,
        seconds=seconds,
    )


def measure(systems: Sequence[System], longest: float, seed: int, folder: Path) -> Results:
    """Run every system without faults and at each rate, rate by rate."""
    found: Results = {}
    for mtbf, length in LENGTHS.items():
        seconds = length * longest
        faults = list(stream(mtbf, seconds, seed))
        for system in systems:
            run = Stream(system, folder / f"{system.name}-{mtbf:g}", faults, seconds)
            found[system, mtbf] = one = result(run.run(), seconds)
            print(f"{system.title}, MTBF {mtbf:g} s: {one}", flush=True)
    return found


def goodputs(found: Results) -> dict[System, list[float]]:
    """Return the goodput of each system at each of `RATES_S`."""
    quiet = {system: one.samples for (system, mtbf), one in found.items() if not mtbf}
    return {s: [found[s, rate].samples / quiet[s] for rate in RATES_S] for s in quiet}


def lost_per_fault(found: Results, system: System) -> float:
    """Return the seconds of training that a fault costs, over all runs of ``system``."""
    lost = [
        (1 - goodput) * found[system, rate].seconds
        for rate, goodput in zip(RATES_S, goodputs(found)[system], strict=True)
    ]
    return sum(lost) / max(1, sum(found[system, rate].faults for rate in RATES_S))


def lines_of(found: Results) -> list[str]:
    """Return the table of the page."""
    headings = ["system", *(f"MTBF {rate:g} s" for rate in RATES_S)]
    headings += ["faults (missed)", "lost per fault, s"]
    headings += ["lost per day at Llama 3's rate, min", "repeated samples"]
    rows = []
    for system, shares in goodputs(found).items():
        runs = [found[system, rate] for rate in RATES_S]
        lost = lost_per_fault(found, system)
        cells = [f"{share:.1%}" for share in shares]
        cells.append(f"{sum(run.faults for run in runs)} ({sum(run.missed for run in runs)})")
        cells += [f"{lost:.2f}", f"{1440 * lost / LLAMA_MTBF_S:.1f}"]
        cells.append(str(sum(run.repeated for run in runs)))
        rows.append([system.title, *cells])
    return markdown(headings, rows)


def plot(found: Results, file: Path) -> None:
    """Draw the goodput of each system at each rate."""
    from matplotlib import pyplot  # the extra `bench`

    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    shares = goodputs(found)
    width = 0.8 / len(shares)
    for at, (system, values) in enumerate(shares.items()):
        places = [place + at * width for place in range(len(RATES_S))]
        bars = axes.bar(places, [100 * v for v in values], width, label=system.title)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    middle = 0.4 - width / 2
    axes.set_xticks([i + middle for i in range(len(RATES_S))])
    axes.set_xticklabels([f"a fault every {rate:g} s" for rate in RATES_S])
    axes.set_ylabel("goodput, %")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Measure, print, and with ``--write`` put the table into docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="length of the longest run")
    # of the first five seeds, the one whose numbers of faults are closest to the expected ones
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--system", action="append", choices=[s.name for s in SYSTEMS])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.write and args.system:
        parser.error("--write writes the table of all systems: leave out --system")
    systems = [s for s in SYSTEMS if not args.system or s.name in args.system]
    if NVRX in systems and (why := nvrx.why_not()):
        print(why)
        systems.remove(NVRX)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(systems, args.seconds, args.seed, Path(folder))
    table = lines_of(found)
    print("\n".join(table))
    if args.write:
        fill(PAGE, "goodput", table)
        plot(found, PLOT)


if __name__ == "__main__":
    main()
