"""Immediate reports of rank deaths, and detection of ranks that end too early or never begin.

Reads the view of the traces and the memory maps of children. Writes to the log.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fft.launch.supervisor.children import MISMATCH, Child, cause_of
from fft.launch.supervisor.groups import Group
from fft.launch.supervisor.judgement import NO_TRANSACTIONS
from fft.trace.inputs import TRANSACTIONS
from fft.trace.tail import JobView, RankView

_IDLE_S = 60.0
"""Time from the import of torch until a missing first transaction is reported, in seconds. It
leaves time to prepare data."""
_LOOK_S = 5.0
"""Interval between two checks whether torch is loaded, in seconds."""
_TORCH = "libtorch"

logger = logging.getLogger(__name__)


_ROUNDS = 3
"""Number of rounds of deaths at one step, without a commit in between, that end the job.

A new round begins with the death of a process that was started after the previous round. Processes
that die together, as with their host, are one round.
"""


class UnexplainedDeath(NamedTuple):
    """A death that neither the supervisor, nor a monitor, nor an injected fault explains."""

    group: str
    rank: int
    cause: str
    item: int
    """The position in the data of the step."""
    line: str
    """The decisive line of its log."""
    log: Path
    began: float
    """Start of the process on the monotonic clock, in seconds."""
    died: float
    """Its death on the monotonic clock, in seconds."""

    def __str__(self) -> str:
        return f"group {self.group} rank {self.rank} by {self.cause}"


class Deaths:
    """The deaths of one job's ranks, as its supervisor sees them."""

    def __init__(self) -> None:
        self.suspected: dict[int, str] = {}
        """Causes of reported hangs by pid."""
        self._at: dict[int, list[UnexplainedDeath]] = {}
        """Unexplained deaths by the step of the job."""
        self._told: set[tuple[str, int, str]] = set()
        self._look_at: float | None = time.monotonic()
        self._loaded_at: float | None = None

    def is_early(self, child: Child, groups: Mapping[str, Group], view: JobView) -> bool:
        """Return whether a child that ended with exit status 0 was in the middle of the job.

        It was if it took part and left neither with a commit nor by `shutdown()`. Whether a child
        that called `shutdown()` left early shows only when others continue; see `has_been_left`.
        """
        group = groups.get(child.group)
        if group is None or not group.is_to_go_on:
            return False
        seen = _seen(child, group, view)
        return seen is not None and seen.role != "joining" and not seen.has_left

    def has_been_left(self, child: Child, group: Group, view: JobView) -> bool:
        """Return whether a child left FFT's loop by `shutdown()` and others committed since."""
        if child.code != 0 or child.left_early or child not in group.children:
            return False
        seen = _seen(child, group, view)
        if seen is None or seen.leaves or seen.loop != TRANSACTIONS:
            return False
        return view.reached(child.rank) > seen.step

    def tell(self, child: Child, group: Group, view: JobView) -> None:
        """Log how a rank was lost, once per rank and cause."""
        self._note(child, group, view)
        cause = self._cause(child, group, view)
        key = (child.group, child.rank, cause.partition(";")[0])
        if child.was_killed or key in self._told:
            return
        self._told.add(key)
        seen = _seen(child, group, view)
        where = "before its first transaction" if seen is None else f"at step {seen.step}"
        if child.left_early:
            where += ", before the end of the job; its group is restarted"
        logger.warning(
            "group %s rank %d (pid %d) %s %s. Log: %s",
            *(child.group, child.rank, child.pid, cause, where, child.log),
        )

    def _note(self, child: Child, group: Group, view: JobView) -> None:
        seen = _seen(child, group, view)
        is_injected = seen is not None and seen.is_injected
        is_known = child.was_killed or child.pid in self.suspected or child.was_asked
        is_odd = child.left_early or (child.code or 0) < 0
        if seen is None or is_known or is_injected or not is_odd:
            return
        cause = "exit status 0" if child.left_early else cause_of(child.code)
        line, now = child.decisive_line(), time.monotonic()
        who = child.group, child.rank, cause
        death = UnexplainedDeath(*who, view.cursor, line, child.log, child.began, now)
        self._at.setdefault(view.step, []).append(death)

    def signatures(self, view: JobView) -> frozenset[tuple[str, str]]:
        """Return step and cause of the deaths at the last step, to compare with the next start."""
        return frozenset((f"step {view.step}", d.cause) for d in self._at.get(view.step, ()))

    def about(self, view: JobView) -> str | None:
        """Describe the deaths at the step that the job has reached, or return None."""
        deaths = self._at.get(view.step)
        if not deaths:
            return None
        count = "1 process" if len(deaths) == 1 else f"{len(deaths)} processes"
        who = ", ".join(map(str, deaths))
        text = f"{count} died at step {view.step} (data from item {deaths[0].item}): {who}"
        telling = next((d for d in deaths if MISMATCH.search(d.line)), deaths[-1])
        if MISMATCH.search(telling.line):
            text += "; the ranks of a group called different collectives"
        if telling.line:
            text += (
                f". The log of group {telling.group} rank {telling.rank} ({telling.log}) "
                f"ends with: {telling.line}"
            )
        return text

    def verdict(self, view: JobView) -> str | None:
        """Return why further restarts would not help, or None if they may."""
        deaths = self._at.get(view.step, [])
        mismatched = {d.group for d in deaths if MISMATCH.search(d.line)}
        rounds, until = 0, 0.0
        for death in deaths:  # processes that die together, as with their host, are one round
            if death.began > until:
                rounds, until = rounds + 1, death.died
        if rounds < _ROUNDS and len(mismatched) < 2:
            return None
        return self.about(view)

    def _cause(self, child: Child, group: Group, view: JobView) -> str:
        if child.left_early:
            return "ended with exit status 0"
        if child.last_words is not None:
            return f"ended with {child.last_words.short()}"
        text = f"died: {cause_of(child.code)}"
        if (why := self.suspected.get(child.pid)) is not None:
            return f"{text} by its monitor, because it hung ({why})"
        if child.code != -signal.SIGKILL:
            return text
        seen = _seen(child, group, view)
        if seen is not None and seen.is_injected:
            return f"{text}, an injected fault"
        return f"{text}, possibly out of memory (see `dmesg`)"

    def warn_of_idle(self, groups: Iterable[Group], view: JobView) -> None:
        """Log once if no rank has begun a transaction although torch was loaded long ago."""
        now = time.monotonic()
        if self._look_at is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if view.ranks or view.gaps:
            self._look_at = None
        elif self._loaded_at is None:
            children = (child for group in groups for child in group.living)
            self._loaded_at = now if any(map(_has_torch, children)) else None
        elif now > self._loaded_at + _IDLE_S:
            self._look_at = None
            logger.warning(
                "no rank has begun a transaction in the %.0f s since torch was loaded. If the "
                "script still prepares its data or model, ignore this; otherwise %s",
                _IDLE_S,
                NO_TRANSACTIONS,
            )


def _seen(child: Child, group: Group, view: JobView) -> RankView | None:
    """Return the view of this process, or None if it has not joined or its trace has a gap."""
    seen = view.since(group.name, group.incs_before).get(child.rank)
    has_gap = seen is not None and view.gaps.get((group.name, child.rank)) == seen.inc
    return None if has_gap else seen


def _has_torch(child: Child) -> bool:
    try:
        return _TORCH in Path(f"/proc/{child.pid}/maps").read_text()
    except OSError:  # the process has just ended
        return False
