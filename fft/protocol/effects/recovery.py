"""Effects: from a rollback to the next epoch."""

from __future__ import annotations

from collections.abc import Iterable

from fft.messages.causes import NO_CAUSE, Cause, CauseCode
from fft.messages.effects import AbortGroups, CancelFutures, Effect, Heal, Restore
from fft.messages.protocol import Decision, Event, Healed, HealFailed, Restored, Token
from fft.protocol.apart import own_lease
from fft.protocol.effects.base import action
from fft.protocol.state import (
    Config,
    Local,
    coordinator,
    in_barrier,
    member_peers,
    members,
    my_place,
    waited_for,
)


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
    assert silent is not None, "the part is guarded by another_gathers"
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
    text = f"no word from {silent} that all are in the barrier"
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
