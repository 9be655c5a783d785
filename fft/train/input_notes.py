"""What the trace tells of the data of committed steps: who runs them, and what they took.

The audit holds each committed txn to it (`fft.trace.inputs`). Main thread.
"""

from __future__ import annotations

from typing import Any

from fft.messages.effects import StartTxn
from fft.trace.inputs import CONSUMED, LOOP, TORCHFT, TRANSACTIONS
from fft.train.participation import Participation


class InputNotes:
    """Of one process. A note is in the trace before the engine hears the word it belongs to."""

    def __init__(self, job: Participation) -> None:
        self._job = job
        self._loop = ""
        """Which one has run the last txn that this rank has voted in."""
        self._consumes: dict[str, Any] | None = None

    def voting(self, plan: StartTxn, consumes: dict[str, Any] | None) -> None:
        """This rank is about to vote in the txn of ``plan``. With its first vote a loop begins, and
        the one before it has ended: however it was left, nothing more is committed by it.

        Args:
            consumes: what its commit consumes, in FFT's own loop; None: the loop is torchft's.
        """
        loop, self._consumes = TORCHFT if consumes is None else TRANSACTIONS, consumes
        if loop != self._loop:
            self._loop = loop
            self._job.note(LOOP, {"runs": loop, "from": list(plan.token)})

    def committed(self) -> None:
        """The txn that this rank has voted in last is committed."""
        consumes, self._consumes = self._consumes, None
        if consumes is not None:
            self._job.trace.note(CONSUMED, consumes)
