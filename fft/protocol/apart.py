"""Groups of an asynchronous job: who is in it, for whom a synchronisation waits, what counts. Pure.

The job synchronises whenever more than a part of its groups ask to; the others **stand apart** and
compute on. The head record names all groups of the job (``standing``) with the step of the state
that each was last given, its **base**. Synchronisation v + 1 is formed without a group g only while
v + 1 - base(g) < bound, so that g's contribution is at most ``bound`` steps behind when it comes:
stale-synchronous parallel (Ho et al., NIPS 2013) on synchronisations. Who is lost, or has said that
it leaves, holds up nobody; the record that leaves it out gives its lease back.

A contribution is that of a lease: who asks to come in says by which slice of the data it is
computed, and it counts if the head still has that lease for the group. So one contribution is in at
most one committed record, whatever was missed or said twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fft.messages.protocol import GroupEntry, Hello, Lease, Peer, Record, Standing
from fft.protocol.leases import Granted, granted, lease_of
from fft.protocol.state import Base, Config, Local, leavers, members, whole_groups

Groups = Sequence[Sequence[Hello]]


def standing(s: Local) -> tuple[Standing, ...]:
    """The job's groups, as far as I know; empty before the first epoch, or if it has none."""
    return s.head.standing if s.head is not None else ()


def in_job(s: Local, peer: Peer) -> bool:
    """Whether the participant is of a group of the job."""
    return any(peer in each.entry.peers() for each in standing(s))


def living(s: Local) -> list[Standing]:
    """The job's groups but those that are lost: ended, suspected, replaced, or gone by their word.

    A group is lost with any of its ranks.
    """
    return [each for each in standing(s) if not is_lost(s, each.entry)]


def is_lost(s: Local, entry: GroupEntry) -> bool:
    """Whether something is said against the life of this instance of a group."""

    def is_gone(peer: Peer) -> bool:
        said = s.hellos.get((peer.group, peer.rank))
        replaced = said is not None and said.peer.inc > peer.inc
        return replaced or peer in s.dead or peer in s.suspected

    return any(map(is_gone, entry.peers()))


def ready_groups(s: Local, c: Config) -> list[list[Hello]]:
    """Groups that ask to come in. What one said before it was last in an epoch is void."""
    since = {_key(each.entry): each.since for each in standing(s)}
    left = leavers(s)
    return [
        ranks
        for ranks in whole_groups(s, c)
        if ranks[0].peer.group not in left
        and all(h.head >= since.get(_said_by(ranks), 0) for h in ranks)
    ]


def first(s: Local, c: Config) -> Peer | None:
    """Who proposes where all could: of those who ask, who holds the lowest lease."""
    held = {lease[1:]: lease.slice for lease in s.head.leases} if s.head is not None else {}
    end = max(held.values(), default=0) + 1
    ready = sorted(ready_groups(s, c), key=lambda ranks: held.get(_said_by(ranks), end))
    return ready[0][0].peer if ready else None


def absent(s: Local, groups: Groups) -> list[Standing]:
    """Living groups of the job that are not among ``groups``."""
    there = {_said_by(ranks) for ranks in groups}
    return [each for each in living(s) if _key(each.entry) not in there]


def absent_living(s: Local) -> bool:
    """Whether living groups of the job are outside of the epoch that I am in."""
    inside = set(map(_key, members(s)))
    return any(_key(each.entry) not in inside for each in living(s))


def awaited(s: Local, c: Config) -> list[Standing]:
    """Groups of which one must come before the next epoch: its quorum, or who is at the bound."""
    groups = ready_groups(s, c)
    away, step = absent(s, groups), s.head.step if s.head is not None else 0
    if not _are_enough(s, c, away):
        return away
    return [each for each in away if _is_at_bound(c, each, step)]


def may_meet(s: Local, c: Config, groups: Groups, step: int) -> bool:
    """Whether ``groups`` may synchronise after ``step`` without the others."""
    away = absent(s, groups)
    return _are_enough(s, c, away) and not any(_is_at_bound(c, each, step) for each in away)


def _are_enough(s: Local, c: Config, away: Sequence[Standing]) -> bool:
    """Whether more than the quorum's part of the job is there. Then somebody has the state of the
    last synchronisation, whose members were more than half of it, too."""
    number = len(living(s))
    return not number or number - len(away) > c.quorum * number


def _is_at_bound(c: Config, each: Standing, step: int) -> bool:
    return step + 1 - each.base >= c.bound


def terms(
    s: Local, c: Config, groups: Groups, entries: Sequence[GroupEntry], base: Base, n: int
) -> tuple[Granted, tuple[Standing, ...]]:
    """Leases and standings of an epoch record, number ``n``, with these members.

    A member keeps its lease, and so contributes, if what it brings is computed from it. Where that
    is none of them, as in the first epoch, all are granted one: they compute in the txn.
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
    """Leases for ``entries``, of which some have had their ``own``; others keep theirs."""
    free = tuple(set(data.returned) - {lease.slice for lease in own})
    new = granted(Granted(data.cursor, own, free), entries)
    return new._replace(leases=tuple(sorted((*new.leases, *data.leases))))


def standing_after(
    epoch: Record, n: int, step: int, leavers: Sequence[str]
) -> tuple[Standing, ...]:
    """Who is in the job after the COMMIT with number ``n`` of an epoch's txn, to ``step``."""
    inside = {_key(entry) for entry in epoch.members}
    away = [each for each in epoch.standing if _key(each.entry) not in inside]
    here = [Standing(entry, step, n) for entry in epoch.members if entry.group not in leavers]
    return _in_order([*away, *here])


def own_lease(leases: Sequence[Lease], c: Config) -> int | None:
    """What my group of an asynchronous job contributes from."""
    return lease_of(leases, c.me.group, c.store) if c.bound else None


def is_brought(
    epoch: Record | None, c: Config, computed: tuple[int | None, int], lease: int | None
) -> bool:
    """Whether what my group has computed is what it brings to the first txn of ``epoch``.

    Args:
        computed: the lease that it was computed from, and the step of the state it began from.
        lease: the group's in the epoch. A slice that was given back, and then granted again, is
            computed anew from the base that the epoch counts it with.
    """
    held, base = computed
    standing_ = epoch.standing if epoch is not None else ()
    bases = [each.base for each in standing_ if each.entry.group == c.me.group]
    return held == lease and bases == [base]


def names(them: Sequence[Standing]) -> frozenset[str]:
    """Of the groups."""
    return frozenset(each.entry.group for each in them)


def in_words(s: Local, c: Config, away: Sequence[Standing]) -> str:
    """Why these groups are waited for."""
    step = s.head.step if s.head is not None else 0
    if not away:
        return ""
    late = [each for each in away if _is_at_bound(c, each, step)]
    told = ", ".join(f"{each.entry.group} (at step {each.base})" for each in late or away)
    if late:
        return f"step {step + 1} is held for {told}: nobody may be {c.bound} behind it"
    return f"step {step + 1} waits for its quorum: {told} stand apart"


def state_stays(s: Local, c: Config) -> bool:
    """Whether I can go without taking the job's newest state along: another has it, or nobody stays
    who would need it."""
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
