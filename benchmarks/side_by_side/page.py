"""The tables of a run, for the terminal and for docs/benchmarks.md, between its markers.

Every number of the page comes from the results through this module; none is typed by hand.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.side_by_side.legs import FIRST, LEGS
from benchmarks.side_by_side.machine import in_words
from benchmarks.side_by_side.measure import Outcome
from benchmarks.side_by_side.results import Results
from benchmarks.side_by_side.rows import NVRX, ROWS, SYSTEMS, TORCHFT, TUNED, Row, System
from tools.pages import fill, markdown

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "benchmarks.md"
PLOT = DOCS / "benchmarks" / "side_by_side.svg"
KEPT = DOCS / "benchmarks" / "results.jsonl"
HEADLINE = (
    "row", "FFT", "torchft default", "torchft tuned", "NVRx", "FFT ÷ default", "FFT ÷ tuned",
    "target of FFT, and met",
)  # fmt: skip
FAULTS = (
    "row", "system", "n", "fault → next commit", "target", "→ all contribute", "longest gap",
    "attempts lost", "needless transfers", "split commits", "phantom commits", "mismatches",
    "died",
)  # fmt: skip
QUIET = (
    "row", "system", "n", "step p50", "÷ torchft", "step p99", "÷ torchft", "protocol p50",
    "÷ torchft", "protocol p99", "÷ torchft", "memory MiB", "less torchft",
)  # fmt: skip
LEGS_OF = ("row", "system", "n", *LEGS.values(), "first leg ÷ torchft's protocol")
Figure = Callable[[Outcome], float | int | None]
Cells = tuple[str, ...]


def _value(values: Sequence[float], digits: int) -> str:
    """Return the median, with the range in brackets if there is one."""
    middle, low, high = statistics.median(values), min(values), max(values)
    text = f"{middle:.{digits}f}"
    spread = f"{low:.{digits}f} … {high:.{digits}f}"
    return (
        text
        if len(values) == 1 or f"{low:.{digits}f}" == f"{high:.{digits}f}"
        else (f"{text} ({spread})")
    )


def _cell(found: Sequence[Outcome], figure: Figure, digits: int = 0, missing: str = "-") -> str:
    values = [v for one in found if (v := figure(one)) is not None]
    if not values:
        return missing
    few = f", {len(values)} of {len(found)}" if len(values) < len(found) else ""
    return _value(values, digits) + few


def next_commit(found: Sequence[Outcome]) -> str:
    """Return the first column: how often the commit never came, or how long it took."""
    never = sum(one.never for one in found)
    if never == len(found):
        return f"never (waited {_cell(found, lambda one: one.waited_s)} s)"
    text = _cell([one for one in found if not one.never], lambda one: one.next_commit_ms)
    return f"{text}; never {never} of {len(found)}" if never else text


def median_of(found: Sequence[Outcome], figure: Figure) -> float | None:
    """Return the median, or None if half of the repetitions lack the figure."""
    values = [v for one in found if (v := figure(one)) is not None]
    if not found or 2 * len(values) <= len(found):
        return None
    return statistics.median(values + [float("inf")] * (len(found) - len(values)))


def ratio(mine: Sequence[Outcome], theirs: Sequence[Outcome], figure: Figure) -> str:
    """Return the ratio of the medians."""
    a, b = median_of(mine, figure), median_of(theirs, figure)
    if not mine or not theirs:
        return "-"
    if a is None:
        return "-" if b is None else "∞"
    if b is None:
        return "0 (it never does)"
    return f"{a / b:.3f}" if b else "-"


def _target(row: Row, system: System, found: Sequence[Outcome]) -> str:
    steps = [one.base_step_ms for one in found if one.base_step_ms is not None]
    over = dict(row.over_ms).get(system.name)
    if not steps or (over is None and not (row.gap_steps and system.manager == "fft")):
        return ""
    step, figure = statistics.median(steps), figure_of(row)
    limit = step * row.gap_steps if over is None else step + over + row.threshold_ms(step)
    met = sum((v := figure(one)) is not None and v <= limit for one in found)
    return f"≤ {limit:.0f}: {met} of {len(found)}"


def figure_of(row: Row) -> Figure:
    """Return a row's main figure; if no commit need be lost, it is the longest gap between two."""
    return (lambda one: one.gap_ms) if row.gap_steps else (lambda one: one.next_commit_ms)


def headline(results: Results) -> list[Cells]:
    """Return one line for each row: FFT beside the others, and the ratios."""
    return [
        _headline(results, row)
        for row in ROWS.values()
        if row.fault is not None and any(results.of(row, system) for system in row.systems)
    ]


def _headline(results: Results, row: Row) -> Cells:
    ours = row.systems[0]  # FFT in its recommended form
    mine, figure = results.of(row, ours), figure_of(row)
    by_others = [results.of(row, system) for system in (TORCHFT, TUNED)]

    def cell(found: Sequence[Outcome]) -> str:
        if not found:
            return "-"
        return _cell(found, figure) if row.gap_steps else next_commit(found)

    return (
        row.title + (" (longest gap)" if row.gap_steps else ""),
        cell(mine),
        *(cell(found) for found in (*by_others, results.of(row, NVRX))),
        *(ratio(mine, found, figure) for found in by_others),
        _target(row, ours, mine),
    )


def fault_rows(results: Results) -> list[Cells]:
    """Return one line for each row and system."""
    return [
        _fault_row(results, row, system)
        for row in ROWS.values()
        if row.fault is not None
        for system in _shown(results, row)
    ]


def _shown(results: Results, row: Row) -> list[System]:
    return [s for s in row.systems if results.of(row, s) or results.absence(row, s)]


def _fault_row(results: Results, row: Row, system: System) -> Cells:
    found = results.of(row, system)
    if not found:
        why = f"not measured: {results.absence(row, system)}"
        return (row.title, system.title, "0", why, *([""] * (len(FAULTS) - 4)))
    return (
        row.title,
        system.title,
        str(len(found)),
        next_commit(found),
        _target(row, system, found),
        _cell(found, lambda one: one.whole_ms, missing="never" if row.whole_s else "-"),
        _cell(found, lambda one: one.gap_ms),
        _cell(found, lambda one: one.attempts_lost),
        _cell(found, lambda one: one.transfers),
        _cell(found, lambda one: one.splits),
        _cell(found, lambda one: one.phantoms),
        _cell(found, lambda one: one.mismatches),
        _cell(found, lambda one: one.died),
    )


def quiet_rows(results: Results) -> list[Cells]:
    """Return the lines of the rows without a fault."""
    return [
        _quiet_row(results, row, system)
        for row in ROWS.values()
        if row.fault is None
        for system in _shown(results, row)
    ]


def _quiet_row(results: Results, row: Row, system: System) -> Cells:
    found, plain = results.of(row, system), results.of(row, TORCHFT)
    cells = [row.title, system.title, str(len(found))]
    figures: list[Figure] = [
        lambda one: one.step_p50_ms,
        lambda one: one.step_p99_ms,
        lambda one: one.cost_p50_ms,
        lambda one: one.cost_p99_ms,
    ]
    for figure in figures:
        cells.append(_cell(found, figure, 2))
        cells.append(ratio(found, plain, figure) if system.manager == "fft" else "")
    cells.append(_cell(found, lambda one: one.memory_mib))
    mine, theirs = (median_of(f, lambda one: one.memory_mib) for f in (found, plain))
    if mine is None or theirs is None or system.manager != "fft":
        return (*cells, "")
    return (*cells, f"{mine - theirs:+.0f}")


def leg_rows(results: Results) -> list[Cells]:
    """Return the parts of the protocol's time of a step, by FFT's traces."""
    return [
        (
            row.title,
            system.title,
            str(len(found)),
            *(_value([of[leg] for of in found], 2) for leg in LEGS),
            _of_theirs(results, row, statistics.median(of[FIRST] for of in found)),
        )
        for row in ROWS.values()
        for system in row.systems
        if (found := results.legs_of(row, system))
    ]


def _of_theirs(results: Results, row: Row, ms: float) -> str:
    """Return the share of torchft's protocol, which any system spends that waits for all groups."""
    theirs = median_of(results.of(row, TORCHFT), lambda one: one.cost_p50_ms)
    return f"{ms / theirs:.2f}" if theirs else "-"


def in_full(results: Results) -> list[str]:
    """Return the lines between the markers."""
    lines = [f"- Measured on {in_words(machine)}." for machine in results.machines()]
    quiet, faults = quiet_rows(results), fault_rows(results)
    if not (quiet or faults):
        return ["Not measured yet."]
    if faults:
        lines += ["", "### Fault → next commit of the last survivor, ms: median (range)", ""]
        lines += markdown(HEADLINE, headline(results))
        lines += ["", f"![Fault to next commit]({PLOT.relative_to(DOCS)})"]
        lines += ["", "### All columns of the rows with a fault", "", "Times in ms.", ""]
        lines += markdown(FAULTS, faults)
    else:
        lines += ["", "The rows with a fault have not been measured yet."]
    if quiet:
        lines += ["", "### Without a fault", "", "Times in ms: median (range) of repetitions.", ""]
        lines += markdown(QUIET, quiet)
    if found := leg_rows(results):
        lines += ["", "### Where the protocol's time goes in FFT", ""]
        lines += ["By its traces, in ms: the median step, and the range of repetitions.", ""]
        lines += markdown(LEGS_OF, found)
    return lines


def write(results: Results) -> None:
    """Fill the page, and keep the results beside it."""
    fill(PAGE, "side-by-side", in_full(results))
    KEPT.parent.mkdir(exist_ok=True)
    shutil.copyfile(results.directory / "results.jsonl", KEPT)


def systems_of(results: Results) -> list[System]:
    """Return all systems with a result, in the order of the table."""
    named = {r["system"] for r in results.records if r["kind"] == "repetition"}
    return [system for name, system in SYSTEMS.items() if name in named]
