"""A whole job in memory, event by event: the shipped core over a modelled bus and register.

Uses core, machine and spec only. The caller decides when messages are delivered, when main threads
answer, and which processes crash; ``settle`` runs until no event is left. There is no real time
here: timers fire when the caller requests it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import assert_never

from fft.messages.causes import CauseCode
from fft.messages.effects import (
    AbortGroups,
    Apply,
    Broadcast,
    CancelFutures,
    CastVote,
    ClearTimers,
    Decide,
    DropBallot,
    Effect,
    Finish,
    Heal,
    ReadHead,
    ReadScope,
    Restore,
    SetTimer,
    StartTxn,
    Tell,
    TellHeld,
)
from fft.messages.protocol import (
    Applied,
    ApplyFailed,
    Ballot,
    BusDown,
    BusMessage,
    Connected,
    Death,
    Decision,
    Event,
    Fault,
    Healed,
    Manifest,
    Peer,
    Prepared,
    Record,
    Restored,
    ScopeRecord,
    Start,
    Timer,
    Token,
    Vote,
)
from fft.protocol.participant import Outcome, Participant
from fft.protocol.spec import FsmSpec, outermost
from fft.protocol.state import GENESIS, Config, Local
from fft.protocol.table import Table

_FETCHED = 100
"""Size of a state, in bytes."""

Observer = Callable[["Node", Local, Event, Outcome], None]


@dataclass
class Node:
    """One participant, with the state that its engine and main thread would hold."""

    participant: Participant
    local: Local
    alive: bool = True
    inbox: deque[Event] = field(default_factory=deque)
    timers: dict[str, SetTimer] = field(default_factory=dict)
    txn: StartTxn | None = None
    """The txn that the main thread is in."""
    finished: Finish | None = None
    applied: list[Record] = field(default_factory=list)
    skipped: list[Record] = field(default_factory=list)
    fetched: int = 0
    heals: list[Heal] = field(default_factory=list)
    learning: Heal | None = None
    """The heal that a learner is still fetching its state for."""
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def peer(self) -> Peer:
        """Identity of the participant."""
        return self.participant.config.me

    @property
    def state(self) -> str:
        """State of the state machine."""
        return outermost(self.local.state)


class Cluster:
    """Participants, one FIFO bus, one head register, ballots."""

    def __init__(self, spec: FsmSpec, observer: Observer | None = None) -> None:
        self.spec = spec
        self.table = Table(spec)
        self.nodes: dict[Peer, Node] = {}
        self.head: Record | None = None
        self.history: list[Record] = []
        """Every value that the register ever had."""
        self.ballots: dict[Token, dict[Peer, Vote]] = {}
        self.scopes: dict[str, ScopeRecord] = {}
        """Newest records of other scopes."""
        self.held: list[TellHeld] = []
        self.bus_up = True
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
        node = Node(participant, participant.initial(lineage, step))
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
        """Handle the node's next event and carry out the effects."""
        event = node.inbox.popleft()
        before = node.local
        node.local, out = node.participant.handle(before, event, 0.0)
        node.outcomes.append(out)
        if self.observer:
            self.observer(node, before, event, out)
        for effect in out.effects:
            self.carry_out(node, effect)
        return out

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
            if timer := node.timers.pop(name, None):
                self.post(node, Timer(timer.name, timer.serial))

    # --- main threads ---

    def compute(
        self,
        nodes: Iterable[Node] | None = None,
        reductions: int = 1,
        skip: bool = False,
        digest: str | None = None,
        data: str | None = None,
    ) -> None:
        """Let every main thread that is in a txn finish its step function successfully."""
        for node in list(nodes or self.live()):
            if node.txn is not None:
                manifest = Manifest(reductions, 4 * reductions, "x", data=data)
                self.learn(node)
                done = Prepared(node.txn.token, True, manifest, skip=skip, digest=digest)
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

    # --- effects ---

    def carry_out(self, node: Node, effect: Effect) -> None:
        """Do what an engine would do for one effect."""
        match effect:
            case Tell(to=to, message=message):
                if self._bus(node, "tell") and to in self.nodes:
                    self.post(self.nodes[to], message)
            case Broadcast(message=message):
                if self._bus(node, "broadcast"):
                    self.broadcast(message)
            case ReadHead():
                if self._bus(node, "read"):
                    self.post(node, Decision(self.head))
            case ReadScope(scope=scope):
                if self._bus(node, "read scope") and scope in self.scopes:
                    self.post(node, self.scopes[scope])
            case Decide(after=after, proposal=proposal):
                if self._bus(node, "decide"):
                    self._decide(node, after, proposal)
            case CastVote(token=token, vote=vote, voters=voters):
                if self._bus(node, "vote"):
                    votes = self.ballots.setdefault(token, {})
                    votes[vote.peer] = vote
                    if len(votes) >= voters:
                        self.post(node, Ballot(token, tuple(votes.values())))
            case DropBallot(token=token):
                self.ballots.pop(token, None)
            case SetTimer(name=name):
                node.timers[name] = effect
            case ClearTimers(names=names):
                for name in names:
                    node.timers.pop(name, None)
            case CancelFutures() | AbortGroups():
                pass
            case TellHeld():
                self.held.append(effect)
            case Restore(token=token):
                node.txn, node.learning = None, None
                torn = node.peer in self.restore_fails
                self.restore_fails -= {node.peer}
                self.post(node, Restored(token, torn, "the body changed a parameter" * torn))
            case Heal():
                self._heal(node, effect)
            case StartTxn():
                node.txn = effect
            case Apply():
                self._apply(node, effect)
            case Finish():
                node.finished = effect
                node.inbox.clear()
            case _:
                assert_never(effect)

    def _bus(self, node: Node, operation: str) -> bool:
        if not self.bus_up:
            self.post(node, BusDown(operation, "the bus is out of reach"))
        return self.bus_up

    def _decide(self, node: Node, after: Record | None, proposal: Record) -> None:
        if self.head == after:
            self.head = proposal
            self.history.append(proposal)
        self.post(node, Decision(self.head, won=self.head == proposal))

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
