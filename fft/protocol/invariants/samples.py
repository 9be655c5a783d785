"""Guarantee 3 for the data: each slice goes into one committed txn. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fft.messages.effects import StartTxn
from fft.messages.protocol import Record
from fft.protocol.invariants.claims import Claim, Given, Holds, Know, Move, Same, applied
from fft.protocol.leases import lease_of
from fft.protocol.state import leases_outside, with_lease


def samples_once(move: Move) -> Iterator[Claim]:
    """3: each slice of data is consumed by exactly one committed txn, and none is left out.

    With leases: one instance of a group holds a slice at a time, from its grant until a txn that it
    contributes to is committed. The slices of a lost instance are granted again.
    """
    record = move.record
    for effect in move.out.effects:
        if isinstance(effect, StartTxn):
            yield from _takes_its_place(move, effect)
    if record is not None:
        yield from _goes_on(record)
    yield from _has_its_data(move)
    if applied(move) and move.after.leases:
        held = (move.after.cursor, move.after.leases, move.after.returned)
        token = move.before.token
        text = f"{move.peer} applied txn {token} and has (cursor, leases, returned) {held}, not as"
        key = ("leases after", token)
        yield Given((key,), text + " the register says", lambda said: said == held)


def _goes_on(record: Record) -> Iterator[Claim]:
    """The data position of a record follows from the record before it."""
    yield Know(("record", record.n), record)
    yield Given(
        (("record", record.n - 1), ("record", record.n)),
        f"record {record.n} ({record.kind}) does not go on where the data before it end",
        _data_go_on,
        needed=False,
    )
    if record.kind == "commit" and not record.leases and not record.live:
        yield Given(
            (("start", record.token, record.step - (not record.skip)),),
            f"record {record.n} commits other data than txn {record.token} began with",
            lambda start: record.cursor == start[0] + (start[2] or start[1]),
            needed=False,
        )
    if record.kind == "commit" and record.leases:
        held = (record.cursor, record.leases, record.returned)
        yield Know(("leases after", record.token), held)
    if record.kind == "epoch" and record.leases:
        able = [(g.group, g.store) for g in record.members if g.group not in record.learners]
        able += [(each.entry.group, each.entry.store) for each in record.standing]
        holders = {(lease.group, lease.store) for lease in record.leases}
        text = f"record {record.n} grants leases to {sorted(holders)}, of whom some do not count"
        yield Holds(holders <= set(able) and len(holders) == len(record.leases), text)


def _has_its_data(move: Move) -> Iterator[Claim]:
    """All members commit the same data in a txn, and no other txn commits these data."""
    record, before, after = move.record, move.before, move.after
    token = before.token
    decided = record is not None and move.obeyed == "commit" and record.token == token
    if not decided and not applied(move):
        return
    if before.leases:
        outside = leases_outside(before, before)
        data = tuple(lease.slice for lease in before.leases if lease not in outside)
    else:
        # Within a txn, the members' indices in the shared member list separate their slices.
        end = record.cursor if decided and record else after.cursor
        data = tuple(range(before.cursor, end))
        text = f"the data from {before.cursor} on went into txn {token} and into {{was}}"
        if data:  # a live block has none
            yield Same(("data from", before.cursor), token, text)
    text = f"txn {token} has slices {data} for {move.peer}, and {{was}} for another"
    yield Same(("data of", token), data, text)


def _takes_its_place(move: Move, start: StartTxn) -> Iterator[Claim]:
    """The contributing groups are dealt the slices of a txn, in the order of the groups.

    A fixed number of slices is dealt to all groups that can contribute, as far as it suffices.
    """
    token, fixed = start.token, start.fixed_slices
    begun = (start.cursor, start.participants, fixed)
    what = "(cursor, participants, fixed number of slices)"
    text = f"{move.peer} began txn {token} with {what} {begun}, another with"
    yield Same(("start", token, start.step), begun, text + " {was}")
    epoch = move.after.epoch
    late = epoch.learners if epoch and token.txn == 1 else ()
    counting = with_lease(epoch) if epoch and epoch.bound else epoch.members if epoch else ()
    active = epoch.active if epoch else ()
    able = [g.group for g in counting if g.group not in late and (not active or g.group in active)]
    mine = able.index(move.peer.group) if move.peer.group in able else None
    if mine is not None and mine >= start.participants:
        mine = None  # a spare
    text = f"{move.peer} has slice {start.index} of {start.participants} in txn {token}, not {mine}"
    yield Holds(start.index == mine and 0 < start.participants <= len(able), text)
    if fixed:
        text = (
            f"{move.peer} began txn {token} with {start.participants} participants of {len(able)} "
            f"groups and slices {start.cursor} to {start.next_cursor - 1}, where {fixed} are fixed"
        )
        is_whole = start.next_cursor - start.cursor == fixed
        yield Holds(is_whole and start.participants == min(fixed, len(able)), text)
        dealt = sorted(n for each in range(start.participants) for n in start.dealt_to(each))
        text = f"the participants are dealt the slices {dealt} in txn {token}"
        yield Holds(dealt == list(range(start.cursor, start.next_cursor)), text)
    if epoch is None or not epoch.leases:
        return
    own = next(g for g in epoch.members if g.group == move.peer.group)
    held = lease_of((epoch if token.txn == 1 else move.after).leases, own.group, own.store)
    text = f"{move.peer} takes slice {start.lease} in txn {token}, and holds a lease on {held}"
    yield Holds(start.lease == held and (held is None) == (mine is None), text)
    if held is not None:
        text = f"slice {held} is leased to {own.store} in txn {token}, and to {{was}}"
        yield Same(("leased", token, held), own.store, text)


def _data_go_on(before: Record, after: Record) -> bool:
    moved, batches = after.cursor - before.cursor, after.batches - before.batches
    if before.leases or after.leases:
        return _leases_go_on(before, after)
    if after.kind != "commit" or after.live:
        return moved == batches == 0
    return moved > 0 and batches == (0 if after.skip else moved)


def _leases_go_on(before: Record, after: Record) -> bool:
    """Whether each slice that was held, returned or new is held, returned or consumed once."""
    inside = {(g.group, g.store) for g in before.members}
    stay = [lease for lease in before.leases if after.bound and lease[1:] not in inside]
    batches, consumed = after.batches - before.batches, len(before.leases) - len(stay)
    if after.kind == "abort" or after.live:
        same = (before.leases, before.returned, before.cursor, before.batches)
        return (after.leases, after.returned, after.cursor, after.batches) == same
    if after.kind == "commit" and batches != (0 if after.skip else consumed):
        return False
    stays = [lease.slice for lease in (stay if after.kind == "commit" else before.leases)]
    new = range(before.cursor, after.cursor)
    had = sorted([*stays, *before.returned, *new])
    if sorted([*(lease.slice for lease in after.leases), *after.returned]) != had:
        return False
    if after.kind == "commit":
        return set(stay) <= set(after.leases)
    held = {lease[1:]: lease.slice for lease in before.leases}
    kept = {lease[1:]: lease.slice for lease in after.leases if lease[1:] in held}
    return all(held[who] == number for who, number in kept.items())
