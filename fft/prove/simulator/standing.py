"""The state of a simulated main thread, by its table (``fsm_specs/main_thread.yaml``)."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from fft.messages.effects import Apply, Finish, Heal, Restore, StartTxn
from fft.messages.protocol import (
    Applied,
    ApplyFailed,
    Connected,
    Healed,
    HealFailed,
    Prepared,
    Restored,
)
from fft.protocol.main_thread import NO_FACTS, shipped_thread
from fft.protocol.roles import Role
from fft.protocol.vocabulary import COMMANDS
from fft.util.errors import ProtocolError

if TYPE_CHECKING:
    from fft.prove.simulator.process import Process

Command = Restore | Heal | Apply | StartTxn | Finish
Word = Prepared | Restored | Connected | Healed | HealFailed | Applied | ApplyFailed


class Standing:
    """The state of one main thread. An event without a row in its table is a violation."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._table = shipped_thread()
        self._state = self._table.spec.initial

    @property
    def role(self) -> Role:
        """Role of the state."""
        return self._table.role(self._state)

    def hears(self, command: Command) -> tuple[str, ...]:
        """Take a command. Returns the effects to carry out."""
        facts: Set[str] = NO_FACTS
        if isinstance(command, Heal) and command.fetch_from is not None:
            late = self._process.peer.group in command.record.learners
            facts = {"learns"} if late else {"fetches"}
        return self.moves_on(COMMANDS[type(command)], facts)

    def says(self, word: Word) -> None:
        """Report the result of a command to the engine."""
        no = isinstance(word, Prepared) and not word.yes
        self.moves_on(word.type, {"says_no"} if no else NO_FACTS)
        self._process.post(word)

    def moves_on(self, event: str, facts: Set[str] = NO_FACTS) -> tuple[str, ...]:
        """Apply an event. Returns the effects to carry out."""
        try:
            self._state, effects = self._table.react(self._state, event, facts)
        except ProtocolError as error:
            self._process.world.violated("protocol_error", f"{self._process.peer}: {error}")
        return effects
