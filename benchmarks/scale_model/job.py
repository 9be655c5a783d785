"""A job of any size in virtual time: participants that run the shipped engine, and one store.

Each participant drives an `EngineCore` as `fft.engine.loop` does. An event costs its measured time;
each call on a bus takes the store's time, by the requests that `fft.bus.tcpstore` makes for it.
Main threads take no time except for the step function. No timer ever fires: the necessary windows
are measured instead. The job passes through phases, each from the start of a txn for every
participant until nothing is left to do. Pure: no real clock, no threads, no history.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, assert_never

from benchmarks.scale_model.costs import ENTRY_BYTES, FEW_VOTERS, Costs, Design, Prices
from fft.bus.base import HEAD
from fft.engine.calls import (
    GROUP,
    Call,
    Cast,
    CompareSet,
    Delete,
    Publish,
    Read,
    Send,
    Write,
)
from fft.engine.core import Command, Wiring
from fft.messages.commands import Answer
from fft.messages.effects import Apply, ClearTimers, Finish, Heal, Restore, SetTimer, StartTxn
from fft.messages.progress import HeldReport
from fft.messages.protocol import (
    Applied,
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
)
from fft.messages.wire import (
    Members,
    Packed,
    Register,
    Wire,
    encode_packed,
    encode_register,
    encode_votes,
    inbox_name,
    list_name,
)
from fft.protocol.participant import Outcome, Participant
from fft.protocol.spec import FsmSpec
from fft.protocol.state import GENESIS, Config, Local
from fft.protocol.table import Table
from fft.prove.clock import Clock
from fft.prove.virtual_engine import VirtualEngine

Operation = Generator[float, None, object]
"""The requests for one call: yields the seconds until each answer, and returns the call's."""
Message = BusMessage | Packed

_FRAME = 16
"""Bytes that the bus adds to a vote in a ballot: two lengths and the txn's tag."""
_LISTS = "members/"
"""Prefix of the registers of member lists."""
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
        self.unread: deque[tuple[Message, int]] = deque()
        self.waiting = True


@dataclass(slots=True)
class Slot:
    """The contents of a ballot at one server: votes of the newest txn, and the bytes of all."""

    tag: str = ""
    votes: list[Vote] = field(default_factory=list)
    bytes: int = 0

    def add(self, cast: Cast) -> bool:
        """Add votes; return whether the ballot is full."""
        if cast.tag != self.tag:
            self.tag, self.votes = cast.tag, []
        self.votes += cast.votes
        self.bytes += _FRAME + len(encode_votes(cast.votes))
        return len(self.votes) >= cast.voters


class Store:
    """The job's store, and each group's own store, where its ranks vote first.

    A call makes the requests that `fft.bus.tcpstore` makes. Requests that do not depend on each
    other's answers are sent together.
    """

    def __init__(self, clock: Clock, prices: Prices, design: Design, ranks: int) -> None:
        self._clock = clock
        self._design = design
        self._ranks = ranks
        self._prices = prices
        self.job = Server(clock, prices)
        self.groups: dict[str, Server] = {}
        self.listeners: list[Node] = []
        """All live participants; each listens to broadcasts and to an inbox of its own."""
        self.inboxes: dict[str, Mail] = {}
        self.registers: dict[str, Register] = {}
        self.most_behind = 0
        """Maximum number of messages that a listener had not read when one was published."""
        self.reads = 0
        """Number of messages read by listeners."""
        self.formed = 0.0
        """Time at which the newest epoch record was written."""
        self._slots: dict[tuple[str, str], Slot] = {}
        self._sizes: dict[object, int] = {}
        self._members: Members = ()
        """Members of the newest epoch."""
        self._changes = 0
        """Bytes of the changes to the member list that was written last."""

    def group_store(self, group: str) -> Server:
        """Return the group's own store."""
        if group not in self.groups:
            self.groups[group] = Server(self._clock, self._prices)
        return self.groups[group]

    # --- sizes ---

    def _size(self, value: Register | Message | None, key: str = "") -> int:
        """Return the bytes of a message or of a register's value; ``key`` names a member list.

        Equal records and equal lists are encoded once.
        """
        match value:
            case None | int():
                return 0
            case Packed(members=digest, record=record):
                size = self._once((record.n, record.kind), encode_packed, value)
                return size + (self._changes if digest else 0)
            case tuple():
                return self._once(key.rpartition("/")[2], encode_register, value)
        return len(encode(value))

    def _once(self, name: object, encoder: Callable[[Any], bytes], value: object) -> int:
        if name not in self._sizes:
            self._sizes[name] = len(encoder(value))
        return self._sizes[name]

    def _note_changes(self, key: str, members: Members) -> None:
        """Note the size of the changes from the last epoch's members to a list to be written."""
        if self._design.members == "delta":
            each = self._size(members, key) // max(1, len(members))
            lost, new = set(self._members) - set(members), set(members) - set(self._members)
            self._changes = len(lost) * ENTRY_BYTES * self._ranks + len(new) * each

    # --- calls ---

    def operation(self, node: Node, call: Call) -> Operation:
        """Begin a call of a participant."""
        group = node.peer.group if call.at == GROUP else ""
        server = self.group_store(group) if group else self.job
        match call:
            case Read(key=key):
                return self._read_register(key)
            case Write(key=key, value=value):
                return self._write(key, value)
            case CompareSet():
                return self._compare_set(call)
            case Cast():
                return self._cast(server, group, call)
            case Delete(key=key):
                return self._delete(server, group, key)
            case Publish(message=message) if not isinstance(message, HeldReport):
                return self.broadcast(message)
            case Send(inbox=inbox, message=message) if not isinstance(message, Answer):
                return self._send(inbox, message)
            case Publish() | Send():
                raise TypeError(f"a job without operators and stages does not ask for {call}")
        assert_never(call)

    def _read_register(self, key: str) -> Operation:
        value, is_list = self.registers.get(key), key.startswith(_LISTS)
        if not (is_list and self._design.members == "delta"):  # then the record tells the changes
            kind = "read_list" if is_list else "read"
            yield self.job.serve(kind, size_out=self._size(value, key), price="compare_set")
        return value

    def _write(self, key: str, value: Register) -> Operation:
        self.registers[key] = value
        if isinstance(value, tuple):
            self._note_changes(key, value)
        kind = "write_list" if isinstance(value, tuple) else "set"
        self.job.serve(kind, size_in=self._size(value, key), price="set")
        yield self.job.serve("check", price="compare_set")
        return None

    def _compare_set(self, call: CompareSet) -> Operation:
        desired, held = call.desired, self.registers.get(HEAD)
        won = held == call.expected
        if won:
            held = self.registers[HEAD] = desired
            if desired.members:
                self.formed = self._clock.now
                self._members = self._list_of(desired)
        size_in = self._size(call.expected) + self._size(desired)
        delay = self.job.serve("compare_set", size_in=size_in, size_out=self._size(held))
        if not call.announce:
            yield delay
            return held
        yield self.job.serve("add")
        if won:
            yield self._write_slot(desired)
        else:
            self.job.serve("check", price="compare_set")
            yield self.job.serve("compare_set")
        return held

    def _list_of(self, packed: Packed) -> Members:
        members = self.registers[list_name(packed)]
        assert isinstance(members, tuple), "the list is written before it is proposed"
        return members

    def _cast(self, server: Server, group: str, cast: Cast) -> Operation:
        slot = self._slots.setdefault((group, cast.slot), Slot())
        before = slot.bytes
        is_full = slot.add(cast)
        server.serve("append", size_in=slot.bytes - before)
        delay = server.serve("add")
        few = cast.voters <= FEW_VOTERS
        if few:
            delay = server.serve("read", size_out=slot.bytes, price="compare_set")
        votes = list(slot.votes)
        yield delay
        if is_full and not few:
            yield server.serve("read", size_out=slot.bytes, price="compare_set")
        return votes if is_full else None

    def _delete(self, server: Server, group: str, key: str) -> Operation:
        """Remove a ballot with its counter, a register, or an inbox, which are tried in turn.

        Every slot counts as holding the ballot of an earlier txn, as in the long run.
        """
        slot = self._slots.pop((group, key), None)
        size = slot.bytes if slot else 0
        yield server.serve("read", size_out=size, price="compare_set")
        if self.registers.pop(key, None) is not None:
            yield server.serve("delete")
            return None
        first = server.serve("delete")
        if key not in self.inboxes:
            yield server.serve("delete")
            return None
        yield first
        yield server.serve("delete")
        yield server.serve("length", price="pop")
        return None

    # --- messages ---

    def broadcast(self, message: Message) -> Operation:
        """Broadcast a message: take a number, then write its slot."""
        yield self.job.serve("add")
        yield self._write_slot(message)
        return None

    def _write_slot(self, message: Message) -> float:
        """Write a slot, remove the oldest one, and read the newest number, in one round trip."""
        size = self._size(message)
        self.job.serve("compare_set", size_in=size, size_out=size)
        for node in self.listeners:
            if node.broadcasts.server is None:
                self._put(node.broadcasts, message, size)
        self.job.serve("delete")
        return self.job.serve("add")

    def _send(self, inbox: str, message: Message) -> Operation:
        """Push a message into one participant's inbox; a push has no answer."""
        size = self._size(message)
        self.job.serve("push", size_in=size)
        if (mail := self.inboxes[inbox]).node.alive:
            self._put(mail, message, size)
        return None
        yield

    def _put(self, mail: Mail, message: Message, size: int) -> None:
        mail.unread.append((message, size))
        self.most_behind = max(self.most_behind, len(mail.unread))
        if mail.waiting:
            mail.waiting = False
            delay = (mail.server or self.job).wake(mail.waited)
            self._clock.after(delay, mail.node, self._read, mail, mail.waited, 1.0 - _WAKE)

    def _read(self, mail: Mail, price: str, part: float) -> None:
        size = mail.unread[0][1]
        self.reads += mail.server is None
        server = mail.server or self.job
        delay = server.serve(mail.kind, size_out=size, price=price, part=part)
        self._clock.after(delay, mail.node, self._deliver, mail)

    def _deliver(self, mail: Mail) -> None:
        message, size = mail.unread.popleft()
        if mail.mates:
            self.group_store(mail.node.peer.group).serve("compare_set", size_in=size)
        for mate in mail.mates:
            self._put(mate, message, size)
        mail.node.post(message)
        if mail.unread:
            self._read(mail, mail.at_once, 1.0)
        else:
            mail.waiting = True

    # --- the participants ---

    def open(self, nodes: list[Node]) -> None:
        """Let all participants listen, who leave the list when they are lost."""
        self.listeners = nodes
        self.inboxes = {inbox_name(n.peer): Mail(n, "pop", "wait_pop", "pop") for n in nodes}
        if self._design.hearing == "group":
            for i in range(0, len(nodes), self._ranks):
                ear, *mates = (node.broadcasts for node in nodes[i : i + self._ranks])
                ear.mates = tuple(mates)
                for mail in mates:
                    mail.server = self.group_store(ear.node.peer.group)

    def begin_with(self, packed: Packed, members: Members) -> None:
        """Begin with this epoch record."""
        self.registers |= {HEAD: packed, list_name(packed): members}
        self._members = members


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


class Node(VirtualEngine):
    """One participant: engine and main thread."""

    def __init__(self, job: LargeJob, participant: Participant, local: Local) -> None:
        super().__init__(job.clock, participant, local, Wiring(has_group_bus=True))
        self.job = job
        self.broadcasts = Mail(self, "hear", "hear", "hear")
        self.plan: Token | None = None
        """The txn that the main thread is in."""
        self.began = -1.0
        self._armed: dict[str, float] = {}
        self._free = 0.0
        """Time at which the engine's thread has handled the events so far."""

    # --- the engine's thread ---

    def outcome(self, before: Local, after: Local, event: Event, out: Outcome, now: float) -> None:
        """Charge the time of an event, and measure its timers."""
        if out.verdict == "refused":
            raise Stalled(f"{self.peer} refused {event_kind(event)}: {out.reason}")
        self._free = max(now, self._free) + self.job.handling(event)
        for effect in out.effects:
            if isinstance(effect, SetTimer):
                self._cleared(effect.name)
                self._armed[effect.name] = self._free
            elif isinstance(effect, ClearTimers):
                for name in effect.names:
                    self._cleared(name)

    def _cleared(self, name: str) -> None:
        since = self._armed.pop(name, None)
        if since is not None:
            self.job.note_window(name, self._free - since)

    def _pause(self) -> float:
        return max(0.0, self._free - self.clock.now)

    def _begin(self, call: Call) -> None:
        self.clock.after(self._pause(), self, self._perform, call)

    def _perform(self, call: Call) -> None:
        self._go_on(self.job.store.operation(self, call))

    def _go_on(self, operation: Operation) -> None:
        try:
            delay = next(operation)
        except StopIteration as stop:
            self.answered(stop.value)
            return
        self.clock.after(delay, self, self._go_on, operation)

    def take_over(self, packed: Packed, members: Members) -> None:
        """Let the engine see the record of the epoch that it is in, at no cost."""
        self.core.post(packed)
        call = self.core.step(0.0)
        while call is not None:
            call = self.core.step(0.0, members if isinstance(call, Read) else None)
        self._free = 0.0

    # --- the main thread ---

    def put(self, command: Command) -> None:
        """Carry out a command once the event that it belongs to is handled."""
        self.clock.after(self._pause(), self, self._carry_out, command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Restore(token=token):
                self.plan = None
                self.post(Restored(token))
            case Heal(record=record):
                self.post(Healed(epoch=record.epoch))
            case Apply():
                self.job.note_obeyed()
                self.post(Applied(self.local.token))
            case StartTxn(token=token):
                self.plan, self.began = token, self.clock.now
            case Finish(reason=reason, error=error):
                raise Stalled(f"{self.peer} is out: {error or 'in good order'}: {reason}")

    def prepare(self, token: Token) -> None:
        """Finish the step function, unless an abort has ended it."""
        if self.plan == token:
            self.post(Prepared(token, True, _MANIFEST))


class LargeJob:
    """Groups of equal size, one store, and the phases that the job passes through."""

    node: type[Node] = Node

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
        self._handling: dict[str, float] = {}
        table = Table(spec)
        participants = [
            Participant(table, self._config(g, r, groups))
            for g in range(groups)
            for r in range(ranks)
        ]
        record = self._first_record([p.config for p in participants])
        first = self._formed(participants, record) if formed else None
        self.nodes = [
            # in an epoch just formed, participants differ only in their names
            self.node(self, p, copy.copy(first) if first else p.initial(GENESIS))
            for p in participants
        ]
        self.store.open(self.nodes)
        if first is not None:
            self._take_over(record)

    def _config(self, group: int, rank: int, groups: int) -> Config:
        return Config(
            me=Peer(f"{group:05d}", rank, 1),
            world=self.ranks,
            store=f"host-{group:05d}:29500",
            transport=f"http://host-{group:05d}:{31000 + rank}",
            pid=41000 + rank,
            host=f"host-{group:05d}",
            timeouts=dict.fromkeys(self.spec.timeouts, math.inf),  # no timer fires
            min_reductions=self.spec.policies.min_reductions,
            expected_groups=groups,
        )

    # --- the first epoch ---

    def _formed(self, participants: Sequence[Participant], record: Record) -> Local:
        """Return the first participant's state once all are in the first epoch's barrier."""
        first = participants[0]
        local = first.initial(GENESIS)
        configs = [p.config for p in participants]
        if len(configs) <= _ACQUAINTED:
            local.hellos = {c.me[:2]: self._hello(c) for c in configs}
        local, _ = first.handle(local, Decision(record), 0.0)
        local.ready = {c.me: record.epoch for c in configs}
        local, _ = first.handle(local, Healed(epoch=record.epoch), 0.0)
        local.ready = {}
        if local.role != "training":
            raise Stalled(f"the first epoch does not form: {first.config.me} is in {local.state}")
        return local

    def _take_over(self, record: Record) -> None:
        """Let all participants begin in the first txn of the epoch."""
        packed = Wire().pack(record)
        self.store.begin_with(packed, record.members)
        for node in self.nodes:
            node.take_over(packed, record.members)
            node.plan = node.local.token

    def _first_record(self, configs: Sequence[Config]) -> Record:
        entries: dict[str, list[Config]] = {}
        for c in configs:
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
        return Record(1, "epoch", 1, 0, 0, GENESIS, 0, 0, configs[0].me, members=members)

    def _hello(self, c: Config) -> Hello:
        return Hello(c.me, c.world, c.store, c.transport, c.pid, c.host, 0, GENESIS, 0, 0, 0, False)

    # --- what nodes ask for ---

    def handling(self, event: Event) -> float:
        """Return the seconds that one event costs the participant that handles it."""
        kind = event_kind(event)
        if kind not in self._handling:
            self._handling[kind] = self.costs.handling.of(kind, len(self.nodes))
        return self._handling[kind]

    def note_window(self, timer: str, seconds: float) -> None:
        """Note for how long a timer was armed."""
        self._windows[timer] = max(self._windows.get(timer, 0.0), seconds)

    def note_obeyed(self) -> None:
        """Note that a participant has obeyed a decision."""
        self._obeyed.append(self.clock.now)

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
        self.nodes[:] = [node for node in self.nodes if node.alive]
        self._handling.clear()
        self._say([self._death(node) for node in lost])

    def _death(self, node: Node) -> Death:
        c = node.participant.config
        return Death(c.me.group, c.me.rank, c.pid, c.host, "supervisor", "SIGKILL")

    def _say(self, messages: list[Death]) -> None:
        """Send messages in turn, as the supervisor, a client of the store without a core."""

        def client() -> Operation:
            for message in messages:
                yield from self.store.broadcast(message)
            return None

        self._run_client(client())

    def _run_client(self, operation: Operation) -> None:
        delay = next(operation, None)
        if delay is not None:
            self.clock.after(delay, None, self._run_client, operation)

    def _open(self) -> None:
        job = self.store.job
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
