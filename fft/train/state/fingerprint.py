"""A cheap fingerprint of tensors: equal bits have equal ones; unequal bits, almost surely, not.

Each 8 bytes, their high bits folded onto the low ones, are multiplied with a fixed odd number that
depends on their place, and added, modulo 2 ** 64. So order counts, every single changed bit changes
the sum, and the order of summation does not, which lets every device compute it in its own way.
(Without the fold two flipped signs would cancel: both change the sum by 2 ** 63.) One read of the
memory; no defence against somebody who wants two states to look alike. Touches only the tensors
that it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch

_LANES = 1 << 15
"""Eight-byte words that are multiplied at once; a row."""
_ROWS = 16
"""Rows that are worked on at once, so that what comes between stays in the cache."""
_SHIFT = 29
"""Of the fold: no half or quarter of a word, where the signs of shorter numbers would meet."""
_KEPT = (1 << (64 - _SHIFT)) - 1
_SMALL = 1 << 16
"""Bytes; tensors below are laid end to end first, since each call costs as much as some of them."""
_MASK = 2**64 - 1


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """16 hexadecimal digits over the bits of ``tensors``, in their order."""
    totals: dict[torch.device, torch.Tensor] = {}  # one read from each device, at the end
    for place, words in enumerate(_words(tensors)):
        part = _hash(words) * _signed(_odd(place))
        before = totals.get(words.device)
        totals[words.device] = part if before is None else before + part
    return f"{sum(int(total) for total in totals.values()) & _MASK:016x}"


def _words(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    small: list[torch.Tensor] = []
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if data.numel() < _SMALL:
            small.append(data)
        else:
            yield _as_words(data)
    for device in sorted({str(data.device) for data in small}):
        yield _as_words(torch.cat([data for data in small if str(data.device) == device]))


def _as_words(data: torch.Tensor) -> torch.Tensor:
    rest = -data.numel() % 8
    if rest or data.data_ptr() % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, rest))
    return data.view(torch.int64)


def _hash(words: torch.Tensor) -> torch.Tensor:
    """One number, on the device of ``words``."""
    weights = _weights(str(words.device))
    rows = words.numel() // _LANES
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    table = words[: rows * _LANES].view(rows, _LANES)
    for first in range(0, rows, _ROWS):
        part = _fold(table[first : first + _ROWS])
        # an integer product of a matrix and a vector is fastest on CPUs, and not there on GPUs
        sums = (
            torch.mv(part, weights) if words.device.type == "cpu" else (part * weights).sum(dim=1)
        )
        places = torch.arange(2 * first + 1, 2 * (first + len(part)), 2, device=words.device)
        total += (sums * places).sum()
    tail = _fold(words[rows * _LANES :])
    total += (tail * weights[: tail.numel()]).sum() * (2 * rows + 1)
    return total


def _fold(words: torch.Tensor) -> torch.Tensor:
    """A one-to-one mapping, which carries each bit of the upper half to a lower place, too."""
    return words.bitwise_right_shift(_SHIFT).bitwise_and_(_KEPT).bitwise_xor_(words)


def _odd(place: int) -> int:
    """An odd number for the ``place``-th tensor, unlike any product of those of rows.

    Steele et al., "Fast splittable pseudorandom number generators" (2014): SplitMix's last steps.
    """
    mixed = (place + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed | 1


def _signed(number: int) -> int:
    """The same 64 bits as an int64."""
    return number - (1 << 64) if number >> 63 else number


@cache
def _weights(device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20240531)
    drawn = torch.randint(-(2**62), 2**62, (_LANES,), generator=generator, dtype=torch.int64)
    return (2 * drawn + 1).to(device)
