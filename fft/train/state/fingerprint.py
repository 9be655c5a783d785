"""A cheap fingerprint of tensors, equal for equal bits and almost surely different otherwise.

The high bits of each 8-byte word are folded onto its low bits. The word is then multiplied by a
fixed odd number that depends on its position, and all products are added modulo 2 ** 64. So the
order of words matters, and every changed bit changes the sum. The order of summation does not
matter, so each device can sum in its own way. Without the fold two flipped signs would cancel,
because both change the sum by 2 ** 63. It reads the memory once and does not resist deliberate
collisions. This module accesses only the given tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch

_LANES = 1 << 15
"""Number of 8-byte words in a row, which are multiplied at once."""
_ROWS = 16
"""Number of rows processed at once, so that intermediate results stay in the cache."""
_SHIFT = 29
"""Shift of the fold; not half or a quarter of a word, where signs of shorter numbers coincide."""
_KEPT = (1 << (64 - _SHIFT)) - 1
_SMALL = 1 << 16
"""Size in bytes below which tensors are concatenated first, to save the cost of a call for each."""
_MASK = 2**64 - 1


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Return 16 hexadecimal digits over the bits of ``tensors``, in their order."""
    totals: dict[torch.device, torch.Tensor] = {}  # so that each device is read once, at the end
    for place, words in enumerate(_words(tensors)):
        part = _hash(words) * _signed(_odd(place))
        before = totals.get(words.device)
        totals[words.device] = part if before is None else before + part
    return f"{sum(int(total) for total in totals.values()) & _MASK:016x}"


def _words(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    small: list[torch.Tensor] = []
    for tensor in _dense(tensors):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if data.numel() < _SMALL:
            small.append(data)
        else:
            yield _as_words(data)
    for device in sorted({str(data.device) for data in small}):
        yield _as_words(torch.cat([data for data in small if str(data.device) == device]))


def _dense(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors; of a sparse one, its indices and values."""
    for tensor in tensors:
        if tensor.is_sparse:
            yield from (tensor.coalesce().indices(), tensor.coalesce().values())
        else:
            yield tensor


def _as_words(data: torch.Tensor) -> torch.Tensor:
    rest = -data.numel() % 8
    if rest or data.data_ptr() % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, rest))
    return data.view(torch.int64)


def _hash(words: torch.Tensor) -> torch.Tensor:
    """Return the hash of ``words`` as a scalar on their device."""
    weights = _weights(str(words.device))
    rows = words.numel() // _LANES
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    table = words[: rows * _LANES].view(rows, _LANES)
    for first in range(0, rows, _ROWS):
        part = _fold(table[first : first + _ROWS])
        # the integer matrix-vector product is fastest on CPUs, but does not exist on GPUs
        sums = (
            torch.mv(part, weights) if words.device.type == "cpu" else (part * weights).sum(dim=1)
        )
        places = torch.arange(2 * first + 1, 2 * (first + len(part)), 2, device=words.device)
        total += (sums * places).sum()
    tail = _fold(words[rows * _LANES :])
    total += (tail * weights[: tail.numel()]).sum() * (2 * rows + 1)
    return total


def _fold(words: torch.Tensor) -> torch.Tensor:
    """Fold high bits onto low ones; the mapping is one-to-one."""
    return words.bitwise_right_shift(_SHIFT).bitwise_and_(_KEPT).bitwise_xor_(words)


def _odd(place: int) -> int:
    """Return an odd number for the ``place``-th tensor, unlike the products of row factors.

    Uses the last steps of SplitMix (Steele et al., "Fast splittable pseudorandom number
    generators", 2014).
    """
    mixed = (place + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed | 1


def _signed(number: int) -> int:
    """Return the same 64 bits as an int64."""
    return number - (1 << 64) if number >> 63 else number


@cache
def _weights(device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20240531)
    with torch.device("cpu"):
        drawn = torch.randint(-(2**62), 2**62, (_LANES,), generator=generator, dtype=torch.int64)
    return (2 * drawn + 1).to(device)
