"""Ways in which a device fails a body: real ones on a GPU; without one, errors as CUDA has them."""

from __future__ import annotations

from pathlib import Path

import torch

CODES = {"assert": (710, "device-side assert triggered")} | {
    "ecc": (214, "uncorrectable ECC error encountered")
}
"""CUDA's number and text of errors that the process does not outlive."""


def error_of(way: str) -> RuntimeError:
    """As torch raises it."""
    code, text = CODES[way]
    error = torch.AcceleratorError(f"CUDA error: {text}")
    error.error_code = code
    return error


def fail(way: str, device: str) -> None:
    """``assert``: a real one, where there is a GPU; ``ecc``: its error only, which is raised."""
    if way == "assert" and device == "cuda":
        table = torch.zeros(4, device=device)
        _ = table[torch.tensor([1 << 20], device=device)]
        torch.cuda.synchronize()  # raises here, or else at the next call
        return
    raise error_of(way)


class Breaker:
    """Fails a body at some steps, each once in the whole job.

    Args:
        breaks: ``STEP=WAY,…``; due at that step or the first one after it.
        folder: where it notes that it has happened, for when this process is started again.
    """

    def __init__(self, breaks: str, device: str, folder: Path) -> None:
        pairs = (each.partition("=") for each in breaks.split(",") if each)
        self._due = [(int(step), way) for step, _, way in pairs]
        self._device, self._folder = device, folder

    def at(self, step: int) -> None:
        """The body of that step is under way."""
        for due, way in self._due:
            mark = self._folder / f"broke-{way}"
            if step >= due and not mark.exists():
                mark.touch()
                fail(way, self._device)
