"""Effects: what is known of other scopes, and waiting for them."""

from __future__ import annotations

from collections.abc import Iterable

from fft.messages.effects import Effect, Finish, ReadScope, TellHeld
from fft.messages.protocol import Event, ScopeRecord
from fft.protocol.effects.base import action
from fft.protocol.flow import ended_before, held_for, needed_of, step_due
from fft.protocol.state import Config, Local


@action
def note_scope(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Another scope has a newer record. What it has taken of the data stays taken."""
    assert isinstance(event, ScopeRecord)
    s.elsewhere = tuple(e.after(event) if e.scope == event.scope else e for e in s.elsewhere)
    return ()


@action
def read_scopes(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Ask for the newest records of the scopes that I may have to wait for."""
    for other in s.elsewhere:
        yield ReadScope(other.scope)


@action
def tell_held(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Say for whom the txn waits."""
    other = held_for(s, c)
    assert other is not None, "it is held"
    yield TellHeld(s.token, step_due(s), other.scope, other.cursor, needed_of(s, c, other))


@action
def stop_held(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Out: another scope has not gone on in time."""
    other = held_for(s, c)
    assert other is not None, "it is held"
    yield Finish(
        f"step {step_due(s)} waits until scope {other.scope!r} has taken {needed_of(s, c, other)} "
        f"slices of the data; it has stood at {other.cursor} for {c.timeouts['flow_limit']:g} s; "
        "its own ranks say why",
        error="FlowStalled",
    )


@action
def finish_flow(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Out, in good order: the scope that gives mine its data has ended."""
    other = ended_before(s, c)
    assert other is not None, "the row is guarded by flow_has_ended"
    yield Finish(
        f"scope {other.scope!r} has ended after {other.cursor} slices of the data, and with it the "
        f"data of this one, at step {step_due(s)}"
    )
