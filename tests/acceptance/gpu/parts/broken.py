"""Ways in which a device fails: real ones on a GPU; otherwise errors as CUDA raises them."""

from __future__ import annotations

from pathlib import Path

import torch

CODES = {"assert": (710, "device-side assert triggered")} | {
    "ecc": (214, "uncorrectable ECC error encountered")
}
"""CUDA's number and text of errors that the process does not survive."""


def error_of(way: str) -> RuntimeError:
    """Return the error that torch raises."""
    code, text = CODES[way]
    error = torch.AcceleratorError(f"CUDA error: {text}")
    error.error_code = code  # type: ignore[attr-defined]
    return error


def fail(way: str, device: str) -> None:
    """Fail in one way: ``assert`` is a real one if there is a GPU; for ``ecc`` its error is
    raised."""
    if way == "assert" and device == "cuda":
        table = torch.zeros(4, device=device)
        _ = table[torch.tensor([1 << 20], device=device)]
        torch.cuda.synchronize()  # raises here, or else at the next call
        return
    raise error_of(way)


class Breaker:
    """A helper that fails the step function at some steps, each once in the whole job.

    Args:
        breaks: ``STEP=WAY,…``; due at that step or the first one after it.
        folder: Folder in which it records what has happened, for a restart of this process.
    """

    def __init__(self, breaks: str, device: str, folder: Path) -> None:
        pairs = (each.partition("=") for each in breaks.split(",") if each)
        self._due = [(int(step), way) for step, _, way in pairs]
        self._device, self._folder = device, folder

    def at(self, step: int) -> None:
        """Fail the step function of that step, if it is due."""
        for due, way in self._due:
            mark = self._folder / f"broke-{way}"
            if step >= due and not mark.exists():
                mark.touch()
                fail(way, self._device)
