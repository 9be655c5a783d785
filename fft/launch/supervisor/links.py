"""The supervisor's connection to the job's bus, its listeners, and the heartbeats of its host.

They live from `open` to `close` and may be opened again after the bus was restarted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack

from fft.bus import ErrorBus, open_job_bus
from fft.bus.addresses import own_address
from fft.bus.token import JobToken
from fft.errors import BusError
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
    """The bus connections of one supervisor. The first `open` sets the attributes."""

    bus: ErrorBus
    claims: Claims
    commands: CommandEar
    progress: ProgressEar
    address: str
    """Address at which processes on other hosts reach the stores of our groups."""

    def __init__(
        self, token: JobToken | None, host_limit: float, wake: Callable[[], None], serves: bool
    ) -> None:
        """Store the settings; `open` connects.

        Args:
            token: Token of the job.
            host_limit: Silence after which a host counts as lost, in seconds.
            wake: Called, from any thread, when there is a command or a claim.
            serves: This process serves the bus, which ends with it.
        """
        self._serves = serves
        self._token = token
        self._host_limit = host_limit
        self._wake = wake
        self._hosts: HostWatch | None = None
        self._stages: list[ErrorBus] = []
        """Buses of the scopes of further stages."""
        self._undo = ExitStack()

    def open(self, url: str) -> None:
        """Connect and start to listen. Raises BusError, after which `close` is needed as well."""
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
        """Return the buses of all scopes: the job's own and those of further stages.

        Raises:
            BusError: The bus cannot be reached.
        """
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
        """Add the reports of ranks to ``view``, and log the problems that they report.

        If traces have gaps, or with ``is_sure``, the contents of the registers are added as well.
        """
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
        """Send heartbeats for these processes from now on, which show that their host is alive."""
        if self._hosts is not None:
            self._hosts.processes = processes

    def close(self) -> None:
        """Stop listening and disconnect. Idempotent."""
        self._undo.close()
        self._stages = []

    def broadcast(self, message: Death | Drain | Suspect) -> None:
        """Broadcast a message. A lost bus is only logged, since peers also detect faults alone."""
        try:
            self.bus.broadcast(encode(message))
        except BusError as error:
            logger.error("could not send %s on the bus: %s", message.type, error)
