"""Planted bugs that simulated jobs find, mostly in asynchronous jobs and in leases. Pure data.

Each breaks one rule of a guard or an effect. ``seed`` names a run that shows it, so that a test
needs one seed for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fft.messages.causes import CauseCode
from fft.messages.effects import Broadcast, Decide, Effect, StartTxn
from fft.messages.protocol import Ballot, Event, Join, Lease, Record
from fft.protocol import apart
from fft.protocol.effects import EFFECTS, Action
from fft.protocol.guards import GUARDS, Guard
from fft.protocol.participant import Participant
from fft.protocol.state import Config, Local, leavers, members
from fft.prove.planting import planted, proposing

SEEDS = 200
"""Number of seeds within which each bug is found."""
_FORMING = ("epoch_possible", "all_are_ready", "i_am_first", "awaits_groups", "awaits_others")
"""Guards that decide which participants form the next epoch of an asynchronous job."""


@dataclass(frozen=True)
class SimulatedMutant:
    """One planted bug that the simulator finds.

    ``expected`` names the invariant, or the simulator's own property, that it breaks; ``seed`` is a
    run in which it does.
    """

    name: str
    what: str
    spec: str
    expected: str
    seed: int
    participant: type[Participant]


def _view(
    other: Callable[[Local], Local], guards: Iterable[str], actions: Iterable[str]
) -> type[Participant]:
    """Return the core with these guards and actions seeing the state as changed by ``other``."""

    def ask(name: str) -> Guard:
        return lambda s, c, event: GUARDS[name](other(s), c, event)

    def act(name: str) -> Action:
        def effects(s: Local, c: Config, event: Event) -> Iterable[Effect]:
            seen = other(s)
            for effect in EFFECTS[name](seen, c, event):
                if isinstance(effect, Decide):
                    effect = Decide(s.head, _as_they_stand(s, effect.proposal))
                yield effect
            s.proposed, s.awaits, s.cause = seen.proposed, seen.awaits, seen.cause

        return effects

    return planted({name: ask(name) for name in guards}, {name: act(name) for name in actions})


def _as_they_stand(s: Local, record: Record) -> Record:
    """Restore the previous standing of groups outside of the proposal."""
    had = {each.entry: each.since for each in apart.standing(s)}
    kept = (
        each if each.since == record.n else each._replace(since=had.get(each.entry, each.since))
        for each in record.standing
    )
    return replace(record, standing=tuple(kept))


def _since_the_start(s: Local) -> Local:
    """Count each group's newest message, regardless of its age."""
    if s.head is None:
        return s
    standing = tuple(each._replace(since=0) for each in s.head.standing)
    return replace(s, head=replace(s.head, standing=standing))


def _keeping(name: str, field: str) -> dict[str, Action]:
    """Return the action with that name, except that it leaves one field of the state unchanged."""

    def act(s: Local, c: Config, event: Event) -> Iterable[Effect]:
        was = getattr(s, field)
        effects = list(EFFECTS[name](s, c, event))
        setattr(s, field, was)
        return effects

    return {name: act}


def _ask_without_lease(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    for effect in EFFECTS["ask_to_come_in"](s, c, event):
        assert isinstance(effect, Broadcast) and isinstance(effect.message, Join)
        word = replace(effect.message.hello, lease=None)
        s.hellos = {**s.hellos, (c.me.group, c.me.rank): word}
        yield Broadcast(Join(word))


def _lost_for_good(s: Local, record: Record) -> Record:
    """Return the slices of lost groups to no group."""
    return replace(record, returned=s.head.returned if s.head is not None else ())


def _next_slice(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Compute the first txn of an epoch on the slice that the group's own state had leased."""
    for effect in EFFECTS["start_first_txn"](s, c, event):
        assert isinstance(effect, StartTxn)
        mine = (x.slice for x in s.leases if x.group == c.me.group)
        yield replace(effect, lease=next(mine, effect.lease))


def _skip_ends(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Let contributors keep their leases in a skipped synchronization, as if none were consumed."""
    for effect in EFFECTS["propose_commit"](s, c, event):
        assert isinstance(effect, Decide) and isinstance(event, Ballot)
        record = effect.proposal
        if record.skip:
            record = replace(record, leases=s.leases, cursor=s.cursor, returned=s.returned)
        yield replace(effect, proposal=record)


def _leases_swapped(s: Local, record: Record) -> Record:
    """Exchange the first two leases with a commit."""
    if len(record.leases) < 2:
        return record
    first, second, *rest = record.leases
    swapped = [Lease(first.slice, *second[1:]), Lease(second.slice, *first[1:]), *rest]
    return replace(record, leases=tuple(sorted(swapped)))


def _accuse_repeating(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    for effect in EFFECTS["propose_refusal"](s, c, event):
        assert isinstance(effect, Decide) and isinstance(event, Ballot)
        record = effect.proposal
        if record.code == CauseCode.GRADIENTS_DIFFER and record.accused:
            accused = tuple(v.peer for v in event.votes if v.manifest.repeats)
            record = replace(record, accused=accused)
        yield replace(effect, proposal=record)


def _others_left_by_commit(s: Local, c: Config, event: Event) -> bool:
    others = {group.group for group in members(s)} - {c.me.group}
    return c.min_groups > 1 and others <= set(leavers(s))


SIMULATED: tuple[SimulatedMutant, ...] = (
    SimulatedMutant(
        "old_message_counts",
        "A group is in the next synchronization by a message from before its last one.",
        "async",
        "bounded",
        11,
        _view(_since_the_start, _FORMING, ("propose_epoch",)),
    ),
    SimulatedMutant(
        "torn_state_keeps_lease",
        "A group whose step failed half way keeps the lease that its COMMIT granted.",
        "async",
        "bounded",
        2,
        planted(actions=_keeping("mark_torn", "lease")),
    ),
    SimulatedMutant(
        "lease_kept_after_commit",
        "A group brings the lease that its COMMIT has consumed.",
        "async",
        "bounded",
        0,
        planted(actions=_keeping("note_applied", "lease")),
    ),
    SimulatedMutant(
        "lease_of_epoch_unread",
        "A member of an epoch does not take the lease that the epoch's record grants it.",
        "async",
        "bounded",
        0,
        planted(actions=_keeping("adopt_epoch", "lease")),
    ),
    SimulatedMutant(
        "asks_without_lease",
        "A group asks to synchronize and does not name the lease that it contributes from.",
        "async",
        "bounded",
        0,
        planted(actions={"ask_to_come_in": _ask_without_lease}),
    ),
    SimulatedMutant(
        "returned_slices_lost",
        "An epoch does not give back the slices of the groups that it leaves out.",
        "diloco",
        "samples_once",
        1,
        planted(actions=proposing("propose_epoch", _lost_for_good)),
    ),
    SimulatedMutant(
        "own_leases_after_a_heal",
        "A group that fetches the state keeps its own list of leases.",
        "diloco",
        "samples_once",
        0,
        planted(actions=_keeping("note_healed", "leases")),
    ),
    SimulatedMutant(
        "own_returned_after_a_heal",
        "A group that fetches the state keeps its own list of returned slices.",
        "local_sgd",
        "samples_once",
        1,
        planted(actions=_keeping("note_healed", "returned")),
    ),
    SimulatedMutant(
        "own_cursor_after_a_heal",
        "A group that fetches the state keeps its own place in the data.",
        "diloco",
        "samples_once",
        0,
        planted(actions=_keeping("note_healed", "cursor")),
    ),
    SimulatedMutant(
        "lease_of_own_state",
        "A group computes the first transaction of an epoch on the slice of its own older state.",
        "diloco",
        "samples_once",
        23,
        planted(actions={"start_first_txn": _next_slice}),
    ),
    SimulatedMutant(
        "skip_consumes_nothing",
        "A skipped synchronization leaves the slices with their holders.",
        "local_sgd",
        "samples_once",
        3,
        planted(actions={"propose_commit": _skip_ends}),
    ),
    SimulatedMutant(
        "leases_swapped",
        "A COMMIT hands the first two leases to each other's holders.",
        "diloco",
        "samples_once",
        0,
        planted(actions=proposing("propose_commit", _leases_swapped)),
    ),
    SimulatedMutant(
        "repeating_rank_accused",
        "Of two ranks whose gradients differ, the one that has repeated its own is accused.",
        "hsdp",
        "divergence",
        28,
        planted(actions={"propose_refusal": _accuse_repeating}),
    ),
    SimulatedMutant(
        "waits_for_the_dead",
        "A rank that is to leave waits for groups that have died, though the whole job is to end.",
        "hsdp",
        "liveness",
        66,
        planted({"too_few_remain": _others_left_by_commit}),
    ),
)
