"""Decide from the view of a job when its fault plan is finished. Pure: it does no I/O."""

from __future__ import annotations

from fft.messages.fault_plans import DrainFault, FaultPlan
from fft.protocol.roles import AT_WORK
from fft.trace.tail import Injected, JobView

_LEAVES_EPOCH = frozenset({"kill", "drain"})


class PlanWatch:
    """Detects that every fault has fired and was recovered from, and that enough steps followed."""

    def __init__(
        self, plan: FaultPlan, groups: list[str], further_steps: int, min_steps: int
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._further = further_steps
        self._min_steps = min_steps
        self._settled_at: int | None = None
        self._done = False

    def unfired(self, view: JobView) -> list[str]:
        """Return the names of the plan's faults that have not fired."""
        return [fault.name for fault in self._plan.faults if fault.name not in view.injected]

    def due(self, view: JobView) -> bool:
        """Return True in the first call that finds the plan finished, else False."""
        if self._done or not self._settled(view):
            return False
        if self._settled_at is None:
            self._settled_at = view.step
        self._done = view.step >= max(self._settled_at + self._further, self._min_steps)
        return self._done

    def unfinished(self, view: JobView) -> str | None:
        """Return why the plan was not finished when the job ended, or None if it was."""
        if self._done:
            return None
        if self.unfired(view):
            return "not all of its faults fired"
        if self._settled_at is None:
            return "the groups were not all back in one epoch after the last fault"
        goal = max(self._settled_at + self._further, self._min_steps)
        return f"the job ended at step {view.step}, before step {goal}"

    def _settled(self, view: JobView) -> bool:
        """Return whether all faults fired and all expected groups were in one epoch since."""
        if self.unfired(view):
            return False
        gone = {
            fault.group
            for fault in self._plan.faults
            if isinstance(fault, DrainFault) and fault.return_after_steps is None
        }
        expected = tuple(sorted(set(self._groups) - gone))
        ranks = [rank for group in expected for rank in view.of(group)]
        epochs: dict[int, set[int]] = {}
        for (group, number), rank in view.ranks.items():
            if group in expected:  # ranks with the same number are in the same scope
                epochs.setdefault(number, set()).add(rank.epoch)
        if not epochs or any(not view.of(group) for group in expected):
            return False
        if any(rank.role == "apart" for rank in ranks):  # a local group is often in no epoch
            together = all(rank.role not in ("leaving", "terminal") for rank in ranks)
        else:
            together = all(len(of_one) == 1 for of_one in epochs.values()) and all(
                rank.role in AT_WORK and rank.members == expected for rank in ranks
            )
        step = min(rank.step for rank in ranks)
        return together and all(
            _recovered(
                injected, step, min(epochs.get(injected.rank) or min(epochs.values(), key=min))
            )
            for injected in view.injected.values()
        )


def _recovered(injected: Injected, step: int, epoch: int) -> bool:
    """Return whether a step was committed since, and a group that left has returned."""
    is_back = epoch > injected.epoch or injected.kind not in _LEAVES_EPOCH
    return step > injected.step and is_back


def return_step(plan: FaultPlan, group: str, view: JobView, seen: set[str]) -> int | None:
    """Return the step of the job at which a drained group is to return.

    Args:
        seen: Names of the planned drains that were handled; this call adds to them.

    Returns:
        The step, or None if no new planned drain took the group away, or if it stays away.
    """
    step = None
    for fault in plan.faults:
        if not isinstance(fault, DrainFault) or fault.group != group:
            continue
        if fault.name in view.injected and fault.name not in seen:
            seen.add(fault.name)
            left_at = max((rank.step for rank in view.of(group)), default=view.step)
            if fault.return_after_steps is not None:
                step = left_at + fault.return_after_steps
    return step
