"""Begin a supervised job with a checkpoint, and resume it from one when its state is lost.

This module chooses the checkpoint, so that all groups begin with the same one. It creates a folder
for the traces of each start, and one for the code that the processes of all starts compile. A job
that has lost its state is restarted as a whole with an empty bus, so no process of the earlier
start can take part in it.

A process that replaces a lost one finds the code that torch's inductor compiled for the lost one.
This module creates the folder for it, identifies the processor, and removes a folder that no later
start can use.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from fft.bus import open_job_bus
from fft.bus.base import BusUnreachable
from fft.bus.token import JobToken
from fft.checkpoints.copies import Choice, CopiesOfHost, HeldCopies, chosen
from fft.checkpoints.files import Checkpoints, choose, name_of
from fft.checkpoints.plan import Checkpointing, MemoryPlan
from fft.checkpoints.stores import NoRoom, open_store
from fft.errors import CheckpointError, FftError
from fft.launch.exit_status import ExitStatus
from fft.launch.memory import NAMED, agreed, copies_folder, enter_host
from fft.launch.supervisor import JobOutcome, Joined, RunConfig
from fft.launch.supervisor.config import SOON, SupervisorError
from fft.launch.supervisor.groups import Restarts
from fft.launch.trace_directory import folder_for, held_traces
from fft.messages.fault_plans import FaultPlan
from fft.operate.entering import JobStart, enter
from fft.protocol.timeouts import bus_operation
from fft.trace.report import save_plan
from fft.util.files import why_not_private
from fft.util.remove_after_death import vanishing

logger = logging.getLogger(__name__)


_STARTS = 3
"""Number of starts in a row that may die at the same step of the same cause; after these the job
is not started again."""


@contextmanager
def held(config: RunConfig, joins: bool) -> Iterator[tuple[RunConfig, Callable[[], None]]]:
    """Hold the folders of this job while the block runs: traces, checkpoints, copies in memory.

    Args:
        joins: The job may be running already.

    Yields:
        ``config`` with the folders for compiled code and for copies in memory, and a function that
        lets the copies stay for the next start of the same command.

    Raises:
        StoreError: No checkpoints can be kept at the place, or another job keeps its own there.
        SupervisorError: A directory cannot be written, or another job holds the trace directory.
    """
    with ExitStack() as undo:
        job = Joined.from_env().bus_url.rpartition("/")[2] if joins else None
        undo.enter_context(held_traces(config.trace_dir, job))
        if config.checkpoint is not None:
            store = open_store(str(config.checkpoint.place))
            try:
                store.prepare()
            except NoRoom:
                if joins or not store.directories():
                    raise
                with store.hold():
                    _clear(Checkpoints(store))  # unfinished attempts may fill the disk
                store.prepare()
            undo.enter_context(nullcontext() if joins else store.hold())
        compiled = undo.enter_context(compile_cache(config, joins))
        copies, server, keep = undo.enter_context(copies_folder(config, joins))
        yield replace(config, compiled=compiled, copies=copies, copies_server=server), keep


def begun(
    config: RunConfig, joins: bool = False, resume: bool = False, below: int | None = None
) -> RunConfig:
    """Return ``config`` with the choices that are made when a start begins.

    These are the state to begin with, the folder for the traces, and the start on the bus.

    Args:
        joins: Another process serves the bus; the job may be running and have checkpoints.
        resume: Begin with the newest state, whatever the settings of checkpoints say.
        below: Begin with a state of an earlier step than this one.

    Raises:
        CheckpointError: There is no state to begin with.
        SupervisorError: The job cannot be started as asked.
        BusError: The bus of the job to join cannot be reached.
    """
    plan, step = config.checkpoint, None
    if plan is not None and resume:
        plan = replace(plan, resume=True)
    token = JobToken.from_env()
    start = enter(Joined.from_env().bus_url, token) if joins else None
    copies = _begin_with_copy(config, plan, start, resume or config.resume, below)
    if plan is not None and not (joins and plan.resume is False):
        store = open_store(str(plan.place))
        if copies is None or copies.resume is None:
            manifest = choose(Checkpoints(store), plan.resume, below)
            step = None if manifest is None else manifest.step
        if not joins:
            _clear(Checkpoints(store))
    if copies is not None and copies.resume is not None:
        step = copies.resume
    if step is None and (resume or config.resume):
        place = "in memory" if plan is None else f"at {plan.place}"
        logger.warning("no checkpoint %s yet: the job begins at its start", place)
    folder = folder_for(config.trace_dir, None if start is None else start.name)
    bus_url = None if start is None else start.url
    found = replace(config, resume_step=step, trace_dir=folder, bus_url=bus_url)
    return replace(found, checkpoint=plan, copies=copies)


def _begin_with_copy(
    config: RunConfig,
    plan: Checkpointing | None,
    start: JobStart | None,
    resume: bool,
    below: int | None,
) -> MemoryPlan | None:
    """Return the settings of the copies in memory, with the one to resume from, if any.

    It is the newest one that verifies, unless there is a checkpoint of a later step. All others
    are removed.

    Args:
        start: The start of a job that may have other hosts, whose copies count as well.
    """
    if config.copies is None:
        return None
    copies, problems = HeldCopies(config.copies.place), list[str]()
    choice: Choice | None = None

    def choose(hosts: Sequence[CopiesOfHost]) -> tuple[Choice | None, list[str]]:
        choice, problems = chosen(hosts, below)
        if choice is None or plan is None:
            return choice, problems
        entries = Checkpoints(open_store(str(plan.place))).found()
        steps = [e.step for e in entries if e.step is not None and e.problem is None]
        newest = max((s for s in steps if below is None or s < below), default=-1)
        return choice if newest <= choice.manifest.step else None, problems

    if resume and start is None:
        choice, problems = choose([copies])
        if choice is not None:
            copies.adopt(choice, [""], 0)
    elif start is not None and (server := config.copies_server) is not None:
        with open_job_bus(start.url, JobToken.from_env(), bus_operation(start.url)) as bus:
            enter_host(bus, server, config.groups)
            found = agreed(bus, server, config.parts_in_all, choose) if resume else None
        if found is not None:
            choice, problems = found.choice, list(found.problems)
    for problem in problems:
        logger.error("a copy in memory is not used: %s", problem)
    manifest = None if choice is None else choice.manifest
    expected = set(map(str, range(config.groups_in_all)))
    if manifest is not None and (lacking := expected - set(manifest.groups)):
        logger.warning(
            "the copy of step %d has no buffers and random states of group %s",
            manifest.step,
            ", ".join(sorted(lacking)),
        )
    copies.remove_others(manifest)
    step = None if manifest is None else manifest.step
    return replace(config.copies, resume=step, unused=tuple(problems[:NAMED]))


def _clear(checkpoints: Checkpoints) -> None:
    """Remove unfinished attempts of earlier starts if the store shows that no process is writing.

    Raises:
        CheckpointError: The store cannot be read.
    """
    try:
        left = checkpoints.leftovers()
        is_idle = bool(left) and checkpoints.store.is_at_work() is False
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints at {checkpoints.store.url} cannot be read: {error}"
        ) from error
    if is_idle and (gone := sorted(set(left) - checkpoints.remove(left).keys())):
        names = ", ".join(gone)
        logger.warning("removed unfinished attempts and removals of earlier starts: %s", names)


def about_newest(plan: Checkpointing, outcome: JobOutcome) -> str:
    """Describe in one line the newest checkpoint at the end of a job.

    The line names its step and how far it is behind the job, or the reason why there is no
    checkpoint. Only the manifests are read.
    """
    store, failure = open_store(str(plan.place)), outcome.failed
    try:
        found = [e for e in Checkpoints(store).found() if e.step is not None and e.problem is None]
    except OSError as error:
        return f"the newest checkpoint at {store.url} cannot be seen: {error}"
    last = f"; the last attempt, of step {failure[0]}, has failed: {failure[1]}" if failure else ""
    if not found or (step := found[-1].step) is None:
        why = last or f"; none was published before the job ended at step {outcome.step}"
        return f"there is no checkpoint at {store.url}{why}"
    name = name_of(step)
    name = name if found[-1].name == name else f"{name} (all but its name: {found[-1].name})"
    text = f"the newest checkpoint is {name} at {store.url}"
    last = last if failure is not None and failure[0] > step else ""
    if outcome.is_stale:
        return f"{text}; how far that is behind is not known, as traces have gaps{last}"
    if step > outcome.step:
        return f"{text}; this start ended at step {outcome.step}{last}"
    behind = outcome.step - step
    if not behind:
        return f"{text}, of the last step of the job"
    steps = "1 step" if behind == 1 else f"{behind} steps"
    return f"{text}, {steps} behind the last one of the job ({outcome.step}){last}"


class Resumptions:
    """Runs a job, and resumes it from its newest checkpoint whenever it loses its state.

    Args:
        run: Runs one start of the job to its end.
        say: Shows a line to the operator.
        joins: Another process serves the bus.
    """

    def __init__(
        self,
        run: Callable[[RunConfig, FaultPlan], JobOutcome],
        say: Callable[[str], object],
        joins: bool = False,
    ) -> None:
        self._run = run
        self._say = say
        self._joins = joins
        self._in_vain = Restarts()
        """Starts in a row that began at the same step as the one before."""
        self._ends: frozenset[tuple[str, str]] = frozenset()
        """How the previous start ended, as `JobOutcome.ends`."""
        self._oldest: int | None = None
        """Step of the oldest state with which the present row of starts began that ended soon."""
        self._last: tuple[JobOutcome, RunConfig] | None = None
        """The newest start that has ended."""
        self._returned_to: int | None = -1
        """Step from which the job started again when its replicas last differed; None is the
        beginning, -1 is no such start."""
        self._died: dict[tuple[str, str], int] = {}
        """Step and cause of deaths that ended starts in a row, and the number of these starts."""

    def run(self, config: RunConfig, plan: FaultPlan, traces: Path) -> tuple[JobOutcome, RunConfig]:
        """Run all starts; return the outcome of the last one and its configuration.

        Args:
            traces: The folder with the traces of all starts.

        Raises:
            FftError: The first start cannot begin. A later failure is an outcome.
        """
        try:
            return self._all_starts(config, plan, traces)
        except FftError as error:
            if self._last is None:
                raise
            found, config = self._last
            lines = (f"the job cannot be started again: {error}",)
            gone = isinstance(error, BusUnreachable)
            status = ExitStatus.BUS_LOST if gone else ExitStatus.FAILED
            return replace(found, ok=False, lines=lines, status=status), config

    def _all_starts(
        self, config: RunConfig, plan: FaultPlan, traces: Path
    ) -> tuple[JobOutcome, RunConfig]:
        began = time.monotonic()
        if config.resume_step is not None:
            self._say(f"resuming from step {config.resume_step} {config.source}")
        while True:
            config.make_place()
            found = self._run(config, plan)
            self._last = found, config
            may_go_on = self._set_tainted_aside(found, config)
            if found.lost is None or not may_go_on:
                self._report_no_progress(found, config)
                return found, config
            again = self._next(found, config, traces)
            if isinstance(again, JobOutcome):
                return again, config
            step = again.resume_step
            where = f"from the checkpoint of step {step} {again.source}"
            where = "at the beginning" if step is None else where
            self._say(f"{found.lost}: the job starts again {where}")
            plan = FaultPlan(faults=[f for f in plan.faults if f.name not in found.fired])
            config = _after(config, again, plan, began)

    def _next(self, found: JobOutcome, config: RunConfig, traces: Path) -> RunConfig | JobOutcome:
        """Return the configuration of the next start, or the outcome if none would help."""
        stuck = replace(found, status=ExitStatus.NO_PROGRESS)
        logs = f"logs: {config.trace_dir / 'logs'}"
        is_same = bool(found.ends & self._ends)
        below = self._suspect_step(found, config, is_same)
        self._ends = found.ends
        if found.errors and is_same and below is None:
            self._say(
                "two starts in a row have ended by the same error of the script: correct it, "
                f"and start the job again with --resume; {logs}"
            )
            return found
        self._died = {death: self._died.get(death, 0) + 1 for death in found.deaths}
        if max(self._died.values(), default=0) == _STARTS:
            place, cause = max(self._died, key=lambda death: self._died[death])
            self._say(
                f"{_STARTS} starts in a row have died at {place} by {cause}: the job is not "
                "started again. Correct the script or its data, or skip the data of this "
                f"step; {logs}"
            )
            return stuck
        if is_suspect := below is not None:
            self._say(
                "two starts in a row have ended in the same way soon after they began with a "
                f"state of step {below} or later, which may be bad: an older one is looked for"
            )
        if found.taint is not None:  # all groups began with the same state
            below = max(found.taint.sound, config.resume_step or 0) + 1
        again = begun(replace(config, trace_dir=traces), self._joins, True, below)
        if again.resume_step is None and (is_suspect or again.checkpoint is None):
            which = "older state" if is_suspect else "state"
            self._say(
                f"there is no {which} to begin with, and the job is not started again. Correct "
                f"the script or its data; {logs}"
            )
            return found
        for line in found.lines:
            self._say(line)
        if again.resume_step != config.resume_step:
            self._in_vain.progressed()
            return again
        if self._in_vain.are_used_up(config.max_restarts, found.ended_by_error):
            self._say(
                f"{self._in_vain.in_a_row + 1} starts in a row have published no checkpoint: the "
                "job is not started again. Correct the cause of its deaths, or give a smaller "
                f"--every; {logs}"
            )
            return stuck
        self._in_vain.next(found.ended_by_error)
        return again

    def _suspect_step(self, found: JobOutcome, config: RunConfig, is_same: bool) -> int | None:
        """Return the step of a state that may be bad, so that the next start begins with an older
        one, or None.

        A state is suspected if two starts in a row have begun with it, or with later states that
        follow from it, and have ended in the same way within a few steps.
        """
        begun_at, before = config.resume_step, self._oldest
        if begun_at is None or found.step > begun_at + SOON or not found.ends:
            self._oldest = None
            return None
        if not is_same or before is None:
            self._oldest = begun_at
            return None
        self._oldest = min(begun_at, before)
        return self._oldest

    def _set_tainted_aside(self, found: JobOutcome, config: RunConfig) -> bool:
        """Rename the checkpoints of tainted steps; return whether the job may start again.

        In a job of several hosts nothing is renamed, because the traces of this host may lack
        comparisons.
        """
        taint, is_whole = found.taint, config.parts_in_all == config.groups
        if taint is None or config.checkpoint is None or not is_whole:
            return True
        store, sound = open_store(str(config.checkpoint.place)), config.resume_step or 0
        sound = max(taint.sound, sound)  # all groups began with the same checkpoint
        step = Checkpoints(store).give_up_tainted(sound)
        if step is None and store.directories():
            self._say(
                f"{taint}, and all checkpoints at {store.url} are newer than step {sound}, after "
                "which the replicas were last equal. The job is not started again: remove the "
                "checkpoints that you do not trust, and use --resume, or start from the "
                "beginning. To avoid this keep more checkpoints (--keep), or compare more often "
                "(check_replicas)"
            )
            return False
        if step == self._returned_to:
            where = "the beginning" if step is None else f"step {step}"
            self._say(
                f"two starts in a row from {where} have ended because the replicas differ: the "
                "job is not started again. Look for values that differ between the groups (seeds, "
                "data, environment), and diagnose the machines"
            )
            return False
        self._returned_to = step
        return True

    def _report_no_progress(self, found: JobOutcome, config: RunConfig) -> None:
        """Report a job that ended by itself at the step at which it began.

        The outcome's own lines describe any other end.
        """
        begun_at = config.resume_step
        if found.ok and not found.lines and begun_at is not None and found.step <= begun_at:
            self._say(
                f"nothing was left to do after step {begun_at}: is the script to "
                "train on (max_steps, data)?"
            )


def _after(config: RunConfig, again: RunConfig, plan: FaultPlan, began: float) -> RunConfig:
    """Return the configuration of the next start, with the remaining time and faults."""
    again.make_place()
    path = save_plan(again.trace_dir, plan)
    left = config.timeout
    if left is not None:
        left = max(1.0, left - (time.monotonic() - began))
    return replace(again, timeout=left, faults=path, injectable=config.may_inject)


# --- compiled ---

SETTING = "TORCHINDUCTOR_CACHE_DIR"
"""torch's variable for the cache directory; a value that the user has set is kept."""
FOLDER = ".compiled"
"""Folder beside the checkpoints of a job on one host, so that running the same command again
reuses the compiled code."""


@contextmanager
def compile_cache(
    config: RunConfig, joins: bool, environ: Mapping[str, str] = os.environ
) -> Iterator[Path | None]:
    """Provide the folder for the time of the job.

    Args:
        joins: Other hosts take part in the job.

    Yields:
        The folder, or None if the user has set one, which the processes inherit.

    Raises:
        SupervisorError: The folder cannot be created.
    """
    if environ.get(SETTING):
        yield None
    elif (kept := _beside_checkpoints(config, joins)) is not None:
        _make(kept)
        yield kept
    else:
        with _temporary() as folder, vanishing(folder):
            yield folder


@contextmanager
def _temporary() -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(prefix="fft-compiled-", ignore_cleanup_errors=True)
    except OSError as error:
        raise _not_made("the folder for temporary files (TMPDIR)", error) from error
    with made as name:
        yield Path(name)


def _beside_checkpoints(config: RunConfig, joins: bool) -> Path | None:
    """Return the folder beside the checkpoints.

    None if there are no checkpoints, or if other hosts may use their place.
    """
    place = "" if config.checkpoint is None else str(config.checkpoint.place)
    if not place or "://" in place or joins:
        return None
    return Path(place).absolute() / FOLDER / _processor()


def _processor() -> str:
    """Return a name for the kind of processor.

    Code compiled for one kind may be wrong for another, and the disk may move between hosts.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    words = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    told = "\n".join([platform.machine(), *sorted(words)])
    return f"{platform.machine()}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def _make(folder: Path) -> None:
    """Create the folder and its parent; code is loaded from them, so only this user may write."""
    try:
        for each in folder.parent, folder:
            with suppress(FileExistsError):
                each.mkdir(mode=0o700)
            _refuse_open(each)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_made(str(folder), error) from error


def _refuse_open(folder: Path) -> None:
    """Raise `SupervisorError` if another user may have put code into ``folder``."""
    if (wrong := why_not_private(folder)) is not None:
        raise SupervisorError(
            f"compiled code is executed, and {folder} {wrong}: remove it, or name a folder in "
            f"{SETTING} that only you may write"
        )


def _not_made(place: str, error: OSError) -> SupervisorError:
    return SupervisorError(
        f"nothing compiled can be kept in {place}: {error.strerror}; make room there, or name "
        f"another folder in {SETTING}"
    )
