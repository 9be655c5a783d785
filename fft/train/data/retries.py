"""Retry the loading of an item, because a network or a file system may recover."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from fft.errors import FftError
from fft.util.error_places import may_pass


class Superseded(Exception):
    """The txn that waited for an item is rolled back, so the item is no longer needed."""


class WorkerDied(RuntimeError):
    """A process that loads items has ended by itself, such as by the kernel for want of memory."""


PAUSES_S = (0.1, 0.5, 2.0)
"""Pauses before further attempts after an error of a network or a file system, in seconds."""
PAUSES_OF_DEATHS_S = (0.1, 0.5)
"""Pauses after the death of a worker, before new ones load the item, in seconds."""
PAUSES_OF_OTHERS_S = (0.1,)
"""Pauses after any other error, which is likely to be permanent, in seconds."""
_ALIVE_S = 0.2
"""Interval of signs of life during a pause, in seconds; less than any threshold for hangs."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


def forbid_retry(error: Exception) -> None:
    """Mark ``error``, because another attempt could load another item or harm the process."""
    error.fft_retry = False  # type: ignore[attr-defined]


def name_item(error: Exception, item: str, number: int) -> None:
    """Record in ``error`` which item failed; a loader may draw other items than the one due."""
    error.fft_item = item  # type: ignore[attr-defined]
    error.fft_item_number = number  # type: ignore[attr-defined]


def is_ahead(error: Exception, end: int) -> bool:
    """Return whether only an item from ``end`` on failed, which can be drawn again later."""
    if isinstance(error, FftError) or not getattr(error, "fft_retry", True):
        return False
    number: int | None = getattr(error, "fft_item_number", None)
    return number is not None and number >= end


def retried(load: Callable[[], T], item: str, alive: Callable[[], object]) -> T:
    """Call ``load``, and call it again after errors.

    An error of a network or a file system (`fft.util.error_places.may_pass`) is followed by up to
    three further attempts, after pauses of 0.1, 0.5 and 2 s. The death of a worker is followed by
    two, after 0.1 and 0.5 s. Any other error, such as FileNotFoundError, is followed by one, after
    0.1 s. An error that `forbid_retry` has marked is
    followed by none. The time of the attempts themselves has no limit here.

    Args:
        load: Loads the item; can be called again after it has raised.
        item: Name of the item for messages, where the error has no name from `name_item`.
        alive: Called during the pauses, so that the monitor does not take them for a hang.

    Raises:
        Exception: The error of the last attempt, with notes on the attempts. Its attribute
            ``fft_item`` names the item.
    """
    attempt = 1
    while True:
        try:
            return load()
        except (FftError, Superseded):
            raise
        except Exception as error:
            failed: str = getattr(error, "fft_item", item)
            pauses = _pauses(error)
            is_over = attempt > len(pauses) or not getattr(error, "fft_retry", True)
            if is_over:
                error.fft_item = failed  # type: ignore[attr-defined]
                if attempt > 1:
                    error.add_note(f"{failed} could not be loaded in {attempt} attempts")
                raise
            logger.warning(
                "%s could not be loaded (%s: %s); attempt %d follows in %g s",
                failed,
                type(error).__name__,
                error,
                attempt + 1,
                pauses[attempt - 1],
            )
            _pause(pauses[attempt - 1], alive)
            attempt += 1


def _pauses(error: Exception) -> tuple[float, ...]:
    text_of_torch = "DataLoader worker (pid"
    if isinstance(error, WorkerDied) or str(error).startswith(text_of_torch):
        return PAUSES_OF_DEATHS_S
    return PAUSES_S if may_pass(error) else PAUSES_OF_OTHERS_S


def _pause(seconds: float, alive: Callable[[], object]) -> None:
    """Wait before the next attempt, so that the network or the file system can recover."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        alive()
        time.sleep(min(left, _ALIVE_S))
    alive()
