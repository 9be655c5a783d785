"""The supervisor's loop: one thread that owns all children of a job.

It starts and ends processes, broadcasts deaths on the bus, reads the traces for the progress of the
job, and writes to the given display. It installs no signal handlers; a handler may call
`Supervisor.interrupt`. It waits only in one `select` with a bound. It carries out commands of
operators that concern processes or services (`fft evict`, `fft dev inject`), and the faults of a
plan that concern its services.

A supervisor with enough spares adopts the groups of a lost host. The `Adopter` reads the bus and
sends requests over it, but starts no process. It owns one thread, because it waits for answers.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from fft.bus.base import BusUnreachable
from fft.bus.token import JobToken
from fft.errors import BusError
from fft.health.hosts import Process
from fft.launch import bad_hosts
from fft.launch.exit_status import DONE, RELEASE_S, ExitStatus
from fft.launch.kept import keep
from fft.launch.services import ServiceError, Services
from fft.launch.supervisor.children import Child, HangReports, Orphans, reap_all
from fft.launch.supervisor.claims import GRACE_S, Loss
from fft.launch.supervisor.config import GroupHeld, RunConfig, SupervisorError
from fft.launch.supervisor.culprit import EVICTED_BY, Diagnoser
from fft.launch.supervisor.ending import Absent, Outage, Standstill, have_all_died, last_on
from fft.launch.supervisor.groups import Group, why_not_started
from fft.launch.supervisor.joined import Joined
from fft.launch.supervisor.judgement import Deaths, JobOutcome, Judgement
from fft.launch.supervisor.launching import Launcher
from fft.launch.supervisor.links import Links, is_anothers, why_refused
from fft.launch.supervisor.losses import ALL_DIED, loss_of, lost_shard
from fft.launch.supervisor.reforming import Reforming, reforms
from fft.launch.supervisor.script import Script
from fft.launch.supervisor.spanning import GroupStart, part_name, part_named
from fft.launch.supervisor.tee import Tee
from fft.launch.verdict import Mistake, Mistakes, cause_of
from fft.messages.commands import (
    BY_SUPERVISOR,
    AnswerKind,
    Check,
    Command,
    Evict,
    Inject,
    encode_command,
    fresh_id,
)
from fft.messages.fault_plans import (
    AnyServiceFault,
    BusRestartFault,
    DrainFault,
    FaultPlan,
    ServiceFault,
)
from fft.messages.protocol import Death, Drain, UnreadableMessage
from fft.operate.drain import STARTED_AGAIN
from fft.protocol.roles import AT_WORK
from fft.trace.display import Display, Row, Snapshot, row_of
from fft.trace.history import Injected
from fft.trace.last_lines import forget_ends, note_ends
from fft.trace.report import save_plan
from fft.trace.tail import JobView, TraceTail
from fft.util.log_sampler import LogSampler

logger = logging.getLogger(__name__)


# --- adopting ---

LOOK_S = 0.5
"""Interval between two reads of the epoch, in seconds."""
_BAD_HOST = 5
"""How many times longer the spares of a bad host wait, so that those of others come first."""
_AGAIN_S = 15.0
"""Time before a group is requested again whose supervisor has answered, in seconds: that supervisor
restarts the group itself."""
_LEND_S = 10.0
"""Time that two groups lack a host each before one lends its host, in seconds. Hosts with spares
take less, and a host that was only cut off often comes back."""
_END_S = 2.0


class Adopted(NamedTuple):
    """A part of a group that was claimed for a lost host."""

    name: str
    lender: str | None = None
    """The group that gives up its part here for this one."""


class Adopter:
    """Claims lost groups for one supervisor, which sets ``room`` and ``here``, and takes
    `claimed`."""

    def __init__(self, config: RunConfig, links: Links, wake: Callable[[], None]) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            wake: Called on the thread after a group was claimed.
        """
        self.room = 0
        """Number of parts of groups that the spares suffice for."""
        self.here: frozenset[str] = frozenset()
        """The groups that run here; a host has at most one part of a group."""
        self._links, self._wake = links, wake
        self._parts = config.parts_of_group
        own = range(config.first_group, config.first_group + config.groups)
        others = [str(n) for n in range(config.groups_in_all) if self._parts > 1 or n not in own]
        is_bad = bad_hosts.is_bad(config.trace_dir)
        self._interval_s = LOOK_S * (_BAD_HOST if is_bad else 1)
        has_spares = config.spares >= config.local_ranks
        self._can = bool(others) and (has_spares or self._parts > 1)
        self._absent = Absent(others)
        self._all = frozenset(others)
        self._missed: frozenset[str] = frozenset()
        self._broken: tuple[frozenset[str], float] = frozenset(), 0.0
        """The groups that lack hosts, and since when, in seconds."""
        self._ask_at: dict[str, float] = {}
        self._claimed: queue.SimpleQueue[Adopted] = queue.SimpleQueue()
        self._troubles = LogSampler()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fft-adopting", daemon=True)

    def start(self) -> None:
        """Start looking for lost groups, if there can be any; the links must be open."""
        if self._can:
            self._thread.start()

    def claimed(self) -> Iterator[Adopted]:
        """Yield the groups claimed since the last call, which the supervisor is to start."""
        with suppress(queue.Empty):
            while True:
                yield self._claimed.get_nowait()

    def close(self) -> None:
        """Stop looking. Idempotent; takes at most 2 s."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        # It loads torch, which takes seconds, and the store of a group that is taken over needs it.
        import fft.bus.tcpserver  # noqa: F401

        while not self._stop.wait(self._interval_s):
            try:
                if not self._is_full():
                    self._look()
                elif self._parts > 1:
                    self._look_to_lend()
            except (BusError, UnreadableMessage, SupervisorError) as error:
                if (count := self._troubles.add("look")) is not None:
                    logger.warning("cannot look for lost groups (%d by now): %s", count, error)

    def _is_full(self) -> bool:
        return self._stop.is_set() or self.room < 1

    def _is_wanted_no_more(self, group: str) -> bool:
        return self._is_full() or group not in self._absent.look(self._links.bus)

    def _look(self) -> None:
        """Claim one part of a group whose holder is silent.

        The group was missing in two looks in a row, or the host of the holder has vanished.
        """
        missing = self._absent.look(self._links.bus)
        again, self._missed = missing & self._missed, missing
        now = time.monotonic()
        for group in sorted(missing - self.here):
            for name in (part_name(group, part) for part in range(self._parts)):
                is_due = self._ask_at.get(name, now) <= now and group in again
                if not is_due and not self._links.claims.is_silent(name):
                    continue
                if self._links.claims.adopt(name, partial(self._is_wanted_no_more, group)):
                    self._claimed.put(Adopted(name))
                    self.room -= 1
                    self._wake()
                    return
                self._ask_at[name] = time.monotonic() + _AGAIN_S

    def _look_to_lend(self) -> None:
        """Claim a lost part of another group, if the group here lacks a host as well.

        So one group is whole again, and not two are broken. It is the one with the fewest lost
        parts, by hosts of the one with the most. Another group must have the state meanwhile.
        """
        claims, now = self._links.claims, time.monotonic()
        self._missed = missing = self._absent.look(self._links.bus)
        names = {g: [part_name(g, part) for part in range(self._parts)] for g in missing}
        lost = {g: [name for name in names[g] if claims.is_silent(name)] for g in names}
        broken = sorted((g for g in lost if lost[g]), key=lambda g: (len(lost[g]), int(g)))
        if frozenset(broken) != self._broken[0]:
            self._broken = frozenset(broken), now
        is_due = now > self._broken[1] + _LEND_S and missing != self._all
        if len(broken) < 2 or not is_due or self.here != {broken[-1]}:
            return
        whole_next, lender = broken[0], broken[-1]
        name = lost[whole_next][0]
        if claims.adopt(name, lambda: whole_next not in self._absent.look(self._links.bus)):
            self._claimed.put(Adopted(name, lender))
            self._wake()


# --- fault plan watch ---
# Decide from the view of a job when its fault plan is finished. Pure: it does no I/O.

_LEAVES_EPOCH = frozenset({"kill", "drain"})


class PlanWatch:
    """Detects that every fault has fired and was recovered from, and that enough steps followed."""

    def __init__(
        self, plan: FaultPlan, groups: list[str], further_steps: int, min_steps: int
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._further = further_steps
        self._min_steps = min_steps
        self._settled_at: int | None = None
        self._done = False

    def unfired(self, view: JobView) -> list[str]:
        """Return the names of the plan's faults that have not fired."""
        return [fault.name for fault in self._plan.faults if fault.name not in view.injected]

    def due(self, view: JobView) -> bool:
        """Return True in the first call that finds the plan finished, else False."""
        if self._done or not self._settled(view):
            return False
        if self._settled_at is None:
            self._settled_at = view.step
        self._done = view.step >= max(self._settled_at + self._further, self._min_steps)
        return self._done

    def unfinished(self, view: JobView) -> str | None:
        """Return why the plan was not finished when the job ended, or None if it was."""
        if self._done:
            return None
        if self.unfired(view):
            return "not all of its faults fired"
        if self._settled_at is None:
            return "the groups were not all back in one epoch after the last fault"
        goal = max(self._settled_at + self._further, self._min_steps)
        return f"the job ended at step {view.step}, before step {goal}"

    def _settled(self, view: JobView) -> bool:
        """Return whether all faults fired and all expected groups were in one epoch since."""
        if self.unfired(view):
            return False
        gone = {
            fault.group
            for fault in self._plan.faults
            if isinstance(fault, DrainFault) and fault.return_after_steps is None
        }
        expected = tuple(sorted(set(self._groups) - gone))
        ranks = [rank for group in expected for rank in view.of(group)]
        epochs: dict[int, set[int]] = {}
        for (group, number), rank in view.ranks.items():
            if group in expected:  # ranks with the same number are in the same scope
                epochs.setdefault(number, set()).add(rank.epoch)
        if not epochs or any(not view.of(group) for group in expected):
            return False
        if any(rank.role == "apart" for rank in ranks):  # a local group is often in no epoch
            together = all(rank.role not in ("leaving", "terminal") for rank in ranks)
        else:
            together = all(len(of_one) == 1 for of_one in epochs.values()) and all(
                rank.role in AT_WORK and rank.members == expected for rank in ranks
            )
        step = min(rank.step for rank in ranks)
        return together and all(
            _recovered(
                injected, step, min(epochs.get(injected.rank) or min(epochs.values(), key=min))
            )
            for injected in view.injected.values()
        )


def _recovered(injected: Injected, step: int, epoch: int) -> bool:
    """Return whether a step was committed since, and a group that left has returned."""
    is_back = epoch > injected.epoch or injected.kind not in _LEAVES_EPOCH
    return step > injected.step and is_back


def return_step(plan: FaultPlan, group: str, view: JobView, seen: set[str]) -> int | None:
    """Return the step of the job at which a drained group is to return.

    Args:
        seen: Names of the planned drains that were handled; this call adds to them.

    Returns:
        The step, or None if no new planned drain took the group away, or if it stays away.
    """
    step = None
    for fault in plan.faults:
        if not isinstance(fault, DrainFault) or fault.group != group:
            continue
        if fault.name in view.injected and fault.name not in seen:
            seen.add(fault.name)
            left_at = max((rank.step for rank in view.of(group)), default=view.step)
            if fault.return_after_steps is not None:
                step = left_at + fault.return_after_steps
    return step


# --- screen ---
# The contents of the screen for a job: its groups, and the faults of its plan.


def snapshot(groups: Iterable[Group], view: JobView, began: float, plan: FaultPlan) -> Snapshot:
    """Return the present state of the job.

    ``began`` is its start on the monotonic clock, in seconds.
    """
    rows = [_row(group, view) for group in groups]
    names = {fault.name for fault in plan.faults}
    elapsed, fired = time.monotonic() - began, len(names & view.injected.keys())
    return Snapshot(elapsed, rows, fired, len(names), view.course, time.time())


def waits_for(groups: Iterable[Group], view: JobView) -> str:
    """Describe in one line what each group does, and the newest trouble of its ranks."""
    found = []
    for row in (_row(group, view) for group in groups):
        why = row.trouble or row.fault
        found.append(
            f"group {row.group}: {row.doing}, {row.state}"
            + (f" (last fault: {why})" if why else "")
        )
    return "; ".join(found)


def _row(group: Group, view: JobView) -> Row:
    """Return the group's row, which leaves out the last acts of dead incarnations."""
    is_old = group.living and view.incs(group.name) == group.known_incs
    return Row(group.name, group.doing()) if is_old else row_of(view, group.name, group.doing())


_POLL_S = 0.2  # maximum age of the view of the traces; `select` cannot wait for files
_PART_S = 0.1  # interval of checks whether part 0 of a group has begun on its host
_FOLLOW_S = 0.5  # interval of reads of the starts of groups that other hosts have parts of
_OVER_S = 0.5  # interval between checks whether the job is over that a group is waiting to join
_BUS_LOST_S = 60.0  # maximum duration of a bus outage
_BUS_RETRY_S = 2.0  # pause before a group is started that could not be started without the bus
_OUTLIVES_S = 5.0  # time for a wrapper script to end, or to start another trainer, after its one
_LEAVE_S = 5.0  # time to leave in good order a job that is over or cannot continue


@dataclass
class Ending:
    """How far a job has come to its end."""

    began: float = field(default_factory=time.monotonic)
    """Start of the job on the monotonic clock, in seconds."""
    interrupted: bool = False
    drain_until: float | None = None
    """End of the time to drain, if the job is being drained."""
    forgot: bool = False
    """The bus has lost the job's registers, so no process can continue with it."""
    lost: str | None = None
    """The reason why no process has the state of the job; a checkpoint may have it."""
    in_vain: str | None = None
    """The reason why the job is being ended before its work is done."""
    over: bool = False
    """All groups that had the state have left or ended well, so none is restarted."""
    look_over_at: float = 0.0
    """Time of the next look whether the job is over."""
    outage: Outage = field(default_factory=Outage)
    """The current outage of the bus."""
    standstill: Standstill = field(default_factory=Standstill)

    @property
    def has_begun(self) -> bool:
        """Whether no further process may be started."""
        return self.drain_until is not None or self.forgot or self.over


class PlannedFaults:
    """The fault plan of a job, as far as the supervisor takes part in it."""

    def __init__(self, config: RunConfig, plan: FaultPlan, groups: list[str]) -> None:
        self.plan = plan
        self.pending = [fault for fault in plan.faults if isinstance(fault, ServiceFault)]
        """Faults of services that the supervisor has yet to carry out."""
        self.drains_seen: set[str] = set()
        more, least = config.stop_after_plan, config.min_steps
        self.watch = None if more is None else PlanWatch(plan, groups, more, least)

    def are_over(self, view: JobView) -> bool:
        """Return True in the first call that finds the plan finished, if the job is to end then."""
        return self.watch is not None and self.watch.due(view)


class Waits:
    """The events that end a wait of the supervisor: ends of children, data, wake-ups."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._dying: deque[Child] = deque()
        self._out, self._in = socket.socketpair()
        self._in.setblocking(False)
        self.register(self._out)

    def register(self, file: socket.socket | Tee) -> None:
        """Wait for ``file``, too."""
        self._selector.register(file, selectors.EVENT_READ)

    def unregister(self, fd: int) -> None:
        """Wait no longer for a file or a child."""
        self._selector.unregister(fd)

    def look_after(self, child: Child) -> None:
        """Wait for the end of a child; idempotent."""
        if (known := self._selector.get_map().get(child.fd)) is not None:
            if known.data is child:  # registered when it was a spare
                return
            self.unregister(child.fd)  # a reaped spare had the same descriptor number
        self._selector.register(child.fd, selectors.EVENT_READ, child)
        child.watch(partial(self._is_dying, child))

    def _is_dying(self, child: Child) -> None:
        """Queue a child that is being killed but still exists; runs on the death mutex's thread."""
        self._dying.append(child)
        self.wake(b".")

    def wake(self, word: bytes) -> None:
        """End the current or the next `select`. Any thread, and signal handlers."""
        with suppress(OSError):  # the socket is full, so the loop wakes anyway, or closed
            self._in.send(word)

    def select(self, timeout: float) -> list[selectors.SelectorKey]:
        """Return what has happened, waiting for at most ``timeout`` seconds."""
        return [key for key, _ in self._selector.select(timeout)]

    def taken_dying(self) -> Iterator[Child]:
        """Yield the children that are being killed since the last call."""
        while self._dying:
            yield self._dying.popleft()

    def interrupts(self) -> int:
        """Take the wake-ups and return how many of them were interrupts."""
        return self._out.recv(64).count(b"!")

    def close(self) -> None:
        """Release the descriptors."""
        self._selector.close()
        for end in (self._in, self._out):
            end.close()


class Supervisor:
    """Runs one job to its end. Call `run` once, on a thread that lives as long as the job."""

    def __init__(
        self,
        config: RunConfig,
        plan: FaultPlan,
        services: Services | Joined,
        display: Display | None = None,
        token: JobToken | None = None,
        script: Script | None = None,
    ) -> None:
        """Check the configuration and prepare the job.

        Args:
            config: The job to run.
            plan: The fault plan, which may be empty.
            services: The bus and lighthouse.
            display: Shows the progress of the job.
            token: Token of the job, which children receive in their environment.
            script: Starts the processes; later starts of the job use it, too.

        Raises:
            SupervisorError: The job cannot be started as asked.
        """
        config.check(joins=isinstance(services, Joined))
        self._config, self._services, self._display = config, services, display
        first = config.first_group
        names = [str(number) for number in range(first, first + config.groups)]
        self._groups = {name: Group(name, config.ranks, config.local_ranks) for name in names}
        self._faults = PlannedFaults(config, plan, names)
        self._ending = Ending()
        self._told: set[str] = set()
        """Ids of commands that this supervisor sent itself."""
        self._too_slow: set[str] = set()
        """Slow ranks whose groups were restarted; a second restart would not help either."""
        self._starts_at = 0.0
        """Time of the next read of the starts of groups on several hosts, in seconds."""
        self._waits = Waits()
        serves, wake = not isinstance(services, Joined), partial(self._waits.wake, b"?")
        self._links = Links(token, config.host_limit, wake, serves)
        self._mistakes = Mistakes(names, config.groups_in_all)
        self._deaths = Deaths()
        self._orphans = Orphans()
        self._judgement = Judgement(here=self._groups.values(), plan=plan, has_services=serves)
        self._diagnoser = Diagnoser(
            services.bus_url, token, config.trace_dir, config.diagnose_after
        )
        self._hangs = HangReports()
        self._waits.register(self._hangs.socket)
        self._launcher = Launcher(config, services, token, self._hangs.fd, script)
        self._waits.register(self._launcher.tee)
        self._reforming = Reforming(config, self._launcher)
        self._adopter = Adopter(config, self._links, wake)

    # --- from outside ------------------------------------------------------------------

    def interrupt(self) -> None:
        """Drain the job; a second call kills it. Safe on any thread and in signal handlers."""
        self._ending.interrupted = True
        self._waits.wake(b"!")

    def run(self) -> JobOutcome:
        """Start all groups, supervise them until the job has ended, and judge it.

        Raises:
            SupervisorError: The job cannot be started as asked.
            BusError: The bus cannot be reached at the start.
        """
        self._config.make_place()
        save_plan(self._config.trace_dir, self._faults.plan)
        self._mark("here", "")
        if self._judgement.has_services:
            forget_ends(self._config.trace_dir)
        self._tail = TraceTail(self._config.trace_dir, self._config.resume_step or 0)
        try:
            self._links.open(self._services.bus_url)
            stops, takes_over = (lambda: self._ending.interrupted), self._config.take_over
            self._links.claims.begin(self._config.resume_step or 0)
            if self._config.parts_of_group == 1:
                self._links.claims.take(self._groups, takes_over, stops)
            else:
                self._take_parts(stops)
            if self._ending.interrupted:
                text = "interrupted before anything was started"
                return self._ended(JobOutcome(True, (text,), status=ExitStatus.DRAINED))
            self._launcher.open()
            for group in self._groups.values():
                self._start(group)
            self._adopter.start()
            while self._going_on():
                self._turn()
            self._links.progress.catch_up()
            self._look()
            view = self._tail.view
            end, watch = self._judgement, self._faults.watch
            end.unfinished = None if watch is None else watch.unfinished(view)
            end.is_over, end.others = self._ending.over, self._how_others_left()
            end.head = self._links.head()
            outcome = end.outcome(view)
            lost = self._ending.lost if self._config.can_resume else None
            if (about := self._deaths.about(view)) and not (outcome.ok or end.hopeless):
                outcome = replace(outcome, lines=(about, *outcome.lines))
            deaths = self._deaths.signatures(view) if lost else frozenset()
            fired = frozenset(view.injected)
            return self._ended(replace(outcome, lost=lost, fired=fired, deaths=deaths))
        finally:
            self._end()

    def _take_parts(self, is_asked: Callable[[], bool]) -> None:
        """Claim a part of each group, which other hosts have the rest of.

        If a group has lent a host meanwhile, its host takes a part of the lender when it is back.

        Raises:
            GroupHeld: All parts of a group have other supervisors, and no other group lacks one.
        """
        claims, parts = self._links.claims, self._config.parts_of_group
        for group in list(self._groups.values()):
            try:
                has_copies = partial(self._config.has_copies_of, group.name)
                group.part = claims.take_part(group.name, parts, is_asked, has_copies) or 0
            except GroupHeld:
                all_groups = map(str, range(self._config.groups_in_all))
                others = [part_name(g, p) for g in all_groups for p in range(parts)]
                if (found := claims.take_lost(others, is_asked)) is None:
                    raise
                del self._groups[group.name]
                name, part = part_named(found)
                logger.warning("group %s needs no host; this one takes group %s", group.name, found)
                self._groups[name] = Group(name, group.world, group.local, part)

    def _ended(self, outcome: JobOutcome) -> JobOutcome:
        """Publish the exit status for `fft launch outcome`, and the verdict for `fft report`."""
        keep(self._config.trace_dir, outcome.exit_status, outcome.lines)
        self._links.claims.status = int(outcome.exit_status)
        return outcome

    # --- one turn of the loop ----------------------------------------------------------

    def _going_on(self) -> bool:
        groups = self._groups.values()
        waits = self._config.groups == 0 and not self._ending.has_begun  # a host of spares only
        return waits or any(group.living or group.restart_at is not None for group in groups)

    def _turn(self) -> None:
        now = time.monotonic()
        groups = self._groups.values()
        due = [at for group in groups for at in (group.restart_at, group.kill_at) if at is not None]
        timeout = max(0.0, min([_POLL_S, *(at - now for at in due)]))
        found = self._waits.select(timeout)
        for child in self._waits.taken_dying():
            if child.alive:
                self._tell_dead(child, "it was killed, or ended without leaving", by_itself=True)
        for key in found:
            if isinstance(key.data, Child):
                self._on_death(key.data)
            elif key.fileobj is self._launcher.tee:
                self._show_output()
            elif key.fileobj is self._hangs.socket:
                for message in self._hangs.take(self._living()):
                    self._deaths.suspected[message.pid] = message.cause
                    self._links.broadcast(message)
            else:
                self._on_interrupts(self._waits.interrupts())
        self._obey()
        self._follow_starts()
        for rank in self._links.progress.too_slow(self._config.evict_stragglers) - self._too_slow:
            self._restart_straggler(rank)
        self._look()
        for group in self._groups.values():
            if group.restart_at is not None and group.restart_at <= time.monotonic():
                self._start(group)
        for spare in [] if self._ending.has_begun else self._reforming.spares.started():
            self._waits.look_after(spare)
        self._adopt()
        self._check_deadlines()
        self._orphans.reap(self._own_pids())
        self._links.beat_for(tuple(Process(c.group, c.rank, c.pid) for c in self._living()))

    def _own_pids(self) -> set[int]:
        own = {child.pid for child in (*self._living(), *self._reforming.spares)}
        server = self._launcher.script.server_pid
        return own if server is None else own | {server}

    def _poll(self, is_sure: bool = False) -> JobView:
        """Return the job's view by its traces; with gaps or ``is_sure`` also by its registers."""
        view = self._tail.poll()
        self._links.take_in(view, is_sure)
        return view

    def _report_standstill(self, view: JobView) -> None:
        """Log what the groups wait for, if the job makes no progress."""
        has_begun = view.committed or any(r.role != "joining" for r in view.ranks.values())
        seconds = self._ending.standstill.lasts(view.progress if has_begun else None)
        if not self._groups or seconds is None:
            return
        what = waits_for(self._groups.values(), view)
        if has_begun:
            logger.warning("no commit for %.0f s, since step %d. %s", seconds, view.step, what)
        else:
            logger.info("the job has been starting for %.0f s. %s", seconds, what)

    def _look(self) -> None:
        """Act on the traces: progress, drained groups that return, the end of the plan."""
        view = self._poll()
        for fault in [fault for fault in self._faults.pending if view.step >= fault.step]:
            self._faults.pending.remove(fault)
            self._restart_service(fault)
        for group in self._groups.values():
            if group.return_at_step is not None and view.step >= group.return_at_step:
                group.return_at_step, group.restart_at = None, time.monotonic()
        self._look_for_early_ends(view)
        self._look_for_wrappers(view)
        self._deaths.warn_of_idle(self._groups.values(), view)
        self._report_standstill(view)
        if self._ending.drain_until is None:
            going = [g for g in self._groups.values() if g.living or g.restart_at is not None]
            self._diagnoser.look(view.course.run, len(going) - self._config.min_groups)
            self._look_whether_over()
        if self._ending.drain_until is None and self._faults.are_over(view):
            self._judgement.is_plan_through = True
            self._drain("the fault plan is finished", forward=False)
        if self._display is not None:
            began, plan = self._ending.began, self._faults.plan
            self._display.show(snapshot(self._groups.values(), view, began, plan))

    def _show_output(self) -> None:
        """Show what chosen ranks have printed."""
        for line in self._launcher.tee.lines():
            if self._display is not None:
                self._display.write(line)

    def _check_deadlines(self) -> None:
        now, limit, until = time.monotonic(), self._config.timeout, self._ending.drain_until
        if limit is not None and now > self._ending.began + limit:
            self._kill_all(f"the job had not finished within --timeout {limit:g} s")
        elif until is not None and now > until and self._ending.in_vain:
            self._kill(self._living(), self._ending.in_vain)
        elif until is not None and now > until:
            seconds = self._config.drain_timeout
            self._kill_all(f"the job had not drained {seconds:g} s after it was asked to")
        for child, text in self._reforming.late(self._groups, self._tail.view):
            self._kill([child], text)
        for group in self._groups.values():
            if group.kill_at is not None and now >= group.kill_at:
                group.kill_at = None
                over = "the job is over" if self._ending.over else "it was evicted"
                self._kill(group.living, over)

    def _has_committed(self, group: Group) -> bool:
        """Return whether the group has committed a step since its last start."""
        return self._tail.view.committed_since(group.name, group.known_incs)

    def _living(self) -> list[Child]:
        return [child for group in self._groups.values() for child in group.living]

    # --- starting ----------------------------------------------------------------------

    def _start(self, group: Group) -> None:
        """Start the group, or log why that fails and try again later.

        Raises:
            SupervisorError: Its first start fails, which ends the job.
        """
        group.known_incs = self._tail.view.incs(group.name)
        is_first = group.starts == 0
        is_new = group.is_adopted and is_first
        spare = self._reforming.spares.take if is_new else lambda env, log: None
        try:
            if not self._may_start(group) or (begun := self._begun(group)) is None:
                return
            for rank in group.ranks:
                self._links.forget_exit(group.name, rank)
            children = self._launcher.start_group(group, begun, spare)
        except (OSError, BusError, SupervisorError) as error:
            text = why_not_started(group, error)
            if is_first and not group.is_adopted:
                raise SupervisorError(text) from error
            logger.error("%s", text)
            self._start_later(group, text)
            return
        for child in children:
            self._waits.look_after(child)

    def _begun(self, group: Group) -> GroupStart | None:
        """Begin the next start of the group, or take its part in one that other hosts have begun.

        Returns:
            The start, or None if the group is to be started later, because part 0 has not begun.

        Raises:
            BusError: The store cannot be started, or the bus cannot be reached.
        """
        serve = partial(group.serve, self._links.address)
        if not group.spans:
            home = serve()
            return GroupStart(group.starts + 1, home, home)
        is_in_vain = group.is_successor and not self._has_committed(group)
        found = self._links.starts.begin(group.name, group.part, serve, is_in_vain)
        if found is None:
            group.restart_at = time.monotonic() + _PART_S
            return None
        begun, group.is_successor = found
        return begun

    def _follow_starts(self) -> None:
        """Follow the starts of groups that other hosts have parts of."""
        now = time.monotonic()
        groups = [group for group in self._groups.values() if group.spans and group.living]
        if now < self._starts_at or not groups or self._ending.has_begun:
            return
        self._starts_at = now + _FOLLOW_S
        try:
            for group in groups:
                self._follow(group)
            self._ending.outage.answered()
        except (BusError, SupervisorError) as error:
            if not self._ending.outage.has_begun:
                logger.warning("cannot see the starts of groups on other hosts: %s", error)
            if isinstance(error, BusUnreachable):
                self._on_bus_failure(error)

    def _follow(self, group: Group) -> None:
        begun = self._links.starts.read(group.name)
        if begun is None or not group.is_to_go_on:
            return
        if begun.number != group.begun.number:
            text = "the group is started again on all of its hosts"
            logger.warning("group %s: %s", group.name, text)
            group.is_superseded = True
            self._kill(group.living, text)
            return
        group.begun = begun
        may_reform = self._config.reform and reforms(group, self._tail.view)
        if begun.reforms != may_reform and (begun.reforms or self._has_committed(group)):
            self._links.starts.note(group.name, begun.number, may_reform)

    def _may_start(self, group: Group) -> bool:
        """Return whether this supervisor still holds ``group``.

        If another one has taken the group over, hand it over. If the bus cannot be reached, try
        again later; that is no restart of the group.

        Raises:
            BusError: The bus fails in another way, or at the first start.
        """
        try:
            is_ours = self._links.claims.keeps(group.claim)
        except BusUnreachable as error:
            if group.starts == 0 and not group.is_adopted:
                raise
            logger.warning("group %s waits for the bus: %s", group.name, error)
            group.restart_at = time.monotonic() + _BUS_RETRY_S
            self._on_bus_failure(error)
            return False
        self._ending.outage.answered()
        if not is_ours:
            self._obey()  # hands the group over
        return is_ours

    def _on_bus_failure(self, error: BusUnreachable) -> None:
        """End this part of the job if the bus has been out of reach for too long."""
        if self._ending.outage.exceeds(_BUS_LOST_S) and self._ending.drain_until is None:
            self._judgement.bus_is_lost = True
            ended = self._judgement.what_ended
            text = f"the bus was out of reach for {_BUS_LOST_S:g} s and more, so {ended} was ended"
            self._judgement.problems.append(f"{text}; start it again. Last error: {error}")
            self._end_in_vain(text, in_order=True)

    def _adopt(self) -> None:
        """Start the groups that were adopted from lost hosts, using spares."""
        ready = 0 if self._ending.has_begun else self._reforming.spares.ready
        self._adopter.here = frozenset(n for n, g in self._groups.items() if g.living)
        self._adopter.room = ready // self._config.local_ranks
        for name, lender in self._adopter.claimed():
            which, part = part_named(name)
            if self._ending.has_begun or (which in self._groups and self._groups[which].living):
                continue  # the claim is released at the end
            if lender is not None:
                self._lend(self._groups[lender], which)
            form = self._config.ranks, self._config.local_ranks
            group = self._groups[which] = Group(which, *form, part, is_adopted=True)
            self._judgement.remarks.append(f"group {name} was taken over: its host was lost")
            text = f"group {name} was silent, and was taken over by {bad_hosts.own_name()}"
            if host := self._links.claims.lost_hosts.get(name):
                self._mark("lost", text, host)
            self._start(group)

    def _lend(self, group: Group, to: str) -> None:
        """Give up the part of ``group`` here, so that this host has one of another group."""
        by = f"group {to}, because both had lost hosts, and this host makes that one whole"
        self._hand_over(group, Loss(group.claim, by, None))
        try:
            self._links.claims.release(group.claim)
        except BusError as error:
            logger.error("could not release group %s: %s", group.claim, error)

    # --- deaths ------------------------------------------------------------------------

    def _on_death(self, child: Child) -> None:
        """Report the death of a child first, then replace it or end the rest of its group."""
        if not child.alive:
            return
        code = child.exit_code()
        if code != 0:
            self._tell_dead(child, cause_of(code), by_itself=True)
        self._waits.unregister(child.fd)
        child.reap()
        if child.group not in self._groups:
            self._reforming.spares.ended(child)
            return
        group = self._groups[child.group]
        self._collect(child, group)
        child.left_early = code == 0 and self._deaths.is_early(child, self._groups)
        if child.left_early:
            self._tell_dead(child, cause_of(code), by_itself=True)
        self._links.publish_exit(child)
        if child.has_failed and not self._ending.has_begun:
            view = self._poll()
            if self._deaths.tell(child, group, view):
                who = f"group {group.name} rank {child.rank}"
                self._mark("lost", f"{who} died by {cause_of(code)} at step {view.step}")
            if (verdict := self._deaths.verdict(view)) is not None:
                self._judgement.problems.append(
                    f"{verdict}; {self._judgement.what_ended} was ended"
                )
                self._judgement.hopeless = True
                again = any(g.starts > 1 for g in self._groups.values())
                self._judgement.no_progress = again and not self._deaths.is_mismatch(view)
                self._end_in_vain("ranks die at the same step again", in_order=False)
        has_mates = group.living or group.spans
        if code < 0 and child.is_replaced and has_mates and self._replace(group, child):
            return
        if child.has_failed:
            self._end_mates(child, group)
        if not group.living:
            self._on_group_down(group)

    def _mark(self, kind: bad_hosts.Kind, why: str, host: str | None = None) -> None:
        """Remember that this host, or another one, takes part or had a loss."""
        if self._config.has_other_hosts:
            bad_hosts.mark(self._config.trace_dir, host or bad_hosts.own_name(), kind, why)

    def _collect(self, child: Child, group: Group) -> None:
        """Derive how a child has ended, by its register, or by the view if it was killed."""
        seen = self._poll().since(group.name, group.incs_before).get(child.rank)
        child.collected(
            self._links.read_exit(child),
            step=0 if seen is None else seen.step,
            took_part=seen is not None and seen.role != "joining",
            replaces=child.rank in group.replaced,
        )

    def _end_mates(self, lost: Child, group: Group) -> None:
        """End the rest of the group of a rank that was lost and is not replaced."""
        for mate in group.living:
            # it may just have died by itself; then report that cause to its peers
            died = mate.dies_within(0)
            ended = f"SIGKILL by the supervisor, because rank {lost.rank} died"
            self._tell_dead(mate, cause_of(mate.exit_code()) if died else ended)
            mate.signal(signal.SIGKILL)

    def _look_for_early_ends(self, view: JobView) -> None:
        """Restart groups with a rank that left the loop while other groups continue."""
        for group in self._groups.values():
            early = [child for child in group.children if self._deaths.has_been_left(child, view)]
            if not early or group.evicted or not group.is_to_go_on or self._ending.has_begun:
                continue
            for child in early:
                child.left_early = True
                self._deaths.tell(child, group, view)
            if group.living:
                self._end_mates(early[0], group)
            elif group.restart_at is None:
                self._on_group_down(group)

    def _look_for_wrappers(self, view: JobView) -> None:
        """End scripts that still run although the trainer that they have started has ended."""
        for group in self._groups.values():
            ranks = view.since(group.name, group.incs_before)
            for child in group.living:
                seen = ranks.get(child.rank)
                seconds = 0.0 if seen is None else child.outlives(seen.pid)
                is_known = child.was_killed or child.trainer.has_left
                if seen is None or seconds < _OUTLIVES_S or is_known:
                    continue
                written, limit = self._links.read_exit(child), self._config.drain_timeout
                has_left = written is not None and written.has_left
                if has_left and seconds < limit and not self._ending.has_begun:
                    continue  # it may have work to do after the last step
                text = "after its last step" if has_left else f"at step {seen.step}, before the end"
                logger.warning(
                    "group %s rank %d: the trainer (pid %d) ended %s, and the script that started "
                    "it (pid %d) still runs, so it is ended. Log: %s",
                    *(group.name, child.rank, seen.pid, text, child.pid, child.log),
                )
                if not has_left:
                    cause = f"pid {seen.pid} ended, and its wrapper script did not"
                    self._tell_dead(child, cause, by_itself=True)
                    child.signal(signal.SIGKILL)
                else:
                    child.trainer.has_left = True
                    group.ask_to_leave(_LEAVE_S, [child])

    def _tell_dead(self, child: Child, cause: str, by_itself: bool = False) -> None:
        """Broadcast a death once; ``by_itself`` means that this supervisor did not end it."""
        if child.told_dead or child.group not in self._groups:
            return
        child.told_dead = True
        goes_on = by_itself and not self._ending.has_begun
        child.is_replaced = goes_on and self._may_replace(self._groups[child.group], child)
        who = (child.group, child.rank, child.pid, socket.gethostname(), "supervisor", cause)
        self._links.broadcast(Death(*who, replaced=self._reforming.is_waited_for(child)))

    def _may_replace(self, group: Group, lost: Child) -> bool:
        """Return whether ``lost`` may be replaced. A no is checked with the newest traces."""
        if group.world == 1 or not self._config.reform:
            return False
        groups = self._groups.values()
        return self._reforming.may_replace(
            group, lost, self._tail.view, groups
        ) or self._reforming.may_replace(group, lost, self._tail.poll(), groups)

    def _replace(self, group: Group, lost: Child) -> bool:
        """Start a successor of ``lost``; return whether there is one."""
        self._links.forget_exit(group.name, lost.rank)
        ends = self._ending.drain_until is not None  # a drain may have begun since the report
        child = None if ends else self._reforming.replace(group, lost, self._tail.view)
        if child is not None:
            self._waits.look_after(child)
        return child is not None

    def _on_group_down(self, group: Group) -> None:
        """Decide whether a group that has no rank left is restarted."""
        group.close()
        view = self._poll(is_sure=True)
        self._forget_mistakes()
        if self._has_committed(group):
            group.restarts.progressed()
        if group.loss is not None:
            self._links.claims.yielded(group.loss)
        if group.eviction is not None:
            self._finish_eviction(group, group.eviction)
            return
        if self._ending.has_begun or group.evicted:
            return
        if group.is_superseded:
            group.is_superseded, group.restart_at = False, time.monotonic()
            return
        if group.finished:
            step = return_step(self._faults.plan, group.name, view, self._faults.drains_seen)
            group.return_at_step = step or group.return_at_step
            return
        words = None if group.came_too_late and self._links.has_stages else group.error_place
        mistake = self._mistakes.ended(group.name, words, view.committed)
        saves = self._config.can_resume and self._config.checkpoint is not None
        saves &= not self._config.has_other_hosts
        if mistake is None or not mistake.is_for_good(saves, self._config.groups_in_all):
            self._look_whether_state_is_lost(group)
            if self._ending.drain_until is not None:
                return
        if mistake is not None:
            if mistake.may_be_the_states(self._config.is_soon(view.step)):
                begun_at = self._config.resume_step
                self._ending.lost = f"the job has ended soon after step {begun_at}"
            self._on_mistake(group, mistake)
            return
        self._look_whether_over(at_once=True)
        if self._ending.has_begun:
            return
        if group.came_too_late and self._links.has_stages:
            self._judgement.remarks.append(group.why_not_back)
            self._give_up(group)
        else:
            self._start_later(group, f"group {group.name} was given up after its last restart")

    def _start_later(self, group: Group, problem: str) -> None:
        """Restart the group after a pause, or give it up if it has no restart left."""
        if not group.restarts.are_used_up(self._config.max_restarts, group.ended_by_error):
            group.start_later()
            return
        if group.restarts.in_a_row:
            group.stuck_at = self._tail.view.progress
        self._give_up(group, problem)

    def _look_whether_state_is_lost(self, group: Group) -> None:
        """End the job if, after the end of ``group``, no process has or can get the state."""
        loss = loss_of(group, self._groups.values(), self._config, self._tail.view)
        if loss is None:
            self._say_what_nobody_holds(group)
            return
        if loss == ALL_DIED:  # they may have died after the last step
            self._look_whether_over(at_once=True)
        if not self._ending.has_begun:
            self._ending.lost = loss
            self._end_in_vain(loss, in_order=not self._config.can_resume)

    def _say_what_nobody_holds(self, group: Group) -> None:
        """Log that ``group`` is restarted although no process can give it the state."""
        view, groups = self._tail.view, self._groups.values()
        is_whole = self._config.parts_in_all == len(groups)
        if not is_whole or not view.committed or any(each.finished for each in groups):
            return
        if (rank := lost_shard(groups, view)) is not None:
            logger.warning(
                "no living process has the state of rank %d at step %d: group %s is started again, "
                "but unless the script loads that state itself, the job ends with NoState; give "
                "--checkpoint to go on from a checkpoint",
                *(rank, view.step, group.name),
            )

    def _end_in_vain(self, reason: str, in_order: bool) -> None:
        """End the job, which cannot continue; kill processes that do not leave in time.

        Args:
            in_order: Give processes time to leave after a commit.
        """
        self._ending.in_vain = reason
        self._drain(reason, forward=in_order, within=_LEAVE_S if in_order else 0.0)

    def _give_up(self, group: Group, *problem: str) -> None:
        group.given_up = True
        self._judgement.problems.extend(problem)
        self._judgement.given_up.extend(problem)
        given_up = sum(other.given_up for other in self._groups.values())
        needed = self._tail.view.min_groups
        if 0 < self._config.groups_in_all - given_up < needed:
            gone = ", ".join(name for name, other in self._groups.items() if other.given_up)
            reason = f"group {gone} cannot be brought back, and {needed} groups are needed"
            self._judgement.problems.append(
                f"{reason} (min_replica_size of the script): the job was ended. Correct the cause "
                "of the group's deaths, raise --max-restarts, or lower min_replica_size"
            )
            self._end_in_vain(reason, in_order=True)
        elif self._faults.watch or len(self._groups) - given_up < self._config.min_groups:
            self._drain(f"group {group.name} cannot be brought back", forward=True)

    def _forget_mistakes(self) -> None:
        for group in self._groups.values():
            if group.living and self._has_committed(group):
                self._mistakes.progressed(group.name)

    def _on_mistake(self, group: Group, mistake: Mistake) -> None:
        """End the group or the job, because a restart would not correct the script's mistake."""
        text = self._judgement.shown_mistake(group, mistake)
        if mistake.ends == "group":
            self._give_up(group, f"{text}group {group.name} was given up")
            self._judgement.hopeless = self._ending.in_vain is not None
            return
        self._judgement.problems.append(f"{text}{self._judgement.what_ended} was ended")
        self._judgement.hopeless = True
        self._end_in_vain("the script has a mistake", in_order=self._tail.view.committed)

    # --- ending ------------------------------------------------------------------------

    def _look_whether_over(self, at_once: bool = False) -> None:
        """End waiting processes if the job is over, because its groups will not return.

        Args:
            at_once: Look even if no group waits or the last look was recent.
        """
        now = time.monotonic()
        waiting = any(
            (group.living or (group.spans and group.restart_at is not None))
            and not self._has_committed(group)
            for group in self._groups.values()
        )
        waiting |= self._config.groups == 0
        if self._ending.over or not (waiting or at_once):
            return
        if now < self._ending.look_over_at and not at_once:
            return
        self._ending.look_over_at = now + _OVER_S
        try:
            last = last_on(socket.gethostname(), self._links.scopes())
            have_all_ended = self._config.groups == 0 and self._have_others_ended()
            is_lost = last is None and self._have_all_died()
            self._ending.outage.answered()
        except (BusError, UnreadableMessage, SupervisorError) as error:
            if not self._ending.outage.has_begun:
                logger.warning("cannot see whether the job is over: %s", error)
            if isinstance(error, BusUnreachable):
                self._on_bus_failure(error)
            return
        if last is not None:
            self._end_who_waits(inside=last)
        elif have_all_ended or self._judgement.have_all_finished(
            self._tail.view, self._config.parts_in_all
        ):
            self._end_who_waits(set())
        elif is_lost:
            self._ending.lost = ALL_DIED
            self._end_in_vain(ALL_DIED, in_order=False)

    def _have_all_died(self) -> bool:
        """Return whether a job of several hosts can resume, and no process has its state.

        Raises BusError, UnreadableMessage, SupervisorError.
        """
        if not (self._config.has_other_hosts and self._config.can_resume):
            return False
        claims, local = self._links.claims, self._config.local_ranks
        return have_all_died(
            self._links.scopes(),
            lambda group, rank: claims.is_silent(part_name(group, rank // local)),
        )

    def _have_others_ended(self) -> bool:
        """Return whether no group runs here, and all supervisors of the other groups have ended.

        Raises:
            BusError: The bus cannot be reached.
            SupervisorError: It cannot be read which supervisors there are.
        """
        if any(group.living or group.restart_at is not None for group in self._groups.values()):
            return False
        return None not in self._statuses_of_others()

    def _statuses_of_others(self) -> list[int | None]:
        """Return `Claims.statuses` of the groups that are not here."""
        names = map(str, range(self._config.groups_in_all))
        return self._links.claims.statuses(n for n in names if n not in self._groups)

    def _how_others_left(self) -> ExitStatus | None:
        """Return how the groups of other hosts ended a job that no group here was in at its end.

        The record that ends a job is the same after a drain and after the last step. The
        supervisors of the groups that left with it know the difference. Waits for their exit
        statuses, for at most `RELEASE_S`.

        Returns:
            COMPLETE, DRAINED or FAILED; None if this does not depend on other groups.
        """
        left = any(g.finished or g.has_left for g in self._groups.values())
        if left or not self._ending.over or self._config.parts_in_all == len(self._groups):
            return None
        until = time.monotonic() + RELEASE_S
        try:
            while None in (found := self._statuses_of_others()):
                if time.monotonic() > until or self._ending.interrupted:
                    break
                self._waits.select(_OVER_S)
        except (BusError, SupervisorError) as error:
            logger.warning("cannot see how the groups of other hosts have ended: %s", error)
            found = [None]
        if any(status in DONE for status in found):
            return ExitStatus.COMPLETE
        if any(status in (None, ExitStatus.DRAINED) for status in found):
            return ExitStatus.DRAINED
        return ExitStatus.FAILED if self._groups else None

    def _end_who_waits(self, inside: set[int]) -> None:
        """End waiting processes of a job that is over, except the pids ``inside``, which leave."""
        self._ending.over = True
        logger.info("the job is over since step %d", self._tail.view.step)
        for group in self._groups.values():
            group.restart_at = group.return_at_step = None
            if waiting := group.waiting(inside, self._tail.view):
                group.ask_to_leave(_LEAVE_S, waiting)

    def _on_interrupts(self, times: int) -> None:
        for _ in range(times):
            if self._ending.drain_until is None:
                self._judgement.note_interrupt(self._tail.view, self._config.parts_in_all)
                self._drain("interrupted", forward=True)
            else:
                self._kill_all("interrupted a second time")

    def _drain(self, reason: str, *, forward: bool, within: float = math.inf) -> None:
        """Ask all groups to leave together after a commit, and start no further process.

        Args:
            reason: Text for the log.
            forward: Send SIGTERM to the processes as well.
            within: Time before they are killed, in seconds; at most ``drain_timeout``.
        """
        logger.info("draining the job: %s", reason)
        self._ending.drain_until = time.monotonic() + min(within, self._config.drain_timeout)
        ours = (group.name for group in self._groups.values() if group.loss is None)
        self._links.broadcast(Drain(tuple(ours), by="supervisor"))
        for group in self._groups.values():
            group.restart_at = group.return_at_step = None
            for child in group.living if forward else ():
                child.signal(signal.SIGTERM)

    def _kill_all(self, reason: str) -> None:
        if reason not in self._judgement.problems:
            self._judgement.problems.append(reason)
        self._ending.drain_until = self._ending.drain_until or time.monotonic()
        for group in self._groups.values():
            group.restart_at = group.return_at_step = None
            self._kill(group.living, reason)

    def _kill(self, children: Sequence[Child], reason: str) -> None:
        for child in children:
            self._tell_dead(child, f"SIGKILL by the supervisor: {reason}")
            child.signal(signal.SIGKILL)

    # --- commands of operators ---------------------------------------------------------

    def _obey(self) -> None:
        for loss in self._links.claims.losses():
            ours = (group for group in self._groups.values() if group.claim == loss.group)
            if (group := next(ours, None)) is not None:
                self._hand_over(group, loss)
            else:  # adopted from a lost host, and never started
                self._links.claims.yielded(loss)
        for command in self._links.commands.take():
            if command.id in self._told or isinstance(command, Check):  # ranks answer a check
                continue
            serves = self._judgement.has_services
            if is_anothers(command, self._groups, serves, self._links.alone):
                continue
            if (refusal := self._refusal(command)) is not None:
                self._links.commands.answer(command, "refused", refusal)
            elif isinstance(command, Evict):
                self._evict(command)
            elif isinstance(command.fault, ServiceFault):
                text = f"armed for step {command.fault.step}"
                self._links.commands.answer(command, "accepted", text)
                self._faults.pending.append(command.fault)

    def _refusal(self, command: Evict | Inject) -> str | None:
        is_ending = self._ending.drain_until is not None
        return why_refused(command, self._groups, self._config.may_inject, is_ending)

    def _hand_over(self, group: Group, loss: Loss) -> None:
        """Hand the group over to another supervisor once its processes here have ended."""
        text = f"group {group.name} was taken over by {loss.by}"
        logger.warning("%s", text)
        self._judgement.remarks.append(text)
        group.loss, group.evicted, group.restart_at, group.return_at_step = loss, True, None, None
        if not group.living:
            self._links.claims.yielded(loss)
        elif loss.claim is None:  # its new processes run, and would receive a request to leave
            self._kill(group.living, text)
        else:
            group.ask_to_leave(GRACE_S)

    def _evict(self, command: Evict) -> None:
        """Ask the processes to end; `_check_deadlines` and `_on_group_down` do the rest."""
        group = self._groups[command.group]
        logger.info("group %s is evicted by %s", group.name, command.by)
        if command.by == EVICTED_BY:
            self._mark("excluded", f"group {group.name} was evicted by {command.by}")
        group.restart_at = group.return_at_step = None
        group.eviction = command
        living = [c for c in group.living if command.rank in (None, c.rank)]
        pids = ", ".join(str(child.pid) for child in living)
        text = f"ending pid {pids} of group {group.name}" if living else "no process to end"
        self._answer(command, "accepted", text)
        if not group.living:
            self._finish_eviction(group, command)
            return
        group.ask_to_leave(command.grace, living)

    def _finish_eviction(self, group: Group, command: Evict) -> None:
        group.eviction, group.kill_at, group.evicted = None, None, True
        ends = "; ".join(f"rank {child.rank}: {cause_of(child.code)}" for child in group.children)
        after = "it is not started again"
        if command.restart and not (self._ending.drain_until or self._ending.forgot or group.loss):
            group.restart_at, after = time.monotonic(), STARTED_AGAIN
        self._answer(command, "done", f"group {group.name} has ended ({ends}); {after}")

    def _answer(self, command: Command, verdict: AnswerKind, text: str) -> None:
        """Answer the requester, unless the command is our own."""
        if command.id not in self._told:
            self._links.commands.answer(command, verdict, text)

    # --- stragglers --------------------------------------------------------------------

    def _restart_straggler(self, rank: str) -> None:
        """Restart the group of ``rank`` if the job can continue without it meanwhile."""
        command = Evict(fresh_id(), rank.rpartition("/")[0], EVICTED_BY, restart=True)
        others = [g for g in self._groups.values() if g.living and g.name != command.group]
        if self._refusal(command) is not None or len(others) < self._config.min_groups:
            return
        self._too_slow.add(rank)
        logger.warning("group %s is started again: rank %s is too slow", command.group, rank)
        for child in self._groups[command.group].living:
            self._tell_dead(child, f"evicted by the supervisor: rank {rank} is too slow")
        self._told.add(command.id)
        self._evict(command)

    # --- faults of the services --------------------------------------------------------

    def _restart_service(self, fault: AnyServiceFault) -> None:
        """Carry out a fault, and have the participants trace it."""
        logger.info("injected: %s", fault)
        view = self._tail.view
        view.note_service_fault(fault.name, fault.kind)
        word = Inject(fresh_id(), fault, BY_SUPERVISOR)
        self._told.add(word.id)
        with suppress(BusError):
            self._links.bus.broadcast(encode_command(word), "commands")
        try:
            if isinstance(fault, BusRestartFault):
                self._restart_bus()
            else:
                self._services.restart_lighthouse()
        except (ServiceError, BusError) as error:
            self._judgement.problems.append(f"{fault.name}: {error}")

    def _restart_bus(self) -> None:
        self._ending.forgot = True
        self._judgement.note_forgotten()
        self._links.close()
        self._services.restart_bus()
        self._links.open(self._services.bus_url)
        if self._config.can_resume:  # otherwise the processes detect and report it
            self._ending.lost = "the bus has forgotten the job"
            self._end_in_vain(self._ending.lost, in_order=False)

    # --- the end -----------------------------------------------------------------------

    def _end(self) -> None:
        """Release everything: children, stores, descriptors."""
        self._adopter.close()
        self._reforming.spares.end()
        left = [*self._living(), *self._reforming.spares]
        for child in left:
            child.signal(signal.SIGKILL)
        self._launcher.close()
        self._diagnoser.close()
        reap_all(left)
        try:
            note_ends(self._config.trace_dir, f"{socket.gethostname()}-{os.getpid()}")
        except OSError as error:
            text = "the ends of the traces cannot be noted, so an audit misses removed lines: %s"
            logger.warning(text, error)
        for group in self._groups.values():
            group.close()
        self._tail.close()
        self._show_output()
        self._waits.close()
        self._launcher.tee.close()
        self._hangs.close()
        self._links.close()
        if self._display is not None:
            self._display.close()
