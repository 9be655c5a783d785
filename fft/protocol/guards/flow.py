"""Guards: whether the commits of other scopes allow the current txn. Monotone: once true, always
true."""

from __future__ import annotations

from fft.messages.protocol import Event
from fft.protocol.flow import ended_before, held_for
from fft.protocol.guards.base import guard
from fft.protocol.state import Config, Local


@guard
def in_flow(s: Local, c: Config, event: Event) -> bool:
    """Every scope to which this one is bound has taken enough slices for the current txn.

    Slices that were taken are never given back, so this stays true once it is true.
    """
    return held_for(s, c) is None


@guard
def in_first_txn(s: Local, c: Config, event: Event) -> bool:
    """The current txn is the first one of its epoch."""
    return s.token.txn == 1


@guard
def flow_has_ended(s: Local, c: Config, event: Event) -> bool:
    """All groups have left the scope that the current txn waits for, so it takes no more slices."""
    return ended_before(s, c) is not None
