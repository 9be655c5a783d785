"""Diagnosis of rollbacks that repeat at one step, beside the supervisor's loop, once per step.

While a diagnosis runs, this module owns one thread and its bus. It writes ``diagnosis-STEP.json``,
and evicts by the same command as an operator, which the loop then carries out.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fft.bus.token import JobToken
from fft.errors import FftError
from fft.operate.client import JobClient
from fft.operate.diagnosis.rounds import Report, diagnose, evict_group
from fft.trace.blame import Rollback

logger = logging.getLogger(__name__)

EVICTED_BY = "the supervisor"
"""Sender of the evictions of ranks that a diagnosis, or their speed, has shown to be at fault."""
AFTER = 4
"""Rollbacks in a row after which a diagnosis starts. From this number on attempts are separated by
pauses. By default a rank whose step function fails with differing errors gives up at the fifth."""
_END_S = 10.0
_LAST_ANSWER_S = 2.0


class Diagnoser:
    """Watches the rollbacks, and searches for their culprit on a thread."""

    def __init__(self, bus_url: str, token: JobToken | None, directory: Path, after: int) -> None:
        """Store the settings.

        Args:
            directory: Folder for the reports.
            after: Number of rollbacks in a row, without a commit, that start a diagnosis; 0
                disables it.
        """
        self._url = bus_url
        self._token = token
        self._directory = directory
        self._after = after
        self._done: set[int] = set()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._desk: JobClient | None = None

    def look(self, run: Sequence[Rollback], spare: int) -> None:
        """Begin a diagnosis if one is due.

        Args:
            run: The newest rollbacks without a commit in between.
            spare: Number of groups that the job can do without.
        """
        if not self._after or len(run) < self._after or run[-1].step in self._done:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._done.add(run[-1].step)
        self._is_closing.clear()
        thread = threading.Thread(
            target=self._work, args=(list(run), spare), name="fft-diagnosis", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # memory or process limit reached
            logger.error("there is no diagnosis: %s", error)
            return
        self._thread = thread

    def close(self) -> None:
        """End a running diagnosis, because no rank is left to answer it.

        If its eviction was what ended the job, 2 s are left to receive the answer.
        """
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join(_LAST_ANSWER_S)
        if (desk := self._desk) is not None:
            desk.bus.close()
        if self._thread is not None:
            self._thread.join(_END_S)

    # --- the thread ---

    def _work(self, run: list[Rollback], spare: int) -> None:
        step = run[-1].step
        logger.warning("%d rollbacks in a row at step %d: looking for the culprit", len(run), step)
        try:
            with JobClient(self._url, token=self._token, me=EVICTED_BY) as self._desk:
                report = diagnose(self._desk, run)
                self._write(step, report)  # in case the eviction fails or ends the job
                try:
                    act(self._desk, report, spare, self._is_closing.is_set)
                except FftError as error:
                    report.actions.append(f"the eviction failed: {error}")
        except FftError as error:
            logger.error("the diagnosis for step %d was given up: %s", step, error)
            return
        finally:
            self._desk = None
        path = self._write(step, report)
        logger.warning("diagnosis for step %d (%s): %s", step, path, " | ".join(report.lines()))

    def _write(self, step: int, report: Report) -> Path:
        path = self._directory / f"diagnosis-{step}.json"
        with suppress(OSError):
            path.write_text(json.dumps(report.to_json(), indent=2) + "\n")
        return path


def act(
    desk: JobClient, report: Report, spare: int, has_ended: Callable[[], bool] = lambda: False
) -> None:
    """Evict the group of the gravest culprit, if the evidence is strong and the job can continue.

    A failed check and a rank that all rollbacks name are strong evidence. A slow or silent rank is
    only reported. ``has_ended`` returns whether the supervisor has ended the job in the meantime,
    so that no process answers an eviction.
    """
    strong = [c for c in report.verdict.culprits if c.how in ("failed", "rollbacks")]
    if not strong:
        return
    group = strong[0].rank[0]
    if spare < 1:
        report.actions.append(f"group {group} was not evicted: the job cannot do without it")
        return
    done = None if has_ended() else evict_group(desk, group)
    over = f"group {group} was not evicted: the job has ended meanwhile"
    report.actions.append(over if done is None or has_ended() else done)
