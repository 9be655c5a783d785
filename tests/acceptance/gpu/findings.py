"""The findings of a part: a line of JSON for each, written at once.

So none is lost if the process dies afterwards. The module needs only Python.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "measured", "not here"]
"""``measured``: a figure without a requirement; ``not here``: this machine cannot run the test."""
_OURS = ("fft", "benchmarks")


class Pen:
    """A writer of the findings of one part."""

    def __init__(self, path: Path, part: str) -> None:
        self._path, self._part = path, part

    def check(self, what: str, holds: bool, text: str = "", **figures: Any) -> None:
        """Record whether a requirement holds."""
        self._write("ok" if holds else "failed", what, text, figures)

    def measured(self, what: str, text: str = "", **figures: Any) -> None:
        """Record a figure."""
        self._write("measured", what, text, figures)

    def absent(self, what: str, why: str) -> None:
        """Record that this machine cannot run a test."""
        self._write("not here", what, why, {})

    def pass_on(self, findings: Iterable[dict[str, Any]]) -> None:
        """Copy the findings of another process of this part."""
        for line in findings:
            self._write(line["status"], line["what"], line["text"], line)

    @contextmanager
    def trial(self, what: str) -> Iterator[None]:
        """Run a trial in the block; an error within it is a finding, and the part continues after
        it.

        A package that is not installed makes the trial impossible here; any other error fails it.
        """
        try:
            yield
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in _OURS:
                raise
            self.absent(what, f"needs the package {error.name}, which is not installed here")
        except Exception:  # noqa: BLE001 - any error is a finding
            self._write("failed", what, _last_lines(traceback.format_exc()), {})

    def _write(self, status: Status, what: str, text: str, figures: dict[str, Any]) -> None:
        line = {**figures, "part": self._part, "status": status, "what": what, "text": text}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Read the findings in a file, without a last line that a dying process has truncated."""
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
