"""The verdict on the ends of a job's processes, as tables. Pure.

There is a table for each question: what follows the end of a group (`AFTER`), how a group has ended
(`GROUPS`), the exit status of this part of the job (`STATUS`), and that of the whole job by the
statuses of its parts (`WHOLE`). The first row whose condition holds decides. The facts are the
exits of the processes, the newest record, and what the launcher has done; no row reads a log or a
trace.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

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
from fft.launch.exit_status import DONE, ExitStatus
from fft.messages.causes import LeaveReason
from fft.messages.exits import Exit
from fft.messages.protocol import Record
from fft.trace.ends import about_no_state
from fft.util.error_places import Place

NO_TRANSACTIONS = (
    "the groups train alone, without each other and without fault tolerance: use "
    "fft.ManagerFFT with `for txn in manager.transactions(loader)` or in a torchft loop, or the "
    "class of fft.integrations for Lightning, Hugging Face or torchtitan (see their guides); to "
    "train one process group without FFT use torchrun"
)

F = TypeVar("F")
T = TypeVar("T")


class Case(NamedTuple, Generic[F, T]):
    """A row of a table: its name, its condition, and what follows."""

    name: str
    when: Callable[[F], object]
    then: T


def first(table: Sequence[Case[F, T]], facts: F) -> Case[F, T]:
    """Return the first row whose condition holds; the last row of a table always does."""
    return next(row for row in table if row.when(facts))


# --- what follows the end of a group --------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """The end of a group.

    Attributes:
        error: The error that ended it; a group that raised none is always started again.
        before: The error that ended it before, if it has committed no step since.
        alike: Number of groups here whose last error is the same.
        groups: Number of groups of the whole job.
        here: Number of groups of this host.
        committed: Any group has committed a step.
    """

    error: Place
    before: Place | None = None
    alike: int = 1
    groups: int = 2
    here: int = 2
    committed: bool = False

    @property
    def again(self) -> bool:
        """Whether the same error has ended the group before."""
        return self.before is not None and self.before.signature == self.error.signature

    @property
    def same_item(self) -> bool:
        """Whether the same item could not be loaded before."""
        return self.before is not None and self.before.item == self.error.item


class Next(NamedTuple):
    """The consequence: a restart, or the end of the group or of the job for a reason."""

    ends: Literal["", "group", "job"]
    why: str = ""
    counts: bool = True
    """The error is compared with the next one of the group, and with those of others."""


_RESTART = Next("")
_FORGIVEN = Next("", counts=False)
_ALIKE = "all groups must be set up alike"
_ONE_MODEL = "all groups must train the same model"
_AGAIN = "after a restart it failed in the same place, and no step was committed"


def _job(why: str) -> Next:
    return Next("job", why)


def _group(why: str) -> Next:
    return Next("group", why)


def _is(*kinds: type[BaseException], committed: bool | None = None) -> Callable[[Failure], bool]:
    """Return the condition that the error has one of these classes, before or after a commit."""
    return lambda e: committed in (None, e.committed) and any(map(e.error.is_a, kinds))


def _at_start(condition: Callable[[Failure], object]) -> Callable[[Failure], object]:
    return lambda e: not e.committed and condition(e)


AFTER: tuple[Case[Failure, Next], ...] = (
    Case("data differ", _is(UnequalData), _job("all ranks must draw the same data")),
    Case("no second call", _is(RestartRefused), _job("the function is not called again")),
    Case("refused", _is(ResultRefused), _job("no rank may commit a result that one has refused")),
    Case("no gradient", _is(GradientMissing), _job(
        "all ranks must contribute to the same parameters")),
    Case("item, once", lambda e: e.error.item and e.error.may_pass and not e.same_item, _RESTART),
    Case("item", lambda e: e.error.item, _job("{item} of the data cannot be loaded")),
    Case("left alone", _is(NotEnoughGroups, committed=True), _group(
        "the others have left, or have not come back in time")),
    Case("may pass", lambda e: e.error.may_pass, _FORGIVEN),
    Case("exit code in the job", _is(SystemExit, committed=True), _FORGIVEN),
    Case("another model here", _is(GradientLayoutMismatch, committed=True), _group(_ONE_MODEL)),
    Case("other models", _is(GradientLayoutMismatch), _job(_ONE_MODEL)),
    Case("other settings here", _is(OtherSettings, committed=True), _group(_ALIKE)),
    Case("other settings", _is(OtherSettings), _job(_ALIKE)),
    Case("again at the start", _at_start(lambda e: e.again), _job(_AGAIN)),
    Case("not loadable", _at_start(_is(SyntaxError, ImportError)), _job("it cannot be loaded")),
    Case("unfit checkpoint", _at_start(_is(UnfitCheckpoint, StateMismatch)), _job(
        "all groups begin with the same state")),
    Case("all at the start", _at_start(lambda e: e.alike == e.here == e.groups), _job(
        "no group reached its first step")),
    Case("at the start", _at_start(lambda e: True), _RESTART),
    Case("only group", lambda e: e.groups == 1, _job(
        "no other group has the state to continue with")),
    Case("groups alike", lambda e: e.alike > 1, _job("groups {alike} failed in the same place")),
    Case("again", lambda e: e.again, _group("group {group} failed in the same place again")),
    Case("once", lambda e: True, _RESTART),
)  # fmt: skip
"""The consequences of the end of a group that an error has ended.

A mistake recurs wherever the script runs. So the failure of one group proves nothing once others
have committed steps with the same script. Transient errors (a connection, a device) are left to
restarts. An item of the data is due until it is consumed; a transient error gets one restart,
because another process or connection may help.
"""


_OF_NO_STATE = (
    *(SyntaxError, ImportError, UnfitCheckpoint, StateMismatch, GradientLayoutMismatch),
    *(OtherSettings, RestartRefused),
)
"""Classes of errors that no other state of the job avoids."""


@dataclass(frozen=True)
class Mistake:
    """A mistake in the script: whether it ends the job or one group, the reason and the place."""

    ends: Literal["job", "group"]
    reason: str
    place: Place

    def is_for_good(self, saves: bool, groups: int) -> bool:
        """Return whether the job must end even if it could resume.

        A job of one group that saves checkpoints may resume, because no other group has shown that
        the error recurs.
        """
        alone = saves and groups == 1
        return self.ends == "job" and is_the_scripts(self.place) and not alone

    def may_be_the_states(self, is_soon: bool) -> bool:
        """Return whether another state may help.

        Args:
            is_soon: The job began with its state just before.
        """
        is_known = any(map(self.place.is_a, _OF_NO_STATE)) or bool(self.place.item)
        return self.ends == "job" and is_soon and not is_known


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
    """Applies `AFTER` to the ends of groups. Keeps each group's last error until it commits."""

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
        if error is None:
            return None
        same = {g for g, e in self._errors.items() if e.signature == error.signature} | {group}
        facts = Failure(error, before, len(same), self._all, len(self._groups), job_committed)
        then = first(AFTER, facts).then
        if then.counts:
            self._errors[group] = error
        if not then.ends:
            return None
        names = {"item": error.item, "alike": ", ".join(sorted(same)), "group": group}
        return Mistake(then.ends, then.why.format(**names), error)


# --- how a group has ended ------------------------------------------------------------------------


def cause_of(status: int | None) -> str:
    """Return an exit status in words: ``exit code 3`` or ``SIGKILL``."""
    if status is None or status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def in_words(x: Exit) -> str:
    """Return how a process has ended, with its decisive line: the error of the script, if any."""
    what = cause_of(x.status) if x.place is None else x.place.short()
    return f"rank {x.rank} ended with {what}"


Fate = Literal["", "evicted", "taken over", "given up"]


@dataclass(frozen=True)
class GroupEnd:
    """The end of one group.

    Attributes:
        exits: Those of its newest processes, by rank.
        fate: Its end by an operator or the launcher.
        has_committed: One of its processes has ever committed a step.
        is_told: Why it was not taken back is a remark already.
    """

    name: str
    exits: tuple[Exit, ...]
    fate: Fate = ""
    has_committed: bool = False
    is_told: bool = False

    @property
    def failed(self) -> Exit | None:
        """The exit that explains best why the group has failed, or None if it has not.

        A process that died by itself explains more than one that was killed with it.
        """
        failed = [e for e in self.exits if e.failed]
        return min(failed, key=lambda e: (e.status == -signal.SIGKILL, e.rank), default=None)

    @property
    def has_finished(self) -> bool:
        """Whether all of its processes have ended without a failure."""
        return bool(self.exits) and self.failed is None

    @property
    def is_at_end(self) -> bool:
        """Whether it left with its last step.

        One rank is enough: the ranks of later stages follow the first stage to its end.
        """
        return any(e.reason is not None and e.reason.is_end for e in self.exits)

    @property
    def is_drained(self) -> bool:
        """Whether it was asked to leave before its end, and did."""
        return not self.is_at_end and any(e.reason is LeaveReason.DRAINED for e in self.exits)

    def raised(self, kind: type[BaseException]) -> bool:
        """Whether an error of this class has ended one of its processes."""
        return any(e.place is not None and e.place.is_a(kind) for e in self.exits)


@dataclass
class JobEnd:
    """The end of this part of the job, all of whose processes have ended.

    Attributes:
        head: The newest record of the job.
        reached: The last step of the ranks of each number, which may have their own scope.
        problems: Problems that the launcher has found.
        given_up: Those of them that only cost the job one of its groups.
        remarks: Its other findings.
        asked_to_end: It has received a signal that drains the job.
        is_over: All groups have left with one commit.
        hopeless: The script itself is wrong, so the ends of its groups are not reported.
        bus_is_lost: A bus outage has ended this part of the job.
        no_progress: Restarts in a row have committed nothing.
        is_plan_through: It has drained the job, because the fault plan is finished.
        unfinished: Why the fault plan is not finished.
        others: How the groups of other hosts ended, if no group here was in the job at its end.
        has_services: The services of the job are hosted here.
        is_idle: Its ranks have trained without a transaction.
    """

    groups: tuple[GroupEnd, ...] = ()
    head: Record | None = None
    step: int = 0
    committed: bool = True
    reached: Mapping[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    asked_to_end: bool = False
    is_over: bool = False
    hopeless: bool = False
    bus_is_lost: bool = False
    no_progress: bool = False
    is_plan_through: bool = False
    has_plan: bool = False
    unfinished: str | None = None
    others: ExitStatus | None = None
    has_services: bool = True
    is_idle: bool = False

    @property
    def what_ended(self) -> str:
        """Name for what ends with the processes here; other hosts may have more of the job."""
        return "the job" if self.has_services else "this part of the job"

    @property
    def finished(self) -> list[GroupEnd]:
        """The groups that have ended without a failure."""
        return [group for group in self.groups if group.has_finished]

    @property
    def at_end(self) -> list[GroupEnd]:
        """Those of them that left with their last step."""
        return [group for group in self.finished if group.is_at_end]

    @property
    def untrained(self) -> list[GroupEnd]:
        """The groups that were away when the others had trained the shards of their own."""
        ends = [e.reason for group in self.groups for e in group.exits if group.is_at_end]
        if self.asked_to_end or LeaveReason.SHARD_ENDED not in ends:
            return []
        away = (group for group in self.groups if not group.has_finished)
        return [group for group in away if not (group.is_at_end or group.is_drained)]

    @property
    def lacked_groups(self) -> bool:
        """Whether ranks have ended because there were too few groups."""
        return any(group.raised(NotEnoughGroups) for group in self.groups)

    @property
    def was_stopped(self) -> bool:
        """Whether all groups left by ``manager.stop()`` of a group that was asked to leave."""
        head = self.head
        return (
            head is not None
            and head.last
            and head.skip
            and LeaveReason.DRAINED in head.reasons
            and any(group.is_drained for group in self.finished)
        )


class _Of(NamedTuple):
    """The facts about one group: its end, the exit that explains it, and the end of the job."""

    group: GroupEnd
    x: Exit
    job: JobEnd


class End(NamedTuple):
    """How a group has ended; a problem without a text is described by its exit."""

    kind: Literal["good", "remark", "over", "excused", "problem"]
    """``over``: a remark if another group has ended by itself, as the job was over."""
    text: str = ""


def _was_asked(f: _Of) -> bool:
    """Whether SIGTERM has ended the process as asked.

    A scheduler may have sent it to all processes of a SLURM job step.
    """
    return (f.x.asked or f.job.asked_to_end) and f.x.status == -signal.SIGTERM


def _joined(f: _Of) -> bool:
    """Whether the process, or another one of its start, has taken part."""
    return f.x.took_part if f.x.replaces else any(e.took_part for e in f.group.exits)


_UNTRAINED = (
    "group {group} was away when the shards of the others ended, so the rest of its shard was not "
    "trained: resume from a checkpoint with all groups, or set min_replica_size to the number of "
    "groups"
)
_OVER = "the job was over; group {group} ended with {cause}, and was no longer needed"

GROUPS: tuple[Case[_Of, End], ...] = (
    Case("ended on request", lambda f: f.group.fate in ("evicted", "taken over"), End("good")),
    Case("the script is wrong", lambda f: f.job.hopeless, End("good")),
    Case("finished", lambda f: not f.x.failed, End("good")),
    Case("asked as it started", lambda f: _was_asked(f) and not _joined(f), End(
        "remark", "group {group} was asked to end while it started")),
    Case("asked as it exited", lambda f: _was_asked(f) and f.x.reason, End(
        "remark", "group {group} had left, and SIGTERM ended its process at its exit")),
    Case("too late for a stage", lambda f: f.x.came_too_late and f.group.is_told, End("good")),
    Case("too late", lambda f: f.x.came_too_late and (f.group.has_committed or f.job.finished), End(
        "over", "group {group} came back when the job was over")),
    Case("killed at the end", lambda f: (
        f.job.asked_to_end and f.x.status == -signal.SIGKILL
        and any(g.fate not in ("evicted", "taken over") for g in f.job.finished)), End(
        "over", "group {group} ended with {cause} as the job was to end")),
    Case("cut short", lambda f: f.job.is_over and not f.x.failed_by_itself, End("over", _OVER)),
    Case("given up", lambda f: f.group.fate == "given up", End("excused")),
    Case("failed", lambda f: True, End("problem")),
)  # fmt: skip
"""How a group has ended, by the exit that explains it best."""


# --- the exit status ------------------------------------------------------------------------------


FEWER_GROUPS = ExitStatus.FEWER_GROUPS


class _Found(NamedTuple):
    """The end of the job with the problems that were found, excused ones among them."""

    job: JobEnd
    lines: Sequence[str]
    excused: frozenset[str]

    @property
    def stuck(self) -> bool:
        """Whether restarts in a row have committed nothing, and no group has ended well."""
        return self.job.no_progress and not self.job.finished

    @property
    def drained(self) -> list[GroupEnd]:
        """The finished groups that were drained."""
        return [group for group in self.job.finished if group.is_drained]

    @property
    def lost(self) -> list[GroupEnd]:
        """The groups that the job has lost for good."""
        return [group for group in self.job.groups if group.fate in ("given up", "evicted")]


STATUS: tuple[Case[_Found, ExitStatus | None], ...] = (
    Case("bus lost after the end", lambda f: f.job.bus_is_lost and f.job.at_end, FEWER_GROUPS),
    Case("bus lost", lambda f: f.job.bus_is_lost, ExitStatus.BUS_LOST),
    Case("no progress", lambda f: f.stuck, ExitStatus.NO_PROGRESS),
    Case("problems", lambda f: not f.excused.issuperset(f.lines), ExitStatus.FAILED),
    Case("plan finished", lambda f: f.job.is_plan_through and not f.lines, ExitStatus.COMPLETE),
    Case("plan without a group", lambda f: f.job.is_plan_through, ExitStatus.FAILED),
    Case("ended elsewhere", lambda f: f.job.others is not None, None),
    Case("asked to end", lambda f: f.job.asked_to_end and not f.job.at_end, ExitStatus.DRAINED),
    Case("stopped when asked", lambda f: f.job.was_stopped, ExitStatus.DRAINED),
    Case("all drained", lambda f: f.drained and f.drained == f.job.finished, ExitStatus.DRAINED),
    Case("a group lost", lambda f: f.job.finished and f.lost, FEWER_GROUPS),
    Case("a shard untrained", lambda f: f.job.finished and f.job.untrained, FEWER_GROUPS),
    Case("a group drained", lambda f: f.drained and not f.job.has_plan, FEWER_GROUPS),
    Case("only given up", lambda f: f.lines, ExitStatus.FAILED),
    Case("complete", lambda f: True, ExitStatus.COMPLETE),
)
"""The exit status of this part of the job; None stands for that of the groups elsewhere."""


class Statuses(NamedTuple):
    """The statuses of the supervisors of all groups; None for one that was lost, or never came."""

    statuses: Sequence[ExitStatus | None]
    has_progressed: bool
    """Steps were committed since the job has begun."""

    def has(self, *kinds: ExitStatus | None) -> bool:
        """Whether one of the supervisors has ended like this."""
        return any(status in kinds for status in self.statuses)

    @property
    def are_all_drained(self) -> bool:
        """Whether all of them have been drained."""
        return set(self.statuses) == {ExitStatus.DRAINED}


WHOLE: tuple[Case[Statuses, ExitStatus], ...] = (
    Case("complete", lambda p: set(p.statuses) == {ExitStatus.COMPLETE}, ExitStatus.COMPLETE),
    Case("done by some", lambda p: p.has(*DONE), FEWER_GROUPS),
    Case("hosts lost", lambda p: p.has_progressed and p.has(None), ExitStatus.DRAINED),
    Case("drained", lambda p: p.has_progressed and p.are_all_drained, ExitStatus.DRAINED),
    Case("no progress", lambda p: p.has(ExitStatus.NO_PROGRESS), ExitStatus.NO_PROGRESS),
    Case("failed", lambda p: True, ExitStatus.FAILED),
)
"""The exit status of the whole job. It is DRAINED if starting the job again can help."""


@dataclass(frozen=True)
class Judged:
    """The exit status, the name of the row that it comes from, and its reasons."""

    status: ExitStatus
    row: str
    ok: bool
    """There are no problems, not even those that only cost the job one of its groups."""
    lines: tuple[str, ...] = ()
    """The cause first, then problems, then remarks."""


def verdict(job: JobEnd, describe: Callable[[Exit], str]) -> Judged:
    """Judge the end of this part of the job.

    Args:
        describe: Returns the text of a problem: how a process has ended, with its decisive line.
    """
    lines, excused, remarks = list(job.problems), set(job.given_up), list(job.remarks)
    over = list[str]()
    for group in job.groups:
        x = group.failed or Exit(group.name, 0, 0, "", status=0)
        end = first(GROUPS, _Of(group, x, job)).then
        text = end.text.format(group=group.name, cause=cause_of(x.status))
        if end.kind == "over":
            over.append(text)
        elif end.kind == "remark":
            remarks.append(text)
        elif end.kind != "good":
            lines.append(describe(x))
            excused |= {lines[-1]} if end.kind == "excused" else set()
    if over and job.has_services and job.others is None and not job.finished:
        lines.append("no group ended by itself after the last step")
    if not lines and job.unfinished:
        lines = [f"the fault plan was not finished: {job.unfinished}"]
    if job.others is ExitStatus.FAILED:
        lines.append("no group here was in the job at its end, and those of other hosts failed")
    if job.is_idle:
        lines = [f"no rank began a transaction, so {NO_TRANSACTIONS}", *lines]
    row = first(STATUS, _Found(job, lines, frozenset(excused)))
    status = row.then if row.then is not None else job.others
    assert status is not None
    remarks += [*over, *(_UNTRAINED.format(group=group.name) for group in job.untrained)]
    if job.asked_to_end and job.committed:
        remarks.append(f"{job.what_ended} was asked to end, and left after step {job.step}")
    elif job.asked_to_end and not (lines or remarks):
        remarks.append(f"{job.what_ended} was asked to end before it had committed a step")
    if job.others is ExitStatus.DRAINED:
        remarks.append("the job was drained before its end while no group here was in it")
    if any(group.raised(NoState) for group in job.groups):
        remarks.append(f"NoState: {about_no_state(job.step if job.committed else None)}")
    causes = [*_left_early(job), *_short_shards(job)]
    return Judged(status, row.name, not lines, (*causes, *lines, *remarks))


def _left_early(job: JobEnd) -> Iterator[str]:
    """Describe ranks that ended without error or request in the middle of the job, by group."""
    for group in job.groups:
        ended = [e for e in group.exits if e.status == 0 and e.took_part and not e.leaves]
        early = [e for e in ended if job.lacked_groups or e.step < job.reached.get(e.rank, 0)]
        if not early or group.fate == "evicted":
            continue
        others = f"went on to step {job.reached.get(early[0].rank, 0)}"
        yield (
            f"group {group.name} rank {', '.join(str(e.rank) for e in early)} ended with exit "
            f"status 0 after step {min(e.step for e in early)}, unasked, and the others "
            f"{'could not go on without it' if job.lacked_groups else others}; the ranks of a "
            "group come and go together, and groups leave together by manager.drain(). Does the "
            f"script call sys.exit(), or leave its loop? its log: {', '.join(e.log for e in early)}"
        )


def _short_shards(job: JobEnd) -> Iterator[str]:
    """Describe groups that left at the end of their shards while the others needed them."""
    for group in job.groups if job.lacked_groups else ():
        if group.has_finished and LeaveReason.SHARD_ENDED in [e.reason for e in group.exits]:
            yield (
                f"group {group.name} left after step {max(e.step for e in group.exits)}, because "
                "its shard of the data was trained to its end, and the others could not go on "
                "without it: divide the data into equal shards, or let the job go on with fewer "
                "groups (min_replica_size)"
            )
