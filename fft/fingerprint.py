"""A cheap fingerprint of tensors: equal bits have equal ones; unequal bits, almost surely, not.

Each 8 bytes are multiplied with a fixed odd number that depends on their place, and added, modulo
2 ** 64. So order counts, every single changed bit changes the sum, and the order of summation does
not, which lets every device compute it in its own way. One read of the memory; no defence against
somebody who wants two states to look alike. Touches only the tensors it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import torch

_LANES = 1 << 15
"""Eight-byte words that are multiplied at once; a row."""
_SMALL = 1 << 16
"""Bytes; tensors below are laid end to end first, since each call costs as much as some of them."""
_MASK = 2**64 - 1


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """16 hexadecimal digits over the bits of ``tensors``, in their order."""
    total = 0
    for place, words in enumerate(_words(tensors)):
        total += _hash(words) * (2 * place + 1)
    return f"{total & _MASK:016x}"


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


def _hash(words: torch.Tensor) -> int:
    weights = _weights(str(words.device))
    rows = words.numel() // _LANES
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if rows:
        table = words[: rows * _LANES].view(rows, _LANES)
        # an integer product of a matrix and a vector is fastest on CPUs, and not there on GPUs
        sums = (
            torch.mv(table, weights) if words.device.type == "cpu" else (table * weights).sum(dim=1)
        )
        places = torch.arange(1, 2 * rows, 2, dtype=torch.int64, device=words.device)
        total += (sums * places).sum()
    tail = words[rows * _LANES :]
    total += (tail * weights[: tail.numel()]).sum() * (2 * rows + 1)
    return int(total) & _MASK


@cache
def _weights(device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20240531)
    drawn = torch.randint(-(2**62), 2**62, (_LANES,), generator=generator, dtype=torch.int64)
    return (2 * drawn + 1).to(device)
