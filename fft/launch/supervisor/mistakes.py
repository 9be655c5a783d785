"""Tells a mistake in the script from a fault of a machine, by last words of its processes. Pure.

A mistake comes again wherever the script is run; so one group alone proves nothing once others have
committed steps with the same script. What may pass (a connection, a device) is left to restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fft.launch.supervisor.config import RunConfig
from fft.util.error_places import Place
from fft.util.errors import NotEnoughGroups

_UNLIKE = {
    "UnlikeGroups": "all groups must train the same model",
    "OtherSettings": "all groups must be set up alike",
}
_UNEQUAL_DATA = "UnequalData"
"""The class of the error of ranks that have drawn different data."""
_UNFIT = frozenset({"UnfitCheckpoint", "StateMismatch"})
"""What comes again in every group that is to begin with this checkpoint."""
_NEVER_LOADED = frozenset({"SyntaxError", "ImportError"})


@dataclass(frozen=True)
class Mistake:
    """What is to end: the whole ``job``, or the one ``group``; and why."""

    ends: Literal["job", "group"]
    reason: str
    place: Place

    def is_for_good(self, config: RunConfig) -> bool:
        """Whether the job is to end also where it could go on from a checkpoint. One group alone
        may try that: nobody else has shown that the error comes again."""
        alone = config.can_resume and config.groups_in_all == 1
        return self.ends == "job" and is_the_scripts(self.place) and not alone


def is_the_scripts(error: Place | None) -> bool:
    """Whether it is none of FFT's own, nor one of machine and network.

    An item that could not be loaded again and again, and unequal data, come from the script's data.
    """
    if error is None:
        return False
    if error.item or error.type == _UNEQUAL_DATA:
        return True
    return not error.may_pass and "FftError" not in error.kinds


class Mistakes:
    """Hears how groups end. Holds the last error of each that has not committed a step since."""

    def __init__(self, groups: Sequence[str], groups_in_all: int) -> None:
        """``groups``: those whose ends are heard here, of so many in the whole job."""
        self._groups = groups
        self._all = groups_in_all
        self._errors: dict[str, Place] = {}

    def progressed(self, group: str) -> None:
        """It has committed a step: what failed it before has passed."""
        self._errors.pop(group, None)

    def ended(self, group: str, error: Place | None, job_committed: bool) -> Mistake | None:
        """All ranks of ``group`` are gone, by ``error``; None: not by an error of its own.

        ``job_committed``: whether any step was committed, by whomever.
        """
        before = self._errors.pop(group, None)
        if error is not None and error.type == _UNEQUAL_DATA:
            return Mistake("job", "all ranks must draw the same data", error)
        if error is not None and error.item:
            return self._unreadable(group, error, before)
        if error is not None and job_committed and error.type == NotEnoughGroups.__name__:
            return Mistake("group", "the others have left, or have not come back in time", error)
        if error is None or error.may_pass or (job_committed and error.type == "SystemExit"):
            return None
        self._errors[group] = error
        again = before is not None and before.signature == error.signature
        alike = {g for g, e in self._errors.items() if e.signature == error.signature}
        if (reason := _UNLIKE.get(error.type)) is not None:
            return Mistake("group" if job_committed else "job", reason, error)
        if not job_committed:
            reason = self._before_the_first_commit(error, again, len(alike))
            return None if reason is None else Mistake("job", reason, error)
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
        """The verdict on an item that a rank could not load in several attempts.

        The item is due until it is consumed. An error of a machine gets one restart, since another
        process or connection may help.
        """
        if error.may_pass and not (before is not None and before.item == error.item):
            self._errors[group] = error
            return None
        return Mistake("job", f"{error.item} of the data cannot be loaded", error)

    def _before_the_first_commit(self, error: Place, again: bool, alike: int) -> str | None:
        if again:
            return "after a restart it failed in the same place, and no step was committed"
        if not _NEVER_LOADED.isdisjoint(error.kinds):
            return "it cannot be loaded"
        if not _UNFIT.isdisjoint(error.kinds):
            return "all groups begin with the same state"
        if alike == len(self._groups) == self._all:
            return "no group reached its first step"
        return None
