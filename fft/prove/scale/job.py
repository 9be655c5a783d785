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
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

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
)
from fft.protocol.participant import Outcome, Participant
from fft.protocol.spec import FsmSpec
from fft.protocol.state import GENESIS, Config, Local
from fft.protocol.table import Table
from fft.prove.clock import Clock
from fft.prove.scale.costs import Costs, Design
from fft.prove.scale.store import Mail, Operation, Store

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
