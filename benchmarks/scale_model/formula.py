"""The number of requests of each phase at the job's store, in closed form.

It is derived from the code, and confirmed by `job` event by event for all sizes that are affordable
(`tests/benches/test_scale.py` requires equality). Larger sizes are counted with this module. Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from benchmarks.scale_model.costs import FEW_VOTERS, Design

PhaseName = Literal["step", "rollback", "kill"]


def counts(design: Design, phase: PhaseName, groups: int, ranks: int) -> Counter[str]:
    """Return the requests at the job's store by kind.

    Args:
        design: The design.
        phase: The phase; the step is not the first of its epoch, in which every rank votes
            separately.
        groups: Number of whole groups once the phase is over; a kill began with one more.
        ranks: Number of ranks of a group.
    """
    n = groups * ranks
    ears = groups if design.hearing == "group" else n
    found = Counter(read=1, delete=2)  # the ballot of an earlier txn is removed
    if phase == "step":
        # the last voter reads the votes, or each voter of a few does
        found += Counter(append=groups, add=groups, read=groups if n <= FEW_VOTERS else 1)
        found += _broadcasts(1, ears) + Counter(compare_set=1)  # the commit
    else:
        deaths = ranks if phase == "kill" else 0
        # The aborts come from the rank that raised, or from all that receive a death; then the
        # epoch. Abort, epoch and begin are broadcast.
        found += _broadcasts(deaths + 3, ears) + Counter(compare_set=(n if deaths else 1) + 1)
        # acknowledgements and barrier, from all but the coordinator
        found += Counter(push=2 * (n - 1), pop=2 * (n - 1))
        # the new list is written, and that of the epoch before is removed
        found += Counter(write_list=1, check=1, read=1, delete=1)
        found += Counter(set=1, check=1)  # the epoch record, for observers
        if deaths and design.members == "digest":
            found += Counter(read_list=n - 1)
    return Counter({kind: number for kind, number in sorted(found.items()) if number})


def _broadcasts(number: int, listeners: int) -> Counter[str]:
    """Count broadcasts: number, slot, removal of the oldest slot, read of the number, and reads."""
    return Counter(add=2 * number, compare_set=number, delete=number, hear=number * listeners)
