"""The runner of the fault matrix: one job for each suite of a layout, one case after the other."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fft.errors import FftError
from fft.trace.audit import read_lines
from tests.acceptance.chaos.cases import PACE_S, Case, Layout, Suite, suites
from tests.acceptance.chaos.job import (
    ENDED_S,
    ENDS_WELL,
    RECOVERED_S,
    START_S,
    ChaosError,
    Job,
    fault_names,
)
from tests.acceptance.chaos.measure import Done, Row, judged, median_step_ms, rows

Say = Callable[[str], None]


@dataclass
class Result:
    """The results of one layout."""

    layout: Layout
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Violations of the requirements for every job; empty if there are none."""
    steps_ms: dict[str, float] = field(default_factory=dict)
    """Median step by suite."""
    took_s: float = 0.0


def run(layout: Layout, directory: Path, wanted: Callable[[Case], bool], say: Say) -> Result:
    """Run every wanted case; traces stay under ``directory``."""
    result, began = Result(layout), time.monotonic()
    for suite in suites(layout):
        if cases := [case for case in suite.cases if wanted(case)]:
            _run(result, suite, cases, directory / suite.name.replace(" ", "-"), say)
    result.took_s = time.monotonic() - began
    return result


def _run(result: Result, suite: Suite, cases: list[Case], directory: Path, say: Say) -> None:
    done: list[Done] = []
    name, traces = f"{result.layout.name} {suite.name}", directory / "traces"
    limit = START_S + RECOVERED_S * (1 + len(cases))
    try:
        with Job(result.layout, directory, PACE_S, suite.timeouts, limit) as job:
            job.settle("the whole job is at work", START_S)
            for number, case in enumerate(cases):
                say(f"{result.layout.name} {case.name}")
                done.append(Done(case, fault_names(case, number), time.time()))
                _carry_out(job, suite, done[-1])
        result.problems += [f"{name}: {text}" for text in _ended_wrongly(job, suite)]
    except (ChaosError, FftError, subprocess.TimeoutExpired) as error:
        result.problems.append(f"{name}: {error}")
    if not list(traces.glob("*.jsonl")):
        return
    audit, lines = judged(traces, suite.allowed), read_lines(traces)
    if audit.startswith("VIOLATED"):
        result.problems.append(f"{name}: {audit}")
    result.rows += rows(result.layout.name, done, lines, audit)
    result.steps_ms[suite.name] = median_step_ms(lines, result.layout.groups)


def _carry_out(job: Job, suite: Suite, one: Done) -> None:
    job.commit(one.case, one.names)
    if suite.ends:
        job.process.wait(ENDED_S)
        return
    job.bring_back(one.case)
    job.settle(f"the whole job is at work after {one.case.name}")
    one.over = time.time()


def _ended_wrongly(job: Job, suite: Suite) -> Iterator[str]:
    """Yield the problems with a job's end.

    A drained job must end well, and one that ends by design must report it.
    """
    code, said = job.process.returncode, job.said()
    is_told = "the bus was restarted, and has forgotten the job" in said
    ended_well = code == 1 and is_told if suite.ends else code in ENDS_WELL
    if not ended_well:
        yield f"it ended with {code}, and said {said[-500:]!r}"
