"""The type of an action, and the registry of actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fft.messages.effects import Effect
from fft.messages.protocol import Event
from fft.protocol.state import Config, Local

Action = Callable[[Local, Config, Event], Iterable[Effect]]
EFFECTS: dict[str, Action] = {}


def action(function: Action) -> Action:
    """Register an action under its function name."""
    EFFECTS[function.__name__] = function
    return function
