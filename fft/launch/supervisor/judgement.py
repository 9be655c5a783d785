"""The judgement of the deaths of processes: mistakes, recurring deaths, the verdict on the job.

This module reads the logs of processes. `Mistakes` is pure: it distinguishes mistakes in the script
from faults of a machine by the errors of processes. A mistake recurs wherever the script runs. So
the failure of one group proves nothing once others have committed steps with the same script.
Transient errors (a connection, a device) are left to restarts.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from fft.errors import (
    FftError,
    GradientLayoutMismatch,
    GradientMissing,
    NoState,
    NotEnoughGroups,
    OtherSettings,
    RestartRefused,
    ResultRefused,
    StateMismatch,
    UnequalData,
    UnfitCheckpoint,
)
from fft.launch.exit_status import ExitStatus
from fft.launch.supervisor.children import MISMATCH, Child, cause_of
from fft.launch.supervisor.config import RunConfig
from fft.launch.supervisor.groups import Group
from fft.messages.fault_plans import AnyFault, Fault, FaultPlan, in_words
from fft.trace.ends import Taint, about_no_state
from fft.trace.inputs import TRANSACTIONS
from fft.trace.tail import JobView, RankView
from fft.util.error_places import Place

logger = logging.getLogger(__name__)


NO_TRANSACTIONS = (
    "the groups train alone, without each other and without fault tolerance: use "
    "fft.ManagerFFT with `for txn in manager.transactions(loader)` or in a torchft loop, or the "
    "class of fft.integrations for Lightning, Hugging Face or torchtitan (see their guides); to "
    "train one process group without FFT use torchrun"
)


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


@dataclass
class Judgement:
    """Collects the supervisor's findings, and derives the outcome at the end."""

    groups: Collection[Group]
    plan: FaultPlan
    has_services: bool
    """Whether the services of the job are hosted here."""
    problems: list[str] = field(default_factory=list)
    """Reasons why the job failed."""
    remarks: list[str] = field(default_factory=list)
    """Lines that are not problems."""
    shown: set[tuple[str, str]] = field(default_factory=set)
    """Errors whose traceback has been reported."""
    given_up: list[str] = field(default_factory=list)
    """Problems that cost the job one group, and do not fail the job."""
    is_plan_through: bool = False
    """The supervisor has drained the job, because its fault plan is finished."""
    asked_to_end: bool = False
    """The supervisor has received a signal that drains the job."""
    bus_is_lost: bool = False
    """A bus outage has ended this part of the job."""
    hopeless: bool = False
    """The script itself is wrong, so the ends of its groups are not reported."""

    @property
    def what_ended(self) -> str:
        """Name for what ends with the processes here; other hosts may have more of the job."""
        return "the job" if self.has_services else "this part of the job"

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

    def note_interrupt(self, view: JobView, groups_in_all: int) -> None:
        """Record that the job was asked to end.

        It is a problem if no group has the state that the job had committed: the groups then leave
        in good order, but without that state. Groups on other hosts may have it.
        """
        self.asked_to_end = True
        if groups_in_all > len(self.groups):
            return
        going = (g for g in self.groups if view.committed_since(g.name, g.known_incs))
        has_running = not any(g.finished for g in self.groups)
        if view.committed and has_running and not any(going):  # a spare has no group
            self.problems.append(
                "when it was interrupted, all groups had been started again since step "
                f"{view.step} was committed, and none had committed since"
            )

    def have_all_finished(self, view: JobView, groups_in_all: int) -> bool:
        """Return whether all groups that had the state have ended well.

        A loop of torchft ends like this, because it has no last commit. A group that is being
        restarted would then find no peer.
        """
        done = [group for group in self.groups if group.finished and not group.evicted]
        rest = [group for group in self.groups if not group.finished]
        return (
            groups_in_all == len(self.groups)
            and view.committed
            and any(rank.step == view.step for group in done for rank in view.of(group.name))
            and not any(group.return_at_step is not None for group in done)
            and not any(view.joined_since(group.name, group.known_incs) for group in rest)
        )

    def outcome(
        self,
        view: JobView,
        is_over: bool,
        unfinished: str | None,
        others: ExitStatus | None = None,
    ) -> JobOutcome:
        """Judge the job, all of whose processes have ended.

        Args:
            is_over: All groups have left with one commit.
            unfinished: The reason why the fault plan is not finished, or None.
            others: How the groups of other hosts ended, if the job is over and no group here was
                in it at its end.
        """
        lines, excused, remarks = self._ends(view, is_over, others)
        words = [child.error_place for group in self.groups for child in group.children]
        was_needed = any(w is not None and w.is_a(NotEnoughGroups) for w in words)
        early = [_left_early(group, view, was_needed) for group in self.groups]
        early += [_shard_was_short(group, view) for group in self.groups if was_needed]
        if not lines and unfinished:
            lines = [f"the fault plan was not finished: {unfinished}"]
        if others is ExitStatus.FAILED:
            lines.append("no group here was in the job at its end, and those of other hosts failed")
        if idle := self._no_transactions(view):
            lines = [idle, *lines]
        remarks += (_untrained(group) for group in self._with_unfinished_shards(view))
        if self.asked_to_end and view.committed:
            remarks.append(f"{self.what_ended} was asked to end, and left after step {view.step}")
        elif self.asked_to_end and not (lines or remarks):
            remarks.append(f"{self.what_ended} was asked to end before it had committed a step")
        if others is ExitStatus.DRAINED:
            remarks.append("the job was drained before its end while no group here was in it")
        if any(each is not None and each.is_a(NoState) for each in words):
            remarks.append(f"NoState: {about_no_state(view.step if view.committed else None)}")
        if unfired := [f for f in view.unfired(self.plan) if self._is_ours(f)]:
            names = "; ".join(map(in_words, unfired))
            remarks.append(f"faults that did not fire, so this run does not test them: {names}")
        return JobOutcome(
            not lines,
            (*filter(None, early), *lines, *remarks),  # the cause comes first
            taint=view.comparisons.taint,
            step=view.reached(0),
            failed=view.checkpoints.last_failure,
            is_stale=view.is_stale,
            errors=frozenset(w.signature for w in words if w is not None and is_the_scripts(w)),
            status=self._status(view, [line for line in lines if line not in excused], others),
        )

    def _status(
        self, view: JobView, problems: Sequence[str], others: ExitStatus | None
    ) -> ExitStatus | None:
        """Return the exit status, or None if it depends only on whether there are problems.

        Args:
            problems: Problems, without those that only cost the job one of its groups.
            others: As for `outcome`.
        """
        ended = [group for group in self.groups if group.finished]
        at_end = [group for group in ended if _is_at_end(group, view)]
        if self.bus_is_lost:
            return ExitStatus.FEWER_GROUPS if at_end else ExitStatus.BUS_LOST
        if problems or self.is_plan_through:
            return None
        if others is not None:
            return others
        if (self.asked_to_end and not at_end) or _were_stopped(ended, view):
            return ExitStatus.DRAINED
        drained = [group for group in ended if group not in at_end and _was_asked(group, view)]
        if ended and len(drained) == len(ended):
            return ExitStatus.DRAINED
        lost = [group for group in self.groups if group.given_up or _is_evicted(group)]
        lost += self._with_unfinished_shards(view)
        if ended and (lost or (drained and not self.plan.faults)):
            return ExitStatus.FEWER_GROUPS
        return None

    def _with_unfinished_shards(self, view: JobView) -> list[Group]:
        """Return the groups that were away when the others had trained all of their data.

        Each has a shard of the data, of which the rest was not trained.
        """
        if self.asked_to_end or not any(_is_at_end(group, view) for group in self.groups):
            return []
        return [
            group
            for group in self.groups
            if not group.finished
            and any(rank.has_shard for rank in view.of(group.name))
            and not (_is_at_end(group, view) or _was_asked(group, view))
        ]

    def _no_transactions(self, view: JobView) -> str | None:
        """Describe a job whose ranks have trained without FFT; None for any other job."""
        names = {group.name for group in self.groups}
        joined = any(name in names for name, _ in view.ranks)
        trained = any(c.loaded_torch for group in self.groups for c in group.children)
        if joined or view.gaps or self.asked_to_end or not trained:
            return None
        return f"no rank began a transaction, so {NO_TRANSACTIONS}"

    def _took_part(self, group: Group, view: JobView) -> bool:
        """Return whether the group has committed, or another group here has finished."""
        committed = any(rank.commits for rank in view.of(group.name))
        return committed or any(other.finished for other in self.groups)

    def _ends(
        self, view: JobView, is_over: bool, others: ExitStatus | None
    ) -> tuple[list[str], set[str], list[str]]:
        """Collect problems and remarks, including those that follow from how processes ended.

        Returns:
            The problems; those of them that concern only groups that were given up; the remarks.
        """
        lines, remarks = list(self.problems), list[str]()
        excused = set(self.given_up)
        # not started again while the job is to end, and the others have left with the state
        going = any(g.finished and not g.evicted for g in self.groups)
        for group in self.groups:
            if group.evicted or self.hopeless:  # ended on request, or reported already
                continue
            failed = [child for child in group.children if child.has_failed]
            # a process that died by itself explains more than one that was killed with it
            failed.sort(key=lambda child: (child.code == -signal.SIGKILL, child.rank))
            for child in failed[:1]:
                # a scheduler may have sent SIGTERM to all processes of the SLURM job step
                was_asked = child.ended_as_asked or (
                    self.asked_to_end and child.code == -signal.SIGTERM
                )
                if was_asked and not _has_joined(group, child.rank, view):
                    self.remarks.append(f"group {group.name} was asked to end while it started")
                elif was_asked and _had_left(group, child.rank, view):
                    self.remarks.append(
                        f"group {group.name} had left, and SIGTERM ended its process at its exit"
                    )
                elif child.came_too_late and group.why_not_back in self.remarks:
                    continue  # reported already
                elif child.came_too_late and self._took_part(group, view):
                    remarks.append(f"group {group.name} came back when the job was over")
                elif self.asked_to_end and child.code == -signal.SIGKILL and going:
                    remarks.append(_killed_at_end(child))
                elif not is_over or child.failed_by_itself:
                    lines.append(child.verdict(self.shown))
                    excused |= {lines[-1]} if group.given_up else set()
                else:
                    remarks.append(_cut_short(child))
        has_finished = others is not None or any(group.finished for group in self.groups)
        if remarks and self.has_services and not has_finished:
            lines.append("no group ended by itself after the last step")
        return lines, excused, [*self.remarks, *remarks]

    def _is_ours(self, fault: AnyFault) -> bool:
        """Return whether the fault happens on this host, whose traces then contain it."""
        if isinstance(fault, Fault):
            return fault.group in {group.name for group in self.groups}
        return self.has_services


def _has_joined(group: Group, rank: int, view: JobView) -> bool:
    """Return whether the group has joined the job since its start.

    For a rank that was replaced, return whether the successor has joined.
    """
    if rank not in group.replaced:
        return view.joined_since(group.name, group.known_incs)
    now = view.since(group.name, group.incs_before).get(rank)
    return now is not None and now.role != "joining"


def _had_left(group: Group, rank: int, view: JobView) -> bool:
    """Return whether the rank had left the job in good order before its process ended."""
    seen = view.since(group.name, group.known_incs).get(rank)
    return seen is not None and seen.has_left


def _left_early(group: Group, view: JobView, was_needed: bool) -> str | None:
    """Describe ranks of the group that ended without error or request in the middle of the job.

    Args:
        was_needed: Other ranks have ended because there were too few groups.

    Returns:
        The description, or None if there are no such ranks or traces have gaps.
    """
    seen = view.since(group.name, group.known_incs)
    steps = {rank: seen[rank].step for rank in seen if not seen[rank].leaves}
    ended = [c for c in group.children if c.code == 0 and c.rank in steps]
    early = [c for c in ended if was_needed or steps[c.rank] < view.reached(c.rank)]
    gaps = (view.gaps.get((group.name, rank)) == seen[rank].inc for rank in seen)
    if group.evicted or not early or any(gaps):  # a trace with a gap may lack the leave
        return None
    ranks = ", ".join(str(child.rank) for child in early)
    logs = ", ".join(str(child.log) for child in early)
    others = f"went on to step {view.reached(early[0].rank)}"
    return (
        f"group {group.name} rank {ranks} ended with exit status 0 after step "
        f"{min(steps[child.rank] for child in early)}, unasked, and the others "
        f"{'could not go on without it' if was_needed else others}; the ranks of a group come and "
        "go together, and groups leave together by manager.drain(). Does the script call "
        f"sys.exit(), or leave its loop? its log: {logs}"
    )


def _shard_was_short(group: Group, view: JobView) -> str | None:
    """Describe a group that left at the end of its shard while the others needed it, or None."""
    ranks = view.of(group.name)
    if not group.finished or not any(rank.at_end and rank.has_shard for rank in ranks):
        return None
    return (
        f"group {group.name} left after step {max(rank.step for rank in ranks)}, because its shard "
        "of the data was trained to its end, and the others could not go on without it: divide "
        "the data into equal shards, or let the job go on with fewer groups (min_replica_size)"
    )


def _untrained(group: Group) -> str:
    return (
        f"group {group.name} was away when the shards of the others ended, so the rest of its "
        "shard was not trained: resume from a checkpoint with all groups, or set min_replica_size "
        "to the number of groups"
    )


def _was_asked(group: Group, view: JobView) -> bool:
    """Return whether the group was drained: by an operator, a signal or a notice."""
    return any(rank.asked for rank in view.of(group.name))


def _were_stopped(ended: Sequence[Group], view: JobView) -> bool:
    """Return whether all groups left with `manager.stop` because one of them was asked to leave."""
    ranks = [rank for group in ended for rank in view.of(group.name) if rank.role == "terminal"]
    stopped = ranks and all(rank.skips for rank in ranks) and len({r.step for r in ranks}) == 1
    return bool(stopped) and any(
        _was_asked(group, view) and not _is_at_end(group, view) for group in ended
    )


def _is_at_end(group: Group, view: JobView) -> bool:
    """Return whether the group left with its last step.

    One rank is enough: the ranks of later stages follow the first stage to its end.
    """
    return any(rank.at_end for rank in view.of(group.name))


def _is_evicted(group: Group) -> bool:
    """Return whether the group was evicted for good, rather than taken over."""
    return group.evicted and group.loss is None


def _killed_at_end(child: Child) -> str:
    return f"group {child.group} ended with {cause_of(child.code)} as the job was to end"


def _cut_short(child: Child) -> str:
    how = f"group {child.group} ended with {cause_of(child.code)}"
    return f"the job was over; {how}, and was no longer needed"


# --- mistakes ---

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

    def may_be_the_states(self, config: RunConfig, step: int) -> bool:
        """Return whether another state may help, as the job began with this one just before."""
        kinds = (*_NEVER_LOADED, *_UNFIT, *_UNLIKE, RestartRefused)
        is_known = any(map(self.place.is_a, kinds)) or bool(self.place.item)
        return self.ends == "job" and config.is_soon(step) and not is_known


def is_the_scripts(error: Place | None) -> bool:
    """Return whether the error comes from the script, rather than from FFT, machine or network.

    An item that repeatedly failed to load and unequal data come from the script's data. A refused
    result comes from data, model or policy, and a missing gradient from the step function.
    """
    if error is None:
        return False
    if error.item or any(map(error.is_a, (UnequalData, ResultRefused, GradientMissing))):
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
        if error is not None and error.is_a(RestartRefused):
            return Mistake("job", "the function is not called again", error)
        if error is not None and error.is_a(ResultRefused):
            return Mistake("job", "no rank may commit a result that one has refused", error)
        if error is not None and error.is_a(GradientMissing):
            return Mistake("job", "all ranks must contribute to the same parameters", error)
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
        words = child.error_place
        same = (child.group, child.rank, cause.partition(";")[0])
        key = same if words is None else words.signature  # one message for one mistake
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
        self._at.setdefault(view.progress, []).append(death)

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
        deaths = self._at.get(view.progress, [])
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
    has_gap = seen is not None and view.gaps.get((group.name, child.rank)) == seen.inc
    return None if has_gap else seen


def _has_torch(child: Child) -> bool:
    try:
        return _TORCH in Path(f"/proc/{child.pid}/maps").read_text()
    except OSError:  # the process has just ended
        return False
