"""Effects by name: what a row does to the participant, and the ``Effect`` values it asks for.

``EFFECTS`` is what a spec may name. Each action changes the ``Local`` it is given (the copy of
this event) and returns the effects in the order in which they must be carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fft.messages.protocol import (
    AbortGroups,
    Ack,
    Apply,
    Ballot,
    Begin,
    Broadcast,
    BusDown,
    BusMessage,
    CancelFutures,
    CastVote,
    Death,
    Decide,
    Decision,
    Drain,
    DropBallot,
    Effect,
    Event,
    Finish,
    Heal,
    Healed,
    HealFailed,
    Hello,
    Here,
    Join,
    Leave,
    Peer,
    Prepared,
    RankEntry,
    ReadHead,
    Ready,
    Record,
    Restore,
    Restored,
    SetTimer,
    StartTxn,
    Suspect,
    Tell,
    Timer,
    Token,
    Vote,
)
from fft.protocol.equality import differing, odd_ones, tell
from fft.protocol.state import (
    FREE_ROLLBACKS,
    Config,
    Local,
    behind,
    committed,
    contributors,
    coordinator,
    hello,
    joiners,
    learners,
    member_at,
    member_peers,
    members,
    missing_mates,
    my_place,
    next_epoch,
    peers_meant,
    waited_for,
    whole_groups,
)

Action = Callable[[Local, Config, Event], Iterable[Effect]]
EFFECTS: dict[str, Action] = {}


def action(function: Action) -> Action:
    """Register an action under its function name."""
    EFFECTS[function.__name__] = function
    return function


# --- what others said ---------------------------------------------------------------------------


def _heard(s: Local, h: Hello) -> None:
    key = (h.peer.group, h.peer.rank)
    before = s.hellos.get(key)
    if before is not None and before.peer.inc < h.peer.inc:
        s.dead |= {before.peer}
    listed = member_at(s, *key)
    if listed is not None and listed.inc < h.peer.inc:
        s.dead |= {Peer(*key, listed.inc)}
    s.hellos = {**s.hellos, key: h}
    s.suspected -= {h.peer}


@action
def note_hello(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember who spoke; an older incarnation of the same identity has ended."""
    assert isinstance(event, Join)
    _heard(s, event.hello)
    return ()


@action
def note_join(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember who asks to come in."""
    assert isinstance(event, Join)
    s.joining |= {event.hello.peer}
    return ()


@action
def note_ack(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember who has stopped, and with what state."""
    assert isinstance(event, Ack)
    _heard(s, event.hello)
    s.stopped = {**s.stopped, event.hello.peer: event.token}
    return ()


@action
def note_ready(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember who is in the barrier."""
    assert isinstance(event, Ready)
    s.ready = {**s.ready, event.peer: event.epoch}
    s.suspected -= {event.peer}
    return ()


@action
def note_leave(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Whoever leaves by its own word is waited for no longer."""
    assert isinstance(event, Leave)
    s.dead |= {event.peer}
    s.cause = s.cause or f"{event.peer} left: {event.cause}"
    return ()


@action
def note_death(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Whoever was seen to end is waited for no longer."""
    assert isinstance(event, Death)
    lost = set(peers_meant(s, event))
    s.dead |= lost
    if lost & set(member_peers(s)):
        s.cause = f"{', '.join(map(str, sorted(lost)))} died: {event.cause} (seen by {event.by})"
    return ()


@action
def note_suspect(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Who does not move, or is not heard of, is waited for no longer, until it says it is back."""
    assert isinstance(event, Suspect)
    suspected = (set(peers_meant(s, event)) & set(member_peers(s))) - {c.me}
    s.suspected |= suspected
    if suspected:
        names = ", ".join(map(str, sorted(suspected)))
        s.cause = f"{names} is suspected: {event.cause} (seen by {event.by})"
    return ()


@action
def note_stuck(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """My own main thread does not move: I say so until it has come back from the rollback."""
    assert isinstance(event, Suspect)
    s.stuck = True
    s.cause = f"{c.me} hangs: {event.cause} (seen by {event.by})"
    return ()


@action
def note_drain(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """These groups leave with the next commit."""
    assert isinstance(event, Drain)
    known = set(member_peers(s)) | {h.peer for h in s.hellos.values()} | {c.me}
    s.leaving |= {p for p in known if p.group in event.groups}
    return ()


@action
def tell_drain(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Pass a drain on to everyone."""
    assert isinstance(event, Drain)
    yield Broadcast(Drain(groups=event.groups, by=event.by))


@action
def greet(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Tell a joiner who I am (it may not have heard me)."""
    assert isinstance(event, Join)
    yield Tell(event.hello.peer, Join(hello(s, c)))


# --- saying -------------------------------------------------------------------------------------


@action
def say_join(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Ask to be in the next epoch."""
    yield Broadcast(Join(hello(s, c)))


def _tell(to: Peer | None, message: BusMessage) -> Effect:
    return Broadcast(message) if to is None else Tell(to, message)


def _acknowledge(s: Local, c: Config, word: Hello) -> Iterable[Effect]:
    s.told = coordinator(s)
    s.hellos = {**s.hellos, (c.me.group, c.me.rank): word}
    if s.told == c.me:
        s.stopped = {**s.stopped, c.me: s.token}
    else:
        yield _tell(s.told, Ack(word, s.token))


@action
def say_ack(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Acknowledge the end of the epoch to its coordinator, with the state I hold."""
    return _acknowledge(s, c, hello(s, c))


@action
def say_ack_committed(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Acknowledge the end of the epoch with the state of the commit that ends it."""
    return _acknowledge(s, c, hello(s, c, after=s.head))


@action
def say_ready(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Enter the barrier of the epoch: tell its coordinator."""
    to = coordinator(s)
    if to == c.me:
        s.ready = {**s.ready, c.me: s.token.epoch}
    else:
        yield _tell(to, Ready(c.me, s.token.epoch))


@action
def say_begin(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Let everyone leave the barrier."""
    yield Broadcast(Begin(c.me, s.token.epoch))


@action
def say_here(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Tell everyone that I live: members that wait for an epoch, joiners that wait for a commit."""
    yield Broadcast(Here(c.me))


@action
def say_leave(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Tell everyone not to wait for me."""
    yield Broadcast(Leave(c.me, getattr(event, "cause", "") or "shut down"))


@action
def say_decision(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Tell everyone the last decision of the job."""
    yield Broadcast(Decision(s.head))


@action
def drop_ballot(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The ballot of the txn that is decided is no longer needed."""
    assert s.head is not None, "it is decided"
    yield DropBallot(s.head.token)


# --- the register -------------------------------------------------------------------------------


@action
def read_head(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Learn the last decision of the job."""
    yield ReadHead()


@action
def note_head(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Take over the last decision of the job."""
    assert isinstance(event, Decision)
    s.head_read = True
    s.proposed = False
    if event.record is not None:
        s.head = event.record
        s.joining -= {p for g in event.record.members for p in g.peers()}
        if event.record.kind == "abort" and event.record.cause:
            s.cause = event.record.cause
        if c.me in event.record.odd:
            s.lineage = ""
    return ()


@action
def mark_doubtful(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The decision of my txn was missed: if states were compared in it, mine may be an odd one."""
    if s.vote is not None and s.vote.digest is not None:
        s.lineage = ""
    return ()


@action
def propose_epoch(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose the next epoch from those who stopped and those who joined."""
    proposal = next_epoch(s, c)
    assert proposal is not None, "the row is guarded by epoch_possible"
    s.proposed = True
    yield Decide(s.head, proposal)


@action
def propose_learners(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose the next epoch; who is behind fetches its state while the others compute."""
    proposal = next_epoch(s, c)
    assert proposal is not None, "the row is guarded by epoch_possible"
    s.proposed = True
    yield Decide(s.head, replace(proposal, learners=behind(proposal)))


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
        "by": c.me,
        **fields,
    }
    return Record(**values)  # type: ignore[arg-type]


def _abort_record(s: Local, c: Config) -> Record:
    assert s.head is not None
    cause = f"{c.me}: {s.cause or 'no decision in time'}"[:2000]
    return _successor(s, c, kind="abort", step=s.head.step, cause=cause, skip=s.skip)


def _commit_record(s: Local, c: Config, votes: Sequence[Vote]) -> Record:
    skip = any(v.skip for v in votes)
    after = committed(s, c, skip)
    present = {g.group for g in members(s)}
    leavers = {v.peer.group for v in votes if v.leaving or (v.last and not skip)}
    leavers |= {p.group for p in s.leaving if p in set(member_peers(s))}
    return _successor(
        s,
        c,
        kind="commit",
        step=after.step,
        lineage=after.lineage,
        cursor=after.cursor,
        batches=after.batches,
        skip=skip,
        change=bool(leavers or joiners(s, c)),
        leavers=tuple(sorted(leavers & present)),
        last=leavers >= present,
    )


@action
def propose_abort(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose ABORT for the txn I stand at."""
    s.proposed = True
    yield Decide(s.head, _abort_record(s, c))


@action
def propose_apart(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose ABORT, for states differ: it names the odd ones, or ends the job."""
    assert isinstance(event, Ballot)
    odd = odd_ones(event.votes) if c.on_divergence == "heal" else None
    s.cause = f"replicas differ after step {s.step}: {tell(differing(event.votes))}"[:1900]
    s.proposed = True
    yield Decide(s.head, replace(_abort_record(s, c), odd=odd or (), diverged=odd is None))


@action
def propose_commit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose COMMIT: I have seen that all voted YES."""
    s.proposed = True
    votes = event.votes  # type: ignore[union-attr]  # the row is for ballots
    yield Decide(s.head, _commit_record(s, c, votes))


# --- the txn ------------------------------------------------------------------------------------


@action
def cast_vote(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Vote YES."""
    assert isinstance(event, Prepared)
    # The state of a learner has come since the txn began: it is what it was compared with.
    digest = None if c.me.group in learners(s) else event.digest
    s.edits = event.edited
    s.vote = Vote(c.me, event.manifest, c.me in s.leaving, event.last, event.skip, digest)
    yield CastVote(s.token, s.vote, len(member_peers(s)))


@action
def note_cause(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember why this rank cannot go on with the txn."""
    cause = getattr(event, "cause", "")
    s.skip = isinstance(event, Prepared) and event.yes and event.skip
    if s.skip:
        cause = "the user skipped this step here, before its reductions"
    elif isinstance(event, Prepared) and event.yes:
        cause = (
            f"{event.manifest.count} gradient reductions in this txn, but a YES needs "
            f"{c.min_reductions}: a step that reduced nothing must not be committed"
        )
    s.cause = cause or s.cause
    return ()


@action
def note_misfit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Say which manifests do not fit together."""
    votes = event.votes  # type: ignore[union-attr]  # the row is for ballots
    counts = ", ".join(f"{v.peer}: {v.manifest.count}x/{v.manifest.bytes}B" for v in votes)
    s.cause = f"the votes' manifests do not fit together ({counts})"[:1900]
    if skipping := [str(v.peer) for v in votes if v.skip]:
        s.skip = True
        s.cause = f"the user skipped this step on {', '.join(skipping)}; {s.cause}"[:1900]
    return ()


@action
def apply(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Run the optimizer step, or what belongs to a skip."""
    assert s.head is not None
    mine = s.head.kind == "commit" and s.head.token == s.token
    # Of a decision that was missed, a later record's lineage tells.
    s.skip = s.head.skip if mine else s.head.lineage == committed(s, c, skip=True).lineage
    yield Apply(s.head, s.skip)


@action
def note_applied(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """What was committed, a step or a skip, is in the state."""
    after = committed(s, c, s.skip)
    s.step, s.lineage = after.step, after.lineage
    s.cursor, s.batches = after.cursor, after.batches
    s.commits += 1
    s.vote, s.skip, s.rollbacks = None, False, 0
    return ()


@action
def mark_torn(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The committed step could not be applied: this state is lost."""
    s.lineage = ""
    s.vote, s.skip = None, False
    s.cause = f"optimizer step failed after COMMIT: {getattr(event, 'cause', '')}"
    return ()


@action
def next_txn(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stand at the next txn of the epoch."""
    s.token = Token(s.token.epoch, s.token.txn + 1)
    return ()


@action
def start_txn(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Let the main thread begin the txn I stand at."""
    able = contributors(s, c)
    s.vote, s.proposed, s.skip, s.cause = None, False, False, ""
    at: Local | Record = s
    if not s.healed:  # a learner's body takes the others' place in the job, not its own
        assert s.epoch is not None
        at = s.epoch
    yield StartTxn(
        token=s.token,
        step=at.step,
        lineage=at.lineage,
        cursor=at.cursor,
        index=able.index(c.me.group) if c.me.group in able else None,
        participants=len(able),
        members=tuple(g.group for g in members(s)),
        commits=s.commits,
    )


# --- rollback and healing -----------------------------------------------------------------------


@action
def cancel_futures(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Fail the pending futures of the txn."""
    yield CancelFutures(s.cause)


@action
def abort_groups(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Abort the process groups of the epoch."""
    yield AbortGroups(s.cause)


@action
def restore(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Have the main thread unwind and put back the start of the step."""
    s.restoring, s.vote, s.skip = s.token, None, False
    yield Restore(s.token, s.cause)


@action
def note_restored(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The main thread is unwound and the start of the step is back, unless it says otherwise."""
    assert isinstance(event, Restored)
    if event.torn:
        s.lineage, s.cause = "", event.cause
    s.restoring, s.stuck = None, False
    return ()


@action
def suspect_silent(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Leave out of the next epoch who has not acknowledged in the window."""
    s.suspected |= {p for p in waited_for(s) if s.stopped.get(p, Token(0, 0)) < s.token} - {c.me}
    return ()


@action
def suspect_coordinator(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Whoever was to form the next epoch has given no sign of life in the window."""
    silent = coordinator(s)
    assert silent is not None, "the part is guarded by another_gathers"
    s.suspected |= {silent}
    return ()


@action
def suspect_absent(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Count as lost who has not come into the barrier in the window, though others have."""
    ready = {p for p in member_peers(s) if s.ready.get(p, 0) == s.token.epoch}
    absent = set(member_peers(s)) - ready
    # Where nobody came, whoever is at fault kept all from coming: the acknowledgements will tell.
    if ready:
        s.suspected |= absent - {c.me}
    s.cause = f"not in the barrier in time: {', '.join(map(str, sorted(absent)))}"
    return ()


@action
def note_no_begin(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The coordinator has neither let the barrier end nor given the epoch up."""
    s.cause = f"no word from {coordinator(s)} that all are in the barrier"
    return ()


@action
def adopt_epoch(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Become a member of the new epoch, standing at its first txn."""
    assert isinstance(event, Decision) and event.record is not None
    record = event.record
    s.head, s.head_read, s.epoch = record, True, record
    s.token = Token(record.epoch, 1)
    s.commits, s.healed = 0, False
    s.proposed, s.vote = False, None
    s.paused = False
    inside = record.peer_set
    # Forget what only mattered to older epochs, so that a long run does not grow.
    s.stopped = {p: t for p, t in s.stopped.items() if t >= s.token}
    s.ready = {p: e for p, e in s.ready.items() if e >= record.epoch}
    current = {h.peer for h in s.hellos.values()}
    s.joining = (s.joining & current) - inside
    s.dead &= inside | current
    s.suspected &= current - inside
    s.leaving &= inside | {c.me}
    return ()


@action
def heal(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Have the main thread rebuild the groups, and fetch or send state."""
    assert s.epoch is not None
    place = my_place(s, c)
    holds = [g.ranks[c.me.rank].current for g in members(s)]
    sources = [i for i, current in enumerate(holds) if current]
    behind = [i for i, current in enumerate(holds) if not current]
    feeder = {dst: sources[i % len(sources)] for i, dst in enumerate(behind)}
    yield Heal(
        record=s.epoch,
        index=place,
        fetch_from=feeder.get(place),
        send_to=tuple(dst for dst, src in feeder.items() if src == place),
    )


@action
def note_healed(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """My state is that of the epoch's record."""
    assert isinstance(event, Healed) and s.epoch is not None
    s.step, s.lineage = s.epoch.step, s.epoch.lineage
    s.cursor, s.batches = s.epoch.cursor, s.epoch.batches
    s.healed = True
    return ()


@action
def note_heal_failed(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember why healing failed; a state that was touched is lost."""
    assert isinstance(event, HealFailed)
    s.cause = event.cause
    if event.torn:
        s.lineage = ""
    return ()


@action
def forget_epoch(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Be outside every epoch again, with the state I hold."""
    s.epoch, s.vote, s.proposed, s.cause = None, None, False, ""
    s.joining = frozenset()
    s.stopped, s.ready = {}, {}
    assert s.head is not None, "only a newer head fences"
    s.token = s.head.token
    return ()


# --- timers and the end -------------------------------------------------------------------------


def arm(s: Local, c: Config, name: str, factor: float = 1.0) -> SetTimer:
    """Arm (or re-arm) one timer for ``factor`` times its configured seconds."""
    s.timer_serial += 1
    s.timers = {**s.timers, name: s.timer_serial}
    return SetTimer(name, c.timeouts[name] * factor, s.timer_serial)


_LONGEST_PAUSE = 64.0
"""In units of the ``pause`` timeout."""


@action
def count_rollback(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """One more rollback without a commit between."""
    s.rollbacks += 1
    return ()


@action
def pause(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Wait before the next epoch: 1, 2, 4 … the longer the more rollbacks came in a row."""
    s.paused = True
    yield arm(s, c, "pause", min(2.0 ** (s.rollbacks - FREE_ROLLBACKS - 1), _LONGEST_PAUSE))


@action
def end_pause(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The pause is over."""
    s.paused = False
    return ()


@action
def rearm(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Arm again the timer that fired."""
    assert isinstance(event, Timer)
    yield arm(s, c, event.name)


@action
def rearm_join_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """A member gave a sign of life: wait for it to let me in."""
    yield arm(s, c, "join_window")


@action
def rearm_quorum(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """It may take as long as its step takes."""
    yield arm(s, c, "quorum")


@action
def rearm_ack_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The others tell somebody else: they have the window once more."""
    yield arm(s, c, "ack_window")


@action
def rearm_coordinator_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The coordinator lives: it has the window once more."""
    yield arm(s, c, "coordinator_window")


@action
def rearm_ready_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The epoch is formed: from now on its members have the window to come in.

    Its coordinator knows who is absent, so it is the first to give up.
    """
    yield arm(s, c, "ready_window", 1.0 if coordinator(s) in (None, c.me) else 1.5)


@action
def note_bus_down(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The bus is out of reach."""
    assert isinstance(event, BusDown)
    s.deaf = s.deaf or event.for_good
    s.bus_down = True
    return ()


@action
def arm_bus_timers(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Try again soon; give the bus the limit to come back."""
    for name in ("bus_retry", "bus_limit"):
        if name not in s.timers:
            yield arm(s, c, name)


@action
def give_up_proposal(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """What I proposed may be lost with the bus: I may propose again.

    Not before the retry timer: a proposal that is repeated at once, and fails at once, would leave
    no time for any timer, that of giving up included.
    """
    s.proposed = False
    return ()


@action
def recast_vote(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Cast my YES again: the ballot may not have it. Counted once, since votes carry names."""
    assert s.vote is not None, "PREPARED is entered by voting"
    yield CastVote(s.token, s.vote, len(member_peers(s)))


@action
def finish(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Out, in good order."""
    yield Finish(getattr(event, "cause", "") or "left after a commit")


@action
def stop_fenced(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Out: a newer incarnation has this identity."""
    newer: Hello | RankEntry
    if isinstance(event, Join):
        newer, peer = event.hello, event.hello.peer
    else:
        assert s.head is not None, "replaced by a record"
        newer = s.head.entries[c.me.group, c.me.rank]
        peer = c.me._replace(inc=newer.inc)
    yield Finish(
        f"{c.me} is replaced by {peer} (pid {newer.pid} on {newer.host}), which took the "
        "same replica_id and rank; give each process its own, or end the older one",
        error="Fenced",
    )


@action
def stop_ended(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Out: the job has ended."""
    assert s.head is not None
    yield Finish(
        f"the job has ended: all its groups left after step {s.head.step}; to go on, start a new "
        "job from a checkpoint",
        error="JobEnded",
    )


@action
def stop_no_quorum(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Out: no epoch could be formed in time."""
    limit = c.timeouts["quorum"]
    if s.epoch is None and (missing := missing_mates(s, c)):
        ranks = ", ".join(map(str, missing))
        yield Finish(
            f"no word from rank {ranks} of my group {c.me.group} within {limit:g} s; the ranks of "
            "a group come and go together: start the whole group again",
            error="NotEnoughGroups",
        )
        return
    groups = whole_groups(s, c)
    gathers = coordinator(s) or c.me
    if gathers != c.me:
        yield Finish(
            f"{gathers} gathers the acknowledgements, and formed no epoch within {limit:g} s; "
            "its own error says why",
            error="NoEpoch",
        )
        return
    if len(groups) < c.min_groups:
        yield Finish(
            f"{len(groups)} whole replica groups within {limit:g} s, but min_replica_size is "
            f"{c.min_groups}; start the missing groups, or raise quorum_timeout",
            error="NotEnoughGroups",
        )
        return
    step = s.head.step if s.head else 0
    yield Finish(
        f"no live replica group holds the state of committed step {step}, and none came within "
        f"{limit:g} s; restore a checkpoint under a new job name",
        error="NoState",
    )


@action
def stop_diverged(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Out: replicas differ."""
    assert s.head is not None
    yield Finish(
        f"{s.head.cause}. Equal replicas must stay equal: look for parameters that are changed "
        "outside of the optimizer step, gradients that are used before their reduction is over or "
        "that take no part in one, values that differ between groups (seeds, data, environment), "
        "and faulty memory. Go on from a checkpoint under a new job name",
        error="Diverged",
    )


@action
def stop_in_doubt(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Out: the bus stayed out of reach."""
    doubt = "in doubt: voted YES, decision unknown; " if s.vote else ""
    yield Finish(
        f"{doubt}the bus was out of reach for {c.timeouts['bus_limit']:g} s at step {s.step}, "
        f"epoch {s.token.epoch}, txn {s.token.txn}",
        error="InDoubt",
    )


# --- for teaching specs ---------------------------------------------------------------------------
# What a protocol without the register does. Wrong on purpose: two participants can hold different
# decisions of one txn. `fft check` shows how (fsm_specs/teaching, fft/prove/mutants.py).


def _unwritten(s: Local, record: Record) -> Record:
    assert s.epoch is not None, "a txn exists only in an epoch"
    # Without a register there is no winner: equal decisions must be equal, whoever took them.
    return replace(record, by=s.epoch.by, cause="")


def _assume(s: Local, record: Record) -> None:
    s.head, s.proposed = _unwritten(s, record), False


@action
def assume_commit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Take COMMIT for granted, without asking the register or anybody. Wrong on purpose."""
    record = replace(_commit_record(s, c, ()), change=False, leavers=(), last=False)
    _assume(s, record)
    return ()


@action
def assume_abort(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Take ABORT for granted, without asking the register or anybody. Wrong on purpose."""
    _assume(s, _abort_record(s, c))
    return ()


@action
def tell_commit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Decide COMMIT by telling everyone; the register does not hear of it. Wrong on purpose."""
    votes = event.votes  # type: ignore[union-attr]  # the row is for ballots
    yield Broadcast(Decision(_unwritten(s, _commit_record(s, c, votes))))


@action
def tell_abort(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Decide ABORT by telling everyone; the register does not hear of it. Wrong on purpose."""
    yield Broadcast(Decision(_unwritten(s, _abort_record(s, c))))


@action
def succeed_epoch(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Propose the next epoch as successor of my epoch, for the register knows of no decision.

    Outside every epoch: of the last record, as any other.
    """
    proposal = next_epoch(s, c)
    assert proposal is not None, "the row is guarded by epoch_possible"
    s.proposed = True
    yield Decide(s.epoch or s.head, proposal)
