"""Distinguish mistakes in the script from faults of a machine by the errors of processes. Pure.

A mistake recurs wherever the script runs. So the failure of one group proves nothing once others
have committed steps with the same script. Transient errors (a connection, a device) are left to
restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fft.errors import (
    FftError,
    GradientLayoutMismatch,
    NotEnoughGroups,
    OtherSettings,
    StateMismatch,
    UnequalData,
    UnfitCheckpoint,
)
from fft.launch.supervisor.config import RunConfig
from fft.util.error_places import Place

_UNLIKE = {
    GradientLayoutMismatch: "all groups must train the same model",
    OtherSettings: "all groups must be set up alike",
}
_UNFIT = (UnfitCheckpoint, StateMismatch)
"""Classes of errors that recur in every group that begins with this checkpoint."""
_NEVER_LOADED = (SyntaxError, ImportError)


@dataclass(frozen=True)
class Mistake:
    """A mistake in the script: whether it ends the job or one group, the reason and the place."""

    ends: Literal["job", "group"]
    reason: str
    place: Place

    def is_for_good(self, config: RunConfig) -> bool:
        """Return whether the job must end even if it could resume from a checkpoint.

        A job of one group may resume, because no other group has shown that the error recurs.
        """
        alone = config.can_resume and config.groups_in_all == 1
        return self.ends == "job" and is_the_scripts(self.place) and not alone


def is_the_scripts(error: Place | None) -> bool:
    """Return whether the error comes from the script, rather than from FFT, machine or network.

    An item that repeatedly failed to load and unequal data come from the script's data.
    """
    if error is None:
        return False
    if error.item or error.is_a(UnequalData):
        return True
    return not error.may_pass and not error.is_a(FftError)


class Mistakes:
    """Judges the ends of groups. Keeps each group's last error until it commits a step."""

    def __init__(self, groups: Sequence[str], groups_in_all: int) -> None:
        """Store the names of this host's groups and the number of groups of the whole job."""
        self._groups = groups
        self._all = groups_in_all
        self._errors: dict[str, Place] = {}

    def progressed(self, group: str) -> None:
        """Forget the group's last error, because it has committed a step."""
        self._errors.pop(group, None)

    def ended(self, group: str, error: Place | None, job_committed: bool) -> Mistake | None:
        """Judge the end of ``group``.

        Args:
            error: The error that ended it, or None if it raised none.
            job_committed: Any group has committed a step.

        Returns:
            The mistake, or None if a restart may help.
        """
        before = self._errors.pop(group, None)
        if error is not None and error.is_a(UnequalData):
            return Mistake("job", "all ranks must draw the same data", error)
        if error is not None and error.item:
            return self._unreadable(group, error, before)
        if error is not None and job_committed and error.is_a(NotEnoughGroups):
            return Mistake("group", "the others have left, or have not come back in time", error)
        if error is None or error.may_pass or (job_committed and error.is_a(SystemExit)):
            return None
        self._errors[group] = error
        again = before is not None and before.signature == error.signature
        alike = {g for g, e in self._errors.items() if e.signature == error.signature}
        for kind, reason in _UNLIKE.items():
            if error.is_a(kind):
                return Mistake("group" if job_committed else "job", reason, error)
        if not job_committed:
            why = self._before_the_first_commit(error, again, len(alike))
            return None if why is None else Mistake("job", why, error)
        if self._all == 1:
            return Mistake("job", "no other group has the state to continue with", error)
        if len(alike) > 1:
            reason = f"groups {', '.join(sorted(alike))} failed in the same place"
            return Mistake("job", reason, error)
        if again:
            reason = f"group {group} failed in the same place again"
            return Mistake("group", reason, error)
        return None

    def _unreadable(self, group: str, error: Place, before: Place | None) -> Mistake | None:
        """Judge an item that a rank could not load in several attempts.

        The item is due until it is consumed. A transient error gets one restart, because another
        process or connection may help.
        """
        if error.may_pass and not (before is not None and before.item == error.item):
            self._errors[group] = error
            return None
        return Mistake("job", f"{error.item} of the data cannot be loaded", error)

    def _before_the_first_commit(self, error: Place, again: bool, alike: int) -> str | None:
        if again:
            return "after a restart it failed in the same place, and no step was committed"
        if any(map(error.is_a, _NEVER_LOADED)):
            return "it cannot be loaded"
        if any(map(error.is_a, _UNFIT)):
            return "all groups begin with the same state"
        if alike == len(self._groups) == self._all:
            return "no group reached its first step"
        return None
