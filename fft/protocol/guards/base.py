"""What a guard is, and the list of them."""

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
    """What a decision says; None: it is none, or the register is empty."""
    return event.record if isinstance(event, Decision) else None
