"""A generator of the picture of `make demo` in README: the demo's own output as an SVG.

    make demo | python -m tools.demo_picture

The output is read from standard input and shortened; nothing is drawn by hand. Of the lines that
show the running job, those stay at which a fault fired, or a process started or ended; the text of
the last fault is cut from them, since the table below has it. The table of error places is omitted,
because it has paths of this machine. ``…`` stands for omitted lines.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console

PICTURE = Path(__file__).parents[1] / "docs" / "demo.svg"
WIDTH = 130
LEFT_OUT = "…"
LAST_FAULT = re.compile(r" \[[^|]*\](?=  \||$)")
WEB_FONT = re.compile(r" *@font-face \{.*?\}\n", re.DOTALL)


def shortened(lines: Iterable[str]) -> Iterator[str]:
    """Return the lines of the picture, from all lines of the demo."""
    shown: object = None
    in_places = False
    last = ""
    for line in lines:
        if "exceptions in ranks, and where they were raised" in line:
            in_places = True
        running = re.match(r" *[\d.]+ s  step \d+.*?(\d+ of \d+) planned faults fired", line)
        keep = not in_places and not line.startswith("fft: ")
        if running:
            now = (running[1], re.findall(r"start \d+", line), ": left" in line)
            keep, shown = now != shown, now
        text = LAST_FAULT.sub("", line) if keep else LEFT_OUT
        if text != LEFT_OUT or last != LEFT_OUT:
            yield text
        last = text
        if in_places and line.startswith("└"):
            in_places = False


def picture(lines: Iterable[str]) -> str:
    """Return an SVG of ``lines``, as a terminal would show them."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return WEB_FONT.sub("", console.export_svg(title="make demo", unique_id="demo"))


def main() -> int:
    """Read the output and write the picture. Exit with 1 if the demo did not reach its verdict."""
    lines = sys.stdin.read().splitlines()
    if not any(line.startswith("verdict: ") for line in lines):
        sys.stderr.write("this is not the output of a demo that ended: it has no verdict\n")
        return 1
    svg = picture(shortened(lines))
    PICTURE.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", "utf-8")
    sys.stdout.write(f"{PICTURE}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
