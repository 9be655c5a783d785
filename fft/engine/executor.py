"""The main thread's part of the protocol, without I/O: its table, and the order of its work.

``StepExecutor`` owns the state of one main thread (``fsm_specs/main_thread.yaml``). It accepts the
engine's commands and the reports on their results. The work itself is injected: the torch code in
production, a model of it in the simulator. Both therefore take the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fft.engine.core import Command
from fft.messages.causes import CauseCode
from fft.messages.effects import Heal, Restore, StartTxn
from fft.messages.protocol import (
    Applied,
    ApplyFailed,
    Connected,
    Event,
    Fault,
    Healed,
    HealFailed,
    Prepared,
    Restored,
)
from fft.protocol.main_thread import NO_FACTS, shipped_thread
from fft.protocol.roles import Role
from fft.protocol.vocabulary import COMMANDS

Report = Prepared | Restored | Connected | Healed | HealFailed | Applied | ApplyFailed
"""The result of a command."""
Work = Mapping[str, Callable[[Any], None]]
"""Effect of the table → the function that carries it out; its argument is the command."""


class StepExecutor:
    """The state machine of the main thread: processes commands and reports by the table.

    The main thread makes the transitions. Other threads may call only ``transition_if`` and
    ``role``.

    Args:
        post: Posts an event to the engine.
        take: Frees the engine's slot for the next command.
        lock: Held during a transition.

    Attributes:
        lost: Why the state of this rank is lost, until a rollback reports it, or None. While it is
            set, the executor rejects epochs and txns.
    """

    def __init__(
        self,
        post: Callable[[Event], None],
        take: Callable[[Command], None],
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.lost: str | None = None
        self._post, self._take = post, take
        self._lock = lock or nullcontext()
        self._table = shipped_thread()
        self._state = self._table.spec.initial

    @property
    def role(self) -> Role:
        """The role of the current state. Thread-safe."""
        return self._table.role(self._state)

    def has_row(self, event: str) -> bool:
        """Return whether the current state has a row for the event."""
        return self._table.has(self._state, event)

    # --- commands ---

    def execute(self, command: Command, work: Work, facts: Set[str] = NO_FACTS) -> None:
        """Take a command from the engine's slot and carry out its effects in order.

        Args:
            command: The command in the slot.
            work: Functions for the effects, except for the effects that reject a command.
            facts: Guards that hold for the command, besides ``torn``.

        Raises:
            ProtocolError: The command is not allowed in this state.
        """
        effects = self.accept(command, facts)
        self._take(command)
        for effect in effects:
            if effect == "refuse_txn" and isinstance(command, StartTxn):
                self._post(Fault(command.token, self._why(), CauseCode.STATE_LOST, "apply"))
            elif effect == "refuse_epoch" and isinstance(command, Heal):
                epoch, code = command.record.epoch, CauseCode.STATE_LOST
                self._post(HealFailed(epoch, self._why(), torn=True, code=code))
            else:
                work[effect](command)

    def accept(self, command: Command, facts: Set[str] = NO_FACTS) -> tuple[str, ...]:
        """Make the transition for a command; return the effects that the caller must carry out."""
        if self.lost is not None:
            facts = {*facts, "torn"}
        return self.transition(COMMANDS[type(command)], facts)

    def _why(self) -> str:
        assert self.lost is not None, "the table refuses only then"
        return self.lost

    # --- reports ---

    def report(self, result: Report) -> None:
        """Make the transition for the result of a command, then post the result to the engine.

        Raises:
            ProtocolError: No such command is in progress.
        """
        says_no = isinstance(result, Prepared) and not result.yes
        self.transition(result.type, {"says_no"} if says_no else NO_FACTS)
        self._post(result)

    def restored(self, command: Restore) -> None:
        """Report a completed rollback, and the loss of the state if ``lost`` is set."""
        why, self.lost = self.lost, None
        if why is None:
            self.report(Restored(command.token))
        else:
            self.report(Restored(command.token, True, why, CauseCode.STATE_LOST))

    def unwound(self) -> None:
        """Record that the step function ended without a vote. The txn will be rolled back.

        Has no effect after a vote.
        """
        self.transition_if("computing", "unwound")

    def transition_if(self, role: Role, event: str) -> bool:
        """Make the transition if the state has this role; return whether it has. Thread-safe."""
        with self._lock:
            if self.role != role:
                return False
            self._state, _ = self._table.react(self._state, event)
            return True

    def transition(self, event: str, facts: Set[str] = NO_FACTS) -> tuple[str, ...]:
        """Make the transition for an event and return its effects.

        Raises:
            ProtocolError: The current state has no row for the event.
        """
        with self._lock:
            self._state, effects = self._table.react(self._state, event, facts)
        return effects
