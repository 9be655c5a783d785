"""Copy a batch for the step function, so that a replay gets the batch as it was loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fft.errors import DataError

_UNCHANGEABLE = (str, bytes, bool, int, float, complex, type(None))
_Memo = dict[int, Any]


def copied(batch: Any) -> Any:
    """Copy a batch, so that the step function cannot change the original.

    Tensors, arrays and the built-in containers are copied here, and the copy of a pinned tensor is
    pinned. All other objects are copied by ``copy.deepcopy``. An object that occurs twice in the
    batch is one object in the copy as well.

    Raises:
        DataError: An object cannot be copied; the message names its place and type.
    """
    return _copied(batch, "batch", {})


def _copied(value: Any, place: str, memo: _Memo) -> Any:
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if (known := memo.get(id(value))) is not None:
        return known
    made = _HOW.get(kind, _other)(value, place, memo)
    memo[id(value)] = made
    return made


def _tensor(value: torch.Tensor, place: str, memo: _Memo) -> torch.Tensor:
    source = value.detach()
    if value.device.type == "cpu" and value.layout is torch.strided and value.is_pinned():
        made = torch.empty_like(source, pin_memory=True).copy_(source)
    else:
        made = source.clone()
    return made.requires_grad_(value.requires_grad)


def _array(value: np.ndarray[Any, Any], place: str, memo: _Memo) -> Any:
    return _other(value, place, memo) if value.dtype.hasobject else value.copy(order="K")


def _dict(value: dict[Any, Any], place: str, memo: _Memo) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    memo[id(value)] = made  # it may contain itself
    for key, entry in value.items():
        made[key] = _copied(entry, f"{place}[{key!r}]", memo)
    return made


def _list(value: list[Any], place: str, memo: _Memo) -> list[Any]:
    made: list[Any] = []
    memo[id(value)] = made
    made += [_copied(entry, f"{place}[{i}]", memo) for i, entry in enumerate(value)]
    return made


def _tuple(value: tuple[Any, ...], place: str, memo: _Memo) -> tuple[Any, ...]:
    return tuple(_copied(entry, f"{place}[{i}]", memo) for i, entry in enumerate(value))


def _other(value: Any, place: str, memo: _Memo) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*_tuple(value, place, memo))
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise DataError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
            f"copied ({type(error).__name__}: {error}), so a replay could not use the original "
            "value; give it a __deepcopy__, or leave it out of the batch"
        ) from error


_HOW: dict[type, Callable[[Any, str, _Memo], Any]] = {
    torch.Tensor: _tensor,
    np.ndarray: _array,
    dict: _dict,
    list: _list,
    tuple: _tuple,
}
