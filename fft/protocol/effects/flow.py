"""Effects: the known positions of other scopes, and waiting for these scopes."""

from __future__ import annotations

from collections.abc import Iterable

from fft.messages.effects import Effect, Finish, ReadScope, TellHeld
from fft.messages.protocol import Event, ScopeRecord
from fft.protocol.effects.base import action
from fft.protocol.flow import ended_before, held_for, needed_of, step_due
from fft.protocol.state import Config, Local


@action
def note_scope(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Take over a newer record of another scope. Slices that it has taken stay taken."""
    assert isinstance(event, ScopeRecord)
    s.elsewhere = tuple(e.after(event) if e.scope == event.scope else e for e in s.elsewhere)
    return ()


@action
def read_scopes(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Read the newest records of the scopes to which this one is bound."""
    for other in s.elsewhere:
        yield ReadScope(other.scope)


@action
def tell_held(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Report the scope that the txn waits for."""
    other = held_for(s, c)
    assert other is not None, "it is held"
    yield TellHeld(s.token, step_due(s), other.scope, other.cursor, needed_of(s, c, other))


@action
def stop_held(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop: another scope has not proceeded in time."""
    other = held_for(s, c)
    assert other is not None, "it is held"
    yield Finish(
        f"step {step_due(s)} waits until scope {other.scope!r} has taken {needed_of(s, c, other)} "
        f"slices of the data; it has stood at {other.cursor} for {c.timeouts['flow_limit']:g} s; "
        "its own ranks say why",
        error="UpstreamTimeout",
    )


@action
def finish_flow(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Finish regularly: the scope that this one follows has ended."""
    other = ended_before(s, c)
    assert other is not None, "the row is guarded by flow_has_ended"
    yield Finish(
        f"scope {other.scope!r} has ended after {other.cursor} slices of the data, and with it the "
        f"data of this one, at step {step_due(s)}"
    )
