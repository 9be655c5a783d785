"""The contents of the screen for a job: its groups, and the faults of its plan."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fft.launch.supervisor.groups import Group
from fft.messages.fault_plans import FaultPlan
from fft.trace.display import Row, Snapshot, row_of
from fft.trace.tail import JobView


def snapshot(groups: Iterable[Group], view: JobView, began: float, plan: FaultPlan) -> Snapshot:
    """Return the present state of the job.

    ``began`` is its start on the monotonic clock, in seconds.
    """
    rows = [_row(group, view) for group in groups]
    names = {fault.name for fault in plan.faults}
    return Snapshot(time.monotonic() - began, rows, len(names & view.injected.keys()), len(names))


def _row(group: Group, view: JobView) -> Row:
    """Return the group's row, which leaves out the last acts of dead incarnations."""
    is_old = group.living and view.incs(group.name) == group.known_incs
    return Row(group.name, group.doing()) if is_old else row_of(view, group.name, group.doing())
