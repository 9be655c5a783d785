"""``fft simulate``: a whole job in one process, under one seed and a virtual clock.

The shipped core and table run in every participant; bus, register, processes, process groups,
supervisor and faults are modelled around them. A run has four parts. Faults of the weather occur
until enough steps are committed. Then it is **calm**, and within a bounded virtual time all
processes must be in one epoch and commit again. Then all groups drain, and must end regularly.
Finally the invariants judge the whole history. Equal seed, spec and weather give an equal run, to
the byte of its traces: there is one random generator, no real clock, and no order by hash or
address.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NoReturn

from fft.messages.effects import Effect, StartTxn
from fft.messages.protocol import BusMessage, Drain, Event, Peer, Record, Timer, Token
from fft.protocol.invariants import History, Move
from fft.protocol.participant import Participant
from fft.protocol.roles import AT_WORK
from fft.protocol.spec import FsmSpec
from fft.protocol.state import GENESIS, Config, committed
from fft.protocol.table import Table
from fft.prove.bits import Bits
from fft.prove.clock import Clock
from fft.prove.simulator.bus import SimBus
from fft.prove.simulator.chaos import Chaos
from fft.prove.simulator.data_notes import DataNotes
from fft.prove.simulator.faults import Weather
from fft.prove.simulator.groups import Group
from fft.prove.simulator.latency import Latency
from fft.prove.simulator.meetings import Meeting
from fft.prove.simulator.process import Process
from fft.trace.writer import TraceWriter, header, trace_path

_WALL = 1_700_000_000.0
"""Wall clock of the traces at virtual second 0."""
_LIMIT_EVENTS = 500
"""Number of handled events after which the faults stop, regardless of the committed steps."""
_LIMIT_SECONDS = 60.0
_LAST_EVENT = 20_000
"""Maximum number of events of a run; a job that never stops sending messages violates liveness."""
_LOOK = 0.25
"""Virtual seconds between two checks whether a calm job is well."""
_ASKED_AGAIN_S = 2.0
"""Virtual seconds between two drain requests to the whole job."""

_SHAPES = [(2, 1)] * 9 + [(3, 1)] * 5 + [(2, 2)] * 4 + [(4, 1)] + [(3, 2)] + [(4, 2)]


@dataclass(frozen=True, slots=True)
class Violation:
    """A property that is violated. ``name`` is an invariant, or one of the simulator's own
    properties: ``liveness``, ``protocol_error`` (a refused event), ``crash`` (an exception in the
    core)."""

    name: str
    text: str
    place: str = ""


class RunEnds(Exception):
    """A violation that makes it pointless to continue."""


@dataclass(slots=True)
class _Seen:
    """Data that are collected while the job runs."""

    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    rows: set[tuple[str, int]] = field(default_factory=set)
    violations: list[Violation] = field(default_factory=list)
    held: int = 0


class World:
    """All objects of one run."""

    def __init__(
        self,
        seed: int,
        spec: FsmSpec,
        table: Table,
        weather: Weather,
        trace_dir: Path | None,
        participant: type[Participant],
        stage: str = "",
        clock: Clock | None = None,
    ) -> None:
        """Prepare the world of a seed.

        ``stage`` is set for a spec whose stages have scopes: each stage is a world of its own, on a
        ``clock`` that they share.
        """
        self.spec = spec
        self._own_spec = spec.stage(spec.stages.index(stage)) if stage else spec
        self.name = stage
        self.beside: dict[str, World] = {}
        """The worlds of the other stages."""
        self.rng = rng = random.Random(f"{stage} of {seed}" if stage else seed)
        self.clock = clock or Clock()
        self.latency = Latency(rng)
        self.count_groups, self.ranks = rng.choice(_SHAPES)
        if stage:  # each stage has one rank of each group
            self.count_groups, _ = random.Random(f"groups of {seed}").choice(_SHAPES)
            self.ranks = 1
        self.group_timeout = rng.choice([1.0, 3.0, 10.0])
        """Seconds until a reduction that a member does not enter fails by itself."""
        self.awaits_reductions = rng.random() < 0.5
        """Whether errors of reductions show at the end of the step function (as in torchft)."""
        self.reductions = 3
        self.weather = weather.drawn(rng)
        self.bus = SimBus(self)
        self.processes: dict[Peer, Process] = {}
        self.history = History()
        self.outage_until = 0.0
        self.burst_until = 0.0
        self.is_calm = self.is_ending = self.hopeless = False
        self.leavers: list[Process] = []
        """Processes that were asked to leave at the end."""
        self.seen = _Seen()
        self._table = table
        self._participant = participant
        self._trace_dir = trace_dir
        self._traces: dict[Peer, TraceWriter] = {}
        self.data_notes = DataNotes(self, spec)
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._incarnations: Counter[tuple[str, int]] = Counter()
        self._skips: dict[Token, int] = {}
        self._all_skip: dict[Token, bool] = {}
        # a second generator, so that the draws above stay as they were
        whims = random.Random(f"whims of {seed}")
        if self.weather.shapes:
            self.count_groups, self.ranks = whims.choice(self.weather.shapes)
        corrupts = bool(self.weather.chances.get("corrupted"))
        self.compares = corrupts and whims.random() < 0.5
        """Whether votes contain digests."""
        self._on_divergence: Literal["stop", "heal"] = whims.choice(["stop", "heal"])
        self._whims = whims
        self.behind = whims.choice([1, 2, 4]) if spec.bound else 0
        """Number of steps that contributions of an asynchronous job may be behind."""
        self._pace: dict[str, float] = {}
        """Group of an asynchronous job → the factor by which it is slower than others."""
        self._timeouts = self._draw_timeouts()
        self._alike = rng.random() < 0.5
        """Whether all groups start with equal states (``init_sync=False``)."""
        self.min_groups = 2 if rng.random() < 0.15 and self.count_groups > 2 else 1
        self.target = rng.randint(3, 10)
        supervised = rng.random()
        self.groups = {
            str(n): Group(self, str(n), rng.random() < (1.0 if supervised < 0.5 else 0.5))
            for n in range(self.count_groups)
        }
        self.chaos = Chaos(self)

    def _draw_timeouts(self) -> dict[str, float]:
        rng = self.rng
        drawn = {
            "vote_window": rng.choice([2.0, 5.0, 20.0]),
            "ready_window": rng.choice([5.0, 20.0]),
            "ack_window": rng.choice([0.5, 1.0]),
            "join_window": rng.choice([1.0, 5.0]),
            "drain_window": rng.choice([2.0, 5.0]),
        }
        if self.spec.bound:  # about as long as the local phase of a group
            drawn["join_window"] = self._whims.choice([0.05, 0.3, 1.0])
        if self.weather.intervals:
            interval = drawn["join_interval"] = self._whims.choice(self.weather.intervals)
            drawn["apart_window"] = max(3 * interval, self._whims.choice([0.5, 5.0]))
        mine = {name: value for name, value in drawn.items() if name in self.spec.timeouts}
        return {**self.spec.timeouts, **mine}

    # --- processes ---

    def spawn(self, group: Group, rank: int, instance: int, replaces: bool = False) -> Process:
        """Start a process: a new incarnation of (group, rank).

        ``replaces``: it takes the place of a lost process whose group lives; its weights equal
        those of no other process.
        """
        self._incarnations[(group.name, rank)] += 1
        peer = Peer(group.name, rank, self._incarnations[(group.name, rank)])
        store = f"store-{group.name}-{instance}"
        config = Config(
            me=peer,
            world=self.ranks,
            store=store,
            transport=f"http://{peer.group}.{peer.rank}.{peer.inc}",
            pid=1000 + len(self.processes),
            host="sim",
            timeouts=self._timeouts,
            min_groups=self.min_groups,
            expected_groups=self.count_groups,
            min_reductions=self.spec.policies.min_reductions,
            leases=self.spec.is_periodic,
            bound=self.behind,
            quorum=self.spec.policies.quorum,
            on_divergence=self._on_divergence,
            flow=self.spec.bound_to(self.name) if self.name else (),
        )
        participant = self._participant(self._table, config)
        lineage = GENESIS if self._alike else f"fresh:{group.name}:{store}"
        if replaces:
            lineage = f"fresh:{peer}"
        local = participant.initial(lineage, now=self.clock.now)
        process = Process(self, participant, local, Bits(f"{lineage}/{rank}"), group, instance)
        self.processes[peer] = process
        self.history.moves[peer] = []
        if self._trace_dir is not None:
            clocks = (lambda: _WALL + self.clock.now, lambda: self.clock.now)
            trace = self._traces[peer] = TraceWriter(self._trace_dir, peer, clocks)
            trace.write("header", header(self._own_spec, config, local))
        process.start()
        return process

    def live(self) -> list[Process]:
        """Return the processes that have not ended, in the order of their starts."""
        return [p for p in self.processes.values() if p.alive]

    def is_alive(self, peer: Peer) -> bool:
        """Whether the process lives."""
        return peer in self.processes and self.processes[peer].alive

    def kill(self, process: Process) -> None:
        """End a process by SIGKILL, on behalf of the launcher of its group."""
        self._end(process, -9)

    def strike_down(self, process: Process) -> None:
        """End a process by SIGKILL, as a fault."""
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

    # --- what processes ask of the world ---

    def handle(self, process: Process, event: Event) -> list[Effect]:
        """Let the core handle an event, record the move, and return the effects to carry out."""
        seen, now = self.seen, self.clock.now
        before = process.local
        try:
            process.local, out = process.participant.handle(before, event, now)
        except Exception as error:  # noqa: BLE001 - whatever the core raises is a finding
            self.violated("crash", f"{error!r} on {event} in {before.state}", str(process.peer))
        seen.events += 1
        moves = self.history.moves[process.peer]
        place = f"{process.peer}:{len(moves) + 1}"
        moves.append(Move(process.peer, before, event, process.local, out, place, now))
        if self._traces:
            self._traces[process.peer].outcome(before, process.local, event, out, now)
        for step in out.steps:
            seen.rows.add((step.source, id(step.row)))
        if out.verdict == "refused":
            text = f"{process.peer} in {before.state} refused {event}: {out.reason}"
            self.violated("protocol_error", text, place)
        return out.effects

    def tell_beside(self) -> None:
        """Send the new value of the register to the scopes that are bound to this one."""
        for world in self.beside.values():
            if any(e.scope == self.name for e in self.spec.bound_to(world.name)):
                record = self.bus.scope_record()
                assert record is not None, "it was written"
                self.clock.after(self.latency.hop(), None, world.bus.publish, record)

    def count_held(self) -> None:
        """Count a report of a process that another scope holds it back."""
        self.seen.held += 1

    def violated(self, name: str, text: str, place: str = "") -> NoReturn:
        """Record a violation and end the run."""
        self.seen.violations.append(Violation(name, text[:1000], place))
        raise RunEnds

    def note(self, process: Process, name: str, data: dict[str, Any]) -> None:
        """Write a note, which is not an event, into the trace of a process."""
        if self._traces:
            self._traces[process.peer].note(name, data, process.local)

    def consumed(self, process: Process, plan: StartTxn | None, base: int | None) -> None:
        """Let the data loader note the slice of a committed txn, if it has one.

        Args:
            process: The process.
            plan: The txn.
            base: In an asynchronous job, the job's step that the contribution began from.
        """
        if plan is None or (number := plan.slice) is None:
            return
        peer = process.peer
        self.history.consumed.append((peer, plan.token, number, str(peer)))
        self.data_notes.consumed(process, plan, number, base)
        if base is not None:
            self.history.contributed.append((peer, plan.token, base, str(peer)))

    def announce(self, message: BusMessage) -> None:
        """Send a message as the supervisor does; while the bus is away it waits or gives up."""
        delay = self.latency.hop()
        if self.outage_until > self.clock.now:
            if self.rng.random() < 0.5:
                return
            delay += self.outage_until - self.clock.now
        self.clock.after(delay, None, self.bus.publish, message)

    def meeting(self, key: tuple[int, ...], peers: tuple[Peer, ...]) -> Meeting:
        """Return the meeting with that key; the first participant that arrives creates it."""
        if key not in self._meetings:
            self._meetings[key] = Meeting(self, peers)
        return self._meetings[key]

    def lost(self, peer: Peer, era: int | None) -> None:
        """Handle that ``peer`` is gone (None), or has dropped its connections of that era."""
        for key, meeting in list(self._meetings.items())[-8:]:
            if peer in meeting.peers and era in (None, key[0]):
                meeting.lose(peer)

    def told(self) -> History:
        """Return the history in the order in which an audit reads the traces."""
        order = sorted(self.history.moves, key=lambda peer: trace_path(Path(), peer).name)
        consumed = sorted(self.history.consumed, key=lambda told: order.index(told[0]))
        contributed = sorted(self.history.contributed, key=lambda told: order.index(told[0]))
        moves = {peer: self.history.moves[peer] for peer in order}
        return History(moves, consumed, contributed)

    # --- faults ---

    def count(self, kind: str) -> None:
        """Count a fault of this kind."""
        self.seen.faults[kind] += 1

    def strikes(self, kind: str) -> bool:
        """Whether a fault of this kind occurs here and now; it is counted if so."""
        chance = self.weather.chances.get(kind, 0.0)
        if not chance or self.is_calm or self.rng.random() >= chance:
            return False
        self.count(kind)
        return True

    def body_fault(self) -> str | None:
        """Return the fault for a step function that begins now; it is counted when it occurs."""
        if self.is_calm:
            return None
        return self.chaos.body_fault()

    def skips_alone(self, token: Token, members: tuple[Peer, ...]) -> bool:
        """Whether the caller may skip reductions alone; a skip by all would be undetectable."""
        if len(members) == 1 or token in self._skips:
            return False
        self.count("skipped")
        self._skips[token] = -1
        return True

    def skipped_by_all(self, token: Token) -> int:
        """Return the rank number that skips a reduction in this txn, in every group, or -1."""
        if token not in self._skips:
            skips = self.strikes("skipped_by_all")
            self._skips[token] = self.rng.randrange(self.ranks) if skips else -1
        return self._skips[token]

    def all_skip(self, token: Token) -> bool:
        """Whether the user skips this txn on all ranks."""
        if token not in self._all_skip:
            self._all_skip[token] = self.strikes("all_skip")
        return self._all_skip[token]

    def digest_interval(self) -> int:
        """Return the number of steps between two digests that a process takes for its vote."""
        return self._whims.choice([1, 1, 2, 4])

    def apart_for(self, peer: Peer) -> float:
        """Return how long a group of an asynchronous job computes between two synchronizations."""
        if peer.group not in self._pace:
            self._pace[peer.group] = self._whims.choice([1.0, 1.0, 3.0, 10.0])
        return self.latency.compute() * self._pace[peer.group]

    def holds_state(self, without: Group | None = None) -> bool:
        """Whether the job could go on with the whole groups that live.

        ``without``: as if that group were gone.
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
            for rank in range(self.ranks)
        )

    # --- the run ---

    def begin(self) -> None:
        """Start all groups and the faults."""
        for group in self.groups.values():
            group.start()
        self.chaos.begin()

    def is_due(self, since: float) -> bool:
        """Whether the weather has lasted long enough, if the job began at ``since``."""
        return (
            self._step() >= self.target
            or self.seen.events >= _LIMIT_EVENTS
            or self.clock.now >= since + _LIMIT_SECONDS
            or self.hopeless
        )

    def calm_down(self) -> None:
        """Stop the faults."""
        self.is_calm = True
        self.latency.calm_work = 0.4
        self.chaos.end()

    def close(self) -> None:
        """Close the traces. Idempotent."""
        for trace in self._traces.values():
            trace.close()

    def _step(self) -> int:
        return self.bus.head.step if self.bus.head else 0

    def _pass(self, seconds: float) -> None:
        """Let virtual time pass."""
        until, passed = self.clock.now + seconds, [False]
        self.clock.after(seconds, None, passed.__setitem__, 0, True)
        while not passed[0] and self.clock.now <= until:
            self.clock.turn()
            if self.seen.events > _LAST_EVENT:
                self.violated("liveness", f"more than {_LAST_EVENT} events: {self._where()}")

    def bound(self) -> float:
        """Return the virtual seconds within which a calm job must be well again."""
        t = self._timeouts
        windows = ("vote_window", "ready_window", "bus_limit", "join_window")
        waits = sum(t.get(name, 0.0) for name in windows)
        return 2 * waits + 64 * t.get("pause", 0.1) + 20 * t.get("ack_window", 1.0) + 30.0

    def settle(self) -> float | None:
        """Check that the calm job gets well. Returns the time it took; None if it must be lost."""
        begun, deadline = self.clock.now, self.clock.now + self.bound()
        self._pass(1.0)  # messages in transit arrive
        can = self.holds_state()
        self.hopeless = not can
        step = self._step()
        while self.clock.now < deadline:
            if can and self._state_left(begun):
                can = False
                self.hopeless = True
            if any(world._is_lost(begun) for world in self.beside.values()):
                return None  # participants that wait for them wait forever
            if can:
                for world in (self, *self.beside.values()):
                    world._mend_groups()
                if self._step() >= step + 2 and self._is_well():
                    return self.clock.now - begun
            elif not self._in_doubt():
                return None
            self._pass(_LOOK)
        what = "no progress" if can else "in doubt"
        self.violated(
            "liveness",
            f"{what} {self.clock.now - begun:.0f} s after the last fault: {self._where()}",
        )
        return None

    def _is_lost(self, begun: float) -> bool:
        """Whether the scope cannot go on, and must not."""
        self.hopeless |= not self.holds_state()
        return self.hopeless or self._state_left(begun)

    def _state_left(self, begun: float) -> bool:
        """Whether the state is gone because its holders left regularly, or because states differ.

        The holders were asked to leave; or they had waited for others since before the calm began,
        at ``begun``, and the ``quorum`` timer ended the wait.
        """
        head = self.bus.head
        if head is None or self.holds_state():
            return False
        if head.diverged:
            return True
        held = [p for p in self.processes.values() if p.local.lineage == head.lineage]
        return any(p.code == 0 or self._gave_up(p, begun) for p in held)

    def _gave_up(self, process: Process, begun: float) -> bool:
        moves = self.history.moves[process.peer]
        last = next((move for move in moves if move.after.role == "terminal"), None)
        if last is None or not isinstance(last.event, Timer):
            return False
        return last.event.name == "quorum" and last.before.since < begun

    def _mend_groups(self) -> None:
        """Let the operator replace every group that is not whole by now."""
        for group in self.groups.values():
            ended = [p for p in group.processes if not p.alive]
            leaves = bool(group.live) and all(p.code == 0 for p in ended)
            if group.coming or group.whole or leaves or (group.away and self._enough()):
                continue
            group.replace(group.instance)

    def _enough(self) -> bool:
        return sum(g.whole for g in self.groups.values()) >= self.min_groups

    def _is_well(self) -> bool:
        """Whether every live process is a member of the newest epoch, in its txns."""
        head = self.bus.head
        if head is None or any(g.coming for g in self.groups.values()):
            return False
        if self.spec.bound:
            inside = {p for each in head.standing for p in each.entry.peers()}
            return all(p.peer in inside for p in self.live())
        return all(
            p.local.epoch is not None
            and p.local.token.epoch == head.epoch
            and p.local.role in AT_WORK
            for p in self.live()
        )

    def _in_doubt(self) -> bool:
        return any(p.local.vote is not None and p.local.role != "terminal" for p in self.live())

    def ask_all_to_leave(self) -> None:
        """Ask all groups to leave."""
        self.is_ending = True
        self.leavers, groups = self.live(), self.groups
        self.announce(Drain(groups=tuple(groups), by="supervisor"))
        if self.rng.random() < 0.5:  # it also passes a SIGTERM on
            for group in groups.values():
                group.drain(by_signal=True)

    def see_all_leave(self) -> None:
        """Check that all processes end regularly; the request is repeated, as by ``fft drain``."""
        deadline, again = self.clock.now + self.bound(), self.clock.now + _ASKED_AGAIN_S
        while self.live():
            if self.clock.now > deadline:
                self.violated("liveness", f"asked to drain, but still there: {self._where()}")
            if self.clock.now > again:
                again += _ASKED_AGAIN_S
                self.announce(Drain(groups=tuple(self.groups), by="supervisor"))
            self._pass(_LOOK)
        if self.bus.head is not None and self.bus.head.diverged:
            return  # noticed only now; it ends all processes
        # A process that has lost its place in the message order can only be ended, with its group.
        leavers = chain(self.leavers, *(stage.leavers for stage in self.beside.values()))
        deaf = {p.peer.group for p in leavers if p.local.deaf}
        badly = [p for p in self.leavers if p.code != 0 and p.peer.group not in deaf]
        if bad := [f"{p.peer} ({p.code})" for p in badly]:
            self.violated("liveness", f"drained, but not in good order: {', '.join(bad)}")

    def _where(self) -> str:
        head = self.bus.head
        at = f"head {head.kind} {head.epoch}.{head.txn} step {head.step}" if head else "no head"
        states = ", ".join(f"{p.peer} {p.local.state} {p.local.token}" for p in self.live())
        return f"{at}; {states or 'nobody is there'}"


def _holds(process: Process, head: Record) -> bool:
    """Whether the process has the head's state, or can compute it itself."""
    s = process.local
    if s.role == "terminal":
        return False
    if s.lineage == head.lineage:
        return True
    config = process.participant.config
    ways = (committed(s, config).lineage, committed(s, config, skip=True).lineage)
    return s.vote is not None and head.lineage in ways
