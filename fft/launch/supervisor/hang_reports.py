"""Hang reports from the monitors of children to the supervisor, over its own pair of sockets."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress

from fft.launch.supervisor.children import Child
from fft.messages.protocol import MAX_MESSAGE, Suspect, UnreadableMessage, decode

_REPORTS_A_TURN = 16  # bounded, so that many reports cannot delay the handling of deaths

logger = logging.getLogger(__name__)


class HangReports:
    """Receives hang reports about our children. Any process started by a child can write here."""

    def __init__(self) -> None:
        # Datagrams keep the messages of several writers separate.
        self.socket, self._children = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)

    @property
    def fd(self) -> int:
        """The descriptor that children write to."""
        return self._children.fileno()

    def take(self, living: Sequence[Child]) -> Iterator[Suspect]:
        """Yield the reports about one of the ``living``; reads at most 16 messages per call."""
        known = {(child.group, child.rank, child.pid) for child in living}
        with suppress(BlockingIOError):
            for _ in range(_REPORTS_A_TURN):
                report = self.socket.recv(MAX_MESSAGE)
                if (message := _about(known, report)) is not None:
                    yield message

    def close(self) -> None:
        """Close both ends."""
        self.socket.close()
        self._children.close()


def _about(known: set[tuple[str, int, int]], report: bytes) -> Suspect | None:
    """Return the reported hang if it concerns a known child, else log the message.

    The sender need not be a monitor.
    """
    try:
        message = decode(report)
    except UnreadableMessage as error:
        logger.warning("a process of the job sent something that is no message: %s", error)
        return None
    if (
        isinstance(message, Suspect)
        and message.host == socket.gethostname()
        and (message.group, message.rank, message.pid) in known
    ):
        return message
    logger.warning("a process of the job sent a message that it may not send: %r", report[:200])
    return None
