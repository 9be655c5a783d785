"""Guarantee 6: the order of the data between scopes, as far as one scope shows it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fft.messages.effects import StartTxn
from fft.messages.protocol import ScopeRecord, Seen
from fft.protocol.flow import data_end
from fft.protocol.invariants.claims import Claim, Given, Holds, Know, Move
from fft.protocol.state import members


def data_flow(move: Move) -> Iterator[Claim]:
    """6: no scope takes slices before the scopes that it follows, nor exceeds its bound.

    This checks the txns that are computed and the register's records. Whether the other scope
    really took the slices that are named there is checked where the traces of both scopes are read.
    """
    for effect in move.out.effects:
        if isinstance(effect, StartTxn):
            first, after = effect.cursor, effect.next_cursor
            for seen in (other.seen for other in move.after.elsewhere):
                text = f"{move.peer} computes slices {first} to {after - 1}, {_bound(seen)}"
                yield Holds(seen.allows(first, after), text)
    record = move.record
    if record is not None and record.kind == "commit":
        bound_to = {(e.scope, e.ahead) for e in move.before.elsewhere}
        named = {(s.scope, s.ahead) for s in record.seen}
        text = (
            f"record {record.n} names the bounds {sorted(named)}, its scope has {sorted(bound_to)}"
        )
        yield Holds(named == bound_to, text)
        begun = ("start", record.token, record.step - (not record.skip))
        for seen in record.seen:
            text = f"record {record.n} takes the slices before {record.cursor}, {_bound(seen)}"
            yield Given(
                (begun,),
                text,
                lambda start, seen=seen: seen.allows(start[0], record.cursor),
                needed=False,
            )
    if isinstance(move.event, ScopeRecord):
        for was, now in zip(move.before.elsewhere, move.after.elsewhere, strict=True):
            yield Know(("heard", now.scope, now.cursor, now.takers))
            text = f"{move.peer} forgets what scope {now.scope!r} has allowed"
            yield Holds(now.has_ended or now.seen.reach >= was.seen.reach, text)
    if (vote := move.after.vote) is not None and move.entered("voting"):
        for seen in vote.seen:
            text = f"{move.peer} votes by what nobody has heard: {_bound(seen)}"
            heard = ("heard", seen.scope, seen.cursor, seen.takers)
            is_first = (seen.cursor, seen.takers) == (0, 1)
            yield Holds(True, text) if is_first else Given((heard,), text)
        text = f"{move.peer} leaves before its group has left the scopes that this one follows"
        before = [e for e in move.after.elsewhere if e.ahead == 0]
        is_in = any(move.peer.group in e.groups for e in before)
        yield Holds(not (vote.leaving and is_in), text)
        asked = move.peer in move.after.leaving
        text = f"{move.peer} leaves unasked, before its data end"
        ends = data_end(move.after, move.after.cursor, 2 * len(members(move.after)))
        yield Holds(asked or ends or not vote.leaving, text)


def _bound(seen: Seen) -> str:
    told = f"with {seen.scope!r} at slice {seen.cursor}"
    if not seen.ahead:
        return f"{told}, which it follows"
    return f"{told}, of {seen.takers} groups, and {seen.ahead} of its txns ahead allowed"
