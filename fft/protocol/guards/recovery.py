"""Guards: from what goes wrong to the next epoch's barrier."""

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
    """A participant of my epoch has ended, is suspected, or is outside and asks to come in."""
    return any(is_member(s, p) for p in s.dead | s.joining | s.suspected)


@guard
def about_me(s: Local, c: Config, event: Event) -> bool:
    """It is my own main thread that was seen not to move."""
    return isinstance(event, Suspect) and c.me in peers_meant(s, event)


@guard
def about_a_member(s: Local, c: Config, event: Event) -> bool:
    """It speaks of a participant of my epoch."""
    told = peers_meant(s, event) if isinstance(event, Death | Suspect) else ()
    return any(is_member(s, p) for p in told)


@guard
def about_another_member(s: Local, c: Config, event: Event) -> bool:
    """It speaks of a participant of my epoch, or of an asynchronous job, and not of me."""
    told = peers_meant(s, event) if isinstance(event, Death | Suspect) else ()
    return any(p != c.me and (is_member(s, p) or in_job(s, p)) for p in told)


@guard
def i_coordinate(s: Local, c: Config, event: Event) -> bool:
    """The others tell me that they have stopped, and that they are in the barrier."""
    return coordinator(s) == c.me


@guard
def i_report(s: Local, c: Config, event: Event) -> bool:
    """Others gather who has stopped, and who is in the barrier: somebody else, or everyone."""
    return coordinator(s) != c.me


@guard
def i_gather(s: Local, c: Config, event: Event) -> bool:
    """I coordinate, or nobody does, and everyone tells everyone."""
    return coordinator(s) in (None, c.me)


@guard
def another_gathers(s: Local, c: Config, event: Event) -> bool:
    """Somebody else coordinates."""
    return coordinator(s) not in (None, c.me)


@guard
def coordinator_changed(s: Local, c: Config, event: Event) -> bool:
    """Whom I told that I have stopped no longer gathers that."""
    return s.told != coordinator(s)


@guard
def from_coordinator(s: Local, c: Config, event: Event) -> bool:
    """It is a sign of life from who forms the next epoch."""
    return isinstance(event, Here) and event.peer == coordinator(s)


@guard
def all_stopped(s: Local, c: Config, event: Event) -> bool:
    """Every live member has acknowledged the end of the epoch, as its coordinator knows."""
    gone = len(s.dead) + len(s.suspected) + len(s.joining)
    if len(s.stopped) + gone + len(leavers(s)) * c.world < len(member_peers(s)):
        return False  # the long way round only when it can come out otherwise
    return all(s.stopped.get(p, Token(0, 0)) >= s.token for p in waited_for(s))


@guard
def is_replaced(s: Local, c: Config, event: Event) -> bool:
    """Another process takes the place of the one that has ended."""
    return isinstance(event, Death) and event.replaced


@guard
def nobody_reforms(s: Local, c: Config, event: Event) -> bool:
    """No group of the epoch waits for a process in the place of one that was lost."""
    return not (s.reforming and awaited(s, c))


@guard
def epoch_possible(s: Local, c: Config, event: Event) -> bool:
    """Enough whole groups are there, and together they hold the state."""
    return next_epoch(s, c) is not None


@guard
def state_is_gone(s: Local, c: Config, event: Event) -> bool:
    """Every process that could hold the job's state has ended or has lost it."""
    return forming.state_is_gone(s, c)


@guard
def learners_can_follow(s: Local, c: Config, event: Event) -> bool:
    """Some groups are behind after a commit, and enough others can compute meanwhile.

    After a rollback who is behind has lost its state, and the same gradients shall count again; who
    joins after a commit has none to give yet. Where bodies change gradients, a learner would change
    them by weights that are not the job's.
    """
    record = next_epoch(s, c)
    if record is None or s.head is None or s.head.kind != "commit" or s.edits:
        return False
    late = behind(record.members)
    return bool(late) and len(record.members) - len(late) >= max(1, c.min_groups)


@guard
def counts_as_failure(s: Local, c: Config, event: Event) -> bool:
    """The rollback is not because the user skipped a step."""
    return s.head is not None and not s.head.skip


@guard
def fails_too_often(s: Local, c: Config, event: Event) -> bool:
    """The rollbacks in a row are more than those that nobody pauses after."""
    return s.rollbacks > FREE_ROLLBACKS


@guard
def not_paused(s: Local, c: Config, event: Event) -> bool:
    """No pause after repeated rollbacks is running."""
    return not s.paused


@guard
def says_torn(s: Local, c: Config, event: Event) -> bool:
    """My state is torn: the start of the step is not back as a whole, or a fetch has touched it."""
    return isinstance(event, Restored | HealFailed) and event.torn


@guard
def misjudged(s: Local, c: Config, event: Event) -> bool:
    """The new epoch counts on a state that I do not hold (it was torn after I had said so)."""
    record = record_of(event) or s.head
    held = "" if says_torn(s, c, event) else s.lineage
    if record is None or record.kind != "epoch" or record.lineage == held:
        return False
    mine = [g for g in record.members if c.me in g.peers()]
    return bool(mine) and mine[0].ranks[c.index].current


@guard
def said_unwinding(s: Local, c: Config, event: Event) -> bool:
    """My last word was that my main thread was still unwinding."""
    said = s.hellos.get((c.me.group, c.me.rank))
    return said is not None and said.peer == c.me and said.unwinding


@guard
def somebody_is_ready(s: Local, c: Config, event: Event) -> bool:
    """Some are in the barrier of the epoch, so that nobody keeps all from coming.

    Where nobody came, whoever is at fault kept all from it: the acknowledgements will tell who.
    """
    return bool(in_barrier(s))


@guard
def all_ready(s: Local, c: Config, event: Event) -> bool:
    """Every participant of the epoch is in its barrier, as its coordinator knows."""
    return all_in_barrier(s)


@guard
def begun(s: Local, c: Config, event: Event) -> bool:
    """All members of the epoch that I stand in are in its barrier, says its coordinator."""
    return isinstance(event, Begin) and event.epoch == s.token.epoch


@guard
def bus_is_down(s: Local, c: Config, event: Event) -> bool:
    """The bus has not been heard of since an operation on it failed."""
    return s.bus_down or s.deaf


@guard
def only_deaf(s: Local, c: Config, event: Event) -> bool:
    """I cannot follow the order of decisions any more, but the bus answers."""
    return s.deaf and not s.bus_down


@guard
def missed_messages(s: Local, c: Config, event: Event) -> bool:
    """I fell behind on the bus, and hear again; what was said meanwhile has passed me by."""
    return isinstance(event, BusDown) and event.operation == "overrun"


@guard
def no_retry_due(s: Local, c: Config, event: Event) -> bool:
    """Nothing will be said again soon."""
    return "bus_retry" not in s.timers


@guard
def no_limit_set(s: Local, c: Config, event: Event) -> bool:
    """The bus has not been given a limit to come back."""
    return "bus_limit" not in s.timers
