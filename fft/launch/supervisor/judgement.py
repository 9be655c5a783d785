"""The supervisor's findings on a job, and the deaths of its processes.

`Judgement` collects the facts that `fft.launch.verdict` judges. `Deaths` reports deaths at once,
and detects ranks that end too early, never begin, or die at the same step again.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fft.launch.exit_status import ExitStatus
from fft.launch.supervisor.children import MISMATCH, Child
from fft.launch.supervisor.groups import Group
from fft.launch.verdict import (
    NO_TRANSACTIONS,
    Fate,
    GroupEnd,
    JobEnd,
    Mistake,
    cause_of,
    is_the_scripts,
    verdict,
)
from fft.messages.causes import LeaveReason
from fft.messages.fault_plans import AnyFault, Fault, FaultPlan, in_words
from fft.trace.ends import Taint
from fft.trace.history import RankView
from fft.trace.tail import JobView

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobOutcome:
    """How the job ended; ``lines`` describe the problems, with their places, for the operator."""

    ok: bool
    lines: tuple[str, ...] = ()
    lost: str | None = None
    """The reason why no process has the state, if the job can continue from a checkpoint."""
    taint: Taint | None = None
    """Steps that may be wrong, if the job ended because its replicas differ."""
    fired: frozenset[str] = frozenset()
    """Faults of the plan that have fired."""
    step: int = 0
    """The last committed step; if stages step independently, that of the first stage."""
    failed: tuple[int, str] | None = None
    """Step and cause of the newest checkpoint that failed with an error."""
    is_stale: bool = False
    """Traces have gaps, and the number of committed steps could not be read from the bus."""
    errors: frozenset[tuple[str, str]] = frozenset()
    """Errors of the script that ended groups."""
    ended_by_error: bool = True
    """Preemptions and losses of other hosts do not explain the end of its groups."""
    deaths: frozenset[tuple[str, str]] = frozenset()
    """Step and cause of the deaths that lost the state."""
    status: ExitStatus | None = None
    """The exit status, or None to derive COMPLETE or FAILED from ``ok``."""

    @property
    def ends(self) -> frozenset[tuple[str, str]]:
        """Errors and deaths that may recur with the same state; SIGKILL comes from outside."""
        return self.errors | {death for death in self.deaths if "SIGKILL" not in death[1]}

    @property
    def exit_status(self) -> ExitStatus:
        """The exit status of `fft run`."""
        if self.status is not None:
            return self.status
        return ExitStatus.COMPLETE if self.ok else ExitStatus.FAILED


@dataclass(kw_only=True)
class Judgement(JobEnd):
    """Collects the supervisor's findings, and derives the outcome at the end."""

    here: Collection[Group]
    plan: FaultPlan
    shown: set[tuple[str, str]] = field(default_factory=set)
    """Errors whose traceback has been reported."""

    def shown_mistake(self, group: Group, mistake: Mistake) -> str:
        """Describe the mistake that ended ``group``, with its traceback.

        Later verdicts omit the log of a process that ended with the same error.
        """
        place = mistake.place
        child = next(child for child in group.children if child.error_place is place)
        self.shown.add(place.signature)
        who = f"group {group.name} rank {child.rank}"
        text = f"{who} ended with {place.type} at {place.where}; {mistake.reason}\n"
        return f"{text}{child.last_said()}\n  its log: {child.log}; "

    def note_forgotten(self) -> None:
        """Record that the bus has lost its memory."""
        self.problems.append(
            "the bus was restarted, and has forgotten the job: its processes stop, and none is "
            "started again; begin a new job from a checkpoint"
        )

    def note_interrupt(self, view: JobView, parts_in_all: int) -> None:
        """Record that the job was asked to end.

        It is a problem if no group has the state that the job had committed: the groups then leave
        in good order, but without that state. Groups on other hosts may have it.
        """
        self.asked_to_end = True
        if parts_in_all > len(self.here):
            return
        going = (g for g in self.here if view.committed_since(g.name, g.known_incs))
        has_running = not any(g.finished for g in self.here)
        if view.committed and has_running and not any(going):  # a spare has no group
            self.problems.append(
                "when it was interrupted, all groups had been started again since step "
                f"{view.step} was committed, and none had committed since"
            )

    def have_all_finished(self, view: JobView, parts_in_all: int) -> bool:
        """Return whether all groups that had the state have ended well.

        A loop of torchft ends like this, because it has no last commit. A group that is being
        restarted would then find no peer.
        """
        done = [group for group in self.here if group.finished and not group.evicted]
        rest = [group for group in self.here if not group.finished]
        return (
            parts_in_all == len(self.here)
            and view.committed
            and any(rank.step == view.step for group in done for rank in view.of(group.name))
            and not any(group.return_at_step is not None for group in done)
            and not any(view.joined_since(group.name, group.known_incs) for group in rest)
        )

    def outcome(self, view: JobView) -> JobOutcome:
        """Judge the job, all of whose processes have ended."""
        by_exit = {id(child.exit): child for group in self.here for child in group.children}
        self.groups = tuple(self._end_of(group, view) for group in self.here)
        self.no_progress |= any(group.stuck_at == view.progress for group in self.here)
        self.step, self.committed = view.step, view.committed
        self.reached = {number: view.reached(number) for _, number in view.ranks}
        self.has_plan, self.is_idle = bool(self.plan.faults), self._has_trained_alone(view)
        found = verdict(self, lambda x: by_exit[id(x)].verdict(self.shown))
        lines = found.lines
        if unfired := [f for f in view.unfired(self.plan) if self._is_ours(f)]:
            names = "; ".join(map(in_words, unfired))
            lines = (*lines, f"faults that did not fire, so this run does not test them: {names}")
        errors = (child.error_place for group in self.here for child in group.children)
        return JobOutcome(
            found.ok,
            lines,
            taint=view.comparisons.taint,
            step=view.reached(0),
            failed=view.checkpoints.last_failure,
            is_stale=view.is_stale,
            errors=frozenset(e.signature for e in errors if e is not None and is_the_scripts(e)),
            ended_by_error=any(group.ended_by_error for group in self.here),
            status=found.status,
        )

    def _has_trained_alone(self, view: JobView) -> bool:
        """Return whether the ranks have trained without FFT."""
        exits = [c.exit for group in self.here for c in group.children]
        joined = any(x.took_part or x.reason or x.error for x in exits)
        joined |= any(group.name == name for group in self.here for name, _ in view.ranks)
        trained = any(c.loaded_torch for group in self.here for c in group.children)
        return trained and not (joined or view.gaps or self.asked_to_end)

    def _end_of(self, group: Group, view: JobView) -> GroupEnd:
        fate: Fate = "given up" if group.given_up else ""
        if group.evicted:
            fate = "evicted" if group.loss is None else "taken over"
        return GroupEnd(
            group.name,
            tuple(child.exit for child in group.children),
            fate,
            has_committed=any(rank.commits for rank in view.of(group.name)),
            is_told=group.why_not_back in self.remarks,
        )

    def _is_ours(self, fault: AnyFault) -> bool:
        """Return whether the fault happens on this host, whose traces then contain it."""
        if isinstance(fault, Fault):
            return fault.group in {group.name for group in self.here}
        return self.has_services


# --- deaths ---
# Immediate reports of rank deaths, and detection of ranks that end too early or never begin.
#
# Reads the view of the traces and the memory maps of children. Writes to the log.

_IDLE_S = 60.0
"""Time from the import of torch until a missing first transaction is reported, in seconds. It
leaves time to prepare data."""
_LOOK_S = 5.0
"""Interval between two checks whether torch is loaded, in seconds."""
_TORCH = "libtorch"


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
        self._at: dict[tuple[int, int], list[UnexplainedDeath]] = {}
        """Unexplained deaths by the progress of the job."""
        self._told: set[tuple[object, ...]] = set()
        self._look_at: float | None = time.monotonic()
        self._loaded_at: float | None = None

    def is_early(self, child: Child, groups: Mapping[str, Group]) -> bool:
        """Return whether a child that ended with exit status 0 was in the middle of the job.

        It was if it took part and left neither with a commit nor by `shutdown()`. Whether a child
        that called `shutdown()` left early shows only when others continue; see `has_been_left`.
        """
        group = groups.get(child.group)
        is_to_go_on = group is not None and group.is_to_go_on
        return is_to_go_on and child.exit.took_part and not child.exit.has_left

    def has_been_left(self, child: Child, view: JobView) -> bool:
        """Return whether a child left FFT's loop by `shutdown()` and others committed since."""
        has_left = child.code == 0 and child.exit.reason is LeaveReason.LEFT_LOOP
        return has_left and not child.left_early and view.reached(child.rank) > child.exit.step

    def tell(self, child: Child, group: Group, view: JobView) -> bool:
        """Log how a rank was lost, once per rank and cause; return whether that is unexplained."""
        is_unexplained = self._note(child, group, view)
        cause = self._cause(child, group, view)
        words = child.error_place
        same = (child.group, child.rank, cause.partition(";")[0])
        key = same if words is None else words.signature  # one message for one mistake
        if child.was_killed or key in self._told:
            return is_unexplained
        self._told.add(key)
        seen = _seen(child, group, view)
        where = "before its first transaction" if seen is None else f"at step {seen.step}"
        if child.left_early:
            where += ", before the end of the job; its group is restarted"
        logger.warning(
            "group %s rank %d (pid %d) %s %s. Log: %s",
            *(child.group, child.rank, child.pid, cause, where, child.log),
        )
        return is_unexplained

    def _note(self, child: Child, group: Group, view: JobView) -> bool:
        seen = _seen(child, group, view)
        is_injected = seen is not None and seen.is_injected
        is_known = child.was_killed or child.pid in self.suspected or child.was_asked
        is_odd = child.left_early or (child.code or 0) < 0
        if seen is None or is_known or is_injected or not is_odd:
            return False
        cause = "exit status 0" if child.left_early else cause_of(child.code)
        line, now = child.decisive_line(), time.monotonic()
        who = child.group, child.rank, cause
        death = UnexplainedDeath(*who, view.cursor, line, child.log, child.began, now)
        self._at.setdefault(view.progress, []).append(death)
        return True

    def signatures(self, view: JobView) -> frozenset[tuple[str, str]]:
        """Return step and cause of the deaths at the last step, to compare with the next start."""
        return frozenset((f"step {view.step}", d.cause) for d in self._at.get(view.progress, ()))

    def about(self, view: JobView) -> str | None:
        """Describe the deaths at the step that the job has reached, or return None."""
        deaths = self._at.get(view.progress)
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
        rounds, until = 0, 0.0
        # processes that die together, as with their host, are one round
        for death in self._at.get(view.progress, []):
            if death.began > until:
                rounds, until = rounds + 1, death.died
        if rounds < _ROUNDS and not self.is_mismatch(view):
            return None
        return self.about(view)

    def is_mismatch(self, view: JobView) -> bool:
        """Return whether two groups died because their ranks called different collectives."""
        deaths = self._at.get(view.progress, [])
        return len({d.group for d in deaths if MISMATCH.search(d.line)}) > 1

    def _cause(self, child: Child, group: Group, view: JobView) -> str:
        if child.left_early:
            return "ended with exit status 0"
        if child.error_place is not None:
            return f"ended with {child.error_place.short()}"
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
    gap = view.gaps.get((group.name, child.rank))
    return None if seen is not None and gap is not None and gap.inc == seen.inc else seen


def _has_torch(child: Child) -> bool:
    try:
        return _TORCH in Path(f"/proc/{child.pid}/maps").read_text()
    except OSError:  # the process has just ended
        return False
