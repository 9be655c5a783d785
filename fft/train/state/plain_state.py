"""State as plain data: export and load optimizers, check that a state fits, and feed its digest.

This module accesses only the given optimizers, by reference.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fft.errors import FftError, StateMismatch
from fft.train.state.fingerprint import fingerprint
from fft.train.state.local_tensors import leaves_of, like, same_bits
from fft.train.state.tensor_subclasses import (
    check_entry,
    export_entry,
    exported,
    is_marked,
    put_entry,
    rebuilt,
    refuse_marks,
    refuse_misfit,
    refuse_other_class,
)

_PLAIN = (str, bytes, bool, int, float, type(None))


def hyper_of(group: dict[str, Any]) -> dict[str, Any]:
    """Copy the entries of a parameter group besides its parameters (lr, betas, ...)."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for key, value in group.items()
        if key != "params"
    }


def set_hyperparameters(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set a parameter group's values; an existing tensor is overwritten in place."""
    for key in [k for k in group if k != "params" and k not in values]:
        del group[key]
    for key, value in values.items():
        mine = group.get(key)
        if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                mine.copy_(value)
        else:
            group[key] = value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def export_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor], place: str
) -> dict[str, Any]:
    return {
        "state": export_entries(optimizer, names, place),
        **export_settings(optimizer, names, place),
    }


def export_entries(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor], place: str
) -> dict[str, Any]:
    """Export the optimizer's state for each parameter, by name. Safe on any thread.

    Raises:
        TypeError: An entry is neither plain nor a tensor, or belongs to a tensor that is no
            parameter; the message names the place.
    """
    by_id = {id(p): name for name, p in names.items()}
    state: dict[str, Any] = {}
    for parameter, values in list(optimizer.state.items()):  # a lookup may add an entry
        if not isinstance(parameter, torch.Tensor):
            continue  # see `own_state`
        if (name := by_id.get(id(parameter))) is None:
            raise TypeError(
                f"{place} ({kind_of(optimizer)}) keeps state for a tensor of shape "
                f"{tuple(parameter.shape)} that is no parameter of it or of a registered model; "
                "delete that entry of optimizer.state"
            )
        state[name] = {
            k: plain(export_entry(parameter, v, at), at, has_marks=True)
            for k, v in values.items()
            for at in (f"{place}.state[{name}][{k}]",)
        }
    return state


def export_settings(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor], place: str
) -> dict[str, Any]:
    """Export the optimizer's kind, `own_state`, and the names of the parameters and the
    hyperparameters of each parameter group."""
    groups = enumerate(optimizer.param_groups)
    hyper = [plain(hyper_of(group), f"{place}.param_groups[{i}]") for i, group in groups]
    return {
        "kind": kind_of(optimizer),
        "param_groups": hyper,
        "members": _members(optimizer, names),
        "own": export_own(optimizer, place),
    }


def _members(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor]
) -> list[list[str]]:
    """Return the names of the parameters of each parameter group."""
    by_id = {id(p): name for name, p in names.items()}
    return [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def export_own(optimizer: torch.optim.Optimizer, place: str) -> dict[str, Any]:
    """Export the result of `own_state` as plain data; the tensors are the live ones."""
    own: dict[str, Any] = plain(own_state(optimizer), f"{place} ({kind_of(optimizer)})")
    return own


def own_state(optimizer: torch.optim.Optimizer) -> dict[str, dict[Any, Any]]:
    """Return the state that belongs to the optimizer as a whole, not to one of its parameters.

    Returns:
        ``state``: the entries of ``optimizer.state`` whose key is no tensor. ``more``: the entries
        of its ``state_dict()`` besides ``state`` and ``param_groups``. The values are live.
    """
    found = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    more: dict[Any, Any] = {}
    if _changes(optimizer, "state_dict"):
        given = optimizer.state_dict()
        more = {k: v for k, v in given.items() if k not in ("state", "param_groups")}
    return {"state": found, "more": more}


def refuse_unloadable(optimizer: torch.optim.Optimizer) -> None:
    """Raise FftError if the optimizer has state of its own that it cannot save or load."""
    kind = kind_of(optimizer)
    try:
        more = own_state(optimizer)["more"]
    except Exception as error:
        raise FftError(
            f"{kind}.state_dict() raised {error!r}: FFT saves and sends the state of an optimizer "
            "by it; make it return plain values and tensors"
        ) from error
    if more and not _changes(optimizer, "load_state_dict"):
        raise FftError(
            f"{kind}.state_dict() has the entry {next(iter(more))!r}, which {kind} does not load: "
            "override load_state_dict(), or keep the value in optimizer.state, under a string"
        )


def _changes(optimizer: torch.optim.Optimizer, method: str) -> bool:
    """Return whether the class, the object or a hook changes torch's method of that name."""
    base = getattr(torch.optim.Optimizer, method)
    names = (f"_optimizer_{method}_{when}_hooks" for when in ("pre", "post"))
    hooks = (getattr(optimizer, name, None) for name in names)
    return getattr(getattr(optimizer, method), "__func__", None) is not base or any(hooks)


def load_own(optimizer: torch.optim.Optimizer, own: Mapping[str, Mapping[Any, Any]]) -> None:
    """Load plain data that `own_state` returned; the state of parameters does not change.

    Raises:
        StateMismatch: A part of it has another class, shape or dtype than here.
    """
    place = kind_of(optimizer)
    mine = own_state(optimizer)
    got = {part: copy.deepcopy(with_layout_of(own[part], mine[part], place)) for part in own}
    for key in mine["state"].keys() - got["state"].keys():
        del optimizer.state[key]
    for key, value in got["state"].items():
        here = mine["state"].get(key)
        if isinstance(here, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.to(here.device)
        optimizer.state[key] = value
    if not got["more"]:
        return
    # torch replaces both objects, to which the script may hold references, and converts the state
    # of parameters to their dtype
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict({**optimizer.state_dict(), **got["more"]})
    loaded = {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    state.update(loaded)
    optimizer.param_groups, optimizer.state = groups, state


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer's class, which determines the meaning of its state."""
    return type(optimizer).__qualname__


def load_optimizer(
    optimizer: torch.optim.Optimizer, names: dict[str, torch.Tensor], values: Mapping[str, Any]
) -> None:
    """Load a state that `export_optimizer` returned and `check_optimizer` accepted."""
    load_settings(optimizer, names, values)
    incoming = values["state"]
    by_id = {id(p): name for name, p in names.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = by_id[id(parameter)]
            if name not in incoming:
                optimizer.state.pop(parameter, None)
                continue
            mine = optimizer.state[parameter]
            for key in [k for k in mine if k not in incoming[name]]:
                del mine[key]
            for key, value in incoming[name].items():
                _put_value(mine, key, value, parameter, group)


def load_settings(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> None:
    """Load settings that `export_settings` returned, and add the parameter groups that are new."""
    first = len(optimizer.param_groups)
    added = zip(values["param_groups"][first:], values.get("members", ())[first:], strict=True)
    for hyper, members in added:
        optimizer.add_param_group({**copy.deepcopy(hyper), "params": [names[n] for n in members]})
    load_own(optimizer, values.get("own", {"state": {}, "more": {}}))
    for group, hyper in zip(optimizer.param_groups, values["param_groups"], strict=True):
        # a state of an older torch may lack a setting that exists here
        newer = {k: group[k] for k in optimizer.defaults if k in group and k not in hyper}
        set_hyperparameters(group, {**newer, **hyper})


def _put_value(
    mine: dict[str, Any], key: str, value: Any, parameter: torch.Tensor, group: Mapping[str, Any]
) -> None:
    """Set one entry of a parameter's optimizer state, in place where it exists."""
    here = mine.get(key)
    if key == "step" and isinstance(value, torch.Tensor) and not isinstance(here, torch.Tensor):
        # torch keeps the step count on the CPU unless the kernel itself reads it
        on_device = group.get("capturable") or group.get("fused")
        mine[key] = value.to(parameter.device if on_device else "cpu", copy=True)
    else:
        mine[key] = put_entry(here, value, parameter, key)


# -- does it fit?


def check_names(place: str, got: Mapping[str, Any], mine: Any) -> None:
    missing, unknown = sorted(set(mine) - set(got)), sorted(set(got) - set(mine))
    if missing:
        raise StateMismatch(
            f"{place}: the received state lacks {missing[0]!r}, which is registered here"
        )
    if unknown:
        raise StateMismatch(
            f"{place}: the received state has {unknown[0]!r}, which is not registered here"
        )


def check_count(place: str, got: Sequence[Any], mine: Sequence[Any]) -> None:
    if len(got) != len(mine):
        raise StateMismatch(f"{place}: expected {len(mine)}, got {len(got)} in the received state")


def check_tensors(place: str, got: Mapping[str, Any], mine: Mapping[str, torch.Tensor]) -> None:
    check_names(place, got, mine)
    for name, tensor in mine.items():
        refuse_misfit(f"{place}[{name}]", got[name], tensor)


def check_optimizer(
    place: str,
    optimizer: torch.optim.Optimizer,
    names: dict[str, torch.Tensor],
    values: Mapping[str, Any],
) -> None:
    mine = kind_of(optimizer)
    if (kind := values.get("kind", mine)) != mine:  # not every exported state names its kind
        raise StateMismatch(f"{place}: expected the state of {mine}, got that of {kind}")
    older = {"own": {}, "members": _members(optimizer, names)}  # a state of an older FFT lacks them
    values = {**older, **values, "kind": kind}
    check_names(place, values, {*older, "kind", "state", "param_groups"})
    _check_groups(place, _members(optimizer, names), values["members"])
    own = {name for members in values["members"] for name in members}
    for name, entries in values["state"].items():
        if name not in own:
            raise StateMismatch(
                f"{place}.state: {name!r} in the received state is not a parameter of it"
            )
        mine = optimizer.state.get(names[name], {})
        for key, value in entries.items():
            check_entry(f"{place}.state[{name}][{key}]", value, mine.get(key), names[name])


def _check_groups(place: str, mine: list[list[str]], got: list[list[str]]) -> None:
    """Raise StateMismatch unless ``got`` begins with the parameter groups of ``mine``."""
    taken = {name for members in mine for name in members}
    for i, (here, there) in enumerate(itertools.zip_longest(mine, got)):
        if here != there if here is not None else taken.intersection(there):
            raise StateMismatch(
                f"{place}.param_groups[{i}]: expected {_some(here)}, got {_some(there)} in the "
                "received state; construct the optimizer with the same parameter groups"
            )


def _some(members: list[str] | None) -> str:
    if members is None:
        return "no such group"
    return f"{len(members)} parameters ({', '.join(members[:3])}, …)"


# -- plain data


def plain(value: Any, place: str, has_marks: bool = False) -> Any:
    """Convert ``value`` to types that load with ``weights_only=True``.

    Args:
        value: Tensors, plain values and containers.
        place: Name of the value in error messages.
        has_marks: The tensors in ``value`` are exported already.

    Raises:
        TypeError: ``value`` holds something else; the message names the place.
    """
    if isinstance(value, torch.Tensor):
        return value if has_marks else exported(value, place)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        if not has_marks:
            refuse_marks(value, place)
        pairs = value.items()
        return {plain(k, place): plain(v, f"{place}[{k!r}]", has_marks) for k, v in pairs}
    if isinstance(value, (list, tuple)):
        items = [plain(v, f"{place}[{i}]", has_marks) for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    raise TypeError(
        f"{place} is a {type(value).__name__}; a state may hold tensors, dicts, lists, tuples, "
        "str, bytes, bool, int, float and None"
    )


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two dicts recursively.

    The values of a common key must be dicts, or lists of the same number of dicts.
    """
    found = {**one, **other}
    for key in one.keys() & other.keys():
        mine, its = one[key], other[key]
        if isinstance(mine, list):
            found[key] = [merged(a, b) for a, b in zip(mine, its, strict=True)]
        else:
            found[key] = merged(mine, its)
    return found


def with_layout_of(value: Any, mine: Any, place: str) -> Any:
    """Convert plain data ``value`` for an object whose ``state_dict`` now returns ``mine``.

    A tensor in the place of a DTensor becomes a DTensor of the same layout, since `plain` exported
    this rank's part of it. A tensor subclass is rebuilt on the device of the existing one.

    Raises:
        StateMismatch: A part has another class, shape or dtype than in ``mine``.
    """
    if is_marked(value):
        if isinstance(mine, torch.Tensor):
            refuse_other_class(place, value, mine)
        made = rebuilt(value, mine.device if isinstance(mine, torch.Tensor) else "cpu", place)
        return like(mine, made) if isinstance(mine, DTensor) else made
    if isinstance(mine, DTensor) and isinstance(value, torch.Tensor):
        refuse_misfit(place, value, mine)
        return like(mine, value)
    if isinstance(value, Mapping) and isinstance(mine, Mapping):
        return {k: with_layout_of(v, mine.get(k), f"{place}[{k!r}]") for k, v in value.items()}
    if isinstance(value, (list, tuple)) and isinstance(mine, (list, tuple)):
        pairs = itertools.zip_longest(value, mine[: len(value)])
        items = [with_layout_of(v, m, f"{place}[{i}]") for i, (v, m) in enumerate(pairs)]
        return items if isinstance(value, list) else tuple(items)
    return value


def tensors_of(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in plain data with their places."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_of(inner, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from tensors_of(inner, f"{place}[{i}]")


def parts_of(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an exported state by name, each hyperparameter and kind of flag as one
    part."""
    for key, value in state.items():
        if key == "flags":
            yield from ((f"flags.{name}", part) for name, part in value.items())
            continue
        if key != "optimizers":
            each = enumerate(value) if isinstance(value, list) else None
            yield from ((f"{key}[{i}]", v) for i, v in each) if each else ((key, value),)
            continue
        for i, optimizer in enumerate(value):
            for name, part in optimizer.items():
                if name != "param_groups":
                    yield f"optimizers[{i}].{name}", part
            groups = optimizer["param_groups"]
            for name in sorted({name for group in groups for name in group}):
                yield f"optimizers[{i}].{name}", [group.get(name) for group in groups]


def _same_fingerprint(one: torch.Tensor, other: torch.Tensor) -> bool:
    return fingerprint([one]) == fingerprint([other])


def unlike_places(sent: Any, here: Any, place: str = "") -> Iterator[str]:
    """Yield the places at which two exported states differ.

    A hyperparameter that only ``here`` has is no difference: ``sent`` may come from an older torch.
    """
    if isinstance(sent, torch.Tensor) and isinstance(here, torch.Tensor):
        form, other = ((t.dtype, t.shape, t.layout) for t in (sent, here))
        is_direct = sent.device == here.device and sent.layout == torch.strided
        equal = same_bits if is_direct else _same_fingerprint
        if form != other or not equal(sent, here):
            yield place
    elif isinstance(sent, Mapping) and isinstance(here, Mapping):
        only_here = () if "param_groups" in place else here.keys() - sent.keys()
        for key in (*sent, *sorted(only_here, key=repr)):
            at = f"{place}[{key!r}]" if place else str(key)
            yield from unlike_places(sent.get(key, ...), here.get(key, ...), at)
    elif isinstance(sent, (list, tuple)) and type(sent) is type(here) and len(sent) == len(here):
        for i, (one, other) in enumerate(zip(sent, here, strict=True)):
            yield from unlike_places(one, other, f"{place}[{i}]")
    elif repr(sent) != repr(here):
        yield place


def without_tensors(value: Any) -> Any:
    """Return plain data ``value`` with None in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, Mapping):
        return {key: without_tensors(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_tensors(inner) for inner in value]
    return value


def digest_of(state: Any) -> str:
    """Return a digest of plain data that is the same on every device."""
    found = list(tensors_of(state, ""))
    places = [f"{place} {t.dtype} {tuple(t.shape)}" for place, t in found]
    hasher = hashlib.blake2b(fingerprint(t for _, t in found).encode(), digest_size=8)
    feed(hasher, [places, without_tensors(state)])
    return hasher.hexdigest()


def leaves_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield this rank's plain tensors in ``value`` and its containers, in the order of keys."""
    if isinstance(value, torch.Tensor):
        yield from leaves_of(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from leaves_in(value[key])
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from leaves_in(inner)


def feed(hasher: Any, value: Any) -> None:
    """Feed plain data into `hasher` so that different data feed different bytes."""
    if isinstance(value, torch.Tensor):
        hasher.update(f"tensor {value.dtype} {tuple(value.shape)}\n".encode())
        if value.device.type != "cpu":  # hashed on the device: a copy of a state takes seconds
            hasher.update(fingerprint([value]).encode())
            return
        flat = value.contiguous().reshape(-1)
        if flat.numel():
            hasher.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        hasher.update(f"dict {len(value)}\n".encode())
        for key in sorted(value, key=repr):
            feed(hasher, key)
            feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"list {len(value)}\n".encode())
        for item in value:
            feed(hasher, item)
    else:
        text = repr(value).encode()
        hasher.update(f"{type(value).__name__} {len(text)}\n".encode() + text)
