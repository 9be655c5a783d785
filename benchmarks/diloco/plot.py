"""A plot of the loss over synchronizations, one line for each job, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 820, 420, 60, 30, 190, 55
_STYLE = {
    "fft": ("FFT, faults", "#1d5fa8", ""),
    "torchft": ("torchft, faults", "#b3261e", ""),
    "fft-clean": ("FFT, no fault", "#1d5fa8", "2 3"),
    "torchft-clean": ("torchft, no fault", "#b3261e", "2 3"),
}
_MARKS = {"exception": "e", "one_sided": "o", "kill": "k"}
Curve = Sequence[tuple[int, float]]


def title(job: str) -> str:
    """Return the label of a job."""
    return _STYLE[job][0]


def svg(
    curves: Mapping[str, Curve], faults: Mapping[str, Sequence[tuple[int, str]]], outer: int
) -> str:
    """Return the plot as SVG.

    Args:
        curves: Points (synchronization, loss) by job.
        faults: Faults (synchronization, kind) by job.
        outer: Number of synchronizations of a run.
    """
    losses = [loss for points in curves.values() for _, loss in points]
    low, high = math.floor(min(losses) * 5) / 5, math.ceil(max(losses) * 5) / 5
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(step: float, loss: float) -> tuple[float, float]:
        return _LEFT + step / outer * width, _TOP + (high - loss) / (high - low) * height

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12" stroke-width="1.5">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for number in range(round((high - low) * 5) + 1):
        _, y = place(0, low + number / 5)
        if number % 2 == 0:
            parts.append(f'<path d="M{_LEFT} {y:.1f}h{width}" stroke="#ddd"/>')
            parts.append(_text(_LEFT - 8, y + 4, f"{low + number / 5:.1f}", "end"))
    for step in range(0, outer + 1, max(1, outer // 6)):
        x, _ = place(step, low)
        parts.append(_text(x, _HEIGHT - _BOTTOM + 34, str(step)))
    parts.append(_text(_LEFT + width / 2, _HEIGHT - 6, "synchronisations"))
    parts.append(_text(_LEFT, _TOP - 12, "loss of the job's parameters on held-out text", "start"))
    for row, (job, points) in enumerate(curves.items()):
        words, colour, dash = _STYLE[job]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in points))
        stroke = f'stroke="{colour}" fill="none" stroke-dasharray="{dash}"'
        parts.append(f'<path d="M{path}" {stroke}/>')
        y = _TOP + 20 + 18 * row
        parts.append(f'<path d="M{_WIDTH - _RIGHT + 20} {y - 4}h30" {stroke}/>')
        parts.append(_text(_WIDTH - _RIGHT + 58, y, words, "start"))
    for row, (job, found) in enumerate(faults.items()):
        for step, kind in found:
            x, _ = place(step, low)
            y = _HEIGHT - _BOTTOM + 10 + 10 * row
            parts.append(_text(x, y, _MARKS[kind], colour=_STYLE[job][1], size=9))
    marks = ", ".join(f"{mark}: {kind.replace('_', '-')}" for kind, mark in _MARKS.items())
    parts.append(_text(_WIDTH - 8, _HEIGHT - _BOTTOM + 15, marks, "end", size=10))
    return "\n".join([*parts, "</svg>", ""])


def _text(
    x: float, y: float, words: str, anchor: str = "middle", colour: str = "#333", size: int = 12
) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {at} fill="{colour}">{words}</text>'
