"""Virtual time: a heap of what will happen, in an order that a seed decides alone. Pure.

Nothing here reads the real clock, and nothing is ordered by an address or a hash: two things due
at one instant happen in the order in which they were planned.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol


class Owner(Protocol):
    """Whose doing it is: what a dead process had planned never happens, a stopped one waits."""

    alive: bool
    stopped: bool
    parked: list[tuple[Callable[..., None], tuple[Any, ...]]]


class Clock:
    """Now, in virtual seconds from 0, and what is planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Owner | None, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def after(
        self, delay: float, owner: Owner | None, action: Callable[..., None], *args: Any
    ) -> None:
        """Plan ``action(*args)`` in ``delay`` seconds; it is ``owner``'s doing, or the world's."""
        self._planned += 1
        heappush(self._heap, (self.now + delay, self._planned, owner, action, args))

    def turn(self) -> bool:
        """Let the next thing happen. False: nothing is planned."""
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
