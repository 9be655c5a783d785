"""Steps of a modelled job, as seen by a search. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fft.messages.protocol import Peer

State = tuple[int, ...]
"""Numbers of the nodes, then of shared, budget and facts."""


@dataclass(slots=True)
class Step:
    """One step: the action, the node that acts or is affected, and the resulting state."""

    who: int
    """Index of the node, or -1 if the step belongs to no node."""
    what: str
    free: bool
    """The step is not a fault: it happens eventually if it can."""
    state: State
    broken: tuple[str, str] | None = None
    """(property, text) that the step breaks."""
    checks: tuple[int, ...] = ()
    """Numbers of the claim lists that are checked in the step."""


class Act(NamedTuple):
    """A step as far as one process and the bus determine it; the rest of the state follows."""

    what: str
    cost: str | None
    """The kind of fault, or None if the step is not a fault."""
    node: int
    shared: int = -1
    """Number of the new shared state, or -1 if it is unchanged."""
    sent: tuple[int, ...] = ()
    told: tuple[Peer, int] | None = None
    """(recipient, message) for a message to one participant."""
    claims: tuple[int, ...] = ()
    broken: tuple[str, str] | None = None
    unexpected: str = ""
    """Error of the main thread's table, which lacks a row; other violations take precedence."""
