"""Tests that every invariant can fail: one move of a recorded job is modified, and must be
found."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from jobs import Job

from fft.messages.causes import Cause, CauseCode
from fft.messages.effects import Decide, Finish, Heal, StartTxn
from fft.messages.protocol import (
    Ack,
    Applied,
    ApplyFailed,
    Ballot,
    Begin,
    Fault,
    Healed,
    Join,
    Manifest,
    Peer,
    Prepared,
    Ready,
    Record,
    Stop,
    Token,
    Vote,
    next_lineage,
)
from fft.protocol.invariants import (
    INVARIANTS,
    Finding,
    Given,
    History,
    Holds,
    Judge,
    Know,
    Move,
    Same,
    judge,
)
from fft.protocol.roles import Role
from fft.protocol.state import ScopePosition

A, B = Peer("0", 0, 1), Peer("1", 0, 1)
STRANGER = Peer("9", 0, 1)
FIRST, ABORTED, SECOND, LAST = Token(1, 1), Token(1, 2), Token(2, 1), Token(2, 2)
"""Txns of the recorded life; group 1 leaves with the last one."""

OF_OTHER_JOBS = {"bounded"}
"""Invariants of asynchronous jobs, which test_bounded.py shows to fail."""

Which = Callable[[Move], bool]
Make = Callable[[Move], Move]


@cache
def _life(ranks: int) -> Job:
    job = Job(2, ranks).until_running()
    job.compute(digest="that of all")
    job.settle()
    job.fail(job.node("0"))
    job.settle()
    job.step()
    job.drain("1")
    job.step()
    job.post(job.node("0"), Stop("enough"))
    job.settle()
    return job


def life(ranks: int = 1) -> History:
    """A commit, an abort, an epoch and a commit, a drain and a commit, an epoch, the end."""
    found = _life(ranks).record
    return History({peer: list(moves) for peer, moves in found.moves.items()}, found.consumed[:])


# --- ways to doctor -------------------------------------------------------------------------------


def change(history: History, peer: Peer, which: Which, make: Make) -> str:
    """Replace the first such move by the result of ``make``, and return its place."""
    moves = history.moves[peer]
    at = next(i for i, m in enumerate(moves) if which(m))
    moves[at] = make(moves[at])
    return moves[at].place


def change_all(history: History, which: Which, make: Make) -> None:
    """Replace every such move of all participants."""
    changed = 0
    for moves in history.moves.values():
        changed += sum(map(which, moves))
        moves[:] = [make(m) if which(m) else m for m in moves]
    assert changed


def drop(history: History, peer: Peer, which: Which) -> None:
    """Remove such moves."""
    kept = [m for m in history.moves[peer] if not which(m)]
    assert len(kept) < len(history.moves[peer])
    history.moves[peer] = kept


def of(kind: type, token: Token | None = None) -> Which:
    """Match moves with such an event that was handled at that token."""
    return lambda m: (
        isinstance(m.event, kind) and m.out.verdict == "row" and token in (None, m.before.token)
    )


def brings(kind: str, token: Token | None = None) -> Which:
    """Match moves that bring a record of that kind."""
    return lambda m: (
        m.record is not None and m.record.kind == kind and token in (None, m.record.token)
    )


def enters(state: str, token: Token | None = None) -> Which:
    """Match moves into a state, from that token."""
    return lambda m: m.entered(state) and token in (None, m.before.token)


def before(**fields: Any) -> Make:
    """Replace the state before the move."""
    return lambda m: replace(m, before=replace(m.before, **fields))


def after(**fields: Any) -> Make:
    """Replace the state after the move."""
    return lambda m: replace(m, after=replace(m.after, **fields))


def event(**fields: Any) -> Make:
    """Replace fields of the event."""
    return lambda m: replace(m, event=replace(m.event, **fields))


def record(**fields: Any) -> Make:
    """Replace fields of the record."""
    return lambda m: replace(m, event=replace(m.event, record=replace(m.record, **fields)))


def step(**fields: Any) -> Make:
    """Replace the first row taken."""
    return lambda m: replace(
        m, out=replace(m.out, steps=[replace(m.out.steps[0], **fields), *m.out.steps[1:]])
    )


def led_to(role: Role) -> Make:
    """Match moves whose first row led to a state of that role."""
    return lambda m: step(roles=(m.out.steps[0].roles[0], role))(m)


# --- what must be found ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A modification of a history; ``doctor`` may return the place at which it must be found."""

    invariant: str
    text: str
    doctor: Callable[[History], str | None]
    ranks: int


CASES: dict[str, Case] = {}


def breaks(invariant: str, text: str, ranks: int = 1) -> Callable[..., Any]:
    """Register a way to break an invariant, and the text that must report it."""

    def register(doctor: Callable[[History], str | None]) -> Callable[[History], str | None]:
        CASES[doctor.__name__] = Case(invariant, text, doctor, ranks)
        return doctor

    return register


@breaks("agreement", f"txn {ABORTED}: {B} obeyed commit, another participant obeyed abort")
def one_commits_what_the_other_aborts(h: History) -> str:
    return change(h, B, brings("abort", ABORTED), led_to("committing"))


@breaks("agreement", f"txn {FIRST}: {B} obeyed abort, another participant obeyed commit")
def one_takes_an_abort_for_its_head(h: History) -> str:
    """It takes the record without a message from the register."""

    def aborts(m: Move) -> Move:
        head = m.after.head
        assert head is not None
        m = replace(m, out=replace(m.out, steps=[]))
        return after(head=replace(head, kind="abort"))(m)

    return change(h, B, enters("committing", FIRST), aborts)


@breaks("agreement", f"{B} saw another value of register record 2 than others")
def the_register_changes_its_mind(h: History) -> str:
    return change(h, B, brings("commit", FIRST), record(cursor=9))


@breaks("validity", f"{A} voted YES in txn {FIRST} in spite of: nan")
def a_no_is_cast_as_a_yes(h: History) -> str:
    return change(h, A, enters("voting", FIRST), event(yes=False, cause="nan"))


@breaks("validity", f"{B} committed txn {FIRST} outside every epoch")
def one_outside_commits(h: History) -> str:
    return change(h, B, enters("committing", FIRST), before(epoch=None))


@breaks("validity", f"txn {FIRST} was committed, but {B} did not vote YES in it")
def one_did_not_vote(h: History) -> None:
    drop(h, B, enters("voting", FIRST))


@breaks(
    "validity", f"txn {FIRST} was committed though ranks of one number did different reductions"
)
def one_reduced_more_than_its_peer(h: History) -> None:
    change(h, B, enters("voting", FIRST), event(manifest=Manifest(2)))


@breaks("validity", f"txn {FIRST} was committed though somebody reduced nothing")
def all_reduced_nothing(h: History) -> None:
    change_all(h, enters("voting", FIRST), event(manifest=Manifest(0)))


@breaks(
    "validity", f"txn {FIRST} was committed though ranks of one number did different reductions"
)
def one_reduced_other_tensors_than_its_peer(h: History) -> None:
    change(h, B, enters("voting", FIRST), event(manifest=Manifest(1, 4, "other")))


@breaks("validity", f"txn {FIRST} was committed though its ranks had drawn different data")
def the_ranks_drew_different_data(h: History) -> None:
    reduced = {"count": 1, "bytes": 4, "shapes": "x"}
    for peer, data in ((A, "d"), (B, "e")):
        change(h, peer, enters("voting", FIRST), event(manifest=Manifest(**reduced, data=data)))


@breaks(
    "validity",
    f"the votes for txn {FIRST} and its record differ on whether a checkpoint is due",
)
def the_record_lacks_the_checkpoint_that_a_vote_asked_for(h: History) -> str:
    change(h, B, enters("voting", FIRST), event(checkpoint=True))
    return next(m.place for m in h.moves[B] if enters("committing", FIRST)(m))


@breaks("skip", f"{B} takes txn {FIRST} for a step, against the votes")
def a_skip_is_taken_for_a_step(h: History) -> str:
    change(h, B, enters("voting", FIRST), event(skip=True))
    return next(m.place for m in h.moves[B] if enters("committing", FIRST)(m))


@breaks("skip", f"{B} takes txn {FIRST} for a skip, against the votes")
def one_takes_a_step_for_a_skip(h: History) -> str:
    return change(h, B, enters("committing", FIRST), after(skip=True))


@breaks("skip", f"{A} counts txn {ABORTED} as a failure, though its user skipped it")
def a_skip_counts_as_a_failure(h: History) -> str:
    def skips(m: Move) -> Move:
        assert m.after.head is not None
        return after(head=replace(m.after.head, skip=True))(m)

    return change(h, A, brings("abort", ABORTED), skips)


@breaks("exactly_once", f"{A} applied a step and went from step 0 to 1")
def a_skip_counts_as_a_step(h: History) -> str:
    return change(h, A, of(Applied, FIRST), before(skip=True))


def digests(h: History, a: str | None, b: str | None, token: Token = FIRST) -> None:
    """Set the digests in the two groups' votes."""
    for peer, digest in ((A, a), (B, b)):

        def brings_it(m: Move, digest: str | None = digest) -> Move:
            assert m.after.vote is not None
            return after(vote=replace(m.after.vote, digest=digest))(m)

        change(h, peer, enters("voting", token), brings_it)


@breaks("divergence", f"txn {FIRST} was committed though the states of replicas differ")
def states_that_differ_are_committed(h: History) -> str:
    digests(h, "a", "b")
    return next(m.place for m in h.moves[B] if enters("committing", FIRST)(m))


@breaks("divergence", f"txn {FIRST} was committed though the reduced gradients of replicas differ")
def gradients_that_differ_are_committed(h: History) -> str:
    for peer, own in ((A, "a"), (B, "b")):

        def brings_it(m: Move, own: str = own) -> Move:
            assert isinstance(m.event, Prepared)
            manifest = replace(m.event.manifest, fingerprint=own)
            return event(manifest=manifest)(m)

        change(h, peer, enters("voting", FIRST), brings_it)
    return next(m.place for m in h.moves[B] if enters("committing", FIRST)(m))


def gives_up(**fields: Any) -> Make:
    """The accepted head says that its state is lost."""

    def make(m: Move) -> Move:
        assert m.after.head is not None
        return after(head=replace(m.after.head, **fields))(m)

    return make


def both_vote_in_the_aborted(h: History, a: str, b: str) -> None:
    """Make the aborted txn look as if it had had a full ballot."""
    for peer, digest in ((A, a), (B, b)):
        voted = next(m for m in h.moves[peer] if enters("voting", FIRST)(m))
        assert voted.after.vote is not None
        voted = replace(voted, before=replace(voted.before, token=ABORTED))
        at = next(i for i, m in enumerate(h.moves[peer]) if brings("abort", ABORTED)(m))
        vote = replace(voted.after.vote, digest=digest)
        h.moves[peer].insert(at, after(vote=vote)(voted))


@breaks("divergence", "record 3 ends the job, though no replicas differ, or joiners alone do")
def the_job_ends_without_a_reason(h: History) -> str:
    both_vote_in_the_aborted(h, "a", "a")
    return change(h, A, brings("abort", ABORTED), gives_up(diverged=True))


@breaks("divergence", f"record 3 gives up {B}: no joiners, and no minority")
def one_of_two_is_given_up(h: History) -> str:
    both_vote_in_the_aborted(h, "a", "b")
    return change(h, A, brings("abort", ABORTED), gives_up(odd=(B,)))


@breaks("divergence", f"record 3 accuses {B}, which is no minority and has repeated its result")
def one_of_two_is_accused(h: History) -> str:
    both_vote_in_the_aborted(h, "a", "a")
    code = CauseCode.GRADIENTS_DIFFER
    return change(h, A, brings("abort", ABORTED), gives_up(code=code, accused=(B,)))


@breaks("divergence", f"{B} keeps a state that record 3 gives up")
def one_keeps_what_is_given_up(h: History) -> str:
    return change(h, B, brings("abort", ABORTED), gives_up(odd=(B,)))


@breaks("agreement", f"{B} forgot record 3, which it had put off")
def a_decision_that_was_put_off_is_forgotten(h: History) -> str:
    decision = next(m.event for m in h.moves[B] if brings("abort", ABORTED)(m))
    return change(h, B, of(Applied, FIRST), before(deferred=(decision,)))


@breaks(
    "replicas_equal",
    f"{B} has (step, cursor, batches) (1, 2, 0), another of its lineage (1, 2, 2)",
)
def one_counts_other_batches(h: History) -> str:
    return change(h, B, of(Applied, FIRST), after(batches=0))


def begins(**fields: Any) -> Make:
    """Let the txn begin with other values."""

    def make(m: Move) -> Move:
        effects = [replace(e, **fields) if isinstance(e, StartTxn) else e for e in m.out.effects]
        return replace(m, out=replace(m.out, effects=effects))

    return make


def starts(token: Token) -> Which:
    """Match moves that let a txn begin."""
    return lambda m: any(isinstance(e, StartTxn) and e.token == token for e in m.out.effects)


@breaks("samples_once", f"{B} has slice 0 of 2 in txn {SECOND}, not 1")
def one_takes_the_slice_of_another(h: History) -> str:
    return change(h, B, starts(SECOND), begins(index=0))


@breaks(
    "samples_once",
    f"{B} began txn {SECOND} with (cursor, participants, fixed number of slices) (3, 2, 0), "
    "another with (2, 2, 0)",
)
def one_begins_elsewhere_in_the_data(h: History) -> str:
    return change(h, B, starts(SECOND), begins(cursor=3))


@breaks(
    "samples_once",
    f"{A} began txn {SECOND} with 1 participants of 2 groups and slices 2 to 3, where 2 are fixed",
)
def the_work_is_not_spread_over_all_groups(h: History) -> None:
    one = {"participants": 1, "fixed_slices": 2}
    change(h, A, starts(SECOND), begins(index=0, **one))
    change(h, B, starts(SECOND), begins(index=None, **one))


@breaks("samples_once", f"record 2 commits other data than txn {FIRST} began with")
def all_begin_with_other_data_than_they_commit(h: History) -> None:
    change_all(h, starts(FIRST), begins(cursor=1))


@breaks("drain", "record 6 ends the job, though some stay")
def the_job_ends_with_the_first_that_leaves(h: History) -> None:
    change_all(h, brings("commit", LAST), record(last=True))


@breaks("live_set", f"{A} leaves {B} out of epoch 2, and nothing is said against them")
def a_live_member_is_left_out(h: History) -> str:
    def alone(m: Move) -> Move:
        effects = [
            replace(e, proposal=replace(e.proposal, members=e.proposal.members[:1]))
            if isinstance(e, Decide)
            else e
            for e in m.out.effects
        ]
        return replace(m, out=replace(m.out, effects=effects))

    def proposes(m: Move) -> bool:
        return any(isinstance(e, Decide) and e.proposal.epoch == 2 for e in m.out.effects)

    return change(h, A, proposes, alone)


@breaks("live_set", f"{B} left the barrier of epoch 2 at the word for 3")
def one_begins_at_the_word_for_another_epoch(h: History) -> str:
    return change(h, B, lambda m: isinstance(m.event, Begin) and starts(SECOND)(m), event(epoch=3))


@breaks("exactly_once", f"{B} left COMMIT of txn {FIRST} without applying it")
def a_commit_is_dropped(h: History) -> str:
    return change(h, B, of(Applied, FIRST), step(event="decision"))


@breaks("exactly_once", f"{A} applied txn {FIRST}, which was never committed")
def a_step_is_applied_without_a_commit(h: History) -> None:
    for peer in (A, B):
        drop(h, peer, brings("commit", FIRST))


@breaks("exactly_once", f"{A} applied a step and went from step 0 to 2")
def a_step_counts_double(h: History) -> str:
    return change(h, A, of(Applied, FIRST), after(step=2))


@breaks("exactly_once", f"{A} broke the lineage chain")
def the_lineage_is_of_another_life(h: History) -> str:
    return change(h, A, of(Applied, FIRST), after(lineage="another"))


@breaks(
    "exactly_once",
    f"{B} applied txn {FIRST} at (1, 'mine') and at (0, 'genesis')",
)
def a_step_is_applied_twice(h: History) -> None:
    def again(m: Move) -> Move:
        lineage = next_lineage("mine", FIRST, 2, m.after.cursor)
        return after(step=2, lineage=lineage)(before(step=1, lineage="mine")(m))

    h.moves[B].append(again(next(filter(of(Applied, FIRST), h.moves[B]))))


@breaks("samples_once", "record 2 (commit) does not go on where the data before it end")
def a_commit_uses_no_data(h: History) -> None:
    change_all(h, brings("commit", FIRST), record(cursor=0))


@breaks("samples_once", "record 3 (abort) does not go on where the data before it end")
def an_abort_uses_data(h: History) -> None:
    change_all(h, brings("abort", ABORTED), record(cursor=4))


@breaks("samples_once", f"txn {FIRST} has slices (0, 1, 2) for {B}, and (0, 1) for another")
def one_uses_more_data_than_its_peer(h: History) -> str:
    return change(h, B, of(Applied, FIRST), after(cursor=3))


@breaks("samples_once", f"txn {SECOND} has slices (1, 2, 3) for {B}, and (2, 3) for another")
def one_stands_elsewhere_in_the_data_when_it_hears_the_commit(h: History) -> str:
    return change(h, B, enters("committing", SECOND), before(cursor=1))


@breaks("samples_once", f"the data from 0 on went into txn {SECOND} and into {FIRST}")
def data_are_used_again_in_another_txn(h: History) -> None:
    change_all(h, enters("committing", SECOND), before(cursor=0))
    change_all(h, of(Applied, SECOND), before(cursor=0))


@breaks("samples_once", f"slice 0 was served to {B} in {FIRST}, and to {A} in {FIRST}")
def a_slice_is_served_to_two(h: History) -> str:
    h.consumed = [(A, FIRST, 0, "a.jsonl:1"), (B, FIRST, 0, "b.jsonl:1")]
    return "b.jsonl:1"


@breaks("samples_once", f"slice 1 was served to {A} in {SECOND}, and to {A} in {FIRST}")
def a_slice_is_served_in_two_txns(h: History) -> str:
    h.consumed = [(A, FIRST, 1, "a.jsonl:1"), (A, SECOND, 1, "a.jsonl:2")]
    return "a.jsonl:2"


@breaks("samples_once", f"{A} consumed slice 2 in txn {FIRST}, which has others")
def a_slice_of_the_next_txn_is_served(h: History) -> str:
    h.consumed = [(A, FIRST, 2, "a.jsonl:1")]
    return "a.jsonl:1"


@breaks("samples_once", f"{A} consumed slice 1 in txn {SECOND}, which has others")
def a_slice_of_the_txn_before_is_served(h: History) -> str:
    h.consumed = [(A, SECOND, 1, "a.jsonl:1")]
    return "a.jsonl:1"


@breaks("samples_once", f"{A} consumed slice 2 in txn {ABORTED}, which has others")
def a_slice_goes_into_a_txn_that_was_never_committed(h: History) -> str:
    h.consumed = [(A, ABORTED, 2, "a.jsonl:1")]
    return "a.jsonl:1"


@breaks(
    "shard_unity",
    f"0/1#1 began txn {FIRST} at (5, 'genesis'), another rank at (0, 'genesis')",
    ranks=2,
)
def a_rank_is_ahead_of_its_group(h: History) -> str:
    return change(h, Peer("0", 1, 1), enters("training"), after(step=5))


@breaks("replicas_equal", f"after txn {FIRST} {B} has lineage other, another has mine")
def replicas_part_ways(h: History) -> str:
    change(h, A, of(Applied, FIRST), after(lineage="mine"))
    return change(h, B, of(Applied, FIRST), after(lineage="other"))


def _digest(which: type, token: Token | None, **digests: str) -> Callable[[History], str]:
    def doctor(h: History) -> str:
        change(h, A, of(which, token), lambda m: event(digest="aa")(after(lineage="x")(m)))
        return change(h, B, of(which, token), lambda m: event(digest="bb")(after(lineage="x")(m)))

    return doctor


@breaks(
    "replicas_equal",
    f"at step 1 the state of {B} (digest bb) differs from another's (aa) although their lineage "
    "is equal",
)
def weights_differ_after_a_step(h: History) -> str:
    return _digest(Applied, FIRST)(h)


@breaks(
    "replicas_equal",
    f"at step 0 the state of {B} (digest bb) differs from another's (aa) although their lineage "
    "is equal",
)
def weights_differ_after_healing(h: History) -> str:
    return _digest(Healed, None)(h)


OLD = Token(7, 7)


def _fenced(kind: str, old: Any) -> None:
    """Make a participant accept an event of another txn as one of this txn."""

    @breaks("fencing", f"{A} at {FIRST} took {kind} of {OLD}")
    def doctor(h: History) -> str:
        return change(h, A, of(Prepared, FIRST), lambda m: replace(m, event=old))

    CASES[f"{kind} of another txn"] = CASES.pop("doctor")


_fenced("prepared", Prepared(OLD, True))
_fenced("ballot", Ballot(OLD, ()))
_fenced("applied", Applied(OLD))
_fenced("apply_failed", ApplyFailed(OLD, ""))
_fenced("fault", Fault(OLD, ""))


@breaks("fencing", f"{A} at {ABORTED} took an ack of an old epoch")
def an_old_ack_counts(h: History) -> str:
    return change(h, A, of(Ack), event(token=Token(0, 1)))


@breaks("fencing", f"{A} took ready for epoch 0")
def an_old_ready_counts(h: History) -> str:
    return change(h, A, of(Ready), event(epoch=0))


@breaks("fencing", f"{A} took healed for epoch 2")
def healed_for_another_epoch_counts(h: History) -> str:
    return change(h, A, of(Healed), event(epoch=2))


@breaks("fencing", f"{B} counted votes of [Peer(group='9', rank=0, inc=1)]")
def a_stranger_votes(h: History) -> str:
    return change(h, B, of(Ballot, FIRST), event(votes=(Vote(STRANGER, Manifest(1)),)))


@breaks("fencing", f"{A} listened to 1/0#0, which had been replaced")
def a_replaced_process_is_listened_to(h: History) -> str:
    return change(h, A, lambda m: of(Ready)(m) and m.event.peer == B, event(peer=Peer("1", 0, 0)))  # type: ignore[union-attr]


@breaks("fencing", f"{A} listened to 1/0#0, which had been replaced")
def a_replaced_process_acknowledges(h: History) -> str:
    def older(m: Move) -> Move:
        assert isinstance(m.event, Ack)
        return event(hello=replace(m.event.hello, peer=Peer("1", 0, 0)))(m)

    return change(h, A, of(Ack), older)


@breaks("live_set", f"{B} and others have different member lists for epoch 1")
def one_has_another_member_list(h: History) -> str:
    def longer(m: Move) -> Move:
        epoch = m.after.epoch
        assert epoch is not None
        return after(epoch=replace(epoch, members=(*epoch.members, epoch.members[0])))(m)

    return change(h, B, enters("healing"), longer)


@breaks("live_set", f"{B} entered epoch 1 uninvited")
def one_is_not_in_its_epoch(h: History) -> None:
    def shorter(m: Move) -> Move:
        epoch = m.after.epoch
        assert epoch is not None
        return after(epoch=replace(epoch, members=epoch.members[:1]))(m)

    drop(h, A, enters("healing"))  # or the lists would differ first
    change(h, B, enters("healing"), shorter)


def leaves_the_barrier(m: Move) -> bool:
    return m.entered("training") and m.before.role == "healing"


@breaks("live_set", f"{A} left the barrier of epoch 1 without {B}")
def one_leaves_the_barrier_early(h: History) -> str:
    return change(h, A, leaves_the_barrier, after(ready={A: 1}))


@breaks("live_set", f"{A} left the barrier of epoch 1 without {B}")
def one_was_never_in_the_barrier(h: History) -> None:
    drop(h, B, of(Healed))


@breaks("data_flow", f"{A} computes slices 0 to 1, with 'other' at slice 0, which it follows")
def a_txn_takes_slices_that_another_scope_has_not_taken(h: History) -> str:
    others = (ScopePosition("other", 0),)

    def follows(m: Move) -> Move:
        return replace(after(others=others)(m), before=replace(m.before, others=others))

    return change(h, A, leaves_the_barrier, follows)


@breaks("data_flow", f"{A} knows of no record with 'other' at slice 5, which it follows")
def a_position_changes_without_a_record(h: History) -> str:
    def follows(m: Move) -> Move:
        was = replace(m.before, others=(ScopePosition("other", 0),))
        return replace(after(others=(ScopePosition("other", 0, cursor=5),))(m), before=was)

    return change(h, A, leaves_the_barrier, follows)


@breaks("drain", f"{A} left on purpose in state NORMAL, not after a commit")
def one_leaves_in_a_txn(h: History) -> str:
    """The user did not request it, as the unmodified history shows."""
    return change(h, A, of(Stop), lambda m: replace(m, event=Fault(m.before.token, "")))


@breaks("drain", f"after participants left with record {5 + 1} came a rollback")
def those_who_stay_roll_back(h: History) -> None:
    change_all(h, brings("epoch", Token(3, 0)), record(kind="abort", members=()))


@breaks("drain", f"some who left with record {5 + 1} are in the next epoch")
def who_left_is_still_there(h: History) -> None:
    members = next(m.record.members for m in h.moves[A] if brings("epoch", Token(2, 0))(m))  # type: ignore[union-attr]
    change_all(h, brings("epoch", Token(3, 0)), record(members=members))


@breaks("join", f"record {5 + 1} ended its epoch with a commit, and then came a rollback")
def a_commit_that_ends_its_epoch_is_followed_by_a_rollback(h: History) -> None:
    change_all(h, brings("epoch", Token(3, 0)), record(kind="abort", members=()))


@breaks("reform", f"{B} fetches the state that it holds")
def one_fetches_what_it_has(h: History) -> str:
    def fetches(m: Move) -> Move:
        effects = [replace(e, fetch_from=0) if isinstance(e, Heal) else e for e in m.out.effects]
        return replace(m, out=replace(m.out, effects=effects))

    return change(h, B, brings("epoch", Token(2, 0)), fetches)


@breaks("reform", f"{A} has 1/0 fetch the state that it said it holds")
def one_is_told_to_fetch_what_it_has(h: History) -> str:
    def behind(record: Record) -> Record:
        *others, last = record.members
        last = replace(last, ranks=tuple(replace(r, current=False) for r in last.ranks))
        return replace(record, members=(*others, last))

    def tells(m: Move) -> Move:
        effects = [
            replace(e, proposal=behind(e.proposal)) if isinstance(e, Decide) else e
            for e in m.out.effects
        ]
        return replace(m, out=replace(m.out, effects=effects))

    def proposes(m: Move) -> bool:
        return any(isinstance(e, Decide) and e.proposal.epoch == 2 for e in m.out.effects)

    return change(h, A, proposes, tells)


@breaks("decided", f"{B} stopped in doubt about txn {FIRST}: no answer")
def one_stops_in_doubt(h: History) -> str:
    def stops(m: Move) -> Move:
        m = replace(m, out=replace(m.out, effects=[Finish("no answer", error="InDoubt")]))
        return after(cause=Cause(CauseCode.NO_DECISION, "no answer"))(led_to("terminal")(m))

    return change(h, B, enters("committing", FIRST), stops)


def found(history: History, *names: str) -> list[Finding]:
    return [f for f in judge(history, names or None) if f.violation]


def test_undoctored_history_is_clean_and_checks_every_invariant() -> None:
    for ranks in (1, 2):
        findings = judge(life(ranks))
        assert [f.name for f in findings if f.violation] == []
        assert all(f.checks for f in findings if f.name not in OF_OTHER_JOBS)
    kinds = [(r.kind, r.token) for r, _ in life().records().values()]
    assert sorted(kinds, key=lambda x: x[1])[:5] == [
        ("epoch", Token(1, 0)), ("commit", FIRST), ("abort", ABORTED), ("epoch", Token(2, 0)),
        ("commit", SECOND),
    ]  # fmt: skip
    assert list(life().records()) == list(range(1, 8))


@pytest.mark.parametrize("name", CASES)
def test_doctored_history_is_found_and_reported(name: str) -> None:
    case = CASES[name]
    history = life(case.ranks)
    place = case.doctor(history)
    (finding,) = judge(history, [case.invariant])
    assert finding.violation == case.text
    assert place in (None, finding.place)
    assert finding.place
    assert case.invariant in {f.name for f in found(history)}


def test_every_invariant_is_shown_to_fail() -> None:
    assert {case.invariant for case in CASES.values()} == set(INVARIANTS) - OF_OTHER_JOBS


# --- what is no violation -------------------------------------------------------------------------


def test_replaced_or_stopped_participant_may_leave_in_doubt() -> None:
    """A participant that has committed is not in doubt any more."""

    def leaves(error: str | None, **fields: Any) -> Make:
        def make(m: Move) -> Move:
            m = replace(m, out=replace(m.out, effects=[Finish("x", error=error)]), **fields)
            return led_to("terminal")(m)

        return make

    for make in (leaves("Fenced"), leaves(None, event=Stop())):
        history = life()
        change(history, B, enters("committing", FIRST), make)
        assert found(history, "decided") == []
    history = life()
    change(history, B, of(Applied, FIRST), leaves("InDoubt"))
    assert found(history, "decided") == []


def test_event_without_change_violates_nothing() -> None:
    """A fenced event may have any age, and a digest in it proves nothing."""
    history = life()
    for old in (Fault(OLD, ""), Applied(OLD, "zz"), Healed(9, 0, "", "zz")):
        m = next(filter(of(Applied, FIRST), history.moves[A]))
        out = replace(m.out, verdict="fenced", steps=[], effects=[])
        history.moves[A].append(replace(m, event=old, after=m.before, out=out))
    assert found(history) == []


def test_sender_is_unknown_before_its_first_message() -> None:
    history = life()
    word = Join(replace(history.moves[A][-1].after.hellos["1", 0], peer=Peer("5", 0, 1)))
    change(history, A, of(Ready), lambda m: replace(m, event=word))
    assert found(history, "fencing") == []


def test_abort_of_another_txn_is_not_obeyed() -> None:
    """The abort is for a txn that this participant is not in."""
    move = next(filter(brings("abort", ABORTED), life().moves[B]))
    assert move.obeyed == "abort"
    assert before(token=SECOND)(move).obeyed is None
    assert after(head=None)(move).obeyed is None


# --- the judge ------------------------------------------------------------------------------------


def finding_of(
    *claims: Know | Same | Holds | Given,
    traced: set[Peer] | None = None,
    cut: Collection[Peer] = (),
) -> Finding:
    """Return the findings of a judge that receives one claim about a move."""
    rest = iter(claims)
    judge_ = Judge(["spoken"], traced, cut)
    INVARIANTS["spoken"] = lambda move: [next(rest)]
    try:
        for number in range(len(claims)):
            judge_.feed(replace(life().moves[A][0], place=f"at {number}"))
        (finding,) = judge_.finish()
    finally:
        del INVARIANTS["spoken"]
    return finding


def test_cut_trace_makes_no_claims_and_complete_ones_do() -> None:
    of_a, of_b, of_all = Given((("yes", A),), "A"), Given((("yes", B),), "B"), Given((("x",),), "x")
    assert finding_of(of_a, of_b, of_all) == Finding("spoken", 3, "A", "at 0")
    assert finding_of(of_a, of_all, cut={A}) == Finding("spoken"), "A may have said it all"
    assert finding_of(of_a, of_b, cut={A}) == Finding("spoken", 1, "B", "at 1"), "B has not"


def test_conflicting_claims_are_violations() -> None:
    facts = [Same(("x",), value, f"{value} and {{was}}") for value in (1, 1, 2, 3)]
    assert finding_of(*facts[:2]) == Finding("spoken", 2)
    assert finding_of(*facts) == Finding("spoken", 4, "2 and 1", "at 2"), (
        "the first violation is kept"
    )


def test_single_move_invariants_hold() -> None:
    assert finding_of(Holds(True, "good")) == Finding("spoken", 1)
    assert finding_of(Holds(True, "good"), Holds(False, "bad")) == Finding(
        "spoken", 2, "bad", "at 1"
    )


def test_a_fact_alone_claims_nothing_and_the_first_one_stays() -> None:
    is_one = Given((("x",),), "x is not 1", lambda x: x == 1)
    assert finding_of(Know(("x",), 1)) == Finding("spoken")
    assert finding_of(Know(("x",), 1), Know(("x",), 2), is_one) == Finding("spoken", 1)
    assert finding_of(Know(("x",), 2), is_one) == Finding("spoken", 1, "x is not 1", "at 1")


@pytest.mark.parametrize("needed", [True, False])
def test_a_claim_waits_for_its_facts(needed: bool) -> None:
    both = Given((("x",), ("y",)), "x is not y", lambda x, y: x == y, needed)
    x, y, z = Know(("x",), 1), Know(("y",), 1), Know(("y",), 2)
    assert finding_of(both, x, y) == Finding("spoken", 1)
    wrong = Finding("spoken", 1, violation="x is not y", place="at 0")
    assert finding_of(both, x, z) == wrong
    never = replace(wrong, place="at 1") if needed else Finding("spoken")
    assert finding_of(x, both) == never


def test_fact_of_a_participant_without_a_trace_is_reported_missing() -> None:
    voted = Given((("yes", FIRST, A), ("yes", FIRST, B)), f"{B} did not vote")
    fact = Know(("yes", FIRST, A))
    assert finding_of(fact, voted, traced={A}).violation == f"there is no trace of {B}, a member"
    assert finding_of(fact, voted, traced={A, B}).violation == f"{B} did not vote"
    assert finding_of(fact, voted, traced=None).violation == f"{B} did not vote"


def test_a_member_without_a_trace_is_named() -> None:
    history = life()
    del history.moves[B]
    history.consumed.clear()
    texts = {f.name: f.violation for f in found(history)}
    missing = f"there is no trace of {B}, a member"
    assert texts == {"validity": missing, "live_set": missing}


def test_last_leaver_may_leave_between_epochs() -> None:
    job = Job(2, min_groups=2).until_running()
    job.drain("0")
    job.settle()
    for node in (job.node("1"), job.node("0")):
        job.compute([node])
        while node.inbox:
            job.deliver(node)
    job.drain("1")
    job.settle()
    assert not job.live() and found(job.record, "drain") == []


def test_stuck_participant_may_leave_only_after_waiting() -> None:
    job = Job(2, min_groups=2).until_running()
    job.kill_group("1")
    job.settle()
    job.fire("ack_window")
    job.drain("0")
    job.settle()
    job.fire("quorum")
    job.settle()
    assert not job.live() and found(job.record, "drain") == []
    history = History({peer: list(moves) for peer, moves in job.record.moves.items()})
    early = Fault(FIRST, "in a hurry")
    change(history, A, enters("terminal"), lambda m: replace(m, event=early))
    (finding,) = found(history, "drain")
    assert finding.violation == f"{A} left on purpose in state HEALING.forming, not after a commit"


def test_only_the_named_invariants_are_evaluated() -> None:
    history = life()
    change(history, B, brings("commit", FIRST), record(cursor=9))
    assert found(history, "validity", "drain") == []
    bench = Judge(["agreement"])
    bench.consumed(A, FIRST, 99, "a.jsonl:1")
    assert bench.finish() == [Finding("agreement")]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_in_which_moves_come_in_changes_nothing(seed: int) -> None:
    """Simulator and checker feed moves as they happen, an audit file by file."""
    rng = random.Random(seed)
    history = life(2)
    whole = {f.name: f.checks for f in judge(history)}
    bench = Judge(traced=history.moves.keys())
    lines = [list(moves) for moves in history.moves.values()]
    for peer, token, number, place in history.consumed:
        bench.consumed(peer, token, number, place)
    while lines := [line for line in lines if line]:
        bench.feed(rng.choice(lines).pop(0))
    findings = bench.finish()
    assert [f.violation for f in findings if f.violation] == []
    assert {f.name: f.checks for f in findings} == whole
