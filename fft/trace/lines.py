"""The lines of a trace as typed values, and the one parser of all readers but the audit.

The audit compares each line with what the core does, so it reads plain data (`fft.trace.replay`).
All other readers use these types. A line that cannot be read has no value, and is left out; the
audit reports it. Pure.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from fft.messages.codec import Codec, UnreadableMessage
from fft.messages.protocol import Decision, Event, Record
from fft.protocol.roles import Role

_CONFIG = ConfigDict(extra="ignore")

Who = tuple[str, int, int]
"""Group, rank and incarnation of a process."""


@dataclass(kw_only=True, slots=True, config=_CONFIG)
class _Written:
    """The fields of each line: its number, the times on the clocks of its process, the process."""

    seq: int = 0
    wall: float = 0.0
    mono: float = 0.0
    group: str = ""
    rank: int = 0
    inc: int = 0
    h: str = ""

    @property
    def who(self) -> Who:
        """The process that has written the line."""
        return self.group, self.rank, self.inc

    @property
    def lane(self) -> str:
        """The rank in display form: ``GROUP/RANK``."""
        return f"{self.group}/{self.rank}"


@dataclass(kw_only=True, slots=True, config=_CONFIG)
class _Spec:
    initial: str = "-"


@dataclass(kw_only=True, slots=True, config=_CONFIG)
class _Settings:
    pid: int = 0
    min_groups: int = 1


@dataclass(kw_only=True, slots=True, config=_CONFIG)
class Header(_Written):
    """The first line: what a replay needs. Only the parts that views show are read."""

    kind: Literal["header"]
    spec: _Spec = Field(default_factory=_Spec)
    config: _Settings = Field(default_factory=_Settings)
    start: dict[str, Any] = Field(default_factory=dict)
    reforms: bool = False


@dataclass(kw_only=True, slots=True, config=_CONFIG)
class Handled(_Written):
    """An event that the participant got, and its position afterwards; ``fenced``, ``refused`` and
    ``deferred`` events changed nothing."""

    kind: Literal["transition", "fenced", "refused", "deferred"]
    epoch: int = 0
    txn: int = 0
    step: int = 0
    event: Annotated[Event, Field(discriminator="type")] | None = None
    """None in the second and later lines about one event."""


@dataclass(kw_only=True, slots=True, config=_CONFIG)
class Transition(Handled):
    """A row of the table that an event took."""

    kind: Literal["transition"]
    to: str
    roles: tuple[Role, Role]
    """Roles of the states before and after it."""
    members: tuple[str, ...] = ()
    cause: str | None = None
    code: str | None = None
    effects: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True, config=_CONFIG)
class Unhandled(Handled):
    """An event without an effect."""

    kind: Literal["fenced", "refused", "deferred"]


@dataclass(kw_only=True, slots=True, config=_CONFIG)
class Noted(_Written):
    """An observation, with the position of the participant if it has joined."""

    kind: Literal["note"]
    note: str
    data: dict[str, Any] = Field(default_factory=dict)
    epoch: int | None = None
    txn: int | None = None
    step: int | None = None


@dataclass(kw_only=True, slots=True, config=_CONFIG)
class Gap(_Written):
    """A line in the place of lines that could not be written."""

    kind: Literal["gap"]


Line = Header | Transition | Unhandled | Noted | Gap
_LINES = Codec[Line](Annotated[Line, Field(discriminator="kind")])


def record_of(line: Line) -> Record | None:
    """Return the record of the head register that a participant received with a line."""
    event = line.event if isinstance(line, Handled) else None
    return event.record if isinstance(event, Decision) else None


def parsed(piece: bytes) -> Line | None:
    """Return a line without checking its digest, or None if it cannot be read."""
    try:
        return _LINES.decode(piece)
    except UnreadableMessage:
        if b"\\ud" not in piece.lower():
            return None
    try:  # the name of a file may contain a lone surrogate, which becomes a question mark
        text = json.dumps(json.loads(piece), ensure_ascii=False)
        return _LINES.decode(text.encode(errors="replace"))
    except (ValueError, RecursionError, UnreadableMessage):
        return None
