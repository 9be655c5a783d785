"""Digests of batches, by which ranks that must draw the same data compare their batches.

A digest covers types, shapes and values. Tensors and arrays of up to `WHOLE_BYTES` are read in
full. From larger ones at most `SAMPLES` evenly spaced elements are read, which bounds the cost. Of
a masked array, the digest covers the mask and the visible data; of an object of an unknown class,
the name of its class.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import torch

WHOLE_BYTES = 64 * 1024
"""Maximum size, in bytes, of a tensor or an array that is read in full."""
SAMPLES = 2048
"""Maximum number of elements read from a larger one."""
MOST_IDS = 4096
"""Maximum number of ids of a batch that are traced."""
_PLAIN = (bool, int, float, complex, type(None), np.generic)
_DEPTH = 16
"""Maximum number of levels of nested containers that are read."""


def digest_of(batch: Any, identify: Callable[[Any], Any] | None = None) -> str:
    """Return a digest of ``batch`` that is equal in all processes with equal data.

    Args:
        batch: Tensors, arrays, strings and numbers in any nesting of containers.
        identify: Returns the identity of a batch, such as its sample ids, which is then digested
            instead of the whole batch.

    Returns:
        16 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=8)
    _add(digest.update, batch if identify is None else identify(batch), _DEPTH)
    return digest.hexdigest()


def ids_of(identity: Any) -> list[int] | list[str] | None:
    """Return the ids in the identity of a batch, for the trace.

    Args:
        identity: An integer or a string, or several in a tensor, an array, a list or a tuple.

    Returns:
        The ids, or None if ``identity`` has another form or more than `MOST_IDS` ids.
    """
    if isinstance(identity, torch.Tensor | np.ndarray):
        identity = identity.reshape(-1).tolist() if math.prod(identity.shape) <= MOST_IDS else None
    found = [identity] if isinstance(identity, int | str) else identity
    if not isinstance(found, list | tuple) or not 0 < len(found) <= MOST_IDS:
        return None
    found = [each.item() if isinstance(each, torch.Tensor | np.generic) else each for each in found]
    of_one_kind: list[Any] = found
    return of_one_kind if {type(each) for each in found} in ({int}, {str}) else None


def combined(digests: list[str]) -> str:
    """Combine several digests, in their order, into one."""
    return hashlib.blake2b("/".join(digests).encode(), digest_size=8).hexdigest()


def runs_no_code(data: Any) -> bool:
    """Return whether indexing ``data`` runs no code of the user, so that all reads are equal.

    A dataset with code may augment its samples with its own generator, and two equal reads do not
    rule that out.
    """
    from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

    kind = type(data)
    if kind in (list, tuple, range, torch.Tensor, np.ndarray, np.memmap, TensorDataset):
        return True
    if kind is Subset:
        return runs_no_code(data.dataset)
    if kind is StackDataset:
        parts = data.datasets
        return all(map(runs_no_code, parts.values() if isinstance(parts, dict) else parts))
    return kind is ConcatDataset and all(map(runs_no_code, data.datasets))


def _add(put: Callable[[bytes], None], value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(put, value, depth)
    elif isinstance(value, np.ndarray):
        _add_array(put, value, depth)
    elif isinstance(value, _PLAIN):
        put(f"{type(value).__name__}:{value!r};".encode())
    elif isinstance(value, str | bytes | bytearray | memoryview):
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        put(f"{type(value).__name__}:{len(data)};".encode())
        put(data)
    else:
        _add_parts(put, value, depth)


def _add_parts(put: Callable[[bytes], None], value: Any, depth: int) -> None:
    put(f"{type(value).__qualname__};".encode())
    if depth == 0:
        return
    if isinstance(value, Mapping):
        parts: list[Any] = [part for item in value.items() for part in item]
    elif isinstance(value, list | tuple | deque):
        parts = list(value)
    elif isinstance(value, Set):
        parts = sorted(digest_of(part) for part in value)  # the order depends on the process
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return
    put(f"{len(parts)};".encode())
    for part in parts:
        _add(put, part, depth - 1)


def _add_tensor(put: Callable[[bytes], None], tensor: torch.Tensor, depth: int) -> None:
    if tensor.is_nested:  # its shape contains symbols that are numbered by process
        put(f"nested:{tensor.layout}:{tensor.dtype};".encode())
        with torch.no_grad():
            _add(put, _parts_of_nested(tensor), depth)
        return
    put(f"tensor:{tensor.dtype}:{tuple(tensor.shape)};".encode())
    if tensor.is_meta:
        return
    with torch.no_grad():
        values = tensor.detach()
        if values.layout is not torch.strided or values.is_quantized:
            _add(put, _plain_parts(values), depth)
            return
        if values.numel() * values.element_size() > WHOLE_BYTES:
            places = torch.arange(0, values.numel(), _stride(values.numel()), device=values.device)
            values = values[torch.unravel_index(places, values.shape)]
        values = values.reshape(-1).resolve_conj().resolve_neg().contiguous().cpu()
        # a copy of another dtype would not keep the bits, and numpy has no bfloat16
        put(values.view(torch.uint8).numpy().tobytes())


def _parts_of_nested(tensor: torch.Tensor) -> list[Any]:
    """Return values and offsets of a nested tensor, or its components if they do not describe it.

    The values of a jagged tensor with lengths contain gaps, whose content is undefined.
    """
    jagged: Any = tensor  # torch does not declare these methods
    if tensor.layout is torch.jagged and jagged.lengths() is None:
        return [jagged.values(), jagged.offsets(), jagged._ragged_idx]
    return list(tensor.unbind())


def _plain_parts(tensor: torch.Tensor) -> list[Any]:
    """Return strided tensors and numbers that define a sparse or a quantized tensor."""
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return [tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point()]
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return [tensor.int_repr(), scales, zeros, tensor.q_per_channel_axis()]
    if tensor.layout is torch.sparse_coo:  # uncoalesced values stay as they are: sums could round
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def _add_array(put: Callable[[bytes], None], array: np.ndarray[Any, Any], depth: int) -> None:
    put(f"array:{array.dtype}:{array.shape};".encode())
    if array.nbytes > WHOLE_BYTES:
        array = array.flat[:: _stride(array.size)]
    if isinstance(array, np.ma.MaskedArray):  # data under the mask do not count
        put(b"mask;" + np.ma.getmaskarray(array).tobytes())
        nothing: Any = np.zeros((), array.dtype)
        array = np.ma.filled(array, nothing)
    if array.dtype.hasobject:
        _add(put, array.reshape(-1).tolist(), depth)
    else:
        put(array.tobytes())


def _stride(elements: int) -> int:
    """Return the distance between two sampled elements; it is odd, to reach all columns."""
    return -(-elements // SAMPLES) | 1
