"""How many requests each phase costs the job's store, in closed form.

Read off the code, and confirmed by `job` event by event wherever that can be afforded
(`tests/prove/test_scale.py` wants equality). What cannot be afforded is counted from here. Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from fft.prove.scale.costs import Design

PhaseName = Literal["step", "rollback", "kill"]


def counts(
    design: Design, phase: PhaseName, groups: int, ranks: int, told: bool = True
) -> Counter[str]:
    """Requests at the job's store by kind.

    Args:
        phase: the step is not the first of its epoch, in which every rank votes for itself.
        groups: whole groups once the phase is over; a kill began with one more.
        told: acknowledgements and barriers are told to one coordinator, which alone proposes the
            epoch; else everyone broadcasts them, and everyone proposes.
    """
    n = groups * ranks
    ears = groups if design.hearing == "group" else n
    found: Counter[str] = Counter()
    if phase == "step":
        found += _votes(design, groups, n) + _broadcasts(1, ears) + _decided(design)
        found["compare_set"] += 1  # the commit
    else:
        deaths = ranks if phase == "kill" else 0
        # The aborts: of who raised, or of everyone who hears of a death. Then the epoch.
        found["compare_set"] += (n if deaths else 1) + (1 if told else n)
        found += _broadcasts(deaths + (3 if told else 2 * n + 2), ears) + _decided(design)
        if told:
            found += Counter(push=2 * (n - 1), pop=2 * (n - 1))
        if design.members != "inline":  # written, and the one of the epoch before removed
            proposals = 1 if told else n
            found += Counter(write_list=proposals, read=proposals, delete=proposals)
        if deaths and design.members == "digest":
            found["read_list"] += n - 1
    return Counter({kind: number for kind, number in sorted(found.items()) if number})


def _votes(design: Design, groups: int, n: int) -> Counter[str]:
    voters = groups if design.votes == "group" else n
    if design.ballot == "whole":
        return Counter(append=voters, read=voters)
    return Counter(append=voters, add=voters, read=1)


def _broadcasts(number: int, listeners: int) -> Counter[str]:
    """A number, a slot, the oldest slot removed, a look at the number; and everyone reads."""
    return Counter(add=2 * number, compare_set=number, delete=number, hear=number * listeners)


def _decided(design: Design) -> Counter[str]:
    """The ballot of an earlier txn is removed."""
    return Counter(read=1, delete=2) if design.ballot == "counted" else Counter(delete=1)
