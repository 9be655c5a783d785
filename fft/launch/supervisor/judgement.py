"""The verdict on how a job ended, with its reasons. Reads the logs of processes."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fft.errors import NoState, NotEnoughGroups
from fft.launch.exit_status import ExitStatus
from fft.launch.supervisor.children import Child, cause_of
from fft.launch.supervisor.groups import Group
from fft.launch.supervisor.mistakes import Mistake, is_the_scripts
from fft.messages.fault_plans import AnyFault, Fault, FaultPlan, in_words
from fft.trace.ends import about_no_state
from fft.trace.tail import JobView

NO_TRANSACTIONS = (
    "the groups train alone, without each other and without fault tolerance: use "
    "fft.ManagerFFT with `for txn in manager.transactions(loader)`, or in a torchft loop (see the "
    "quick start); for one process group without FFT use torchrun"
)


@dataclass(frozen=True)
class JobOutcome:
    """How the job ended; ``lines`` describe the problems, with their places, for the operator."""

    ok: bool
    lines: tuple[str, ...] = ()
    lost: str | None = None
    """The reason why no process has the state, if the job can continue from a checkpoint."""
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
    hopeless: bool = False
    """The script itself is wrong, so the ends of its groups are not reported."""

    @property
    def what_ended(self) -> str:
        """Name for what ends with the processes here; other hosts may have more of the job."""
        return "the job" if self.has_services else "this part of the job"

    def shown_mistake(self, group: Group, mistake: Mistake) -> str:
        """Describe the mistake that ended ``group``, with its traceback.

        Later verdicts leave out the log of a process that ended with the same error.
        """
        place = mistake.place
        child = next(child for child in group.children if child.last_words is place)
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

    def note_interrupt(self, view: JobView) -> None:
        """Record that the job was asked to end.

        It is a problem if no group has the state that the job had committed: the groups then leave
        in good order, but without that state.
        """
        self.asked_to_end = True
        going = (g for g in self.groups if view.committed_since(g.name, g.known_incs))
        if view.committed and not any(g.finished for g in self.groups) and not any(going):
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

    def outcome(self, view: JobView, is_over: bool, unfinished: str | None) -> JobOutcome:
        """Judge the job, all of whose processes have ended.

        Args:
            is_over: All groups have left with one commit.
            unfinished: The reason why the fault plan is not finished, or None.
        """
        lines, excused, remarks = self._ends(view, is_over)
        words = [child.last_words for group in self.groups for child in group.children]
        was_needed = any(w is not None and w.is_a(NotEnoughGroups) for w in words)
        early = [_left_early(group, view, was_needed) for group in self.groups]
        early += [_shard_was_short(group, view) for group in self.groups if was_needed]
        if not lines and unfinished:
            lines = [f"the fault plan was not finished: {unfinished}"]
        if idle := self._no_transactions(view):
            lines = [idle, *lines]
        remarks += (_untrained(group) for group in self._with_unfinished_shards(view))
        if self.asked_to_end and view.committed:
            remarks.append(f"{self.what_ended} was asked to end, and left after step {view.step}")
        elif self.asked_to_end and not (lines or remarks):
            remarks.append(f"{self.what_ended} was asked to end before it had committed a step")
        if any(each is not None and each.is_a(NoState) for each in words):
            remarks.append(f"NoState: {about_no_state(view.step if view.committed else None)}")
        if unfired := [f for f in view.unfired(self.plan) if self._is_ours(f)]:
            names = "; ".join(map(in_words, unfired))
            remarks.append(f"faults that did not fire, so this run says nothing of them: {names}")
        return JobOutcome(
            not lines,
            (*filter(None, early), *lines, *remarks),  # the cause comes first
            step=view.reached(0),
            failed=view.checkpoints.last_failure,
            is_stale=view.is_stale,
            errors=frozenset(w.signature for w in words if w is not None and is_the_scripts(w)),
            status=self._status(view, [line for line in lines if line not in excused]),
        )

    def _status(self, view: JobView, problems: Sequence[str]) -> ExitStatus | None:
        """Return the exit status, or None if it depends only on whether there are problems.

        Args:
            problems: Problems, without those that only cost the job one of its groups.
        """
        if problems or self.is_plan_through:
            return None
        ended = [group for group in self.groups if group.finished]
        at_end = [group for group in ended if _is_at_end(group, view)]
        if self.asked_to_end and not at_end:
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

    def _ends(self, view: JobView, is_over: bool) -> tuple[list[str], set[str], list[str]]:
        """Collect problems and remarks, including those that follow from how processes ended.

        Returns:
            The problems; those of them that concern only groups that were given up; the remarks.
        """
        lines, remarks = list(self.problems), list[str]()
        excused = set(self.given_up)
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
                elif not is_over or child.failed_by_itself:
                    lines.append(child.verdict(self.shown))
                    excused |= {lines[-1]} if group.given_up else set()
                else:
                    remarks.append(_cut_short(child))
        if remarks and self.has_services and not any(group.finished for group in self.groups):
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


def _is_at_end(group: Group, view: JobView) -> bool:
    """Return whether the group left with its last step.

    One rank is enough: the ranks of later stages follow the first stage to its end.
    """
    return any(rank.at_end for rank in view.of(group.name))


def _is_evicted(group: Group) -> bool:
    """Return whether the group was evicted for good, rather than taken over."""
    return group.evicted and group.loss is None


def _cut_short(child: Child) -> str:
    how = f"group {child.group} ended with {cause_of(child.code)}"
    return f"the job was over; {how}, and was no longer needed"
