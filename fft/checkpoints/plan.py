"""The checkpoint settings: when and where to take them, how many to keep, which to resume from."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fft.errors import CheckpointError

EVERY = "300s"
KEEP = 3
COPIES = 3
"""Multiple of a rank's state that copies in memory take: two copies, and a buffer to write from."""
_TIME = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(s|m|h)$")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Checkpointing:
    """Settings for a job's durable checkpoints; they must be equal on all ranks of all groups.

    Args:
        place: A directory that all hosts share, or an fsspec URL such as ``s3://bucket/run7``.
        every: Steps between two checkpoints (``100``), or the time between them (``"90s"``,
            ``"10m"``).
        keep: Number of newest checkpoints to keep; 0 keeps all.
        resume: ``True`` resumes from the newest checkpoint that verifies; a number resumes from the
            checkpoint of that step; ``False`` begins a new job and requires that no checkpoint
            exists yet.
        source: Place of the checkpoint of step ``resume``, if it is not at ``place``: the folder
            with the copies in memory. `fft run` sets it.

    Raises:
        CheckpointError: A value is invalid.
    """

    place: str | Path
    every: int | str = EVERY
    keep: int = KEEP
    resume: bool | int = False
    source: str = ""

    def __post_init__(self) -> None:
        if not str(self.place):
            raise CheckpointError("no place for checkpoints: give a directory, or a URL")
        if self.keep < 0:
            raise CheckpointError(f"keep={self.keep}: keep at least 1 checkpoint; 0 keeps all")
        if self.steps is None and self.seconds is None:
            raise CheckpointError(
                f"every={self.every!r}: give a number of steps, such as 100, or a time, such as "
                "90s, 10m or 2h"
            )

    @property
    def steps(self) -> int | None:
        """Steps between two checkpoints, or None if the interval is a time."""
        text = str(self.every)
        return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None

    @property
    def seconds(self) -> float | None:
        """Seconds between two checkpoints, or None if the interval is in steps."""
        found = _TIME.match(str(self.every))
        seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
        return seconds if 0 < seconds < math.inf else None

    def to_env(self, step: int | None) -> dict[str, str]:
        """Return these settings as environment variables for the processes of a job.

        Args:
            step: Step of the checkpoint to resume from, or None to start from scratch.
        """
        resume = {} if step is None else {"FFT_RESUME": str(step)}
        place = str(self.place)
        place = place if "://" in place else str(Path(place).absolute())
        every, keep = str(self.every), str(self.keep)
        told = {"FFT_CHECKPOINT": place, "FFT_CHECKPOINT_EVERY": every}
        return {**told, "FFT_CHECKPOINT_KEEP": keep, "FFT_RESUME": "never", **resume}


@dataclass(frozen=True)
class MemoryPlan:
    """Settings for the copies of the state in the memory of a host, between two checkpoints.

    Attributes:
        place: The folder in shared memory, which belongs to `fft run` of this host.
        every: Commits between two copies, or None for an interval that costs 1 % of the time.
        limit: Maximum size of the copies of one rank in bytes.
        resume: Step of the copy to resume from, or None.
        unused: Why copies were not used that this start could have begun with.
    """

    place: Path
    every: int | None
    limit: int
    resume: int | None = None
    unused: tuple[str, ...] = ()

    def to_env(self) -> dict[str, str]:
        """Return these settings as environment variables for the processes of a job."""
        resume = {} if self.resume is None else {"FFT_MEMORY_RESUME": str(self.resume)}
        if self.unused:
            resume["FFT_MEMORY_UNUSED"] = json.dumps(self.unused)
        told = {"FFT_MEMORY": str(self.place), "FFT_MEMORY_LIMIT": str(self.limit)}
        return {**told, "FFT_MEMORY_EVERY": str(self.every or ""), **resume}

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> MemoryPlan | None:
        """Return the settings that `fft run` has passed to this process, or None."""
        if not (place := env.get("FFT_MEMORY")):
            return None
        every, resume = env.get("FFT_MEMORY_EVERY"), env.get("FFT_MEMORY_RESUME")
        numbers = int(every) if every else None, int(env["FFT_MEMORY_LIMIT"])
        unused = tuple(json.loads(env.get("FFT_MEMORY_UNUSED") or "[]"))
        return cls(Path(place), *numbers, int(resume) if resume else None, unused)


def memory_interval(text: str) -> int | None:
    """Return the commits between two copies; None for ``auto``. Raises CheckpointError."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise CheckpointError(
            f"--memory {text}: give auto, off, or the number of steps between two copies"
        )
    return int(text)


def checkpointing_of(
    given: Checkpointing | str | Path | None, env: Mapping[str, str] = os.environ
) -> Checkpointing | None:
    """Return the settings from the environment if it has them, else those of the script.

    The environment has priority because the operator controls it. Raises CheckpointError.
    """
    if given is not None and not isinstance(given, Checkpointing):
        given = Checkpointing(given)
    found, memory = _durable_of(given, env), MemoryPlan.from_env(env)
    if found is None or memory is None or memory.resume is None:
        return found
    return replace(found, resume=memory.resume, source=str(memory.place))


def _durable_of(given: Checkpointing | None, env: Mapping[str, str]) -> Checkpointing | None:
    if not (place := env.get("FFT_CHECKPOINT")):
        return given
    keep = env.get("FFT_CHECKPOINT_KEEP") or str(KEEP)
    if not keep.isdigit():
        raise CheckpointError(f"FFT_CHECKPOINT_KEEP={keep!r}: give a number of checkpoints")
    every = env.get("FFT_CHECKPOINT_EVERY") or EVERY
    return Checkpointing(place, every, int(keep), _resume_of(env.get("FFT_RESUME") or "never"))


def _resume_of(text: str) -> bool | int:
    words: dict[str, Literal[True, False]] = {"newest": True, "never": False}
    if text in words:
        return words[text]
    if not text.isdigit():
        raise CheckpointError(f"FFT_RESUME={text!r}: give newest, never, or a step")
    return int(text)
