"""What a rank does when its monitor says that its main thread hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fft.messages.protocol import Fault

if TYPE_CHECKING:
    from fft.train.parts import Parts


def hung(parts: Parts, reason: str) -> None:
    """The main thread hangs; called on a thread of its own.

    A body of FFT's own loop is unwound by the rollback, and takes part in the next epoch. From
    torchft's loop nobody can fetch the thread back, so that its group is left out until it has
    come by itself: else the barrier of that epoch would wait for it. Who has a collective under
    way may only be waiting for the one that hangs, and is not left out.
    """
    job, plan, local = parts.job, parts.worker.txn, parts.job.local
    if local is not None and local.role == "apart":  # who waits for this group goes on
        job.say_stuck(reason)
    if job.thread.role == "applying":
        parts.worker.update_hangs(reason)
    if plan is None or job.thread.role == "applying":
        return
    waits = parts.groups.pending()
    if parts.reductions.raises or waits or not job.say_stuck(reason):
        job.post(Fault(plan.token, f"hangs: {reason}", "Hang"))
