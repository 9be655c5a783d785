"""Tensor subclasses and DTensors of any layout as plain data.

A subclass with ``__tensor_flatten__`` (torchao's quantized states, for example) is exported as the
name of its class, its metadata, and the tensors inside. It is rebuilt by ``__tensor_unflatten__``
of a class of that name that this process has already defined: nothing is imported, and the data
hold no code. This module accesses only the given tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fft.errors import FftError, StateMismatch
from fft.train.state.local_tensors import is_composite, leaves_of, like, local_of, local_shard

CLASS = "$class"
"""Key of the class name in an exported subclass."""
LAYOUT = "$layout"
"""Key of placements in exported optimizer state, if they differ from those of its parameter."""
_OPAQUE = "$repr"
"""Key of metadata that can be compared but not rebuilt."""
_PLAIN = (str, bool, int, float, type(None))


def is_marked(value: object) -> bool:
    """Return whether ``value`` is the exported form of a subclass or of a DTensor with a layout."""
    return isinstance(value, Mapping) and (CLASS in value or LAYOUT in value)


# -- export


def exported(tensor: torch.Tensor, place: str) -> Any:
    """Return this rank's part of ``tensor`` as plain data and plain tensors that share memory.

    Args:
        place: Name of the tensor in error messages.

    Raises:
        TypeError: The tensors inside cannot be accessed, or the metadata cannot be compared.
    """
    part: Any = local_shard(tensor)
    if not is_composite(part):
        _refuse_closed(part, place)
        return part.detach().as_subclass(torch.Tensor)
    names, metadata = part.__tensor_flatten__()
    inside = {name: getattr(part, name) for name in names}
    if dtensors := [n for n, t in inside.items() if isinstance(t, DTensor)]:
        raise TypeError(
            f"{place} is a {name_of(part)} around a DTensor ({dtensors[0]}): put the DTensor "
            f"outside and the {type(part).__name__} inside"
        )
    return {
        CLASS: name_of(part),
        "meta": _described(metadata, f"the metadata of {place}, a {name_of(part)},"),
        "shape": list(part.shape),
        "stride": list(part.stride()),
        "tensors": {name: exported(t, f"{place}.{name}") for name, t in inside.items()},
    }


def export_entry(parameter: torch.Tensor, value: Any, place: str) -> Any:
    """Export an entry of the optimizer state of ``parameter``, including tensors in containers.

    For a DTensor parameter, a plain exported tensor is a local shard with the layout of the
    parameter. The exported form contains any other layout.

    Raises:
        TypeError: The entry could not be rebuilt in another process; the message names the place.
    """
    if isinstance(value, torch.Tensor):
        found = exported(value, place)
        _refuse_opaque(found, place)
        return _with_layout(parameter, value, found, place)
    if isinstance(value, Mapping):
        refuse_marks(value, place)
        return {k: export_entry(parameter, v, f"{place}[{k!r}]") for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [export_entry(parameter, v, f"{place}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def refuse_marks(value: Mapping[Any, Any], place: str) -> None:
    """Raise TypeError if a dict of the user has a key that marks FFT's exported forms."""
    if is_marked(value):
        raise TypeError(f"{place} has a key {CLASS!r} or {LAYOUT!r}, which FFT uses: rename it")


def name_of(tensor: torch.Tensor) -> str:
    """Return the full name of the class of ``tensor``."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _refuse_closed(part: torch.Tensor, place: str) -> None:
    """Raise TypeError for a subclass that does not name the tensors inside it."""
    if type(part).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{place} is a {name_of(part)}, a tensor subclass without __tensor_flatten__, so that "
            "the tensors inside cannot be compared or sent: give the class __tensor_flatten__ and "
            "__tensor_unflatten__, or keep a plain tensor"
        )


def _described(value: Any, place: str) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": value.type}
    if isinstance(value, Mapping) and all(isinstance(k, str) and k[:1] != "$" for k in value):
        return {key: _described(each, place) for key, each in value.items()}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if type(value) in (list, tuple):
        items = [_described(each, place) for each in value]
        return items if isinstance(value, list) else {"$tuple": items}
    text = repr(value)
    if " at 0x" in text:
        raise TypeError(f"{place} holds a {type(value).__qualname__}, which cannot be compared")
    return {_OPAQUE: text}


def _refuse_opaque(value: Any, place: str) -> None:
    """Raise TypeError if metadata in an exported form cannot be rebuilt in another process."""
    if isinstance(value, Mapping):
        if _OPAQUE in value:
            raise TypeError(
                f"{place} has {value[_OPAQUE][:80]} in the metadata of its tensor subclass, which "
                "a group that joins could not rebuild: FFT takes numbers, strings, dtypes, "
                "devices, and containers of them"
            )
        for each in value.values():
            _refuse_opaque(each, place)
    elif isinstance(value, list | tuple):
        for each in value:
            _refuse_opaque(each, place)


def _with_layout(parameter: torch.Tensor, value: torch.Tensor, found: Any, place: str) -> Any:
    if not isinstance(value, DTensor):
        is_ambiguous = isinstance(parameter, DTensor) and value.shape == local_of(parameter).shape
        return {LAYOUT: None, "local": found} if is_ambiguous else found
    if not isinstance(parameter, DTensor) or value.device_mesh != parameter.device_mesh:
        mesh = f"the mesh {parameter.device_mesh}" if isinstance(parameter, DTensor) else "no mesh"
        raise TypeError(
            f"{place} is a DTensor over {value.device_mesh}, and its parameter has {mesh}: a group "
            "that joins could not rebuild it; keep it on the mesh of the parameter"
        )
    same = value.shape == parameter.shape and value.stride() == parameter.stride()
    if same and value.placements == parameter.placements:
        return found
    codes = [_code(placement, place) for placement in value.placements]
    shape, stride = list(value.shape), list(value.stride())
    return {LAYOUT: codes, "shape": shape, "stride": stride, "local": found}


def _code(placement: Placement, place: str) -> list[Any]:
    if type(placement) is Replicate:
        return ["replicate"]
    if type(placement) is Shard:
        return ["shard", placement.dim]
    if type(placement) is Partial and isinstance(placement.reduce_op, str):
        return ["partial", placement.reduce_op]
    raise TypeError(f"{place} has the placement {placement}, which FFT cannot rebuild")


_PLACEMENTS = {"replicate": Replicate, "shard": Shard, "partial": Partial}


# -- does it fit?


def refuse_misfit(place: str, got: Any, mine: torch.Tensor) -> None:
    """Raise StateMismatch unless the exported ``got`` has the class and form of ``mine``."""
    if refuse_other_class(place, got, mine):
        own = exported(mine, place)
        if own["meta"] != got["meta"]:
            raise StateMismatch(f"{place}: expected metadata {own['meta']}, got {got['meta']}")
        part: Any = local_shard(mine)
        if got["tensors"].keys() != own["tensors"].keys():
            raise StateMismatch(
                f"{place}: expected the inner tensors {sorted(own['tensors'])}, got "
                f"{sorted(got['tensors'])}"
            )
        for name, inner in got["tensors"].items():
            refuse_misfit(f"{place}.{name}", inner, getattr(part, name))
        return
    local = local_of(mine)
    for what in ("shape", "dtype"):
        theirs, ours = getattr(got, what), getattr(local, what)
        if theirs != ours:
            raise StateMismatch(f"{place}: expected {what} {ours}, got {theirs}")


def refuse_other_class(place: str, got: Any, mine: torch.Tensor) -> bool:
    """Return whether ``mine`` is a composite subclass.

    Raises:
        StateMismatch: ``got`` is of another class.
    """
    part = local_shard(mine)
    came = got[CLASS] if isinstance(got, Mapping) and CLASS in got else type(got).__name__
    if is_composite(part):
        if came != name_of(part):
            raise StateMismatch(f"{place}: expected a {name_of(part)}, got {came}")
        return True
    if not isinstance(got, torch.Tensor):
        raise StateMismatch(f"{place}: expected a tensor, got {came}")
    return False


def check_entry(place: str, got: Any, mine: Any, parameter: torch.Tensor) -> None:
    """Raise StateMismatch unless `put_entry` can replace ``mine`` by ``got``."""
    if isinstance(mine, torch.Tensor):
        layout = export_entry(parameter, mine, place)
        ours = layout[LAYOUT] if isinstance(layout, Mapping) and LAYOUT in layout else "parameter's"
        theirs = got[LAYOUT] if isinstance(got, Mapping) and LAYOUT in got else "parameter's"
        if ours != theirs:
            raise StateMismatch(f"{place}: expected the layout {ours}, got {theirs}")
        inner = got["local"] if isinstance(got, Mapping) and LAYOUT in got else got
        if not refuse_other_class(place, inner, mine):
            refuse_misfit(place, inner, mine)
    if is_marked(got):
        rebuilt_entry(got, parameter, place)


def _fits(place: str, got: Any, mine: torch.Tensor) -> bool:
    try:
        refuse_misfit(place, got, mine)
    except StateMismatch:
        return False
    return True


# -- load


def copy_into(mine: torch.Tensor, got: Any) -> None:
    """Write the exported and checked ``got`` into ``mine``. Needs ``torch.no_grad()``."""
    if isinstance(got, torch.Tensor):
        (leaf,) = leaves_of(mine)
        leaf.copy_(got)
        return
    part: Any = local_shard(mine)
    for name, inner in got["tensors"].items():
        copy_into(getattr(part, name), inner)


def put_entry(mine: Any, got: Any, parameter: torch.Tensor, place: str) -> Any:
    """Return the optimizer entry that ``got`` describes, reusing the tensor ``mine`` if it fits."""
    inner = got["local"] if isinstance(got, Mapping) and LAYOUT in got else got
    if isinstance(mine, torch.Tensor) and _fits(place, inner, mine):
        copy_into(mine, inner)
        return mine
    return rebuilt_entry(got, parameter, place)


def rebuilt_entry(got: Any, parameter: torch.Tensor, place: str) -> Any:
    """Build a new entry of the optimizer state of ``parameter``. Raises StateMismatch."""
    if isinstance(got, Mapping) and LAYOUT in got:
        local = rebuilt(got["local"], parameter.device, place)
        if got[LAYOUT] is None:
            return local
        return _spread(local, got, parameter, place)
    if isinstance(got, torch.Tensor) or is_marked(got):
        local = rebuilt(got, parameter.device, place)
        is_part = isinstance(parameter, DTensor) and local.shape == local_of(parameter).shape
        return like(parameter, local) if is_part else local
    if isinstance(got, Mapping):
        return {k: rebuilt_entry(v, parameter, f"{place}[{k!r}]") for k, v in got.items()}
    if isinstance(got, list | tuple):
        items = [rebuilt_entry(v, parameter, f"{place}[{i}]") for i, v in enumerate(got)]
        return items if isinstance(got, list) else tuple(items)
    return got


def rebuilt(got: Any, device: torch.device | str, place: str) -> torch.Tensor:
    """Build a new tensor on ``device`` from an exported form. Raises StateMismatch."""
    if isinstance(got, torch.Tensor):
        return got.to(device, copy=True)
    kind = _class_named(got[CLASS], place)
    inside = {n: rebuilt(t, device, f"{place}.{n}") for n, t in got["tensors"].items()}
    size, stride = torch.Size(got["shape"]), tuple(got["stride"])
    try:
        made = kind.__tensor_unflatten__(inside, _metadata(got["meta"], device), size, stride)
    except Exception as error:
        raise StateMismatch(f"{place}: {got[CLASS]} could not be rebuilt: {error!r}") from error
    if type(made) is not kind or made.shape != size:
        raise StateMismatch(f"{place}: expected to rebuild a {got[CLASS]}, got a {name_of(made)}")
    return made  # type: ignore[no-any-return]


def _spread(
    local: torch.Tensor, got: Mapping[str, Any], parameter: torch.Tensor, place: str
) -> torch.Tensor:
    if not isinstance(parameter, DTensor) or len(got[LAYOUT]) != parameter.device_mesh.ndim:
        raise StateMismatch(f"{place}: got a DTensor whose mesh differs from its parameter's")
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        [_PLACEMENTS[kind](*how) for kind, *how in got[LAYOUT]],
        run_check=False,
        shape=torch.Size(got["shape"]),
        stride=tuple(got["stride"]),
    )


def _class_named(name: str, place: str) -> Any:
    """Return the tensor subclass ``name`` defined in this process. Raises StateMismatch."""
    found, waiting = [], list(torch.Tensor.__subclasses__())
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if f"{kind.__module__}.{kind.__qualname__}" == name and kind not in found:
            found.append(kind)
    if len(found) == 1 and hasattr(found[0], "__tensor_unflatten__"):
        return found[0]
    raise StateMismatch(
        f"{place}: expected one tensor subclass named {name} in this process, found {len(found)}; "
        "before transactions(), import the module that defines it"
    )


def _metadata(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, list):
        return [_metadata(each, device) for each in value]
    if not isinstance(value, Mapping):
        return value
    match list(value.items()):
        case [("$dtype", name)]:
            return _dtype(name)
        case [("$device", _)]:
            return torch.device(device)
        case [("$size", numbers)]:
            return torch.Size(numbers)
        case [("$tuple", items)]:
            return tuple(_metadata(each, device) for each in items)
        case [("$repr", text)]:
            raise ValueError(f"its metadata {text[:80]} cannot be rebuilt")
        case items:
            return {key: _metadata(each, device) for key, each in items}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return found


def refuse_composite(parts: Sequence[tuple[str, torch.Tensor]], why: str) -> None:
    """Raise FftError if a named tensor is a composite subclass.

    Args:
        parts: Names and tensors.
        why: The feature that needs plain tensors, as the subject of the message.
    """
    for name, tensor in parts:
        if is_composite(local_shard(tensor)):
            raise FftError(
                f"{name} is a {name_of(local_shard(tensor))}; {why} supports only plain tensors"
            )
