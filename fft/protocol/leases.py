"""Leases on the data: which group holds which slice, and which group is granted which next. Pure.

Where groups commit several steps alone, a group keeps its slice of the data across epochs until a
COMMIT of the job consumes it. The slices of a lost group are granted again before new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fft.messages.protocol import GroupEntry, Lease


class Granted(NamedTuple):
    """The position of a job in its data; see ``Record``."""

    cursor: int
    leases: tuple[Lease, ...]
    returned: tuple[int, ...]


def granted(before: Granted, takers: Iterable[GroupEntry]) -> Granted:
    """Return ``before`` with a lease for each of ``takers``, in their order, and no others.

    A group that holds a lease keeps it. The others get returned slices first, then new ones.
    """
    held = {(lease.group, lease.store): lease.slice for lease in before.leases}
    kept = {(g.group, g.store): held.pop((g.group, g.store), None) for g in takers}
    free, cursor, leases = sorted([*before.returned, *held.values()]), before.cursor, []
    for (group, store), number in kept.items():
        if number is None and free:
            number = free.pop(0)
        elif number is None:
            number, cursor = cursor, cursor + 1
        leases.append(Lease(number, group, store))
    return Granted(cursor, tuple(sorted(leases)), tuple(free))


def in_turn(groups: Sequence[GroupEntry], leases: Iterable[Lease]) -> list[GroupEntry]:
    """Return the groups with lease holders first, ordered by slice instead of by name."""
    held = {(lease.group, lease.store): lease.slice for lease in leases}
    end = max(held.values(), default=0) + 1
    return sorted(groups, key=lambda g: held.get((g.group, g.store), end))


def lease_of(leases: Iterable[Lease], group: str, store: str) -> int | None:
    """Return the slice that this instance of a group holds a lease on, or None."""
    return next((lease.slice for lease in leases if lease[1:] == (group, store)), None)
