"""``fft dev simulate``: a whole job in one process, under one seed and a virtual clock.

Every participant runs the shipped engine and table; bus, processes, process groups, supervisor and
faults are modelled around them. A run has four parts. First, the faults of the weather occur until
enough steps are committed. Then the faults stop (**calm**), and within a bounded virtual time all
processes must be in one epoch and commit again. Then all groups drain and must exit regularly.
Finally the invariants are checked on the whole history. Runs with equal seed, spec and weather have
byte-identical traces. A run uses no real clock, and no order depends on hashes or addresses.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from fft.bus.base import HEAD
from fft.engine.calls import (
    GROUP,
    SCOPE,
    Call,
    Cast,
    CompareSet,
    Delete,
    Publish,
    Read,
    Send,
    Write,
    beside,
)
from fft.engine.core import Command, Posted, ScopeAnnouncement, Wiring
from fft.engine.executor import StepExecutor, Work
from fft.errors import BusError, ProtocolError
from fft.messages.causes import CauseCode
from fft.messages.commands import Answer
from fft.messages.effects import Apply, Finish, Heal, Restore, StartTxn
from fft.messages.progress import HeldReport
from fft.messages.protocol import ENTRY as BLOCK_ENTRY
from fft.messages.protocol import (
    Applied,
    ApplyFailed,
    BusDown,
    BusMessage,
    Connected,
    Death,
    Drain,
    Event,
    Fault,
    Healed,
    HealFailed,
    Manifest,
    Peer,
    Prepared,
    Record,
    Start,
    Stop,
    Suspect,
    Synchronise,
    Token,
    Vote,
)
from fft.messages.wire import Packed, Register, inbox_name, list_name
from fft.protocol.apart import is_brought, own_lease
from fft.protocol.invariants import History, Move
from fft.protocol.main_thread import NO_FACTS
from fft.protocol.participant import Outcome, Participant
from fft.protocol.spec import FsmSpec
from fft.protocol.state import GENESIS, Config, Local, committed
from fft.prove.bits import Bits
from fft.prove.clock import Clock
from fft.prove.simulator.faults import Weather
from fft.prove.simulator.latency import Latency
from fft.prove.virtual_engine import VirtualEngine
from fft.trace.inputs import CONSUMED, ENTRY, LOOP, MADE_ANEW, TRANSACTIONS
from fft.trace.writer import TraceWriter, header, trace_path

_WALL = 1_700_000_000.0
"""The wall-clock time of the traces at virtual second 0."""
_LIMIT_EVENTS = 500
"""Number of handled events after which the faults stop, regardless of the committed steps."""
_LIMIT_SECONDS = 60.0
_REDUCTIONS = 3
"""Number of reductions of a step function."""

_BLOCK = f"{BLOCK_ENTRY}block"
_BLOCK_END = "end of block"

_SHAPES = [(2, 1)] * 9 + [(3, 1)] * 5 + [(2, 2)] * 4 + [(4, 1)] + [(3, 2)] + [(4, 2)]


@dataclass(frozen=True, slots=True)
class Violation:
    """A property that is violated. ``name`` is an invariant, or one of the simulator's own
    properties: ``liveness``, ``protocol_error`` (a refused event), ``crash`` (an exception in the
    engine)."""

    name: str
    text: str
    place: str = ""


class RunEnds(Exception):
    """The exception for a violation that ends the run."""

    # --- processes ---


class Whims:
    """A second random generator, whose draws do not affect those of the first one."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"whims of {seed}")
        self.flips = random.Random(f"flips of {seed}")
        """Draws flipped gradients alone."""
        self._pace: dict[str, float] = {}
        """Group of an asynchronous job → the factor by which it is slower than others."""

    def digest_interval(self) -> int:
        """Return the number of steps between two votes of a process that contain a digest."""
        return self.rng.choice([1, 1, 2, 4])

    def pace(self, group: str) -> float:
        """Return the factor by which a group of an asynchronous job is slower than others."""
        if group not in self._pace:
            self._pace[group] = self.rng.choice([1.0, 1.0, 3.0, 10.0])
        return self._pace[group]


@dataclass(frozen=True, slots=True)
class Setting:
    """The parameters of a job, drawn from the seed before the run.

    Attributes:
        groups: Number of groups.
        ranks: Number of ranks of each group.
        group_timeout: Timeout in seconds of a reduction that a member does not enter.
        awaits_reductions: Whether errors of reductions are raised at the end of the step function
            (as in torchft).
        weather: The faults.
        compares: Whether votes contain digests.
        on_divergence: Reaction to divergent states.
        behind: Maximum staleness of contributions to an asynchronous job, in steps.
        timeouts: Timeouts of the participants.
        alike: Whether all groups start with equal states (``init_sync=False``).
        min_groups: Minimum number of groups of an epoch.
        target: Number of steps after which the faults stop.
        slices: Number of slices that each txn takes; 0: one for each group that contributes.
        rules: Rules that choose the groups that contribute.
    """

    groups: int
    ranks: int
    group_timeout: float
    awaits_reductions: bool
    weather: Weather
    compares: bool
    on_divergence: Literal["stop", "heal"]
    behind: int
    timeouts: Mapping[str, float]
    alike: bool
    min_groups: int
    target: int
    slices: int
    rules: tuple[tuple[str, int], ...]

    @classmethod
    def drawn(
        cls,
        seed: int,
        stage: str,
        spec: FsmSpec,
        weather: Weather,
        rng: random.Random,
        whims: Whims,
    ) -> Setting:
        """Draw a setting. A stage has one rank per group."""
        shape = rng.choice(_SHAPES)
        if stage:
            shape = random.Random(f"groups of {seed}").choice(_SHAPES)[0], 1
        timeout, awaits = rng.choice([1.0, 3.0, 10.0]), rng.random() < 0.5
        weather = weather.drawn(rng)
        if weather.shapes:
            shape = whims.rng.choice(weather.shapes)
        corrupts = bool(weather.chances.get("corrupted"))
        return cls(
            *(*shape, timeout, awaits, weather),
            compares=corrupts and whims.rng.random() < 0.5,
            on_divergence=whims.rng.choice(["stop", "heal"]),
            behind=whims.rng.choice([1, 2, 4]) if spec.bound else 0,
            timeouts=_drawn_timeouts(spec, weather, rng, whims.rng),
            alike=rng.random() < 0.5,
            min_groups=2 if rng.random() < 0.15 and shape[0] > 2 else 1,
            target=rng.randint(3, 10),
            slices=_drawn_slices(seed, spec, shape[0]),
            rules=_drawn_rules(seed, spec, shape[0]),
        )


def _drawn_slices(seed: int, spec: FsmSpec, groups: int) -> int:
    """Return a fixed number of slices for one of three jobs that can have one, else 0."""
    if spec.ranks == "stages" or spec.stages or spec.is_periodic:
        return 0
    return random.Random(f"slices of {seed}").choice([0, 0, 0, 0, 0, 0, 1, groups, groups + 1])


def _drawn_rules(seed: int, spec: FsmSpec, groups: int) -> tuple[tuple[str, int], ...]:
    """Return a rule for one of eight jobs that can have one: a part of the groups are spares.

    Rules that any number of groups satisfies do not end a job that has lost some of them.
    """
    if spec.ranks == "stages" or spec.stages or spec.is_periodic:
        return ()
    rng = random.Random(f"rules of {seed}")
    return (("max_active", rng.randint(min(2, groups), groups)),) if rng.random() < 1 / 8 else ()


def _drawn_timeouts(
    spec: FsmSpec, weather: Weather, rng: random.Random, whims: random.Random
) -> dict[str, float]:
    drawn = {
        "vote_window": rng.choice([2.0, 5.0, 20.0]),
        "ready_window": rng.choice([5.0, 20.0]),
        "ack_window": rng.choice([0.5, 1.0]),
        "join_window": rng.choice([1.0, 5.0]),
        "drain_window": rng.choice([2.0, 5.0]),
    }
    if spec.bound:  # similar to the duration of a group's local phase
        drawn["join_window"] = whims.choice([0.05, 0.3, 1.0])
    if weather.intervals:
        interval = drawn["join_interval"] = whims.choice(weather.intervals)
        drawn["apart_window"] = max(3 * interval, whims.choice([0.5, 5.0]))
    mine = {name: value for name, value in drawn.items() if name in spec.timeouts}
    return {**spec.timeouts, **mine}


class Log:
    """The results of a run: its history, its counts, and its traces.

    Attributes:
        history: All transitions of all participants, and the data that they consumed.
        events: Number of events that engines have handled.
        faults: Kind of fault → how often it occurred.
        rows: Covered rows of the table: state and identity of the row.
        violations: The violated properties.
        held: Number of reports of backpressure from another scope.
    """

    def __init__(self, clock: Clock, spec: FsmSpec, trace_dir: Path | None) -> None:
        self.history = History()
        self.events = self.held = 0
        self.faults: Counter[str] = Counter()
        self.rows: set[tuple[str, int]] = set()
        self.violations: list[Violation] = []
        self._clock, self._spec, self._trace_dir = clock, spec, trace_dir
        self._traces: dict[Peer, TraceWriter] = {}

    def open(self, process: Process) -> None:
        """Start the history and the trace of a process."""
        peer, clock = process.peer, self._clock
        self.history.moves[peer] = []
        if self._trace_dir is not None:
            clocks = (lambda: _WALL + clock.now, lambda: clock.now)
            trace = self._traces[peer] = TraceWriter(self._trace_dir, peer, clocks)
            config = process.participant.config
            trace.write("header", header(self._spec, config, process.local))

    def handled(self, process: Process, before: Local, event: Event, out: Outcome) -> None:
        """Record the outcome of an event that the engine of a process has handled."""
        now = self._clock.now
        self.events += 1
        moves = self.history.moves[process.peer]
        place = f"{process.peer}:{len(moves) + 1}"
        moves.append(Move(process.peer, before, event, process.local, out, place, now))
        if self._traces:
            self._traces[process.peer].outcome(before, process.local, event, out, now)
        for step in out.steps:
            self.rows.add((self._spec.names[step.source].name, id(step.row)))
        if out.verdict == "refused":
            text = f"{process.peer} in {before.state} refused {event}: {out.reason}"
            self.violated("protocol_error", text, place)

    def crashed(self, process: Process, error: Exception) -> None:
        """Record an exception in the engine of a process as a violation."""
        if not isinstance(error, RunEnds):
            text = f"{error!r} in {process.local.state} at {process.call or 'no operation'}"
            self.violated("crash", text, str(process.peer))

    def violated(self, name: str, text: str, place: str = "") -> NoReturn:
        """Record a violation and end the run."""
        self.violations.append(Violation(name, text[:1000], place))
        raise RunEnds

    def note(self, process: Process, name: str, data: dict[str, Any]) -> None:
        """Trace an observation of a process that is not a protocol event."""
        if self._traces:
            self._traces[process.peer].note(name, data, process.local)

    def told(self) -> History:
        """Return the history, sorted in the order in which an audit reads the traces."""
        order = sorted(self.history.moves, key=lambda peer: trace_path(Path(), peer).name)
        consumed = sorted(self.history.consumed, key=lambda told: order.index(told[0]))
        contributed = sorted(self.history.contributed, key=lambda told: order.index(told[0]))
        moves = {peer: self.history.moves[peer] for peer in order}
        return History(moves, consumed, contributed)

    def close(self) -> None:
        """Close the traces. Idempotent."""
        for trace in self._traces.values():
            trace.close()


class Skips:
    """Skips that concern several ranks, drawn once for each txn."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._skips: dict[Token, int] = {}
        self._all_skip: dict[Token, bool] = {}

    def alone(self, token: Token, members: tuple[Peer, ...]) -> bool:
        """Return whether the caller may skip reductions alone; a skip by all is undetectable."""
        if len(members) == 1 or token in self._skips:
            return False
        self._world.count("skipped")
        self._skips[token] = -1
        return True

    def by_rank(self, token: Token) -> int:
        """Return the rank number that skips a reduction of this txn in every group, or -1."""
        if token not in self._skips:
            skips = self._world.strikes("skipped_by_all")
            self._skips[token] = (
                self._world.rng.randrange(self._world.setting.ranks) if skips else -1
            )
        return self._skips[token]

    def by_all(self, token: Token) -> bool:
        """Return whether the user skips this txn on all ranks."""
        if token not in self._all_skip:
            self._all_skip[token] = self._world.strikes("all_skip")
        return self._all_skip[token]


class LiveBlocks:
    """The live blocks that the script enters, at the same places on all ranks.

    A block that fails is entered again. A step follows each block, so that the job advances.
    """

    def __init__(self, seed: int, spec: FsmSpec) -> None:
        self._seed = seed
        is_possible = not (spec.is_periodic or spec.bound or spec.stages)
        self._chance = 0.2 if is_possible and seed % 3 == 0 else 0.0
        self._after: dict[str, tuple[str, int]] = {}
        """Lineage → the place in a block that led to it, and the epoch of its txn."""

    def place(self, plan: StartTxn) -> str:
        """Return the part of a block that the txn is, for its vote; empty for a step."""
        part, epoch = self._after.get(plan.lineage, ("", 0))
        if part.startswith(BLOCK_ENTRY):
            return _BLOCK_END if epoch == plan.token.epoch else _BLOCK
        draw = random.Random(f"block of {self._seed} after {plan.lineage}").random()
        return _BLOCK if not part and draw < self._chance else ""

    def committed(self, record: Record, place: str) -> None:
        """Note the record of a COMMIT. ``place`` is as in the vote for it."""
        if place:
            self._after[record.lineage] = place, record.epoch


class World:
    """All objects of one run.

    Attributes:
        spec: The spec of the job.
        name: The stage, if stages have scopes: each stage then has its own world.
        beside: The worlds of the other stages.
        processes: All processes, including those that have ended.
        phase: ``weather``, then ``calm``, then ``ending``.
        hopeless: Whether the job has lost its state and must stop.
    """

    def __init__(
        self,
        seed: int,
        spec: FsmSpec,
        core: Callable[[Config], Participant],
        weather: Weather,
        trace_dir: Path | None = None,
        stage: str = "",
        clock: Clock | None = None,
    ) -> None:
        """Prepare the world of a seed.

        Args:
            seed: The seed.
            spec: The spec of the job.
            core: Makes the core of a participant.
            weather: The mix of faults.
            trace_dir: Directory for traces, or None to write none.
            stage: The stage, for a spec whose stages have scopes.
            clock: The clock that all stages share.
        """
        self.spec, self.name = spec, stage
        self.beside: dict[str, World] = {}
        self.rng = random.Random(f"{stage} of {seed}" if stage else seed)
        self.clock = clock or Clock()
        self.latency = Latency(self.rng)
        self.whims = Whims(seed)
        self.setting = Setting.drawn(seed, stage, spec, weather, self.rng, self.whims)
        self.log = Log(
            self.clock, spec.stage(spec.stages.index(stage)) if stage else spec, trace_dir
        )
        self.bus = SimBus(self)
        self.processes: dict[Peer, Process] = {}
        self.phase: Literal["weather", "calm", "ending"] = "weather"
        self.hopeless = False
        self.data_notes = DataNotes(self, spec)
        self.skips = Skips(self)
        self.blocks = LiveBlocks(seed, spec)
        self._core = core
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        supervised = self.rng.random()
        self.groups = {
            str(n): Group(self, str(n), self.rng.random() < (1.0 if supervised < 0.5 else 0.5))
            for n in range(self.setting.groups)
        }
        self.chaos = Chaos(self)

    @property
    def is_calm(self) -> bool:
        """Whether the faults have stopped."""
        return self.phase != "weather"

    @property
    def is_ending(self) -> bool:
        """Whether all groups were asked to leave."""
        return self.phase == "ending"

    # --- processes ---

    def spawn(self, group: Group, rank: int, instance: int, replaces: bool = False) -> Process:
        """Start a process: a new incarnation of (group, rank).

        With ``replaces``, the process replaces a lost one of a live group. Its initial weights
        differ from those of all other processes.
        """
        setting, policies = self.setting, self.spec.policies
        peer = group.next_peer(rank)
        store = f"store-{group.name}-{instance}"
        config = Config(
            me=peer,
            world=setting.ranks,
            store=store,
            transport=f"http://{peer.group}.{peer.rank}.{peer.inc}",
            pid=1000 + len(self.processes),
            host="sim",
            timeouts=setting.timeouts,
            min_groups=setting.min_groups,
            expected_groups=setting.groups,
            min_reductions=policies.min_reductions,
            leases=self.spec.is_periodic,
            bound=setting.behind,
            quorum=policies.quorum,
            on_divergence=setting.on_divergence,
            flow=self.spec.bound_to(self.name) if self.name else (),
            fixed_slices=setting.slices,
            rules=setting.rules,
            home=f"home-{peer}" if replaces and rank == 0 else "",
        )
        participant = self._core(config)
        lineage = GENESIS if setting.alike else f"fresh:{group.name}:{store}"
        if replaces:
            lineage = f"fresh:{peer}"
        local = participant.initial(lineage, now=self.clock.now)
        process = Process(self, participant, local, Bits(f"{lineage}/{rank}"), group, instance)
        self.processes[peer] = self.bus.inboxes[inbox_name(peer)] = process
        self.log.open(process)
        process.start()
        return process

    def live(self) -> list[Process]:
        """Return the processes that have not ended, in the order of their starts."""
        return [p for p in self.processes.values() if p.alive]

    def is_alive(self, peer: Peer) -> bool:
        """Return whether the process is alive."""
        return peer in self.processes and self.processes[peer].alive

    def kill(self, process: Process) -> None:
        """Kill a process on behalf of the launcher of its group."""
        self._end(process, -9)

    def strike_down(self, process: Process) -> None:
        """Kill a process as a fault."""
        if process.alive:
            self._end(process, -9)
            process.group.ended(process)

    def exited(self, process: Process, code: int) -> None:
        """Handle the end of a process that exited by itself."""
        self._end(process, code)
        process.group.ended(process)

    def _end(self, process: Process, code: int) -> None:
        process.alive, process.code = False, code
        self.lost(process.peer, None)
        if not self.is_calm and not self.holds_state():
            self.hopeless = True

    # --- requests of processes ---

    def consumed(self, process: Process, plan: StartTxn | None, base: int | None) -> None:
        """Record the data that a committed txn has consumed, if it has a slice.

        Args:
            process: The process.
            plan: The txn.
            base: In an asynchronous job, the step on which the contribution is based.
        """
        if plan is None or plan.slice is None:
            return
        peer = process.peer
        self.log.history.consumed += [(peer, plan.token, n, str(peer)) for n in plan.slices]
        self.data_notes.consumed(process, plan, base)
        if base is not None:
            self.log.history.contributed.append((peer, plan.token, base, str(peer)))

    def announce(self, message: BusMessage) -> None:
        """Broadcast a message of the supervisor; in a bus outage it is delayed or dropped."""
        delay = self.latency.hop()
        if self.bus.outage_until > self.clock.now:
            if self.rng.random() < 0.5:
                return
            delay += self.bus.outage_until - self.clock.now
        self.clock.after(delay, None, self.bus.publish, message)

    def meeting(self, key: tuple[int, ...], peers: tuple[Peer, ...]) -> Meeting:
        """Return the meeting with that key; create it for the first participant."""
        if key not in self._meetings:
            self._meetings[key] = Meeting(self, peers)
        return self._meetings[key]

    def lost(self, peer: Peer, era: int | None) -> None:
        """Handle the end of ``peer`` (``era`` is None) or of its connections in that era."""
        for key, meeting in list(self._meetings.items())[-8:]:
            if peer in meeting.peers and era in (None, key[0]):
                meeting.lose(peer)

    # --- faults ---

    def count(self, kind: str) -> None:
        """Count a fault of this kind."""
        self.log.faults[kind] += 1

    def strikes(self, kind: str) -> bool:
        """Draw whether a fault of this kind occurs now, and count it if so."""
        chance = self.setting.weather.chances.get(kind, 0.0)
        if not chance or self.is_calm or self.rng.random() >= chance:
            return False
        self.count(kind)
        return True

    def flips(self, again: bool) -> bool:
        """Draw whether a reduced gradient changes in the memory of a rank, and count it if so.

        The chance is that of a corrupted state, and 1/2 if it did so in the attempt before.
        """
        chance = 0.5 if again else self.setting.weather.chances.get("corrupted", 0.0)
        if self.is_calm or self.whims.flips.random() >= chance:
            return False
        self.count("flipped")
        return True

    def body_fault(self) -> str | None:
        """Return the fault for a step function that starts now; it is counted when it occurs."""
        if self.is_calm:
            return None
        return self.chaos.body_fault()

    def holds_state(self, without: Group | None = None) -> bool:
        """Return whether the complete live groups hold the state of the job.

        The group ``without`` is ignored.
        """
        head, groups = self.bus.head, [g for g in self.groups.values() if g is not without]
        if head is None:
            return True
        if head.diverged:
            return False
        able = [
            g.live
            for g in groups
            if g.whole and not g.leaving and not any(p.link.deaf for p in g.live)
        ]
        return bool(able) and all(
            any(_holds(p, head) for ranks in able for p in ranks if p.peer.rank == rank)
            for rank in range(self.setting.ranks)
        )

    # --- the run ---

    def begin(self) -> None:
        """Start all groups and the faults."""
        for group in self.groups.values():
            group.start()
        self.chaos.begin()

    def is_due(self, since: float, target: int) -> bool:
        """Return whether ``target`` steps are committed or a limit of the run is reached."""
        return (
            self.step >= target
            or self.log.events >= _LIMIT_EVENTS
            or self.clock.now >= since + _LIMIT_SECONDS
            or self.hopeless
        )

    def calm_down(self) -> None:
        """Stop the faults."""
        self.phase = "calm"
        self.latency.calm_work = 0.4
        self.chaos.end()

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self.bus.head.step if self.bus.head else 0


def _holds(process: Process, head: Record) -> bool:
    """Return whether the process holds the state of the head record, or can compute it."""
    s = process.local
    if s.role == "terminal":
        return False
    if s.lineage == head.lineage:
        return True
    config = process.participant.config
    ways = (committed(s, config).lineage, committed(s, config, skip=True).lineage)
    return s.vote is not None and head.lineage in ways


# --- the bus ---


_LONGEST_TROUBLE_S = 20.0
"""Maximum duration of a series of cuts: less than ``bus_limit``, after which participants end."""
_LONGEST_GAP_S = 10.0
"""Maximum duration in seconds for which a listener misses broadcasts."""
_RECOVERY_S = 5.0
"""Uptime of a link in seconds after which the next cut starts a new series."""


@dataclass(slots=True)
class Link:
    """The connection of one process to the bus."""

    until: float = 0.0
    """End of the current cut, in virtual seconds."""
    since: float = 0.0
    """Start of the current series of cuts, in virtual seconds."""
    fails: bool = False
    """Whether operations fail during the cut, with an unknown outcome; otherwise they wait."""
    lag: float = 0.0
    """Maximum extra delay of a message, in seconds."""
    last: float = 0.0
    """Arrival time of the newest broadcast. Broadcasts arrive in order."""
    last_alone: float = 0.0
    """Arrival time of the newest inbox message."""
    held: deque[tuple[Posted, bool]] = field(default_factory=deque)
    """Messages that wait for the link, each with whether it is an inbox message."""
    waiting: list[Call] = field(default_factory=list)
    """The operations that wait for the link."""
    deaf: bool = False
    behind: bool = False
    """Whether the process misses broadcasts."""


class SimBus:
    """The bus of the whole job: broadcasts, inboxes, registers, ballots, and their failures.

    The bus fulfils the contract of the real bus for the calls of an engine. All listeners receive
    all broadcasts in one order, each after its own delay. Registers are linearizable. A vote that
    is cast twice is in its ballot twice. Operations and their replies are delayed, and either side
    may fail in between. Linked scopes receive the records of this one.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._clock = world.clock
        self.outage_until = 0.0
        """End of an outage, in virtual seconds."""
        self.head: Record | None = None
        """The value of the head register, with its member list."""
        self.history: list[Record] = []
        """All values of the head register, in order."""
        self.registers: dict[str, Register] = {}
        self.inboxes: dict[str, Process] = {}
        """Inbox → its process. Inbox messages cannot be missed."""
        self.ballots: dict[tuple[str, str], list[tuple[str, tuple[Vote, ...]]]] = {}
        """(store of a group, or "", and slot) → the tag and the votes of each entry."""

    @property
    def _beside(self) -> dict[str, SimBus]:
        return {beside(name): world.bus for name, world in self._world.beside.items()}

    # --- operations of a process ---

    def begin(self, caller: Process, call: Call) -> None:
        """Start an operation; ``caller`` receives the reply or failure if it is still alive."""
        world = self._world
        if call.at == GROUP:  # a store on the group's own host
            self._clock.after(world.latency.handling * caller.slow, caller, self._ask_group, caller)
            return
        self._clock.after(world.latency.operation(caller.slow), None, self._arrive, caller, call)

    def _ask_group(self, caller: Process) -> None:
        assert caller.call is not None, "it is open"
        if self._world.strikes("group_store"):
            caller.failed(BusError("the group's store is out of reach"))
        else:
            caller.answered(self._carry_out(caller.call, caller.participant.config.store))

    def _arrive(self, caller: Process, call: Call) -> None:
        world, link = self._world, caller.link
        if not caller.alive and world.rng.random() < 0.5:
            return  # the process ended before the operation was sent
        if link.until > self._clock.now:
            if not link.fails:
                link.waiting.append(call)
                return
            if world.rng.random() < 0.3:  # the operation arrives, but the reply is lost
                self._carry_out(call, in_part=world.rng.random() < 0.5)
            self._clock.after(world.latency.hop(), caller, self._fail, caller)
            return
        answer = self._carry_out(call)
        delay = world.latency.hop() * caller.slow
        self._clock.after(delay, caller, self._answer, caller, answer)

    def _answer(self, caller: Process, answer: object) -> None:
        link = caller.link
        if link.until > self._clock.now and link.fails:
            self._fail(caller)
        elif link.until > self._clock.now:
            delay = link.until - self._clock.now
            self._clock.after(delay, caller, self._answer, caller, answer)
        else:
            caller.answered(answer)

    def _fail(self, caller: Process) -> None:
        self._world.count("operation_failed")
        caller.failed(BusError("the bus is out of reach"))

    def _carry_out(self, call: Call, store: str = "", in_part: bool = False) -> object:
        """Perform an operation and return the reply.

        Args:
            call: The operation.
            store: Name of the group's store, if it is an operation there.
            in_part: The caller fails between its decision and the announcement.
        """
        registers = self._beside[call.at].registers if call.at in self._beside else self.registers
        match call:
            case Read(key=key):
                return registers.get(key)
            case Write(key=key, value=value):
                registers[key] = value
            case CompareSet(desired=desired):
                held = self._compare_set(call)
                if call.announce and held == desired and not in_part:
                    self.publish(desired)
                return held
            case Cast(slot=slot, tag=tag, votes=votes, voters=voters):
                cast = self.ballots.setdefault((store, slot), [])
                cast.append((tag, votes))
                mine = [vote for t, some in cast if t == tag for vote in some]
                return mine if len(mine) >= voters else None
            case Delete(key=key):
                self.ballots.pop((store, key), None)
                registers.pop(key, None)
            case Publish(message=message, at=at) if not isinstance(message, HeldReport):
                self.publish(message)
                for bus in self._beside.values() if at != SCOPE else ():
                    bus.publish(message)
            case Send(inbox=inbox, message=message) if not isinstance(message, Answer):
                if inbox in self.inboxes and self.inboxes[inbox].alive:
                    self._give(self.inboxes[inbox], message, alone=True)
        return None

    def _compare_set(self, call: CompareSet) -> Packed | None:
        desired, held = call.desired, self.registers.get(HEAD)
        if held != call.expected:
            assert isinstance(held, Packed), "the register never loses its value"
            return held
        self.registers[HEAD] = desired
        self.head = desired.record
        if desired.members:
            members = self.registers[list_name(desired)]
            assert isinstance(members, tuple), "the list is written before it is proposed"
            self.head = replace(desired.record, members=members)
        self.history.append(self.head)
        self._world.hopeless |= desired.record.diverged
        return desired

    # --- messages ---

    def publish(self, message: BusMessage | Packed) -> None:
        """Broadcast a message. All listeners receive broadcasts in the same order."""
        world = self._world
        for listener in world.live():
            if not (listener.link.deaf or listener.link.behind):
                self._give(listener, message)
        if isinstance(message, Packed) and message.record.kind != "abort":
            for other in world.beside.values():
                if any(bound.scope == world.name for bound in world.spec.bound_to(other.name)):
                    for listener in other.live():
                        self._give(listener, ScopeAnnouncement(world.name, message), alone=True)

    def _give(self, listener: Process, message: Posted, alone: bool = False) -> None:
        world = self._world
        if world.strikes("lost"):
            return
        if not alone and world.strikes("deaf"):
            self._deafen(listener)
            return
        if not alone and world.strikes("overrun"):
            self._overrun(listener)
            return
        for _ in range(2 if world.strikes("repeated") else 1):
            self._send(listener, listener.link, message, alone)

    def _send(self, listener: Process, link: Link, message: Posted, alone: bool) -> None:
        if link.until > self._clock.now or link.held:
            link.held.append((message, alone))
            return
        world = self._world
        due = self._clock.now + world.latency.hop() + link.lag * world.rng.random()
        if alone:  # inbox messages and broadcasts are not ordered with each other
            link.last_alone = due = max(due, link.last_alone)
        else:
            link.last = due = max(due, link.last)
        self._clock.after(due - self._clock.now, listener, self._deliver, listener, message)

    def _deliver(self, listener: Process, message: Posted) -> None:
        listener.post(message)

    def _deafen(self, listener: Process) -> None:
        listener.link.deaf = True
        self._clock.after(
            self._world.latency.hop(),
            listener,
            listener.post,
            BusDown("listen", "the listener has ended"),
        )

    def _overrun(self, listener: Process) -> None:
        """Let a listener miss all broadcasts for some seconds, then resume and be notified."""
        listener.link.behind = True
        seconds = _LONGEST_GAP_S * self._world.rng.random() ** 2
        self._clock.after(seconds, listener, self._hears_again, listener)

    def _hears_again(self, listener: Process) -> None:
        listener.link.behind = False
        listener.post(BusDown("overrun", "this listener fell 1024 messages behind"))

    # --- links ---

    def cut(self, process: Process, seconds: float, fails: bool) -> None:
        """Disconnect the process from the bus for some time; messages to it wait.

        Consecutive cuts form a series, which ends before participants give up on the bus.
        """
        link, now = process.link, self._clock.now
        if now - link.until > _RECOVERY_S:
            link.since = now
        until = min(now + seconds, link.since + _LONGEST_TROUBLE_S)
        if until <= max(now, link.until):
            return
        if link.until <= now:
            link.fails = fails
        link.until = until
        self._clock.after(until - now, None, self.mend, process)

    def mend(self, process: Process) -> None:
        """End the cut of the link if its time is over; waiting messages and operations resume."""
        link = process.link
        if link.until > self._clock.now:
            return
        held, link.held = link.held, deque()
        for message, alone in held:
            self._send(process, link, message, alone)
        waiting, link.waiting = link.waiting, []
        for call in waiting:
            self._arrive(process, call)


# --- one process ---


_SILENT = logging.Logger("fft.prove.simulator", logging.CRITICAL + 1)
"""The logger of simulated engines, which discards their messages about injected faults."""


class Process(VirtualEngine):
    """One process of the job: an engine in virtual time, and the main thread.

    Events and bus operations take virtual time, more of it in a slow process. A process with a
    ``doom`` is killed at the start of a bus operation.
    """

    def __init__(
        self,
        world: World,
        participant: Participant,
        local: Local,
        bits: Bits,
        group: Group,
        instance: int,
    ) -> None:
        config = participant.config
        wiring = Wiring("sim://", config.world > 1, _SILENT)
        super().__init__(world.clock, participant, local, wiring)
        self.world = world
        self.group = group
        self.instance = instance
        """The number of the group's start to which this process belongs."""
        self.link = Link()
        self.code: int | None = None
        """The exit code, or None while the process is alive."""
        self.slow = 1.0
        self.doom: int | None = None
        """Number of bus operations after which the process is killed, or None."""
        self.is_asked = False
        """Whether the process was asked to leave when the job ended."""
        self.main = MainThread(self, bits)

    def start(self) -> None:
        """Join the job, after connecting to the bus."""
        self.post(Start())

    def later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Schedule an action of this process; the delay is longer in a slow process."""
        self.clock.after(delay * self.slow, self, action, *args)

    def resume(self) -> None:
        """Resume, as after SIGCONT. Actions that became due in the meantime run now, in order."""
        self.stopped = False
        parked, self.parked = self.parked, []
        for action, args in parked:
            self.clock.after(0.0, self, action, *args)

    def _pause(self) -> float:
        return self.world.latency.handling * self.slow

    def _advance(self, go_on: Callable[..., Call | None], *given: object) -> None:
        try:
            super()._advance(go_on, *given)
        except Exception as error:
            self.world.log.crashed(self, error)
            raise

    def _begin(self, call: Call) -> None:
        if self.doom is not None:
            self.doom -= 1
            if self.doom <= 0:
                self.world.strike_down(self)
                return
        self.world.bus.begin(self, call)

    # --- callbacks of the engine ---

    def outcome(self, before: Local, after: Local, event: Event, out: Outcome, now: float) -> None:
        """Record the outcome of an event."""
        self.world.log.handled(self, before, event, out)

    def note(self, name: str, data: dict[str, Any], local: Local | None = None) -> None:
        """Count a report of the engine that a txn waits for another scope."""
        self.world.log.held += 1

    def put(self, command: Command) -> None:
        """Hand a command to the main thread."""
        self.main.command(command)

    def abort_groups(self, cause: str) -> None:
        """Abort the process groups, which unblocks the main thread."""
        self.main.groups.abort()


# --- its main thread ---


STATE_BYTES = 1000
"""The size of a state transfer in bytes."""
_SHUTDOWN = 5.0
"""Timeout in seconds of a manager's shutdown for its engine."""


@dataclass(frozen=True)
class _Came:
    """The result of a fetch. ``bits`` is None if it failed."""

    cause: str
    bits: Bits | None = None
    source: str = ""
    torn: bool = False


class Executor(StepExecutor):
    """The shipped executor of a main thread. It records an event without a row as a violation."""

    def __init__(self, process: Process, take: Callable[[Command], None]) -> None:
        super().__init__(process.post, take)
        self._process = process

    def transition(self, event: str, facts: Set[str] = NO_FACTS) -> tuple[str, ...]:
        """Make the transition for an event; return its effects."""
        try:
            return super().transition(event, facts)
        except ProtocolError as error:
            self._process.world.log.violated("protocol_error", f"{self._process.peer}: {error}")


@dataclass
class _Reduced:
    """Digests of reduced gradients."""

    now: str | None = None
    """That in the last vote."""
    refused: str | None = None
    """That of the attempt before, if it was refused because replicas differed."""


class MainThread:
    """The main thread of a process: the shipped executor, with a model of the torch code.

    ``bits`` models the contents of the memory, that is, the state of the rank.
    """

    def __init__(self, process: Process, bits: Bits) -> None:
        self.bits = bits
        self.serving: Record | None = None
        """The epoch whose members can fetch the state of this process, or None."""
        self.groups = ProcessGroups(process)
        self._process = process
        self._world = process.world
        self._slot: Command | None = None
        self._executor = Executor(process, self._take)
        self._waits = True
        """Whether the thread waits for a command; otherwise it is working or has ended."""
        self._quits = False
        """Whether the user's code has failed and is shutting down."""
        self._plan: StartTxn | None = None
        self._block = ""
        """The part of a live block that the open txn is; empty for a step."""
        self._failing: str | None = None
        """The fault that will occur in this step function, or None."""
        self._heal: Heal | None = None
        self._held = 0, False
        """The vote that waits for the state: number of reductions, and whether to skip."""
        self._interval = self._world.whims.digest_interval()
        self._compared = _Reduced()
        self._learning: Heal | None = None
        """The heal of a joiner that is still fetching its state, or None."""
        self._came: _Came | None = None
        """The result of that fetch, or None."""
        self._computed: tuple[int | None, int] | None = None
        """Lease and base of the group's contribution in an asynchronous job, or None."""
        self._work: Work = {
            "restore": self._restore,
            "connect": self._connect,
            "begin_body": self._enter,
            "apply": self._apply,
            "leave": self._leave,
        }

    # --- commands ---

    def command(self, command: Command) -> None:
        """Put a command into the slot, where it replaces an older one."""
        self._slot = command
        if self._quits and isinstance(command, Finish):
            self._exit(1)
        self._look()

    def _look(self) -> None:
        """Execute the command in the slot, if this thread is waiting for one."""
        command = self._slot
        if command is None or not self._waits:
            return
        facts: Set[str] = NO_FACTS
        if isinstance(command, Heal) and command.fetch_from is not None:
            late = self._process.peer.group in command.record.learners
            facts = {"learns"} if late else {"fetches"}
        self._executor.execute(command, self._work, facts)
        if self._executor.role == "idle":  # the executor has rejected the command
            self._wait()

    def _take(self, command: Command) -> None:
        self._slot, self._waits = None, False

    def _restore(self, command: Restore) -> None:
        self._process.later(self._world.latency.restore(), self._restored, command)

    def _apply(self, command: Apply) -> None:
        base = self._computed[1] if self._computed is not None else None
        if not self._block:
            self._world.consumed(self._process, self._plan, base)
        self._world.blocks.committed(command.record, self._block)
        self._computed = None
        self._process.later(self._world.latency.apply(), self._applied, command.skip)

    def _leave(self, command: Finish) -> None:
        self._exit(int(command.error is not None))

    def _exit(self, code: int) -> None:
        self._process.later(self._world.latency.exit(), self._world.exited, self._process, code)

    def _wait(self) -> None:
        self._waits = True
        self._look()

    def _give_up(self) -> None:
        """End the step function without a vote."""
        self._executor.unwound()
        self._wait()

    def _token(self) -> Token:
        return self._process.local.token

    def _restored(self, command: Restore) -> None:
        self._plan, self._learning = None, None
        differed = command.cause.code == CauseCode.GRADIENTS_DIFFER
        self._compared.refused = self._compared.now if differed else None
        self.bits = self.bits.restored()
        self._executor.restored(command)
        self._wait()

    def _applied(self, skip: bool) -> None:
        who, token = self._process.peer, self._token()
        if self._world.strikes("apply_failed"):
            self.bits, self._computed = self.bits.torn(who), None
            self._executor.report(ApplyFailed(token, "the optimizer step raised"))
        else:
            self.bits = self.bits.skipped(token) if skip else self.bits.applied(who, token)
            self._executor.report(Applied(token, self.bits.told))
            if self._world.strikes("noticed_late"):
                self.bits = self.bits.torn(who)
                self._executor.lost = "the optimizer step was not whole"
            if self._world.setting.behind:
                self._stand_apart()
        self._wait()

    def _stand_apart(self) -> None:
        """Compute this group's contribution to a later synchronization, then request to join it."""
        process = self._process
        record = process.local.head
        assert record is not None, "a txn was committed"
        self._computed = own_lease(record.leases, process.participant.config), record.step
        pace = self._world.whims.pace(process.peer.group)
        process.later(self._world.latency.compute() * pace, process.post, Synchronise())

    def _bring(self, plan: StartTxn) -> None:
        """Keep the computed contribution, or recompute it in the txn from the epoch's state."""
        if not self._world.setting.behind:
            return
        config, epoch = self._process.participant.config, self._process.local.epoch
        if plan.lease is None:
            self._computed = None
        elif self._computed is None or not is_brought(epoch, config, self._computed, plan.lease):
            self._computed = plan.lease, plan.step

    # --- the process groups ---

    def met(self) -> None:
        """Continue after all members have arrived."""
        if self._heal is None:
            self._reduced()
        elif self.groups.aborted:
            self._heal_failed("aborted")
        else:
            self._rebuilt(self._heal)

    def missed(self, cause: str) -> None:
        """Continue after a member failed to arrive or the groups were aborted."""
        if self._heal is not None:
            self._heal_failed(cause)
        elif self.groups.aborted:
            self._unwind()
        else:
            self._fail(f"a reduction failed: {cause}")

    # --- the step function ---

    def _enter(self, plan: StartTxn) -> None:
        world = self._world
        if plan.token.txn > 1 or self.serving is None or not self.serving.learners:
            self.serving = None
        self._plan, self._block = plan, world.blocks.place(plan)
        self._bring(plan)
        self.bits = self.bits.begin(self._process.peer, plan.token)
        if world.setting.compares and self._learning is None and world.strikes("corrupted"):
            self.bits = self.bits.corrupted(self._process.peer)
        self._failing = world.body_fault()
        compute = world.latency.compute()
        if not self._block and not world.data_notes.takes(self._process, plan):
            self._process.later(compute, self._quit)  # like a data loader that fails
        elif self._failing in ("exception", "quit"):
            self._process.later(compute * world.rng.random(), self._raise, self._failing)
        else:
            self._process.later(compute, self._vote_on_block if self._block else self._reduce)

    def _vote_on_block(self) -> None:
        if self.groups.aborted:
            self._give_up()
        else:
            self._vote(0, skip=True)

    def _raise(self, kind: str) -> None:
        self._world.count(kind)
        if kind == "quit":
            self._quit()
            return
        self._fault(f"injected: {kind}")
        self._give_up()

    def _quit(self) -> None:
        self.groups.drop()
        self._quits = True
        self._process.post(Stop("the user's code gave up"))
        self._process.later(_SHUTDOWN, self._world.exited, self._process, 1)

    def _fault(self, cause: str) -> None:
        assert self._plan is not None
        if not self.groups.aborted:
            self._process.post(Fault(self._plan.token, cause))

    def _reduce(self) -> None:
        plan = self._plan
        assert plan is not None
        if self.groups.aborted:
            self._unwind()
            return
        if self._failing == "user_skips_early":
            self._world.count(self._failing)
            self._vote(0, skip=True)
            return
        if self._failing == "skipped" and self._world.skips.alone(plan.token, self.groups.members):
            self.bits = self.bits.spoil(self._process.peer)
            self._vote(self._world.rng.choice([0, _REDUCTIONS - 1]))
            return
        self.groups.meet(plan.token, self._world.setting.group_timeout)

    def _reduced(self) -> None:
        assert self._plan is not None
        if self.groups.aborted:
            self._unwind()
        elif self._failing in ("one_sided", "late_exception"):
            self._world.count(self._failing)
            if self._failing == "one_sided":
                self._fail("injected: the last reduction failed on this side")
            else:
                self._raise_late()
        else:
            world, token = self._world, self._plan.token
            left_out = world.skips.by_rank(token) == self._process.peer.rank
            alone = self._failing == "user_skips"
            if alone:
                world.count("user_skips")
            self._vote(_REDUCTIONS - left_out, skip=world.skips.by_all(token) or alone)

    def _raise_late(self) -> None:
        self._fault("injected: exception after the reductions")
        self._give_up()

    def _fail(self, cause: str) -> None:
        """Handle a failed reduction: the gradients of this rank differ from those of its peers."""
        self.bits = self.bits.spoil(self._process.peer)
        self._fault(cause)
        if self._world.setting.awaits_reductions:
            self._vote(_REDUCTIONS, cause)
        else:
            self._give_up()

    def _unwind(self) -> None:
        """End the step function after an abort."""
        if self._world.setting.awaits_reductions:
            self._vote(_REDUCTIONS, "the process group was aborted")
        else:
            self._give_up()

    def _vote(self, count: int, cause: str = "", skip: bool = False) -> None:
        """Post YES, or NO because of ``cause``, and wait for the decision."""
        assert self._plan is not None
        if self._learning is not None and not cause:
            self._held = count, skip
            self._waits = True
            self._learn()
            return
        manifest = Manifest(count=count, bytes=4 * count, shapes="x", block=self._block)
        # Select digests by step, so that a repeated step also has one.
        compares = self._world.setting.compares and self._plan.step % self._interval == 0
        digest = self.bits.digest if compares else None
        if compares and not cause and not self._block:
            if self._world.flips(again="flipped" in (self._compared.refused or "")):
                self.bits = self.bits.flip(self._process.peer)
            reduced = self.bits.gradients
            if self.bits.flipped:  # another bit in every second attempt
                reduced += str(self._plan.token.epoch // 2)
            refused = self._compared.refused
            repeats = None if refused is None else reduced == refused
            manifest = replace(manifest, fingerprint=reduced, repeats=repeats)
        self._compared.now = manifest.fingerprint
        asks = self._plan.step % 2 == 1 and self._plan.index == 0 and not self._block
        vote = Prepared(self._plan.token, not cause, manifest, cause, skip, digest, checkpoint=asks)
        self._executor.report(vote)
        if self._failing == "after_vote" and not cause:
            self._world.count("after_vote")
            self._process.post(Fault(self._plan.token, "injected: fault after the vote"))
        self._wait()

    def _learn(self) -> None:
        """Cast the vote of a joiner after its step function has ended and its state has arrived."""
        learning, came = self._learning, self._came
        is_over = self._waits and self._executor.role == "computing"
        if not is_over or learning is None or came is None:
            return
        self._learning = None
        if came.bits is None:
            self._failed_to_heal(learning, came.cause, came.torn)
            return
        self.bits = self.bits.learnt(came.bits)
        epoch, told = learning.record.epoch, self.bits.told
        self._executor.report(Healed(epoch, STATE_BYTES, came.source, told))
        self._waits = False
        count, skip = self._held
        self._vote(count, skip=skip)

    # --- healing ---

    def _connect(self, command: Heal) -> None:
        self._heal = command
        self.groups.build(command.record)
        self.groups.meet((), self._process.participant.config.timeouts.get("ready_window", 60.0))

    def _rebuilt(self, command: Heal) -> None:
        world = self._world
        if world.strikes("heal_failed"):
            self._heal_failed("injected: connection reset")
            return
        if command.send_to:
            self.serving = command.record
        if command.fetch_from is None:
            self._healed(0, "")
            return
        limit = self._process.participant.config.timeouts.get("vote_window", 60.0)
        give_up = world.clock.now + limit
        self._process.later(world.latency.transfer(), self._fetch, command, give_up)
        if self._executor.has_row("connected"):
            self._heal, self._learning, self._came = None, command, None
            self._executor.report(Connected(command.record.epoch))
            self._wait()

    def _fetch(self, command: Heal, give_up: float) -> None:
        """Complete the transfer if the source is ready; otherwise retry later."""
        world, record = self._world, command.record
        if command is not (self._heal or self._learning):
            return  # a rollback has cancelled the transfer
        assert command.fetch_from is not None
        entry = record.members[command.fetch_from]
        source = world.processes[entry.peers()[self._process.peer.rank]]
        served = source.main.serving
        if not source.alive:
            self._fetched(_Came(f"{source.peer} does not answer"))
        elif served is None or source.stopped:
            if world.clock.now >= give_up:
                self._fetched(_Came(f"{source.peer} serves no state"))
            else:
                self._process.later(0.1, self._fetch, command, give_up)
        elif served.step != record.step or served.lineage != record.lineage:
            self._fetched(_Came(f"{source.peer} serves step {served.step}"))
        elif world.strikes("heal_torn"):
            self._fetched(_Came("injected: the state does not fit", torn=True))
        else:
            self._fetched(_Came("", source.main.bits, entry.group))

    def _fetched(self, came: _Came) -> None:
        if self._heal is None:
            self._came = came
            self._learn()
        elif came.bits is None:
            self._heal_failed(came.cause, came.torn)
        else:
            self.bits = self.bits.fetched(came.bits)
            self._healed(STATE_BYTES, came.source)

    def _healed(self, size: int, source: str) -> None:
        assert self._heal is not None
        epoch, self._heal = self._heal.record.epoch, None
        self._executor.report(Healed(epoch, size, source, self.bits.told))
        self._wait()

    def _heal_failed(self, cause: str, torn: bool = False) -> None:
        healing, self._heal = self._heal, None
        assert healing is not None
        self._failed_to_heal(healing, cause, torn)

    def _failed_to_heal(self, command: Heal, cause: str, torn: bool) -> None:
        if torn:
            self.bits = self.bits.torn(self._process.peer)
        self._executor.report(HealFailed(command.record.epoch, cause, torn))
        if torn and self._world.rng.random() < 0.7:  # the manager raises, so the process exits
            self._waits = False
            self._exit(1)
            return
        self._wait()


# --- process groups ---


class ProcessGroups:
    """The process groups of one process, which are rebuilt in each epoch.

    Attributes:
        members: All members of the epoch.
        aborted: Whether the groups are aborted.
    """

    def __init__(self, process: Process) -> None:
        self.members: tuple[Peer, ...] = ()
        self.aborted = True
        self._process = process
        self._era = -1
        """The number of the epoch's record."""
        self._meeting: Meeting | None = None
        self._serial = 0
        """The number of the newest wait; results of older waits are ignored."""

    def build(self, record: Record) -> None:
        """Rebuild the groups for an epoch, whose members then enter the rendezvous."""
        self.members, self.aborted, self._era = record.peers, False, record.n

    def meet(self, key: tuple[int, ...], limit: float) -> None:
        """Enter the rendezvous (an empty key) or the reductions of a txn, for ``limit`` seconds."""
        self._serial += 1
        self._meeting = self._process.world.meeting((self._era, *key), self.members)
        self._meeting.join(self._process, self._serial, limit)

    def met(self, serial: int) -> None:
        """Let the main thread continue after all members have arrived."""
        if serial == self._serial and self._meeting is not None:
            self._meeting = None
            self._process.main.met()

    def missed(self, serial: int, cause: str) -> None:
        """Let the main thread continue after a member failed to arrive, or after an abort."""
        if serial == self._serial and self._meeting is not None:
            self._meeting = None
            self._process.main.missed(cause)

    def abort(self) -> None:
        """Abort the groups for the engine, which unblocks their collectives on all ranks."""
        if self.aborted:
            return
        self.drop()
        if self._meeting is not None:
            process = self._process
            process.later(process.world.latency.hop(), self.missed, self._serial, "aborted")

    def drop(self) -> None:
        """Close the connections, which the other members detect."""
        self.aborted = True
        self._process.world.lost(self._process.peer, self._era)


class Meeting:
    """The reductions of one txn, or the rendezvous of one epoch, which all members must enter.

    A collective cannot complete before every member has entered it. If a member dies or closes its
    connections, the waiting members fail. As with gloo, some (its neighbours) fail at once, others
    only when their own timeout expires.
    """

    def __init__(self, world: World, peers: tuple[Peer, ...]) -> None:
        self.peers = peers
        self._world = world
        self._came: dict[Peer, tuple[Process, int]] = {}
        self._missing = next((p for p in peers if not world.is_alive(p)), None)
        """A member that cannot arrive any more, or None."""
        self._complete = False

    def join(self, process: Process, serial: int, limit: float) -> None:
        """Let ``process`` wait for all other members, with a timeout of ``limit`` seconds."""
        world = self._world
        self._came[process.peer] = (process, serial)
        if self._missing is not None:
            self._disappoint(process, serial, limit)
        elif len(self._came) == len(self.peers):
            self._complete = True
            for member, waits in self._came.values():
                member.later(world.latency.hop(), member.main.groups.met, waits)
        else:
            world.clock.after(limit, process, process.main.groups.missed, serial, "timed out")

    def lose(self, peer: Peer) -> None:
        """Handle the end of ``peer`` or of its connections."""
        if self._complete:
            # The collective is complete, but some members may not have received its last part.
            for member, serial in self._came.values():
                if self._world.rng.random() < 0.3:
                    cause = f"connection closed by {peer}"
                    self._world.clock.after(0.0, member, member.main.groups.missed, serial, cause)
            return
        first, self._missing = self._missing is None, self._missing or peer
        if first:
            for member, serial in self._came.values():
                if member.peer != peer:
                    self._disappoint(member, serial, None)

    def _disappoint(self, member: Process, serial: int, limit: float | None) -> None:
        """Fail a member early or at its timeout, scheduled already if ``limit`` is None."""
        world, cause = self._world, f"connection closed by {self._missing}"
        if world.rng.random() < 0.6:
            limit = world.latency.notice()
        if limit is not None:
            world.clock.after(limit, member, member.main.groups.missed, serial, cause)


# --- replica groups ---


_PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Delays in seconds before the restarts of a supervised group; the last value repeats."""


class Group:
    """One replica group and its launcher, which starts the processes and detects their end.

    A supervised group runs under ``fft run``. The supervisor reports a death on the bus within
    milliseconds, kills the other ranks of the group, and restarts it with increasing delays. The
    launcher of any other group reports nothing, and detects a death late or never. ``instance``
    counts the starts of the group.
    """

    def __init__(self, world: World, name: str, supervised: bool) -> None:
        self.name = name
        self.supervised = supervised
        self.instance = 0
        self.processes: list[Process] = []
        """The processes of this instance that have started."""
        self.coming = False
        """Whether a start is scheduled or in progress."""
        self.away = False
        """Whether the group has left regularly."""
        self.leaving = False
        """Whether this instance was asked to leave."""
        self._world = world
        self._restarts = 0
        self._incarnations: Counter[int] = Counter()

    def next_peer(self, rank: int) -> Peer:
        """Return the next incarnation of a rank."""
        self._incarnations[rank] += 1
        return Peer(self.name, rank, self._incarnations[rank])

    @property
    def live(self) -> list[Process]:
        """The live processes of this instance."""
        return [p for p in self.processes if p.alive]

    @property
    def whole(self) -> bool:
        """Whether all ranks of this instance are alive."""
        return len(self.live) == self._world.setting.ranks

    # --- starting ---

    def _may_reform(self) -> bool:
        """Draw whether the live ranks wait for a replacement of a lost process."""
        world = self._world
        if world.name or not (self.live and len(self.processes) == world.setting.ranks > 1):
            return False
        return not (self.leaving or world.is_ending) and world.strikes("reformed")

    def _reform(self, lost: Process) -> None:
        """Replace ``lost`` with a standby process or a new one."""
        world = self._world
        is_ready = world.rng.random() < 0.5
        self._tell(lost, replaced=world.rng.random() < 0.8)
        self.processes.remove(lost)
        self.coming = True
        delay = world.latency.handling if is_ready else world.latency.boot()
        world.clock.after(delay, None, self._spawn, lost.peer.rank, self.instance, True)

    def start_in(self, delay: float) -> None:
        """Start a new instance after ``delay`` seconds, unless a start is already scheduled."""
        if not self.coming:
            self.coming = True
            self._world.clock.after(delay, None, self.start)

    def start(self) -> None:
        """Start a new instance now. Its ranks start one by one."""
        world = self._world
        self.instance += 1
        self.processes, self.coming = [], True
        self.away = self.leaving = False
        for rank in range(world.setting.ranks):
            world.clock.after(world.latency.boot(), None, self._spawn, rank, self.instance)

    def _spawn(self, rank: int, instance: int, replaces: bool = False) -> None:
        world = self._world
        if instance != self.instance:
            return
        if not world.data_notes.may_start(self.name):
            if world.data_notes.has_left(self.name):
                self.coming, self.away = False, True
                return
            delay = world.latency.boot()
            world.clock.after(delay, None, self._spawn, rank, instance, replaces)
            return
        if world.bus.outage_until > world.clock.now:  # the bus cannot assign an incarnation
            delay = world.bus.outage_until - world.clock.now + world.latency.boot()
            world.clock.after(delay, None, self._spawn, rank, instance, replaces)
            return
        self.processes.append(world.spawn(self, rank, instance, replaces))
        self.coming = len(self.processes) < world.setting.ranks

    # --- ending ---

    def ended(self, process: Process) -> None:
        """Handle the exit or death of a process, whose ``code`` is set."""
        world = self._world
        if process.instance != self.instance:
            self._old_one_ended(process)
        elif process.code == 0:
            self._left()
        elif world.hopeless:
            return
        elif self.supervised or world.is_calm:
            world.clock.after(world.latency.notice(), None, self._notice, process)
        elif world.rng.random() < 0.75:
            delay = world.rng.uniform(0.5, 5.0)
            world.clock.after(delay, None, self.replace, self.instance)

    def _old_one_ended(self, process: Process) -> None:
        """Report the end of a process of an older instance, which is not restarted."""
        if process.code and self.supervised:
            self._world.clock.after(self._world.latency.notice(), None, self._tell, process)

    def _left(self) -> None:
        """Handle the regular exit of a rank, and the end of the group after its last rank."""
        if self.live or self.coming:
            return
        world = self._world
        if all(p.code == 0 for p in self.processes):
            self.away = True
            if not world.is_ending and world.rng.random() < 0.7:
                world.count("return")
                self.start_in(world.rng.uniform(0.1, 2.0))
        elif self.supervised:
            self._restart()

    def _notice(self, process: Process) -> None:
        if process.instance != self.instance:
            return
        if self._may_reform():
            self._reform(process)
            return
        self._tell(process)
        for mate in self.live:
            self._world.kill(mate)
            self._tell(mate)
        self._restart()

    def _tell(self, process: Process, replaced: bool = False) -> None:
        c = process.participant.config
        cause = "SIGKILL" if (process.code or 0) < 0 else f"exit status {process.code}"
        self._world.announce(
            Death(
                group=c.me.group,
                rank=c.me.rank,
                pid=c.pid,
                host=c.host,
                by="supervisor",
                cause=cause,
                replaced=replaced,
            )
        )

    def _restart(self) -> None:
        pause = _PAUSES[min(self._restarts, len(_PAUSES) - 1)]
        self._restarts += 1
        self._come_again(pause)

    def replace(self, instance: int) -> None:
        """Let an unsupervised launcher kill the remaining ranks and start the next instance."""
        if instance != self.instance:
            return
        for mate in self.live:
            self._world.kill(mate)
        self._come_again(0.0)

    def _come_again(self, pause: float) -> None:
        self.instance += 1  # cancels pending starts of ranks of the old instance
        self.coming = False
        if not self._world.is_ending:
            self.start_in(pause)
            return
        # the group does not restart, and it ends in all scopes
        for stage in self._world.beside.values():
            for mate in stage.groups[self.name].live:
                stage.kill(mate)

    def drain(self, by_signal: bool) -> None:
        """Ask the group to leave after a commit."""
        world, self.leaving = self._world, True
        if not by_signal:
            world.announce(Drain(groups=(self.name,), by="supervisor"))
            return
        for process in self.live:
            asked = Drain(groups=(self.name,), by=str(process.peer), local=True)
            world.clock.after(world.latency.notice(), process, process.post, asked)


# --- faults at random times ---


_BODY = (
    *("exception", "late_exception", "one_sided", "skipped", "after_vote", "quit"),
    *("user_skips", "user_skips_early"),
)
_BURST = 5.0
"""Factor by which faults are more frequent in a burst."""
_MOST_GROUPS = 5


class Chaos:
    """The generator of faults at random times, and of faults of step functions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._burst_until = 0.0
        rates = world.setting.weather.rates
        self._kinds = [kind for kind in rates if rates[kind] > 0]
        self._weights = [rates[kind] for kind in self._kinds]
        chances = world.setting.weather.chances
        self._fates = [(kind, chances[kind]) for kind in _BODY if chances.get(kind)]

    def begin(self) -> None:
        """Schedule the next fault at a random time."""
        if not self._kinds:
            return
        world = self._world
        often = _BURST if self._burst_until > world.clock.now else 1.0
        delay = world.rng.expovariate(sum(self._weights) * often)
        world.clock.after(delay, None, self._strike)

    def _strike(self) -> None:
        world = self._world
        if world.is_calm:
            return
        kind = world.rng.choices(self._kinds, self._weights)[0]
        if getattr(self, f"_{kind}")():
            world.count(kind)
        self.begin()

    def end(self) -> None:
        """Stop all faults and end their effects, except that killed processes stay dead."""
        world = self._world
        for process in world.live():
            process.slow, process.doom = 1.0, None
            process.link.lag = 0.0
            process.link.until = min(process.link.until, world.clock.now)
            if process.stopped:
                process.resume()
            world.bus.mend(process)
        world.bus.outage_until = 0.0

    def body_fault(self) -> str | None:
        """Return the fault for a step function that starts now, or None."""
        world = self._world
        if self._burst_until > world.clock.now and world.rng.random() < 0.5:
            return world.rng.choice(["exception", "one_sided"])
        dice = world.rng.random()
        for kind, chance in self._fates:
            if dice < chance:
                return kind
            dice -= chance
        return None

    # --- victims ---

    def _some(self) -> Process | None:
        live = self._world.live()
        return self._world.rng.choice(live) if live else None

    def _spared(self, group: Group) -> bool:
        """Draw whether to spare the last group with the state, without which the job ends."""
        return not self._world.holds_state(without=group) and self._world.rng.random() < 0.95

    def _live_group(self) -> Group | None:
        groups = [g for g in self._world.groups.values() if g.live]
        return self._world.rng.choice(groups) if groups else None

    def _group_in_an_epoch(self) -> Group | None:
        """Return a group that synchronizes now, which asynchronous groups do only briefly."""
        inside = [
            group
            for group in self._world.groups.values()
            if any(process.local.epoch is not None for process in group.live)
        ]
        return self._world.rng.choice(inside) if inside else None

    # --- kinds, by name; each returns whether it found a victim ---

    def _kill_rank(self) -> bool:
        process = self._some()
        if process is None or self._spared(process.group):
            return False
        if self._world.rng.random() < 0.5:
            process.doom = self._world.rng.randint(1, 12)
        else:
            self._world.strike_down(process)
        return True

    def _kill_group(self) -> bool:
        group = self._live_group()
        if group is None or self._spared(group):
            return False
        for process in group.live:
            self._world.clock.after(
                self._world.rng.random() * 0.01, process, self._world.strike_down, process
            )
        return True

    def _slow(self) -> bool:
        process = self._some()
        if process is None or process.slow != 1.0:
            return False
        process.slow = self._world.rng.choice([3.0, 10.0, 50.0])
        self._world.clock.after(self._world.rng.expovariate(1.0), None, self._quicken, process)
        return True

    def _quicken(self, process: Process) -> None:
        process.slow = 1.0

    def _stop_short(self) -> bool:
        return self._stop(0.05, 0.9)

    def _stop_long(self) -> bool:
        return self._stop(1.1, self._world.rng.choice([3.0, 8.0]))

    def _stop(self, least: float, most: float) -> bool:
        process = self._some()
        if process is None or process.stopped:
            return False
        self._hold(process, self._world.rng.uniform(least, most))
        return True

    def _hold(self, process: Process, windows: float) -> None:
        process.stopped = True
        window = process.participant.config.timeouts.get("ack_window", 1.0)
        self._world.clock.after(window * windows, None, self._continue, process)

    def _hang(self) -> bool:
        world, process = self._world, self._some()
        if process is None or process.stopped:
            return False
        # the GIL is held, or SIGSTOP: the engine does not run
        if world.rng.random() < 0.5:
            self._hold(process, world.rng.uniform(0.1, 5.0))
        config, me = process.participant.config, process.peer
        said = Suspect(me.group, me.rank, config.pid, config.host, by="monitor", cause="simulated")
        world.clock.after(world.rng.uniform(0.0, 0.3), None, world.announce, said)
        return True

    def _continue(self, process: Process) -> None:
        if process.alive and process.stopped:
            process.resume()

    def _drain(self) -> bool:
        group = self._live_group()
        if self._world.setting.behind and self._world.rng.random() < 0.5:
            group = self._group_in_an_epoch() or group
        # A rank that is still starting would miss the request and stay without its group.
        if group is None or not group.whole:
            return False
        # A group of an asynchronous job stays until others no longer need its state.
        if not self._world.setting.behind and self._spared(group):
            return False
        by_signal = self._world.rng.random() < 0.5
        group.drain(by_signal)
        for world in self._world.beside.values():  # it is the same group in all scopes
            if (same := world.groups.get(group.name)) is not None and same.whole:
                same.drain(by_signal)
        return True

    def _join(self) -> bool:
        world = self._world
        if len(world.groups) >= _MOST_GROUPS:
            return False
        name = str(len(world.groups))
        supervised = world.rng.random() < 0.7
        for each in (world, *world.beside.values()):  # it is the same group in all scopes
            each.groups[name] = Group(each, name, supervised)
            each.groups[name].start()
        return True

    def _duplicate(self) -> bool:
        group = self._live_group()
        if group is None or group.coming or self._spared(group):
            return False
        group.start()
        return True

    def _partition(self) -> bool:
        live = self._world.live()
        if not live:
            return False
        victims = self._world.rng.sample(live, self._world.rng.randint(1, max(1, len(live) // 2)))
        self._cut(victims)
        return True

    def _outage(self) -> bool:
        world = self._world
        world.bus.outage_until = world.clock.now + self._cut(world.live())
        return True

    def _cut(self, victims: list[Process]) -> float:
        rng = self._world.rng
        seconds, fails = rng.choice([0.1, 1.0, 5.0]) * (0.5 + rng.random()), rng.random() < 0.5
        for process in victims:
            self._world.bus.cut(process, seconds, fails)
        return seconds

    def _lag(self) -> bool:
        process = self._some()
        if process is None:
            return False
        process.link.lag = self._world.rng.choice([0.05, 0.5, 2.0])
        self._world.clock.after(self._world.rng.uniform(0.2, 2.0), None, self._catch_up, process)
        return True

    def _catch_up(self, process: Process) -> None:
        process.link.lag = 0.0

    def _burst(self) -> bool:
        world = self._world
        self._burst_until = world.clock.now + world.rng.uniform(0.3, 1.5)
        return True


# --- data consumption ---


class DataNotes:
    """The trace entries on consumed data in one world, like those of a real job.

    The model covers only FFT's own loop with data drawn by FFT. For groups with local steps, each
    slice is one inner step. Stages forward entries without delay: the next stage can use an entry
    as soon as a rank has started to compute it. A rank of the group that holds the state recomputes
    an entry that was lost with its group.
    """

    def __init__(self, world: World, spec: FsmSpec) -> None:
        self._world = world
        self._takers = 1 if spec.samples == "per_group" else world.setting.ranks
        follows = [e.scope for e in spec.bound_to(world.name) if not e.ahead] if world.name else []
        self._before = next(iter(follows), None)
        self._entries: dict[tuple[str, int], int] = {}
        """(group, slice) → the version of the entry that was computed in this stage."""
        self._told: set[Peer] = set()
        """Participants that have traced which loop they run."""

    @property
    def _source(self) -> DataNotes | None:
        """The data notes of the previous stage, or None for the first stage."""
        return None if self._before is None else self._world.beside[self._before].data_notes

    def takes(self, process: Process, plan: StartTxn) -> bool:
        """Return whether a step function that starts has its input entry."""
        group, number = process.peer.group, plan.slice
        if number is None:
            return True
        self._entries[(group, number)] = plan.step
        if self._source is None:
            return True
        version = self._source.entry(group, number)
        if version is not None:
            told = {"slice": number, "version": version, "token": list(plan.token)}
            self._world.log.note(process, ENTRY, told)
        return version is not None

    def entry(self, group: str, number: int) -> int | None:
        """Return the version of the entry for the next stage, or None if no rank can compute it."""
        if (version := self._entries.get((group, number))) is not None:
            return version
        able = self._able(group)
        if not able:
            return None
        version = self._entries[(group, number)] = able[-1].local.step
        self._world.log.note(able[-1], MADE_ANEW, {"slice": number, "version": version})
        return version

    def _able(self, group: str) -> list[Process]:
        """Return the group's processes that hold the state, including regularly exited ones."""
        mine = [p for p in self._world.processes.values() if p.peer.group == group]
        return [p for p in mine if p.local.healed and (p.alive or p.code == 0)]

    def may_start(self, group: str) -> bool:
        """Return whether a rank of the group can join: the previous stage must have a source."""
        return self._source is None or bool(self._source._able(group))

    def has_left(self, group: str) -> bool:
        """Return whether the group has left the previous stage, so that it leaves all stages."""
        return self._source is not None and self._source._world.groups[group].away

    def consumed(self, process: Process, plan: StartTxn, base: int | None) -> None:
        """Trace the slices of a committed txn that the rank has computed.

        Args:
            process: The process.
            plan: The txn.
            base: In an asynchronous job, the step on which the contribution is based.
        """
        number = plan.slices[0]
        note, token, rank = self._world.log.note, list(plan.token), process.peer.rank
        if process.peer not in self._told:
            self._told.add(process.peer)
            note(process, LOOP, {"runs": TRANSACTIONS, "from": token})
        items = [n * self._takers + (rank if self._takers > 1 else 0) for n in plan.slices]
        item = items[0]
        data: dict[str, Any] = {"slice": number, "step": plan.step, "token": token}
        if plan.fixed_slices:
            data |= {"slices": list(plan.slices), "items": items}
        if not self._world.spec.is_periodic:
            data["item"] = item
        elif (
            self._world.setting.ranks == 1
        ):  # scopes inside groups of several ranks are not simulated
            note(process, "inner_commit", {"slice": number, "item": item, "inner_step": 0})
            data["inner_steps"] = 1
        if base is not None:
            data["base"] = base
        note(process, CONSUMED, data)
