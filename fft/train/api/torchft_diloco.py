"""Rejects buckets of torchft's DiLoCo that would lose tensors, before training.

torchft 0.2.0 packs tensors into buckets and advances by the size of a bucket, even if fewer
elements were packed. The tensors left over at the end are never reduced, so groups diverge. FFT
finds the fragments through the functions that they register for their state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType
from typing import Any

from fft.errors import FftError


def refuse_dropping(state_function: Callable[..., Any]) -> None:
    """Check the DiLoCo fragment that ``state_function`` saves, if it is bound to one.

    The function may be a user's closure over names that are bound later. Such empty cells are
    skipped, so call this again when the state is complete.

    Raises:
        FftError: The bucketizer of the fragment drops parameters.
    """
    kind = getattr(sys.modules.get("torchft.local_sgd"), "_StreamingDiLoCoFragment", None)
    if kind is None:  # not imported, or another thread is importing it
        return
    for found in _bound(getattr(state_function, "__closure__", None) or ()):
        # by type(): isinstance() asks a lazy proxy of the user for its class, which loads it
        if issubclass(type(found), kind) and found.use_bucketization:
            _refuse(found)


def _bound(cells: Iterable[CellType]) -> Iterator[Any]:
    """Yield the contents of the cells whose names are bound."""
    for cell in cells:
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        yield content


def _refuse(fragment: Any) -> None:
    if not fragment.original_parameters:
        return
    names, tensors = zip(*fragment.original_parameters.items(), strict=True)
    size = tensors[0].element_size()
    done = packed([t.numel() for t in tensors], fragment.bucket_cap_mb // size)
    if done < len(names):
        least = sum(t.nbytes for t in tensors)
        raise FftError(
            "torchft's DiLoCo with use_bucketization=True and buckets of "
            f"{fragment.bucket_cap_mb} bytes would never reduce {names[done]!r} and "
            f"{len(names) - done - 1} more: groups would diverge. Remove use_bucketization, pass "
            f"a bucket_cap_mb of at least {least / 2**20:.3g}, or use fft.DiLoCo"
        )


def packed(sizes: Sequence[int], capacity: int) -> int:
    """Return how many of the tensors of these ``sizes`` torchft packs; all sizes are in
    elements."""
    offset = done = 0
    while offset < sum(sizes):
        room = chunk = min(capacity, sum(sizes) - offset)
        while done < len(sizes) and sizes[done] <= room:
            room -= sizes[done]
            done += 1
        if chunk == 0:
            break
        offset += chunk
    return done
