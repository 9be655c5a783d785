"""Virtual time: a heap of planned events, whose order depends only on a seed. Pure.

Nothing here reads the real clock, and no order depends on an address or a hash: two events due at
the same instant happen in the order in which they were planned.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol


class Owner(Protocol):
    """The process that planned an event; events of a dead process are dropped, of a stopped one
    held."""

    alive: bool
    stopped: bool
    parked: list[tuple[Callable[..., None], tuple[Any, ...]]]


class Clock:
    """The current time, in virtual seconds from 0, and the planned events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Owner | None, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def after(
        self, delay: float, owner: Owner | None, action: Callable[..., None], *args: Any
    ) -> None:
        """Plan ``action(*args)`` in ``delay`` seconds, for ``owner``, or for the world (None)."""
        self._planned += 1
        heappush(self._heap, (self.now + delay, self._planned, owner, action, args))

    def turn(self) -> bool:
        """Run the next event. Returns False if nothing is planned."""
        if not self._heap:
            return False
        self.now, _, owner, action, args = heappop(self._heap)
        if owner is not None:
            if not owner.alive:
                return True
            if owner.stopped:
                owner.parked.append((action, args))
                return True
        action(*args)
        return True
