"""The epoch that a participant would propose: its members and its starting state. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fft.messages.protocol import GroupEntry, Hello, Peer, RankEntry, Record, Standing, Token
from fft.protocol import apart
from fft.protocol.active import Rule, chosen
from fft.protocol.leases import Granted, granted
from fft.protocol.state import (
    Base,
    Config,
    Local,
    contributing,
    leavers,
    member_peers,
    suffice,
    whole_groups,
)


def base_of(s: Local, groups: list[list[Hello]]) -> Base:
    """Return the state that the next epoch starts from: that of the committed head.

    Before the first epoch it is the state of the group that is furthest, or the first of these.
    """
    if (head := s.head) is not None:
        held = (head.leases, head.returned)
        return Base(head.step, head.lineage, head.cursor, head.batches, *held)
    best = max(groups, key=lambda ranks: min(h.step for h in ranks))[0]
    return Base(best.step, best.lineage, best.cursor, best.batches, (), best.returned)


def state_held(base: Base, groups: list[list[Hello]], world: int) -> bool:
    """Return whether for every rank number some group holds the state of ``base``."""
    return all(any(g[r].lineage == base.lineage for g in groups) for r in range(world))


def state_is_gone(s: Local, c: Config) -> bool:
    """Return whether every process that could hold the state of the head has ended or lost it.

    Returns:
        False if this is unknown, and always for asynchronous jobs, whose groups also hold the state
        outside the epoch.
    """
    if s.head is None or s.epoch is None or c.bound:
        return False
    silent = {p.rank for p in s.suspected - s.dead}
    return any(rank not in silent and _is_gone(s, rank) for rank in c.ranks)


def _is_gone(s: Local, rank: int) -> bool:
    """``state_is_gone`` for the ranks of one number, none of which is suspected."""
    assert s.head is not None
    gone, left = s.dead, leavers(s)
    said = {h.peer: h for (_, number), h in s.hellos.items() if number == rank}
    living = (h for p, h in said.items() if p not in gone and p.group not in left)
    if any(h.lineage == s.head.lineage for h in living):
        return False
    # Before the first commit of an epoch, a new process may start with the state of the head.
    has_committed = s.head.kind == "commit" or s.head.txn > 1
    mates = [p for p in member_peers(s) if p.rank == rank and p.group not in left]
    return all(has_committed if p in gone else p in said and _is_heard(s, p) for p in mates)


def _is_heard(s: Local, peer: Peer) -> bool:
    """Whether the newest message of a member is from after the end of its epoch."""
    return peer in s.joining or s.stopped.get(peer, Token(0, 0)) >= s.token


def next_epoch(s: Local, c: Config, learners: bool = False) -> Record | None:
    """Return the epoch record that this participant would propose now.

    Args:
        learners: Groups that are behind fetch the state while the others compute the first txn.

    Returns:
        None if there are too few groups, or if they do not hold the state.
    """
    groups = apart.ready_groups(s, c) if c.bound else whole_groups(s, c)
    if not suffice(groups, c):
        return None
    base = base_of(s, groups)
    if not state_held(base, groups, c.world):
        return None
    entries = tuple(_entry(ranks, base) for ranks in groups)
    n, epoch = (s.head.n if s.head else 0) + 1, (s.head.epoch if s.head else 0) + 1
    late = behind(entries) if learners else ()
    standing: tuple[Standing, ...] = ()
    if c.bound:
        if not apart.may_meet(s, c, groups, base.step):
            return None
        data, standing = apart.terms(s, c, groups, entries, base, n)
        base = replace(base, **data._asdict())
    elif c.leases:
        held = Granted(base.cursor, base.leases, base.returned)
        base = replace(base, **granted(held, contributing(entries, late, c))._asdict())
    return Record(
        n=n,
        kind="epoch",
        epoch=epoch,
        txn=0,
        step=base.step,
        lineage=base.lineage,
        cursor=base.cursor,
        batches=base.batches,
        by=c.me,
        members=entries,
        learners=late,
        rules=tuple(Rule(*rule) for rule in c.rules),
        active=chosen([(g.group, g.place) for g in entries], c.rules) if c.rules else (),
        leases=base.leases,
        returned=base.returned,
        bound=c.bound,
        standing=standing,
        fetched=_fetched(s.head, entries) if s.head else (),
        checkpoint=s.head.checkpoint if s.head else 0,
    )


def _fetched(head: Record, groups: Iterable[GroupEntry]) -> tuple[Peer, ...]:
    """Return ``Record.fetched`` of an epoch of ``groups`` after ``head``.

    A participant stays in it outside the epoch, but not if another process takes its place.
    """
    inside = {(g.group, r.rank): (r.inc, r.current) for g in groups for r in g.ranks}
    return tuple(
        sorted(p for p in head.unproven if inside.get(p[:2], (p.inc, True)) == (p.inc, True))
    )


def behind(groups: Iterable[GroupEntry]) -> tuple[str, ...]:
    """Return the groups that do not hold the state of the epoch record that lists them."""
    return tuple(g.group for g in groups if not all(r.current for r in g.ranks))


def _entry(ranks: list[Hello], base: Base) -> GroupEntry:
    return GroupEntry(
        group=ranks[0].peer.group,
        store=ranks[0].store,
        place=ranks[0].place,
        home=ranks[0].home,
        ranks=tuple(
            RankEntry(
                rank=h.peer.rank,
                inc=h.peer.inc,
                current=h.lineage == base.lineage,
                transport=h.transport,
                pid=h.pid,
                host=h.host,
            )
            for h in ranks
        ),
    )
