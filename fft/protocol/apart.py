"""Groups of an asynchronous job: membership, what a synchronization waits for, what counts. Pure.

The job synchronizes whenever more than the sync fraction of its groups ask to; the others are
**local**: they continue to compute. The head record names all groups of the job (``standing``) and
for each the **base**: the step of the state that the group received last. Synchronization v + 1 is
formed without a group g only while v + 1 - base(g) < bound, so the contribution of g is at most
``bound`` steps behind when it arrives. This is stale-synchronous parallel (Ho et al., NIPS 2013) on
synchronizations. A group that is lost or leaves delays no other group; the record that leaves it
out returns its lease.

A contribution belongs to a lease. A group that asks to join names the slice of the data that its
contribution is computed from, and the contribution counts if the head still has that lease for the
group. So a contribution is in at most one committed record, even if messages were lost or repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fft.messages.protocol import GroupEntry, Hello, Lease, Peer, Record, Standing
from fft.protocol.leases import Granted, granted, lease_of
from fft.protocol.state import Base, Config, Local, leavers, members, whole_groups

Groups = Sequence[Sequence[Hello]]


def standing(s: Local) -> tuple[Standing, ...]:
    """Return the known groups of the job; empty before the first epoch and in synchronous jobs."""
    return s.head.standing if s.head is not None else ()


def in_job(s: Local, peer: Peer) -> bool:
    """Return whether the participant belongs to a group of the job."""
    return any(peer in each.entry.peers() for each in standing(s))


def living(s: Local) -> list[Standing]:
    """Return the job's groups that are not lost; a group is lost as soon as one of its ranks is."""
    return [each for each in standing(s) if not is_lost(s, each.entry)]


def is_lost(s: Local, entry: GroupEntry) -> bool:
    """Return whether a rank of this group instance has ended, is suspected, or was replaced."""

    def is_gone(peer: Peer) -> bool:
        said = s.hellos.get((peer.group, peer.rank))
        replaced = said is not None and said.peer.inc > peer.inc
        return replaced or peer in s.dead or peer in s.suspected

    return any(map(is_gone, entry.peers()))


def ready_groups(s: Local, c: Config) -> list[list[Hello]]:
    """Return the groups that ask to join, by messages sent after the group's last epoch."""
    since = {_key(each.entry): each.since for each in standing(s)}
    left = leavers(s)
    return [
        ranks
        for ranks in whole_groups(s, c)
        if ranks[0].peer.group not in left
        and all(h.head >= since.get(_said_by(ranks), 0) for h in ranks)
    ]


def first(s: Local, c: Config) -> Peer | None:
    """Return the participant that proposes: the first rank of the ready group with the lowest
    lease."""
    held = {lease[1:]: lease.slice for lease in s.head.leases} if s.head is not None else {}
    end = max(held.values(), default=0) + 1
    ready = sorted(ready_groups(s, c), key=lambda ranks: held.get(_said_by(ranks), end))
    return ready[0][0].peer if ready else None


def absent(s: Local, groups: Groups) -> list[Standing]:
    """Return the living groups of the job that are not in ``groups``."""
    there = {_said_by(ranks) for ranks in groups}
    return [each for each in living(s) if _key(each.entry) not in there]


def absent_living(s: Local) -> bool:
    """Return whether living groups of the job are outside this participant's epoch."""
    inside = set(map(_key, members(s)))
    return any(_key(each.entry) not in inside for each in living(s))


def awaited(s: Local, c: Config) -> list[Standing]:
    """Return the groups that the next epoch waits for.

    If too few groups ask to join, these are all absent groups, of which one or more must join. Else
    these are the absent groups at the bound.
    """
    groups = ready_groups(s, c)
    away, step = absent(s, groups), s.head.step if s.head is not None else 0
    if not _are_enough(s, c, away):
        return away
    return [each for each in away if _is_at_bound(c, each, step)]


def may_meet(s: Local, c: Config, groups: Groups, step: int) -> bool:
    """Return whether ``groups`` may synchronize after ``step`` without the others."""
    away = absent(s, groups)
    return _are_enough(s, c, away) and not any(_is_at_bound(c, each, step) for each in away)


def _are_enough(s: Local, c: Config, away: Sequence[Standing]) -> bool:
    """Whether more than the sync fraction of the job's groups are present.

    One of them then holds the state of the last synchronization, whose members were more than half
    of the job, too.
    """
    number = len(living(s))
    return not number or number - len(away) > c.quorum * number


def _is_at_bound(c: Config, each: Standing, step: int) -> bool:
    return step + 1 - each.base >= c.bound


def terms(
    s: Local, c: Config, groups: Groups, entries: Sequence[GroupEntry], base: Base, n: int
) -> tuple[Granted, tuple[Standing, ...]]:
    """Return leases and standings of epoch record ``n`` with these members.

    A member keeps its lease, and so contributes, if its contribution is computed from that lease.
    If this holds for no member, as in the first epoch, all members get a lease and compute in the
    txn.
    """
    alive = {_key(each.entry): each for each in living(s)}
    brings = {_said_by(ranks): {h.lease for h in ranks} for ranks in groups}
    kept = [
        lease
        for lease in base.leases
        if (at := alive.get(lease[1:])) is not None
        and brings.get(lease[1:], {lease.slice}) == {lease.slice}
        and base.step + 1 - at.base <= c.bound
    ]
    lost = [lease.slice for lease in base.leases if lease not in kept]
    data = Granted(base.cursor, tuple(kept), tuple(sorted((*base.returned, *lost))))
    alive |= {key: alive[key]._replace(since=n) for key in brings.keys() & alive.keys()}
    if not any(lease[1:] in brings for lease in kept):
        own = tuple(lease for lease in base.leases if lease[1:] in brings)
        data = _granted_besides(data, own, entries)
        alive |= {_key(entry): Standing(entry, base.step, n) for entry in entries}
    return data, _in_order(alive.values())


def _granted_besides(
    data: Granted, own: tuple[Lease, ...], entries: Sequence[GroupEntry]
) -> Granted:
    """Leases for ``entries``, some of which held their ``own`` before; other groups keep theirs."""
    free = tuple(set(data.returned) - {lease.slice for lease in own})
    new = granted(Granted(data.cursor, own, free), entries)
    return new._replace(leases=tuple(sorted((*new.leases, *data.leases))))


def standing_after(
    epoch: Record, n: int, step: int, leavers: Sequence[str]
) -> tuple[Standing, ...]:
    """Return the groups of the job after COMMIT ``n`` of an epoch's txn, at ``step``."""
    inside = {_key(entry) for entry in epoch.members}
    away = [each for each in epoch.standing if _key(each.entry) not in inside]
    here = [Standing(entry, step, n) for entry in epoch.members if entry.group not in leavers]
    return _in_order([*away, *here])


def own_lease(leases: Sequence[Lease], c: Config) -> int | None:
    """Return the slice that this group of an asynchronous job contributes from, or None."""
    return lease_of(leases, c.me.group, c.store) if c.bound else None


def is_brought(
    epoch: Record | None, c: Config, computed: tuple[int | None, int], lease: int | None
) -> bool:
    """Return whether this group's computed contribution belongs to the first txn of ``epoch``.

    Args:
        computed: The lease that it was computed from, and the step of the state that it started
            from.
        lease: The group's lease in the epoch. A slice that was returned and granted again is
            computed again, from the base that the epoch records for the group.
    """
    held, base = computed
    standing_ = epoch.standing if epoch is not None else ()
    bases = [each.base for each in standing_ if each.entry.group == c.me.group]
    return held == lease and bases == [base]


def names(them: Sequence[Standing]) -> frozenset[str]:
    """Return the names of the groups."""
    return frozenset(each.entry.group for each in them)


def in_words(s: Local, c: Config, away: Sequence[Standing]) -> str:
    """Return a text that explains why these groups are waited for."""
    step = s.head.step if s.head is not None else 0
    if not away:
        return ""
    late = [each for each in away if _is_at_bound(c, each, step)]
    told = ", ".join(f"{each.entry.group} (at step {each.base})" for each in late or away)
    if late:
        return f"step {step + 1} is held for {told}: nobody may be {c.bound} behind it"
    return f"step {step + 1} waits for its quorum: {told} stand apart"


def state_stays(s: Local, c: Config) -> bool:
    """Return whether the job's newest state stays in the job if this participant leaves.

    It does if another group holds it, or if no group stays that would need it.
    """
    newest = max((each.base for each in standing(s)), default=0)
    others = [each for each in living(s) if each.entry.group != c.me.group]
    stay = [each for each in others if not s.leaving & set(each.entry.peers())]
    return not stay or any(each.base == newest for each in stay)


def _in_order(them: Iterable[Standing]) -> tuple[Standing, ...]:
    return tuple(sorted(them, key=lambda each: each.entry.group))


def _key(entry: GroupEntry) -> tuple[str, str]:
    return entry.group, entry.store


def _said_by(ranks: Sequence[Hello]) -> tuple[str, str]:
    return ranks[0].peer.group, ranks[0].store
