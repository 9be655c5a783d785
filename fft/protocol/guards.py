"""The type of a guard, and the registry of guards."""

from __future__ import annotations

from collections.abc import Callable

from fft.messages.protocol import (
    Ballot,
    Begin,
    BusDown,
    Death,
    Decision,
    Drain,
    Event,
    HealFailed,
    Here,
    Join,
    Leave,
    Peer,
    Prepared,
    Record,
    Restored,
    Suspect,
    Token,
)
from fft.protocol import apart, forming
from fft.protocol.active import chosen
from fft.protocol.apart import in_job
from fft.protocol.flow import ended_before, held_for
from fft.protocol.forming import behind, next_epoch
from fft.protocol.state import (
    FREE_ROLLBACKS,
    Config,
    Local,
    all_in_barrier,
    awaited,
    committed,
    coordinator,
    in_barrier,
    is_member,
    is_older_self,
    leavers,
    member_peers,
    members,
    missing_mates,
    peers_meant,
    suffice,
    waited_for,
    whole_groups,
)
from fft.protocol.tally import Abort, Commit, verdict_on

Guard = Callable[..., bool]
"""(state, configuration, event) and, for some, the argument in the row → whether it holds."""
GUARDS: dict[str, Guard] = {}


def guard(function: Guard) -> Guard:
    """Register a guard under its function name."""
    GUARDS[function.__name__] = function
    return function


def record_of(event: Event) -> Record | None:
    """Return the record of a decision; None for another event or an empty register."""
    return event.record if isinstance(event, Decision) else None


@guard
def votes_yes(s: Local, c: Config, event: Event) -> bool:
    """The step function succeeded with the minimum number of reductions; live blocks need none."""
    if not isinstance(event, Prepared) or not event.yes:
        return False
    return event.manifest.count >= c.min_reductions or bool(event.manifest.block)


@guard
def says_skip(s: Local, c: Config, event: Event) -> bool:
    """The step function succeeded, and the user skips the step on this rank."""
    return isinstance(event, Prepared) and event.yes and event.skip


@guard
def reduced_too_little(s: Local, c: Config, event: Event) -> bool:
    """The step function succeeded and is not skipped, but took part in too few reductions."""
    if not isinstance(event, Prepared) or not event.yes or event.skip:
        return False
    return event.manifest.count < c.min_reductions


@guard
def is_healed(s: Local, c: Config, event: Event) -> bool:
    """The process groups are rebuilt and this participant's state is current."""
    return s.healed


@guard
def tally_commits(s: Local, c: Config, event: Event) -> bool:
    """All members voted YES, and the votes match."""
    return isinstance(event, Ballot) and isinstance(verdict_on(s, c, event.votes), Commit)


@guard
def tally_aborts(s: Local, c: Config, event: Event) -> bool:
    """All members voted YES, and the votes do not match."""
    return isinstance(event, Ballot) and isinstance(verdict_on(s, c, event.votes), Abort)


@guard
def decided_commit(s: Local, c: Config, event: Event) -> bool:
    """The register decides COMMIT for the current txn."""
    record = record_of(event)
    return record is not None and record.kind == "commit" and record.token == s.token


@guard
def decided_abort(s: Local, c: Config, event: Event) -> bool:
    """The register decides ABORT for the current txn."""
    record = record_of(event)
    return record is not None and record.kind == "abort" and record.token == s.token


@guard
def epoch_ends(s: Local, c: Config, event: Event) -> bool:
    """The commit is the last one of its epoch."""
    record = record_of(event)
    return record is not None and record.change


@guard
def i_leave(s: Local, c: Config, event: Event) -> bool:
    """This group leaves with the commit, which is that of the event or the newest one."""
    record = record_of(event) or s.head
    return record is not None and c.me.group in record.leavers


@guard
def settled_commit(s: Local, c: Config, event: Event) -> bool:
    """A later record's lineage shows that the current txn was committed."""
    record = record_of(event)
    return (
        record is not None
        and record.token > s.token
        and s.vote is not None
        and record.lineage in (committed(s, c).lineage, committed(s, c, skip=True).lineage)
    )


@guard
def head_is_beyond(s: Local, c: Config, event: Event) -> bool:
    """The register is past the txn being applied: an ABORT of a later txn, or a newer epoch."""
    return s.head is not None and s.head.token > s.token


@guard
def change_due(s: Local, c: Config, event: Event) -> bool:
    """The commit being applied ends the epoch."""
    return s.head is not None and s.head.kind == "commit" and s.head.change


@guard
def was_compared(s: Local, c: Config, event: Event) -> bool:
    """This vote has a state digest, so a missed decision may name this rank as divergent."""
    return s.vote is not None and s.vote.digest is not None


@guard
def missed_decisions(s: Local, c: Config, event: Event) -> bool:
    """Records before this one were missed, among them perhaps the decision of the current txn."""
    record, known = record_of(event), s.head.n if s.head is not None else 0
    return record is not None and record.n > known + 1


@guard
def says_why(s: Local, c: Config, event: Event) -> bool:
    """The decision is an ABORT with a cause."""
    record = record_of(event)
    return record is not None and record.kind == "abort" and bool(record.cause)


@guard
def gives_my_state_up(s: Local, c: Config, event: Event) -> bool:
    """The decision names this rank as divergent."""
    record = record_of(event)
    return record is not None and c.me in record.odd


@guard
def i_won(s: Local, c: Config, event: Event) -> bool:
    """The decision is the one that this participant proposed."""
    return isinstance(event, Decision) and event.won and event.record is not None


@guard
def i_decided(s: Local, c: Config, event: Event) -> bool:
    """This participant wrote the newest decision that it knows."""
    return s.head is not None and s.head.by == c.me


@guard
def ends_a_txn(s: Local, c: Config, event: Event) -> bool:
    """The decision is about a txn, not about the next epoch."""
    record = record_of(event)
    return record is not None and record.kind != "epoch"


@guard
def proposed(s: Local, c: Config, event: Event) -> bool:
    """This participant has a proposal under way."""
    return s.proposed


@guard
def no_head(s: Local, c: Config, event: Event) -> bool:
    """The head register has been read and is empty."""
    return s.head_read and s.head is None


@guard
def has_history(s: Local, c: Config, event: Event) -> bool:
    """The event is a read or an announcement of a register record."""
    return record_of(event) is not None


@guard
def head_known(s: Local, c: Config, event: Event) -> bool:
    """The head register has been read."""
    return s.head_read


@guard
def epoch_with_me(s: Local, c: Config, event: Event) -> bool:
    """The record forms a newer epoch that includes this incarnation."""
    record = record_of(event)
    return (
        record is not None
        and record.kind == "epoch"
        and record.epoch > s.token.epoch
        and any(c.me in g.peers() for g in record.members)
    )


@guard
def moved_on(s: Local, c: Config, event: Event) -> bool:
    """The record belongs to a newer epoch. Rows for an epoch with this participant come first."""
    record = record_of(event)
    return record is not None and record.epoch > s.token.epoch


@guard
def fenced(s: Local, c: Config, event: Event) -> bool:
    """The head belongs to a newer epoch than this participant does."""
    return s.head is not None and s.head.epoch > s.token.epoch


@guard
def adopted(s: Local, c: Config, event: Event) -> bool:
    """The head is the record of this participant's epoch, so nothing was decided in it yet."""
    return s.head is not None and s.epoch is not None and s.head.n == s.epoch.n


@guard
def heard_first(s: Local, c: Config, event: Event) -> bool:
    """The event is a `join` of another participant, and the first message from it."""
    if not isinstance(event, Join) or event.hello.peer == c.me:
        return False
    peer = event.hello.peer
    known = s.hellos.get((peer.group, peer.rank))
    return known is None or known.peer != peer


@guard
def asks_to_come_in(s: Local, c: Config, event: Event) -> bool:
    """The `join` is not a member's message from before the epoch was formed.

    A member that knows the record of this epoch, or a later one, and still asks to join is not in
    the epoch and will not enter it.
    """
    if not isinstance(event, Join):
        return False
    hello = event.hello
    return s.epoch is None or not is_member(s, hello.peer) or hello.head >= s.epoch.n


@guard
def answers_joiners(s: Local, c: Config, event: Event) -> bool:
    """This participant wrote the last decision, or no member of its epoch did."""
    return s.head is not None and (s.head.by == c.me or not is_member(s, s.head.by))


def _is_newer_self(c: Config, peer: Peer) -> bool:
    return peer[:2] == c.me[:2] and peer.inc > c.me.inc


@guard
def superseded(s: Local, c: Config, event: Event) -> bool:
    """A newer incarnation of this participant's identity asks to join."""
    return isinstance(event, Join) and _is_newer_self(c, event.hello.peer)


@guard
def from_older_self(s: Local, c: Config, event: Event) -> bool:
    """The `join` comes from an older incarnation of this identity that does not know it was
    replaced."""
    return isinstance(event, Join) and is_older_self(c, event.hello.peer)


@guard
def from_newer_self(s: Local, c: Config, event: Event) -> bool:
    """The sender of the sign of life is a newer incarnation of this identity."""
    return isinstance(event, Here) and _is_newer_self(c, event.peer)


@guard
def replaced(s: Local, c: Config, event: Event) -> bool:
    """The newest record forms an epoch with a newer incarnation of this identity."""
    entry = s.head.entries.get((c.me.group, c.me.rank)) if s.head else None
    return entry is not None and entry.inc > c.me.inc


@guard
def mates_are_here(s: Local, c: Config, event: Event) -> bool:
    """All ranks of this group ask to join, as far as is known here.

    While one is missing no member can admit the group. The missing rank may have left, and its
    `leave` may have been lost.
    """
    return not missing_mates(s, c)


@guard
def mates_may_come(s: Local, c: Config, event: Event) -> bool:
    """All ranks of this group ask to join, or other hosts have some of them.

    A lost host may come back, or another one may take its place. The ranks here wait for it as
    long as the job goes on.
    """
    return c.spans_hosts or not missing_mates(s, c)


@guard
def enough_groups(s: Local, c: Config, event: Event) -> bool:
    """There are at least as many whole groups as an epoch needs."""
    return suffice(whole_groups(s, c), c)


@guard
def all_expected_joined(s: Local, c: Config, event: Event) -> bool:
    """At least as many whole groups as the launcher announced ask to join."""
    expected = max(c.expected_groups, c.min_groups)
    return len(s.joining) >= expected * c.world and len(whole_groups(s, c)) >= expected


@guard
def asked_here(s: Local, c: Config, event: Event) -> bool:
    """The drain was requested in this process."""
    return isinstance(event, Drain) and event.local


@guard
def asked_to_leave(s: Local, c: Config, event: Event) -> bool:
    """A drain names this participant's group."""
    return c.me in s.leaving


@guard
def mate_left(s: Local, c: Config, event: Event) -> bool:
    """Another rank of this group's instance has sent `leave`."""
    if not isinstance(event, Leave):
        return False
    known = s.hellos.get((event.peer.group, event.peer.rank))
    mine = known is not None and known.peer == event.peer and known.store == c.store
    return mine and event.peer.group == c.me.group and event.peer != c.me


@guard
def too_few_remain(s: Local, c: Config, event: Event) -> bool:
    """Too few groups remain for another epoch, no remaining group is to stay, and none joins.

    A group does not remain if it left with the last commit. A group that was asked to leave does
    not remain either once one of its processes has ended, because that process is not replaced.
    """
    asked = {p.group for p in member_peers(s) if p in s.leaving}
    ended = {p.group for p in member_peers(s) if p in s.dead}
    remaining = {g.group for g in members(s)} - set(leavers(s)) - (asked & ended)
    joins = s.joining - s.leaving - s.dead
    left = [(g.group, g.place) for g in members(s) if g.group in remaining]
    return len(chosen(left, c.rules)) < c.min_groups and remaining <= asked and not joins


@guard
def peers_moved_on(s: Local, c: Config, event: Event) -> bool:
    """No remaining member needs this participant: the next epoch is formed, or none remains."""
    return fenced(s, c, event) or not waited_for(s)


@guard
def job_diverged(s: Local, c: Config, event: Event) -> bool:
    """The last decision ends the job: replicas differ and no majority shows which are right."""
    return s.head is not None and s.head.diverged


@guard
def job_ended(s: Local, c: Config, event: Event) -> bool:
    """All members left with the last decision."""
    return s.head is not None and s.head.last


@guard
def member_lost(s: Local, c: Config, event: Event) -> bool:
    """A member of the epoch has ended, is suspected, or asks to join from outside."""
    return any(is_member(s, p) for p in s.dead | s.joining | s.suspected)


@guard
def about_me(s: Local, c: Config, event: Event) -> bool:
    """The suspicion is about this participant's own main thread."""
    return isinstance(event, Suspect) and c.me in peers_meant(s, event)


@guard
def about_a_member(s: Local, c: Config, event: Event) -> bool:
    """The death or suspicion is about a member of the epoch."""
    told = peers_meant(s, event) if isinstance(event, Death | Suspect) else ()
    return any(is_member(s, p) for p in told)


@guard
def about_another_member(s: Local, c: Config, event: Event) -> bool:
    """The death or suspicion is about another member of the epoch or of an asynchronous job."""
    told = peers_meant(s, event) if isinstance(event, Death | Suspect) else ()
    return any(p != c.me and (is_member(s, p) or in_job(s, p)) for p in told)


@guard
def i_coordinate(s: Local, c: Config, event: Event) -> bool:
    """This participant is the coordinator: it collects the `ack` and `ready` messages."""
    return coordinator(s) == c.me


@guard
def i_gather(s: Local, c: Config, event: Event) -> bool:
    """This participant collects them, as the coordinator or because all broadcast without one."""
    return coordinator(s) in (None, c.me)


@guard
def coordinator_changed(s: Local, c: Config, event: Event) -> bool:
    """The last acknowledgement went to a participant that is not the coordinator any more."""
    return s.told != coordinator(s)


@guard
def from_coordinator(s: Local, c: Config, event: Event) -> bool:
    """The event is a sign of life from the coordinator."""
    return isinstance(event, Here) and event.peer == coordinator(s)


@guard
def all_stopped(s: Local, c: Config, event: Event) -> bool:
    """Every live member has acknowledged the end of the epoch, by the messages received here."""
    gone = len(s.dead) + len(s.suspected) + len(s.joining)
    if len(s.stopped) + gone + len(leavers(s)) * c.world < len(member_peers(s)):
        return False  # skips the costly check below, which could not succeed
    return all(s.stopped.get(p, Token(0, 0)) >= s.token for p in waited_for(s))


@guard
def is_replaced(s: Local, c: Config, event: Event) -> bool:
    """Another process takes the place of the one that ended."""
    return isinstance(event, Death) and event.replaced


@guard
def awaits_successor(s: Local, c: Config, event: Event) -> bool:
    """A group of the epoch waits for a replacement of a lost process."""
    return bool(s.reforming and awaited(s, c))


@guard
def epoch_possible(s: Local, c: Config, event: Event) -> bool:
    """There are enough whole groups, and together they hold the state."""
    return next_epoch(s, c) is not None


@guard
def state_is_gone(s: Local, c: Config, event: Event) -> bool:
    """Every process that could hold the job's state has ended or has lost it."""
    return forming.state_is_gone(s, c)


@guard
def learners_can_follow(s: Local, c: Config, event: Event) -> bool:
    """Some groups are behind after a commit, and enough others can compute while these fetch.

    After a rollback all must have the state first: a group that is behind has lost its state, and
    the same gradients must count again. A group that joins after a commit has contributed none yet.
    If step functions may change the state, a fetching group would do so on a state that is not the
    job's. Groups that rules have chosen contribute to every step, so they have the state first.
    """
    record = next_epoch(s, c)
    if record is None or s.head is None or s.head.kind != "commit" or s.edits:
        return False
    late = behind(record.members)
    if set(late) & set(record.active):
        return False
    return bool(late) and len(record.members) - len(late) >= max(1, c.min_groups)


@guard
def counts_as_failure(s: Local, c: Config, event: Event) -> bool:
    """The rollback has another reason than a step that the user skipped."""
    return s.head is not None and not s.head.skip


@guard
def fails_too_often(s: Local, c: Config, event: Event) -> bool:
    """There were more consecutive rollbacks than are allowed without a pause."""
    return s.rollbacks > FREE_ROLLBACKS


@guard
def paused(s: Local, c: Config, event: Event) -> bool:
    """A pause after repeated rollbacks is running."""
    return s.paused


@guard
def unwound(s: Local, c: Config, event: Event) -> bool:
    """The main thread has returned from the last rollback, or there was none."""
    return s.restoring is None


@guard
def says_torn(s: Local, c: Config, event: Event) -> bool:
    """This rank's state is lost: it was not restored completely, or a fetch may have changed it."""
    return isinstance(event, Restored | HealFailed) and event.torn


@guard
def misjudged(s: Local, c: Config, event: Event) -> bool:
    """Stale epoch: it counts on a state that this rank has lost since it acknowledged."""
    record = record_of(event) or s.head
    held = "" if says_torn(s, c, event) else s.lineage
    if record is None or record.kind != "epoch" or record.lineage == held:
        return False
    mine = [g for g in record.members if c.me in g.peers()]
    return bool(mine) and mine[0].ranks[c.index].current


@guard
def said_unwinding(s: Local, c: Config, event: Event) -> bool:
    """This participant's last `Hello` reported that its main thread was still unwinding."""
    said = s.hellos.get((c.me.group, c.me.rank))
    return said is not None and said.peer == c.me and said.unwinding


@guard
def somebody_is_ready(s: Local, c: Config, event: Event) -> bool:
    """At least one member is in the barrier, so no failure keeps all members out of it.

    If no member has come, one member may have kept all others out. The acknowledgements then show
    which members are alive.
    """
    return bool(in_barrier(s))


@guard
def i_am_ready(s: Local, c: Config, event: Event) -> bool:
    """This participant is in the barrier of its epoch."""
    return c.me in in_barrier(s)


@guard
def all_ready(s: Local, c: Config, event: Event) -> bool:
    """Every member of the epoch is in its barrier, by the messages received here."""
    return all_in_barrier(s)


@guard
def begun(s: Local, c: Config, event: Event) -> bool:
    """The coordinator reports that all members of this epoch are in its barrier."""
    return isinstance(event, Begin) and event.epoch == s.token.epoch


@guard
def bus_is_down(s: Local, c: Config, event: Event) -> bool:
    """The bus is lost, or no message has arrived since an operation on it failed."""
    return s.bus_down or s.deaf


@guard
def only_deaf(s: Local, c: Config, event: Event) -> bool:
    """This process cannot follow the order of decisions any more, but the bus answers."""
    return s.deaf and not s.bus_down


@guard
def missed_messages(s: Local, c: Config, event: Event) -> bool:
    """The listener fell behind, has resubscribed, and has missed messages."""
    return isinstance(event, BusDown) and event.operation == "overrun"


@guard
def armed(s: Local, c: Config, event: Event, timer: str) -> bool:
    """The timer is armed."""
    return timer in s.timers


@guard
def between_epochs(s: Local, c: Config, event: Event) -> bool:
    """The last decision ended an epoch, so no group is in one."""
    return s.head is not None and s.head.kind != "epoch"


@guard
def epoch_is_open(s: Local, c: Config, event: Event) -> bool:
    """The last decision forms an epoch, so its members are synchronizing."""
    return s.head is not None and s.head.kind == "epoch"


@guard
def all_are_ready(s: Local, c: Config, event: Event) -> bool:
    """All living groups of the job ask to synchronize."""
    return not apart.absent(s, apart.ready_groups(s, c))


@guard
def is_newest_word(s: Local, c: Config, event: Event) -> bool:
    """No later message has arrived from the sender of this `join`."""
    if not isinstance(event, Join):
        return False
    said = s.hellos.get((event.hello.peer.group, event.hello.peer.rank))
    return said is None or said.peer != event.hello.peer or said.head <= event.hello.head


@guard
def awaits_groups(s: Local, c: Config, event: Event) -> bool:
    """The next epoch needs local groups, for its sync fraction or because of the bound."""
    return bool(apart.awaited(s, c))


@guard
def i_am_first(s: Local, c: Config, event: Event) -> bool:
    """This participant comes first among those that ask to synchronize, so only it proposes."""
    return apart.first(s, c) == c.me


@guard
def i_am_awaited(s: Local, c: Config, event: Event) -> bool:
    """The groups that ask to synchronize need this participant's group."""
    return any(c.me in each.entry.peers() for each in apart.awaited(s, c))


@guard
def awaits_others(s: Local, c: Config, event: Event) -> bool:
    """The set of groups waited for differs from the one that was traced last."""
    return apart.names(apart.awaited(s, c)) != s.awaits


@guard
def from_awaited(s: Local, c: Config, event: Event) -> bool:
    """The event is a sign of life from a group that is waited for."""
    who = event.peer if isinstance(event, Here) else None
    return any(who in each.entry.peers() for each in apart.awaited(s, c))


@guard
def state_stays(s: Local, c: Config, event: Event) -> bool:
    """Another group holds the job's newest state, or no group stays that would need it."""
    return apart.state_stays(s, c)


@guard
def was_in_job(s: Local, c: Config, event: Event) -> bool:
    """The last decision lists this group among the groups of the job."""
    return apart.in_job(s, c.me)


@guard
def in_flow(s: Local, c: Config, event: Event) -> bool:
    """Every scope to which this one is bound has taken enough slices for the current txn.

    Slices that were taken are never given back, so this stays true once it is true.
    """
    return held_for(s, c) is None


@guard
def flow_has_ended(s: Local, c: Config, event: Event) -> bool:
    """All groups have left the scope that the current txn waits for, so it takes no more slices."""
    return ended_before(s, c) is not None
