"""Runs the fault matrix: one job for each suite of a layout, one case after the other in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.cases import PACE_S, Case, Layout, Suite, suites
from benchmarks.chaos.job import ENDED_S, RECOVERED_S, START_S, ChaosError, Job, fault_names
from benchmarks.chaos.measure import Done, Row, median_step_ms, read_lines, rows

Say = Callable[[str], None]


@dataclass
class Result:
    """Of one layout."""

    layout: Layout
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What no job may do; empty, if all is well."""
    steps_ms: dict[str, float] = field(default_factory=dict)
    """Median step by suite."""
    took_s: float = 0.0


def run(layout: Layout, directory: Path, wanted: Callable[[Case], bool], say: Say) -> Result:
    """Every wanted case; traces stay under ``directory``."""
    result, began = Result(layout), time.monotonic()
    for suite in suites(layout):
        if cases := [case for case in suite.cases if wanted(case)]:
            _run(result, suite, cases, directory / suite.name.replace(" ", "-"), say)
    result.took_s = time.monotonic() - began
    return result


def _run(result: Result, suite: Suite, cases: list[Case], directory: Path, say: Say) -> None:
    done: list[Done] = []
    limit = START_S + RECOVERED_S * (1 + len(cases))
    try:
        with Job(result.layout, directory, PACE_S, suite.timeouts, limit) as job:
            job.settle("the whole job is at work", START_S)
            for number, case in enumerate(cases):
                say(f"{result.layout.name} {case.name}")
                done.append(Done(case, fault_names(case, number), time.time()))
                job.commit(case, done[-1].names)
                if suite.ends:
                    job.process.wait(ENDED_S)
                else:
                    job.bring_back(case)
                    job.settle(f"the whole job is at work after {case.name}")
                    done[-1].over = time.time()
            result.problems += _ended_wrongly(job, suite)
    except ChaosError as error:
        result.problems.append(f"{result.layout.name} {suite.name}: {error}")
    if list((directory / "traces").glob("*.jsonl")):
        found = rows(result.layout.name, suite, done, directory / "traces")
        result.rows += found
        result.steps_ms[suite.name] = median_step_ms(
            read_lines(directory / "traces"), result.layout.groups
        )
        result.problems += _violations(result.layout.name, found, suite)


def _violations(layout: str, found: Iterable[Row], suite: Suite) -> list[str]:
    audits = {row.audit for row in found if row.audit.startswith("VIOLATED")}
    return [f"{layout} {suite.name}: {text}" for text in sorted(audits)]


def _ended_wrongly(job: Job, suite: Suite) -> list[str]:
    """A job that is to end by design must say so."""
    if not suite.ends:
        return []
    code, said = job.process.returncode, job.said()
    if code == 1 and "the bus was restarted, and has forgotten the job" in said:
        return []
    return [f"{job.layout.name} {suite.name}: it ended with {code}, and said {said[-500:]!r}"]
