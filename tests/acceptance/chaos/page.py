"""Tables for the terminal, and docs/chaos.md: each run fills in its own part of the page.

It reads and writes only that page.
"""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path

from rich.table import Table

from tests.acceptance.chaos.alone import FEW
from tests.acceptance.chaos.matrix import Result
from tests.acceptance.chaos.measure import Row
from tests.acceptance.chaos.samples import UNITS
from tests.acceptance.chaos.soak import HUNG_S, Soak
from tools.pages import fill, markdown

PAGE = Path(__file__).resolve().parents[3] / "docs" / "chaos.md"
TARGETS = {"exception": "≤ 20", "one_sided": "≤ 20", "kill": "≤ 20", "hang": "≤ threshold + 50"}
"""Targets for the time until all ranks have received the record, in ms."""
HEADINGS = (
    "kind", "cases", "heard by all", "target", "rolled back", "next commit", "bytes healed",
    "audit",
)  # fmt: skip
_NOTICED = 90
_THRESHOLD = re.compile(r"hangs: .*\(threshold (\d+\.\d+) s")


def machine(load_before: float) -> str:
    """Describe this machine now, and its load as it was before the run."""
    return (
        f"{datetime.now():%Y-%m-%d %H:%M}, {os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}; load average before the run {load_before:.1f}"
    )


def summary(result: Result) -> list[tuple[str, ...]]:
    """Return a row for each kind; times in ms as median / maximum."""
    kinds = dict.fromkeys(row.kind for row in result.rows)
    return [_summary(kind, [r for r in result.rows if r.kind == kind]) for kind in kinds]


def _summary(kind: str, rows: Sequence[Row]) -> tuple[str, ...]:
    def ms(value: Callable[[Row], float | None]) -> str:
        values = [v for row in rows if (v := value(row)) is not None]
        few = f" ({len(values)} of {len(rows)})" if 0 < len(values) < len(rows) else ""
        return f"{statistics.median(values):.0f} / {max(values):.0f}{few}" if values else "-"

    return (
        kind,
        str(len(rows)),
        ms(lambda row: row.heard_ms),
        TARGETS.get(kind, "") + _beyond(rows),
        ms(lambda row: row.rolled_back_ms),
        ms(lambda row: row.next_commit_ms),
        str(max(row.bytes_healed for row in rows)),
        "; ".join(sorted({row.audit for row in rows})),
    )


def _beyond(rows: Iterable[Row]) -> str:
    """Return how long after the threshold hangs were reported, if a monitor named the threshold."""
    found = ((row.heard_ms, _THRESHOLD.search(row.noticed)) for row in rows)
    over = [heard - float(m[1]) * 1e3 for heard, m in found if heard is not None and m is not None]
    if not over:
        return ""
    return f"; was threshold + {statistics.median(over):.0f} / {max(over):.0f} ({len(over)} cases)"


def matrix_table(result: Result) -> Table:
    """Return the summary for the terminal."""
    table = Table(title=f"{result.layout.title}: ms, median / maximum")
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold")
    for row in summary(result):
        table.add_row(*row)
    return table


def soak_lines(soak: Soak) -> list[str]:
    """Return a random run in lines of markdown."""
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(soak.faults.items()))
    checks = soak.checks.get("agreement", 0), soak.checks.get("replicas_equal", 0)
    data, inner = soak.data, soak.inner
    goodput = f"; clean step {soak.clean_step_ms:.0f} ms; **goodput {soak.goodput:.1%}**"
    if math.isnan(soak.clean_step_ms):
        goodput = ""  # there are no two commits in one epoch
    alone = []
    if inner is not None:
        alone = [
            f"- Inner steps: {inner.done} committed by their groups ({inner.steps} for a "
            f"synchronisation), {inner.counted} in a synchronisation, {inner.repeated} repeated, "
            f"begun anew {inner.torn} times; clean inner step {inner.clean_ms:.0f} ms; **goodput "
            f"by inner steps {inner.goodput(soak.layout.groups, soak.wall_s):.1%}**.",
            f"- Loss of an inner step, mean of the first and of the last {FEW}: "
            f"{inner.first_loss:.2f}, {inner.last_loss:.2f}.",
        ]
    return [
        f"- {soak.seconds:.0f} s, seed {soak.seed}: {sum(soak.faults.values())} faults ({kinds}); "
        f"{soak.missed} more were drawn for a group that was away just then.",
        f"- {soak.commits} commits, {soak.aborts} rollbacks, {soak.epochs} epochs in "
        f"{soak.wall_s:.0f} s{goodput}.",
        *alone,
        f"- Slices of the data consumed once / twice / never: **{data}**, of {data.granted} "
        f"granted; {data.held} are held or returned at the end.",
        f"- Violations found by the audit: {len(soak.splits)}, divergent checksums: "
        f"{soak.divergent} ({checks[0]} and {checks[1]} checks of agreement and of equal "
        "replicas).",
        f"- Longest time between two commits {soak.longest_gap_s:.1f} s; hangs (more than "
        f"{HUNG_S:.0f} s): {soak.hangs}.",
        f"- Memory, descriptors, threads, bus keys: {'steady' if soak.steady else 'NOT STEADY'}.",
        *(f"- **{text}**" for text in [*soak.splits, *soak.problems]),
    ]


def soak_table(soak: Soak) -> list[tuple[str, ...]]:
    """Return a table of the samples."""
    return [
        (
            s.place,
            UNITS[s.what],
            *(f"{v:.0f}" for v in (s.first, s.last, s.low, s.high, s.early, s.late, s.bound)),
            "steady" if s.steady else "GROWS",
        )
        for s in soak.series
    ]


SAMPLED = (
    "of", "what", "first", "last", "min", "max", "first third", "last third", "bound", "verdict",
)  # fmt: skip


# --- the page ---------------------------------------------------------------------------


def write_matrix(result: Result, load_before: float) -> None:
    """Write the part of one layout."""
    details = [
        "layout,kind,phase,place,noticed by,heard by all ms,rolled back ms,next commit ms,"
        "attempts lost,bytes healed",
        *map(_csv, result.rows),
    ]
    steps = ", ".join(f"{name} {ms:.0f}" for name, ms in result.steps_ms.items())
    fill(
        PAGE,
        f"matrix-{result.layout.name}",
        [
            f"Measured {machine(load_before)}. {len(result.rows)} cases in {result.took_s:.0f} s; "
            f"median step of the jobs in ms: {steps}.",
            *(f"\n**{problem}**" for problem in result.problems),
            "",
            *markdown(HEADINGS, summary(result)),
            "",
            f"<details><summary>All {len(result.rows)} cases</summary>",
            "",
            "```",
            *details,
            "```",
            "",
            "</details>",
        ],
    )


def write_soak(soak: Soak, load_before: float) -> None:
    """Write the part of the random run of one layout."""
    lines = [f"Measured {machine(load_before)}.", "", *soak_lines(soak), ""]
    name = "-".join(filter(None, ["random", soak.layout.name, soak.trainer]))
    fill(PAGE, name, [*lines, *markdown(SAMPLED, soak_table(soak))])


def _csv(row: Row) -> str:
    times = (row.heard_ms, row.rolled_back_ms, row.next_commit_ms)
    noticed = row.noticed[:_NOTICED].replace('"', "'")
    cells = [row.layout, row.kind, row.phase, row.place, f'"{noticed}"']
    cells += ["" if ms is None else f"{ms:.1f}" for ms in times]
    return ",".join([*cells, str(row.attempts_lost), str(row.bytes_healed)])
