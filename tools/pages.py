"""Tables and other lines in the Markdown pages that benchmarks write."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table as lines of Markdown."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in r) + " |" for r in rows]


def spread(values: Sequence[float]) -> str:
    """Return a cell: the median, and in brackets the minimum and the maximum."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def fill(page: Path, name: str, lines: Iterable[str]) -> None:
    """Put ``lines`` between the markers of ``name``.

    Raises ValueError if the markers are missing.
    """
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page}: needs the markers {begin} and {end}, once each")
    head, tail = text.split(begin)[0], text.split(end)[1]
    page.write_text("\n".join([head + begin, *lines, end + tail]), encoding="utf-8")
