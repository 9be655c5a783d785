"""Steps of a modelled job, as a search sees them. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fft.messages.protocol import Peer

State = tuple[int, ...]
"""Numbers of the nodes, then of shared, budget and facts."""


@dataclass(slots=True)
class Step:
    """One step: what was done, by or to whom, and the state it leads to."""

    who: int
    """Index of the node; -1: nobody's."""
    what: str
    free: bool
    """Not a fault: happens sooner or later if it can."""
    state: State
    broken: tuple[str, str] | None = None
    """(property, text) that the step breaks."""
    checks: tuple[int, ...] = ()
    """Numbers of the claim lists weighed in it."""


class Act(NamedTuple):
    """A step as far as one process and the bus know it; the rest of the state follows."""

    what: str
    cost: str | None
    """The kind of fault it is, if any."""
    node: int
    shared: int = -1
    """-1: as before."""
    sent: tuple[int, ...] = ()
    told: tuple[Peer, int] | None = None
    """A message for one participant alone."""
    claims: tuple[int, ...] = ()
    broken: tuple[str, str] | None = None
    unexpected: str = ""
    """What the main thread's table has no row for; whatever else is broken comes first."""
