"""A running job and a hand on it: `fft run` as a child, its bus, and what its traces say so far.

Starts one `fft run` and ends it. Sets FFT_TOKEN_FILE in this process while it opens the bus.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.chaos.cases import Case, Layout
from fft.messages.fault_plans import FaultPlan
from fft.operate import drain, inject
from fft.operate.client import JobClient
from fft.protocol.roles import AT_WORK
from fft.trace.format import scope_folders
from fft.trace.tail import TraceTail

WORKER = Path(__file__).with_name("worker.py")
TRAINER = Path(__file__).with_name("trainer.py")
SETTLED = 12
"""Commits of a whole job before it is broken (again). A monitor that has just been started needs to
have seen three of them, and until then waits for `hang_limit`, ten minutes."""
LEAD = 5
"""Steps from the command to the fault: all who are concerned have heard it."""
POLL_S = 0.02
START_S = 240.0
RECOVERED_S = 180.0
ENDED_S = 120.0
_REACH = re.compile(r"FFT_BUS=(\S+) FFT_TOKEN_FILE=(\S+)\n")


def fault_names(case: Case, number: int) -> list[str]:
    """What the faults of the job's ``number``-th case are called in its traces."""
    return [f"case-{number}-{i}" for i in range(len(case.entries))]


class ChaosError(Exception):
    """The job did not do what every job must: says what was waited for, and where to look."""


class Job:
    """One job, until the block is left; then it is drained, or killed if it does not heed."""

    def __init__(
        self,
        layout: Layout,
        directory: Path,
        pace: float,
        timeouts: Sequence[str],
        limit_s: float,
        trainer: str | None = None,
    ) -> None:
        """``pace``: of a step, in seconds; the job is killed after ``limit_s``.

        ``trainer``: a loop of `trainer.py`; None: the small model of `worker.py`.
        """
        self.script = WORKER if trainer is None else TRAINER
        self.layout, self.traces = layout, directory / "traces"
        self._waits_for_none = trainer == "async"
        self._said = directory / "run.log"
        self.traces.mkdir(parents=True)
        command = [sys.executable, "-m", "fft.cli", "run", "--injectable", "--no-progress"]
        command += ["--groups", str(layout.groups), "--ranks", str(layout.ranks)]
        command += ["--max-restarts", "100", "--timeout", str(limit_s)]
        command += ["--trace-dir", str(self.traces), str(self.script)]
        command += [*([trainer] if trainer else []), str(pace), *timeouts]
        with self._said.open("w") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=said)
        self.tail = TraceTail(self.traces)
        try:
            self.until(lambda: _REACH.search(self.said()) is not None, "the bus", START_S)
            self.desk = self._open()
        except BaseException:
            self._end()
            raise

    def _open(self) -> JobClient:
        found = _REACH.search(self.said())
        assert found is not None
        url, token = found.groups()
        os.environ["FFT_TOKEN_FILE"] = token
        try:
            return JobClient(url)
        finally:
            del os.environ["FFT_TOKEN_FILE"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.desk.bus.close()
        self._end()

    def _end(self) -> None:
        """Drain the job; `fft run` kills its children if they do not heed, we only `fft run`."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # the second one kills all ranks
            self.process.wait(ENDED_S)
        finally:
            self.tail.close()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def said(self) -> str:
        """What `fft run` has written."""
        return self._said.read_text(errors="replace")

    def until(self, holds: Callable[[], bool], what: str, within: float) -> None:
        """Look again and again: traces have nothing to wait on. Raises ChaosError."""
        deadline = time.monotonic() + within
        while not holds():
            if self.process.poll() is not None:
                raise ChaosError(f"the job ended before {what}: {self.said()[-2000:]}")
            if time.monotonic() > deadline:
                raise ChaosError(f"not within {within:g} s: {what}; see {self.traces}")
            time.sleep(POLL_S)

    # --- what it is doing ---

    def whole_epoch(self) -> tuple[int, ...] | None:
        """The epoch that all groups are at work in, by rank, if there is one.

        It is one and the same, but for stages that step by themselves. Groups that wait for no slow
        one are in few epochs together: ``()`` where all have been in one since they began, and the
        newest record counts them in: of who was killed it alone tells.
        """
        view, groups = self.tail.poll(), [str(g) for g in range(self.layout.groups)]
        ranks = [view.of(group) for group in groups]
        if any(len(found) != self.layout.ranks for found in ranks):
            return None
        if self._waits_for_none:
            at_work = all(r.commits and not r.leaves for rs in ranks for r in rs)
            return () if at_work and self._counted_in() >= set(groups) else None
        if not all(r.role in AT_WORK and r.members == tuple(groups) for rs in ranks for r in rs):
            return None
        epochs = {tuple(rank.epoch for rank in found) for found in ranks}
        first = epochs.pop()
        is_one = len(set(first)) == 1 or len(scope_folders(self.traces)) > 1
        return first if is_one and not epochs else None

    def _counted_in(self) -> set[str]:
        epoch = self.desk.job().epoch
        if epoch is None:
            return set()
        apart = (each.entry for each in epoch.standing)
        return {entry.group for entry in (*epoch.members, *apart)}

    def settle(self, what: str, within: float = RECOVERED_S) -> None:
        """Wait until the whole job has committed some steps in one epoch, from now on."""
        epoch: tuple[int, ...] | None = None
        goal = 0

        def settled() -> bool:
            nonlocal epoch, goal
            now, step = self.whole_epoch(), self.tail.view.step
            if now is None or now != epoch:
                epoch, goal = now, step + SETTLED
            return epoch is not None and step >= goal

        self.until(settled, what, within)

    # --- breaking it ---

    def commit(self, case: Case, names: Sequence[str]) -> None:
        """Carry out a case, its faults under ``names``, and wait until it has happened."""
        for place in case.evict:
            drain.evict(self.desk, place, restart=True, grace=5, on_accepted=lambda _: None)
        if not case.entries:
            return
        step = self.tail.poll().step + LEAD
        entries = [
            {"name": name, "step": step, **entry}
            for name, entry in zip(names, case.entries, strict=True)
        ]
        before = self._incarnations()
        state = self.desk.job()
        said = inject.send(self.desk, state, FaultPlan.model_validate({"faults": entries}))
        answers = "; ".join(one.text for one in said)
        if all("group" in entry for entry in entries):  # else it is the supervisor's
            self.until(
                lambda: self._happened(entries, before), f"{case.name} ({answers})", RECOVERED_S
            )

    def bring_back(self, case: Case) -> None:
        """Start the groups that a case made leave, once their processes have ended."""
        for group in case.leaves:
            ended = partial(self.has_ended, group)
            self.until(ended, f"group {group} leaves", RECOVERED_S)
            self.start_again(group)

    def start_again(self, group: str) -> None:
        """Have the supervisor start a group that has left."""
        drain.evict(self.desk, group, restart=True, grace=5, on_accepted=lambda _: None)

    def has_ended(self, group: str) -> bool:
        """Whether all its processes have left the job."""
        return all(rank.role == "terminal" for rank in self.tail.poll().of(group))

    def _incarnations(self) -> dict[tuple[str, int], int]:
        return {place: rank.inc for place, rank in self.tail.view.ranks.items()}

    def _happened(self, entries: list[dict[str, Any]], before: dict[tuple[str, int], int]) -> bool:
        """Each fault has fired, or the process that was to do it has ended by another's."""
        view = self.tail.poll()

        def over(entry: dict[str, Any]) -> bool:
            place = (entry["group"], entry.get("rank") or 0)
            return entry["name"] in view.injected or view.ranks[place].inc != before[place]

        return all(map(over, entries)) and any(e["name"] in view.injected for e in entries)
