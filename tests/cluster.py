"""A whole job in memory, event by event: the shipped engine over a modelled bus.

The caller decides when messages are delivered, when main threads answer, and which processes crash;
``settle`` runs until no event is left. There is no real time here: timers fire when the caller
requests it. Operations on the bus are answered at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from specs import table_of

from fft.bus.base import HEAD
from fft.engine.calls import Call, Cast, CompareSet, Delete, Publish, Read, Send, Write, beside
from fft.engine.core import Command, EngineCore, ScopeReader, Wiring
from fft.errors import BusError
from fft.messages.causes import CauseCode
from fft.messages.commands import Answer
from fft.messages.effects import Apply, Finish, Heal, Restore, SetTimer, StartTxn, TellHeld
from fft.messages.progress import HeldReport
from fft.messages.protocol import (
    Applied,
    ApplyFailed,
    BusMessage,
    Connected,
    Death,
    Decision,
    Event,
    Fault,
    GroupEntry,
    Healed,
    Manifest,
    Peer,
    Prepared,
    RankEntry,
    Record,
    Restored,
    ScopeRecord,
    Start,
    Timer,
    Vote,
)
from fft.messages.wire import Packed, Register, Wire, inbox_name, list_name
from fft.protocol.participant import Outcome, Participant
from fft.protocol.spec import FsmSpec, outermost
from fft.protocol.state import GENESIS, Config, Local
from fft.prove.virtual_engine import InertHost

_FETCHED = 100
"""Size of a state, in bytes."""

Observer = Callable[["Node", Local, Event, Outcome], None]


_SILENT = logging.Logger("fft.prove.cluster", logging.CRITICAL + 1)


class Node(InertHost):
    """One participant: its engine, for which this is host, slot and trace, and its main thread.

    The caller decides when its main thread acts.
    """

    def __init__(self, cluster: Cluster, participant: Participant, local: Local) -> None:
        self._cluster = cluster
        others = tuple(ScopeReader(bound.scope) for bound in participant.config.flow)
        wiring = Wiring(others=others, log=_SILENT)
        self.core = EngineCore(participant, local, self, self, self, wiring)
        self.alive = True
        self.inbox: deque[Event] = deque()
        """Messages and reports that its engine has not received yet."""
        self.txn: StartTxn | None = None
        """The txn that the main thread is in."""
        self.finished: Finish | None = None
        self.applied: list[Record] = []
        self.skipped: list[Record] = []
        self.fetched = 0
        self.heals: list[Heal] = []
        self.learning: Heal | None = None
        """The heal that a learner is still fetching its state for."""
        self.outcomes: list[Outcome] = []

    @property
    def participant(self) -> Participant:
        """The core of the protocol."""
        return self.core.participant

    @property
    def local(self) -> Local:
        """State of the participant."""
        return self.core.local

    @local.setter
    def local(self, local: Local) -> None:
        self.core.local = local

    @property
    def timers(self) -> dict[str, SetTimer]:
        """Armed timers by name."""
        return {
            name: SetTimer(name, due, serial)
            for due, serial, name in self.core._timers
            if self.local.timers.get(name) == serial
        }

    @property
    def peer(self) -> Peer:
        """Identity of the participant."""
        return self.participant.config.me

    @property
    def state(self) -> str:
        """State of the state machine."""
        return outermost(self.local.state)

    # --- what its engine asks of it ---

    def put(self, command: Command) -> None:
        """Let the main thread carry out a command at once."""
        self._cluster.obey(self, command)

    def outcome(self, before: Local, after: Local, event: Event, out: Outcome, now: float) -> None:
        """Record the outcome of an event."""
        self.outcomes.append(out)
        if self._cluster.observer:
            self._cluster.observer(self, before, event, out)

    def note(self, name: str, data: dict[str, Any], local: Local | None = None) -> None:
        """Record that another scope holds a txn back."""
        self._cluster.held.append(TellHeld(**data))


class Cluster:
    """Participants on one bus, which delivers messages in the order of sending."""

    def __init__(self, spec: FsmSpec, observer: Observer | None = None) -> None:
        self.spec = spec
        self.table = table_of(spec)
        self.nodes: dict[Peer, Node] = {}
        self.head: Record | None = None
        """Value of the head register, with its members."""
        self.history: list[Record] = []
        """Every value that the head register ever had."""
        self.registers: dict[str, Register] = {}
        self.ballots: dict[str, list[tuple[str, tuple[Vote, ...]]]] = {}
        """Slot → the tag and the votes of each entry."""
        self.scopes: dict[str, ScopeRecord] = {}
        """Newest records of other scopes."""
        self.held: list[TellHeld] = []
        self.bus_up = True
        self.loses_decision = False
        """The next decision takes effect, but is not announced, and its answer is lost."""
        self.observer = observer
        self._incs: dict[tuple[str, int], int] = {}

    # --- life ---

    def add(
        self,
        group: str,
        rank: int = 0,
        world: int = 1,
        lineage: str = GENESIS,
        step: int = 0,
        **config: object,
    ) -> Node:
        """Start a process: a new incarnation of (group, rank). It asks to join at once."""
        inc = self._incs[(group, rank)] = self._incs.get((group, rank), 0) + 1
        peer = Peer(group, rank, inc)
        values: dict[str, object] = {
            "me": peer,
            "world": world,
            "store": f"store-{group}-{inc}",
            "transport": f"http://{group}.{rank}.{inc}",
            "pid": 1000 + len(self.nodes),
            "host": "sim",
            "timeouts": self.spec.timeouts,
            "min_reductions": self.spec.policies.min_reductions,
            **config,
        }
        participant = Participant(self.table, Config(**values))  # type: ignore[arg-type]
        node = Node(self, participant, participant.initial(lineage, step))
        self.nodes[peer] = node
        self.post(node, Start())
        return node

    def crash(self, node: Node, tell: bool = True, replaced: bool = False) -> None:
        """Kill the process, as by SIGKILL.

        Args:
            node: The process.
            tell: A supervisor reports the death.
            replaced: The report adds that another process takes its place.
        """
        node.alive = False
        node.inbox.clear()
        c = node.participant.config
        if tell:
            self.broadcast(Death(*c.me[:2], c.pid, c.host, "sim", replaced=replaced))

    def live(self) -> list[Node]:
        """Return the nodes that have neither crashed nor finished."""
        return [n for n in self.nodes.values() if n.alive and n.finished is None]

    # --- running ---

    def post(self, node: Node, event: Event) -> None:
        """Queue an event for one participant."""
        if node.alive:
            node.inbox.append(event)

    def broadcast(self, message: BusMessage) -> None:
        """Put a message on the bus: into every live inbox, in one order."""
        for node in self.live():
            node.inbox.append(message)

    def deliver(self, node: Node) -> Outcome:
        """Let the node's engine handle the next event, and the answers of the bus to it.

        Returns the outcome of the event itself.
        """
        core, done = node.core, len(node.outcomes)
        core.post(node.inbox.popleft())
        while core.time_to_next_work(0.0) == 0.0:
            call = core.step(0.0)
            while call is not None:
                try:
                    call = core.step(0.0, self._perform(call))
                except BusError as error:
                    call = core.fail(0.0, error)
        return node.outcomes[done]

    def settle(self, limit: int = 100_000) -> None:
        """Deliver until every inbox is empty. Raises ``RuntimeError`` past ``limit`` events."""
        for _ in range(limit):
            waiting = [n for n in self.live() if n.inbox]
            if not waiting:
                return
            self.deliver(waiting[0])
        raise RuntimeError(f"not settled after {limit} events")

    def fire(self, name: str, nodes: Iterable[Node] | None = None) -> None:
        """Let the timer ``name`` fire on every node where it is armed."""
        for node in list(nodes or self.live()):
            if (timer := node.timers.get(name)) is not None:
                self.post(node, Timer(name, timer.serial))

    # --- main threads ---

    def compute(
        self,
        nodes: Iterable[Node] | None = None,
        reductions: int = 1,
        skip: bool = False,
        digest: str | None = None,
        data: str | None = None,
        block: str = "",
        checkpoint: bool = False,
    ) -> None:
        """Let every main thread that is in a txn finish its step function successfully."""
        for node in list(nodes or self.live()):
            if node.txn is not None:
                manifest = Manifest(reductions, 4 * reductions, "x", data=data, block=block)
                self.learn(node)
                asks = {"skip": skip, "digest": digest, "checkpoint": checkpoint}
                done = Prepared(node.txn.token, True, manifest, **asks)  # type: ignore[arg-type]
                self.post(node, done)

    def learn(self, node: Node) -> None:
        """Deliver the state that a learner fetches."""
        if node.learning is not None:
            self.post(node, Healed(node.learning.record.epoch, _FETCHED))
            node.learning = None

    def fail(self, node: Node, cause: str = "boom") -> None:
        """Let the node's step function raise."""
        token = node.txn.token if node.txn else node.local.token
        self.post(node, Fault(token, cause, CauseCode.STEP_FAILED))

    def step(self, limit: int = 100_000) -> None:
        """Run one whole txn on all nodes: settle, compute, settle."""
        self.settle(limit)
        self.compute()
        self.settle(limit)

    def obey(self, node: Node, command: Command) -> None:
        """Do what the main thread of a node does with a command."""
        match command:
            case Restore(token=token):
                node.txn, node.learning = None, None
                torn = node.peer in self.restore_fails
                self.restore_fails -= {node.peer}
                self.post(node, Restored(token, torn, "the body changed a parameter" * torn))
            case Heal():
                self._heal(node, command)
            case StartTxn():
                node.txn = command
            case Apply():
                self._apply(node, command)
            case Finish():
                node.finished = command
                node.inbox.clear()

    def _heal(self, node: Node, effect: Heal) -> None:
        node.heals.append(effect)
        fetched = 0 if effect.fetch_from is None else _FETCHED
        node.fetched += fetched
        if fetched and node.peer.group in effect.record.learners:
            node.learning = effect
            self.post(node, Connected(effect.record.epoch))
        else:
            self.post(node, Healed(effect.record.epoch, fetched))

    apply_fails: frozenset[Peer] = frozenset()
    restore_fails: frozenset[Peer] = frozenset()
    """Participants whose rollback cannot restore everything."""

    def _apply(self, node: Node, effect: Apply) -> None:
        token = node.local.token
        if node.peer in self.apply_fails:
            self.apply_fails -= {node.peer}
            self.post(node, ApplyFailed(token, "cuda error"))
            return
        (node.skipped if effect.skip else node.applied).append(effect.record)
        self.post(node, Applied(token))

    # --- the bus ---

    def _perform(self, call: Call) -> object:
        if not self.bus_up:
            raise BusError("the bus is out of reach")
        match call:
            case Read(key=key, at=at):
                return (self._beside(at) if at else self.registers).get(key)
            case Write(key=key, value=value):
                self.registers[key] = value
            case CompareSet(expected=expected, desired=desired, announce=announce):
                if self.registers.get(HEAD) != expected:
                    return self.registers.get(HEAD)
                self._set_head(desired)
                if self.loses_decision:
                    self.loses_decision = False
                    raise BusError("no answer")
                if announce:
                    self._publish(desired)
                return desired
            case Cast(slot=slot, tag=tag, votes=votes, voters=voters):
                cast = self.ballots.setdefault(slot, [])
                cast.append((tag, votes))
                mine = [vote for t, some in cast if t == tag for vote in some]
                return mine if len(mine) >= voters else None
            case Delete(key=key):
                self.ballots.pop(key, None)
                self.registers.pop(key, None)
            case Publish(message=message) if not isinstance(message, HeldReport):
                self._publish(message)
            case Send(inbox=inbox, message=message) if not isinstance(message, Answer):
                for node in self.nodes.values():
                    if inbox_name(node.peer) == inbox:
                        self.post(node, self._whole(message))
        return None

    def put_head(self, record: Record) -> None:
        """Write the head register, as a process of another job does."""
        packed = Wire().pack(record)
        if packed.members:
            self.registers[list_name(packed)] = record.members
        self._set_head(packed)

    def _set_head(self, desired: Packed) -> None:
        self.registers[HEAD] = desired
        head = self._whole(desired)
        assert isinstance(head, Decision) and head.record is not None
        self.head = head.record
        self.history.append(self.head)

    def _publish(self, message: BusMessage | Packed) -> None:
        self.broadcast(self._whole(message))

    def _whole(self, message: BusMessage | Packed) -> BusMessage:
        """Return a message as its receivers see it: a record with its members."""
        if not isinstance(message, Packed):
            return message
        members = self.registers[list_name(message)] if message.members else ()
        assert isinstance(members, tuple), "a list is written before its record"
        return Decision(replace(message.record, members=members) if members else message.record)

    def _beside(self, at: str) -> dict[str, Register]:
        """Return the registers of another scope, which has just formed an epoch there."""
        found = next((r for name, r in self.scopes.items() if beside(name) == at), None)
        if found is None:
            return {}
        ranks = (RankEntry(0, 1, True, "", 1, ""),)
        members = tuple(GroupEntry(group, "", ranks) for group in found.groups)
        by = Peer("1", 0, 1)
        record = Record(
            found.n, "epoch", found.n, 0, 0, GENESIS, found.cursor, 0, by, members=members
        )
        packed = Wire().pack(record)
        return {HEAD: packed, list_name(packed): members}
