"""Attempts, rollbacks, transfers and changes of the epoch on each rank, found in its traces.

The exporters share it. Pure, except for `happenings`, which reads the traces of one scope.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fft.protocol.roles import COMMITTING, Role
from fft.trace.course import readable_cause
from fft.trace.read import merged_lines

_BACK = {"aborting", "rolling_back"}
COMMITTED, ROLLED_BACK = "committed", "rolled back"
_KINDS: dict[Role, str] = {"healing": "form", "joining": "join", "apart": "local"}
"""Role of a state outside attempts and rollbacks → kind of what happens in it."""


@dataclass
class Happening:
    """An activity of one rank, with times in seconds."""

    kind: str
    """``step`` (an attempt), ``rollback``, ``transfer``, ``form`` (an epoch is formed), ``join``
    or ``local`` (local steps)."""
    rank: str
    """``GROUP/RANK``."""
    token: tuple[int, int]
    """Epoch and number of the attempt."""
    start: float
    end: float = 0.0
    voted: float | None = None
    decided: float | None = None
    """Time at which the rank received COMMIT."""
    outcome: str = ""
    """``committed`` or ``rolled back``, of a step; ``lost`` if the process ended before that."""
    facts: dict[str, str | int] = field(default_factory=dict)


class Happenings:
    """Finds what happened on each rank; `take` the lines of one scope in the order of time."""

    def __init__(self) -> None:
        self._open: dict[str, Happening] = {}
        self._seen: dict[str, tuple[Path, float]] = {}
        """Rank → file and time of its newest transition."""

    def take(self, path: Path, line: dict[str, Any], at: float) -> Iterator[Happening]:
        """Yield what a line has ended."""
        if (roles := line.get("roles")) is None:
            return
        rank, event = f"{line['group']}/{line['rank']}", line.get("event") or {}
        token = line["epoch"], line["txn"]
        file, before = self._seen.get(rank, (path, at))
        if file != path:  # another process has taken the place
            yield from self._lost(rank, before)
        self._seen[rank] = path, at
        if event.get("type") == "healed" and event["bytes"]:
            facts = {"bytes": event["bytes"], "source": event["source"]}
            yield Happening("transfer", rank, token, before, at, facts=facts)
        now = self._open.get(rank)
        if now is not None and event.get("type") == "prepared" and event["yes"]:
            now.voted = at
            now.facts["step"] = line["step"]  # a rank may have fetched the state meanwhile
        if roles[0] == roles[1] or {*roles} <= _BACK:
            return
        if now is not None and roles[1] in COMMITTING:
            now.outcome, now.decided = COMMITTED, now.decided or at
        elif now is not None and roles[1] != "voting":
            now.end = at
            if now.kind == "step":
                now.outcome = now.outcome or ROLLED_BACK
            yield self._open.pop(rank)
        if roles[1] == "training":
            facts = {"step": line["step"]}
            self._open[rank] = Happening("step", rank, token, at, facts=facts)
        elif roles[1] in _BACK:
            cause = readable_cause(line.get("cause") or "")
            facts = {"cause": cause, "cause_code": line.get("code") or "none"}
            self._open[rank] = Happening("rollback", rank, token, at, facts=facts)
        elif kind := _KINDS.get(roles[1]):
            self._open[rank] = Happening(kind, rank, token, at)

    def end(self) -> Iterator[Happening]:
        """Yield what had not ended when the traces end."""
        for rank, (_, at) in self._seen.items():
            yield from self._lost(rank, at)

    def _lost(self, rank: str, at: float) -> Iterator[Happening]:
        if (now := self._open.pop(rank, None)) is not None:
            now.end, now.outcome = at, now.outcome or "lost"
            yield now


def happenings(folder: Path) -> Iterator[Happening]:
    """Yield what happened in one scope, in the order in which it ended."""
    found = Happenings()
    for at, path, line, _ in merged_lines(folder):
        yield from found.take(path, line, at)
    yield from found.end()
