"""Reports of ranks in the topic ``progress``: speed, waits for other scopes, outcomes of
checkpoints, and failures to write the trace.

Reports are not part of the protocol. The supervisor and ``fft watch`` listen to them, and no
decision depends on one. Pure data in a strict form.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from fft.messages.codec import Codec
from fft.messages.commands import Id
from fft.messages.protocol import Count, Name, Text

MAX_WORD = 4096
"""Maximum size of a report in bytes."""

MAX_WHY = 500
"""Maximum characters of a cause, so that the report fits ``MAX_WORD`` however they are escaped."""

Outcome = Literal["published", "failed", "left_out", "too_often"]
"""Outcome of a checkpoint; ``too_often``: skipped, because the previous one was still being
written."""
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Goal:
    """The planned end and the data of a loop; a field is None if it is not known."""

    steps: Count | None = None
    """``max_steps`` of the loop."""
    items: Count = 1
    """Number of items of the loader (batches) in a slice, which one group consumes in one txn."""
    all_items: Count | None = None
    """Number of items of all data."""
    epoch_items: Count | None = None
    """Number of items in one data epoch."""
    samples: Count | None = None
    """Number of samples in an item."""


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class _Report:
    """The fields of each report: the rank that sends it."""

    group: Name
    rank: Count
    inc: Count


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class SpeedReport(_Report):
    """A rank has committed ``step`` steps, with ``compute`` seconds of its own work per step.

    ``compute`` is the median over the commits since its last report, from the start of a txn to the
    end of its step function, without waits for other ranks.
    """

    step: Count
    compute: Seconds
    scope: Name | None = None
    """Scope of the steps, if stages have scopes of their own."""
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The newest ``loss`` of ``txn.log``."""
    goal: Goal | None = None
    """The planned end of the loop, if the rank knows it."""
    v: Literal[1] = 1
    type: Literal["progress"] = "progress"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class HeldReport(_Report):
    """A rank waits before ``step``, because another scope has taken ``cursor`` of ``needed``
    slices."""

    step: Count
    scope: Name
    """The scope that it waits for."""
    cursor: Count
    needed: Count
    v: Literal[1] = 1
    type: Literal["held"] = "held"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class CheckpointReport(_Report):
    """Outcome of the checkpoint of ``step``, reported by a rank that takes part in it."""

    step: Count
    outcome: Outcome
    why: Text = ""
    """Cause of a failure; empty if the checkpoint is published."""
    v: Literal[1] = 1
    type: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class TraceReport(_Report):
    """A rank cannot write its trace, which has a gap from here on."""

    why: Text
    v: Literal[1] = 1
    type: Literal["trace"] = "trace"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class FetchReport(_Report):
    """A rank fetches the state of a peer: ``got`` of ``total`` bytes have arrived, and the rest
    takes about ``left`` seconds."""

    got: Count
    total: Count
    left: Seconds
    v: Literal[1] = 1
    type: Literal["fetching"] = "fetching"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class IdleReport(_Report):
    """Time that the script of a rank worked between two transactions, until this report."""

    seconds: Seconds
    v: Literal[1] = 1
    type: Literal["idle"] = "idle"


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Mark:
    """A listener's message to itself: when it arrives, all earlier messages have arrived."""

    id: Id
    v: Literal[1] = 1
    type: Literal["mark"] = "mark"


Report = SpeedReport | HeldReport | CheckpointReport | TraceReport | FetchReport | IdleReport | Mark


KEPT = ("report/published", "report/failed", "report/too_often", "report/trace")
"""Registers that keep the newest report of each kind for observers that attach later."""


def register_of(word: Report) -> str | None:
    """Return the register of ``KEPT`` that stores the report, or None if it is not stored."""
    if isinstance(word, CheckpointReport):
        name = f"report/{word.outcome}"
        return name if name in KEPT else None
    return "report/trace" if isinstance(word, TraceReport) else None


def fitting(text: str) -> str:
    """Return a cause that fits into a report: truncated, and without lone surrogates, which file
    names may contain."""
    return text[:MAX_WHY].encode(errors="replace").decode()


_REPORTS = Codec[Report](Annotated[Report, Field(discriminator="type")], MAX_WORD, omit="none")
encode_report, decode_report = _REPORTS.encode, _REPORTS.decode
"""Encode and decode a report of the topic ``progress``."""
