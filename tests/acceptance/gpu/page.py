"""The page ``docs/gpu.md``: the machine, a table of the parts, and all their findings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.acceptance.gpu.machine import in_words
from tests.acceptance.gpu.plan import PARTS
from tools.pages import fill, markdown

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gpu.md"
NAME = "gpu"
_USUAL = frozenset({"part", "status", "what", "text"})


def write(page: Path, machine: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Put a run into the page. Raises ValueError if the page has no place for one."""
    fill(page, NAME, lines(machine, results))


def read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the machine and the results in a run's ``results.jsonl``, in the form that `write`
    accepts.

    A part that the run has not reached is listed as one that was not begun.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not such a file.
    """
    found = []
    texts = path.read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError as error:
            if number == len(texts) > 1:
                break  # the run was ended while it wrote; its part is not among the results
            raise ValueError(f"{path}, line {number}: no JSON ({error})") from error
    head, results = (found[0], found[1:]) if found else ({}, [])
    try:
        machine, began = head["machine"], head["parts"]
        done = {result["part"] for result in results if result["findings"] is not None}
        in_words(machine)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: no results of `python -m tests.acceptance.gpu` (they begin with the "
            f"machine): {error!r} is not there"
        ) from error
    results += [
        {"number": part.number, "part": part.name, "title": part.title}
        | {"status": "not begun", "why": "the run ended before", "findings": [], "seconds": 0.0}
        for part in PARTS
        if part.name in began and part.name not in done
    ]
    return machine, results


def lines(machine: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the page, with the parts by number."""
    results = sorted(results, key=lambda result: int(result["number"]))
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
        f"Run on {machine.get('when') or 'a day that is not known'}{_how(machine)}.",
        "",
        *(f"- {_one_line(line)}" for line in in_words(machine)),
        "",
        *markdown(["part", "what", "result", "s", ""], rows),
        *(line for result in results if result["findings"] for line in _details(result)),
        "",
    ]


def _how(machine: dict[str, Any]) -> str:
    """Return the reason for which a run is not one of a GPU."""
    on_cpu = ", **on CPU, to try the parts themselves**" if machine.get("on") == "cpu" else ""
    return on_cpu + (", with small sizes" if machine.get("small") else "")


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
    """Shorten a long text to its first and last lines; the JSON Lines have the place of a
    failure."""
    found = [line.strip() for line in text.splitlines() if line.strip()]
    cut = found if len(found) < 3 else [found[0], "…", found[-1]]
    return " ".join(cut).replace("<", "&lt;").replace("[", "\\[")
