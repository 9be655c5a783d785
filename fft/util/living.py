"""A search for all objects of some classes in this process, for callers without references."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any


def living(kinds: tuple[type, ...]) -> list[Any]:
    """Return all instances that the garbage collector tracks, including half-constructed ones.

    The cost grows with the number of all objects. This uses one call that returns only referrers of
    the classes: a list of all objects would also reference the tuples that other threads are
    building, and ``tuple(…)`` then raises SystemError.
    """
    things = gc.get_referrers(*_with_subclasses(kinds))
    return [thing for thing in things if issubclass(type(thing), kinds)]


def _with_subclasses(kinds: Iterable[type]) -> set[type]:
    found, left = set(kinds), list(kinds)
    while left:
        new: set[type] = set(type.__subclasses__(left.pop())) - found
        found |= new
        left += new
    return found
