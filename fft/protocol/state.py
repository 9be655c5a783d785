"""What one participant knows: its configuration and its state. Pure data and plain questions.

The containers in ``Local`` are never changed in place: a new one replaces the old, so that a
shallow copy of ``Local`` is a snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal

from fft.messages.protocol import (
    Death,
    Event,
    GroupEntry,
    Hello,
    Lease,
    Peer,
    RankEntry,
    Record,
    Suspect,
    Token,
    Vote,
    next_lineage,
)
from fft.protocol.elsewhere import Elsewhere
from fft.protocol.leases import Granted, granted, in_turn
from fft.protocol.roles import Role

FREE_ROLLBACKS = 3
"""So many in a row are not paused after."""
GENESIS = "genesis"
"""Lineage of a state that every group built alike (``init_sync=False``)."""


@dataclass(frozen=True, slots=True)
class Config:
    """What does not change in the life of a participant. Timeouts in seconds."""

    me: Peer
    world: int
    store: str
    transport: str
    pid: int
    host: str
    timeouts: Mapping[str, float]
    min_groups: int = 1
    expected_groups: int = 1
    min_reductions: int = 1
    fixed_with_spares: bool = False
    on_divergence: Literal["stop", "heal"] = "stop"
    leases: bool = False
    """A group keeps its slice of the data from txn to txn, until it is consumed."""
    first_rank: int = 0
    """Of its group in this scope; ``world`` ranks from it on are."""
    flow: tuple[Elsewhere, ...] = ()
    """Scopes that the flow of the data binds this one to."""
    bound: int = 0
    """Of an asynchronous job: by how many steps a contribution may be behind; else 0."""
    quorum: float = 0.5
    """Of an asynchronous job: more than this part of its groups synchronise together."""

    @property
    def ranks(self) -> range:
        """Of each group in this scope."""
        return range(self.first_rank, self.first_rank + self.world)

    @property
    def index(self) -> int:
        """My place among these."""
        return self.me.rank - self.first_rank


@dataclass(slots=True)
class Local:
    """State of one participant between two events."""

    state: str
    role: Role
    """Of the state."""
    lineage: str
    step: int = 0
    cursor: int = 0
    batches: int = 0
    leases: tuple[Lease, ...] = ()
    """Of the state I hold; see ``Record``."""
    returned: tuple[int, ...] = ()
    lease: int | None = None
    """Of an asynchronous job: the slice that this group's contribution is computed from."""
    awaits: frozenset[str] = frozenset()
    """The same: groups without which the next epoch cannot be formed, as was said last."""
    token: Token = Token(0, 0)  # noqa: RUF009  (a tuple: safe to share)
    """(epoch, txn) this participant stands at."""
    head: Record | None = None
    head_read: bool = False
    epoch: Record | None = None
    """Record of the epoch this participant is a member of."""
    commits: int = 0
    hellos: Mapping[tuple[str, int], Hello] = field(default_factory=dict)
    """Newest word of each identity (group, rank)."""
    joining: frozenset[Peer] = frozenset()
    """Outside the epoch, and asked to come in. Also a member that never came in, or fell out."""
    stopped: Mapping[Peer, Token] = field(default_factory=dict)
    """Where each has stopped, as the coordinator hears it."""
    told: Peer | None = None
    """Whom I told last that I have stopped; None: everyone."""
    ready: Mapping[Peer, int] = field(default_factory=dict)
    """The epoch in whose barrier each is, as the coordinator hears it."""
    dead: frozenset[Peer] = frozenset()
    """Ended with evidence: seen by a monitor, gone by its own word, or replaced."""
    suspected: frozenset[Peer] = frozenset()
    """Silent in a window; cleared by any word from them."""
    reforming: frozenset[str] = frozenset()
    """Groups that get a process for one that was lost: the next epoch waits for them."""
    leaving: frozenset[Peer] = frozenset()
    elsewhere: tuple[Elsewhere, ...] = ()
    vote: Vote | None = None
    restoring: Token | None = None
    """The txn that the main thread was told to unwind, and has not come back from."""
    stuck: bool = False
    """My main thread was seen not to move, and has not come back since."""
    healed: bool = False
    """My state is that of the epoch's record, or of what was committed since."""
    proposed: bool = False
    rollbacks: int = 0
    """Since the last commit."""
    paused: bool = False
    edits: bool = False
    """My last body that voted has changed reduced gradients, by whatever."""
    skip: bool = False
    """The txn I stand at is a skip: by its COMMIT, or by my ABORT of it."""
    bus_down: bool = False
    """An operation on the bus failed, and nothing was heard from it since."""
    deaf: bool = False
    """The order of decisions cannot be followed any more: my place in it is lost, or the bus is."""
    cause: str = ""
    deferred: tuple[Event, ...] = ()
    timers: Mapping[str, int] = field(default_factory=dict)
    """Armed timers: name → serial."""
    timer_serial: int = 0
    since: float = 0.0
    """Monotonic seconds at which the state (not its sub-state) was entered."""

    def __copy__(self) -> Local:
        """What ``copy`` does for slots by itself takes as long as the rest of an event."""
        return Local(*_values(self))


_values = attrgetter(*(f.name for f in fields(Local)))


def members(s: Local) -> tuple[GroupEntry, ...]:
    """Groups of the epoch; empty outside an epoch."""
    return s.epoch.members if s.epoch else ()


def member_peers(s: Local) -> tuple[Peer, ...]:
    """Participants of the epoch, in order."""
    return s.epoch.peers if s.epoch else ()


def member_at(s: Local, group: str, rank: int) -> RankEntry | None:
    """Who has this place in the epoch."""
    return s.epoch.entries.get((group, rank)) if s.epoch else None


def incarnations(s: Local, group: str, rank: int) -> set[Peer]:
    """Processes that have had this place, as far as they are known here."""
    said, listed = s.hellos.get((group, rank)), member_at(s, group, rank)
    found = {said.peer} if said is not None else set()
    return found if listed is None else found | {Peer(group, rank, listed.inc)}


def is_older_self(c: Config, peer: Peer) -> bool:
    """Whether the participant had my place before me."""
    return peer[:2] == c.me[:2] and peer.inc < c.me.inc


def is_member(s: Local, peer: Peer) -> bool:
    """Whether the participant is in the epoch."""
    return s.epoch is not None and peer in s.epoch.peer_set


def peers_meant(s: Local, event: Death | Suspect) -> list[Peer]:
    """The participants that a notice speaks of, among those known here."""
    key, where = (event.group, event.rank), (event.pid, event.host)
    said, listed = s.hellos.get(key), member_at(s, *key)
    found = [said.peer] if said is not None and (said.pid, said.host) == where else []
    if listed is not None and (listed.pid, listed.host) == where:
        found.append(Peer(*key, listed.inc))
    for each in s.head.standing if s.head is not None else ():
        ranks = each.entry.ranks if each.entry.group == event.group else ()
        found += [Peer(*key, r.inc) for r in ranks if (r.rank, r.pid, r.host) == (key[1], *where)]
    return found


def learners(s: Local) -> tuple[str, ...]:
    """Groups that have no state to compute the present txn with: it comes while the others do."""
    return s.epoch.learners if s.epoch is not None and s.token.txn == 1 else ()


def contributors(s: Local, c: Config) -> list[str]:
    """Groups whose gradients count in the present txn, in order: each has a slice of the data."""
    if c.bound and s.epoch is not None:
        return [g.group for g in with_lease(s.epoch)]
    return [g.group for g in contributing(members(s), learners(s), c)]


def with_lease(epoch: Record) -> list[GroupEntry]:
    """Members of an epoch that hold a lease; of an asynchronous job, those that contribute."""
    held = {lease[1:] for lease in epoch.leases}
    return [g for g in epoch.members if (g.group, g.store) in held]


def contributing(
    groups: Sequence[GroupEntry], late: Collection[str], c: Config
) -> list[GroupEntry]:
    """Those of ``groups`` that count, if those who are ``late`` cannot."""
    able = [g for g in groups if g.group not in late]
    return able[: c.min_groups] if c.fixed_with_spares else able


def participants(s: Local, c: Config) -> int:
    """How many groups' gradients count in the present txn."""
    return len(contributors(s, c))


def my_place(s: Local, c: Config) -> int:
    """Place of my group in the member list of the epoch."""
    return next(i for i, g in enumerate(members(s)) if g.group == c.me.group)


def hello(s: Local, c: Config, after: Record | None = None) -> Hello:
    """What I say of myself; ``after``: as of that committed record, about to be applied."""
    held = after or s
    return Hello(
        peer=c.me,
        world=c.world,
        store=c.store,
        transport=c.transport,
        pid=c.pid,
        host=c.host,
        step=held.step,
        lineage=held.lineage,
        cursor=held.cursor,
        batches=held.batches,
        head=s.head.n if s.head else 0,
        returned=held.returned if s.head is None else (),
        lease=s.lease,
        # What this rollback has begun does not count: everyone acknowledges before it is done.
        unwinding=s.stuck or s.restoring not in (None, s.token),
    )


@dataclass(frozen=True, slots=True)
class Base:
    """A training state, as the protocol knows it."""

    step: int
    lineage: str
    cursor: int
    batches: int
    leases: tuple[Lease, ...] = ()
    returned: tuple[int, ...] = ()


def data_after(s: Local, c: Config, at: Local | Record) -> Granted:
    """Where the data are once the present txn, which begins with ``at``, is committed."""
    if not c.leases:
        return Granted(at.cursor + participants(s, c), (), ())
    # who learns in this txn contributes to the next one
    takers = in_turn(contributing(members(s), (), c), at.leases)
    after = granted(Granted(at.cursor, (), at.returned), takers)
    return after._replace(leases=tuple(sorted((*after.leases, *leases_outside(s, at)))))


def leases_outside(s: Local, at: Local | Record) -> list[Lease]:
    """Of an asynchronous job: leases of groups that are not in the epoch, which keep them."""
    if s.epoch is None or not s.epoch.bound:
        return []
    inside = {(g.group, g.store) for g in s.epoch.members}
    return [lease for lease in at.leases if lease[1:] not in inside]


def committed(s: Local, c: Config, skip: bool = False) -> Base:
    """The state that committing the present txn leads to, as a step or as a ``skip``."""
    step, data = s.step + (not skip), data_after(s, c, s)
    lineage = next_lineage(s.lineage, s.token, step, data.cursor, skip)
    batches = s.batches + (0 if skip else participants(s, c))
    return Base(step, lineage, data.cursor, batches, data.leases, data.returned)


def leavers(s: Local) -> tuple[str, ...]:
    """Groups that leave with the last decision."""
    return s.head.leavers if s.head and s.head.kind == "commit" else ()


def is_waited_for(s: Local, peer: Peer) -> bool:
    """Whether the next epoch waits for this member's acknowledgement."""
    gone = peer in s.dead or peer in s.suspected or peer in s.joining
    return not gone and peer.group not in leavers(s) and is_member(s, peer)


def waited_for(s: Local) -> set[Peer]:
    """Members whose acknowledgement the next epoch waits for."""
    return {p for p in member_peers(s) if is_waited_for(s, p)}


def coordinator(s: Local) -> Peer | None:
    """Who gathers what the next epoch and its barrier wait for; None: everyone for himself.

    Whoever wrote the last decision: it lives, and everyone knows it. Where it is gone, views may
    differ for a while; several who gather cost messages, not safety, for the register decides.
    """
    by = s.head.by if s.head else None
    return by if by is not None and is_waited_for(s, by) else None


def in_barrier(s: Local) -> set[Peer]:
    """Participants of the epoch that are in its barrier, as far as I was told."""
    return {p for p in member_peers(s) if s.ready.get(p) == s.token.epoch}


def all_in_barrier(s: Local) -> bool:
    """Whether every participant of the epoch is in its barrier, as far as I was told."""
    inside = member_peers(s)
    return len(s.ready) >= len(inside) and all(s.ready.get(p) == s.token.epoch for p in inside)


def _group_order(name: str) -> tuple[int, str]:
    return (len(name), name)


def whole_groups(s: Local, c: Config) -> list[list[Hello]]:
    """Groups that could be in the next epoch: every rank alive, stopped or waiting to join.

    Whose main thread is stuck since an earlier rollback could not take part.
    """
    gone = s.dead | s.suspected
    members_stopped = {p for p in waited_for(s) if s.stopped.get(p, Token(0, 0)) >= s.token}
    present = (s.joining | members_stopped) - gone
    by_group: dict[str, list[Hello]] = {}
    for (group, _), h in sorted(s.hellos.items()):
        if h.world == c.world and h.peer in present and not h.unwinding:
            by_group.setdefault(group, []).append(h)
    return [
        ranks
        for group, ranks in sorted(by_group.items(), key=lambda kv: _group_order(kv[0]))
        if [h.peer.rank for h in ranks] == list(c.ranks) and len({h.store for h in ranks}) == 1
    ]


def awaited(s: Local, c: Config) -> set[str]:
    """Member groups that re-form: a process of theirs was lost, others wait for its successor."""
    left = {p.group for p in waited_for(s)} & s.reforming
    return left - {ranks[0].peer.group for ranks in whole_groups(s, c)} if left else left


def missing_mates(s: Local, c: Config) -> list[int]:
    """Ranks of my own group's instance that do not ask to join, as far as I have heard."""

    def asks(rank: int) -> bool:  # heard for every sign of life: no set of all is built here
        h = s.hellos.get((c.me.group, rank))
        if h is None or h.store != c.store or h.peer not in s.joining:
            return False
        return h.peer not in s.dead and h.peer not in s.suspected

    return [rank for rank in c.ranks if not asks(rank)]


def silent_mates(s: Local, c: Config) -> set[Peer]:
    """Other ranks of my group whose newest word is from before my own, an interval ago.

    A word names the newest record that its sender knows.
    """
    mine = s.hellos.get((c.me.group, c.me.rank))
    if mine is None or mine.peer != c.me:
        return set()
    mates = [s.hellos.get((c.me.group, rank)) for rank in c.ranks]
    return {h.peer for h in mates if h is not None and h.store == c.store and h.head < mine.head}


def joiners(s: Local, c: Config) -> list[str]:
    """Whole groups outside the epoch that ask to come in."""
    if not s.joining:
        return []
    inside = set(member_peers(s))
    return [r[0].peer.group for r in whole_groups(s, c) if not inside & {h.peer for h in r}]
