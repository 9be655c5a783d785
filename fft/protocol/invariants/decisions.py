"""Guarantees 1 to 3: decisions and their application. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fft.messages.protocol import Decision, Manifest, Prepared, next_lineage
from fft.protocol.invariants.claims import Claim, Given, Holds, Know, Move, Same, applied, voted
from fft.protocol.roles import COMMITTING
from fft.protocol.state import member_peers


def agreement(move: Move) -> Iterator[Claim]:
    """1: no two participants decide a txn differently, and a register record never changes."""
    token = move.before.token
    if outcome := move.obeyed:
        text = f"txn {token}: {move.peer} obeyed {outcome}, another participant obeyed {{was}}"
        yield Same(("outcome", token), outcome, text)
    if (record := move.record) is not None:
        text = f"{move.peer} saw another value of register record {record.n} than others"
        yield Same(("record", record.n), record, text)
    after = move.after
    for event in move.before.deferred if after.role != "terminal" else ():
        if isinstance(event, Decision) and event.record is not None:
            known = event in after.deferred or (after.head and after.head.n >= event.record.n)
            text = f"{move.peer} forgot record {event.record.n}, which it had put off"
            yield Holds(bool(known), text)


def validity(move: Move) -> Iterator[Claim]:
    """2: COMMIT only if every participant of the epoch voted YES, with matching manifests."""
    token, event = move.before.token, move.event
    if move.entered("voting") and isinstance(event, Prepared):
        yield Holds(event.yes, f"{move.peer} voted YES in txn {token} in spite of: {event.cause}")
        text = f"{move.peer} voted YES in txn {token} without the state that it begins with"
        yield Holds(move.after.healed, text)
    yield from voted(move)
    if move.obeyed != "commit":
        return
    voters = member_peers(move.before)
    yield Holds(bool(voters), f"{move.peer} committed txn {token} outside every epoch")
    for peer in voters:
        text = f"txn {token} was committed, but {peer} did not vote YES in it"
        yield Given((("yes", token, peer),), text)
    votes = tuple(("yes", token, peer) for peer in voters)
    yield Given(
        votes,
        f"txn {token} was committed though somebody reduced nothing",
        lambda *yes: all(y.manifest.count > 0 or y.manifest.block for y in yes),
        needed=False,
    )
    yield Given(
        votes,
        f"txn {token} was committed though its ranks were in different live blocks",
        lambda *yes: len({y.manifest.block for y in yes}) == 1,
        needed=False,
    )
    yield Given(
        votes,
        f"txn {token} was committed though ranks of one number did different reductions",
        lambda *yes: (
            len({(p.rank, y.manifest.reduced) for p, y in zip(voters, yes, strict=True)})
            == len({p.rank for p in voters})
        ),
        needed=False,
    )
    yield Given(
        votes,
        f"txn {token} was committed though its ranks had drawn different data",
        lambda *yes: _data_fit([y.manifest for y in yes if y.manifest.data is not None]),
        needed=False,
    )
    if (record := move.record) is not None and record.kind == "commit":
        due, skip = record.checkpoint == record.n, record.skip
        text = f"the votes for txn {token} and its record differ on whether a checkpoint is due"
        yield Given(
            votes,
            text,
            lambda *yes: due == any(y.checkpoint for y in yes) or (skip and not due),
            needed=False,
        )


def _data_fit(drawn: list[Manifest]) -> bool:
    """Whether all ranks of a shard have equal digests, and either all ranks have one or none."""
    shards = {m.shard for m in drawn}
    alike = len({(m.shard, m.data) for m in drawn}) == len(shards)
    return alike and ("" not in shards or len(shards) == 1)


def exactly_once(move: Move) -> Iterator[Claim]:
    """3: a step is applied after its COMMIT, once, and the lineage records it."""
    if (record := move.record) is not None and record.kind == "commit":
        yield Know(("committed", record.token), record.skip)
    for step in move.out.steps:
        was, now = step.roles
        if was in COMMITTING and now not in (was, "terminal"):
            text = f"{move.peer} left {step.source} of txn {move.before.token} without applying it"
            yield Holds(step.event in ("applied", "apply_failed"), text)
    if not applied(move):
        return
    before, after = move.before, move.after
    text = f"{move.peer} applied txn {before.token}, which was never committed"
    yield Given((("committed", before.token),), text)
    text = f"{move.peer} applied a step and went from step {before.step} to {after.step}"
    yield Holds(after.step == before.step + (not before.skip), text)
    expected = next_lineage(before.lineage, before.token, after.step, after.cursor, before.skip)
    yield Holds(after.lineage == expected, f"{move.peer} broke the lineage chain")
    where = (before.step, before.lineage)
    text = f"{move.peer} applied txn {before.token} at {where} and at {{was}}"
    yield Same(("applied", before.token, move.peer), where, text)
