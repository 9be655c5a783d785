"""What the groups of a periodic scope share: the job's parameters and the outer optimizers.

Main thread. Touches the modules and optimizers that it was given, by reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fft.errors import FftError, StateMismatch
from fft.train.local_tensors import local_of
from fft.train.state.fingerprint import fingerprint
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
    """A part of the model that is synchronised at once."""

    name: str
    parameters: dict[str, nn.Parameter]
    """By name: this group's own."""
    globals: dict[str, torch.Tensor] = field(default_factory=dict)
    """By name: the job's, as the last synchronisation has left them."""
    trained: dict[str, nn.Parameter] = field(default_factory=dict)
    """What is synchronised: all but what was frozen when this was made."""

    def refuse_thawed(self) -> None:
        """Raise FftError if a parameter is trained that was frozen then."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and name not in self.trained:
                raise FftError(
                    f"{name} is trained now and was frozen when the synchroniser was made, so that "
                    "it is not synchronised: freeze it after that, or not at all"
                )

    def put_globals(self) -> None:
        """Give this group's parameters the values of the job's."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                local_of(parameter).copy_(self.globals[name])


@dataclass(frozen=True)
class Storage:
    """Where the job's parameters are kept.

    Attributes:
        device: None: beside the group's own.
        pins: Page-lock them, if that is the CPU and there is an accelerator.
    """

    device: torch.device | None = None
    pins: bool = True

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` that is kept there."""
        kept = tensor.detach().to(self.device, copy=True)
        return kept.pin_memory() if self.pins and torch.accelerator.is_available() else kept


class SharedState:
    """The job's parameters, by fragment, and what was kept of a group's progress there.

    Args:
        step: what is registered; its steps are the groups' own.
        modules: the fragments. Together they have all parameters that the group trains.
        optimizers: the outer ones, over the same parameters; may be none.
        plan: what must be equal on all groups: periods, fragments; plain data.
        storage: where the job's parameters are kept.

    Raises:
        FftError: a parameter in no fragment or in two, or a fragment without any.
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
        """Of the group, at the last synchronisation."""

    def take(self) -> None:
        """This group's parameters are the job's, before its first step. Once; then it is known.

        Raises FftError: the model has changed since it was registered.
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
        """A synchronisation is over: what comes after it may have to begin anew from here."""
        self._progress = self._step.progress()

    def start_over(self) -> None:
        """Begin anew from the last synchronisation. What the inner optimizers have kept is lost."""
        for fragment in self.fragments:
            fragment.put_globals()
        self._step.start_over(self._progress)

    # --- from group to group ---

    def export(self, copy_mutable: bool = False) -> dict[str, object]:
        """As `StepState.export`, of what the groups have in common: no body changes it."""
        return {
            "plan": self._plan,
            "parameters": {n: v for f in self.fragments for n, v in f.globals.items()},
            "optimizers": self._exported(),
            "progress": self._progress,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `export` of another group, and begin anew from it.

        Raises:
            StateMismatch: it is of another job; names the difference. Nothing has been changed.
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
        """Blake2b (128 bit, hex) over the job's parameters and the outer optimizers' state."""
        hasher = hashlib.blake2b(digest_size=16)
        outer = [values["state"] for values in self._exported()]
        feed(hasher, {"parameters": [f.globals for f in self.fragments], "optimizers": outer})
        return hasher.hexdigest()

    def fingerprint(self) -> str:
        """Cheap fingerprint of the same (`fft.train.state.fingerprint`)."""
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
    """Raise if a fragment is not stepped by its outer optimizer, or anything else is.

    One optimizer is for all fragments; several are for one each, in their order.
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
