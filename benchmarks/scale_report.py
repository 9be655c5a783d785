"""Tables and plot of `scale.py`: reads the stored results, computes the sizes that were not run.

Requests of these sizes are counted by `benchmarks.scale_model.formula`. Their times and bytes lie
on the parabola through the three largest sizes that were run, because a job's cost has no higher
power of its size. The distance of the other sizes from it is given beside the tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.scale_model.costs import DESIGNS
from benchmarks.scale_model.formula import PhaseName, counts

SIZES = (10, 100, 1_000, 10_000)
PHASES: tuple[PhaseName, ...] = ("step", "rollback", "kill")
WORDS = {
    "step": "One step",
    "rollback": "A fault on one rank: rolled back, same members",
    "kill": "A group killed: rolled back, new member list",
    "start": "The start: every process joins at once",
}
BODY = 0.045
BEGIN, END = "<!-- scale: begin -->", "<!-- scale: end -->"
Row = dict[str, Any]
Label = tuple[float, float, str, str]
"""y, x, text, colour."""


class Results:
    """The measured costs of one design, and the computed ones of other sizes."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.name: str = data["design"]
        self.label: str = data.get("label", "")
        self.ranks: int = data["ranks"]
        self.handling: dict[str, list[float]] = data["handling_us"]
        self.phases: list[Row] = [self._flat(p) for p in data["phases"]]

    @staticmethod
    def _flat(phase: Row) -> Row:
        latency = phase["latency"] or [None, None]
        return {
            **phase,
            "requests": sum(phase["operations"].values()),
            "median": latency[0],
            "last": latency[1],
            "ack_window": phase["window"].get("ack_window"),
        }

    def of(self, phase: str) -> list[Row]:
        """Return the sizes that were run, small ones first."""
        return sorted((p for p in self.phases if p["name"] == phase), key=lambda p: p["groups"])

    def at(self, phase: PhaseName, groups: int) -> Row:
        """Return one size, run or computed; for a kill, with one group less."""
        left = groups - (phase == "kill")
        run = [p for p in self.of(phase) if p["groups"] == left]
        return run[0] if run else self.computed(phase, left)

    def computed(self, phase: PhaseName, groups: int) -> Row:
        """Compute a size that was not run."""
        n = groups * self.ranks
        operations = counts(DESIGNS[self.name], phase, groups, self.ranks)
        row: Row = {"name": phase, "groups": groups, "participants": n, "computed": True}
        row["requests"] = sum(operations.values())
        row["heard"] = operations["hear"] + operations["pop"]
        for what in ("bytes", "busy", "span", "formed", "last", "ack_window"):
            row[what] = self.curve(phase, what)(n)
        row["median"] = None
        return row

    def curve(self, phase: str, what: str) -> Callable[[float], float | None]:
        """Return the parabola through the three largest sizes run."""
        points = [(p["participants"], p[what]) for p in self.of(phase)][-3:]
        if len(points) < 3 or any(value is None for _, value in points):
            return lambda n: None
        return lambda n: _through(points, n)

    def misfit(self, phase: str, what: str) -> float:
        """Return the deviation of the largest size that the parabola was not drawn through."""
        rest = self.of(phase)[:-3]
        value = self.curve(phase, what)(rest[-1]["participants"]) if rest else None
        return 0.0 if value is None else abs(value / rest[-1][what] - 1.0)

    def reaches(self, phase: str, what: str, limit: float) -> float:
        """Return the number of participants at which the curve reaches ``limit``."""
        curve = self.curve(phase, what)
        low, high = 1.0, 1e7
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            value = curve(middle)
            low, high = (middle, high) if (value or 0.0) < limit else (low, middle)
        return low


def _through(points: list[tuple[float, float]], n: float) -> float:
    """Return the value at ``n`` of the polynomial through the points, in Lagrange's form."""
    total = 0.0
    for i, (x, y) in enumerate(points):
        for j, (other, _) in enumerate(points):
            if i != j:
                y *= (n - other) / (x - other)
        total += y
    return total


# --- words --------------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    """Format a time for people."""
    if value is None or value <= 0.0:
        return ""
    for unit, factor, limit in (("µs", 1e6, 1e-3), ("ms", 1e3, 1.0), ("s", 1.0, 600.0)):
        if value < limit:
            return f"{_round(value * factor)} {unit}"
    return f"{_round(value / 60)} min" if value < 36_000 else f"{_round(value / 3600)} h"


def size(value: float) -> str:
    """Format a size in bytes for people."""
    for unit, factor in (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if value < 1000 * factor:
            return f"{_round(value / factor)} {unit}"
    return f"{_round(value / 1e12)} TB"


def _round(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def count(value: float) -> str:
    """Format a number with separated thousands."""
    return f"{value:,.0f}"


def table(phase: PhaseName, designs: list[Results]) -> list[str]:
    """Return the table of one phase in all sizes and designs."""
    step = phase == "step"
    times = "decision heard: half / all" if step else "next epoch formed"
    lines = [
        f"**{WORDS[phase]}.**",
        "",
        f"| groups x ranks | design | requests | messages heard | bytes | store works | {times} |"
        f" {'beyond the body' if step else 'until all go on'} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for groups in SIZES:
        for design in designs:
            row = design.at(phase, groups)
            mark = " °" if row.get("computed") else ""
            if step:
                when = " / ".join(filter(None, (seconds(row["median"]), seconds(row["last"]))))
            else:
                when = seconds(row["formed"])
            lines.append(
                f"| {count(groups)} x {design.ranks} | {design.name}{mark} "
                f"| {count(row['requests'])} | {count(row['heard'])} | {size(row['bytes'])} "
                f"| {seconds(row['busy'])} | {when} | {seconds(row['span'])} |"
            )
    return [*lines, ""]


def starts(designs: list[Results]) -> list[str]:
    """Return the table of the start, in the sizes that were run."""
    lines = [
        f"**{WORDS['start']}.**",
        "",
        "| groups x ranks | design | requests | messages heard | bytes | store works "
        "| first epoch formed | until all go on |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [(row["groups"], d, row) for d in designs for row in d.of("start")]
    for groups, design, row in sorted(rows, key=lambda r: (r[0], designs.index(r[1]))):
        lines.append(
            f"| {groups} x {design.ranks} | {design.name} | {count(row['requests'])} "
            f"| {count(row['heard'])} | {size(row['bytes'])} | {seconds(row['busy'])} "
            f"| {seconds(row['formed'])} | {seconds(row['span'])} |"
        )
    return [*lines, ""]


def limits(designs: list[Results], calibration: dict[str, Any]) -> list[str]:
    """Return the limits of each design."""
    lines = [
        "**Where it ends**, in participants (ranks of all groups).",
        "",
        "| limit | " + " | ".join(d.name for d in designs) + " |",
        "|---|" + "---|" * len(designs),
    ]
    rows: list[tuple[str, str, str, float]] = [
        ("the store works for 45 ms of a 45 ms step", "step", "busy", BODY),
        ("a step of 45 ms takes 10 % longer", "step", "span", BODY / 10),
        ("the store works for 1 s of a rollback", "rollback", "busy", 1.0),
        ("acknowledgements take `ack_window`, 1 s", "rollback", "ack_window", 1.0),
        ("a lost group costs 1 s", "kill", "span", 1.0),
    ]
    for words, phase, what, limit in rows:
        found = (count(float(f"{d.reaches(phase, what, limit):.2g}")) for d in designs)
        lines.append(f"| {words} | " + " | ".join(found) + " |")
    add = calibration["operation_us"]["add"] * 1e-6
    watch = calibration["looks_per_second"]
    alone = count(float(f"{1 / (watch * add):.2g}"))
    lines.append(f"| listeners' own looks at the ring fill the store | {alone} | |")
    return [*lines, ""]


def fit(designs: list[Results]) -> list[str]:
    """Return how accurate the computed figures are."""
    worst = {
        what: max(d.misfit(phase, what) for d in designs for phase in PHASES)
        for what in ("busy", "bytes", "span")
    }
    runs = "; ".join(
        f"{d.name}: {', '.join(str(row['groups']) for row in d.of('step'))} groups"
        + (f" (engine of {d.label})" if d.label else "")
        for d in designs
    )
    return [
        f"Run event by event: {runs}. ° is computed: requests by the closed form that those runs "
        "meet to the number, the rest by the parabola through the three largest runs; the next "
        f"smaller run lies off it by at most {worst['busy']:.1%} (store), {worst['bytes']:.1%} "
        f"(bytes), {worst['span']:.1%} (time).",
        "",
    ]


def prices(calibration: dict[str, Any], designs: list[Results]) -> list[str]:
    """Return the prices that the model uses."""
    operations, check = calibration["operation_us"], calibration["check"]
    lines = [
        "| at the store, µs each | " + " | ".join(operations) + " |",
        "|---|" + "---|" * len(operations),
        "| | " + " | ".join(f"{value:g}" for value in operations.values()) + " |",
        "",
        f"A byte in: {calibration['byte_in_us'] * 1e3:.2g} ns; out: "
        f"{calibration['byte_out_us'] * 1e3:.2g} ns; one way over the network: "
        f"{calibration['hop_us']:g} µs ({calibration['where']}).",
        "",
        f"Check: a real step of {check['participants']} voters and listeners costs a real store "
        f"{check['measured_us']:g} µs of processor time; these prices add up to "
        f"{check['modelled_us']:g} µs.",
        "",
        "| handling at a participant, µs + µs for each participant of the job | "
        + " | ".join(d.name for d in designs)
        + " |",
        "|---|" + "---|" * len(designs),
    ]
    kinds = sorted({kind for d in designs for kind in d.handling} - {"other"})
    for kind in kinds:
        found = (d.handling.get(kind) for d in designs)
        cells = (f"{line[0]:.0f} + {line[1]:.2f} n" if line else "" for line in found)
        lines.append(f"| `{kind}` | " + " | ".join(cells) + " |")
    return [*lines, ""]


# --- plot ---------------------------------------------------------------------------------------

_COLOURS = {"shipped": "#1d5fa8", "next": "#2e7d32"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _PANEL, _GAP = 980, 420, 70, 50, 360, 150
_X, _Y = (1.0, 4.0), (-4.0, 6.0)
"""Decades of groups and of seconds."""


def _place(panel: int, groups: float, value: float) -> tuple[float, float]:
    x = (math.log10(groups) - _X[0]) / (_X[1] - _X[0])
    y = (math.log10(value) - _Y[0]) / (_Y[1] - _Y[0])
    high = _HEIGHT - _TOP - 60
    return _LEFT + panel * (_PANEL + _GAP) + x * _PANEL, _TOP + (1 - y) * high


def _text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def _axes(panel: int, title: str) -> list[str]:
    parts = []
    left, bottom = _place(panel, 10, 10 ** _Y[0])
    right, top = _place(panel, 10_000, 10 ** _Y[1])
    for decade in range(int(_Y[0]), int(_Y[1]) + 1, 2):
        _, y = _place(panel, 10, 10.0**decade)
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#ddd"/>')
        label = {-4: "0.1 ms", -2: "10 ms", 0: "1 s", 2: "100 s", 4: "2.8 h", 6: "12 d"}[decade]
        parts.append(_text(left - 8, y + 4, label, "end"))
    for decade in range(int(_X[0]), int(_X[1]) + 1):
        x, _ = _place(panel, 10.0**decade, 1.0)
        parts.append(f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}" stroke="#ddd"/>')
        parts.append(_text(x, bottom + 18, f"{10**decade:,}"))
    parts.append(_text((left + right) / 2, bottom + 38, "groups of 8 ranks"))
    parts.append(_text((left + right) / 2, top - 14, title))
    return parts


def _line(panel: int, design: Results, phase: PhaseName, dash: str) -> tuple[list[str], Label]:
    colour, points, dots = _COLOURS[design.name], [], []
    for groups in SIZES:
        row = design.at(phase, groups)
        x, y = _place(panel, groups, row["busy"])
        points.append(f"{x:.1f} {y:.1f}")
        fill = "white" if row.get("computed") else colour
        dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}"/>')
    path = "L".join(points)
    line = f'<path d="M{path}" stroke="{colour}" fill="none" stroke-dasharray="{dash}"/>'
    return [line, *dots], (y, x, design.name + (", group lost" if phase == "kill" else ""), colour)


def _labels(labels: list[Label]) -> list[str]:
    """Place each label beside the end of its line, without overlaps."""
    parts, low = [], -math.inf
    for y, x, words, colour in sorted(labels):
        low = max(y + 4, low + 14)
        parts.append(_text(x + 8, low, words, "start", colour))
    return parts


def plot(designs: list[Results]) -> str:
    """Plot the seconds that the store works over the size of the job, on logarithmic scales."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + 130} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12" stroke-width="1.5">',
        f'<rect width="{_WIDTH + 130}" height="{_HEIGHT}" fill="white"/>',
    ]
    parts += _axes(0, "the store works, for one step") + _axes(1, "the store works, for a rollback")
    left, y = _place(0, 10, BODY)
    right, _ = _place(0, 10_000, BODY)
    parts.append(
        f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#333" stroke-dasharray="2 3"/>'
    )
    parts.append(_text(left + 4, y - 5, "a body of 45 ms", "start"))
    lines: tuple[tuple[int, PhaseName, str], ...] = (
        (0, "step", ""),
        (1, "rollback", ""),
        (1, "kill", "5 4"),
    )
    labels: dict[int, list[Label]] = {0: [], 1: []}
    for panel, phase, dash in lines:
        for design in designs:
            drawn, label = _line(panel, design, phase, dash)
            parts += drawn
            labels[panel].append(label)
    parts += _labels(labels[0]) + _labels(labels[1])
    low = _HEIGHT - 8
    parts.append(_text(_LEFT, low, "filled: run event by event; hollow: computed", "start"))
    return "\n".join([*parts, "</svg>", ""])


# --- all of it ----------------------------------------------------------------------------------


def render(out: Path) -> None:
    """Write ``scale.svg``, and the tables into the page beside the folder, if both exist."""
    calibration = json.loads((out / "calibration.json").read_text())
    found = [out / f"{name}.json" for name in DESIGNS]
    designs = [Results(json.loads(path.read_text())) for path in found if path.exists()]
    lines = limits(designs, calibration)
    for phase in PHASES:
        lines += table(phase, designs)
    lines += starts(designs) + fit(designs)
    (out / "scale.svg").write_text(plot(designs))
    page = out.with_suffix(".md")
    text = page.read_text() if page.exists() else f"{BEGIN}\n{END}\n<!-- prices: begin -->\n"
    text = _between(text, "scale", lines)
    page.write_text(_between(text, "prices", prices(calibration, designs)))


def _between(text: str, name: str, lines: list[str]) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return "\n".join([head + begin, *lines, end]) + (tail or "\n")
