"""What the supervisor holds at the job's bus: the connection, who listens on it, its host's beats.

Owns them from `open` to `close`; may be opened again, when the bus was restarted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack

from fft.bus import BusError, ErrorBus, open_job_bus
from fft.bus.addresses import own_address
from fft.bus.token import JobToken
from fft.health.hosts import HostWatch, Process
from fft.launch.supervisor.claims import Claims
from fft.launch.supervisor.commands import CommandEar
from fft.launch.supervisor.ending import complete
from fft.launch.supervisor.progress import ProgressEar
from fft.messages.protocol import Death, Drain, Suspect, UnreadableMessage, encode
from fft.messages.wire import SCOPES
from fft.protocol.timeouts import bus_operation
from fft.trace.tail import JobView

logger = logging.getLogger(__name__)


class Links:
    """Of one supervisor. The attributes are there from the first `open` on."""

    bus: ErrorBus
    claims: Claims
    commands: CommandEar
    progress: ProgressEar
    address: str
    """Where processes on other hosts find the stores of our groups."""

    def __init__(
        self, token: JobToken | None, host_limit: float, wake: Callable[[], None], serves: bool
    ) -> None:
        """``wake`` is called, from any thread, when there is a command or a claim.
        ``host_limit``: seconds. ``serves``: the bus is this process's own, and ends with it."""
        self._serves = serves
        self._token = token
        self._host_limit = host_limit
        self._wake = wake
        self._hosts: HostWatch | None = None
        self._stages: list[ErrorBus] = []
        """Of the scopes of further stages that were found."""
        self._undo = ExitStack()

    def open(self, url: str) -> None:
        """Connect, and listen from now on. Raises BusError; `close` is needed then, too."""
        self.bus = open_job_bus(url, self._token, bus_operation(url))
        self._undo.callback(self.bus.close)
        self.claims = Claims(self.bus, self._wake, self._serves)
        self._undo.callback(self.claims.close)
        self.commands = CommandEar(self.bus, self._wake)
        self._undo.callback(self.commands.close)
        self.progress = ProgressEar(self.bus)
        self._undo.callback(self.progress.close)
        self._hosts = HostWatch(self.bus, "the supervisor", self._host_limit)
        self._undo.callback(self._hosts.close)
        self.address = own_address(url)

    @property
    def alone(self) -> bool:
        """Whether no other host of the job has been found."""
        return self._hosts is None or self._hosts.alone

    @property
    def has_stages(self) -> bool:
        """Whether further stages with scopes of their own were found."""
        return bool(self._stages)

    def scopes(self) -> list[ErrorBus]:
        """The buses of all scopes of the job: its own, and those of further stages. Raises
        BusError."""
        held = None if self._stages else self.bus.read(SCOPES)
        with ExitStack() as opened:
            found = list[ErrorBus]()
            for name in () if held is None else json.loads(held):
                url = f"{self.bus.url}.{name}"
                found.append(open_job_bus(url, self._token, bus_operation(url)))
                opened.callback(found[-1].close)
            self._stages += found
            self._undo.push(opened.pop_all())
        return [self.bus, *self._stages]

    def take_in(self, view: JobView, is_sure: bool) -> None:
        """Have ``view`` know what ranks have said, and the log name what troubles them; if traces
        have gaps, or ``is_sure``, what the registers tell, too."""
        self.progress.tell_troubles(view)
        if not (view.gaps or is_sure):
            return
        try:
            complete(view, self.scopes())
            view.has_stages |= self.has_stages
            view.is_stale = False
        except (BusError, UnreadableMessage) as error:
            view.is_stale = bool(view.gaps)
            logger.debug("what traces with gaps lack cannot be seen: %s", error)

    def beat_for(self, processes: tuple[Process, ...]) -> None:
        """Say of these, from now on, that their host is alive."""
        if self._hosts is not None:
            self._hosts.processes = processes

    def close(self) -> None:
        """Stop listening and disconnect. Idempotent."""
        self._undo.close()
        self._stages = []

    def broadcast(self, message: Death | Drain | Suspect) -> None:
        """Say it on the bus. Peers find out by themselves too, so a lost bus is no stop."""
        try:
            self.bus.broadcast(encode(message))
        except BusError as error:
            logger.error("could not send %s on the bus: %s", message.type, error)
