"""Flags of parameters and modules that a script may change between two steps, as plain data.

These are ``requires_grad``, the training mode, and settings of FSDP2. A joining group runs the
script from its beginning, so it lacks the changes that the other groups made after some step. FFT
sends the flags with the state. It cannot send hooks and settings that are not plain values. Their
names are sent instead, so that a joiner detects a difference.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from fft.errors import StateMismatch
from fft.train.state.sharded import init_fsdp, load_settings_of, settings_of, unsent_settings_of

logger = logging.getLogger(__name__)

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
"""Attributes of modules and parameters with the hooks of a forward and a backward."""
_IGNORED = ("torch.", "fft.")
"""Packages whose hooks are ignored, because torch registers some of them in the first forward."""
_SHOWN = 5


class Flags:
    """The flags of ``models``."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._first_hooks: dict[str, list[str]] | None = None
        """Names of the hooks by place, at the first call of `changed_hooks`; None before it."""

    def export(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Export the flags of the modules and of ``parameters``.

        Returns:
            ``trained``: ``requires_grad`` by parameter. ``modes``: training mode by module.
            ``fsdp``: settings by FSDP2 module. ``hooks``: the result of `changed_hooks`.
        """
        init_fsdp(self._models)
        modules = self.modules()
        return {
            "trained": {name: p.requires_grad for name, p in parameters.items()},
            "modes": {name: module.training for name, module in modules.items()},
            "fsdp": {name: found for name, m in modules.items() if (found := settings_of(m))},
            "hooks": self.changed_hooks(parameters),
        }

    def changed_hooks(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
        """Return the names of the hooks where they differ from those at the first call.

        The first call, when the job begins in this process, records the hooks and returns none.
        Keys are places: names of modules and parameters, and for a setting of FSDP2 that cannot be
        sent, the module with the attribute.
        """
        init_fsdp(self._models)
        now = dict(_hooks_of({**self.modules(), **parameters}))
        if self._first_hooks is None:
            self._first_hooks = now
        first = self._first_hooks
        return {k: now.get(k, []) for k in first | now if first.get(k) != now.get(k)}

    def load(self, flags: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
        """Load flags that another rank has exported. They may lack ``hooks``.

        Raises:
            StateMismatch: Hooks differ; the message names the module or the parameter.
        """
        init_fsdp(self._models)  # here, as on the other rank, before the script's changes
        changed = []
        for name, parameter in parameters.items():
            if (trained := flags["trained"].get(name)) not in (None, parameter.requires_grad):
                parameter.requires_grad_(trained)
                changed.append(name)
        for name, module in self.modules().items():
            module.training = flags["modes"].get(name, module.training)
            load_settings_of(module, flags["fsdp"].get(name))
        if changed:
            more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            logger.warning(
                "requires_grad of %s%s differed here from the state that was loaded, and is now "
                "as there",
                ", ".join(changed[:_SHOWN]),
                more,
            )
        if "hooks" in flags:
            self._refuse_other_hooks(flags["hooks"], self.changed_hooks(parameters))

    def _refuse_other_hooks(
        self, theirs: Mapping[str, list[str]], mine: Mapping[str, list[str]]
    ) -> None:
        for place in sorted(theirs.keys() | mine.keys()):
            if theirs.get(place) == mine.get(place):
                continue
            names = {"here": mine.get(place), "where the state comes from": theirs.get(place)}
            found = "; ".join(
                f"{where}: {'unchanged' if hooks is None else ', '.join(hooks) or 'none'}"
                for where, hooks in names.items()
            )
            raise StateMismatch(
                f"the hooks or settings of {place} were changed after the job had begun, which a "
                f"state cannot hold ({found}): set them before transactions(), and let hooks "
                "decide by registered state what they do, or set them in the load_state_dict() of "
                "an object in extra="
            )

    def modules(self) -> dict[str, nn.Module]:
        """Return all modules by name."""
        named = (m.named_modules(prefix=f"model{i}") for i, m in enumerate(self._models))
        return {name: module for each in named for name, module in each}


def _hooks_of(places: Mapping[str, object]) -> Iterator[tuple[str, list[str]]]:
    """Yield each place that has hooks of the script, with their names; see `changed_hooks`."""
    for place, thing in places.items():
        hooks = [h for kind in _HOOKS for h in (getattr(thing, kind, None) or {}).values()]
        if names := [name for name in map(_name_of, hooks) if not name.startswith(_IGNORED)]:
            yield place, names
        if isinstance(thing, nn.Module):
            for name, value in unsent_settings_of(thing).items():
                if texts := [text for each in value if (text := _text_of(each))]:
                    yield f"{place} ({name})", texts


def _text_of(value: Any) -> str | None:
    """Return how an error shows a setting that cannot be sent; None if it is to be ignored."""
    if isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if type(value) is torch.Tensor:
        return "a tensor"
    if value is None or (text := _name_of(value)).startswith(_IGNORED):
        return None
    return f"{text}.{value.name}" if isinstance(value, Enum) else text


def _name_of(hook: Any) -> str:
    function = getattr(hook, "func", hook)  # of a functools.partial
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
