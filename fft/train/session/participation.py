"""This process as a participant of its job: its identity, bus, trace and engine.

`fft.train.api.parts` creates the engine before the first txn. The module is thread-safe.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

from fft.bus import ErrorBus, open_job_bus
from fft.bus.token import JobToken
from fft.engine.executor import StepExecutor
from fft.engine.loop import Command, Engine
from fft.errors import BusError
from fft.messages.causes import LeaveReason
from fft.messages.progress import FetchReport, IdleReport, TraceReport, fitting
from fft.messages.protocol import Event, Peer, Suspect, encode
from fft.protocol.state import Local
from fft.trace.checkpoint_notes import report_of
from fft.trace.format import FETCHING, IDLE, NO_REFORM, WARNING
from fft.trace.writer import TraceWriter
from fft.train.guard.progress_reporter import ProgressReporter
from fft.util.error_places import place_of

logger = logging.getLogger(__name__)

_REMEMBERED = 100
"""Maximum number of places whose traceback is logged; later ones are logged without it."""


class Participation:
    """Session of one process in its job. Owns the bus and the trace until `close`."""

    def __init__(self, peer: Peer, bus: ErrorBus, trace: TraceWriter) -> None:
        self.peer = peer
        self.bus = bus
        self.trace = trace
        self.engine: Engine | None = None
        """None until the process has joined."""
        self.executor = StepExecutor(self.post, self._take, threading.Lock())
        self.reforms = False
        """Whether the launcher may replace lost ranks of this group, according to the trace."""
        self.leave_reason = LeaveReason.SHUT_DOWN
        """Why the process leaves by `leave`, if no commit has ended its part in the job."""
        self.group_bus: ErrorBus | None = None
        self._meets_at = ""
        """The store that has the bus of the group."""
        self.reporter: ProgressReporter | None = None
        self._seen: set[tuple[str, str]] = set()
        """Places whose traceback was logged."""

    @property
    def world(self) -> int:
        """Number of ranks per group in this scope. Valid after joining."""
        assert self.engine is not None, "it has joined"
        return self.engine.participant.config.world

    @property
    def local(self) -> Local | None:
        """The protocol state of the participant, or None before it joins."""
        return None if self.engine is None else self.engine.local

    def post(self, event: Event) -> None:
        """Pass ``event`` to the engine, if there is one."""
        if self.engine is not None:
            self.engine.post(event)

    def _take(self, command: Command) -> None:
        if self.engine is not None:
            self.engine.take(command)

    def note(self, name: str, data: dict[str, Any]) -> None:
        """Trace an observation, with the state of the participant once it has joined."""
        self.trace.note(name, data, self.local)

    def warn(self, name: str, text: str) -> None:
        """Log a warning about the script, and trace it, so that `fft run` shows it once."""
        logger.warning("%s", text)
        self.note(name, {WARNING: text})

    def has_ended(self, reason: LeaveReason) -> bool:
        """Note why this process is to leave by `leave`; returns True."""
        self.leave_reason = reason
        return True

    def note_metrics(self, metrics: dict[str, float]) -> None:
        """Trace metrics of the script, and report the loss among them."""
        self.note("metrics", metrics)
        if self.reporter is not None:
            loss = metrics.get("loss")
            is_number = isinstance(loss, int | float) and math.isfinite(loss)
            self.reporter.loss = float(loss) if loss is not None and is_number else None

    def report_checkpoint(self, name: str, data: dict[str, Any]) -> None:
        """Trace an event of a checkpoint, and report it to the observers of the job.

        Thread-safe.
        """
        self.note(name, data)
        if self.reporter is not None and (report := report_of(self.peer, name, data)) is not None:
            self.reporter.say(report)

    def report_fetch(self, got: int, total: int, left_s: float) -> None:
        """Trace and report that ``got`` of the ``total`` bytes of a peer's state have arrived."""
        left_s = round(left_s, 1)
        self.note(FETCHING, {"bytes": got, "total": total, "left_s": left_s})
        if self.reporter is not None:
            self.reporter.say(FetchReport(*self.peer, got, total, left_s))

    def report_idle(self, seconds: float) -> None:
        """Trace and report how long the script worked between two transactions."""
        self.note(IDLE, {"seconds": round(seconds, 3)})
        if self.reporter is not None:
            self.reporter.say(IdleReport(*self.peer, round(seconds, 3)))

    def report_to(self, reporter: ProgressReporter) -> None:
        """Report checkpoints, fetches and lost traces by ``reporter`` too, until it is closed."""
        self.reporter = reporter
        self.trace.on_lost(lambda why: reporter.say(TraceReport(*self.peer, fitting(why))))

    def report_not_replaceable(self, can_reform: bool) -> None:
        """Trace, for the launcher, that lost ranks of this group can no longer be replaced."""
        if self.reforms and not can_reform:
            self.reforms = False
            self.note(
                NO_REFORM, {"why": "its ranks also use a process group that FFT cannot rebuild"}
            )

    def note_error(self, error: BaseException) -> None:
        """Log and trace the place that ``error`` comes from: the traceback once for each place.

        Any thread. Slow, because it reads source files.
        """
        if self.engine is None:
            return
        place, local = place_of(error), self.engine.local
        found = {"type": place.type, "message": place.message, "where": place.where}
        found |= {"operation": place.operation, "traceback": place.text}
        self.trace.note("fault", found, local)
        operation = f" ({place.operation})" if place.operation else ""
        text = f"error of this rank in step {local.step}: {place.short()}{operation}"
        if place.signature in self._seen or len(self._seen) >= _REMEMBERED:
            logger.warning("%s", text)
            return
        self._seen.add(place.signature)
        logger.warning("%s\n%s", text, place.text.rstrip())

    def broadcast_hang(self, reason: str) -> bool:
        """Broadcast the suspicion that this main thread hangs. Return whether it was sent."""
        if self.engine is None:
            return False
        config, peer = self.engine.participant.config, self.peer
        try:
            word = Suspect(peer.group, peer.rank, config.pid, config.host, "monitor", reason)
            self.bus.broadcast(encode(word))
        except BusError as error:  # the engine will notice, if it lasts
            logger.warning("could not broadcast that the main thread of this rank hangs: %s", error)
            return False
        return True

    def meet_at(self, store: str, token: JobToken | None, operation_s: float) -> None:
        """Open a bus on the store of the group, where its ranks vote first, unless it is open.

        If that fails, this rank votes on the job's bus only.
        """
        assert self.engine is not None, "it has joined"
        is_open = store == self._meets_at and not self.engine.has_left_group_bus
        if is_open or self.world == 1:
            return
        self._meets_at, old, self.group_bus = store, self.group_bus, None
        if old is not None:
            _close_later(old)
        try:
            # The name has the generation of the job's bus, so that votes of an earlier generation
            # with the same epoch numbers do not count.
            url = bus_url(store, self.bus.generation)
            self.group_bus = open_job_bus(url, token, operation_s, purpose="group bus")
        except BusError as error:
            logger.warning(
                "no group bus, so this rank of the group votes on the job's bus: %s", error
            )
            return
        self.engine.use_group_bus(self.group_bus)

    def leave(self) -> None:
        """End the engine, which leaves the job, if it is still in. Idempotent."""
        if self.engine is not None:
            self.engine.close(reason=self.leave_reason)

    def close(self) -> None:
        """End the buses and the trace. Idempotent."""
        if self.group_bus is not None:
            self.group_bus.close()
        if self.engine is not None and self.engine.abandoned:
            _close_later(self.bus)
        else:
            self.bus.close()
        self.trace.close()


def _close_later(bus: ErrorBus) -> None:
    """Close a bus on a thread, because closing waits for a bus that may not respond."""
    threading.Thread(target=bus.close, name="fft-bus-close", daemon=True).start()


def bus_url(store: str, name: str) -> str:
    """Return the URL of the bus ``name`` on a replica group's own store (``host:port``)."""
    return f"tcp://{store}/{name}"
