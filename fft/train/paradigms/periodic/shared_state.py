"""The state that the groups of a periodic scope share: parameters and outer optimizers.

The code runs on the main thread. It modifies the modules and optimizers of the script in place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fft.errors import FftError, StateMismatch
from fft.train.state.fingerprint import fingerprint
from fft.train.state.local_tensors import local_of
from fft.train.state.plain_state import (
    check_count,
    check_names,
    check_optimizer,
    check_tensors,
    export_optimizer,
    feed,
    load_optimizer,
    tensors_of,
)
from fft.train.state.step_state import StepState
from fft.train.state.tensor_subclasses import refuse_composite


@dataclass
class Fragment:
    """A part of the model that is synchronized at once."""

    name: str
    parameters: dict[str, nn.Parameter]
    """The group's local parameters by name."""
    globals: dict[str, torch.Tensor] = field(default_factory=dict)
    """The shared parameters as of the last synchronization, by name."""
    trained: dict[str, nn.Parameter] = field(default_factory=dict)
    """The synchronized parameters: those that were not frozen at construction."""

    def refuse_thawed(self) -> None:
        """Raise FftError if a parameter that was frozen at construction is now trainable."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and name not in self.trained:
                raise FftError(
                    f"{name} is trained now and was frozen when the synchroniser was made, so that "
                    "it is not synchronised: freeze it after that, or not at all"
                )

    def put_globals(self) -> None:
        """Copy the shared parameters into the group's local parameters."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                local_of(parameter).copy_(self.globals[name])


@dataclass(frozen=True)
class Storage:
    """The storage of the shared parameters.

    Attributes:
        device: Device of the shared parameters, or None for the device of the local parameters.
        pins: Whether to page-lock them if there is an accelerator.
    """

    device: torch.device | None = None
    pins: bool = True

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` in this storage."""
        kept = tensor.detach().to(self.device, copy=True)
        return kept.pin_memory() if self.pins and torch.accelerator.is_available() else kept


class SharedState:
    """The shared parameters by fragment, and the group's progress at the last synchronization.

    Args:
        step: The registered state, which the local steps change.
        modules: The fragments, which together contain all parameters that the group trains.
        optimizers: The outer optimizers over the same parameters; may be empty.
        plan: The settings that must be equal in all groups, as plain data.
        storage: The storage of the shared parameters.

    Raises:
        FftError: A parameter is in no fragment or in two, or a fragment has no parameters.
    """

    def __init__(
        self,
        step: StepState,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        plan: Mapping[str, Any],
        storage: Storage,
    ) -> None:
        self._step = step
        self._names = step.names()
        refuse_composite(list(self._names.items()), "averaging the parameters of groups")
        self.fragments = _fragments(modules, self._names)
        _refuse_unfit_outer(self.fragments, optimizers)
        self._optimizers = list(optimizers)
        self._plan = dict(plan)
        self._storage = storage
        self._progress: dict[str, Any] = {}
        """Progress of the group at the last synchronization."""

    def take(self) -> None:
        """Initialize the shared parameters from the local ones before the first step.

        Later calls have no effect.

        Raises:
            FftError: The model has changed since the synchronizer was created.
        """
        if self._progress:
            return
        if self._step.names().keys() != self._names.keys():
            changed = sorted(self._step.names().keys() ^ self._names.keys())
            raise FftError(
                f"the model has changed since it was given to be synchronised: {changed[0]}; "
                "make the synchroniser when the model is complete"
            )
        for fragment in self.fragments:
            for name, parameter in fragment.parameters.items():
                fragment.globals[name] = self._storage.copy_of(local_of(parameter))
        self.note_progress()

    def note_progress(self) -> None:
        """Save the progress after a synchronization, as the point to restart from."""
        self._progress = self._step.progress()

    def start_over(self) -> None:
        """Restart from the last synchronization. This resets the inner optimizers."""
        for fragment in self.fragments:
            fragment.put_globals()
        self._step.start_over(self._progress)

    # --- from group to group ---

    def export(self, copy_mutable: bool = False) -> dict[str, object]:
        """Export the shared state like `StepState.export`. Step functions do not change it."""
        return {
            "plan": self._plan,
            "parameters": {n: v for f in self.fragments for n, v in f.globals.items()},
            "optimizers": self._exported(),
            "progress": self._progress,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `export` of another group, and restart from it.

        Raises:
            StateMismatch: The state does not match this group; the message names the difference.
                Nothing has been changed.
        """
        check_names("state", state, ("plan", "parameters", "optimizers", "progress"))
        check_names("plan", state["plan"], self._plan)
        for name, value in self._plan.items():
            if state["plan"][name] != value:
                raise StateMismatch(
                    f"{name} is {value!r} here and {state['plan'][name]!r} in the group that the "
                    "state came from: give all groups the same, and keep it when a job is resumed"
                )
        known = {n: v for f in self.fragments for n, v in f.globals.items()}
        check_tensors("parameters", state["parameters"], known)
        check_count("optimizers", state["optimizers"], self._optimizers)
        outer = list(zip(self._optimizers, state["optimizers"], strict=True))
        for i, (optimizer, values) in enumerate(outer):
            check_optimizer(f"optimizers[{i}]", optimizer, self._names, values)
        with torch.no_grad():
            for name, value in known.items():
                value.copy_(state["parameters"][name])
            for optimizer, values in outer:
                load_optimizer(optimizer, self._names, values)
        self._progress = state["progress"]
        self.start_over()

    def digest(self, buffers: bool = True) -> str:
        """Return a Blake2b digest (128 bits, hex) of the shared parameters and outer optimizers."""
        hasher = hashlib.blake2b(digest_size=16)
        outer = [values["state"] for values in self._exported()]
        feed(hasher, {"parameters": [f.globals for f in self.fragments], "optimizers": outer})
        return hasher.hexdigest()

    def fingerprint(self) -> str:
        """Return a cheap fingerprint of the same state (see `fft.train.state.fingerprint`)."""
        tensors = [value for f in self.fragments for value in f.globals.values()]
        outer = (values["state"] for values in self._exported())
        return fingerprint(tensors + [t for state in outer for _, t in tensors_of(state, "")])

    def _exported(self) -> list[dict[str, Any]]:
        names, optimizers = self._names, enumerate(self._optimizers)
        return [export_optimizer(o, names, f"optimizers[{i}]") for i, o in optimizers]


def _fragments(modules: Sequence[nn.Module], names: Mapping[str, torch.Tensor]) -> list[Fragment]:
    by_id = {id(parameter): name for name, parameter in names.items()}
    found: list[Fragment] = []
    taken: dict[str, str] = {}
    for number, module in enumerate(modules):
        where = f"fragment {number} ({type(module).__name__})"
        fragment = Fragment(where, {})
        for own, parameter in module.named_parameters():
            if (name := by_id.get(id(parameter))) is None:
                raise FftError(
                    f"{own} of {where} is in no registered model: a rolled-back step could not put "
                    "it back; register the model that the fragments are parts of"
                )
            if name in taken:
                raise FftError(
                    f"{name} is in {taken[name]} and in {where}, and would be synchronised twice "
                    "from different values; give it to one of them"
                )
            taken[name] = where
            fragment.parameters[name] = parameter
        if not fragment.parameters:
            raise FftError(f"{where} has no parameters: leave it out")
        fragment.trained = {n: p for n, p in fragment.parameters.items() if p.requires_grad}
        if not fragment.trained:
            raise FftError(f"{where} is frozen: leave it out, or join it with another one")
        found.append(fragment)
    for name, value in names.items():
        if name not in taken and value.requires_grad:
            raise FftError(
                f"{name} is trained and is in no fragment, so that it would differ between the "
                "groups for ever; put it into one, or freeze it"
            )
    return found


def _refuse_unfit_outer(
    fragments: Sequence[Fragment], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raise FftError unless the outer optimizers step exactly the parameters of their fragments.

    A single optimizer covers all fragments. Several optimizers cover one fragment each, in order.
    """
    if not optimizers:
        return
    by_fragment = optimizers if len(optimizers) > 1 else list(optimizers) * len(fragments)
    known = {id(p) for f in fragments for p in f.parameters.values()}
    for fragment, optimizer in zip(fragments, by_fragment, strict=True):
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        kind = type(optimizer).__name__
        for name, parameter in fragment.trained.items():
            if id(parameter) not in stepped:
                raise FftError(
                    f"{name}, of {fragment.name}, is in no parameter group of its outer optimizer "
                    f"({kind}), so that no synchronisation would change it: make the optimizer "
                    "over the parameters of the fragment, or one over all of the model"
                )
        if stepped - known:
            raise FftError(
                f"the outer optimizer ({kind}) of {fragment.name} has {len(stepped - known)} "
                "parameters that are in no fragment: make it over the same model"
            )
