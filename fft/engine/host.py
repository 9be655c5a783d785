"""What the engine asks of the process that it runs in."""

from __future__ import annotations

from typing import Protocol

from fft.messages.commands import Command
from fft.messages.protocol import Record


class Host(Protocol):
    """All return at once; called from the engine's thread."""

    def cancel_futures(self, cause: str) -> None:
        """Fail every pending future of the txn."""

    def abort_groups(self, cause: str) -> None:
        """Abort the process groups of the epoch, freeing whoever is blocked in them.

        The one inside of the replica group may wait until the main thread asks for a txn, while all
        of its ranks may still meet in what the script does before.
        """

    def members_lost(self) -> None:
        """Others are dead or suspected since the last event; they may be of this replica group."""

    def decided(self, record: Record) -> None:
        """The job has decided this, as the engine has heard; it may be decided already here."""

    def command(self, command: Command) -> None:
        """An operator has said this to the job; it may not concern this process. Never raises."""

    def interrupt(self, cause: str) -> None:
        """A command waits that the main thread must come to: unwind the body of a txn, if open.

        Called after the command is in the slot: a body that opens later finds it there.
        """
