"""The groups of an epoch that contribute to its steps: rules over the list of members. Pure.

Public as ``fft.active``, for ``ManagerConfig(active=[…])``. The rules apply in their order, each to
the groups that the one before has kept. Groups are ordered by name, numbers by value. The others
are spares: they compute every step and hold the state, and may contribute in the next epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from fft.messages.identities import Rule as Rule

Place = tuple[str, str]
"""A group's name, and the node or rack that it names as its place."""


def max_active(number: int) -> Rule:
    """Keep the first ``number`` groups."""
    return Rule("max_active", number)


def divisible_by(number: int) -> Rule:
    """Keep the first groups, as many as the largest multiple of ``number``."""
    return Rule("divisible_by", number)


def whole(number: int) -> Rule:
    """Keep the groups of places with at least ``number`` groups, such as nodes or racks.

    The place of a group is ``ManagerConfig(place=…)``.
    """
    return Rule("whole", number)


def _first(groups: Sequence[Place], number: int) -> Sequence[Place]:
    return groups[:number]


def _multiple(groups: Sequence[Place], number: int) -> Sequence[Place]:
    return groups[: len(groups) // number * number]


def _whole_places(groups: Sequence[Place], number: int) -> Sequence[Place]:
    found = Counter(place for _, place in groups)
    return [group for group in groups if found[group[1]] >= number]


_KINDS: dict[str, Callable[[Sequence[Place], int], Sequence[Place]]] = {
    "max_active": _first,
    "divisible_by": _multiple,
    "whole": _whole_places,
}


def at_most(rules: Sequence[tuple[str, int]]) -> int | None:
    """Return the largest number of groups that the rules can choose; None: any number."""
    limits = [number for kind, number in rules if kind == "max_active"]
    return min(limits, default=None)


def chosen(groups: Sequence[Place], rules: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Return the names of the groups that contribute; without rules, of all of them."""
    for kind, number in rules:
        groups = _KINDS[kind](groups, number)
    return tuple(name for name, _ in groups)
