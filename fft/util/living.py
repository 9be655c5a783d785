"""Which objects of some classes this process holds, where nothing that we have leads to them."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any


def living(kinds: tuple[type, ...]) -> list[Any]:
    """All that the garbage collector knows, half-made ones included. Looks at every object.

    In one call that hands out only what refers to the classes: a list of all objects would hold the
    tuples that other threads are building, and ``tuple(…)`` raises SystemError then.
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
