"""The type of a guard, and the registry of guards."""

from __future__ import annotations

from collections.abc import Callable

from fft.messages.protocol import Decision, Event, Record
from fft.protocol.state import Config, Local

Guard = Callable[[Local, Config, Event], bool]
GUARDS: dict[str, Guard] = {}


def guard(function: Guard) -> Guard:
    """Register a guard under its function name."""
    GUARDS[function.__name__] = function
    return function


def record_of(event: Event) -> Record | None:
    """Return the record of a decision; None for another event or an empty register."""
    return event.record if isinstance(event, Decision) else None
