"""Guards: whether what other scopes have committed lets the present txn go on. Monotone."""

from __future__ import annotations

from fft.messages.protocol import Event
from fft.protocol.flow import ended_before, held_for
from fft.protocol.guards.base import guard
from fft.protocol.state import Config, Local


@guard
def in_flow(s: Local, c: Config, event: Event) -> bool:
    """Every scope that mine is bound to has taken enough of the data for the txn I stand at.

    What is taken is never given back, so that what holds once holds for ever.
    """
    return held_for(s, c) is None


@guard
def in_first_txn(s: Local, c: Config, event: Event) -> bool:
    """The txn I stand at is the first of its epoch."""
    return s.token.txn == 1


@guard
def flow_has_ended(s: Local, c: Config, event: Event) -> bool:
    """All groups have left the scope that my txn waits for: it gives nothing any more."""
    return ended_before(s, c) is not None
