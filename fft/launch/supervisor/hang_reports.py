"""What monitors of children report to the supervisor, over a pair of sockets that it owns."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress

from fft.launch.supervisor.children import Child
from fft.messages.protocol import MAX_MESSAGE, Suspect, UnreadableMessage, decode

_REPORTS_A_TURN = 16  # the deaths of children come first, however much others have to say

logger = logging.getLogger(__name__)


class HangReports:
    """Hangs of our children. Any process that a child starts can write here, too."""

    def __init__(self) -> None:
        # Datagrams, which keep apart however many write.
        self.socket, self._children = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)

    @property
    def fd(self) -> int:
        """The descriptor for children to write to."""
        return self._children.fileno()

    def take(self, living: Sequence[Child]) -> Iterator[Suspect]:
        """What has come that is about one of the ``living``; a bounded number a call."""
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
    """The hang that is reported, if of a child of ours: who speaks need not be a monitor."""
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
