"""Show a diagnosis as a table, and optionally evict the ranks at fault.

Reads traces on request; sends messages on the bus only to evict.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.table import Table
from rich.text import Text

from fft.operate.client import JobClient, OperatorError
from fft.operate.diagnosis.plan import Outcome
from fft.operate.diagnosis.rounds import Report
from fft.operate.drain import evict
from fft.trace.blame import Place, Rollback, place_text
from fft.trace.tail import TraceTail

_GRACE_S = 10.0


def table(report: Report) -> Table:
    """Return a table with one row for each rank."""
    title = f"step {report.step}, epoch {report.epoch}, {len(report.rollbacks)} rollbacks heard of"
    shown = Table(title=title, title_justify="left")
    for name in ("rank", "compute", "memory"):
        shown.add_column(name, no_wrap=True)
    shown.add_column("network", overflow="fold", ratio=1)
    shown.add_column("verdict", no_wrap=True)
    culprits = {culprit.rank: culprit for culprit in report.verdict.culprits}
    for rank in report.ranks:
        alone = report.findings.alone.get(rank, {})
        verdict = culprits[rank].how if rank in culprits else _innocent(report, rank)
        shown.add_row(
            Text(place_text(rank)),
            _cell(alone, "compute"),
            _cell(alone, "memory"),
            Text(_network(report, rank)),
            Text(verdict, style="bold red" if rank in culprits else ""),
        )
    return shown


def _cell(checks: Mapping[str, Outcome], kind: str) -> Text:
    outcome = checks.get(kind)
    if outcome is None or outcome.ok is None:
        return Text("-")
    word = "ok" if outcome.ok else "FAILED"
    return Text(f"{word} {outcome.seconds:.2f} s", style="" if outcome.ok else "red")


def _network(report: Report, rank: Place) -> str:
    met = [
        f"{'ok' if m.ok else 'FAILED'} with {place_text(m.other(rank))} {m.seconds:.2f} s"
        for m in report.findings.meetings
        if rank in m.pair
    ]
    return ", ".join(met) or "-"


def _innocent(report: Report, rank: Place) -> str:
    if rank in report.findings.left:
        return "has left"
    return "no answer" if rank in report.findings.silent else "nothing found"


def traced_rollbacks(directory: Path) -> list[Rollback]:
    """Return the rollbacks since the last commit, from the traces of a job."""
    tail = TraceTail(directory)
    try:
        return tail.poll().history.run
    finally:
        tail.close()


def evict_culprits(desk: JobClient, report: Report) -> None:
    """Evict the groups of the culprits and have their processes ended; noted in the report.

    If no group would be left, nothing is evicted, because the job could not continue.
    """
    groups = {rank[0] for rank in report.ranks}
    guilty = list(dict.fromkeys(culprit.rank[0] for culprit in report.verdict.culprits))
    if guilty and groups <= set(guilty):
        report.actions.append("nobody was evicted: no group would be left")
        return
    for group in guilty:
        report.actions.append(evict_group(desk, group))


def evict_group(desk: JobClient, group: str) -> str:
    """Evict the group and return a description of the result."""
    try:
        done = evict(desk, group, restart=False, grace=_GRACE_S, on_accepted=lambda _: None)
    except OperatorError as error:
        return f"group {group} could not be evicted completely: {error}"
    return f"evicted: {done.done}"
