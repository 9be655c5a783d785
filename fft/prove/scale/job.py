"""A job of any size in virtual time: participants that run the shipped core, and one store.

Each participant handles one event at a time, as `fft.engine.loop` does. An event costs its measured
time; then the effects are carried out one after another, and each shared one takes the store's
time. Main threads take no time except for the step function. No timer ever fires: the necessary
windows are measured instead. The job passes through phases, each from the start of a txn for every
participant until nothing is left to do. Pure: no real clock, no threads, no history.
"""

from __future__ import annotations

import copy
import random
import statistics
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fft.engine.core import SLOTS
from fft.messages.effects import (
    Apply,
    Broadcast,
    CastVote,
    ClearTimers,
    Decide,
    DropBallot,
    Effect,
    Finish,
    Heal,
    ReadHead,
    Restore,
    SetTimer,
    StartTxn,
    Tell,
)
from fft.messages.protocol import (
    Applied,
    Ballot,
    BusMessage,
    Death,
    Decision,
    Event,
    Fault,
    GroupEntry,
    Healed,
    Hello,
    Manifest,
    Peer,
    Prepared,
    RankEntry,
    Record,
    Restored,
    Start,
    Token,
    Vote,
    encode,
    encode_record,
    encode_vote,
)
from fft.protocol.participant import Outcome, Participant
from fft.protocol.spec import FsmSpec
from fft.protocol.state import GENESIS, Config, Local
from fft.protocol.table import Table
from fft.prove.clock import Clock
from fft.prove.scale.costs import ENTRY_BYTES, Costs, Design, Prices

Operation = Generator[float, None, Event | None]

_FRAME = 16
"""Bytes that the bus adds to a vote in a ballot: two lengths and the txn's tag."""
_DIGEST = 50
"""Additional bytes of a record that names its member list by digest."""
_ANOTHER = 16
"""Bytes that each further vote adds to a group's message, which contains equal manifests once."""
_WAKE = 1 / 3
"""The share of waking the listener in the store's cost of one message to a waiting listener. The
rest is the answer to its read and its next wait."""


class Server:
    """One thread that serves requests in turn, with counts of the requests."""

    def __init__(self, clock: Clock, prices: Prices) -> None:
        self._clock = clock
        self._prices = prices
        self._free = 0.0
        self.busy = 0.0
        self.operations: Counter[str] = Counter()
        self.bytes = 0

    def serve(
        self, kind: str, size_in: int = 0, size_out: int = 0, part: float = 1.0, price: str = ""
    ) -> float:
        """Take one request that is sent now; return the seconds until its answer arrives."""
        prices = self._prices
        took = prices.of(price or kind, size_in, size_out)
        if part != 1.0:
            took -= prices.operation[price or kind] * (1.0 - part)
        self._free = max(self._free, self._clock.now + prices.hop) + took
        self.busy += took
        self.operations[kind] += 1
        self.bytes += size_in + size_out
        return self._free + prices.hop - self._clock.now

    def wake(self, price: str) -> float:
        """Wake a waiting listener after the last request; return the seconds until it notices."""
        took = self._prices.operation[price] * _WAKE
        self._free += took
        self.busy += took
        return self._free + self._prices.hop - self._clock.now


class Mail:
    """Unread messages of one listener: its position in the broadcasts, or its own inbox.

    ``kind`` is the kind that a read is counted as. ``waited`` is the price of a read for which the
    listener had to be woken, ``at_once`` that of a read that finds another message. ``mates``
    receive at their group's own ``server`` what this listener passes on.
    """

    __slots__ = ("at_once", "kind", "mates", "node", "server", "unread", "waited", "waiting")

    def __init__(self, node: Node, kind: str, waited: str, at_once: str) -> None:
        self.node = node
        self.kind = kind
        self.waited = waited
        self.at_once = at_once
        self.server: Server | None = None
        """Server of the messages; None means the job's."""
        self.mates: tuple[Mail, ...] = ()
        self.unread: deque[tuple[BusMessage, int]] = deque()
        self.waiting = True


@dataclass(slots=True)
class Slot:
    """The contents of a ballot at one server: votes of the newest txn, and older ones."""

    token: Token = Token(0, 0)  # noqa: RUF009  (a tuple: safe to share)
    votes: list[Vote] = field(default_factory=list)
    bytes: int = 0
    counted: int = 0

    def add(self, token: Token, vote: Vote, size: int) -> None:
        """Add a vote of ``size`` bytes; the slot may also hold votes of older txns."""
        if token != self.token:
            self.token, self.votes, self.counted = token, [], 0
        self.votes.append(vote)
        self.bytes += size


class Store:
    """The job's store, and each group's own store, if votes go there first."""

    def __init__(self, clock: Clock, prices: Prices, design: Design, ranks: int) -> None:
        self._clock = clock
        self._design = design
        self._ranks = ranks
        self._prices = prices
        self.job = Server(clock, prices)
        self.groups: dict[str, Server] = {}
        self.head: Record | None = None
        self.most_behind = 0
        """Maximum number of messages that a listener had not read when one was published."""
        self.reads = 0
        """Number of messages read by listeners."""
        self.formed = 0.0
        """Time at which the newest epoch record was written."""
        self._slots: dict[tuple[str, int], Slot] = {}
        self._sizes: dict[tuple[int, str], int] = {}
        self._lists: dict[int, tuple[int, int]] = {}
        self._listed: Record | None = None
        self._ballot: tuple[Token, Ballot] | None = None
        self._cast: tuple[Token, list[Vote]] | None = None
        """All votes of the newest txn, if the job's ballot holds one for each group."""

    def group_store(self, group: str) -> Server:
        """Return the group's own store."""
        if group not in self.groups:
            self.groups[group] = Server(self._clock, self._prices)
        return self.groups[group]

    # --- sizes ---

    def list_of(self, record: Record) -> tuple[int, int]:
        """Return (name of the member list, its bytes); equal for all proposers of the record."""
        known = self._lists.get(record.n)
        if known is None:
            whole, rest = encode_record(record), encode_record(replace(record, members=()))
            size = len(whole) - len(rest)
            if self._design.members != "inline":
                size = len(zlib.compress(whole)) - len(zlib.compress(rest))
            known = self._lists[record.n] = (hash(record.members), size)
        return known

    def _size(self, record: Record | None) -> int:
        if record is None:
            return 0
        key = (record.n, record.kind)
        if key not in self._sizes:
            size = len(encode_record(replace(record, members=())))
            if record.kind == "epoch" and self._design.members == "inline":
                size += self.list_of(record)[1]
            elif self._design.members != "inline":
                size += _DIGEST + self._changes(record)
            self._sizes[key] = size
        return self._sizes[key]

    def _changes(self, record: Record) -> int:
        """Return the bytes of the changes in the member list since the epoch before."""
        if self._design.members != "delta" or record.kind != "epoch" or self._listed is None:
            return 0
        before, now = set(self._listed.members), set(record.members)
        each = self.list_of(record)[1] // max(1, len(now))
        return len(before - now) * ENTRY_BYTES * self._ranks + len(now - before) * each

    def begin_with(self, record: Record) -> None:
        """Begin with this epoch record, whose list all participants hold."""
        self.head = self._listed = record

    def must_fetch(self, node: Node, record: Record) -> bool:
        """Whether the node lacks the member list of an epoch record; from now on it holds it."""
        if record.kind != "epoch":
            return False
        name = self.list_of(record)[0]
        lacks, node.holds = node.holds != name, name
        return lacks and self._design.members == "digest"

    def fetch(self, record: Record) -> float:
        """Read the member list; return the seconds until it arrives."""
        return self.job.serve("read_list", size_out=self.list_of(record)[1], price="compare_set")

    # --- messages ---

    def broadcast(self, message: BusMessage, listeners: Iterable[Node]) -> Operation:
        """Broadcast a message: number, slot, removal of the oldest slot, read of the number."""
        yield self.job.serve("add")
        size = self._message_size(message)
        delay = self.job.serve("compare_set", size_in=size, size_out=size)
        for node in listeners:
            if node.broadcasts.server is None:
                self._put(node.broadcasts, message, size)
        yield delay
        yield self.job.serve("delete")
        yield self.job.serve("add")
        return None

    def tell(self, message: BusMessage, node: Node | None) -> None:
        """Push a message into one participant's inbox, without waiting for an answer."""
        size = self._message_size(message)
        self.job.serve("push", size_in=size)
        if node is not None and node.alive:
            self._put(node.told, message, size)

    def _message_size(self, message: BusMessage) -> int:
        if isinstance(message, Decision) and message.record is not None:
            return 60 + self._size(message.record)
        return len(encode(message))

    def _put(self, mail: Mail, message: BusMessage, size: int) -> None:
        mail.unread.append((message, size))
        self.most_behind = max(self.most_behind, len(mail.unread))
        if mail.waiting:
            mail.waiting = False
            delay = (mail.server or self.job).wake(mail.waited)
            self._clock.after(delay, mail.node, self._read, mail, mail.waited, 1.0 - _WAKE)

    def _read(self, mail: Mail, price: str, part: float) -> None:
        message, size = mail.unread[0]
        self.reads += mail.server is None
        server = mail.server or self.job
        delay = server.serve(mail.kind, size_out=size, price=price, part=part)
        self._clock.after(delay, mail.node, self._has_read, mail, message)

    def _has_read(self, mail: Mail, message: BusMessage) -> None:
        record = message.record if isinstance(message, Decision) else None
        if record is not None and self.must_fetch(mail.node, record):
            self._clock.after(self.fetch(record), mail.node, self._deliver, mail, message)
        else:
            self._deliver(mail, message)

    def _deliver(self, mail: Mail, message: BusMessage) -> None:
        _, size = mail.unread.popleft()
        if mail.mates:
            self.group_store(mail.node.peer.group).serve("compare_set", size_in=size)
        for mate in mail.mates:
            self._put(mate, message, size)
        mail.node.post(message)
        if mail.unread:
            self._read(mail, mail.at_once, 1.0)
        else:
            mail.waiting = True

    # --- the register ---

    def read_head(self, node: Node) -> Operation:
        """Read the newest record, and its member list if the node lacks it."""
        record = self.head
        yield self.job.serve("read", size_out=self._size(record), price="compare_set")
        if record is not None and self.must_fetch(node, record):
            yield self.fetch(record)
        return Decision(record)

    def decide(self, node: Node, effect: Decide) -> Operation:
        """Propose the successor of a record."""
        after, proposal = effect.after, effect.proposal
        listed = proposal.kind == "epoch" and self._design.members != "inline"
        if listed:  # The list is written before the proposal, one way: a set has no awaited answer.
            node.holds, size = self.list_of(proposal)
            self.job.serve("write_list", size_in=size, price="set")
        size_in = self._size(after) + self._size(proposal)
        if self._is_head(after):
            self.head = proposal
            if proposal.kind == "epoch":
                self.formed = self._clock.now
                self._listed = proposal
        held = self.head
        assert held is not None, "the register holds a record once one is proposed"
        yield self.job.serve("compare_set", size_in=size_in, size_out=self._size(held))
        # Remove the old list, or its own that lost; it is looked up among ballots first.
        if listed:
            yield self.job.serve("read", price="compare_set")
            yield self.job.serve("delete")
        if held is not proposal and self.must_fetch(node, held):
            yield self.fetch(held)
        return Decision(held, won=held is proposal)

    def _is_head(self, record: Record | None) -> bool:
        if record is None or self.head is None:
            return record is self.head
        return (record.n, record.by) == (self.head.n, self.head.by)

    # --- ballots ---

    def cast(self, effect: CastVote) -> Operation:
        """Add a vote; the voter that completes the ballot receives all votes."""
        vote, ranks = effect.vote, self._ranks
        size, group = len(encode_vote(vote)), vote.peer.group
        # In the first txn of an epoch every rank votes separately, as in the engine.
        if self._design.votes == "rank" or ranks == 1 or effect.token.txn <= 1:
            full = yield from self._add_vote(self.job, "", effect, size, effect.voters)
            return self._whole(effect.token) if full else None
        if self._cast is None or self._cast[0] != effect.token:
            self._cast = (effect.token, [])
        self._cast[1].append(vote)
        server = self.group_store(group)
        full = yield from self._add_vote(server, group, effect, size, ranks)
        if vote.peer.rank == 0:
            yield server.serve("read", price="compare_set")
            yield server.serve("delete")
            yield server.serve("delete")
        if full:
            size += _ANOTHER * (ranks - 1)
            voters = effect.voters // ranks
            full = yield from self._add_vote(self.job, "", effect, size, voters)
        return self._whole(effect.token) if full else None

    def _add_vote(
        self, server: Server, place: str, effect: CastVote, size: int, voters: int
    ) -> Generator[float, None, bool]:
        slot = self._slot(place, effect.token)
        slot.add(effect.token, effect.vote, _FRAME + size)
        server.serve("append", size_in=_FRAME + size)  # one way: the answer is not awaited
        if self._design.ballot == "counted":
            slot.counted += 1
            last = slot.counted == voters
            yield server.serve("add")
            if not last:
                return False
        full = len(slot.votes) >= voters
        yield server.serve("read", size_out=slot.bytes, price="compare_set")
        if place:
            del self._slots[place, effect.token.epoch + effect.token.txn]
        return full

    def _whole(self, token: Token) -> Ballot:
        if self._ballot is None or self._ballot[0] != token:
            by_group = self._cast is not None and self._cast[0] == token
            votes = self._cast[1] if by_group and self._cast else self._slot("", token).votes
            self._ballot = (token, Ballot(token, tuple(votes)))
        return self._ballot[1]

    def _slot(self, place: str, token: Token) -> Slot:
        number = token.epoch + token.txn
        return self._slots.setdefault((place, number if place else number % SLOTS), Slot())

    def drop(self, token: Token) -> Operation:
        """Remove a decided ballot, the one opposite in the ring of slots."""
        number = (token.epoch + token.txn + SLOTS // 2) % SLOTS
        slot = self._slots.pop(("", number), None)
        if self._design.ballot == "counted":  # its votes name the counters that belong to it
            yield self.job.serve("read", size_out=slot.bytes if slot else 0, price="compare_set")
            yield self.job.serve("delete")
        yield self.job.serve("delete")
        return None


# --- the job ---

_MANIFEST = Manifest(count=12, bytes=48_000_000, shapes="0123456789abcdef")
_ACQUAINTED = 2000
"""Up to this size, each participant begins with every other's newest message; larger jobs begin
with none (n² entries)."""


class Stalled(RuntimeError):
    """The job has nothing left to do before the end of the phase; the text gives its state."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Costs of one phase. Seconds are virtual."""

    name: str
    groups: int
    participants: int
    operations: Mapping[str, int]
    """Requests at the job's store by kind; ``hear`` and ``pop`` are messages read there."""
    heard: int  # number of messages that listeners read
    bytes: int
    """Bytes in and out of the job's store."""
    busy: float
    """Seconds that the store's thread worked."""
    span: float
    """Time from the fault, or from the end of the step functions, until the last participant began
    a txn."""
    formed: float | None
    """Time from the fault until the next epoch's record was written."""
    latency: tuple[float, float] | None
    """Time from the last vote until the median and the last participant obeyed the decision."""
    behind: int
    """Maximum number of messages that one listener had not read when another was published."""
    window: Mapping[str, float]
    """Timer → the longest time for which it was armed before it was cleared or armed again."""
    group_operations: int
    """Total number of requests at the groups' own stores."""

    def total(self) -> int:
        """Return the number of requests at the job's store."""
        return sum(self.operations.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def event_kind(event: Event) -> str:
    """Return the kind by which the handling time of an event is looked up."""
    if isinstance(event, Decision):
        return f"decision.{event.record.kind if event.record else 'none'}"
    return event.type


class Node:
    """One participant: engine and main thread."""

    __slots__ = (
        "_busy",
        "_effects",
        "_front",
        "_inbox",
        "_operation",
        "alive",
        "armed",
        "began",
        "broadcasts",
        "holds",
        "job",
        "local",
        "parked",
        "participant",
        "plan",
        "stopped",
        "told",
    )

    def __init__(self, job: LargeJob, participant: Participant) -> None:
        self.job = job
        self.participant = participant
        self.local = participant.initial(GENESIS)
        self.alive = True
        self.stopped = False
        self.parked: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.broadcasts = Mail(self, "hear", "hear", "hear")
        self.told = Mail(self, "pop", "wait_pop", "pop")
        self.holds: int | None = None
        """Name of the member list that this process holds."""
        self.plan: Token | None = None
        """The txn that the main thread is in."""
        self.began = -1.0
        self.armed: dict[str, float] = {}
        self._inbox: deque[Event] = deque()
        self._front: deque[Event] = deque()
        self._busy = False
        self._effects: list[Effect] = []
        self._operation: Operation | None = None

    @property
    def peer(self) -> Peer:
        """Identity of the participant."""
        return self.participant.config.me

    def post(self, event: Event) -> None:
        """Queue an event."""
        self._inbox.append(event)
        if not self._busy:
            self._take()

    def _take(self) -> None:
        if self._front:
            event = self._front.popleft()
        elif self._inbox:
            event = self._inbox.popleft()
        else:
            self._busy = False
            return
        self._busy = True
        self.job.clock.after(self.job.handling(event), self, self._handle, event)

    def _handle(self, event: Event) -> None:
        self.local, out = self.job.handle(self, event)
        if out.verdict == "refused":
            raise Stalled(f"{self.peer} refused {event_kind(event)}: {out.reason}")
        self._effects = out.effects[::-1]
        self._go_on()

    def _go_on(self) -> None:
        while self._effects:
            effect = self._effects.pop()
            self._operation = self.job.carry_out(self, effect)
            if self._operation is not None:
                self._ask()
                return
        self._take()

    def _ask(self) -> None:
        assert self._operation is not None
        try:
            delay = next(self._operation)
        except StopIteration as stop:
            self._operation = None
            if stop.value is not None:  # handled before anything else, once the effects are done
                self._front.append(stop.value)
            self._go_on()
            return
        self.job.clock.after(delay, self, self._ask)

    def prepare(self, token: Token) -> None:
        """Finish the step function, unless an abort has ended it."""
        if self.plan == token:
            self.post(self.job.prepared(token))


class LargeJob:
    """Groups of equal size, one store, and the phases that the job passes through."""

    def __init__(
        self,
        spec: FsmSpec,
        design: Design,
        costs: Costs,
        groups: int,
        ranks: int = 8,
        seed: int = 1,
        formed: bool = True,
    ) -> None:
        self.clock = Clock()
        self.costs = costs
        self.spec = spec
        self.ranks = ranks
        self.store = Store(self.clock, costs.prices, design, ranks)
        self.rng = random.Random(seed)
        self._obeyed: list[float] = []
        self._windows: dict[str, float] = {}
        self._mark: tuple[Counter[str], int, float, int, int] = (Counter(), 0, 0.0, 0, 0)
        self._same: dict[tuple[type, Token], Event] = {}
        self._handling: dict[str, float] = {}
        table = Table(spec)
        self.nodes = [
            Node(self, Participant(table, self._config(g, r, groups)))
            for g in range(groups)
            for r in range(ranks)
        ]
        self._of = {node.peer: node for node in self.nodes}
        if design.hearing == "group":
            for group in range(0, len(self.nodes), ranks):
                self._pass_on(self.nodes[group : group + ranks])
        if formed:
            self._form()

    def _config(self, group: int, rank: int, groups: int) -> Config:
        return Config(
            me=Peer(f"{group:05d}", rank, 1),
            world=self.ranks,
            store=f"host-{group:05d}:29500",
            transport=f"http://host-{group:05d}:{31000 + rank}",
            pid=41000 + rank,
            host=f"host-{group:05d}",
            timeouts=self.spec.timeouts,
            min_reductions=self.spec.policies.min_reductions,
            expected_groups=groups,
        )

    def _pass_on(self, group: list[Node]) -> None:
        ear, *mates = (node.broadcasts for node in group)
        ear.mates = tuple(mates)
        for mail in mates:
            mail.server = self.store.group_store(group[0].peer.group)

    # --- the first epoch ---

    def _form(self) -> None:
        record = self._first_record()
        self.store.begin_with(record)
        first = self._formed(record)
        for node in self.nodes:  # In an epoch just formed, participants differ only in their names.
            node.local = copy.copy(first)
            node.holds = self.store.list_of(record)[0]
            node.plan = first.token

    def _formed(self, record: Record) -> Local:
        """Return the first participant's state once all are in the first epoch's barrier."""
        node = self.nodes[0]
        local = node.local
        if len(self.nodes) <= _ACQUAINTED:
            local.hellos = {n.peer[:2]: self._hello(n) for n in self.nodes}
        local, _ = node.participant.handle(local, Decision(record), 0.0)
        local.ready = {n.peer: record.epoch for n in self.nodes}
        local, _ = node.participant.handle(local, Healed(epoch=record.epoch), 0.0)
        local.ready = {}
        if local.role != "training":
            raise Stalled(f"the first epoch does not form: {node.peer} is in {local.state}")
        return local

    def _first_record(self) -> Record:
        entries: dict[str, list[Config]] = {}
        for node in self.nodes:
            c = node.participant.config
            entries.setdefault(c.me.group, []).append(c)
        members = tuple(
            GroupEntry(
                group=group,
                store=ranks[0].store,
                ranks=tuple(
                    RankEntry(c.me.rank, c.me.inc, True, c.transport, c.pid, c.host) for c in ranks
                ),
            )
            for group, ranks in entries.items()
        )
        by = self.nodes[0].peer
        return Record(1, "epoch", 1, 0, 0, GENESIS, 0, 0, by, members=members)

    def _hello(self, node: Node) -> Hello:
        c = node.participant.config
        return Hello(c.me, c.world, c.store, c.transport, c.pid, c.host, 0, GENESIS, 0, 0, 0, False)

    # --- what nodes ask for ---

    def handling(self, event: Event) -> float:
        """Return the seconds that one event costs the participant that handles it."""
        kind = event_kind(event)
        if kind not in self._handling:
            self._handling[kind] = self.costs.handling.of(kind, len(self.nodes))
        return self._handling[kind]

    def handle(self, node: Node, event: Event) -> tuple[Local, Outcome]:
        """Let the core handle the event."""
        return node.participant.handle(node.local, event, self.clock.now)

    def prepared(self, token: Token) -> Event:
        """Return the main thread's report that the step function succeeded."""
        return self._shared(Prepared, token, lambda: Prepared(token, True, _MANIFEST))

    def _shared(self, kind: type, token: Token, make: Callable[[], Event]) -> Event:
        if (kind, token) not in self._same:
            self._same[kind, token] = make()
        return self._same[kind, token]

    def carry_out(self, node: Node, effect: Effect) -> Operation | None:
        """Begin an operation on the bus, if the effect is one; otherwise carry the effect out."""
        match effect:
            case SetTimer(name=name):
                self._cleared(node, name)
                node.armed[name] = self.clock.now
            case ClearTimers(names=names):
                for name in names:
                    self._cleared(node, name)
            case Broadcast(message=message):
                return self.store.broadcast(message, self.nodes)
            case Tell(to=to, message=message):
                self.store.tell(message, self._of.get(to))
            case ReadHead():
                return self.store.read_head(node)
            case Decide():
                return self.store.decide(node, effect)
            case CastVote():
                return self.store.cast(effect)
            case DropBallot(token=token):
                return self.store.drop(token)
            case Restore() | Heal() | Apply() | StartTxn() | Finish():
                self._command(node, effect)
            case _:  # process groups are left to the main thread
                return None
        return None

    def _cleared(self, node: Node, name: str) -> None:
        since = node.armed.pop(name, None)
        if since is not None:
            self._windows[name] = max(self._windows.get(name, 0.0), self.clock.now - since)

    def _command(self, node: Node, command: Restore | Heal | Apply | StartTxn | Finish) -> None:
        match command:
            case Restore(token=token):
                node.plan = None
                node.post(self._shared(Restored, token, lambda: Restored(token)))
            case Heal(record=record):
                token = Token(record.epoch, 0)
                node.post(self._shared(Healed, token, lambda: Healed(epoch=record.epoch)))
            case Apply():
                token = node.local.token
                self._obeyed.append(self.clock.now)
                node.post(self._shared(Applied, token, lambda: Applied(token)))
            case StartTxn(token=token):
                node.plan, node.began = token, self.clock.now
            case Finish(reason=reason, error=error):
                raise Stalled(f"{node.peer} is out: {error or 'in good order'}: {reason}")

    # --- phases ---

    def start(self) -> Phase:
        """Start all processes at once and let them join; ends when all begin the first txn."""
        self._open()
        for node in self.nodes:
            self.clock.after(0.0, node, node.post, Start())
        return self._close("start", 0.0, voted=False)

    def step(self) -> Phase:
        """Run one txn without a fault; a common collective ends all step functions at once."""
        self._open()
        begin = self.clock.now + self.costs.body
        for node in self.nodes:
            assert node.plan is not None, "every phase ends with all in a txn"
            self.clock.after(self.costs.body, node, node.prepare, node.plan)
        return self._close("step", begin, voted=True)

    def rollback(self) -> Phase:
        """Let one rank's step function raise in the middle of a txn; no process is lost."""
        self._open()
        at = self.clock.now + self.costs.body / 2
        node = self.nodes[self.rng.randrange(1, len(self.nodes))]
        assert node.plan is not None, "every phase ends with all in a txn"
        self.clock.after(self.costs.body / 2, node, node.post, Fault(node.plan, "raised"))
        return self._close("rollback", at, voted=False)

    def kill(self) -> Phase:
        """Kill a group in the middle of a txn; its supervisor reports the death of each rank."""
        self._open()
        at = self.clock.now + self.costs.body / 2
        names = sorted({node.peer.group for node in self.nodes} - {self.nodes[0].peer.group})
        self.clock.after(self.costs.body / 2, None, self._kill, self.rng.choice(names))
        return self._close("kill", at, voted=False)

    def _kill(self, group: str) -> None:
        lost = [node for node in self.nodes if node.peer.group == group]
        for node in lost:
            node.alive = False
        self.nodes = [node for node in self.nodes if node.alive]
        self._handling.clear()
        self._say([self._death(node) for node in lost])

    def _death(self, node: Node) -> Death:
        c = node.participant.config
        return Death(c.me.group, c.me.rank, c.pid, c.host, "supervisor", "SIGKILL")

    def _say(self, messages: list[Death]) -> None:
        """Send messages in turn, as the supervisor, a client of the store without a core."""

        def client() -> Operation:
            for message in messages:
                yield from self.store.broadcast(message, self.nodes)
            return None

        self._run_client(client())

    def _run_client(self, operation: Operation) -> None:
        delay = next(operation, None)
        if delay is not None:
            self.clock.after(delay, None, self._run_client, operation)

    def _open(self) -> None:
        job, self._same = self.store.job, {}
        self._obeyed, self._windows, self.store.most_behind = [], {}, 0
        groups = sum(s.operations.total() for s in self.store.groups.values())
        self._mark = (Counter(job.operations), job.bytes, job.busy, self.store.reads, groups)
        self.store.formed = 0.0

    def _close(self, name: str, since: float, voted: bool) -> Phase:
        while self.clock.turn():
            pass
        self._check(name, since)
        operations, size, busy, reads, group_operations = self._mark
        job = self.store.job
        obeyed = sorted(self._obeyed)
        latency = (statistics.median(obeyed) - since, obeyed[-1] - since) if voted else None
        served = sum(s.operations.total() for s in self.store.groups.values())
        return Phase(
            name=name,
            groups=len(self.nodes) // self.ranks,
            participants=len(self.nodes),
            operations=dict(sorted((job.operations - operations).items())),
            heard=self.store.reads - reads,
            bytes=job.bytes - size,
            busy=job.busy - busy,
            span=max(node.began for node in self.nodes) - since,
            formed=self.store.formed - since if self.store.formed else None,
            latency=latency,
            behind=self.store.most_behind,
            window=dict(sorted(self._windows.items())),
            group_operations=served - group_operations,
        )

    def _check(self, name: str, since: float) -> None:
        states = Counter(n.local.state for n in self.nodes if n.plan is None or n.began < since)
        if states:
            raise Stalled(f"{name} of {len(self.nodes)} participants ended with some in {states}")
