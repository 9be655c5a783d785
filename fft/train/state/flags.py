"""Switches of parameters and modules that a script may change between two steps, as plain data.

A joining group runs the script from its beginning, so it has not made the changes that the others
made after some step: layers that were thawed, modules in evaluation mode, settings of FSDP2. These
are sent with the state. Hooks, and other settings that are no plain values, cannot be sent; their
names are, so that a difference is found.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from fft.errors import StateMismatch
from fft.train.state.sharded import lay_out, load_settings_of, settings_of, unsent_settings_of

logger = logging.getLogger(__name__)

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
"""Attributes of modules and parameters with the hooks of a forward and a backward."""
_OWN = ("torch.", "fft.")
"""Modules whose hooks the script has not written; some are registered in the first forward."""
_SHOWN = 5


class Flags:
    """The switches of ``models``."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._first_hooks: dict[str, list[str]] | None = None
        """Names of the hooks by place, when the job began here."""

    def export(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Export the switches of the modules and of ``parameters``.

        Returns:
            ``trained``: ``requires_grad`` by parameter. ``modes``: training mode by module.
            ``fsdp``: settings by FSDP2 module. ``hooks``: names of the hooks of each module and
            parameter whose hooks have changed since the job began here.
        """
        lay_out(self._models)
        modules = self.modules()
        return {
            "trained": {name: p.requires_grad for name, p in parameters.items()},
            "modes": {name: module.training for name, module in modules.items()},
            "fsdp": {name: found for name, m in modules.items() if (found := settings_of(m))},
            "hooks": self.changed_hooks(parameters),
        }

    def changed_hooks(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
        """Return the names of the hooks where they differ from those at the first call.

        Settings of FSDP2 that cannot be sent have places of their own.
        """
        lay_out(self._models)
        now = dict(_hooks_of({**self.modules(), **parameters}))
        if self._first_hooks is None:
            self._first_hooks = now
        first = self._first_hooks
        return {k: now.get(k, []) for k in first | now if first.get(k) != now.get(k)}

    def load(self, flags: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
        """Load switches that another rank has exported. They may lack ``hooks``.

        Raises:
            StateMismatch: Hooks differ; the message names the module or the parameter.
        """
        lay_out(self._models)  # before the changes, as where they were made
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
    """Yield the places that have hooks of the script, with the names of these."""
    for place, thing in places.items():
        hooks = [h for kind in _HOOKS for h in (getattr(thing, kind, None) or {}).values()]
        if names := [name for name in map(_name_of, hooks) if not name.startswith(_OWN)]:
            yield place, names
        if isinstance(thing, nn.Module):
            for name, value in unsent_settings_of(thing).items():
                if texts := [text for each in value if (text := _text_of(each))]:
                    yield f"{place} ({name})", texts


def _text_of(value: Any) -> str | None:
    """Return what the error shows of a setting that cannot be sent; None for torch's objects."""
    if isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if type(value) is torch.Tensor:
        return "a tensor"
    if value is None or (text := _name_of(value)).startswith(_OWN):
        return None
    return f"{text}.{value.name}" if isinstance(value, Enum) else text


def _name_of(hook: Any) -> str:
    function = getattr(hook, "func", hook)  # of a functools.partial
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
