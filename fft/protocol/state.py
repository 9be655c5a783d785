"""The configuration and the state of one participant, and pure functions over them.

The containers in ``Local`` are never changed in place: a new one replaces the old one, so a shallow
copy of ``Local`` is a snapshot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Literal

from fft.messages.causes import NO_CAUSE, Cause
from fft.messages.protocol import (
    Death,
    Event,
    GroupEntry,
    Hello,
    Lease,
    Peer,
    RankEntry,
    Record,
    ScopeRecord,
    Suspect,
    Token,
    Vote,
    next_lineage,
)
from fft.protocol.active import chosen
from fft.protocol.leases import Granted, granted, in_turn
from fft.protocol.roles import Role


@dataclass(frozen=True, slots=True)
class ScopePosition:
    """Another scope to which the data flow binds this one, as far as it is known here."""

    scope: str
    ahead: int
    """Number of the other scope's txns that this scope may be ahead; 0 if this scope follows it."""
    n: int = 0
    """Number of its newest known record, or 0."""
    cursor: int = 0
    """All slices before the cursor are taken in it, by committed steps or skips."""
    takers: int = 1
    """Number of groups that take a slice per txn there; 0 if the scope has ended. Like the cursor
    from the record that lets this scope proceed furthest; before the scope has begun, its
    minimum."""
    groups: tuple[str, ...] = ()
    """Groups in it by the newest record, without those that leave with that record."""

    @property
    def reach(self) -> int:
        """First slice that a leading scope may not begin a txn at."""
        return self.cursor + self.ahead * self.takers

    @property
    def has_ended(self) -> bool:
        """Whether all groups have left the scope, so that it takes no more slices."""
        return self.takers == 0

    def allows(self, first: int, after: int) -> bool:
        """Whether this scope may have a txn of the slices ``first`` to ``after - 1``."""
        if not self.ahead:
            return after <= self.cursor
        return not self.takers or first < self.reach

    def after(self, record: ScopeRecord, c: Config) -> ScopePosition:
        """Return the same scope with a newer record.

        A permission is never revoked, not even by a record of more groups than are left.
        """
        new = replace(self, n=record.n, groups=record.groups)
        further = replace(new, cursor=record.cursor, takers=c.takers(len(record.groups)))
        is_further = further.has_ended or further.reach >= self.reach
        return further if is_further else new


FREE_ROLLBACKS = 3
"""Number of consecutive rollbacks that are not followed by a pause."""
GENESIS = "genesis"
"""Lineage of the initial state if every group builds the same one (``init_sync=False``)."""


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one participant, constant during its life. Timeouts are in seconds."""

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
    """A group keeps its slice of the data from txn to txn, until a COMMIT consumes it."""
    first_rank: int = 0
    """Lowest of the ``world`` rank numbers that each group has in this scope."""
    flow: tuple[ScopePosition, ...] = ()
    """Scopes to which the data flow binds this scope."""
    bound: int = 0
    """Number of steps that a contribution may be behind in an asynchronous job, else 0."""
    quorum: float = 0.5
    """Fraction of an asynchronous job's groups; a synchronization needs more than this fraction."""
    fixed_slices: int = 0
    """Number of slices of the data that a txn takes, whatever the number of groups; 0: one slice
    for each group that contributes."""
    rules: tuple[tuple[str, int], ...] = ()
    """Rules that choose the groups of an epoch that contribute; see `fft.protocol.active`."""
    place: str = ""
    """Place of this group for these rules, such as its node; empty if no rule needs it."""
    spans_hosts: bool = False
    """Other hosts have ranks of this group, and their launchers replace those that are lost."""
    home: str = ""
    """The store where this group meets if this rank is its first, unless that is ``store``."""

    @property
    def ranks(self) -> range:
        """Rank numbers of each group in this scope."""
        return range(self.first_rank, self.first_rank + self.world)

    @property
    def index(self) -> int:
        """Position of this participant among ``ranks``."""
        return self.me.rank - self.first_rank

    def takers(self, groups: int) -> int:
        """Return how many of so many groups take slices in each txn; the others are spares."""
        most = self.min_groups if self.fixed_with_spares else self.fixed_slices
        return min(groups, most) if most else groups


@dataclass(slots=True)
class Local:
    """The state of one participant between two events."""

    state: str
    role: Role
    """Role of ``state``."""
    lineage: str
    step: int = 0
    cursor: int = 0
    batches: int = 0
    leases: tuple[Lease, ...] = ()
    """Leases in the state that this participant holds; see ``Record``."""
    returned: tuple[int, ...] = ()
    lease: int | None = None
    """Asynchronous jobs: the slice that this group's contribution is computed from."""
    awaits: frozenset[str] = frozenset()
    """Asynchronous jobs: groups that the next epoch cannot be formed without, as last traced."""
    token: Token = Token(0, 0)  # noqa: RUF009  (a tuple: safe to share)
    """The (epoch, txn) that this participant is in."""
    head: Record | None = None
    head_read: bool = False
    epoch: Record | None = None
    """Record of the epoch that this participant is a member of."""
    commits: int = 0
    hellos: Mapping[tuple[str, int], Hello] = field(default_factory=dict)
    """Newest ``Hello`` of each identity (group, rank)."""
    joining: frozenset[Peer] = frozenset()
    """Participants that ask to join. A member among them has not entered the epoch, or has left
    it."""
    stopped: Mapping[Peer, Token] = field(default_factory=dict)
    """The token at which each participant has stopped, as the coordinator receives it."""
    told: Peer | None = None
    """Recipient of this participant's last acknowledgement; None if it was broadcast."""
    ready: Mapping[Peer, int] = field(default_factory=dict)
    """The epoch in whose barrier each participant is: this one, and those that sent `ready`."""
    dead: frozenset[Peer] = frozenset()
    """Participants known to have ended: seen by a monitor, by their own ``leave``, or replaced."""
    suspected: frozenset[Peer] = frozenset()
    """Participants that were silent for a window; a message from one removes it."""
    reforming: frozenset[str] = frozenset()
    """Groups that get a new process for a lost one; the next epoch waits for them."""
    leaving: frozenset[Peer] = frozenset()
    others: tuple[ScopePosition, ...] = ()
    vote: Vote | None = None
    restoring: Token | None = None
    """The txn of the last rollback that the main thread has not yet reported as restored."""
    stuck: bool = False
    """The main thread was seen to stall and has not returned since."""
    healed: bool = False
    """The state is that of the epoch's record, or of a later commit."""
    proposed: bool = False
    rollbacks: int = 0
    """Number of rollbacks since the last commit."""
    paused: bool = False
    edits: bool = False
    """Step functions may change the state, by the last vote."""
    skip: bool = False
    """The current txn is a skip, by its COMMIT or by this participant's ABORT."""
    bus_down: bool = False
    """An operation on the bus failed, and no message has arrived since."""
    deaf: bool = False
    """Bus lost: this participant has lost its place in the order of decisions, or the bus its
    contents."""
    cause: Cause = NO_CAUSE
    """Cause of the rollback or wait that this participant is in."""
    deferred: tuple[Event, ...] = ()
    timers: Mapping[str, int] = field(default_factory=dict)
    """Armed timers: name → serial."""
    timer_serial: int = 0
    since: float = 0.0
    """Time at which the state (not its sub-state) was entered, in monotonic seconds."""

    def __copy__(self) -> Local:
        """Copy the fields directly; the default copy of slots takes as long as the rest of an
        event."""
        return Local(*_values(self))


_values = attrgetter(*(f.name for f in fields(Local)))


def members(s: Local) -> tuple[GroupEntry, ...]:
    """Return the groups of the epoch; empty outside every epoch."""
    return s.epoch.members if s.epoch else ()


def member_peers(s: Local) -> tuple[Peer, ...]:
    """Return the participants of the epoch, in order."""
    return s.epoch.peers if s.epoch else ()


def member_at(s: Local, group: str, rank: int) -> RankEntry | None:
    """Return the epoch's member with this group and rank, or None."""
    return s.epoch.entries.get((group, rank)) if s.epoch else None


def incarnations(s: Local, group: str, rank: int) -> set[Peer]:
    """Return the known processes that have had this identity."""
    said, listed = s.hellos.get((group, rank)), member_at(s, group, rank)
    found = {said.peer} if said is not None else set()
    return found if listed is None else found | {Peer(group, rank, listed.inc)}


def is_older_self(c: Config, peer: Peer) -> bool:
    """Return whether ``peer`` is an older incarnation of this participant."""
    return peer[:2] == c.me[:2] and peer.inc < c.me.inc


def is_member(s: Local, peer: Peer) -> bool:
    """Return whether the participant is in the epoch."""
    return s.epoch is not None and peer in s.epoch.peer_set


def peers_meant(s: Local, event: Death | Suspect) -> list[Peer]:
    """Return the known participants that a death or a suspicion is about."""
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
    """Return the groups that fetch their state while the others compute the current txn."""
    return s.epoch.learners if s.epoch is not None and s.token.txn == 1 else ()


def unproven(s: Local) -> frozenset[Peer]:
    """Return the members that have fetched their state and committed no step since.

    It follows from the newest record, so it is the same on all members. If a rank number has no
    other member, it contains of that number only the members that fetch in this epoch.
    """
    if s.epoch is None or s.head is None:
        return frozenset()
    if not (found := s.head.unproven & s.epoch.peer_set):
        return found
    late = s.epoch.late
    proven = {peer.rank for peer in s.epoch.peer_set - found}
    return frozenset(peer for peer in found if peer in late or peer.rank in proven)


def fetched_after(s: Local, skip: bool) -> tuple[Peer, ...]:
    """Return ``Record.fetched`` after the current txn. ``skip``: it commits no step."""
    return tuple(sorted(s.head.unproven)) if skip and s.head is not None else ()


def contributors(s: Local, c: Config) -> list[str]:
    """Return the groups whose gradients count in the current txn, in member order.

    Each of them has at least one slice of the data.
    """
    if c.bound and s.epoch is not None:
        return [g.group for g in with_lease(s.epoch)]
    active = s.epoch.active if s.epoch is not None else ()
    able = [g for g in members(s) if not active or g.group in active]
    return [g.group for g in contributing(able, learners(s), c)]


def with_lease(epoch: Record) -> list[GroupEntry]:
    """Return the members of an epoch that hold a lease; in an asynchronous job these contribute."""
    held = {lease[1:] for lease in epoch.leases}
    return [g for g in epoch.members if (g.group, g.store) in held]


def contributing(
    groups: Sequence[GroupEntry], late: Collection[str], c: Config
) -> list[GroupEntry]:
    """Return those of ``groups`` that contribute if the groups in ``late`` cannot."""
    able = [g for g in groups if g.group not in late]
    return able[: c.takers(len(able))]


def participants(s: Local, c: Config) -> int:
    """Return the number of groups whose gradients count in the current txn."""
    return len(contributors(s, c))


def slices_taken(s: Local, c: Config) -> int:
    """Return the number of slices of the data that the current txn takes, without leases."""
    return c.fixed_slices or participants(s, c)


def my_place(s: Local, c: Config) -> int:
    """Return the index of this participant's group in the member list of the epoch."""
    return next(i for i, g in enumerate(members(s)) if g.group == c.me.group)


def hello(s: Local, c: Config, after: Record | None = None) -> Hello:
    """Return this participant's description of itself.

    Args:
        after: A committed record that is about to be applied; describes the state after it.
    """
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
        place=c.place,
        home=c.home,
        # The current rollback does not count: every participant acknowledges before it unwinds.
        unwinding=s.stuck or s.restoring not in (None, s.token),
    )


@dataclass(frozen=True, slots=True)
class Base:
    """A training state, as far as the protocol describes it."""

    step: int
    lineage: str
    cursor: int
    batches: int
    leases: tuple[Lease, ...] = ()
    returned: tuple[int, ...] = ()


def data_after(s: Local, c: Config, at: Local | Record) -> Granted:
    """Return the position in the data once the current txn is committed.

    Args:
        at: The state or record that the txn begins with.
    """
    if not c.leases:
        return Granted(at.cursor + slices_taken(s, c), (), ())
    # A group that fetches its state in this txn contributes to the next one.
    takers = in_turn(contributing(members(s), (), c), at.leases)
    after = granted(Granted(at.cursor, (), at.returned), takers)
    return after._replace(leases=tuple(sorted((*after.leases, *leases_outside(s, at)))))


def leases_outside(s: Local, at: Local | Record) -> list[Lease]:
    """Return the leases of groups that are not in the epoch (asynchronous jobs); they keep them."""
    if s.epoch is None or not s.epoch.bound:
        return []
    inside = {(g.group, g.store) for g in s.epoch.members}
    return [lease for lease in at.leases if lease[1:] not in inside]


def committed(s: Local, c: Config, skip: bool = False) -> Base:
    """Return the state that committing the current txn leads to, as a step or as a ``skip``.

    The txn of a live block consumes no data.
    """
    is_live = skip and s.vote is not None and bool(s.vote.manifest.block)
    data = Granted(s.cursor, s.leases, s.returned) if is_live else data_after(s, c, s)
    step = s.step + (not skip)
    lineage = next_lineage(s.lineage, s.token, step, data.cursor, skip)
    batches = s.batches + (0 if skip else slices_taken(s, c))
    return Base(step, lineage, data.cursor, batches, data.leases, data.returned)


def leavers(s: Local) -> tuple[str, ...]:
    """Return the groups that leave with the last decision."""
    return s.head.leavers if s.head and s.head.kind == "commit" else ()


def staying(s: Local, me: Peer) -> set[str]:
    """Return the other groups of the epoch that are alive, and neither leave nor are to leave."""
    gone = {p.group for p in member_peers(s) if p in s.dead or p in s.leaving}
    return {g.group for g in members(s)} - gone - set(leavers(s)) - {me.group}


def is_waited_for(s: Local, peer: Peer) -> bool:
    """Return whether the next epoch waits for this member's acknowledgement."""
    gone = peer in s.dead or peer in s.suspected or peer in s.joining
    return not gone and peer.group not in leavers(s) and is_member(s, peer)


def waited_for(s: Local) -> set[Peer]:
    """Return the members whose acknowledgement the next epoch waits for."""
    return {p for p in member_peers(s) if is_waited_for(s, p)}


def coordinator(s: Local) -> Peer | None:
    """Return the participant that collects the messages for the next epoch and its barrier.

    It is the author of the last decision: it was alive then, and every participant knows it. Views
    of whether it is gone may differ for a while. Several coordinators then cost messages but not
    safety, because the register decides.

    Returns:
        None if the author is not waited for; then every participant collects for itself.
    """
    by = s.head.by if s.head else None
    return by if by is not None and is_waited_for(s, by) else None


def in_barrier(s: Local) -> set[Peer]:
    """Return the members that are in the barrier of the epoch, by the messages received here."""
    return {p for p in member_peers(s) if s.ready.get(p) == s.token.epoch}


def all_in_barrier(s: Local) -> bool:
    """Return whether every member is in the barrier of the epoch, by the messages received here."""
    inside = member_peers(s)
    return len(s.ready) >= len(inside) and all(s.ready.get(p) == s.token.epoch for p in inside)


def _group_order(name: str) -> tuple[int, str]:
    return (len(name), name)


def whole_groups(s: Local, c: Config) -> list[list[Hello]]:
    """Return the groups that could be in the next epoch, as the ``Hello`` of each of their ranks.

    Every rank of such a group is alive and has stopped or asks to join. A rank whose main thread
    has not returned from an earlier rollback is excluded, because it could not take part.
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


def suffice(groups: Sequence[Sequence[Hello]], c: Config) -> bool:
    """Return whether enough of these whole groups would contribute to an epoch."""
    places = [(ranks[0].peer.group, ranks[0].place) for ranks in groups]
    return len(chosen(places, c.rules)) >= max(1, c.min_groups)


def awaited(s: Local, c: Config) -> set[str]:
    """Return the re-forming member groups whose lost process has not been replaced yet."""
    left = {p.group for p in waited_for(s)} & s.reforming
    return left - {ranks[0].peer.group for ranks in whole_groups(s, c)} if left else left


def missing_mates(s: Local, c: Config) -> list[int]:
    """Return the ranks of this group's instance from which no current request to join is known."""

    def asks(rank: int) -> bool:  # runs for every `here`, so it builds no set of all joiners
        h = s.hellos.get((c.me.group, rank))
        if h is None or h.store != c.store or h.peer not in s.joining:
            return False
        return h.peer not in s.dead and h.peer not in s.suspected

    return [rank for rank in c.ranks if not asks(rank)]


def silent_mates(s: Local, c: Config) -> set[Peer]:
    """Return the other ranks of this group whose newest ``Hello`` names an older record than ours.

    Our own newest ``Hello`` is one ``join_interval`` old.
    """
    mine = s.hellos.get((c.me.group, c.me.rank))
    if mine is None or mine.peer != c.me:
        return set()
    mates = [s.hellos.get((c.me.group, rank)) for rank in c.ranks]
    return {h.peer for h in mates if h is not None and h.store == c.store and h.head < mine.head}


def joiners(s: Local, c: Config) -> list[str]:
    """Return the names of whole groups outside the epoch that ask to join."""
    if not s.joining:
        return []
    inside = set(member_peers(s))
    return [r[0].peer.group for r in whole_groups(s, c) if not inside & {h.peer for h in r}]
