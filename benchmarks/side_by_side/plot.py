"""A plot of the headline: one line per row, one mark per repetition, on a logarithmic scale.

This is the only module that imports matplotlib, which the extra ``bench`` installs.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.side_by_side.measure import Outcome
from benchmarks.side_by_side.page import figure_of, systems_of
from benchmarks.side_by_side.results import Results
from benchmarks.side_by_side.rows import ROWS, Row

_NEVER_MS = 200_000.0
_COLOURS = {"fft": "tab:green", "torchft": "tab:red", "nvrx": "tab:blue"}
_MARKS = {
    "fft": "o", "fft-nats": "p", "fft-txn": "^", "fft-run": "D", "fft-txn-run": "v",
    "fft-restartable": "<", "torchft": "x", "torchft-tuned": "+", "nvrx": "s",
}  # fmt: skip


def _mark_ms(row: Row, one: Outcome) -> float:
    ms = figure_of(row)(one)
    return _NEVER_MS if one.never or ms is None else ms


def draw(results: Results, path: Path) -> None:
    """Write the plot as SVG. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fft"  # equal results give equal files
    from matplotlib import pyplot

    rows = [
        row for row in ROWS.values() if row.fault and any(results.of(row, s) for s in row.systems)
    ]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.42 * len(rows)), layout="constrained")
    for system in systems_of(results):
        places: list[float] = []
        times: list[float] = []
        for number, row in enumerate(rows):
            at = row.systems.index(system) if system in row.systems else 0
            shift = (at - (len(row.systems) - 1) / 2) * 0.16
            found = results.of(row, system)
            at_ms = [_mark_ms(row, one) for one in found]
            places += [number + shift] * len(found)
            times += at_ms
            if any(one.splits for one in found):  # committed soon, but not on all groups
                place = (max(at_ms), number + shift)
                axes.annotate(
                    "split", place, (5, 0), textcoords="offset points", va="center", fontsize=6
                )
        colour, mark = _COLOURS[system.manager], _MARKS[system.name]
        axes.plot(times, places, mark, color=colour, mfc="none", markersize=5, label=system.title)
    axes.set_xscale("log")
    axes.axvline(_NEVER_MS / 1.6, color="grey", linewidth=0.8)
    axes.text(_NEVER_MS, -0.8, "never", ha="center", va="bottom", fontsize=8)
    axes.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(
        "ms from the fault to the next commit of the last survivor (drain, lighthouse: longest gap)"
    )
    axes.grid(axis="x", linewidth=0.4)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
