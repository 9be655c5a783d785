"""Guarantee 6: the order of the data between scopes, as far as one scope can tell. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fft.messages.effects import StartTxn
from fft.messages.protocol import ScopeRecord
from fft.protocol.invariants.claims import Claim, Given, Holds, Know, Move


def data_flow(move: Move) -> Iterator[Claim]:
    """6: no scope commits a step before those that it follows have, nor passes its bound.

    Asked of what is computed, and of what the register says. That the versions named there were
    committed in the other scope is judged where the traces of both are read.
    """
    for effect in move.out.effects:
        if isinstance(effect, StartTxn):
            for other in move.after.elsewhere:
                text = (
                    f"{move.peer} computes step {effect.step}, with {other.scope!r} at "
                    f"{other.version} and {other.ahead} steps ahead of it allowed"
                )
                yield Holds(effect.step + 1 <= other.version + other.ahead, text)
    record = move.record
    if record is not None and record.kind == "commit":
        bound_to = {(e.scope, e.ahead) for e in move.before.elsewhere}
        named = {(s.scope, s.ahead) for s in record.seen}
        text = (
            f"record {record.n} names the bounds {sorted(named)}, its scope has {sorted(bound_to)}"
        )
        yield Holds(named == bound_to, text)
        for scope, version, ahead in record.seen:
            text = f"record {record.n} commits {record.step}, but {scope!r} had {version} + {ahead}"
            yield Holds(record.step <= version + ahead, text)
    if isinstance(move.event, ScopeRecord):
        yield Know(("version", move.event.scope, move.event.version))
    if (vote := move.after.vote) is not None and move.entered("voting"):
        for scope, version, _ in vote.seen:
            text = f"{move.peer} votes with version {version} of {scope!r}, which nobody has heard"
            yield Given((("version", scope, version),), text) if version else Holds(True, text)
        text = f"{move.peer} leaves before its group has left the scopes that this one follows"
        before = [e for e in move.after.elsewhere if e.ahead == 0]
        is_in = any(move.peer.group in e.groups for e in before)
        yield Holds(not (vote.leaving and is_in), text)
