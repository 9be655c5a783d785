"""Guarantee 6: the order of the data between scopes, as far as one scope shows it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fft.messages.effects import StartTxn
from fft.messages.protocol import ScopeRecord
from fft.protocol.flow import data_end
from fft.protocol.invariants.claims import Claim, Holds, Move
from fft.protocol.state import ScopePosition, members


def data_flow(move: Move) -> Iterator[Claim]:
    """6: no scope takes slices before the scopes that it follows, nor exceeds its bound.

    This checks the txns that are computed, against the records of other scopes that their ranks
    have received. Whether those scopes took the slices is checked where all traces are read.
    """
    for effect in move.out.effects:
        if isinstance(effect, StartTxn):
            first, after = effect.cursor, effect.next_cursor
            for other in move.after.others:
                text = f"{move.peer} computes slices {first} to {after - 1}, {_bound(other)}"
                yield Holds(other.allows(first, after), text)
    if move.after.others != move.before.others:
        event = move.event
        for was, now in zip(move.before.others, move.after.others, strict=True):
            is_known = (now.cursor, now.takers) == (was.cursor, was.takers)
            if isinstance(event, ScopeRecord) and event.scope == now.scope:
                is_known |= now.cursor == event.cursor and now.takers <= len(event.groups)
            yield Holds(is_known, f"{move.peer} knows of no record {_bound(now)}")
            text = f"{move.peer} forgets what scope {now.scope!r} has allowed"
            yield Holds(now.has_ended or now.reach >= was.reach, text)
    if (vote := move.after.vote) is not None and move.entered("voting"):
        text = f"{move.peer} leaves before its group has left the scopes that this one follows"
        before = [e for e in move.after.others if e.ahead == 0]
        is_in = any(move.peer.group in e.groups for e in before)
        yield Holds(not (vote.leaving and is_in), text)
        asked = move.peer in move.after.leaving
        text = f"{move.peer} leaves unasked, before its data end"
        ends = data_end(move.after, move.after.cursor, 2 * len(members(move.after)))
        yield Holds(asked or ends or not vote.leaving, text)


def _bound(other: ScopePosition) -> str:
    told = f"with {other.scope!r} at slice {other.cursor}"
    if not other.ahead:
        return f"{told}, which it follows"
    return f"{told}, of {other.takers} groups, and {other.ahead} of its txns ahead allowed"
