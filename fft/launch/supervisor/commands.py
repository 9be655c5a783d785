"""Commands of operators to the supervisor, received on the bus's thread and taken by the loop.

Owns one subscription and sends answers. Never acts by itself.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from fft.bus import ErrorBus
from fft.bus.resubscribing import ResubscribingListener
from fft.errors import BusError
from fft.launch.supervisor.groups import Group
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
)
from fft.messages.fault_plans import ServiceFault
from fft.messages.protocol import UnreadableMessage

logger = logging.getLogger(__name__)


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
    if command.rank is not None and command.rank >= group.ranks:
        return f"no rank {command.rank} in group {group.name}; it has {group.ranks}"
    if is_ending:
        return "the job is ending"
    if group.loss is not None:
        return f"group {group.name} was taken over by {group.loss.by}"
    if group.eviction is not None:
        return f"group {group.name} is being evicted already"
    return None
