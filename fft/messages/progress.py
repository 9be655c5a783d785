"""What ranks report in the topic ``progress``: how fast each is by itself, whom it waits for, what
has become of its checkpoints, and that its trace cannot be written.

They are not part of the protocol: only those listen that look after a job (the supervisor,
``fft watch``), and nothing depends on one. Pure data, with a strict form.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from fft.messages.commands import Id
from fft.messages.protocol import Count, Name, Text, UnreadableMessage, unreadable

MAX_WORD = 4096
"""Bytes of a word at most."""

MAX_WHY = 500
"""Characters of a cause in a report, so that the word is not too long however they are escaped."""

Outcome = Literal["published", "failed", "left_out", "too_often"]
"""Of a checkpoint; ``too_often``: left out, since the one before was still being written."""
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class SpeedReport:
    """A rank has committed ``step`` steps; its bodies took ``compute`` seconds of its own.

    ``compute`` is the median of the commits since its last word: from the begin of a txn to the end
    of its body, without what it waited for others.
    """

    group: Name
    rank: Count
    inc: Count
    step: Count
    compute: Seconds
    scope: Name | None = None
    """Of the steps, where stages have scopes of their own."""
    v: Literal[1] = 1
    type: Literal["progress"] = "progress"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class HeldReport:
    """A rank does not begin ``step`` of its scope: another one must have taken ``needed`` slices of
    the data, and has taken ``cursor``."""

    group: Name
    rank: Count
    inc: Count
    step: Count
    scope: Name
    """The one that it waits for."""
    cursor: Count
    needed: Count
    v: Literal[1] = 1
    type: Literal["held"] = "held"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class CheckpointReport:
    """What has become of the checkpoint of ``step``, by a rank that takes part in it."""

    group: Name
    rank: Count
    inc: Count
    step: Count
    outcome: Outcome
    why: Text = ""
    """Empty if it is published."""
    v: Literal[1] = 1
    type: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class TraceReport:
    """A rank cannot write its trace, which has a gap from now on."""

    group: Name
    rank: Count
    inc: Count
    why: Text
    v: Literal[1] = 1
    type: Literal["trace"] = "trace"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Mark:
    """From a listener to itself: all that was said before has been heard when this is."""

    id: Id
    v: Literal[1] = 1
    type: Literal["mark"] = "mark"


Report = SpeedReport | HeldReport | CheckpointReport | TraceReport | Mark


KEPT = ("report/published", "report/failed", "report/too_often", "report/trace")
"""Registers with the newest report of a kind, for who begins to watch a job later."""


def register_of(word: Report) -> str | None:
    """Where a report is kept, of `KEPT`; None: it is not."""
    if isinstance(word, CheckpointReport):
        name = f"report/{word.outcome}"
        return name if name in KEPT else None
    return "report/trace" if isinstance(word, TraceReport) else None


@cache
def _adapter() -> TypeAdapter[Report]:
    return TypeAdapter(Annotated[Report, Field(discriminator="type")])


def fitting(text: str) -> str:
    """A cause as a report can have it: not too long, and without half of a character, which the
    name of a file may have."""
    return text[:MAX_WHY].encode(errors="replace").decode()


def encode_report(word: Report) -> bytes:
    """Word → bytes for the topic ``progress``."""
    return _adapter().dump_json(word, exclude_none=True)


def decode_report(payload: bytes) -> Report:
    """Bytes of the topic ``progress`` → word. Raises ``UnreadableMessage``."""
    if len(payload) > MAX_WORD:
        raise UnreadableMessage(f"report of {len(payload)} bytes; the limit is {MAX_WORD}")
    try:
        return _adapter().validate_json(payload)
    except ValidationError as error:
        raise unreadable(error) from None
