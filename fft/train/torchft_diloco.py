"""torchft's own DiLoCo on this manager: buckets that drop tensors are refused before it trains.

torchft 0.2.0 packs tensors into buckets and moves on by the size of a bucket, though less may have
been packed: what is left over at the end is never reduced, and groups differ from then on. FFT
knows the fragments by the functions that they register for their state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from fft.util.errors import FftError


def refuse_dropping(state_function: Callable[..., Any]) -> None:
    """Raise FftError if it is that of a fragment whose bucketizer drops parameters."""
    torchft = sys.modules.get("torchft.local_sgd")
    if torchft is None:
        return
    for cell in getattr(state_function, "__closure__", None) or ():
        fragment = cell.cell_contents
        if isinstance(fragment, torchft._StreamingDiLoCoFragment) and fragment.use_bucketization:
            _refuse(fragment)


def _refuse(fragment: Any) -> None:
    names, tensors = zip(*fragment.original_parameters.items(), strict=True)
    size = tensors[0].element_size()
    done = packed([t.numel() for t in tensors], fragment.bucket_cap_mb // size)
    if done < len(names):
        least = sum(t.nbytes for t in tensors)
        raise FftError(
            f"torchft's DiLoCo with use_bucketization=True and buckets of {fragment.bucket_cap_mb} "
            f"bytes would never reduce {names[done]!r} and {len(names) - done - 1} more: groups "
            f"would differ. Leave use_bucketization out, give a bucket_cap_mb of at least "
            f"{least / 2**20:.3g}, or use fft.DiLoCo"
        )


def packed(sizes: Sequence[int], capacity: int) -> int:
    """How many of the tensors of these ``sizes`` torchft packs; all are in elements."""
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
