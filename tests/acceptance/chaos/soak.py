"""A long random run: faults drawn from a seed hit one job at any time.

Faults that may end a process wait until every group has the state: a job cannot continue after its
last group with the state has ended. All other faults come at any time, including while an epoch is
being formed.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.slices import Slices, slices
from fft.errors import FftError
from fft.messages.fault_plans import AnyFault, DrainFault, FaultPlan
from fft.operate import inject
from fft.operate.client import OperatorError
from fft.trace.audit import audit_dir, read_lines
from fft.trace.format import scope_folders
from tests.acceptance.chaos.alone import ALONE, NOTES, Inner, inner_of
from tests.acceptance.chaos.cases import Layout
from tests.acceptance.chaos.job import ENDS_WELL, START_S, ChaosError, Job
from tests.acceptance.chaos.matrix import Say
from tests.acceptance.chaos.measure import median_step_ms
from tests.acceptance.chaos.samples import Sampler, Series

PACE_S = 0.2
EVERY_S = 5.0
"""Mean time between faults; the times are also drawn from the seed."""
SAMPLE_S = 2.0
HUNG_S = 30.0
"""Seconds without a commit after which the job counts as hung."""
DEADLY = frozenset({"kill", "stop", "hang", "drain"})
"""Faults that may end a process. The monitor ends a hang that no signal unwinds."""
DRAIN_EVERY = 5
"""Interval of drains among the faults of local groups; a drained group is restarted."""
TIMEOUTS = ("hang_grace=3",)
"""Timeouts that make the monitor end a process that is stopped for 5 s."""
_TICK_S = 0.1
_STAGES_APART = 2
"""Maximum distance in steps of stages with a scope each; the driver observes the first stage's
step."""
_APART = 10
"""Steps between faults that may end a process; the previous one has begun by then, or is over."""


@dataclass
class Soak:
    """The result of a run."""

    layout: Layout
    seed: int
    seconds: float
    trainer: str | None = None
    """The loop of `trainer.py`, or None for the benchmarks' own step function."""
    faults: Counter[str] = field(default_factory=Counter)
    """Number of faults that fired, by kind."""
    missed: int = 0
    """Number of faults that were drawn for a place without a process at that moment."""
    commits: int = 0
    aborts: int = 0
    epochs: int = 0
    wall_s: float = 0.0
    """Seconds from the first commit to the last."""
    clean_step_ms: float = 0.0
    longest_gap_s: float = 0.0
    hangs: int = 0
    splits: list[str] = field(default_factory=list)
    """Violations that the audit found."""
    divergent: int = 0
    """Number of these that are replicas with different states."""
    checks: dict[str, int] = field(default_factory=dict)
    """Number of checks of each guarantee by the audit."""
    data: Slices = field(default_factory=lambda: Slices(0, 0, 0, 0, 0))
    inner: Inner | None = None
    """The inner steps, if groups train locally."""
    series: list[Series] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Return committed steps x median clean step / wall: the share of the time that counted."""
        return self.commits * self.clean_step_ms / 1e3 / self.wall_s if self.wall_s else 0.0

    @property
    def steady(self) -> bool:
        """Whether no resource has grown beyond its bound."""
        return all(series.steady for series in self.series)

    @property
    def ok(self) -> bool:
        """Whether the run met all requirements."""
        learned = self.inner is None or self.inner.learned
        clean = not (self.problems or self.splits or self.hangs) and self.data.exact
        return clean and self.steady and learned


def run(
    layout: Layout,
    directory: Path,
    seconds: float,
    seed: int,
    say: Say,
    trainer: str | None = None,
) -> Soak:
    """Inject random faults into a job for ``seconds``; traces stay under ``directory``."""
    soak = Soak(layout, seed, seconds, trainer)
    try:
        with Job(layout, directory, PACE_S, TIMEOUTS, START_S * 3 + seconds, trainer) as job:
            job.settle("the whole job is at work", START_S)
            sampler = Sampler(job.process.pid)
            _Driver(job, soak, sampler, say).drive(seconds, seed)
            job.settle("the whole job is at work after the last fault")
            soak.series = sampler.series()
        if job.process.returncode not in ENDS_WELL:
            code, said = job.process.returncode, job.said()[-800:]
            soak.problems.append(f"fft run ended with {code}: {said}")
    except (ChaosError, FftError, subprocess.TimeoutExpired) as error:
        soak.problems.append(str(error))
    _judge(soak, directory / "traces")
    return soak


class _Driver:
    """A loop that injects and samples on the caller's thread until the time is over."""

    def __init__(self, job: Job, soak: Soak, sampler: Sampler, say: Say) -> None:
        self._job, self._soak, self._sampler, self._say = job, soak, sampler, say
        self._safe_from = 0
        """The step from which a fault may again end a process."""
        self._whole: tuple[tuple[int, ...] | None, int] = (None, 0)
        """The last epoch in which the whole job was seen working, and the step at which it
        began."""
        self._leaving: str | None = None
        """The group that is being drained."""

    def drive(self, seconds: float, seed: int) -> None:
        count = int(seconds / EVERY_S * 2) + 10
        state = self._job.desk.job()
        drawn: Iterable[AnyFault] = inject.drawn(state, "any", seed, count, 1, 0, {}).faults
        if self._soak.trainer in ALONE:
            drawn = with_drains(drawn)
        draw, faults = random.Random(seed), iter(drawn)
        began = now = time.monotonic()
        fault, due = next(faults), began + draw.expovariate(1 / EVERY_S)
        sample_at = began
        while (now := time.monotonic()) < began + seconds:
            if self._job.process.poll() is not None:
                raise ChaosError(f"the job has ended: {self._job.said()[-2000:]}")
            if now >= sample_at:
                self._sample()
                sample_at = now + SAMPLE_S
            if self._leaving is not None and self._job.has_ended(self._leaving):
                self._job.start_again(self._leaving)
                self._leaving = None
            if now >= due and self._may(fault):
                self._inject(fault)
                fault, due = next(faults), time.monotonic() + draw.expovariate(1 / EVERY_S)
            time.sleep(_TICK_S)

    def _may(self, fault: AnyFault) -> bool:
        if fault.kind not in DEADLY:
            return True
        epoch, step = self._job.whole_epoch(), self._job.tail.view.step
        if epoch != self._whole[0]:
            self._whole = (epoch, step)
        # a joiner has the state only with the first commit of the epoch
        has_state = step > self._whole[1] + _STAGES_APART
        return epoch is not None and has_state and step >= self._safe_from

    def _inject(self, fault: AnyFault) -> None:
        soak, job = self._soak, self._job
        if fault.kind in DEADLY:
            self._safe_from = job.tail.poll().step + _APART
        state = job.desk.job()
        if getattr(fault, "group", None) not in state.groups:
            soak.missed += 1
            return
        try:
            said = inject.send(job.desk, state, FaultPlan(faults=[fault]))
        except OperatorError as error:
            said = [inject.Said(False, str(error))]
        if fault.kind == "drain" and said[0].ok:
            self._leaving = fault.group
        self._say(f"{soak.layout.name} step {job.tail.view.step}: {said[0].text}")

    def _sample(self) -> None:
        if self._job.whole_epoch() is None:
            return  # the number of connections depends on the number of processes
        keys = self._job.desk.bus.key_count(messages=False)
        if (epoch := self._job.desk.job().epoch) is None:
            return
        entries = (*epoch.members, *(each.entry for each in epoch.standing))
        trainers = {
            rank.pid: f"{entry.group}/{rank.rank}" for entry in entries for rank in entry.ranks
        }
        self._sampler.sample(time.time(), keys, trainers)


def with_drains(faults: Iterable[AnyFault]) -> Iterator[AnyFault]:
    """Replace every `DRAIN_EVERY`-th fault by a drain of its group."""
    for number, fault in zip(itertools.count(1), faults, strict=False):
        group = getattr(fault, "group", None)
        if number % DRAIN_EVERY or group is None:
            yield fault
        else:
            yield DrainFault(name=fault.name, kind="drain", step=fault.step, group=group)


def _judge(soak: Soak, traces: Path) -> None:
    """Fill in the results from all traces, which takes some minutes after an hour's run."""
    if not list(traces.glob("*.jsonl")):
        return
    report = audit_dir(traces)
    soak.checks = {finding.name: finding.checks for finding in report.findings}
    violated = [finding for finding in report.findings if finding.violation]
    soak.splits = [f"{f.name}: {f.violation} ({f.place})" for f in violated]
    soak.divergent = sum(finding.name == "replicas_equal" for finding in violated)
    lines = read_lines(traces, _tells)
    soak.clean_step_ms = median_step_ms(lines, soak.layout.groups)
    _, *further = scope_folders(traces)
    fired = lines + [line for folder in further for line in read_lines(folder, _is_fault)]
    soak.faults = Counter(line["data"]["kind"] for line in fired if _is_fault(line))
    try:
        soak.data = slices(lines)
    except ValueError as error:
        soak.problems.append(str(error))
    soak.inner = inner_of(lines, soak.data)
    seen: dict[int, tuple[float, dict[str, Any]]] = {}
    for line in lines:
        if record := (line.get("event") or {}).get("record"):
            seen.setdefault(record["n"], (line["wall"], record))
    kinds = Counter(record["kind"] for _, record in seen.values())
    soak.aborts, soak.epochs = kinds["abort"], kinds["epoch"]
    commits = sorted(wall for wall, record in seen.values() if record["kind"] == "commit")
    if len(commits) > 1:
        gaps = [b - a for a, b in pairwise(commits)]
        soak.commits, soak.wall_s = len(gaps), commits[-1] - commits[0]
        soak.longest_gap_s = max(gaps)
        soak.hangs = sum(gap > HUNG_S for gap in gaps)


def _is_fault(line: dict[str, Any]) -> bool:
    return line.get("note") == "inject"


def _tells(line: dict[str, Any]) -> bool:
    """Whether `_judge` needs the line; a long run has too many lines to keep them all."""
    note = line.get("note")
    is_told = note in ("inject", "consumed") or note in NOTES
    return is_told or line.get("on") == "applied" or "record" in (line.get("event") or {})
