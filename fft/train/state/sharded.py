"""Reset modules under FSDP2 (``fully_shard``) to their state between two steps: sharded and idle.

A rollback also restores their settings. FSDP2 keeps these in its own objects, together with the
progress of an iteration, and each release adds some. So FFT captures all attributes of these
objects while they are idle, except the parameters themselves. It restores containers with their
contents, and any other value, such as a tensor, by reference.

Another process receives the settings that are plain values (`settings_of`). For the others, it
receives their names and compares them with its own (`unsent_settings_of`, `fft.train.state.flags`).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from fft.train.guard.torch_adapter import (
    OWN_TENSORS,
    drop_gathered_gradients,
    fsdp_groups,
    fsdp_state,
    reset_iteration,
)

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, set, dict, deque)
_FSDP2 = "torch.distributed.fsdp._fully_shard"
"""The package of the objects that hold the settings."""


def _fsdp_states(models: Sequence[nn.Module]) -> Iterator[Any]:
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                yield fsdp_state(module)


def init_fsdp(models: Sequence[nn.Module]) -> None:
    """Run the lazy initialization of FSDP2, which the first forward would run. Idempotent.

    It finds the root modules and sets some settings. If it ran in a step, these would look like
    changes that the step function has made.
    """
    for model in models:
        for module in model.modules():  # an outer module comes before those in it
            if not isinstance(module, FSDPModule):
                continue
            states = [*_fsdp_states([module])]
            if len(states[0]._modules) == 1 and all(state._is_root is None for state in states):
                states[0]._lazy_init()


def reset_fsdp(models: Sequence[nn.Module]) -> None:
    """Reset FSDP2 from the middle of an iteration, including pending gradients."""
    for state in _fsdp_states(models):
        for group in fsdp_groups(state):
            # The op has ended, perhaps failed; the reset below would wait for it and raise.
            if group._all_gather_result is not None:
                group._all_gather_result = group._all_gather_result._replace(all_gather_work=None)
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule) and fsdp_state(module)._is_root:
                reset_iteration(module)
    for state in _fsdp_states(models):
        for group in fsdp_groups(state):
            for parameter in group.fsdp_params:
                drop_gathered_gradients(parameter)
    reshard(models)


def reshard(models: Sequence[nn.Module]) -> None:
    """Return the modules to their sharded parameters and free the gathered ones. Local."""
    for state in _fsdp_states(models):
        for group in fsdp_groups(state):
            if not group.is_sharded:
                group._to_sharded()


class FsdpSettings:
    """All attributes of the FSDP2 objects of some models, which must be idle, except parameters."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._states: list[Any] = []
        self._objects: list[Any] = []
        """All FSDP2 objects that `_states` refer to, kept because the search takes long."""

    def capture(self) -> list[Callable[[], None]]:
        """Return functions that restore the settings, to be called after `reset_fsdp`."""
        states = [*_fsdp_states(self._models)]
        if [*map(id, states)] != [*map(id, self._states)]:
            init_fsdp(self._models)
            self._states, self._objects = states, [*_objects(states)]
        return [partial(_restore, thing, *_copied(thing)) for thing in self._objects]


def _copied(thing: Any) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """Return the attributes, and a pair (container, copy of it) for each container in them."""
    before = vars(thing).copy()
    for name in OWN_TENSORS:
        before.pop(name, None)
    return before, [*_contents(before.values())]


def _contents(values: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for value in values:
        if isinstance(value, _CONTAINERS):
            yield value, value.copy()
            yield from _contents(value.values() if isinstance(value, dict) else value)
        elif type(value) is tuple:
            yield from _contents(value)


def _objects(states: Iterable[Any]) -> Iterator[Any]:
    """Yield each object of FSDP2 that the states refer to."""
    found, seen = [*states], set[int]()
    while found:
        thing = found.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        for value in () if isinstance(thing, FSDPParam) else vars(thing).values():
            values = value.values() if isinstance(value, dict) else value
            found += [
                each
                for each in (values if isinstance(value, (*_CONTAINERS, tuple)) else [value])
                if type(each).__module__.startswith(_FSDP2)
                and not isinstance(each, Enum | type | nn.Module)
                if hasattr(each, "__dict__")
            ]


def _restore(thing: Any, before: dict[str, Any], contents: list[tuple[Any, Any]]) -> None:
    now = vars(thing)
    for name in now.keys() - before.keys() - OWN_TENSORS:
        del now[name]
    now.update(before)
    for container, content in contents:
        container.clear()
        getattr(container, "extend" if isinstance(container, list | deque) else "update")(content)


def settings_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the plain values in the objects of an FSDP2 module; empty for other modules.

    Of the objects of single parameters only bools are returned, because numbers depend on the rank.
    `unsent_settings_of` returns all other values.
    """
    things = _holders(module)
    return [{n: v for n, v in vars(t).items() if _is_plain(v, kinds)} for t, kinds in things]


def unsent_settings_of(module: nn.Module) -> dict[str, list[Any]]:
    """Return the values in the objects of an FSDP2 module that `settings_of` omits, by attribute.

    Tensors of single parameters are omitted, because they hold the parameters.
    """
    found: dict[str, list[Any]] = {}
    for thing, kinds in _holders(module):
        for name, value in vars(thing).items():
            if _is_plain(value, kinds):
                continue
            for each in _leaves(value):
                if not (isinstance(thing, FSDPParam) and isinstance(each, torch.Tensor)):
                    found.setdefault(f"{type(thing).__name__}.{name}", []).append(each)
    return found


def load_settings_of(module: nn.Module, settings: Sequence[Mapping[str, Any]] | None) -> None:
    """Load the result of `settings_of`, except where this process has a value that is not plain.

    A list that FFT 0.1 has saved is shorter, and has fewer values.
    """
    for (thing, kinds), values in zip(_holders(module), settings or (), strict=False):
        mine = vars(thing)
        fitting = {n: v for n, v in values.items() if n not in mine or _is_plain(mine[n], kinds)}
        mine.update(copy.deepcopy(fitting))


def _is_plain(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether ``value`` is of one of ``kinds``, or for `_PLAIN` a container of such values."""
    if kinds is _PLAIN and type(value) in (list, tuple):
        return all(_is_plain(each, kinds) for each in value)
    if kinds is _PLAIN and type(value) is dict:
        return all(isinstance(k, str) and _is_plain(v, kinds) for k, v in value.items())
    return isinstance(value, kinds)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what a value holds in its containers, or the value itself.

    Progress of FSDP2 is in named tuples, which are not entered.
    """
    if isinstance(value, _CONTAINERS) or type(value) in (tuple, torch.Size):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _holders(module: nn.Module) -> list[tuple[Any, tuple[type, ...]]]:
    """Return the objects with the settings of an FSDP2 module, and the types of those it sends.

    The order is part of the state that processes exchange.
    """
    if not isinstance(module, FSDPModule):
        return []
    state = fsdp_state(module)
    groups = fsdp_groups(state)
    return [
        *((thing, _PLAIN) for thing in (state, state._state_ctx, *groups)),
        (state._comm_ctx, (bool, int, float, str)),  # None stands for no event of an iteration
        *((parameter, (bool,)) for group in groups for parameter in group.fsdp_params),
    ]
