"""Whether a job has lost its state: no process has it, and none can get it. Pure."""

from __future__ import annotations

from collections.abc import Collection

from fft.launch.supervisor.config import RunConfig
from fft.launch.supervisor.groups import Group
from fft.trace.tail import JobView
from fft.util.errors import InDoubt, NoState

ALL_DIED = "all groups that had the state have died"
NOBODY_HAS_IT = "no process has the state any more"


def loss_of(
    ended: Group, groups: Collection[Group], config: RunConfig, view: JobView
) -> str | None:
    """Why the state is lost, after group ``ended``; None: somebody has it, or may have.

    Without a checkpoint to go on from, only `NoState` tells, which looks longer, and on all hosts.
    """
    if config.groups_in_all != len(groups):
        return None
    living = [group for group in groups if group.living]
    is_clear = view.committed and not any(group.finished for group in groups)
    if config.can_resume and is_clear and not any(_has_joined(g, view) for g in living):
        return ALL_DIED
    stops = {NoState.__name__, *((InDoubt.__name__,) if config.can_resume else ())}
    words = ended.last_words
    if words is None or words.type not in stops:
        return None
    if any(view.committed_since(group.name, group.known_incs) for group in living):
        return None
    return NOBODY_HAS_IT


def _has_joined(group: Group, view: JobView) -> bool:
    return view.joined_since(group.name, group.known_incs)
