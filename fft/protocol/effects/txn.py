"""Effects: a txn from its start to its vote, and carrying out its decision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fft.messages.causes import NO_CAUSE, Cause, CauseCode
from fft.messages.effects import Apply, CastVote, Effect, StartTxn
from fft.messages.protocol import ApplyFailed, Ballot, Event, Fault, Prepared, Record, Token, Vote
from fft.protocol.apart import own_lease
from fft.protocol.effects.base import action
from fft.protocol.equality import unequal_data, wrong_gradients
from fft.protocol.flow import is_last, may_leave, seen
from fft.protocol.leases import lease_of
from fft.protocol.state import (
    Config,
    Local,
    committed,
    contributors,
    data_after,
    is_member,
    member_peers,
    members,
)


def _start(s: Local, c: Config, at: Local | Record) -> Effect:
    able = contributors(s, c)
    slices = {group: index for index, group in enumerate(able)}
    _open(s)
    return StartTxn(
        token=s.token,
        step=at.step,
        lineage=at.lineage,
        cursor=at.cursor,
        index=slices.get(c.me.group),
        participants=len(able),
        members=tuple(g.group for g in members(s)),
        commits=s.commits,
        lease=lease_of(at.leases, c.me.group, c.store),
        next_cursor=data_after(s, c, at).cursor,
        contributors=tuple(able),
        fixed_slices=c.fixed_slices,
    )


def _open(s: Local) -> None:
    s.vote, s.proposed, s.skip = None, False, False
    # A member that was lost during the last update is the cause of this txn's rollback.
    if not any(is_member(s, p) and p in s.dead | s.suspected for p in s.cause.accused):
        s.cause = NO_CAUSE


@action
def open_txn(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Open the current txn without beginning it, dropping the vote and proposal of the last one."""
    _open(s)
    return ()


@action
def start_txn(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Have the main thread begin the current txn."""
    yield _start(s, c, s)


@action
def start_first_txn(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Have the main thread begin the first txn of the epoch.

    It begins at the position of the epoch's record. A group that still fetches its state has not
    reached that position itself.
    """
    assert s.epoch is not None, "a txn exists only in an epoch"
    yield _start(s, c, s.epoch)


@action
def note_vote(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Record a YES with the results of the step function."""
    assert isinstance(event, Prepared)
    s.edits = event.edited
    leaves = (c.me in s.leaving and may_leave(s, c.me.group)) or is_last(s, c)
    s.vote = Vote(c.me, event.manifest, leaves, event.last, event.skip, event.digest, seen(s))
    return ()


@action
def forget_digest(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remove the digest of a rank that fetched its state; tables of older traces name it."""
    assert s.vote is not None, "it is noted"
    s.vote = replace(s.vote, digest=None)
    return ()


@action
def cast_vote(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Cast the vote; it may be cast again, because the ballot counts it once."""
    assert s.vote is not None, "PREPARED is entered by voting"
    yield CastVote(s.token, s.vote, len(member_peers(s)))


@action
def note_cause(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember why this rank cannot complete the txn; this is not a skip."""
    assert isinstance(event, Fault | Prepared)
    s.skip = False
    if event.cause:
        s.cause = Cause.of_own(c.me, event.code, event.cause)
    return ()


@action
def note_skip(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that the user skips the step on this rank."""
    s.skip = True
    text = "the user skipped this step here, before its reductions"
    s.cause = Cause(CauseCode.SKIPPED, text)
    return ()


@action
def note_too_few(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Name the number of reductions that a YES needs as the cause."""
    assert isinstance(event, Prepared)
    text = (
        f"{event.manifest.count} gradient reductions in this txn, but a YES needs "
        f"{c.min_reductions}: a step that reduced nothing must not be committed"
    )
    s.cause = Cause.of_own(c.me, CauseCode.TOO_FEW_REDUCTIONS, text)
    return ()


@action
def note_misfit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Name the manifests that do not match as the cause."""
    assert isinstance(event, Ballot)
    counts = ", ".join(f"{v.peer}: {v.manifest.count}x/{v.manifest.bytes}B" for v in event.votes)
    text = f"the votes' manifests do not fit together ({counts})"[:1900]
    s.cause = Cause(CauseCode.MANIFESTS_DIFFER, text)
    return ()


@action
def note_blocks(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Name the live block, or the step, that each rank is in as the cause."""
    assert isinstance(event, Ballot)
    places = ", ".join(f"{v.peer}: {v.manifest.place}" for v in event.votes)
    text = f"the ranks are not in the same live block ({places})"[:1900]
    s.cause = Cause(CauseCode.BLOCKS_DIFFER, text)
    return ()


@action
def note_beside_step(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that some of the ranks are in a step, which they repeat."""
    s.cause = replace(s.cause, code=CauseCode.BLOCK_BESIDE_STEP)
    return ()


@action
def note_unequal_data(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Name the ranks that have drawn different data as the cause."""
    assert isinstance(event, Ballot)
    text = f"the ranks have drawn different data ({unequal_data(event.votes)})"[:1900]
    s.cause = Cause(CauseCode.DATA_DIFFERS, text)
    return ()


@action
def note_unequal_gradients(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Name the reduced gradients that differ as the cause, and accuse the ranks that are wrong."""
    assert isinstance(event, Ballot)
    text, accused = wrong_gradients(event.votes)
    s.cause = Cause(CauseCode.GRADIENTS_DIFFER, text, accused)
    return ()


@action
def note_skippers(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Name the ranks that skip a step whose manifests do not match as the cause."""
    assert isinstance(event, Ballot)
    skipping = ", ".join(str(v.peer) for v in event.votes if v.skip)
    s.skip = True
    text = f"the user skipped this step on {skipping}; {s.cause.text}"[:1900]
    s.cause = Cause(CauseCode.SKIPPED, text)
    return ()


@action
def apply(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Run the optimizer step, or the actions of a skip, according to the decision."""
    assert s.head is not None, "it is decided"
    s.skip = s.head.skip
    yield Apply(s.head, s.skip)


@action
def apply_settled(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Carry out a COMMIT that was missed; a later record's lineage shows whether it was a skip."""
    assert s.head is not None, "a later record is known"
    s.skip = s.head.lineage == committed(s, c, skip=True).lineage
    yield Apply(s.head, s.skip)


@action
def note_applied(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Record that the state includes the committed step or skip."""
    after = committed(s, c, s.skip)
    s.step, s.lineage = after.step, after.lineage
    s.cursor, s.batches = after.cursor, after.batches
    s.leases, s.returned = after.leases, after.returned
    s.lease = own_lease(after.leases, c)
    s.commits += 1
    s.vote, s.skip, s.rollbacks = None, False, 0
    return ()


@action
def mark_torn(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Mark the state as lost, because the committed step could not be applied."""
    assert isinstance(event, ApplyFailed)
    s.lineage, s.lease = "", None
    s.vote, s.skip = None, False
    text = f"optimizer step failed after COMMIT: {event.cause}"
    s.cause = Cause.of_own(c.me, CauseCode.UPDATE_FAILED, text)
    return ()


@action
def next_txn(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Proceed to the next txn of the epoch."""
    s.token = Token(s.token.epoch, s.token.txn + 1)
    return ()
