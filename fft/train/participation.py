"""This process as a participant of its job: who it is, its bus, its trace, and its engine.

The engine is there from the first txn on (`fft.train.parts`). Any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Set
from typing import Any

from fft.bus import ErrorBus, open_job_bus
from fft.bus.token import JobToken
from fft.engine.loop import Command, Engine
from fft.errors import BusError
from fft.messages.progress import FetchReport, TraceReport, fitting
from fft.messages.protocol import (
    Connected,
    Event,
    Healed,
    HealFailed,
    Peer,
    Prepared,
    Restored,
    Suspect,
    encode,
)
from fft.protocol.main_thread import NO_FACTS, shipped_thread
from fft.protocol.roles import Role
from fft.protocol.state import Local
from fft.protocol.vocabulary import COMMANDS
from fft.trace.checkpoint_notes import report_of
from fft.trace.format import FETCHING, NO_REFORM
from fft.trace.writer import TraceWriter
from fft.train.progress_reporter import ProgressReporter
from fft.util.error_places import Place, place_of

logger = logging.getLogger(__name__)

Word = Prepared | Restored | Connected | Healed | HealFailed
"""What the main thread says of its work, but for updates, whose errors any thread may tell."""


class MainThread:
    """The state of one main thread.

    The main thread itself makes the transitions; only the error of an update may come from another
    thread.
    """

    def __init__(self) -> None:
        self._table = shipped_thread()
        self._state = self._table.spec.initial
        self._lock = threading.Lock()

    @property
    def role(self) -> Role:
        """The role of the state. Any thread."""
        return self._table.role(self._state)

    def awaits(self, event: str) -> bool:
        """Whether the state has a row for the event."""
        return self._table.has(self._state, event)

    def obeys(self, command: Command, facts: Set[str] = NO_FACTS) -> tuple[str, ...]:
        """Carry out the command; return the effects, in order.

        Raises:
            ProtocolError: The command is not allowed in this state.
        """
        return self.moves_on(COMMANDS[type(command)], facts)

    def moves_on(self, event: str, facts: Set[str] = NO_FACTS) -> tuple[str, ...]:
        """Make the transition for any event, by its name; return the effects."""
        with self._lock:
            return self._move(event, facts)

    def leaves(self, role: Role, event: str) -> bool:
        """Make the transition if the state has this role; return whether it has."""
        with self._lock:
            if self.role != role:
                return False
            self._move(event, NO_FACTS)
            return True

    def _move(self, event: str, facts: Set[str]) -> tuple[str, ...]:
        self._state, effects = self._table.react(self._state, event, facts)
        return effects


class Participation:
    """Of one process in its job. Owns bus and trace, until `close`."""

    def __init__(self, peer: Peer, bus: ErrorBus, trace: TraceWriter) -> None:
        self.peer = peer
        self.bus = bus
        self.trace = trace
        self.engine: Engine | None = None
        """None: it has not joined."""
        self.thread = MainThread()
        self.reforms = False
        """It has told the launcher that others of its group may be replaced."""
        self.group_bus: ErrorBus | None = None
        self.reporter: ProgressReporter | None = None
        self._places = PlaceLog(trace)

    @property
    def world(self) -> int:
        """How many ranks of each group decide together; once it has joined."""
        assert self.engine is not None, "it has joined"
        return self.engine.participant.config.world

    @property
    def local(self) -> Local | None:
        """The engine's state; None before there is one."""
        return None if self.engine is None else self.engine.local

    def post(self, event: Event) -> None:
        """Give ``event`` to the engine, if there is one."""
        if self.engine is not None:
            self.engine.post(event)

    def say(self, word: Word, facts: Set[str] = NO_FACTS) -> None:
        """Main thread: tell the engine what came of a command.

        Raises:
            ProtocolError: nothing like it was under way.
        """
        self.thread.moves_on(word.type, facts)
        self.post(word)

    def note(self, name: str, data: dict[str, Any]) -> None:
        """Put it into the trace, with the state of the participant once it has joined."""
        self.trace.note(name, data, self.local)

    def tell(self, name: str, data: dict[str, Any]) -> None:
        """`note` what has become of a checkpoint, and have who watches the job hear it. Any
        thread."""
        self.note(name, data)
        if self.reporter is not None and (report := report_of(self.peer, name, data)) is not None:
            self.reporter.say(report)

    def tell_fetch(self, got: int, total: int, left_s: float) -> None:
        """Trace and report that ``got`` of the ``total`` bytes of a peer's state have arrived."""
        left_s = round(left_s, 1)
        self.note(FETCHING, {"bytes": got, "total": total, "left_s": left_s})
        if self.reporter is not None:
            self.reporter.say(FetchReport(*self.peer, got, total, left_s))

    def report_to(self, reporter: ProgressReporter) -> None:
        """From now on who watches the job hears of it also by ``reporter``, which says no more when
        it is closed."""
        self.reporter = reporter
        self.trace.on_lost(lambda why: reporter.say(TraceReport(*self.peer, fitting(why))))

    def tell_if_fixed(self, can_reform: bool) -> None:
        """Tell the launcher that the ranks of this group can be replaced no more, if that is so."""
        if self.reforms and not can_reform:
            self.reforms = False
            self.note(NO_REFORM, {"why": "its ranks meet in another process group, too"})

    def note_error(self, error: BaseException) -> None:
        """Have log and trace name the place that ``error`` comes from. Reads source files."""
        if self.engine is not None:
            self._places.note(error, self.engine.local)

    def say_stuck(self, reason: str) -> bool:
        """Tell all, and the own engine, that the main thread does not move. Whether it was said."""
        if self.engine is None:
            return False
        config, peer = self.engine.participant.config, self.peer
        try:
            word = Suspect(peer.group, peer.rank, config.pid, config.host, "monitor", reason)
            self.bus.broadcast(encode(word))
        except BusError as error:  # the engine will notice, if it lasts
            logger.warning("could not say that the main thread does not move: %s", error)
            return False
        return True

    def open_group_bus(self, store: str, token: JobToken | None, operation_s: float) -> None:
        """Make a bus on the group's own store, where its ranks vote first; without it, apart."""
        try:
            # Named after this life of the job's bus, whose epochs nobody else's votes can mean.
            url = bus_url(store, self.bus.generation)
            self.group_bus = open_job_bus(url, token, operation_s, purpose="group bus")
        except BusError as error:
            logger.warning("every rank votes for itself: %s", error)

    def leave(self) -> None:
        """End the engine, which leaves the job, if it is still in. Idempotent."""
        if self.engine is not None:
            self.engine.close()

    def close(self) -> None:
        """End the buses and the trace. Idempotent."""
        if self.group_bus is not None:
            self.group_bus.close()
        if self.engine is not None and self.engine.abandoned:
            # That waits for the bus, and there is no time to.
            threading.Thread(target=self.bus.close, name="fft-bus-close", daemon=True).start()
        else:
            self.bus.close()
        self.trace.close()


def bus_url(store: str, name: str) -> str:
    """Return the URL of the bus ``name`` on a replica group's own store (``host:port``)."""
    return f"tcp://{store}/{name}"


_REMEMBERED = 100
"""Places whose traceback was logged; a new one after so many is logged like a known one."""


class PlaceLog:
    """The errors of one rank. Any thread; formats tracebacks, so not for moments that count."""

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace
        self._seen: set[tuple[str, str]] = set()

    def note(self, error: BaseException, local: Local) -> None:
        """Trace where ``error`` comes from, and log it: the traceback once for each place."""
        place = place_of(error)
        self._trace.note(
            "fault",
            {
                "type": place.type,
                "message": place.message,
                "where": place.where,
                "operation": place.operation,
                "traceback": place.text,
            },
            local,
        )
        self._log(place, local.step)

    def _log(self, place: Place, step: int) -> None:
        operation = f" ({place.operation})" if place.operation else ""
        text = f"an error of this rank in step {step}: {place.short()}{operation}"
        if place.signature in self._seen or len(self._seen) >= _REMEMBERED:
            logger.warning("%s", text)
            return
        self._seen.add(place.signature)
        logger.warning("%s\n%s", text, place.text.rstrip())
