"""What the notes of a trace say of durable checkpoints: which were taken, and why others were not.

Pure. For `fft run`, which reads them as they come, and for `fft report`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TOO_OFTEN = "too_often"
"""In a note `checkpoint_skipped`: the one before was still being written."""
ABOUT_TOO_OFTEN = (
    "a checkpoint was due while the one before was being written, and was left out; if that goes "
    "on, take them less often (--every)"
)
_NAMED = 8
"""Checkpoints that a report names one by one at most, the newest."""


class CheckpointNotes:
    """Of one start of a job; `take` each note in turn."""

    def __init__(self) -> None:
        self.troubles: list[str] = []
        """For whoever tells the operator, and takes them out."""
        self.taken: set[int] = set()
        """Steps of those that were published."""
        self.failed: dict[int, list[str]] = {}
        """Step → the ranks of which something is missing, and why."""
        self.left_out: dict[int, str] = {}
        """Step → why."""
        self.too_often: set[int] = set()
        """Steps of those that were left out because the one before was being written."""

    def take(self, rank: str, note: object, data: Mapping[str, Any]) -> None:
        """A note of ``rank``; others than those of checkpoints, and odd ones, say nothing."""
        step = data.get("step")
        if not isinstance(step, int):
            return
        if note == "checkpoint" and data.get("published") is True:
            self.taken.add(step)
        elif note == "checkpoint_failed":
            text = f"rank {rank}: {data.get('error')}"
            self.failed.setdefault(step, []).append(text)
            self.troubles.append(f"no checkpoint of step {step} from {text}")
        elif note == "checkpoint_skipped" and data.get(TOO_OFTEN) is True:
            if not self.too_often:
                self.troubles.append(ABOUT_TOO_OFTEN)
            self.too_often.add(step)
        elif note == "checkpoint_skipped":
            self.left_out.setdefault(step, f"rank {rank}: {data.get('reason')}")

    @property
    def last_failure(self) -> tuple[int, str] | None:
        """Step and cause of the last one that was not taken for an error; None: there was none."""
        steps = self.failed.keys() - self.taken
        return (step := max(steps), self.failed[step][0]) if steps else None

    def lines(self) -> Iterable[str]:
        """For a report; none: the job took no checkpoints."""
        failed = sorted(self.failed.keys() - self.taken)
        left_out = sorted((self.left_out.keys() | self.too_often) - self.taken - set(failed))
        if not (self.taken or failed or left_out):
            return
        newest = f" (the newest of step {max(self.taken)})" if self.taken else ""
        yield (
            f"checkpoints: {len(self.taken)} taken{newest}, {len(failed)} failed, "
            f"{len(left_out)} left out"
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
