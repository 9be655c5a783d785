"""The lengths of torch's learning-rate schedules, and warnings where a job leaves one.

A schedule counts steps, and how many steps a data epoch has depends on the number of groups. So a
schedule that was made for the steps of two groups ends late if one of them leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.optim import lr_scheduler as torchs

logger = logging.getLogger(__name__)

MEND = (
    "The number of steps in the data depends on the number of groups. Follow txn.progress instead, "
    "the fraction of the data that is consumed, or pass max_steps equal to the length of the "
    "schedule"
)


def length_of(scheduler: Any) -> int | None:
    """Return the number of steps after which ``scheduler`` reaches its end, or None if it has none
    or it is unknown.

    A warm-up has no end: afterwards the rate stays where the user wants it.
    """
    if isinstance(scheduler, torchs.SequentialLR):
        last = length_of(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    if isinstance(scheduler, torchs.ChainedScheduler):
        lengths = [n for each in scheduler._schedulers if (n := length_of(each)) is not None]
        return max(lengths, default=None)
    if isinstance(scheduler, torchs.CosineAnnealingLR):
        return int(scheduler.T_max)
    if isinstance(scheduler, torchs.OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, torchs.PolynomialLR):
        return int(scheduler.total_iters)
    if isinstance(scheduler, torchs.LinearLR):
        falls = scheduler.end_factor < scheduler.start_factor
        return int(scheduler.total_iters) if falls else None
    if isinstance(scheduler, torchs.LambdaLR):
        return _length_in(scheduler.lr_lambdas)
    return None


def _length_in(functions: Sequence[Any]) -> int | None:
    """Return the number of steps bound to a function, as in Hugging Face's schedules."""
    names = ("num_training_steps", "num_steps", "total_steps")
    bound = [f.keywords for f in functions if isinstance(f, partial)]
    lengths = [k[name] for k in bound for name in names if isinstance(k.get(name), int)]
    return max(lengths, default=None)


class ScheduleLengths:
    """Compares the steps of the registered schedulers with their lengths. Main thread."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedulers = list(schedulers)
        self._warned: set[int] = set()

    def stepped(self) -> None:
        """Warn once for each scheduler that is beyond its length."""
        for number, (scheduler, length) in enumerate(self._lengths()):
            if _steps_of(scheduler) > length and number not in self._warned:
                self._warned.add(number)
                logger.warning(
                    "%s: step %d is beyond its %d steps, so the learning rate no longer follows "
                    "the schedule (a cosine climbs back to its start). %s",
                    type(scheduler).__name__,
                    _steps_of(scheduler),
                    length,
                    MEND,
                )

    def data_ended(self) -> None:
        """Warn for each scheduler that has not reached its end when the data end."""
        for scheduler, length in self._lengths():
            if _steps_of(scheduler) < length:
                logger.warning(
                    "%s: the data ended at step %d of %d, so the learning rate has not reached its "
                    "end. %s",
                    type(scheduler).__name__,
                    _steps_of(scheduler),
                    length,
                    MEND,
                )

    def _lengths(self) -> list[tuple[Any, int]]:
        """The schedulers that have a length; a loaded state may have changed it."""
        return [(s, n) for s in self._schedulers if (n := length_of(s)) is not None]


def _steps_of(scheduler: Any) -> int:
    if isinstance(scheduler, torchs.ChainedScheduler):
        return max(_steps_of(each) for each in scheduler._schedulers)
    return int(getattr(scheduler, "last_epoch", 0))
