"""What ranks report in the topic ``progress``: how fast each is by itself, and whom it waits for.

They are not part of the protocol: only those listen that want to know which rank is slow (the
supervisor, ``fft watch``), and losing one is harmless. Pure data, with a strict form.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from fft.messages.protocol import Count, Name, UnreadableMessage, unreadable

MAX_WORD = 4096
"""Bytes of a word at most."""

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


Report = SpeedReport | HeldReport


@cache
def _adapter() -> TypeAdapter[Report]:
    return TypeAdapter(Annotated[Report, Field(discriminator="type")])


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
