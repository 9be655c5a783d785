"""Effects: what is known of other scopes, and waiting for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fft.messages.effects import Effect, Finish, ReadScope, TellHeld
from fft.messages.protocol import Event, ScopeRecord
from fft.protocol.effects.base import action
from fft.protocol.flow import ended_before, held_for, next_version
from fft.protocol.state import Config, Local


@action
def note_scope(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Another scope has a newer record. What it has committed stays committed."""
    assert isinstance(event, ScopeRecord)
    s.elsewhere = tuple(
        replace(e, n=event.n, version=event.version, groups=event.groups)
        if e.scope == event.scope
        else e
        for e in s.elsewhere
    )
    return ()


@action
def read_scopes(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Ask for the newest records of the scopes that I may have to wait for."""
    for other in s.elsewhere:
        yield ReadScope(other.scope)


@action
def tell_held(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Say for whom the txn waits."""
    other = held_for(s)
    assert other is not None, "it is held"
    step = next_version(s)
    yield TellHeld(s.token, step - 1, other.scope, other.version, step - other.ahead)


@action
def stop_held(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Out: another scope has not gone on in time."""
    other = held_for(s)
    assert other is not None, "it is held"
    needed = next_version(s) - other.ahead
    yield Finish(
        f"step {next_version(s) - 1} waits for version {needed} of scope {other.scope!r}, which "
        f"has stood at {other.version} for {c.timeouts['flow_limit']:g} s; its own ranks say why",
        error="FlowStalled",
    )


@action
def stop_flow_ended(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Out: the scope that my txn waits for has ended."""
    other = ended_before(s)
    assert other is not None, "the row is guarded by flow_has_ended"
    yield Finish(
        f"step {next_version(s) - 1} waits for scope {other.scope!r}, which all groups have left "
        f"after {other.version} steps: give all stages the same max_steps, and the same data",
        error="FlowStalled",
    )
