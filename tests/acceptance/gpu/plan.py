"""The parts: the subject of each, its time limit, and the devices that it supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Device = Literal["cuda", "cpu"]
TOTAL_S = 535.0
"""Time limit for all parts together; with the start and the page it stays below 10 minutes."""
_TURNS = (2, 3, 5, 7, 11, 12, 1, 8, 4, 9, 10, 13, 6)
"""The order of the parts: short ones first, whose unused time goes to the others, then by
importance in case the time runs out."""


@dataclass(frozen=True)
class Part:
    """A test. ``name`` is its module's in `tests.acceptance.gpu.parts`."""

    number: int
    name: str
    title: str
    limit_s: float
    """Guaranteed time in seconds; time that other parts do not need is added."""
    on_cpu: bool = True
    """Whether its logic can be tested without a GPU, with gloo and CPU tensors."""
    gpus: int = 1
    """Number of GPUs that it needs."""


PARTS = (
    Part(1, "across_groups", "gloo across groups with tensors of the device", 75),
    Part(2, "side_stream", "a side stream still runs at the vote", 20, on_cpu=False),
    Part(3, "random_state", "random numbers of the device, and kernels that vary", 20),
    Part(4, "compiled", "AMP with a scaler, torch.compile, CUDA graphs", 40),
    Part(5, "transfer", "state from and to device memory", 20),
    Part(6, "nccl_rebuild", "NCCL, one rank: abort and build anew, many times", 50),
    Part(7, "nccl_pair", "NCCL, two ranks on one GPU", 80),
    Part(8, "device_errors", "out of memory, an assert on the device, an ECC error", 40),
    Part(9, "ratios", "steps beside torch's DDP and torchft", 45),
    Part(10, "hugging_face", "Hugging Face's Trainer with fp16", 60),
    Part(11, "costs", "passes over 1 GB of parameters: NaN, fingerprint, copy", 20),
    Part(12, "nccl_abort", "where the time of NCCL's abort goes", 30, on_cpu=False),
    Part(13, "nccl_two_gpus", "NCCL and FSDP2, two ranks on two GPUs", 35, on_cpu=False, gpus=2),
)


def chosen(words: Sequence[str]) -> list[Part]:
    """Return the parts that are named, by number or name, or all, in the order of their turns.

    Raises ValueError if there is no such part.
    """
    known = {word: part for part in PARTS for word in (str(part.number), part.name)}
    if unknown := [word for word in words if word not in known]:
        names = ", ".join(f"{part.number} ({part.name})" for part in PARTS)
        raise ValueError(f"there is no part {unknown[0]!r}; there are {names}")
    wanted = {known[word] for word in words} or set(PARTS)
    return sorted(wanted, key=lambda part: _TURNS.index(part.number))
