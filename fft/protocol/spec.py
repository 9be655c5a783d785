"""The spec format: strict models of an FSM file. Pure.

A spec holds names only; what a guard or an effect means is code in this room.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fft.protocol.roles import Role


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Row(_Strict):
    """One way to react: if all guards hold, run the effects in order and go to ``to``."""

    to: str | None = Field(
        None, description="next state; absent: stay, the state is not re-entered"
    )
    guard: list[str] = Field(default_factory=list, description="names; all must hold")
    effects: list[str] = Field(default_factory=list, description="names; run in this order")
    why: str = Field("", description="a sentence for the reader and the diagram")
    elsewhere: str = Field(
        "", description="why no search of the checker takes the row, and the test that does"
    )


Rows = Annotated[list[Row], Field(min_length=1)]


class StateSpec(_Strict):
    """One state: for every event it has rows, or says by name why it ignores or defers it."""

    doc: str = ""
    role: Role = Field(description="what the state is for; code asks for it, never for the name")
    timers: list[str] = Field(
        default_factory=list, description="armed on entry, cleared on leaving"
    )
    on: dict[str, Rows] = Field(default_factory=dict)
    exit: list[Row] = Field(
        default_factory=list, description="exit guards: tried in order after every event"
    )
    ignore: dict[str, str] = Field(default_factory=dict, description="event: reason")
    defer: dict[str, str] = Field(default_factory=dict, description="event: reason")

    @property
    def terminal(self) -> bool:
        """Whether nothing comes after it."""
        return self.role == "terminal"


class Common(_Strict):
    """Rows for every state that is not terminal and does not name the event itself."""

    on: dict[str, Rows] = Field(default_factory=dict)
    ignore: dict[str, str] = Field(default_factory=dict)


class Groups(_Strict):
    """Which groups a paradigm has, and how each keeps together."""

    replicate: Literal["every_step"] = Field(description="sync policy of the replicate groups")
    shard: Literal["fails_as_one", "none"] = Field(description="unit of fault tolerance")


class Policies(_Strict):
    """Choices that guards read."""

    min_reductions: int = Field(
        1, ge=0, description="reductions that a YES needs, so that a phantom step cannot commit"
    )
    on_divergence: Literal["stop", "heal"] = Field(
        "stop",
        description="replicas differ: end the job, or have whoever differs from most fetch anew",
    )


class TimerRule(_Strict):
    """What a timer must be at least, so that it fits to another time."""

    times: float = Field(1.0, gt=0, description="the timer is at least so many times …")
    of: str = Field(description="… this one: another timer, an argument, a time of the bus")
    why: str


class TimerSpec(_Strict):
    """A timer: its default, in seconds, what it means, and what it must fit to."""

    default: float = Field(gt=0, description="seconds; the manager's arguments come before it")
    doc: str = Field(description="what it bounds; `fft config` shows it")
    lasting: bool = Field(False, description="armed by effects, and outlives a state")
    follows: str | None = Field(
        None, description="the manager's argument that it is as long as, unless it is given itself"
    )
    grows: bool = Field(
        False, description="may be moved to fit its rules though what it follows was given"
    )
    at_least: list[TimerRule] = Field(default_factory=list)


class FsmSpec(_Strict):
    """A whole paradigm, as written in ``fsm_specs/<name>.yaml``."""

    name: str
    version: Literal[1]
    doc: str = ""
    groups: Groups
    policies: Policies
    timers: dict[str, TimerSpec]
    initial: str
    common: Common = Common()
    states: dict[str, StateSpec]

    @cached_property
    def timeouts(self) -> dict[str, float]:
        """Defaults of the timers, in seconds."""
        return {name: timer.default for name, timer in self.timers.items()}

    @cached_property
    def lasting(self) -> frozenset[str]:
        """Timers that effects arm, and that no state clears."""
        return frozenset(name for name, timer in self.timers.items() if timer.lasting)

    def digest(self) -> str:
        """Hex digest of the whole, parts included; two processes of one job must have the same."""
        return hashlib.blake2b(self.model_dump_json().encode(), digest_size=8).hexdigest()
