"""Effects: reading the head register, taking over its record, and proposing records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fft.messages.causes import Cause, CauseCode
from fft.messages.effects import Decide, Effect, ReadHead
from fft.messages.protocol import Ballot, Decision, Event, Record, Vote
from fft.protocol import apart
from fft.protocol.effects.base import action
from fft.protocol.equality import differing, digests_text, ranks_to_heal
from fft.protocol.flow import may_leave
from fft.protocol.forming import next_epoch
from fft.protocol.state import (
    Base,
    Config,
    Local,
    committed,
    is_member,
    joiners,
    member_peers,
    members,
)


@action
def read_head(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Read the last decision of the job."""
    yield ReadHead()


@action
def note_no_head(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that the register is empty."""
    s.head_read, s.proposed = True, False
    return ()


@action
def take_head(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Take over the last decision of the job."""
    assert isinstance(event, Decision) and event.record is not None
    s.head, s.head_read, s.proposed = event.record, True, False
    s.joining -= event.record.peer_set
    return ()


@action
def note_its_cause(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Take over the cause that the last decision names."""
    assert s.head is not None, "it is decided"
    s.cause = s.head.why
    return ()


@action
def give_up_state(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Mark the state as lost: it is or may be no committed state, so it must be fetched."""
    s.lineage, s.lease = "", None
    return ()


@action
def propose_epoch(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose the next epoch, formed by the participants that stopped or asked to join."""
    proposal = next_epoch(s, c)
    assert proposal is not None, "the row is guarded by epoch_possible"
    s.proposed = True
    yield Decide(s.head, proposal)


@action
def propose_learners(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose the next epoch; groups that are behind fetch their state while the others compute."""
    proposal = next_epoch(s, c, learners=True)
    assert proposal is not None, "the row is guarded by learners_can_follow"
    s.proposed = True
    yield Decide(s.head, proposal)


def _successor(s: Local, c: Config, **fields: object) -> Record:
    assert s.head is not None, "a txn exists only after an epoch record"
    values: dict[str, object] = {
        "n": s.head.n + 1,
        "epoch": s.token.epoch,
        "txn": s.token.txn,
        "step": s.step,
        "lineage": s.head.lineage,
        "cursor": s.head.cursor,
        "batches": s.head.batches,
        "leases": s.head.leases,
        "returned": s.head.returned,
        "bound": s.head.bound,
        "standing": s.head.standing,
        "by": c.me,
        **fields,
    }
    return Record(**values)  # type: ignore[arg-type]


def abort_record(s: Local, c: Config) -> Record:
    """Return an ABORT of the current txn."""
    assert s.head is not None
    why = _cause_now(s)
    return _successor(
        s,
        c,
        kind="abort",
        step=s.head.step,
        cause=f"{c.me}: {why.text}"[:2000],
        code=why.code,
        accused=why.accused,
        skip=s.skip,
    )


def _cause_now(s: Local) -> Cause:
    """Return the known cause, or the one that the state of the members shows."""
    if s.cause.text:
        return s.cause
    if gone := sorted(p for p in s.dead | s.suspected | s.joining if is_member(s, p)):
        text = f"not in the epoch any more: {', '.join(map(str, gone))}"
        return Cause(CauseCode.LEFT, text)
    return Cause(CauseCode.NO_DECISION, "no decision in time")


def commit_record(s: Local, c: Config, votes: Sequence[Vote]) -> Record:
    """Return a COMMIT of the current txn, as a step or a skip, with its leavers."""
    skip = any(v.skip for v in votes)
    after = committed(s, c, skip)
    present = {g.group for g in members(s)}
    leavers = {
        v.peer.group for v in votes if v.leaving or (v.last and (not skip or v.manifest.block))
    }
    asked = {p.group for p in s.leaving if p in set(member_peers(s))}
    leavers |= {group for group in asked if may_leave(s, group)}
    if c.bound:
        return _end_of_synchronisation(s, c, votes, after, skip, leavers & present)
    return _successor(
        s,
        c,
        kind="commit",
        step=after.step,
        lineage=after.lineage,
        cursor=after.cursor,
        batches=after.batches,
        leases=after.leases,
        returned=after.returned,
        skip=skip,
        change=bool(leavers or joiners(s, c)),
        leavers=tuple(sorted(leavers & present)),
        last=leavers >= present,
        seen=next((vote.seen for vote in votes), ()),  # any vote's positions allow the txn
    )


def _end_of_synchronisation(
    s: Local, c: Config, votes: Sequence[Vote], after: Base, skip: bool, leavers: set[str]
) -> Record:
    """COMMIT of an asynchronous job's txn: afterwards all members are local, or leave.

    Not all members leave while groups outside need their state. If all votes declare that no step
    follows, this counts for all groups of the job.
    """
    assert s.head is not None and s.epoch is not None
    ends = not skip and all(v.last for v in votes)
    others = not ends and apart.absent_living(s)
    if others and leavers >= {g.group for g in members(s)}:
        leavers = set()
    gone = tuple(sorted(leavers))
    return _successor(
        s,
        c,
        kind="commit",
        step=after.step,
        lineage=after.lineage,
        cursor=after.cursor,
        batches=after.batches,
        leases=after.leases,
        returned=after.returned,
        standing=apart.standing_after(s.epoch, s.head.n + 1, after.step, gone),
        skip=skip,
        change=True,
        leavers=gone,
        last=leavers >= {g.group for g in members(s)},
    )


@action
def propose_abort(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose ABORT for the current txn."""
    s.proposed = True
    yield Decide(s.head, abort_record(s, c))


@action
def note_differing(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Name the replicas whose states differ as the cause."""
    assert isinstance(event, Ballot)
    text = f"replicas differ after step {s.step}: {digests_text(differing(event.votes))}"[:1900]
    s.cause = Cause(CauseCode.REPLICAS_DIFFER, text)
    return ()


@action
def propose_odd(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose an ABORT that names the divergent ranks, whose state then counts as lost."""
    assert isinstance(event, Ballot)
    odd = ranks_to_heal(s, c, event.votes)
    assert odd is not None, "the row is guarded by odd_ones_known"
    s.proposed = True
    yield Decide(s.head, replace(abort_record(s, c), odd=odd, accused=odd))


@action
def propose_end(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose an ABORT that ends the job, because replicas differ without a majority."""
    s.proposed = True
    yield Decide(s.head, replace(abort_record(s, c), diverged=True))


@action
def propose_commit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose COMMIT: the ballot shows that all members voted YES."""
    assert isinstance(event, Ballot)
    s.proposed = True
    yield Decide(s.head, commit_record(s, c, event.votes))


@action
def propose_live(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose COMMIT for the entry or the end of a live block, which consumes no data."""
    assert isinstance(event, Ballot)
    s.proposed = True
    part = max(vote.manifest.part for vote in event.votes)  # all have the same
    yield Decide(s.head, replace(commit_record(s, c, event.votes), live=part))
