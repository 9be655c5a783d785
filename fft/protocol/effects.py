"""The type of an action, and the registry of actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fft.messages.causes import NO_CAUSE, Cause, CauseCode
from fft.messages.effects import (
    AbortGroups,
    Apply,
    Broadcast,
    CancelFutures,
    CastVote,
    ClearTimers,
    Decide,
    DropBallot,
    Effect,
    Finish,
    Heal,
    ReadHead,
    ReadScope,
    Restore,
    SetTimer,
    StartTxn,
    Tell,
    TellHeld,
)
from fft.messages.protocol import (
    Ack,
    ApplyFailed,
    Ballot,
    Begin,
    BusDown,
    BusMessage,
    Death,
    Decision,
    Drain,
    Event,
    Fault,
    Healed,
    HealFailed,
    Hello,
    Here,
    Join,
    Leave,
    Peer,
    Prepared,
    RankEntry,
    Ready,
    Record,
    Restored,
    ScopeRecord,
    Suspect,
    Timer,
    Token,
    Vote,
)
from fft.protocol import apart
from fft.protocol.apart import own_lease, standing
from fft.protocol.flow import (
    begun_at,
    ended_before,
    held_for,
    is_last,
    may_leave,
    needed_of,
    step_due,
    why_it_leaves,
    why_left,
)
from fft.protocol.forming import base_of, next_epoch
from fft.protocol.leases import lease_of
from fft.protocol.state import (
    FREE_ROLLBACKS,
    Config,
    Local,
    committed,
    contributors,
    coordinator,
    data_after,
    fetched_after,
    hello,
    in_barrier,
    incarnations,
    is_member,
    joiners,
    member_peers,
    members,
    missing_mates,
    my_place,
    peers_meant,
    silent_mates,
    waited_for,
    whole_groups,
)
from fft.protocol.tally import Abort, Live, tally_of, verdict_on

Action = Callable[..., Iterable[Effect]]
"""(state, configuration, event) and, for some, the argument in the row → effects."""
EFFECTS: dict[str, Action] = {}
STOPS: dict[str, Callable[[Local, Config, Event], Effect]] = {}
"""The reasons of ``stop``, each with the text and the error that the participant ends with."""


def action(function: Action) -> Action:
    """Register an action under its function name."""
    EFFECTS[function.__name__] = function
    return function


def stops(function: Callable[[Local, Config, Event], Effect]) -> None:
    """Register a reason of ``stop`` under its function name."""
    STOPS[function.__name__] = function


_LONGEST_PAUSE = 64.0
"""Longest pause, in units of the ``pause`` timeout."""


def set_timer(s: Local, c: Config, name: str, factor: float = 1.0) -> SetTimer:
    """Arm (or re-arm) one timer for ``factor`` times its configured seconds."""
    s.timer_serial += 1
    s.timers = {**s.timers, name: s.timer_serial}
    return SetTimer(name, c.timeouts[name] * factor, s.timer_serial)


@action
def count_rollback(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Count one more rollback since the last commit."""
    s.rollbacks += 1
    return ()


@action
def pause(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Wait before the next epoch; each further rollback in a row doubles the pause: 1, 2, 4 …"""
    s.paused = True
    yield set_timer(s, c, "pause", min(2.0 ** (s.rollbacks - FREE_ROLLBACKS - 1), _LONGEST_PAUSE))


@action
def end_pause(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """End the pause."""
    s.paused = False
    return ()


@action
def arm(s: Local, c: Config, event: Event, timer: str) -> Iterable[Effect]:
    """Arm or rearm a timer, ``timer`` or ``timer factor``."""
    name, *factor = timer.split()
    yield set_timer(s, c, name, *map(float, factor))


@action
def rearm(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Rearm the timer that fired."""
    assert isinstance(event, Timer)
    yield set_timer(s, c, event.name)


@action
def end_reforming(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop waiting for replacements; the next epoch is formed by the groups that are whole."""
    s.reforming = frozenset()
    return ()


@action
def note_bus_down(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that an operation on the bus failed."""
    assert isinstance(event, BusDown)
    s.deaf |= event.for_good
    s.bus_down = True
    return ()


@action
def forget_bus_limit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Clear the limit of the bus, because the trouble is over."""
    s.timers = {name: serial for name, serial in s.timers.items() if name != "bus_limit"}
    yield ClearTimers(("bus_limit",))


@action
def give_up_proposal(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Allow a new proposal, because the last one may have been lost with the bus.

    This happens only when the retry timer fires. A proposal that is repeated at once and fails at
    once would leave no time for other timers, including the one that limits the retries.
    """
    s.proposed = False
    return ()


@action
def tell_drain(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Broadcast a drain that was requested in this process."""
    assert isinstance(event, Drain)
    yield Broadcast(Drain(groups=event.groups, by=event.by))


@action
def greet(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Send this participant's `join` to a joiner, which may not have received it."""
    assert isinstance(event, Join)
    yield Tell(event.hello.peer, Join(hello(s, c)))


@action
def say_join(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Ask to be in the next epoch."""
    yield Broadcast(Join(hello(s, c)))


def _tell(to: Peer | None, message: BusMessage) -> Effect:
    return Broadcast(message) if to is None else Tell(to, message)


def _give_word(s: Local, c: Config, word: Hello) -> None:
    s.told = coordinator(s)
    s.hellos = {**s.hellos, (c.me.group, c.me.rank): word}


@action
def give_word(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Record the `Hello` for the acknowledgement: the state that is held now."""
    _give_word(s, c, hello(s, c))
    return ()


@action
def give_word_committed(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Record the `Hello` for the acknowledgement: the state of the commit that ends the epoch."""
    _give_word(s, c, hello(s, c, after=s.head))
    return ()


@action
def count_me_stopped(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Count this coordinator's own acknowledgement."""
    s.stopped = {**s.stopped, c.me: s.token}
    return ()


@action
def tell_ack(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Send the acknowledgement with the recorded `Hello` to the coordinator, or broadcast it."""
    yield _tell(s.told, Ack(s.hellos[c.me.group, c.me.rank], s.token))


@action
def count_me_ready(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Count this participant itself as in the barrier."""
    s.ready = {**s.ready, c.me: s.token.epoch}
    return ()


@action
def tell_ready(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Send `ready` to the coordinator, or broadcast it."""
    yield _tell(coordinator(s), Ready(c.me, s.token.epoch))


@action
def say_begin(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Broadcast `begin`, so that all members leave the barrier."""
    yield Broadcast(Begin(c.me, s.token.epoch))


@action
def say_here(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Broadcast a sign of life for members that wait for an epoch and joiners."""
    yield Broadcast(Here(c.me))


@action
def say_leave(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Broadcast that no participant needs to wait for this one."""
    cause = getattr(event, "cause", "") or "shut down"
    yield Broadcast(Leave(c.me, cause, why_it_leaves(s, c, event)))


@action
def say_decision(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Broadcast the last decision of the job."""
    yield Broadcast(Decision(s.head))


@action
def drop_ballot(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Drop the ballot of the decided txn."""
    assert s.head is not None, "it is decided"
    yield DropBallot(s.head.token)


def _heard(s: Local, h: Hello) -> None:
    key = (h.peer.group, h.peer.rank)
    s.dead |= {p for p in incarnations(s, *key) if p.inc < h.peer.inc}
    s.hellos = {**s.hellos, key: h}
    s.suspected -= {h.peer}


@action
def note_hello(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember the sender; an older incarnation of the same identity has ended."""
    assert isinstance(event, Join)
    _heard(s, event.hello)
    return ()


@action
def note_join(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that the sender asks to join."""
    assert isinstance(event, Join)
    s.joining |= {event.hello.peer}
    return ()


@action
def forget_silent_mates(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Drop the join requests of ranks of this group that stayed silent while the job continued.

    Such a rank may have left, and its `leave` may have been lost. If it lives, its next message
    counts.
    """
    s.joining -= silent_mates(s, c)
    return ()


@action
def note_ack(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that the sender has stopped, and with which state."""
    assert isinstance(event, Ack)
    _heard(s, event.hello)
    s.stopped = {**s.stopped, event.hello.peer: event.token}
    return ()


@action
def note_ready(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that the sender is in the barrier."""
    assert isinstance(event, Ready)
    s.ready = {**s.ready, event.peer: event.epoch}
    s.suspected -= {event.peer}
    return ()


@action
def note_leave(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop waiting for a participant that leaves on its own account."""
    assert isinstance(event, Leave)
    s.dead |= {event.peer}
    if not s.cause.text:
        text = f"{event.peer} left: {event.cause}"
        s.cause = Cause(CauseCode.LEFT, text, (event.peer,))
    return ()


@action
def note_death(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop waiting for a process that was seen to end."""
    assert isinstance(event, Death)
    s.dead |= set(peers_meant(s, event))
    return ()


@action
def blame_death(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Name the death of a member as the cause of the rollback."""
    assert isinstance(event, Death)
    dead = tuple(sorted(set(peers_meant(s, event))))
    text = f"{', '.join(map(str, dead))} died: {event.cause} (seen by {event.by})"
    s.cause = Cause(CauseCode.DIED, text, dead)
    return ()


@action
def note_reforming(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Make the next epoch wait for the replacement of the ended process."""
    assert isinstance(event, Death)
    s.reforming |= {event.group}
    return ()


@action
def note_suspect(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop waiting for suspected processes until they send a message."""
    assert isinstance(event, Suspect)
    known = set(member_peers(s)) | {p for each in standing(s) for p in each.entry.peers()}
    suspected = (set(peers_meant(s, event)) & known) - {c.me}
    s.suspected |= suspected
    accused = tuple(sorted(suspected))
    names = ", ".join(map(str, accused))
    text = f"{names} is suspected: {event.cause} (seen by {event.by})"
    s.cause = Cause(CauseCode.SUSPECTED, text, accused)
    return ()


@action
def note_stuck(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Report the main thread as stalled until it has returned from the rollback."""
    assert isinstance(event, Suspect)
    s.stuck = True
    text = f"{c.me} hangs: {event.cause} (seen by {event.by})"
    s.cause = Cause.of_own(c.me, CauseCode.HANG, text)
    return ()


@action
def note_drain(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that these groups leave with the next commit."""
    assert isinstance(event, Drain)
    known = set(member_peers(s)) | {h.peer for h in s.hellos.values()} | {c.me}
    known |= {p for each in standing(s) for p in each.entry.peers()}
    s.leaving |= {p for p in known if p.group in event.groups}
    return ()


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
        "checkpoint": s.head.checkpoint,
        "fetched": fetched_after(s, skip=True),
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
    """Return a COMMIT of the current txn, as a step, a skip or a part of a live block.

    After a COMMIT of an asynchronous job all members are local, or leave. Not all members leave
    while groups outside need their state. If all votes declare that no step follows, this counts
    for all groups of the job.
    """
    assert s.head is not None and s.epoch is not None, "a txn exists only after an epoch record"
    commit = tally_of(votes).commit
    skip, number = commit.skip, s.head.n + 1
    after = committed(s, c, skip)
    present = {g.group for g in members(s)}
    asked = {p.group for p in s.leaving if p in set(member_peers(s))}
    leavers = commit.leaving | {group for group in asked if may_leave(s, group)}
    if c.bound and leavers >= present and (skip or not commit.is_last) and apart.absent_living(s):
        leavers = frozenset()
    gone = tuple(sorted(leavers & present))
    more: dict[str, object] = {"change": bool(leavers or joiners(s, c))}
    if c.bound:
        standing = apart.standing_after(s.epoch, number, after.step, gone)
        more = {"change": True, "standing": standing}
    elif isinstance(commit, Live):
        more["live"] = commit.part
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
        fetched=fetched_after(s, skip),
        skip=skip,
        leavers=gone,
        reasons=tuple(why_left(s, c, votes, group) for group in gone),
        last=leavers >= present,
        checkpoint=number if commit.checkpoint else s.head.checkpoint,
        **more,
    )


@action
def propose_abort(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose ABORT for the current txn."""
    s.proposed = True
    yield Decide(s.head, abort_record(s, c))


@action
def propose_refusal(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose the ABORT that the tally of the votes leads to."""
    assert isinstance(event, Ballot)
    verdict = verdict_on(s, c, event.votes)
    assert isinstance(verdict, Abort), "the row is guarded by tally_aborts"
    s.cause, s.proposed = verdict.cause, True
    s.skip |= verdict.skip
    record = abort_record(s, c)
    odd, accused = verdict.ranks, verdict.accused
    yield Decide(s.head, replace(record, odd=odd, accused=accused, diverged=verdict.ends_job))


@action
def propose_commit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose COMMIT: the ballot shows that all members voted YES."""
    assert isinstance(event, Ballot)
    s.proposed = True
    yield Decide(s.head, commit_record(s, c, event.votes))


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
    yield _start(s, c, begun_at(s))


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
    asked = event.last, event.skip, event.digest, event.checkpoint
    s.vote = Vote(c.me, event.manifest, leaves, *asked)
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


@action
def cancel_futures(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Complete the pending futures of the txn, whose step fails."""
    yield CancelFutures(s.cause.text)


@action
def abort_groups(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Abort the process groups of the epoch."""
    yield AbortGroups(s.cause.text)


@action
def restore(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Have the main thread unwind and restore the state at the start of the step."""
    s.restoring, s.vote, s.skip = s.token, None, False
    yield Restore(s.token, s.cause)


@action
def note_unwound(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The main thread has returned from the rollback."""
    s.restoring, s.stuck = None, False
    return ()


@action
def note_failure(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember why healing failed or the state could not be restored."""
    assert isinstance(event, HealFailed | Restored)
    s.cause = Cause.of_own(c.me, event.code, event.cause)
    return ()


@action
def suspect_silent(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Suspect the members that have not acknowledged within the window."""
    s.suspected |= {p for p in waited_for(s) if s.stopped.get(p, Token(0, 0)) < s.token} - {c.me}
    return ()


@action
def suspect_coordinator(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Suspect the coordinator: it sent no sign of life within the window."""
    silent = coordinator(s)
    assert silent is not None, "another participant gathers"
    s.suspected |= {silent}
    return ()


@action
def suspect_absent(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Suspect the members that have not entered the barrier in time, though others have."""
    s.suspected |= set(member_peers(s)) - in_barrier(s) - {c.me}
    return ()


@action
def note_absent(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Name the members that have not entered the barrier as the cause."""
    absent = tuple(sorted(set(member_peers(s)) - in_barrier(s)))
    text = f"not in the barrier in time: {', '.join(map(str, absent))}"
    s.cause = Cause(CauseCode.ABSENT, text, absent)
    return ()


@action
def note_no_begin(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Name the coordinator's silence as the cause: it neither ended the barrier nor the epoch."""
    silent = coordinator(s)
    text = f"{silent} did not report the barrier complete within ready_window"
    s.cause = Cause(CauseCode.NO_BEGIN, text, tuple(filter(None, [silent])))
    return ()


@action
def adopt_epoch(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Become a member of the new epoch, at its first txn."""
    assert isinstance(event, Decision) and event.record is not None
    record = event.record
    s.head, s.head_read, s.epoch = record, True, record
    s.token = Token(record.epoch, 1)
    s.commits, s.healed = 0, False
    s.lease, s.awaits = own_lease(record.leases, c), frozenset()
    s.proposed, s.vote = False, None
    s.paused, s.reforming = False, frozenset()
    inside = record.peer_set | {p for each in record.standing for p in each.entry.peers()}
    # Forget what only mattered to older epochs, so that memory stays bounded in a long run.
    s.stopped = {p: t for p, t in s.stopped.items() if t >= s.token}
    s.ready = {p: e for p, e in s.ready.items() if e >= record.epoch}
    current = {h.peer for h in s.hellos.values()}
    s.joining = (s.joining & current) - record.peer_set
    s.dead &= inside | current
    s.suspected &= (current | inside) - record.peer_set
    s.leaving &= inside | {c.me}
    return ()


@action
def heal(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Have the main thread rebuild the process groups, and fetch or send state.

    The groups that send state take turns from epoch to epoch, so that a state with unnoticed damage
    is not fetched every time.
    """
    assert s.epoch is not None
    place = my_place(s, c)
    holds = [g.ranks[c.index].current for g in members(s)]
    sources = [i for i, current in enumerate(holds) if current]
    behind = [i for i, current in enumerate(holds) if not current]
    turn = s.epoch.epoch
    feeder = {dst: sources[(turn + i) % len(sources)] for i, dst in enumerate(behind)}
    yield Heal(
        record=s.epoch,
        index=place,
        fetch_from=feeder.get(place),
        send_to=tuple(dst for dst, src in feeder.items() if src == place),
    )


@action
def note_healed(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Take over the position of the epoch's record, whose state this participant now holds."""
    assert isinstance(event, Healed) and s.epoch is not None
    s.step, s.lineage = s.epoch.step, s.epoch.lineage
    s.cursor, s.batches = s.epoch.cursor, s.epoch.batches
    s.leases, s.returned = s.epoch.leases, s.epoch.returned
    s.healed = True
    return ()


@action
def forget_epoch(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Leave the epoch, keeping the state."""
    s.epoch, s.vote, s.proposed, s.cause = None, None, False, NO_CAUSE
    s.joining, s.reforming = frozenset(), frozenset()
    s.stopped, s.ready = {}, {}
    assert s.head is not None, "only a newer head fences"
    s.token = s.head.token
    return ()


@action
def stand_apart(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Leave the epoch; requests to join that have arrived meanwhile stay valid."""
    s.epoch, s.vote, s.proposed, s.cause = None, None, False, NO_CAUSE
    s.stopped, s.ready = {}, {}
    assert s.head is not None, "it ended an epoch"
    s.token = s.head.token
    return ()


@action
def ask_to_come_in(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Ask to be in the next epoch, and count this participant among those that do."""
    word = hello(s, c)
    s.hellos = {**s.hellos, (c.me.group, c.me.rank): word}
    s.joining |= {c.me}
    yield Broadcast(Join(word))


@action
def tell_here(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Send the joiner a sign of life: this group will synchronize."""
    assert isinstance(event, Join)
    yield Tell(event.hello.peer, Here(c.me))


@action
def note_awaited(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Record which groups are waited for, and why."""
    away = apart.awaited(s, c)
    s.awaits = apart.names(away)
    s.cause = Cause(CauseCode.AWAITED, apart.in_words(s, c, away))
    return ()


@action
def suspect_awaited(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Suspect the groups that are waited for and have sent no sign of life."""
    s.suspected |= {p for each in apart.awaited(s, c) for p in each.entry.peers()}
    return ()


@action
def note_scope(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Take over a newer record of another scope. Slices that it has taken stay taken."""
    assert isinstance(event, ScopeRecord)
    s.others = tuple(e.after(event, c) if e.scope == event.scope else e for e in s.others)
    return ()


@action
def read_scopes(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Read the newest records of the scopes to which this one is bound."""
    for other in s.others:
        yield ReadScope(other.scope)


@action
def tell_held(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Report the scope that the txn waits for."""
    other = held_for(s, c)
    assert other is not None, "it is held"
    yield TellHeld(s.token, step_due(s), other.scope, other.cursor, needed_of(s, c, other))


@stops
def held(s: Local, c: Config, event: Event) -> Effect:
    """Another scope has not proceeded in time."""
    other = held_for(s, c)
    assert other is not None, "it is held"
    return Finish(
        f"step {step_due(s)} waits until scope {other.scope!r} has taken {needed_of(s, c, other)} "
        f"slices of the data; it has stood at {other.cursor} for {c.timeouts['flow_limit']:g} s; "
        "its own ranks say why",
        error="UpstreamTimeout",
    )


@action
def finish_flow(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Finish regularly: the scope that this one follows has ended."""
    other = ended_before(s, c)
    assert other is not None, "the row is guarded by flow_has_ended"
    yield Finish(
        f"scope {other.scope!r} has ended after {other.cursor} slices of the data, and with it the "
        f"data of this one, at step {step_due(s)}"
    )


@action
def finish(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Finish regularly."""
    yield Finish(getattr(event, "cause", "") or "left after a commit")


@action
def stop(s: Local, c: Config, event: Event, reason: str) -> Iterable[Effect]:
    """End with an error."""
    yield STOPS[reason](s, c, event)


def _fenced(me: Peer, newer: str) -> Effect:
    return Finish(
        f"{me} is replaced by {newer}, which took the same replica_id and rank; give each process "
        "its own, or end the older one",
        error="Fenced",
    )


def _in_words(newer: Peer, entry: Hello | RankEntry) -> str:
    return f"{newer} (pid {entry.pid} on {entry.host})"


@stops
def fenced(s: Local, c: Config, event: Event) -> Effect:
    """A newer incarnation of this identity asks to join."""
    assert isinstance(event, Join)
    return _fenced(c.me, _in_words(event.hello.peer, event.hello))


@stops
def answered(s: Local, c: Config, event: Event) -> Effect:
    """A newer incarnation of this identity has answered."""
    assert isinstance(event, Here)
    return _fenced(c.me, f"{event.peer}")


@stops
def replaced(s: Local, c: Config, event: Event) -> Effect:
    """A newer incarnation of this identity is in the newest epoch."""
    assert s.head is not None, "replaced by a record"
    newer = s.head.entries[c.me.group, c.me.rank]
    return _fenced(c.me, _in_words(c.me._replace(inc=newer.inc), newer))


@stops
def ended(s: Local, c: Config, event: Event) -> Effect:
    """The job has ended."""
    assert s.head is not None
    return Finish(
        "the job had ended before this process joined it: all groups left after step "
        f"{s.head.step}; to train further, start a new job from a checkpoint",
        error="JobEnded",
    )


@stops
def mates_missing(s: Local, c: Config, event: Event) -> Effect:
    """This group has not become whole in time."""
    ranks = ", ".join(map(str, missing_mates(s, c)))
    return Finish(
        f"rank {ranks} of group {c.me.group} did not join within {c.timeouts['quorum']:g} s; all "
        "ranks of a group must start together: start the whole group again",
        error="NotEnoughGroups",
    )


@stops
def no_epoch(s: Local, c: Config, event: Event) -> Effect:
    """The coordinator has not formed an epoch in time."""
    return Finish(
        f"{coordinator(s)} gathers the acknowledgements, and formed no epoch within "
        f"{c.timeouts['quorum']:g} s; its own error says why",
        error="NoEpoch",
    )


@stops
def too_few(s: Local, c: Config, event: Event) -> Effect:
    """Too few groups have joined in time."""
    rules = "".join(f", counted after {kind}({n})" for kind, n in c.rules)
    return Finish(
        f"{len(whole_groups(s, c))} whole replica groups within {c.timeouts['quorum']:g} s, but "
        f"min_replica_size is {c.min_groups}{rules}; start the missing groups, or raise "
        "quorum_timeout",
        error="NotEnoughGroups",
    )


def _steps_held(s: Local, groups: list[list[Hello]]) -> str:
    """The step of each rank before the first epoch, if the ranks differ; else an empty text."""
    ranks = [h for group in groups for h in group]
    if s.head is not None or len({h.step for h in ranks}) < 2:
        return ""
    steps = ", ".join(f"{h.peer} step {h.step}" for h in ranks)
    return (
        f". The ranks have begun with different steps ({steps}): load the files of one step on all "
        "ranks"
    )


@stops
def no_state(s: Local, c: Config, event: Event) -> Effect:
    """There are enough groups, but none holds the job's newest state."""
    groups = whole_groups(s, c)
    step = base_of(s, groups).step
    return Finish(
        f"no live replica group holds the state of the job at step {step}, and none came within "
        f"{c.timeouts['quorum']:g} s; start the job again, from a checkpoint if it has one; the "
        f"same job name may be used again{_steps_held(s, groups)}",
        error="NoState",
    )


@stops
def state_gone(s: Local, c: Config, event: Event) -> Effect:
    """No process holds the job's newest state, and none can provide it."""
    assert s.head is not None
    return Finish(
        f"no process holds the state of the job at step {s.head.step} any more: each one that had "
        "it has ended, or its update failed; start the job again, from a checkpoint if it has one; "
        "the same job name may be used again",
        error="NoState",
    )


@stops
def diverged(s: Local, c: Config, event: Event) -> Effect:
    """Replicas differ."""
    assert s.head is not None
    return Finish(
        f"{s.head.cause}. Equal replicas must stay equal: look for parameters that are changed "
        "outside of the optimizer step, gradients that are used before their reduction is over or "
        "that take no part in one, values that differ between groups (seeds, data, environment), "
        "and faulty memory. Then start the job again from a checkpoint; the same job name may be "
        "used again",
        error="Diverged",
    )


@stops
def in_doubt(s: Local, c: Config, event: Event) -> Effect:
    """The bus stayed unreachable, and it is unknown whether the vote led to a COMMIT."""
    return _without_bus(s, c, "in doubt: voted YES, decision unknown; ")


@stops
def without_bus(s: Local, c: Config, event: Event) -> Effect:
    """The bus stayed unreachable."""
    return _without_bus(s, c)


def _without_bus(s: Local, c: Config, doubt: str = "") -> Effect:
    return Finish(
        f"{doubt}the bus was out of reach for {c.timeouts['bus_limit']:g} s or more after an "
        f"operation on it was given up, at step {s.step}, epoch {s.token.epoch}, txn {s.token.txn}",
        error="InDoubt",
    )


def _unwritten(s: Local, record: Record) -> Record:
    assert s.epoch is not None, "a txn exists only in an epoch"
    # Without a register no author wins: equal decisions of different authors must be equal.
    return replace(record, by=s.epoch.by, cause="", code=CauseCode.NONE, accused=())


def _assume(s: Local, record: Record) -> None:
    s.head, s.proposed = _unwritten(s, record), False


@action
def assume_commit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Assume COMMIT without asking the register or any participant. Wrong on purpose."""
    record = replace(commit_record(s, c, ()), change=False, leavers=(), reasons=(), last=False)
    _assume(s, record)
    return ()


@action
def assume_abort(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Assume ABORT without asking the register or any participant. Wrong on purpose."""
    _assume(s, abort_record(s, c))
    return ()


@action
def tell_commit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Decide COMMIT by a broadcast, without the register. Wrong on purpose."""
    assert isinstance(event, Ballot)
    yield Broadcast(Decision(_unwritten(s, commit_record(s, c, event.votes))))


@action
def tell_abort(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Decide ABORT by a broadcast, without the register. Wrong on purpose."""
    yield Broadcast(Decision(_unwritten(s, abort_record(s, c))))


@action
def succeed_epoch(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose the next epoch as the successor of this one, because the register holds no decision.

    Outside every epoch it succeeds the last record, as usual.
    """
    proposal = next_epoch(s, c)
    assert proposal is not None, "the row is guarded by epoch_possible"
    s.proposed = True
    yield Decide(s.epoch or s.head, proposal)
