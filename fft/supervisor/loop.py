"""The supervisor's loop: one thread that owns all children of a job.

It starts and ends processes, says on the bus who died, reads the traces for the progress of
the job, and writes to the given display. It takes no signal handlers: `Supervisor.interrupt`
is there for whoever does. Its only waits are one `select` and bounded.
"""

from __future__ import annotations

import json
import logging
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fft.bus import BusError, ErrorBus, open_job_bus
from fft.errors import FftError
from fft.faults import DrainFault, FaultPlan
from fft.jobtoken import JobToken
from fft.progress import Display, Row, Snapshot, TraceTail, row_of
from fft.serve import Services
from fft.supervisor.children import Child, cause_of
from fft.supervisor.groups import Group, base_env
from fft.supervisor.watch import PlanWatch
from fft.timeouts import bus_operation

_POLL_S = 0.2  # how stale the view of the traces may be; files have nothing to wait on
_REAP_S = 10.0  # how long a SIGKILLed child may take to vanish before we say so

logger = logging.getLogger(__name__)


class SupervisorError(FftError):
    """A job that cannot be started as asked: names what to change."""


@dataclass(frozen=True)
class RunConfig:
    """What to run. Times in seconds; ``min_groups`` are needed for the job to go on."""

    script: Sequence[str]
    groups: int
    ranks: int
    trace_dir: Path
    faults: Path | None = None
    min_groups: int = 1
    max_restarts: int = 10
    stop_after_plan: int | None = None
    min_steps: int = 0
    timeout: float | None = None
    drain_timeout: float = 60.0

    def check(self) -> None:
        """Raise SupervisorError unless the job can be started."""
        if not self.script or not Path(self.script[0]).is_file():
            named = self.script[0] if self.script else ""
            raise SupervisorError(f"no script at {named!r}; give the path of a Python file")
        if self.groups < 1 or self.ranks < 1:
            raise SupervisorError("--groups and --ranks must be at least 1")
        if not 1 <= self.min_groups <= self.groups:
            raise SupervisorError(f"--min-groups must be from 1 to {self.groups}, the --groups")
        if self.min_steps and self.stop_after_plan is None:
            raise SupervisorError("--min-steps belongs to --stop-after-plan; give both or none")
        if any(self.trace_dir.glob("*.jsonl")):
            raise SupervisorError(
                f"{self.trace_dir} holds the traces of an earlier run; name a fresh --trace-dir"
            )


@dataclass(frozen=True)
class Verdict:
    """How the job ended; ``lines`` say what went wrong, and where."""

    ok: bool
    lines: tuple[str, ...] = ()


class Supervisor:
    """Runs one job to its end. `run` must be called once, on a thread that lives as long."""

    def __init__(
        self,
        config: RunConfig,
        plan: FaultPlan,
        services: Services,
        display: Display | None = None,
        token: JobToken | None = None,
    ) -> None:
        """``token``: of the job; its children get it in their environment."""
        config.check()
        self._config = config
        self._plan = plan
        self._services = services
        self._display = display
        self._token = token
        names = [str(number) for number in range(config.groups)]
        self._groups = {name: Group(name, config.ranks) for name in names}
        self._drains_seen: set[str] = set()
        self._watch = (
            PlanWatch(plan, names, config.stop_after_plan, config.min_steps)
            if config.stop_after_plan is not None
            else None
        )
        self._bus: ErrorBus | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._began = time.monotonic()
        self._drain_until: float | None = None
        self._problems: list[str] = []

    # --- from outside ------------------------------------------------------------------

    def interrupt(self) -> None:
        """Drain the whole job; called a second time, kill it. From any thread or handler."""
        with suppress(OSError):  # full of interrupts already, or the job has ended
            self._wake_in.send(b"!")

    def run(self) -> Verdict:
        """Start all groups, look after them until the job has ended, and judge it."""
        logs = self._config.trace_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._tail = TraceTail(self._config.trace_dir)
        try:
            url = self._services.bus_url
            self._bus = open_job_bus(url, self._token, bus_operation(url))
            for group in self._groups.values():
                self._start(group)
            while self._going_on():
                self._turn()
            self._look()
            return self._judge()
        finally:
            self._end()

    # --- one turn of the loop ----------------------------------------------------------

    def _going_on(self) -> bool:
        groups = self._groups.values()
        return any(group.living or group.restart_at is not None for group in groups)

    def _turn(self) -> None:
        now = time.monotonic()
        due = [group.restart_at for group in self._groups.values() if group.restart_at is not None]
        timeout = max(0.0, min([_POLL_S, *(at - now for at in due)]))
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, Child):
                self._on_death(key.data)
            else:
                self._on_interrupts(len(self._wake_out.recv(64)))
        self._look()
        self._start_due()
        self._check_deadlines()

    def _look(self) -> None:
        """Take in what the traces say: progress, drained groups to bring back, the plan's end."""
        view = self._tail.poll()
        for group in self._groups.values():
            if group.return_at_step is not None and view.step >= group.return_at_step:
                group.return_at_step, group.restart_at = None, time.monotonic()
        if self._watch is not None and self._drain_until is None and self._watch.due(view):
            self._drain("the fault plan is through", forward=False)
        if self._display is not None:
            rows = [self._row(group) for group in self._groups.values()]
            elapsed = time.monotonic() - self._began
            fired, planned = len(view.injected), len(self._plan.faults)
            self._display.show(Snapshot(elapsed, rows, fired, planned))

    def _row(self, group: Group) -> Row:
        """The group on the screen; what its dead incarnations did last is not shown as news."""
        view = self._tail.view
        is_old = group.living and view.incs(group.name) == group.known_incs
        return Row(group.name, group.doing()) if is_old else row_of(view, group.name, group.doing())

    def _check_deadlines(self) -> None:
        now, limit = time.monotonic(), self._config.timeout
        if limit is not None and now > self._began + limit:
            self._kill_all(f"the job was not through within --timeout {limit:g} s")
        elif self._drain_until is not None and now > self._drain_until:
            seconds = self._config.drain_timeout
            self._kill_all(f"the job had not drained {seconds:g} s after it was asked to")

    # --- starting ----------------------------------------------------------------------

    def _start_due(self) -> None:
        now = time.monotonic()
        for group in self._groups.values():
            if group.restart_at is not None and group.restart_at <= now:
                self._start(group)

    def _start(self, group: Group) -> None:
        config = self._config
        services = {
            "TORCHFT_LIGHTHOUSE": self._services.lighthouse_url,
            "FFT_BUS": self._services.bus_url,
            "FFT_TRACE_DIR": str(config.trace_dir.resolve()),
        }
        if config.faults is not None:
            services["FFT_FAULTS"] = str(config.faults.resolve())
        if self._token is not None:
            services["FFT_TOKEN"] = self._token.text()
        group.known_incs = self._tail.view.incs(group.name)
        logs = config.trace_dir / "logs"
        for child in group.start(list(config.script), base_env(services), logs, config.groups):
            self._selector.register(child.fd, selectors.EVENT_READ, child)

    # --- deaths ------------------------------------------------------------------------

    def _on_death(self, child: Child) -> None:
        """A child has died: say so first, then end the rest of its group with it."""
        if not child.alive:
            return
        code = child.exit_code()
        if code != 0:
            self._tell_dead(child, cause_of(code))
        self._selector.unregister(child.fd)
        child.reap()
        group = self._groups[child.group]
        if code != 0:
            for mate in group.living:
                # it may have died of its own just now, and then it is that which peers shall hear
                died = mate.dies_within(0)
                ended = f"SIGKILL by the supervisor, because rank {child.rank} died"
                self._tell_dead(mate, cause_of(mate.exit_code()) if died else ended)
                mate.signal(signal.SIGKILL)
        if not group.living:
            self._on_group_down(group)

    def _tell_dead(self, child: Child, cause: str) -> None:
        if child.told_dead:
            return
        child.told_dead = True
        message = {"type": "death", "group": child.group, "rank": child.rank, "pid": child.pid}
        self._broadcast({**message, "host": socket.gethostname(), "cause": cause})

    def _plan_return(self, group: Group) -> None:
        """If a planned drain took the group away, note when it is to come back."""
        view = self._tail.view
        for fault in self._plan.faults:
            if not isinstance(fault, DrainFault) or fault.group != group.name:
                continue
            if fault.name in view.injected and fault.name not in self._drains_seen:
                self._drains_seen.add(fault.name)
                left_at = max((rank.step for rank in view.of(group.name)), default=view.step)
                if fault.return_after_steps is not None:
                    group.return_at_step = left_at + fault.return_after_steps

    def _on_group_down(self, group: Group) -> None:
        """All ranks of the group are gone: let it be, or have it started again."""
        group.close()
        if self._tail.poll().committed_since(group.name, group.known_incs):
            group.pauses.progressed()
        if self._drain_until is not None:
            return
        if group.finished:
            self._plan_return(group)
            return
        if group.pauses.restarts < self._config.max_restarts:
            group.restart_at = time.monotonic() + group.pauses.next()
            return
        group.given_up = True
        self._problems.append(f"group {group.name} was given up after its last restart")
        usable = sum(not other.given_up for other in self._groups.values())
        if usable < self._config.min_groups or self._watch is not None:
            self._drain(f"group {group.name} cannot be brought back", forward=True)

    # --- ending ------------------------------------------------------------------------

    def _on_interrupts(self, times: int) -> None:
        for _ in range(times):
            if self._drain_until is None:
                self._drain("interrupted", forward=True)
            else:
                self._kill_all("interrupted a second time")

    def _drain(self, reason: str, *, forward: bool) -> None:
        """Ask all groups to leave together after a commit; nothing is started any more."""
        logger.info("draining the job: %s", reason)
        self._drain_until = time.monotonic() + self._config.drain_timeout
        self._broadcast({"type": "drain", "groups": list(self._groups)})
        for group in self._groups.values():
            group.restart_at = group.return_at_step = None
            for child in group.living if forward else ():
                child.signal(signal.SIGTERM)

    def _kill_all(self, reason: str) -> None:
        if reason not in self._problems:
            self._problems.append(reason)
        self._drain_until = self._drain_until or time.monotonic()
        for group in self._groups.values():
            group.restart_at = group.return_at_step = None
            for child in group.living:
                self._tell_dead(child, f"SIGKILL by the supervisor: {reason}")
                child.signal(signal.SIGKILL)

    def _judge(self) -> Verdict:
        lines = list(self._problems)
        for group in self._groups.values():
            failed = [child for child in group.children if child.code != 0]
            # who died by itself says more than who was ended with it
            failed.sort(key=lambda child: (child.code == -signal.SIGKILL, child.rank))
            lines += [child.verdict() for child in failed[:1]]
        if not lines and self._watch is not None:
            unfinished = self._watch.unfinished(self._tail.view)
            lines += [f"the fault plan was not finished: {unfinished}"] if unfinished else []
        return Verdict(not lines, tuple(lines))

    def _end(self) -> None:
        """Leave nothing behind: no child, no store, no descriptor."""
        deadline = time.monotonic() + _REAP_S
        left = [child for group in self._groups.values() for child in group.living]
        for child in left:
            child.signal(signal.SIGKILL)
        for child in left:
            if child.dies_within(deadline - time.monotonic()):
                child.reap()
            else:
                logger.error("pid %d did not end within %g s of its SIGKILL", child.pid, _REAP_S)
        for group in self._groups.values():
            group.close()
        self._tail.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
        if self._bus is not None:
            self._bus.close()
        if self._display is not None:
            self._display.close()

    def _broadcast(self, message: dict[str, Any]) -> None:
        """Say it on the bus. Peers find out by themselves too, so a lost bus is no stop."""
        if self._bus is None:
            return
        payload = json.dumps({"v": 1, "by": "supervisor", **message}).encode()
        try:
            self._bus.broadcast(payload)
        except BusError as error:
            logger.error("could not say %s on the bus: %s", message["type"], error)
