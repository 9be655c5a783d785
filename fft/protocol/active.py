"""Rules that choose the groups of an epoch that contribute to its steps. Pure.

Public as ``fft.active``, for ``ManagerConfig(active=[…])``. The first rule applies to all groups of
the epoch, and each further rule to the groups that the previous one has kept. Groups are ordered by
name; names that are numbers are ordered by value. The groups that are not chosen are spares: they
compute every step and hold the state, and may contribute in the next epoch.
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
    """Keep the first groups, as many as the largest multiple of ``number`` that there are."""
    return Rule("divisible_by", number)


def whole(number: int) -> Rule:
    """Keep the groups of each place, such as a node or a rack, that has at least ``number`` groups.

    ``ManagerConfig(place=…)`` names the place of a group.
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
    """Return the largest number of groups that the rules can choose, or None if there is none."""
    limits = [number for kind, number in rules if kind == "max_active"]
    return min(limits, default=None)


def chosen(groups: Sequence[Place], rules: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Return the names of the groups that contribute. Without rules all groups do."""
    for kind, number in rules:
        groups = _KINDS[kind](groups, number)
    return tuple(name for name, _ in groups)
