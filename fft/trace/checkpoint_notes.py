"""Durable checkpoints in the notes of a trace: which were taken, and why others were not.

Pure. ``fft run`` reads the notes as they come, and ``fft report`` reads them afterwards. A rank
also reports checkpoints on the bus, because its trace may be on the same full disk.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from typing import Any

from fft.messages.progress import CheckpointReport, Outcome, fitting
from fft.messages.protocol import Peer

TOO_OFTEN = "too_often"
"""Field of a `checkpoint_skipped` note: the previous checkpoint was still being written."""
ABOUT_TOO_OFTEN = (
    "a checkpoint was due while the one before was being written, and was left out; if that goes "
    "on, take them less often (--every)"
)
_BUT_FOR_GAPS = (
    ", according to the traces, which have gaps: more checkpoints may have been taken, skipped, or "
    "have failed; `fft checkpoint list` shows the existing ones"
)
_NAMED = 8
"""Maximum number of checkpoints that a report lists one by one; it lists the newest."""


def report_of(peer: Peer, note: str, data: Mapping[str, Any]) -> CheckpointReport | None:
    """Return the report that ``peer`` sends on the bus for its note, or None if unrelated."""
    found = _outcome(note, data)
    if found is None:
        return None
    outcome, why = found
    return CheckpointReport(*peer, data["step"], outcome, fitting(why))


def _outcome(note: object, data: Mapping[str, Any]) -> tuple[Outcome, str] | None:
    """Return the outcome of a checkpoint by a note, and the reason; None for an unrelated note."""
    if note == "checkpoint" and data.get("published") is True:
        return "published", ""
    if note == "checkpoint_failed":
        return "failed", str(data.get("error"))
    if note == "checkpoint_skipped":
        return "too_often" if data.get(TOO_OFTEN) is True else "left_out", str(data.get("reason"))
    return None


class CheckpointNotes:
    """The checkpoints of one start of a job.

    Call `take` for each note and `hear` for each report; an outcome that arrives both ways counts
    once.
    """

    def __init__(self) -> None:
        self._counted: set[tuple[str, int, Outcome]] = set()
        """(rank, step, outcome) of everything counted so far."""
        self.troubles: list[str] = []
        """Messages for the operator; the caller that prints a message removes it."""
        self.taken: set[int] = set()
        """Steps of the published checkpoints."""
        self.failed: dict[int, list[str]] = {}
        """Step → for each rank whose part is missing, the rank and the reason."""
        self.left_out: dict[int, str] = {}
        """Step → the reason."""
        self.too_often: set[int] = set()
        """Steps whose checkpoint was skipped because the previous one was being written."""

    def take(self, rank: str, note: object, data: Mapping[str, Any]) -> None:
        """Take a note of ``rank``; unrelated or malformed notes are ignored."""
        step, found = data.get("step"), _outcome(note, data)
        if isinstance(step, int) and found is not None:
            self._count(rank, step, *found)

    def hear(self, report: CheckpointReport) -> None:
        """Take a report that a rank sent on the bus."""
        rank = f"{report.group}/{report.rank}"
        self._count(rank, report.step, report.outcome, report.why)

    def _count(self, rank: str, step: int, outcome: Outcome, why: str) -> None:
        if (rank, step, outcome) in self._counted:
            return
        self._counted.add((rank, step, outcome))
        text = f"rank {rank}: {why}"
        if outcome == "published":
            self.taken.add(step)
        elif outcome == "failed":
            insort(self.failed.setdefault(step, []), text)
            self.troubles.append(f"no checkpoint of step {step} from {text}")
        elif outcome == "too_often":
            if not self.too_often:
                self.troubles.append(ABOUT_TOO_OFTEN)
            self.too_often.add(step)
        else:
            self.left_out[step] = min(self.left_out.get(step, text), text)

    @property
    def last_failure(self) -> tuple[int, str] | None:
        """Step and cause of the newest checkpoint that an error prevented, or None."""
        steps = self.failed.keys() - self.taken
        return (step := max(steps), self.failed[step][0]) if steps else None

    def lines(self, has_gaps: bool = False) -> Iterable[str]:
        """Yield the lines of a report; no lines if the job took no checkpoints.

        Args:
            has_gaps: The traces have gaps, so the counts may be too low.
        """
        failed = sorted(self.failed.keys() - self.taken)
        left_out = sorted((self.left_out.keys() | self.too_often) - self.taken - set(failed))
        if not (self.taken or failed or left_out):
            return
        newest = f" (the newest of step {max(self.taken)})" if self.taken else ""
        yield (
            f"checkpoints: {len(self.taken)} taken{newest}, {len(failed)} failed, "
            f"{len(left_out)} left out{_BUT_FOR_GAPS if has_gaps else ''}"
        )
        yield from _named(f"  step {step} failed: {self.failed[step][0]}" for step in failed)
        partly = sorted(self.failed.keys() & self.taken)
        yield from _named(f"  step {n} was taken without {self.failed[n][0]}" for n in partly)
        if count := len(self.too_often - self.taken):
            yield (
                f"  {count} of them were due while the one before was being written: take "
                "checkpoints less often (--every)"
            )
        others = [step for step in left_out if step not in self.too_often]
        yield from _named(f"  step {step} was left out: {self.left_out[step]}" for step in others)


def _named(lines: Iterable[str]) -> Iterable[str]:
    all_lines = list(lines)
    if (more := len(all_lines) - _NAMED) > 0:
        yield f"  … and {more} before"
    yield from all_lines[-_NAMED:]
