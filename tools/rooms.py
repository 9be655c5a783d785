"""The picture of the rooms in DESIGN.md, drawn from the imports of ``fft/``, and the code lines in
the page on trust.

python -m tools.rooms            # writes both again
python -m tools.rooms --check    # exits with 1 if one is not up to date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import grimp

from tools.house import code_lines
from tools.pages import fill

PAGE = Path(__file__).parents[1] / "DESIGN.md"
NAME = "rooms"
TRUST = Path(__file__).parents[1] / "docs" / "explanation" / "trust.md"
USERS = "integrations"
PUBLIC = ("fft.abort", "fft.active", "fft.errors", "fft.health_checks")
"""Modules with names that users import. They are in no room."""
Pair = tuple[str, str]


def imports() -> set[Pair]:
    """Yield (room, imported room), including imports under ``TYPE_CHECKING`` and within
    functions.

    Integrations import ``fft`` as users do, and so the room that their names come from.
    """
    graph = grimp.build_graph("fft")
    pairs = {
        (
            _room(module),
            "train" if imported == "fft" and _room(module) == USERS else _room(imported),
        )
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }
    return {(room, other) for room, other in pairs if room and other and room != other}


def _room(module: str) -> str:
    """Return the room of a module: ``bus`` for ``fft.bus.nats``.

    ``fft`` and the modules of `PUBLIC` are in none.
    """
    return module.split(".")[1] if "." in module and module not in PUBLIC else ""


def direct(pairs: Collection[Pair]) -> Iterator[Pair]:
    """Return the pairs that no path through other rooms implies (the transitive reduction).

    Raises ValueError if rooms import each other in a cycle.
    """
    below: dict[str, set[str]] = {room: set() for pair in pairs for room in pair}
    for room, other in pairs:
        below[room].add(other)
    reached: dict[str, set[str]] = {}

    def reach(room: str, above: tuple[str, ...] = ()) -> set[str]:
        if room in above:
            raise ValueError(f"rooms import each other: {' → '.join([*above, room])}")
        if room not in reached:
            seen = [reach(other, (*above, room)) for other in below[room]]
            reached[room] = below[room].union(*seen)
        return reached[room]

    for room in sorted(below):
        reach(room)
    for room, other in sorted(pairs):
        if not any(other in reached[between] for between in below[room] - {other}):
            yield room, other


def lines(pairs: Collection[Pair]) -> list[str]:
    """Return the picture as lines of Markdown."""
    drawn = [f"    {room} --> {other}" for room, other in direct(pairs)]
    return ["```mermaid", "flowchart TD", *drawn, "```"]


def counted(page: str) -> str:
    """Return the page on trust with the present code lines of its files, rounded to ten.

    Raises ValueError if it names a file that does not exist.
    """
    sizes = Counter(line.partition(":")[0] for line in code_lines())

    def row(found: re.Match[str]) -> str:
        files = re.findall(r"`(fft/[\w/]+\.py)`", found[1])
        if gone := [each for each in files if each not in sizes]:
            raise ValueError(f"{TRUST.name}: no file {', '.join(gone)}")
        return f"|{found[1]}| {round(sum(sizes[each] for each in files), -1)} |"

    return re.sub(r"^\|([^|]*`fft/[^|]*)\| \d+ \|", row, page, flags=re.M)


def main() -> int:
    """Write both, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    picture, trusted = lines(imports()), TRUST.read_text(encoding="utf-8")
    if parser.parse_args().check:
        drawn = "\n".join(picture) in PAGE.read_text(encoding="utf-8")
        if drawn and counted(trusted) == trusted:
            return 0
        sys.stderr.write(f"{PAGE.name} or {TRUST.name} is outdated: python -m tools.rooms\n")
        return 1
    fill(PAGE, NAME, picture)
    TRUST.write_text(counted(trusted), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
