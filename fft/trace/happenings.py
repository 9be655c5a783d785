"""Find attempts, rollbacks, transfers and changes of the epoch in the traces of each rank.

The timeline and the exports to OpenTelemetry and Perfetto use this module. It is pure, except for
`happenings`, which reads the traces of one scope.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fft.messages.protocol import Healed, Prepared
from fft.protocol.roles import COMMITTING, Role
from fft.trace.course import readable_cause
from fft.trace.lines import Line, Transition
from fft.trace.read import is_not_of_each_step, merged_lines

ROLLBACK_ROLES = {"aborting", "rolling_back"}
COMMITTED, ROLLED_BACK = "committed", "rolled back"
_KINDS: dict[Role, str] = {
    "training": "step",
    "aborting": "rollback",
    "rolling_back": "rollback",
    "healing": "form",
    "joining": "join",
    "apart": "local",
}
"""Role of a state → kind of the activity that begins with it."""


@dataclass
class Happening:
    """An activity of one rank, with times in seconds."""

    kind: str
    """``step`` (an attempt), ``rollback``, ``transfer``, ``form`` (an epoch is formed), ``join``
    or ``local`` (local steps)."""
    rank: str
    """``GROUP/RANK``."""
    token: tuple[int, int]
    """Epoch and txn at its start."""
    start: float
    line: int
    """Line number in the trace of the rank: of its first line; for a transfer, of its last."""
    end: float = 0.0
    parts: list[tuple[str, float, int]] = field(default_factory=list)
    """Parts of a step (``compute``, ``wait`` for the votes of others, ``update``), each with its
    start and line. A part ends where the next one starts."""
    outcome: str = ""
    """``committed`` or ``rolled back`` for a step. ``lost`` for any kind if the process, or its
    trace, ended before the activity."""
    facts: dict[str, str | int] = field(default_factory=dict)


class Happenings:
    """Find the activities of each rank. Pass the lines of one scope to `take` in order of time."""

    def __init__(self) -> None:
        self._open: dict[str, Happening] = {}
        self._seen: dict[str, tuple[Path, float]] = {}
        """Rank → file and time of its newest transition."""

    def take(self, path: Path, line: Line, at: float) -> Iterator[Happening]:
        """Yield the activities that end with this line."""
        if not isinstance(line, Transition):
            return
        rank, event, roles, token = line.lane, line.event, line.roles, (line.epoch, line.txn)
        file, before = self._seen.get(rank, (path, at))
        if file != path:  # another process has replaced this one
            yield from self._lost(rank, before)
        self._seen[rank] = path, at
        if isinstance(event, Healed) and event.bytes:
            facts: dict[str, str | int] = {"bytes": event.bytes, "source": event.source}
            yield Happening("transfer", rank, token, before, line.seq, at, facts=facts)
        current = self._open.get(rank)
        if current is not None and isinstance(event, Prepared) and event.yes:
            current.parts.append(("wait", at, line.seq))
            current.facts["step"] = line.step  # it changes if the rank has fetched the state
        is_first = current is None and roles[1] == "joining"
        if not is_first and (roles[0] == roles[1] or {*roles} <= ROLLBACK_ROLES):
            return
        if current is not None and roles[1] in COMMITTING:
            if current.outcome != COMMITTED:
                current.parts.append(("update", at, line.seq))
            current.outcome = COMMITTED
        elif current is not None and roles[1] != "voting":
            current.end = at
            if current.kind == "step":
                current.outcome = current.outcome or ROLLED_BACK
            yield self._open.pop(rank)
        if (kind := _KINDS.get(roles[1])) is None:
            return
        begun = self._open[rank] = Happening(kind, rank, token, at, line.seq)
        begun.facts["step"] = line.step
        if kind == "step":
            begun.parts.append(("compute", at, line.seq))
        elif kind == "rollback":
            cause = readable_cause(line.cause or "")
            begun.facts |= {"cause": cause, "cause_code": line.code or "none"}

    def end(self) -> Iterator[Happening]:
        """Yield the activities that are open at the end of the traces."""
        for rank, (_, at) in self._seen.items():
            yield from self._lost(rank, at)

    def _lost(self, rank: str, at: float) -> Iterator[Happening]:
        if (current := self._open.pop(rank, None)) is not None:
            current.end, current.outcome = at, current.outcome or "lost"
            yield current


def happenings(folder: Path) -> Iterator[Happening]:
    """Yield the activities in one scope, in the order in which they ended."""
    found = Happenings()
    for at, path, line, _ in merged_lines(folder, is_not_of_each_step):
        yield from found.take(path, line, at)
    yield from found.end()
