"""Detect that a job has lost its state: no process has it or can get it. Pure."""

from __future__ import annotations

from collections.abc import Collection

from fft.errors import InDoubt, NoState
from fft.launch.supervisor.config import RunConfig
from fft.launch.supervisor.groups import Group
from fft.trace.tail import JobView

ALL_DIED = "all groups that had the state have died"
NOBODY_HAS_IT = "no process has the state any more"


def loss_of(
    ended: Group, groups: Collection[Group], config: RunConfig, view: JobView
) -> str | None:
    """Return why the state is lost after the end of a group, or None if a process may have it.

    Without a checkpoint to resume from, only `NoState` counts. A participant raises it after a
    longer search on all hosts.

    Args:
        ended: The group that ended.
        groups: All groups of this host.
    """
    if config.parts_in_all != len(groups):
        return None
    if (taint := view.comparisons.taint) is not None:
        return f"the replicas differ, and no state has a majority: {taint}"
    living = [group for group in groups if group.living]
    is_clear = view.committed and not any(group.finished for group in groups)
    if config.can_resume and is_clear and not any(_has_joined(g, view) for g in living):
        return ALL_DIED
    if config.can_resume and is_clear and (shard := lost_shard(groups, view)) is not None:
        if config.ranks == 1:
            return ALL_DIED
        return f"no process has the state of rank {shard} any more: it was lost in all groups"
    stops = {NoState.__name__, *((InDoubt.__name__,) if config.can_resume else ())}
    words = ended.error_place
    if words is None or words.type not in stops:
        return None
    if any(view.committed_since(group.name, group.known_incs) for group in living):
        return None
    fix = "" if config.can_resume else "; give --checkpoint, so that a job can continue from one"
    return f"{NOBODY_HAS_IT}{fix}"


def lost_shard(groups: Collection[Group], view: JobView) -> int | None:
    """Return a rank whose part of the state no living process holds, or None.

    ``groups`` are all groups of the job.
    """
    for rank in range(max((group.world for group in groups), default=0)):
        if not any(holds(group, rank, view) for group in groups):
            return rank
    return None


def holds(group: Group, rank: int, view: JobView) -> bool:
    """Return whether a living process of ``group`` has joined the job as ``rank``."""
    seen = view.since(group.name, group.incs_before).get(rank)
    lives = any(child.rank == rank and not child.told_dead for child in group.living)
    return lives and seen is not None and seen.role != "joining"


def _has_joined(group: Group, view: JobView) -> bool:
    return view.joined_since(group.name, group.known_incs)
