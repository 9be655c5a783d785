"""A whole job as a transition system: the shipped core and table over a bus that may fail.

Pure. A state is a short tuple of numbers (``fft.prove.intern``); ``Model.steps`` yields every step
that a participant, its main thread, the bus or a fault can take next. Engines are modelled as in
``fft.engine.loop``: the effects of an event are carried out in order, with one step for each that
others can see (broadcast, read, decide, vote). So any process can act, and crash, between two of
them. Answers are handled after the effects and before anything else. There is no real time: a timer
may fire early as a fault, or when nothing else can happen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

from fft.engine.executor import Report
from fft.errors import ProtocolError
from fft.messages.effects import (
    AbortGroups,
    Apply,
    Broadcast,
    CastVote,
    Decide,
    Finish,
    ReadHead,
    ReadScope,
    Restore,
    Tell,
)
from fft.messages.protocol import (
    Ack,
    Applied,
    ApplyFailed,
    Ballot,
    Begin,
    BusDown,
    Connected,
    Death,
    Decision,
    Drain,
    Event,
    Fault,
    Healed,
    HealFailed,
    Here,
    Join,
    Manifest,
    Peer,
    Prepared,
    Ready,
    Restored,
    Start,
    Stop,
    Suspect,
    Synchronise,
    Timer,
    Token,
)
from fft.protocol.invariants import INVARIANTS, Claim, Given, Holds, Know, Move, Same
from fft.protocol.main_thread import NO_FACTS, Reaction, ThreadTable, shipped_thread
from fft.protocol.participant import Outcome, Participant
from fft.protocol.roles import AT_WORK, Role
from fft.protocol.spec import FsmSpec
from fft.protocol.state import GENESIS, Config, member_peers
from fft.protocol.table import Table
from fft.prove.acts import Act
from fft.prove.acts import State as State
from fft.prove.acts import Step as Step
from fft.prove.bare_effects import SHARED, AnyEffect, Begun, Blocked, Fetch, bare, heard, matters
from fft.prove.bits import Bits
from fft.prove.bounds import GIVES_UP, KINDS, REAL, UNQUIET, Bounds, World
from fft.prove.intern import Interner, Renamer, can_matter, freeze, thaw
from fft.prove.nodes import NEVER, Node, Shared, tidied
from fft.prove.other_scopes import OtherScopes

SUCCESSOR = 100
"""Difference between the incarnations of a lost rank and its successor, which share a store."""
_POLLS = {"flow_interval"}
QUEUES = {"inbox": "hears 0", "mail": "is told 0"}
"""The queues of incoming messages, and the name of the step that takes their first message."""


View = tuple[int, int | None, int, str]


Moment = tuple[int, int, int, int]
"""An event of a participant: its index and incarnation, and its state and the event by number."""


class Handled(NamedTuple):
    """The core's answer to a moment, by number."""

    local: int
    effects: tuple[int, ...]
    claims: int
    refused: str
    outcome: Outcome
    kept: frozenset[str]
    """Timers that stay armed as they were before."""


@dataclass(slots=True)
class _Turn:
    """The results of one node's turn so far."""

    node: Node
    shared: Shared
    sent: list[int] = field(default_factory=list)
    told: tuple[Peer, int] | None = None
    claims: list[int] = field(default_factory=list)
    broken: tuple[str, str] | None = None
    unexpected: str = ""


@dataclass(slots=True)
class _Memo:
    """Results that the model has computed before, by their arguments."""

    reactions: dict[tuple[str, str, frozenset[str]], Reaction | str] = field(default_factory=dict)
    participants: dict[tuple[int, int], Participant] = field(default_factory=dict)
    handled: dict[Moment, Handled] = field(default_factory=dict)
    weighed: dict[tuple[int, tuple[int, ...]], tuple[int, tuple[str, str] | None]] = field(
        default_factory=dict
    )
    seen: dict[int, View] = field(default_factory=dict)
    node_views: dict[int, View | None] = field(default_factory=dict)
    pruned: dict[tuple[int, Any], int] = field(default_factory=dict)
    tidied: dict[tuple[int, int], int] = field(default_factory=dict)
    kept: dict[tuple[int, int, int, int], tuple[Act, ...]] = field(default_factory=dict)
    quiet_acts: dict[tuple[int, int, bool], Act | None] = field(default_factory=dict)
    calms: dict[int, bool] = field(default_factory=dict)
    timers: dict[tuple[int, bool], tuple[str, ...]] = field(default_factory=dict)
    older: dict[tuple[int, str], int] = field(default_factory=dict)
    rung: dict[tuple[int, int, str], Act] = field(default_factory=dict)
    delivered: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)


class Model:
    """The transition system of a spec within bounds.

    Args:
        spec: The table.
        bounds: Bounds of the search.
        participant: The class that runs the core; planted bugs are subclasses.
        world: Behaviour of bus and main threads.
        only: Names of the properties to evaluate, which may include ``protocol``; by default all.
        thread: The main threads' table.
    """

    def __init__(
        self,
        spec: FsmSpec,
        bounds: Bounds,
        participant: type[Participant] = Participant,
        world: World = REAL,
        only: Collection[str] = (),
        thread: ThreadTable | None = None,
    ) -> None:
        self.spec, self.bounds, self.world, self.only = spec, bounds, world, only
        self.thread = thread or shipped_thread()
        self.beside = OtherScopes(spec, bounds)
        self._core = partial(participant, Table(spec))
        self.places = bounds.groups * bounds.ranks
        twin = dict(bounds.budget).get("twin", 0) > 0
        self.size = self.places + (bounds.ranks if twin else 0)
        """Number of places, including those of a twin of group A, which come last."""
        self.nodes: Interner[Node] = Interner()
        self.shared: Interner[Shared] = Interner()
        self.budgets: Interner[tuple[int, ...]] = Interner()
        self.facts: Interner[frozenset[tuple[Any, Any]]] = Interner()
        self.events: Interner[Event] = Interner()
        self.effects: Interner[AnyEffect] = Interner()
        self.locals: Interner[tuple[Any, ...]] = Interner()
        self.claims: Interner[tuple[tuple[str, Claim], ...]] = Interner()
        self.rows: set[int] = set()
        """``id`` of every spec row, and part of a sequence, that was taken."""
        self._memo = _Memo()
        names = GROUPS[: bounds.groups]
        # Different lineages, and first leases, depend on group names, so symmetry is not used.
        named = twin or not bounds.alike or (spec.is_periodic and not bounds.formed)
        turns = [] if named else list(permutations(names))[1:]
        self._turned = [Turned(self, dict(zip(names, p, strict=True))) for p in turns]

    # --- participants ---

    def peer(self, who: int, inc: int) -> Peer:
        """Return the participant at an index."""
        return Peer(GROUPS[who % self.places // self.bounds.ranks], who % self.bounds.ranks, inc)

    def participant(self, who: int, inc: int) -> Participant:
        """Return the core of the participant at an index."""
        found = self._memo.participants.get((who, inc))
        if found is None:
            me = self.peer(who, inc)
            config = Config(
                me=me,
                world=self.bounds.ranks,
                store=f"{me.group}.{inc % SUCCESSOR}",
                transport="",
                pid=1,
                host=_host(me),
                timeouts=self.spec.timeouts,
                min_groups=self.bounds.least,
                expected_groups=self.bounds.groups,
                min_reductions=self.spec.policies.min_reductions,
                leases=self.spec.is_periodic,
                bound=self.bounds.behind
                if self.spec.bound and self.bounds.behind
                else self.spec.bound,
                quorum=self.spec.policies.quorum,
                on_divergence="heal" if self.bounds.heals else "stop",
                flow=self.beside.bounds,
                fixed_slices=self.bounds.slices,
                rules=self.bounds.rules,
            )
            found = self._memo.participants[who, inc] = self._core(config)
        return found

    def _born(self, who: int, inc: int, alike: bool | None = None) -> Node:
        """Return a process that has just connected."""
        alike = self.bounds.alike if alike is None else alike
        lineage = GENESIS if alike else f"{self.peer(who, inc).group}.{inc}"
        local = self.participant(who, inc).initial(lineage)
        return Node(inc, self.locals.id(freeze(local)), bits=Bits(lineage))

    # --- first state ---

    def initial(self) -> State:
        """Return the state that the search begins with."""
        state = self._fresh()
        if not self.bounds.formed:
            return state
        while any(self.at(self.node(state, i)) != "computing" for i in range(self.places)):
            after = self._goes_on(state)
            assert after is not None, "the first epoch forms"
            state = after
        return self._after_loss(state) if self.bounds.lost else state

    def _goes_on(self, state: State) -> State | None:
        """Return the next state without faults, while all step functions are still running."""
        steps = self.steps(state, faults=False)
        step = next((s for s in steps if not s.what.startswith(("body ends", "timer"))), None)
        # a violation is left for the search to find
        return None if step is None or step.broken else step.state

    def _after_loss(self, state: State) -> State:
        who = self.bounds.ranks - 1
        here = _Here(self, who, self.node(state, who), Shared(), (0,))
        after: State | None = self._close(who, here.is_lost()._replace(cost=None), state).state
        while after is not None:
            state, after = after, self._goes_on(after)
        return self._replace(state, who).state if self.bounds.lost == "replaced" else state

    def _fresh(self) -> State:
        left = dict(self.bounds.budget)
        budget = (self.bounds.faults, *(left.get(kind, 0) for kind in KINDS))
        nodes = [self._born(i, 1) for i in range(self.places)] + [Node(0)] * self.bounds.ranks
        nodes, shared = nodes[: self.size], Shared(scopes=self.beside.first)
        for i, node in enumerate(nodes[: self.places]):
            turn = _Turn(node, shared)
            self._handle(turn, i, self.events.id(Start()))
            nodes[i], shared = turn.node, turn.shared
        return (
            *(self.nodes.id(n) for n in nodes),
            self.shared.id(shared),
            self.budgets.id(budget),
            self.facts.id(frozenset()),
        )

    def node(self, state: State, who: int) -> Node:
        """Return a node of a state."""
        return self.nodes[state[who]]

    # --- steps ---

    def steps(self, state: State, faults: bool = True, every: bool = False) -> Iterator[Step]:
        """Yield every step that can be taken in ``state``.

        Args:
            state: The state.
            faults: Include the steps that faults take.
            every: Do not leave out steps that may as well come later.
        """
        size = self.size
        shared_id, left_id = state[size], state[size + 1]
        if not faults:
            left_id = self.budgets.id((0,) * (1 + len(KINDS)))
        quiet = None if every else self._quiet(state, shared_id, left_id)
        if quiet is not None:
            yield self._close(*quiet, state)
            return
        idle = True
        for who in range(size):
            for act in self._acts(who, state, shared_id, left_id):
                idle = idle and act.cost is not None
                yield self._close(who, act, state)
        shared = self.shared[shared_id]
        if self.beside.bounds and shared.bus == "up":
            for act in self._elsewhere(state, shared):
                idle = False
                yield self._close(-1, act, state)
        if shared.bus == "down":
            idle = False
            yield self._close(-1, self._to_bus("bus back", shared._replace(bus="up")), state)
        if idle:
            yield from self._timers_when_idle(state, shared)
        if idle or every:
            yield from self._replacements(state, self.budgets[left_id])
        left = self.budgets[left_id]
        if left[0]:
            yield from self._faults_of_bus(state, shared, left)
            yield from self._restarts(state, left)
            yield from self._asked_after_their_end(state, left)

    def _quiet(self, state: State, shared_id: int, left_id: int) -> tuple[int, Act] | None:
        """Return an act that may as well come before everything else that can happen, if there is
        one.

        The receipt of a message that is only stored (no row but its own, no effect, no fact) has
        the same result in any order with other steps here or elsewhere, as long as no fault is left
        that affects messages, timers or the bus. Such confluent steps can be taken first, alone,
        without loss (partial order reduction; Groote & van de Pol, *State space reduction using
        partial tau-confluence*). The stored message of a process that has meanwhile ended, or been
        left behind, is read by no guard. A decision that is known already has no effect, now or
        later, whatever faults are left.
        """
        calm = self._calm(left_id) and self.shared[shared_id].bus == "up"
        for who in range(self.size):
            key = (who, state[who], calm)
            if key not in self._memo.quiet_acts:
                self._memo.quiet_acts[key] = self._hear_quietly(who, self.nodes[state[who]], calm)
            if (found := self._memo.quiet_acts[key]) is not None:
                return who, found
        return None

    def _calm(self, left_id: int) -> bool:
        found = self._memo.calms.get(left_id)
        if found is None:
            left = self.budgets[left_id]
            found = not left[0] or not any(left[1 + KINDS.index(kind)] for kind in UNQUIET)
            self._memo.calms[left_id] = found
        return found

    def _hear_quietly(self, who: int, node: Node, calm: bool) -> Act | None:
        if node.local < 0 or node.pending:
            return None
        for queue in QUEUES:
            waiting = getattr(node, queue)
            event = self.events[waiting[0]] if waiting else None
            found = None
            if isinstance(event, Decision):
                found = self._hear_in_vain(who, node, queue)
            elif calm and isinstance(event, (Join, Ack, Ready, Begin, Here)):
                found = self._note_quietly(who, node, queue)
            if found is not None:
                return found
        return None

    def _hear_in_vain(self, who: int, node: Node, queue: str) -> Act | None:
        number = getattr(node, queue)[0]
        act = _Here(self, who, node, Shared(), (0,)).hear(queue)
        known = self._memo.handled[who, node.inc, node.local, number].outcome.verdict == "known"
        return act if known and not (act.broken or act.unexpected) else None

    def _note_quietly(self, who: int, node: Node, queue: str) -> Act | None:
        if thaw(self.locals[node.local]).bus_down:
            return None
        number = getattr(node, queue)[0]
        act = _Here(self, who, node, Shared(), (0,)).hear(queue)
        after = self.nodes[act.node]
        same = after.local >= 0 and not after.pending
        same = same and (after.thread, after.task) == (node.thread, node.task)
        if act.broken or act.unexpected or act.sent or act.told or not same:
            return None
        rows = self._memo.handled[who, node.inc, node.local, number].outcome.steps
        notes = all(isinstance(c, Holds) for n in act.claims for _, c in self.claims[n])
        return act if notes and len(rows) <= 1 else None

    def _acts(self, who: int, state: State, shared_id: int, left_id: int) -> Iterable[Act]:
        """Return the acts that the process at an index can do, or suffer, by itself."""
        node_id = state[who]
        node = self.nodes[node_id]
        if node.local < 0:
            return ()
        shared = self.shared[shared_id]
        key = (who, node_id, shared_id if node.pending else -1, left_id)
        found = self._memo.kept.get(key)
        if found is None:
            here = _Here(self, who, node, shared, self.budgets[left_id])
            found = self._memo.kept[key] = tuple(here.acts())
        if node.pending or node.stuck:
            return found
        at = self.at(node)
        if at != "connecting" and (at != "computing" or node.source is None):
            return found
        here = _Here(self, who, node, shared, self.budgets[left_id])
        nodes = [self.nodes[i] for i in state[: self.size]]
        return (*found, *(here.healing(nodes) if at == "connecting" else here.learning(nodes)))

    def _timers_when_idle(self, state: State, shared: Shared) -> Iterator[Step]:
        """Yield the timers that can fire when nothing else can happen, so that time passes.

        If one of two timers is at least twice as long, the shorter fires first. A longer one fires
        once a shorter one has fired since it was armed. A poll repeats for as long as a wait lasts,
        so it does not measure the time of other nodes: answers that come as often postpone their
        timers.
        """
        lasts, gone = self.spec.timeouts, shared.bus == "gone"
        armed = [(who, n) for who in range(self.size) for n in self._armed(state[who], gone)]
        shortest = min((lasts[name] for _, name in armed), default=0.0)
        for who, name in armed:
            if lasts[name] >= 2 * shortest and name not in self.nodes[state[who]].aged:
                continue
            older = list(state)
            for other, longer in armed:
                if name in _POLLS and other != who:
                    continue
                if lasts[longer] >= 2 * lasts[name] and longer != name:
                    older[other] = self._aged(older[other], longer)
            yield self._close(who, self._fired(who, older[who], name), tuple(older))

    def _armed(self, node_id: int, gone: bool) -> tuple[str, ...]:
        """Return the timers of a node that time alone can let fire."""
        found = self._memo.timers.get((node_id, gone))
        if found is None:
            node, found = self.nodes[node_id], ()
            if node.local >= 0:
                local = thaw(self.locals[node.local])
                lost = gone or local.deaf
                found = tuple(name for name in local.timers if lost or name != GIVES_UP)
            self._memo.timers[node_id, gone] = found
        return found

    def _aged(self, node_id: int, timer: str) -> int:
        found = self._memo.older.get((node_id, timer))
        if found is None:
            node = self.nodes[node_id]
            found = self.nodes.id(node._replace(aged=node.aged | {timer}))
            self._memo.older[node_id, timer] = found
        return found

    def _fired(self, who: int, node_id: int, timer: str) -> Act:
        found = self._memo.rung.get((who, node_id, timer))
        if found is None:
            node = self.nodes[node_id]
            due = Timer(timer, thaw(self.locals[node.local]).timers[timer])
            here = _Here(self, who, node, Shared(), (0,))
            found = self._memo.rung[who, node_id, timer] = here.event(f"timer {timer}", node, due)
        return found

    def _faults_of_bus(self, state: State, shared: Shared, left: tuple[int, ...]) -> Iterator[Step]:
        if shared.bus != "up":
            return
        if left[1 + KINDS.index("outage")]:
            act = self._to_bus("bus away", shared._replace(bus="down"), "outage")
            yield self._close(-1, act, state)
        if left[1 + KINDS.index("forget")]:
            empty = Shared(bus="gone" if self.world.generations else "up", scopes=shared.scopes)
            yield self._close(-1, self._to_bus("bus forgets", empty, "forget"), state)

    def _elsewhere(self, state: State, shared: Shared) -> Iterator[Act]:
        """Yield the possible next acts of scopes that are not modelled."""
        nodes = [self.nodes[i] for i in state[: self.size]]
        there = [thaw(self.locals[node.local]) for node in nodes if node.local >= 0]
        asked = {peer.group for s in there for peer in s.leaving}
        inside = {g.group for s in there if s.role in AT_WORK and s.epoch for g in s.epoch.members}
        moves = self.beside.moves(shared.head, shared.scopes, asked, inside)
        for what, record, is_heard in moves:
            newer = tuple(record if s.scope == record.scope else s for s in shared.scopes)
            after = self.shared.id(shared._replace(scopes=newer))
            yield Act(what, None, -1, after, (self.events.id(record),) if is_heard else ())

    def _to_bus(self, what: str, shared: Shared, cost: str | None = None) -> Act:
        return Act(what, cost, -1, self.shared.id(shared))

    def _restarts(self, state: State, left: tuple[int, ...]) -> Iterator[Step]:
        """Yield the restarts of whole groups; the rest of such a group ends first."""
        if left[1 + KINDS.index("restart")]:
            for first in range(0, self.places, self.bounds.ranks):
                if not self._is_whole(state, first):
                    yield self._start(state, first, "comes back", "restart")
        if left[1 + KINDS.index("twin")] and self._is_whole(state, 0):
            ends = all(self.node(state, who).local < 0 for who in range(self.places, self.size))
            if ends:
                yield self._start(state, self.places, "is started twice", "twin")

    def _asked_after_their_end(self, state: State, left: tuple[int, ...]) -> Iterator[Step]:
        """Yield the requests to leave that a supervisor sends for groups that have ended.

        They make a difference only where one group is too few.
        """
        if self.bounds.least < 2 or not left[1 + KINDS.index("drain")]:
            return
        for first in range(0, self.places, self.bounds.ranks):
            if self.node(state, first).local < 0:
                asked = self.events.id(Drain((GROUPS[first // self.bounds.ranks],), "x"))
                act = Act("is asked to leave", "drain", state[first], sent=(asked,))
                yield self._close(first, act, state)

    def _is_whole(self, state: State, first: int) -> bool:
        return all(self.node(state, first + r).local >= 0 for r in range(self.bounds.ranks))

    def _start(self, state: State, first: int, what: str, cost: str) -> Step:
        """Start all ranks of a group, as the newest incarnations of their identities."""
        ranks, after = self.bounds.ranks, list(state)
        same = [
            i for i in range(self.size) if i % self.places // ranks == first % self.places // ranks
        ]
        inc = max(self.node(state, i).inc for i in same) + 1
        for who in range(first, first + ranks):
            after[who] = self._begin(state, who, self._born(who, inc))
        return self._close(first, Act(what, cost, after[first]), tuple(after))

    def _replacements(self, state: State, left: tuple[int, ...]) -> Iterator[Step]:
        """Yield the processes that can replace one that ended while its group lives."""
        if not (left[0] and left[1 + KINDS.index("replace")]):
            return
        for who in range(self.places):
            first = who - who % self.bounds.ranks
            mates = range(first, first + self.bounds.ranks)
            if self.node(state, who).local < 0 <= max(self.node(state, i).local for i in mates):
                yield self._replace(state, who, "replace")

    def _replace(self, state: State, who: int, cost: str | None = None) -> Step:
        """Start a process in the place of one that ended, with weights of its own."""
        born = self._born(who, self.node(state, who).inc + SUCCESSOR, alike=False)
        return self._close(who, Act("is replaced", cost, self._begin(state, who, born)), state)

    def _begin(self, state: State, who: int, born: Node) -> int:
        turn = _Turn(born, self.shared[state[self.size]])
        self._handle(turn, who, self.events.id(Start()))
        return self.nodes.id(turn.node)

    def _close(self, who: int, act: Act, state: State) -> Step:
        """Return the step with the state that an act leads to."""
        size, after = self.size, list(state)
        if who >= 0:
            after[who] = act.node
        if act.shared >= 0:
            after[size] = act.shared
        if act.sent:
            for i in range(size):
                after[i] = self._deliver(after[i], act.sent)
        if act.told is not None:
            self._post(after, *act.told)
        if act.cost is not None:
            after[size + 1] = self._spend(state[size + 1], act.cost)
        broken = act.broken
        if act.claims and broken is None:
            after[-1], broken = self.weigh(state[-1], act.claims)
        if act.unexpected and broken is None and (not self.only or "protocol" in self.only):
            broken = ("protocol", act.unexpected)
        self._forget(after)
        return Step(who, act.what, act.cost is None, tuple(after), broken, act.claims)

    def _deliver(self, node_id: int, sent: tuple[int, ...]) -> int:
        found = self._memo.delivered.get((node_id, sent))
        if found is None:
            node = self.nodes[node_id]
            hears = node.local >= 0 and not thaw(self.locals[node.local]).deaf
            found = self.nodes.id(node._replace(inbox=node.inbox + sent)) if hears else node_id
            self._memo.delivered[node_id, sent] = found
        return found

    def _post(self, after: list[int], to: Peer, message: int) -> None:
        """Put a message into the mail of a participant, if it is there."""
        ranks = self.bounds.ranks
        for who in (GROUPS.index(to.group) * ranks + to.rank, self.places + to.rank):
            node = self.nodes[after[who]] if who < self.size else Node(0)
            if node.local >= 0 and self.peer(who, node.inc) == to:
                after[who] = self.nodes.id(node._replace(mail=(*node.mail, message)))

    def _spend(self, left_id: int, cost: str) -> int:
        spent = list(self.budgets[left_id])
        spent[0] -= 1
        spent[1 + KINDS.index(cost)] -= 1
        # The budgets of single kinds have no meaning once the total is spent.
        return self.budgets.id(tuple(spent) if spent[0] else (0,) * len(spent))

    # --- one turn of a node ---

    def _handle(self, turn: _Turn, who: int, event: int) -> None:
        """Handle an event and carry out the effects that others cannot see, including answers."""
        node = turn.node
        found = self.handled((who, node.inc, node.local, event))
        turn.claims.append(found.claims)
        if found.refused and turn.broken is None and (not self.only or "protocol" in self.only):
            turn.broken = ("protocol", found.refused)
        aged = node.aged & found.kept if node.aged else node.aged
        pending = node.pending + found.effects
        turn.node = node._replace(local=found.local, pending=pending, aged=aged)
        self._settle(turn, who)

    def handled(self, moment: Moment) -> Handled:
        """Return the core's answer to a moment, which is computed once."""
        found = self._memo.handled.get(moment)
        if found is None:
            found = self._memo.handled[moment] = self._compute(*moment)
        return found

    def moments(self) -> dict[Moment, Handled]:
        """Return all moments so far, with the core's answers."""
        return self._memo.handled

    def _compute(self, who: int, inc: int, local: int, event: int) -> Handled:
        participant, happened = self.participant(who, inc), self.events[event]
        before = thaw(self.locals[local])
        try:
            after, out = participant.handle(before, happened, 0.0)
        except Exception as error:  # noqa: BLE001  (anything that the core raises is a finding)
            text = f"the core raises {type(error).__name__}: {error}"
            out, kept = Outcome("refused", text), frozenset(before.timers)
            return Handled(local, (), self.claims.id(()), text, out, kept)
        for step in out.steps:
            self.rows.update(map(id, (step.row, *step.parts)))
        refused = out.reason if out.verdict in ("refused", "row") else ""
        move = Move(participant.config.me, before, happened, after, out)
        claims = tuple(
            (name, claim)
            for name, function in INVARIANTS.items()
            if not self.only or name in self.only
            for claim in function(move)
        )
        frees = any(isinstance(e, AbortGroups) for e in out.effects)
        effects = tuple(self.effects.id(bare(e, frees)) for e in out.effects if matters(e))
        kept = frozenset(n for n, serial in after.timers.items() if serial <= before.timer_serial)
        number = self.locals.id(freeze(after))
        return Handled(number, effects, self.claims.id(claims), refused, out, kept)

    def _settle(self, turn: _Turn, who: int) -> None:
        node = turn.node
        while node.pending and not isinstance(effect := self.effects[node.pending[0]], SHARED):
            turn.node = node._replace(pending=node.pending[1:])
            self._obey(turn, who, effect)
            node = turn.node
        if not node.pending and node.answers and node.local >= 0:
            turn.node = node._replace(answers=node.answers[1:])
            self._handle(turn, who, node.answers[0])

    # --- main threads ---

    def at(self, node: Node) -> Role:
        """Return the role of the main thread's state."""
        return self.thread.role(node.thread)

    def move(self, turn: _Turn, event: str, facts: Set[str] = NO_FACTS) -> tuple[str, ...]:
        """Apply an event to the main thread, if its table has a row. Returns the effects."""
        key = (turn.node.thread, event, frozenset(facts))
        found = self._memo.reactions.get(key)
        if found is None:
            try:
                found = self.thread.react(*key)
            except ProtocolError as error:
                found = str(error)
            self._memo.reactions[key] = found
        if isinstance(found, str):
            turn.unexpected = turn.unexpected or found
            return ()
        turn.node = turn.node._replace(thread=found.state)
        return found.effects

    def _obey(self, turn: _Turn, who: int, command: AnyEffect) -> None:
        """Pass a command to the main thread, which interrupts its present work."""
        is_busy = self.at(turn.node) not in ("idle", "waiting")
        if is_busy and isinstance(command, Blocked):
            turn.node = turn.node._replace(source=None, stuck=True)  # nothing frees it
            return
        for effect in self.move(turn, *heard(command)):
            turn.node = self._carry_out(effect, turn.node._replace(stuck=False), who, command)

    def _carry_out(self, effect: str, node: Node, who: int, command: AnyEffect) -> Node:
        match effect, command:
            case "restore", Restore(token=token) | Blocked(token=token):
                # Only a thread that can report a failed fetch has the epoch of the fetch.
                fetch = node.task[:1] if self.thread.has(node.thread, "heal_failed") else ()
                return node._replace(source=None, task=(token, *fetch))
            case "apply", Apply(skip=skip):
                token = Token(*thaw(self.locals[node.local]).token)
                return node._replace(task=(token, skip))
            case "begin_body", Begun(token=token):
                assert node.bits is not None
                bits = node.bits.begin(self.peer(who, node.inc), token)
                return node._replace(task=(token,), bits=bits)
            case "connect", Fetch(epoch=epoch, group=group, late=late):
                ranks = self.bounds.ranks
                source = None if group is None else GROUPS.index(group) * ranks + who % ranks
                if late:  # it waits only for the others
                    return node._replace(task=(epoch, None), source=source)
                return node._replace(task=(epoch, source), source=None)
            case "leave", Finish():
                return Node(node.inc)
            case _:
                raise TypeError(f"the model cannot {effect} for {command}")

    def _operate(self, turn: _Turn, who: int, done: bool, answered: bool) -> None:
        """Carry out the first pending operation on the bus."""
        node = turn.node
        effect = self.effects[node.pending[0]]
        answer: Event | None = None
        if done:
            answer = self._on_bus(turn, effect)
        if not answered:
            answer = BusDown(type(effect).__name__, "")
        answers = node.answers if answer is None else (*node.answers, self.events.id(answer))
        turn.node = node._replace(pending=node.pending[1:], answers=answers)
        self._settle(turn, who)

    def _on_bus(self, turn: _Turn, effect: AnyEffect) -> Event | None:
        shared = turn.shared
        match effect:
            case Broadcast(message=message):
                turn.sent.append(self.events.id(message))
            case Tell(to=to, message=message):
                turn.told = (to, self.events.id(message))
            case ReadHead():
                return Decision(shared.head)
            case ReadScope(scope=scope):
                return next(s for s in shared.scopes if s.scope == scope)
            case Decide(after=after, proposal=proposal):
                if shared.head == after or not self.world.write_once:
                    turn.shared = shared._replace(head=proposal)
                head = turn.shared.head
                return None if head is None else Decision(head, won=head == proposal)
            case CastVote(token=token, vote=vote, voters=voters):
                ballots = dict(shared.ballots)
                slot = token
                if not self.world.attempts and shared.head is not None:
                    slot = Token(NEVER, shared.head.step)
                votes = ballots.get(slot, ())
                if sum(v.peer == vote.peer for v in votes) < 2:  # a third copy adds nothing new
                    votes = tuple(sorted((*votes, vote), key=lambda v: v.peer))
                ballots[slot] = votes
                turn.shared = shared._replace(ballots=tuple(sorted(ballots.items())))
                return Ballot(token, votes) if len(votes) >= voters else None
        return None

    def is_excused(self, step: Step) -> bool:
        """Whether the violation is excused, because a bus that lost its memory leaves doubt."""
        gone = self.shared[step.state[self.size]].bus == "gone"
        return step.broken is not None and step.broken[0] == "decided" and gone

    # --- facts ---

    def weigh(self, facts: int, claims: tuple[int, ...]) -> tuple[int, tuple[str, str] | None]:
        """Return the facts after the claims, and the first claim that does not hold."""
        found = self._memo.weighed.get((facts, claims))
        if found is None:
            found = self._memo.weighed[facts, claims] = self._weigh(facts, claims)
        return found

    def _weigh(self, facts: int, claims: tuple[int, ...]) -> tuple[int, tuple[str, str] | None]:
        known = dict(self.facts[facts])
        for name, claim in (pair for number in claims for pair in self.claims[number]):
            match claim:
                case Know(key=key, value=value):
                    known.setdefault(key, value)
                case Same(key=key, value=value, text=text):
                    if (was := known.setdefault(key, value)) != value:
                        return facts, (name, text.replace("{was}", str(was)))
                case Holds(ok=ok, text=text):
                    if not ok:
                        return facts, (name, text)
                case Given(keys=keys, text=text, test=test, needed=needed):
                    missing = [key for key in keys if key not in known]
                    holds = not needed if missing else test(*(known[k] for k in keys))
                    if holds is False:
                        return facts, (name, text)
        return self.facts.id(frozenset(known.items())), None

    def local_epoch(self, node: Node) -> int:
        """Return the epoch of a node, or 0 if it is in none."""
        return 0 if node.local < 0 else max(0, self._view(node.local)[0])

    def _view(self, local: int) -> View:
        """Return (epoch, number of the head, cursor, lineage) of a local state.

        For a participant outside, which may still join any epoch newer than e, the epoch is -e - 1.
        """
        found = self._memo.seen.get(local)
        if found is None:
            s = thaw(self.locals[local])
            found = self._memo.seen[local] = (
                s.token.epoch if s.epoch is not None else -s.token.epoch - 1,
                s.head.n if s.head else None,
                s.cursor,
                s.lineage,
            )
        return found

    def _forget(self, state: list[int]) -> None:
        """Drop facts and ballots that no later move can refer to."""
        size, epoch, record, cursor, lineages = self.size, NEVER, NEVER, NEVER, set()
        for number in state[:size]:
            view = self._node_view(number)
            if view is None:
                continue
            at = view[0] if view[0] >= 0 else -view[0] - 1
            if at < epoch:
                epoch = at
            if view[1] is not None and view[1] < record:
                record = view[1]
            if view[2] < cursor:
                cursor = view[2]
            lineages.add(view[3])
        shared_id, facts = state[size], state[-1]
        head = self.shared[shared_id].head
        if head is not None:
            lineages.add(head.lineage)
        floor = (epoch, record - 1, cursor, frozenset(lineages))
        kept = self._memo.pruned.get((facts, floor))
        if kept is None:
            left = frozenset(f for f in self.facts[facts] if can_matter(f[0], *floor))
            kept = self._memo.pruned[facts, floor] = self.facts.id(left)
        state[-1] = kept
        tidy = self._memo.tidied.get((shared_id, epoch))
        if tidy is None:
            shared = tidied(self.shared[shared_id], epoch)
            tidy = self._memo.tidied[shared_id, epoch] = self.shared.id(shared)
        state[size] = tidy

    def _node_view(self, number: int) -> View | None:
        if number not in self._memo.node_views:
            local = self.nodes[number].local
            self._memo.node_views[number] = None if local < 0 else self._view(local)
        return self._memo.node_views[number]

    # --- symmetry ---

    def canonical(self, state: State) -> State:
        """Return the smallest state that differs from ``state`` only in the names of groups."""
        best = state
        for turned in self._turned:
            if (other := turned.state(state)) < best:
                best = other
        return best


class _Here:
    """One process in a state, and the acts that are possible there."""

    def __init__(
        self,
        model: Model,
        who: int,
        node: Node,
        shared: Shared,
        left: tuple[int, ...],
    ) -> None:
        self.model, self.who, self.node = model, who, node
        self.shared, self.left = shared, left
        self.me = model.peer(who, node.inc)

    def may(self, kind: str) -> bool:
        """Whether a fault of this kind is left."""
        return bool(self.left[0] and self.left[1 + KINDS.index(kind)])

    def acts(self) -> Iterator[Act]:
        """Yield all acts but healing, which depends on other processes."""
        node = self.node
        if not node.stuck:
            yield from self._main_thread()
        if node.pending:
            yield from self._operations()
        else:
            if node.done >= 0:
                event = self.model.events[node.done]
                yield self.event("handles applied", node._replace(done=-1), event)
            for queue in QUEUES:
                if getattr(node, queue):
                    yield self.hear(queue)
        if self.left[0]:
            yield from self._faults()

    def left_with(self, queue: str, rest: tuple[int, ...]) -> Node:
        """Return the process with ``rest`` left in a queue."""
        node = self.node
        return node._replace(inbox=rest) if queue == "inbox" else node._replace(mail=rest)

    def hear(self, queue: str) -> Act:
        """Handle the first message in a queue."""
        first, *rest = getattr(self.node, queue)
        node = self.left_with(queue, tuple(rest))
        return self.event(QUEUES[queue], node, self.model.events[first])

    # --- the bus ---

    def _operations(self) -> Iterator[Act]:
        effect = self.model.effects[self.node.pending[0]]
        name = type(effect).__name__
        if self.shared.bus == "up":
            yield self._operate(f"does {name}", True, True)
            if self.may("lapse"):
                yield from self._lapses(effect, "lapse", (True, False))
        else:
            # An operation in progress when the bus failed may have succeeded while the bus lives.
            outcomes = (True, False) if self.shared.bus == "down" else (False,)
            yield from self._lapses(effect, None, outcomes)

    def _lapses(
        self, effect: AnyEffect, cost: str | None, outcomes: tuple[bool, ...]
    ) -> Iterator[Act]:
        for done in outcomes:
            if not (done and isinstance(effect, ReadHead | ReadScope)):
                text = f"fails at {type(effect).__name__}{', which was done' if done else ''}"
                yield self._operate(text, done, False, cost)

    # --- the main thread ---

    def _main_thread(self) -> Iterator[Act]:
        node, model = self.node, self.model
        at = model.at(node)
        if at == "applying":
            yield from self._apply(*node.task)
        elif node.pending:
            return
        elif at == "restoring":
            yield from self._restore(*node.task)
        elif at == "computing" and self._step() < model.bounds.commits:
            yield from self._body(*node.task)
        elif at == "idle" and self._stands_apart() and self._step() < model.bounds.commits:
            yield self.event("asks to synchronise", node, Synchronise())

    def _stands_apart(self) -> bool:
        return bool(thaw(self.model.locals[self.node.local]).role == "apart")

    def _step(self) -> int:
        """Return the step that the txn begins at."""
        local = thaw(self.model.locals[self.node.local])
        return int(local.step if local.healed or local.epoch is None else local.epoch.step)

    def _restore(self, token: Token, fetch: int = 0) -> Iterator[Act]:
        idle, bits = self.node._replace(task=()), self.node.bits
        assert bits is not None
        if self.has("heal_failed"):  # the fetch that the rollback ends may have begun to write
            torn = self.node._replace(task=(token,), bits=bits.torn(self.me))
            yield self.says("ends its fetch half way", torn, HealFailed(fetch, "", True))
        back = bits.restored() if self.model.world.restores else bits
        yield self.says("restores", idle._replace(bits=back), Restored(token))
        if self.may("torn"):  # the step function had changed state that was not saved
            torn = idle._replace(bits=bits.torn(self.me).restored())
            yield self.says("restores half", torn, Restored(token, torn=True), "torn")

    def _apply(self, token: Token, skip: bool) -> Iterator[Act]:
        idle, bits = self.node._replace(task=()), self.node.bits
        assert bits is not None
        after = bits.skipped(token) if skip else bits.applied(self.me, token)
        yield self._tells("applies", idle._replace(bits=after), Applied(token, after.told))
        if self.may("torn"):
            torn = idle._replace(bits=bits.torn(self.me))
            yield self._tells("applies half", torn, ApplyFailed(token, ""), "torn")

    def _body(self, token: Token) -> Iterator[Act]:
        idle = self.node._replace(task=())
        assert idle.bits is not None
        compares = self.model.bounds.digests
        digest = idle.bits.digest if compares else None
        reduced = dataclasses.replace(
            _REDUCED[self.me.rank], fingerprint=idle.bits.gradients if compares else None
        )
        yes, has_state = Prepared(token, True, reduced, digest=digest), idle.source is None
        if self.has("prepared", NO_FACTS):
            yield self.says("body ends", idle, yes)
        if digest is not None and self.may("bare") and has_state:
            bare = dataclasses.replace(yes, digest=None, manifest=_REDUCED[self.me.rank])
            yield self.says("body ends without a digest", idle, bare, "bare")
        if digest is not None and self.may("flip") and has_state:
            wrong = idle.bits.flip(self.me)
            seen = dataclasses.replace(reduced, fingerprint=wrong.gradients)
            flipped = dataclasses.replace(yes, manifest=seen)
            yield self.says("body flips a gradient", idle._replace(bits=wrong), flipped, "flip")
        if self.may("skip") and has_state:
            skips = dataclasses.replace(yes, skip=True)
            yield self.says("body skips", idle, skips, "skip")
            early = dataclasses.replace(skips, manifest=Manifest())
            yield self.says("body skips early", idle, early, "skip")
        if self.may("block") and has_state:
            block = dataclasses.replace(yes, manifest=Manifest(block="block"), skip=True)
            yield self.says("body is a live block", idle, block, "block")
        if self.may("final") and has_state:
            final = Prepared(
                token, True, Manifest(block="block"), skip=True, digest=digest, last=True
            )
            yield self.says("body is the final live block", idle, final, "final")
        if self.may("no"):
            yield self.says("body ends with NO", idle, Prepared(token, False), "no")
        if self.may("misfit") and has_state:
            spoilt = idle._replace(bits=idle.bits.spoil(self.me))
            yield self.says("body reduces nothing", spoilt, Prepared(token, True), "misfit")
            more = Prepared(token, True, dataclasses.replace(reduced, count=3))
            yield self.says("body reduces twice", spoilt, more, "misfit")
            other = Prepared(token, True, dataclasses.replace(reduced, shapes="y"))
            yield self.says("body reduces something else", spoilt, other, "misfit")
            unlike = Prepared(token, True, dataclasses.replace(reduced, data="e"))
            yield self.says("body has other data", spoilt, unlike, "misfit")

    def healing(self, nodes: list[Node]) -> Iterator[Act]:
        """Yield the outcomes of rebuilding groups and fetching state from a live member."""
        assert self.node.bits is not None
        epoch, source = self.node.task
        idle, bits, ready = self.node._replace(task=()), self.node.bits, True
        gone = self._lost_member(nodes)
        if source is not None:
            peer = self._newest(nodes, source)
            at, serves = self.model.local_epoch(peer), self._serves(peer)
            ready, gone = at == epoch and serves, gone or at > epoch or not serves
            if ready:
                assert peer.bits is not None
                bits = bits.fetched(peer.bits)
        if ready and idle.source is not None:
            yield self.says("connects", idle, Connected(epoch))
        elif ready:
            event = Healed(epoch, 0 if source is None else 1, "", bits.told)
            yield self.says("heals", idle._replace(bits=bits), event)
        if gone or self.may("heal"):
            torn = source is not None
            bits = self.node.bits.torn(self.me) if torn else self.node.bits
            failed = HealFailed(epoch, "", torn)
            cost = None if gone else "heal"
            yield self.says("fails to heal", idle._replace(bits=bits), failed, cost)

    def learning(self, nodes: list[Node]) -> Iterator[Act]:
        """Yield the outcomes of a learner's fetch while the others compute: success or failure."""
        node, bits = self.node, self.node.bits
        assert node.source is not None and bits is not None
        epoch, peer = self.model.local_epoch(node), self._newest(nodes, node.source)
        serves = self.model.local_epoch(peer) == epoch and self._serves(peer)
        if serves:
            assert peer.bits is not None
            bits = bits.learnt(peer.bits)
            event = Healed(epoch, 1, "", bits.told)
            yield self.says("learns", node._replace(bits=bits, source=None), event)
        if not serves or self.may("heal"):
            torn = node._replace(task=(), source=None, bits=bits.torn(self.me))
            cost = "heal" if serves else None
            yield self.says("fails to learn", torn, HealFailed(epoch, "", True), cost)

    def _serves(self, source: Node) -> bool:
        """Whether the source lives and holds the state that this process's epoch begins with."""
        mine = thaw(self.model.locals[self.node.local]).epoch
        held = "" if source.local < 0 else thaw(self.model.locals[source.local]).lineage
        return mine is not None and held == mine.lineage

    def _lost_member(self, nodes: list[Node]) -> bool:
        """Whether a member of this process's epoch is gone or in a newer epoch."""
        epoch = self.model.local_epoch(self.node)
        for peer in member_peers(thaw(self.model.locals[self.node.local])):
            other = self._newest(
                nodes, GROUPS.index(peer.group) * self.model.bounds.ranks + peer.rank
            )
            gone = other.local < 0 or other.inc != peer.inc
            if gone or self.model.local_epoch(other) > epoch:
                return True
        return False

    def _newest(self, nodes: list[Node], at: int) -> Node:
        """Return the process in a place, or its twin if the twin is the live one."""
        twin = nodes[self.model.places + at] if self.model.places + at < len(nodes) else nodes[at]
        return max(nodes[at], twin, key=lambda node: (node.local >= 0, node.inc))

    # --- faults ---

    def _faults(self) -> Iterator[Act]:
        if self.may("crash"):
            told = Death(self.me.group, self.me.rank, 1, _host(self.me), "x")
            yield self._end("crash", (self.model.events.id(told),))
        if self.may("loss"):
            yield self.is_lost()
        if self.may("silent"):
            yield self._end("silent", ())
        if not self.node.pending:
            yield from self._events_at_fault()
        if self.may("hang"):
            seen = self.model.events.id(
                Suspect(self.me.group, self.me.rank, 1, _host(self.me), "x")
            )
            yield self._act("is said to hang", _Turn(self.node, self.shared, [seen]), "hang")
        if self.may("corrupt") and self.model.at(self.node) == "computing" and not self.node.stuck:
            assert self.node.bits is not None
            odd = self.node._replace(bits=self.node.bits.corrupted(self.me))
            yield self.put("state is corrupted", odd, "corrupt")
        if self.may("drain") and self.me.rank == 0:
            asked = self.model.events.id(Drain((self.me.group,), "x"))
            yield self._act("is asked to leave", _Turn(self.node, self.shared, [asked]), "drain")

    def _events_at_fault(self) -> Iterator[Act]:
        node = self.node
        local = thaw(self.model.locals[node.local])
        if self.may("fault") and local.role in (*AT_WORK, "healing"):
            yield self._raise(Fault(local.token, ""))
        if self.may("early"):
            for name, serial in local.timers.items():
                if name == GIVES_UP:
                    continue
                yield self.event(f"timer {name} early", node, Timer(name, serial), "early")
        if self.may("late") and local.role == "joining" and "join_window" in local.timers:
            due = Timer("join_window", local.timers["join_window"])
            yield self.event("waits no longer for others", node, due, "late")
        if self.may("over") and "reform_window" in local.timers:
            due = Timer("reform_window", local.timers["reform_window"])
            yield self.event("waits no longer for a rank", node, due, "over")
        behind = node._replace(inbox=())
        if self.may("deaf") and not local.deaf:
            yield self.event("is deaf from now on", behind, BusDown("listen", ""), "deaf")
        if node.inbox and self.may("overrun"):
            missed = BusDown("overrun", "")
            yield self.event("falls behind, and hears again", behind, missed, "overrun")
        if self.may("quit"):
            yield self.event("is shut down", node, Stop(), "quit")
        for queue, hears in QUEUES.items():
            yield from self._messages_at_fault(queue, hears)

    def _messages_at_fault(self, queue: str, hears: str) -> Iterator[Act]:
        node, waiting = self.node, getattr(self.node, queue)
        if waiting and self.may("lose"):
            yield self.put(f"never {hears}", self.left_with(queue, waiting[1:]), "lose")
        if waiting and self.may("twice"):
            yield self.event(f"{hears} twice", node, self.model.events[waiting[0]], "twice")
        if len(waiting) > 1 and self.may("swap"):
            rest = self.left_with(queue, (waiting[0], *waiting[2:]))
            second = self.model.events[waiting[1]]
            yield self.event(hears.replace("0", "1"), rest, second, "swap")

    def is_lost(self) -> Act:
        """End the process; everyone receives the report that its group gets another one."""
        told = Death(self.me.group, self.me.rank, 1, _host(self.me), "x", replaced=True)
        return self._end("loss", (self.model.events.id(told),))

    def _end(self, cost: str, sent: tuple[int, ...]) -> Act:
        turn = _Turn(Node(self.node.inc), self.shared, list(sent))
        return self._act(f"ends ({cost})", turn, cost)

    def _raise(self, fault: Fault) -> Act:
        """Raise in the step function if it runs; otherwise fail beside the main thread."""
        turn = _Turn(self.node, self.shared)
        if self.model.at(self.node) == "computing":
            turn.node = self.node._replace(task=())
            self.model.move(turn, "unwound")
        self.model._handle(turn, self.who, self.model.events.id(fault))
        return self._act("raises", turn, "fault")

    # --- making acts ---

    def has(self, event: str, facts: Set[str] | None = None) -> bool:
        """Whether the main thread's table has a row for the event; with ``facts``, for these."""
        thread, state = self.model.thread, self.node.thread
        return thread.has(state, event) if facts is None else thread.allows(state, event, facts)

    def says(self, what: str, node: Node, word: Report, cost: str | None = None) -> Act:
        """Report the main thread's work; the process handles the report at once."""
        turn = _Turn(node, self.shared)
        no = isinstance(word, Prepared) and not word.yes
        self.model.move(turn, word.type, _NO if no else NO_FACTS)
        self.model._handle(turn, self.who, self.model.events.id(word))
        return self._act(what, turn, cost)

    def _tells(self, what: str, node: Node, word: Report, cost: str | None = None) -> Act:
        """Report the main thread's work; the process handles the report later."""
        turn = _Turn(node._replace(done=self.model.events.id(word)), self.shared)
        self.model.move(turn, word.type)
        return self._act(what, turn, cost)

    def event(self, what: str, node: Node, event: Event, cost: str | None = None) -> Act:
        """Let the process, replaced by ``node``, handle an event."""
        turn = _Turn(node, self.shared)
        self.model._handle(turn, self.who, self.model.events.id(event))
        return self._act(what, turn, cost)

    def put(self, what: str, node: Node, cost: str | None = None) -> Act:
        """Replace the process by ``node``, without handling an event."""
        return self._act(what, _Turn(node, self.shared), cost)

    def _operate(self, what: str, done: bool, answered: bool, cost: str | None = None) -> Act:
        turn = _Turn(self.node, self.shared)
        self.model._operate(turn, self.who, done, answered)
        return self._act(what, turn, cost)

    def _act(self, what: str, turn: _Turn, cost: str | None) -> Act:
        same = turn.shared is self.shared
        return Act(
            what,
            cost,
            self.model.nodes.id(turn.node),
            -1 if same else self.model.shared.id(turn.shared),
            tuple(turn.sent),
            turn.told,
            tuple(turn.claims),
            turn.broken,
            turn.unexpected and f"{self.me}: {turn.unexpected}",
        )


def _host(peer: Peer) -> str:
    return f"{peer.group}.{peer.rank}.{peer.inc}"


_NO = frozenset({"says_no"})
_REDUCED = Manifest(1, 4, "x", data="d"), Manifest(2, 8, "x", data="d")
"""The reductions of rank 0 and of rank 1, unless a fault changes them."""


# --- symmetry ---


GROUPS = "ABCDEFGH"


class Turned:
    """A renaming of the groups in states; every part is renamed once and cached."""

    def __init__(self, model: Model, names: dict[str, str]) -> None:
        self._model, self._rename = model, Renamer(names)
        ranks = model.bounds.ranks
        self._to = [
            GROUPS.index(names[GROUPS[who // ranks]]) * ranks + who % ranks
            for who in range(model.size)
        ]
        self._nodes: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._facts: dict[int, int] = {}
        self._events: dict[int, int] = {}
        self._effects: dict[int, int] = {}
        self._locals: dict[int, int] = {}

    def state(self, state: State) -> State:
        """Return the state with the other names."""
        size, after = self._model.size, list(state)
        nodes = self._nodes
        for who, to in enumerate(self._to):
            number = state[who]
            new = nodes.get(number)
            after[to] = self._node(number) if new is None else new
        number = state[size]
        new = self._shared.get(number)
        after[size] = self._bus(number) if new is None else new
        number = state[-1]
        new = self._facts.get(number)
        after[-1] = self._kept(self._facts, self._model.facts, number) if new is None else new
        return tuple(after)

    def _kept(self, kept: dict[int, int], values: Interner[Any], number: int) -> int:
        new = kept.get(number)
        if new is None:
            new = kept[number] = values.id(self._rename(values[number]))
        return new

    def _node(self, number: int) -> int:
        model, node = self._model, self._model.nodes[number]
        if node.local >= 0:
            task = node.task
            if model.at(node) == "connecting" and task[1] is not None:
                task = (task[0], self._to[task[1]])
            event = partial(self._kept, self._events, model.events)
            effect = partial(self._kept, self._effects, model.effects)
            node = node._replace(
                local=self._kept(self._locals, model.locals, node.local),
                inbox=tuple(map(event, node.inbox)),
                mail=tuple(map(event, node.mail)),
                pending=tuple(map(effect, node.pending)),
                answers=tuple(map(event, node.answers)),
                done=node.done if node.done < 0 else event(node.done),
                task=task,
                source=None if node.source is None else self._to[node.source],
                bits=self._rename(node.bits),
            )
        self._nodes[number] = model.nodes.id(node)
        return self._nodes[number]

    def _bus(self, number: int) -> int:
        head, ballots, bus, scopes = self._model.shared[number]
        rename = self._rename
        turned = tuple(
            (token, tuple(sorted((rename(v) for v in votes), key=lambda v: v.peer)))
            for token, votes in ballots
        )
        new = self._model.shared.id(Shared(rename(head), turned, bus, rename(scopes)))
        self._shared[number] = new
        return new
