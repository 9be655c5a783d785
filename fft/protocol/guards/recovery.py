"""Guards: from a failure to the barrier of the next epoch."""

from __future__ import annotations

from fft.messages.protocol import (
    Begin,
    BusDown,
    Death,
    Event,
    HealFailed,
    Here,
    Restored,
    Suspect,
    Token,
)
from fft.protocol import forming
from fft.protocol.apart import in_job
from fft.protocol.forming import behind, next_epoch
from fft.protocol.guards.base import guard, record_of
from fft.protocol.state import (
    FREE_ROLLBACKS,
    Config,
    Local,
    all_in_barrier,
    awaited,
    coordinator,
    in_barrier,
    is_member,
    leavers,
    member_peers,
    peers_meant,
    waited_for,
)


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
def i_report(s: Local, c: Config, event: Event) -> bool:
    """Another participant collects the `ack` and `ready` messages, or every participant does."""
    return coordinator(s) != c.me


@guard
def i_gather(s: Local, c: Config, event: Event) -> bool:
    """This participant collects them, as the coordinator or because all broadcast without one."""
    return coordinator(s) in (None, c.me)


@guard
def another_gathers(s: Local, c: Config, event: Event) -> bool:
    """Another participant is the coordinator."""
    return coordinator(s) not in (None, c.me)


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
def nobody_reforms(s: Local, c: Config, event: Event) -> bool:
    """No group of the epoch waits for a replacement of a lost process."""
    return not (s.reforming and awaited(s, c))


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
def not_paused(s: Local, c: Config, event: Event) -> bool:
    """No pause after repeated rollbacks is running."""
    return not s.paused


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
def no_retry_due(s: Local, c: Config, event: Event) -> bool:
    """The retry timer is not armed."""
    return "bus_retry" not in s.timers


@guard
def no_limit_set(s: Local, c: Config, event: Event) -> bool:
    """The timer that limits the loss of the bus is not armed."""
    return "bus_limit" not in s.timers
