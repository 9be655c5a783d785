"""The supervisor's connection to the job's bus, its listeners, and the heartbeats of its host.

They live from `open` to `close` and may be opened again after the bus was restarted.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress

from fft.bus import ErrorBus, open_job_bus
from fft.bus.addresses import own_address
from fft.bus.resubscribing import ResubscribingListener
from fft.bus.token import JobToken
from fft.errors import BusError
from fft.health.detectors.straggler import Change, Stragglers
from fft.health.hosts import HostWatch, Process
from fft.launch.supervisor.children import Child
from fft.launch.supervisor.claims import Claims
from fft.launch.supervisor.ending import complete, head_of
from fft.launch.supervisor.groups import Group
from fft.launch.supervisor.spanning import GroupStarts
from fft.messages.commands import (
    Answer,
    AnswerKind,
    Command,
    Evict,
    Inject,
    RollCall,
    answer_inbox,
    decode_command,
    encode_answer,
    fresh_id,
)
from fft.messages.exits import (
    Exit,
    decode_exit,
    encode_exit,
    exit_register,
    gone_register,
    gone_value,
)
from fft.messages.fault_plans import ServiceFault
from fft.messages.progress import (
    CheckpointReport,
    Mark,
    Report,
    SpeedReport,
    TraceReport,
    decode_report,
    encode_report,
)
from fft.messages.protocol import Death, Drain, Record, Suspect, UnreadableMessage, encode
from fft.messages.wire import SCOPES
from fft.protocol.timeouts import bus_operation
from fft.trace.tail import JobView

logger = logging.getLogger(__name__)


# --- commands ---
# Commands of operators to the supervisor, received on the bus's thread and taken by the loop.
#
# Owns one subscription and sends answers. Never acts by itself.


class CommandEar:
    """Receives commands from construction on; calls ``wake``, from any thread, for each."""

    def __init__(self, bus: ErrorBus, wake: Callable[[], None]) -> None:
        self._bus = bus
        self._wake = wake
        self._heard: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._subscription = ResubscribingListener(bus, "commands", self._hear, "the supervisor")

    def take(self) -> Iterator[Command]:
        """Yield the commands received since the last call."""
        with suppress(queue.Empty):
            while True:
                yield self._heard.get_nowait()

    def answer(self, command: Command, verdict: AnswerKind, text: str) -> None:
        """Answer the requester. Its wait is bounded, so a lost bus is only logged."""
        word = encode_answer(Answer(command.id, "the supervisor", verdict, text))
        try:
            self._bus.send(answer_inbox(command.id), word)
        except BusError as error:
            logger.error("could not answer a command on the bus: %s", error)

    def close(self) -> None:
        """Stop listening."""
        self._subscription.close()

    def _hear(self, payload: bytes) -> None:
        with suppress(UnreadableMessage):  # the participants trace it
            if not isinstance(
                command := decode_command(payload), RollCall
            ):  # only ranks answer a roll call
                self._heard.put(command)
                self._wake()


def is_anothers(
    command: Evict | Inject, groups: Mapping[str, Group], serves: bool, alone: bool
) -> bool:
    """Return whether the supervisor of another host may have to answer the command.

    Args:
        serves: This supervisor serves the bus.
        alone: No other host has been found.
    """
    if isinstance(command, Inject):
        return not serves and isinstance(command.fault, ServiceFault)
    return command.group not in groups and not alone


def why_refused(
    command: Evict | Inject, groups: Mapping[str, Group], may_inject: bool, is_ending: bool
) -> str | None:
    """Return why the supervisor of ``groups`` refuses the command, or None if it does not."""
    if isinstance(command, Inject):
        is_refused = isinstance(command.fault, ServiceFault) and not may_inject
        return "it runs without --injectable" if is_refused else None
    group = groups.get(command.group)
    if group is None:
        return f"no group {command.group!r} here; the groups: {', '.join(groups)}"
    if command.rank is not None and command.rank >= group.world:
        return f"no rank {command.rank} in group {group.name}; it has {group.world}"
    if is_ending:
        return "the job is ending"
    if group.loss is not None:
        return f"group {group.name} was taken over by {group.loss.by}"
    if group.eviction is not None:
        return f"group {group.name} is being evicted already"
    return None


# --- progress ---
# Receive the reports of ranks to the supervisor, and find the slow ranks.
#
# Owns one subscription. Never acts by itself.

_CATCH_UP_S = 2.0


class ProgressEar:
    """Receives progress reports from construction on; one thread asks for the results."""

    def __init__(self, bus: ErrorBus) -> None:
        self.stragglers = Stragglers()
        self._bus = bus
        self._mark, self._is_at_mark = Mark(fresh_id()), threading.Event()
        self._speeds: queue.SimpleQueue[SpeedReport] = queue.SimpleQueue()
        self._others: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._subscription = ResubscribingListener(bus, "progress", self._hear, "the supervisor")

    def news(self) -> list[Change]:
        """Return the ranks that became slow, or are no longer slow, since the last call."""
        changes: list[Change] = []
        with suppress(queue.Empty):
            while True:
                word = self._speeds.get_nowait()
                rank = f"{word.group}/{word.rank}"
                changes += self.stragglers.hear(rank, word.inc, word.compute)
        return changes

    def too_slow(self, limit: float | None) -> set[str]:
        """Log the ranks that became slow or are no longer slow.

        Returns:
            The ranks that are slower than the median by the factor ``limit``.
        """
        for change in self.news():
            what = "straggler" if change.slow else "no longer a straggler"
            logger.warning("%s: %s", what, change.evidence)
        slow = self.stragglers.slow.items()
        return {rank for rank, factor in slow if limit is not None and factor >= limit}

    def tell_troubles(self, view: JobView) -> None:
        """Log gaps in traces, checkpoints that were not taken, and warnings about the script.

        They come from the reports, which are added to ``view``, and from the traces in ``view``.
        """
        with suppress(queue.Empty):
            while True:
                word = self._others.get_nowait()
                if isinstance(word, CheckpointReport):
                    view.hear(word, 0.0)
                elif isinstance(word, TraceReport):
                    known = view.gaps.get((word.group, word.rank))
                    view.hear(word, 0.0)
                    if known is not None and known.inc == word.inc:  # logged already
                        continue
                    logger.warning(
                        "the trace of rank %s/%d cannot be written: %s; training continues, and "
                        "`fft audit` and `fft report` will lack the lost lines",
                        word.group,
                        word.rank,
                        word.why,
                    )
        for name, text in view.warnings.items():
            if text:
                logger.warning("%s", text)
                view.warnings[name] = ""
        while troubles := view.checkpoints.troubles:
            logger.warning("%s; training continues", troubles.pop(0))

    def catch_up(self) -> None:
        """Wait until all earlier reports have arrived, for at most 2 s."""
        try:
            self._bus.broadcast(encode_report(self._mark), "progress")
        except BusError as error:
            logger.debug("what ranks said last may not be heard: %s", error)
            return
        self._is_at_mark.wait(_CATCH_UP_S)

    def close(self) -> None:
        """Stop listening."""
        self._subscription.close()

    def _hear(self, payload: bytes) -> None:
        with suppress(UnreadableMessage):  # reports are only informative
            word = decode_report(payload)
            if isinstance(word, SpeedReport):
                self._speeds.put(word)
            elif word == self._mark:
                self._is_at_mark.set()
            else:
                self._others.put(word)


class Links:
    """The bus connections of one supervisor. The first `open` sets the attributes."""

    bus: ErrorBus
    claims: Claims
    starts: GroupStarts
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
        self.starts = GroupStarts(self.bus)
        self.claims = Claims(self.bus, self._wake, self._serves)
        self._undo.callback(self.claims.close)
        self.commands = CommandEar(self.bus, self._wake)
        self._undo.callback(self.commands.close)
        self.progress = ProgressEar(self.bus)
        self._undo.callback(self.progress.close)
        self._hosts = HostWatch(self.bus, "the supervisor", self._host_limit, sender=self.claims.id)
        self._undo.callback(self._hosts.close)
        self.address = own_address(url)

    @property
    def alone(self) -> bool:
        """Whether no other host of the job has been found."""
        return self._hosts is None or self._hosts.alone

    @property
    def has_stages(self) -> bool:
        """Whether further stages with their own scopes were found."""
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

    def head(self) -> Record | None:
        """Return the newest record of the job, or None if there is none or it cannot be read."""
        with suppress(BusError, UnreadableMessage):
            return head_of(self.bus)
        return None

    def forget_exit(self, group: str, rank: int) -> None:
        """Delete the register of the rank's exit, because a new process of it starts."""
        try:
            self.bus.delete(exit_register(group, rank))
        except BusError as error:
            logger.debug("the exit of an earlier process stays on the bus: %s", error)

    def read_exit(self, child: Child) -> Exit | None:
        """Return what the process itself has written about its end, or None."""
        try:
            held = self.bus.read(exit_register(child.group, child.rank))
            found = None if held is None else decode_exit(held)
        except (BusError, UnreadableMessage) as error:
            logger.warning("why pid %d has ended cannot be read: %s", child.pid, error)
            return None
        return found if found is not None and found.host == socket.gethostname() else None

    def publish_exit(self, child: Child) -> None:
        """Add what the supervisor knows of a collected process to the register of its exit."""
        try:
            found = child.exit
            self.bus.write(exit_register(child.group, child.rank), encode_exit(found))
            if found.took_part:
                name = gone_register(child.group, child.rank)
                self.bus.write(name, gone_value(found.pid, socket.gethostname()))
        except BusError as error:
            logger.debug("how pid %d has ended is not on the bus: %s", child.pid, error)

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
