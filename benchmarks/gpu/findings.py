"""How a part tells what it found: a line of JSON for each, written at once.

So nothing is lost if the process dies afterwards. Needs Python alone.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "measured", "not here"]
"""``measured``: a figure that nothing is demanded of; ``not here``: this machine cannot try it."""
_OURS = ("fft", "benchmarks")


class Pen:
    """Writes the findings of one part."""

    def __init__(self, path: Path, part: str) -> None:
        self._path, self._part = path, part

    def check(self, what: str, holds: bool, text: str = "", **figures: Any) -> None:
        """Something that must hold."""
        self._write("ok" if holds else "failed", what, text, figures)

    def measured(self, what: str, text: str = "", **figures: Any) -> None:
        """A figure."""
        self._write("measured", what, text, figures)

    def absent(self, what: str, why: str) -> None:
        """This machine cannot try it."""
        self._write("not here", what, why, {})

    def pass_on(self, findings: Iterable[dict[str, Any]]) -> None:
        """What another process of this part has found."""
        for line in findings:
            self._write(line["status"], line["what"], line["text"], line)

    @contextmanager
    def trial(self, what: str) -> Iterator[None]:
        """An error within it is a finding, and the part goes on after it.

        A package that is not installed makes the trial impossible here; any other error fails it.
        """
        try:
            yield
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in _OURS:
                raise
            self.absent(what, f"needs the package {error.name}, which is not installed here")
        except Exception:  # noqa: BLE001 - whatever it is, it is what was found
            self._write("failed", what, _last_lines(traceback.format_exc()), {})

    def _write(self, status: Status, what: str, text: str, figures: dict[str, Any]) -> None:
        line = {**figures, "part": self._part, "status": status, "what": what, "text": text}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """What was written there; a line that a dying process has cut is left out."""
    found = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def _last_lines(text: str, most: int = 1500) -> str:
    return text if len(text) <= most else f"… {text[-most:]}"
