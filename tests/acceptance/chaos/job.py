"""Control of a running job: `fft run` as a child, its bus, and its traces so far.

It starts one `fft run` and ends it. It sets FFT_TOKEN_FILE in this process while it opens the bus.
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

from fft.launch.exit_status import ExitStatus
from fft.messages.fault_plans import FaultPlan
from fft.operate import drain, inject
from fft.operate.client import JobClient
from fft.protocol.roles import AT_WORK
from fft.trace.format import scope_folders
from fft.trace.tail import TraceTail
from tests.acceptance.chaos.cases import Case, Layout

WORKER = Path(__file__).with_name("worker.py")
TRAINER = Path(__file__).with_name("trainer.py")
SETTLED = 12
"""Commits of a whole job before a fault.

A monitor that has just started needs three of them, and until then waits for `hang_limit`, ten
minutes.
"""
LEAD = 5
"""Steps from the command to the fault, enough for all ranks concerned to receive it."""
POLL_S = 0.02
START_S = 240.0
RECOVERED_S = 180.0
ENDED_S = 120.0
ENDS_WELL = (ExitStatus.COMPLETE, ExitStatus.DRAINED)
"""Exit statuses of a job that is drained at the end of its cases."""
_REACH = re.compile(r"FFT_BUS=(\S+) FFT_TOKEN_FILE=(\S+)\n")


def fault_names(case: Case, number: int) -> list[str]:
    """Return the names of the faults of the job's ``number``-th case in its traces."""
    return [f"case-{number}-{i}" for i in range(len(case.entries))]


class ChaosError(Exception):
    """The job did not behave as required; the message names the awaited event and the logs."""


class Job:
    """One job, until the block is left; then it is drained, or killed if it does not drain."""

    def __init__(
        self,
        layout: Layout,
        directory: Path,
        pace: float,
        timeouts: Sequence[str],
        limit_s: float,
        trainer: str | None = None,
    ) -> None:
        """Start the job.

        Args:
            pace: Seconds of a step.
            limit_s: Time after which the job is killed.
            trainer: A loop of `trainer.py`, or None for the small model of `worker.py`.
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
        """Drain the job; `fft run` kills its children if they do not drain, this only `fft run`."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # the second signal kills all ranks
            self.process.wait(ENDED_S)
        finally:
            self.tail.close()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def said(self) -> str:
        """Return the output of `fft run`."""
        return self._said.read_text(errors="replace")

    def until(self, holds: Callable[[], bool], what: str, within: float) -> None:
        """Poll until ``holds`` is true, because traces offer no event to wait for.

        Raises ChaosError.
        """
        deadline = time.monotonic() + within
        while not holds():
            if self.process.poll() is not None:
                raise ChaosError(f"the job ended before {what}: {self.said()[-2000:]}")
            if time.monotonic() > deadline:
                raise ChaosError(f"not within {within:g} s: {what}; see {self.traces}")
            time.sleep(POLL_S)

    # --- what it is doing ---

    def whole_epoch(self) -> tuple[int, ...] | None:
        """Return the epoch that all groups are working in, by rank, if there is one.

        It is the same for all, except for stages that each have a scope of their own. Asynchronous
        groups are rarely in one epoch together: the result is ``()`` if each has been in an epoch
        since it began and the newest record lists it, which is the only sign for a group that was
        killed.
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
        """Carry out a case, with its faults under ``names``, and wait until it has happened."""
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
        if all("group" in entry for entry in entries):  # else the fault is the supervisor's
            self.until(
                lambda: self._happened(entries, before), f"{case.name} ({answers})", RECOVERED_S
            )

    def bring_back(self, case: Case) -> None:
        """Start the groups that left because of a case, once their processes have ended."""
        for group in case.leaves:
            ended = partial(self.has_ended, group)
            self.until(ended, f"group {group} leaves", RECOVERED_S)
            self.start_again(group)

    def start_again(self, group: str) -> None:
        """Make the supervisor start a group that has left."""
        drain.evict(self.desk, group, restart=True, grace=5, on_accepted=lambda _: None)

    def has_ended(self, group: str) -> bool:
        """Whether all its processes have left the job."""
        return all(rank.role == "terminal" for rank in self.tail.poll().of(group))

    def _incarnations(self) -> dict[tuple[str, int], int]:
        return {place: rank.inc for place, rank in self.tail.view.ranks.items()}

    def _happened(self, entries: list[dict[str, Any]], before: dict[tuple[str, int], int]) -> bool:
        """Whether each fault has fired, or the process that was to do it has ended by another
        fault."""
        view = self.tail.poll()

        def over(entry: dict[str, Any]) -> bool:
            place = (entry["group"], entry.get("rank") or 0)
            return entry["name"] in view.injected or view.ranks[place].inc != before[place]

        return all(map(over, entries)) and any(e["name"] in view.injected for e in entries)
