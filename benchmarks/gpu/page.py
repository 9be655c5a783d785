"""``docs/gpu.md``: the machine, a table of the parts, and all that they found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import in_words
from benchmarks.pages import fill, markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
NAME = "gpu"
_USUAL = frozenset({"part", "status", "what", "text"})


def write(page: Path, machine: dict[str, Any], results: list[dict[str, Any]], when: str) -> None:
    """Put a run into the page. Raises ValueError if it has no place for one."""
    fill(page, NAME, lines(machine, results, when))


def lines(machine: dict[str, Any], results: list[dict[str, Any]], when: str) -> list[str]:
    """What stands there."""
    rows = [
        [
            str(result["number"]),
            result["title"],
            result["status"],
            f"{result['seconds']:g}",
            _one_line(result["why"]),
        ]
        for result in results
    ]
    return [
        "",
        f"Run on {when}.",
        "",
        *(f"- {_one_line(line)}" for line in in_words(machine)),
        "",
        *markdown(["part", "what", "result", "s", ""], rows),
        *(line for result in results if result["findings"] for line in _details(result)),
        "",
    ]


def _details(result: dict[str, Any]) -> Iterator[str]:
    yield from ("", f"### {result['number']}. {result['title']}", "")
    yield from markdown(
        ["what", "result", "figures", ""],
        [[f["what"], f["status"], _figures(f), _one_line(f["text"])] for f in result["findings"]],
    )


def _figures(finding: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_number(v)}" for key, v in finding.items() if key not in _USUAL)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _one_line(text: str) -> str:
    """The first and the last line of a longer one: a failure's place is in the JSON Lines."""
    found = [line.strip() for line in text.splitlines() if line.strip()]
    cut = found if len(found) < 3 else [found[0], "…", found[-1]]
    return " ".join(cut).replace("<", "&lt;")
