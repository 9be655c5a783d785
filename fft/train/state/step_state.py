"""The state of one rank, as restored by a rollback and as transferred by a heal.

A step that does not commit has changed no optimizer state, and usually no parameter, so `capture`
copies neither. It copies the state that a forward and a backward change (buffers, RNG states,
registered objects) and that code around them may change (LR schedules, hyperparameters). In the
first step all parameters are copied, which shows whether the step function changes parameters, for
example by clamping weights. From then on only the changed ones are copied. `export` and `load`
handle the whole state of this rank, for a peer that lost its own. This module accesses the given
modules, optimizers and generators by reference, and never a process group.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from fft.errors import FftError, StateError
from fft.train.state.fingerprint import fingerprint
from fft.train.state.flags import Flags
from fft.train.state.local_tensors import bits_of, leaves_of, same_bits, version_of, write_data
from fft.train.state.plain_state import (
    check_count,
    check_names,
    check_optimizer,
    check_tensors,
    digest_of,
    export_entries,
    export_own,
    export_settings,
    feed,
    hyper_of,
    leaves_in,
    load_optimizer,
    load_own,
    load_settings,
    merged,
    own_state,
    plain,
    set_hyperparameters,
    tensors_of,
    unlike_places,
    with_layout_of,
)
from fft.train.state.random_states import capture_random
from fft.train.state.sharded import FsdpSettings, reset_fsdp, reshard
from fft.train.state.tensor_subclasses import copy_into, exported, refuse_misfit

logger = logging.getLogger(__name__)


class TornState(StateError):
    """A rolled-back step had changed parameters without a copy; the message names them."""


class Stateful(Protocol):
    """An object with the two methods that torch uses for state."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Rewindable(Protocol):
    """An object with data of a running step that a rollback clears, such as a pipeline schedule."""

    def capture(self) -> None:
        """Prepare for a step that begins."""

    def clear(self) -> None:
        """Drop everything that belongs to the interrupted step."""


@dataclass
class _Capture:
    parameters: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Copies of the bits of parameters that the step function may change."""
    versions: dict[str, int] = field(default_factory=dict)
    """torch's counts of in-place edits, for all parameters."""
    modes: list[tuple[nn.Module, bool]] = field(default_factory=list)
    """Training mode of each module; the step may be interrupted in an evaluation."""
    trained: dict[str, bool] = field(default_factory=dict)
    """Whether each parameter requires a gradient; the step may be interrupted while some are
    frozen."""
    settings: list[Callable[[], None]] = field(default_factory=list)
    """Functions that restore settings which the step function may have changed: those of FSDP2's
    modules, and whether torch records gradients."""
    buffers: list[Buffer] = field(default_factory=list)
    rng: list[Callable[[], None]] = field(default_factory=list)
    hyper: list[list[dict[str, Any]]] = field(default_factory=list)
    own: list[dict[str, Any]] = field(default_factory=list)
    """State of the optimizers that belongs to none of their parameters, as plain data."""
    schedules: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Buffer:
    """The content of one buffer slot of one module: the tensor object and its value."""

    module: nn.Module
    name: str
    tensor: torch.Tensor | None
    bits: list[torch.Tensor]
    """A copy of the value; empty if the slot has no tensor."""


def capture_buffers(modules: Sequence[nn.Module]) -> Iterator[Buffer]:
    """Yield the present content of each buffer slot of ``modules``."""
    for module in modules:
        for name, tensor in module._buffers.items():
            yield Buffer(module, name, tensor, [] if tensor is None else bits_of(tensor))


def restore_buffers(modules: Iterable[nn.Module], saved: list[Buffer]) -> None:
    """Restore the buffers of ``modules``: the same tensor objects with their captured values.

    Buffers that were registered since the capture are removed, also from modules that had none.
    Otherwise a running statistic that was registered lazily would count the replayed batch twice.
    """
    kept: dict[nn.Module, set[str]] = {module: set() for module in modules}
    for entry in saved:
        kept[entry.module].add(entry.name)
    for module, names in kept.items():
        for name in [n for n in module._buffers if n not in names]:
            del module._buffers[name]
            module._non_persistent_buffers_set.discard(name)
    with torch.no_grad():
        for entry in saved:
            entry.module._buffers[entry.name] = entry.tensor
            if entry.tensor is not None:
                write_data(entry.tensor, entry.bits)


class StepState:
    """The state that a rollback restores and a heal transfers.

    No method uses a process group. No method may run while a collective of the step is pending.

    Args:
        models: The modules whose parameters and buffers belong to the state, plain or under
            ``fully_shard``.
        optimizers: The optimizers over their parameters.
        lr_schedulers: Objects with ``state_dict`` and ``load_state_dict``.
        extra: Other objects that belong to the state, by name.
        generators: The random generators that a step draws from. None stands for those of the
            process: torch CPU, all accelerators in use, NumPy's global one, and `random`. If
            several ranks live in one process as threads, give each its own.
        pipelines: Objects that hold parts of a step until its end; more may be added later.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        lr_schedulers: Sequence[Stateful] = (),
        extra: Mapping[str, Stateful] | None = None,
        generators: Sequence[torch.Generator] | None = None,
        pipelines: Sequence[Rewindable] = (),
    ) -> None:
        self._models = list(models)
        self._flags = Flags(self._models)
        self._fsdp = FsdpSettings(self._models)
        self._first_shapes = {name: list(b.shape) for name, b in self._buffers().items()}
        """Shapes of the buffers before the first forward, which may resize and add some."""
        self._optimizers = list(optimizers)
        self._schedulers = list(lr_schedulers)
        self._extra = {**(extra or {}), **_module_states(self._models)}
        self.generators = generators
        self._pipelines = pipelines
        self._captured: _Capture | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        """All parameters by name, as of the last `capture`."""
        self._unheld: dict[str, str] = {}
        """Digests of the ``extra`` without a reference in the script, as of the last `unheld`."""
        self._edited: set[str] | None = None
        """Names of parameters that step functions have changed; None before the first has ended."""

    # -- one step

    def capture(self) -> None:
        """Save the state that `restore` restores; call it at the start of a step on the training
        thread."""
        reshard(self._models)  # an evaluation leaves modules gathered; all ranks must agree
        names = self.names()
        if [*map(id, names.values())] != [*map(id, self._parameters.values())]:
            # the model has other parameters than before: copy all of them, as in the first step
            self._parameters, self._edited = names, None
        kept = self._parameters if self._edited is None else self._edited
        modules = [module for model in self._models for module in model.modules()]
        for pipeline in self._pipelines:
            pipeline.capture()
        self._captured = _Capture(
            parameters={name: bits_of(self._parameters[name]) for name in kept},
            versions={name: version_of(p) for name, p in self._parameters.items()},
            modes=[(module, module.training) for module in modules],
            trained={name: p.requires_grad for name, p in self._parameters.items()},
            settings=[*self._fsdp.capture(), _capture_grad_mode()],
            buffers=list(capture_buffers(modules)),
            rng=capture_random(self.generators),
            hyper=[[hyper_of(g) for g in o.param_groups] for o in self._optimizers],
            own=[copy.deepcopy(export_own(o, "optimizer")) for o in self._optimizers],
            schedules=[copy.deepcopy(s.state_dict()) for s in self._schedulers],
            extra={name: copy.deepcopy(s.state_dict()) for name, s in self._extra.items()},
        )

    def note_edits(self) -> None:
        """Record, after the step function, the parameters that it has changed.

        `capture` copies them from the next step on.
        """
        saved = self._captured
        if saved is None:
            return
        found = self._edits(saved)
        if self._edited is None:  # all are copied, so edits that torch does not count are found
            for name, bits in saved.parameters.items():
                now = leaves_of(self._parameters[name])
                if not all(same_bits(a, b) for a, b in zip(bits, now, strict=True)):
                    found.add(name)
        self._edited = found | (self._edited or set())

    def _edits(self, saved: _Capture) -> set[str]:
        return {
            name
            for name, parameter in self._parameters.items()
            if version_of(parameter) != saved.versions[name]
        }

    def restore(self) -> None:
        """Restore everything to the last `capture` and drop all gradients. Idempotent.

        Call it on the training thread, while no operation of a process group is pending.

        Raises:
            RuntimeError: Nothing was captured.
            TornState: The step function changed parameters for the first time; everything else is
                restored.
        """
        saved = self._captured
        if saved is None:
            raise RuntimeError("restore() before the first capture()")
        self.unwind()
        lost = self._put_back(saved)
        for restore in saved.rng:
            restore()
        if lost:
            self._edited = (self._edited or set()) | lost
            raise TornState(
                f"the step function has changed {', '.join(sorted(lost)[:5])} for the first time, "
                "in a step that is rolled back, so the old values are lost; from now on FFT "
                "copies these parameters before each step"
            )

    def skip(self) -> None:
        """Undo the changes of a step function whose step all ranks skip, and drop the capture.

        Random numbers are not drawn again, because the next step has another batch. Parameters that
        the step function has changed for the first time keep the change, as on all other ranks.
        """
        if self._captured is not None:
            self._put_back(self._captured)
        self.forget()

    def _put_back(self, saved: _Capture) -> set[str]:
        """Restore all but the generators; return the names of parameters that cannot be."""
        lost = self._edits(saved) - set(saved.parameters)
        with torch.no_grad():
            for name, value in saved.parameters.items():
                write_data(self._parameters[name], value)
        saved.versions = {name: version_of(p) for name, p in self._parameters.items()}
        for module, mode in saved.modes:
            module.training = mode
        for name, trained in saved.trained.items():
            self._parameters[name].requires_grad_(trained)
        for restore in saved.settings:
            restore()
        restore_buffers((module for module, _ in saved.modes), saved.buffers)
        for optimizer, own in zip(self._optimizers, saved.own, strict=True):
            load_own(optimizer, own)
        for optimizer, groups in zip(self._optimizers, saved.hyper, strict=True):
            del optimizer.param_groups[len(groups) :]  # the step function adds them again
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                set_hyperparameters(group, values)
        for scheduler, values in zip(self._schedulers, saved.schedules, strict=True):
            scheduler.load_state_dict(copy.deepcopy(values))
        for name, values in saved.extra.items():
            self._extra[name].load_state_dict(copy.deepcopy(values))
        return lost

    @property
    def captured(self) -> bool:
        """Whether there is a capture for `restore`."""
        return self._captured is not None

    def forget(self) -> None:
        """Drop the last `capture`, because the step was committed or another state was loaded."""
        self._captured = None

    def unwind(self) -> None:
        """Reset FSDP2 and pipelines from the middle of a step, and drop all gradients."""
        reset_fsdp(self._models)
        for pipeline in self._pipelines:
            pipeline.clear()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for model in self._models:
            for parameter in model.parameters():
                parameter.grad = None
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    @property
    def edited(self) -> frozenset[str] | None:
        """Names of parameters that step functions have changed; None before the first has ended."""
        return None if self._edited is None else frozenset(self._edited)

    # -- the whole state

    def export(self, copy_mutable: bool = False) -> dict[str, Any]:
        """Return the state of this rank as plain containers, scalars and local tensors.

        The tensors are the live ones: serialize or copy them before the next forward. The result
        loads with ``torch.load(..., weights_only=True)``.

        Args:
            copy_mutable: Copy everything that a step function may change, which is all except
                parameters and optimizer state. The result is then valid until the next optimizer
                step.

        Raises:
            TypeError: A value is neither plain nor a tensor; the message names the place.
        """
        lasting = self.export_lasting(self.resharded_named_parameters())
        changing = {"buffers": self.export_buffers(), **self.export_changing()}
        return merged(copy.deepcopy(changing) if copy_mutable else changing, lasting)

    def export_changing(self) -> dict[str, Any]:
        """Export the part, except buffers, that the step function or code around it may change."""
        return {
            "lr_schedulers": [
                plain(s.state_dict(), f"lr_schedulers[{i}]") for i, s in enumerate(self._schedulers)
            ],
            "extra": {n: plain(s.state_dict(), f"extra[{n}]") for n, s in self._extra.items()},
            "optimizers": self._export_settings(),
            "flags": self.export_flags(),
        }

    def export_flags(self) -> dict[str, Any]:
        """Export the flags of parameters and modules (see `Flags.export`)."""
        flags = self._flags.export(self.resharded_named_parameters())
        transient = [
            f"{place}.{slot}"
            for place, module in self._flags.modules().items()
            for slot in sorted(module._non_persistent_buffers_set)
        ]
        return {**flags, "buffers": {"first": self._first_shapes, "transient": transient}}

    def _export_settings(self) -> list[dict[str, Any]]:
        names, each = self.names(), enumerate(self._optimizers)
        return [export_settings(o, names, f"optimizers[{i}]") for i, o in each]

    def export_lasting(self, names: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Export the part that stays valid until the next optimizer step. Safe on any thread.

        ``names`` are the parameters by name.
        """
        return {
            "parameters": export_parameters(names),
            "optimizers": [
                {"state": export_entries(optimizer, names, f"optimizers[{i}]")}
                for i, optimizer in enumerate(self._optimizers)
            ],
        }

    def load(self, state: Mapping[str, Any], keep_gradients: bool = False) -> int:
        """Load, in place, a state that a peer exported.

        Optimizer state that does not exist here yet is created, sharded as its parameter is.

        Args:
            state: The result of the peer's `export`.
            keep_gradients: Keep the gradients, because they belong to the loaded state.

        Returns:
            The size of the tensors in ``state``, in bytes.

        Raises:
            StateMismatch: Names, shapes or dtypes differ, and nothing has been changed; or hooks
                differ.
        """
        names = self.resharded_named_parameters()
        self.refuse_unfit(state)
        self._flags.changed_hooks(names)  # records the first hooks before `extra` registers some
        extra = self._spread(state["extra"])
        with torch.no_grad():
            for name, parameter in names.items():
                copy_into(parameter, state["parameters"][name])
            self._load_buffers(state["buffers"], state["flags"].get("buffers"))
            for optimizer, values in zip(self._optimizers, state["optimizers"], strict=True):
                load_optimizer(optimizer, names, values)
        for scheduler, values in zip(self._schedulers, state["lr_schedulers"], strict=True):
            scheduler.load_state_dict(copy.deepcopy(values))
        for name, values in extra.items():
            self._extra[name].load_state_dict(values)
        self._flags.load(state["flags"], names)
        if not keep_gradients:
            self._drop_gradients()
        self.forget()
        return sum(tensor.nbytes for _, tensor in tensors_of(state, ""))

    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint as `load` does, and warn of parts that were not loaded.

        The state of a peer needs no warning: the caller compares it, and refuses it if it differs.
        """
        self.load(state)
        text = "extra[%r]: %s differs from the checkpoint after load_state_dict(): load every entry"
        for name, values in state["extra"].items():
            now = plain(self._extra[name].state_dict(), f"extra[{name}]")
            for place in unlike_places(values, now):
                logger.warning(text, name, place or "its state")

    def digest(self, buffers: bool = True) -> str:
        """Return a Blake2b digest (128 bit, hex) over parameters, optimizer state and buffers.

        For tensors on a device, the digest covers their fingerprints, so equal bits on a CPU have
        another digest.

        Args:
            buffers: Include the buffers, which may differ between replicas.
        """
        names = self.resharded_named_parameters()
        hasher = hashlib.blake2b(digest_size=16)
        parts: dict[str, object] = {
            "parameters": export_parameters(names),
            "buffers": self.export_buffers() if buffers else {},
            "optimizers": [
                export_entries(o, names, f"optimizers[{i}]") for i, o in enumerate(self._optimizers)
            ],
            "own": [export_own(o, f"optimizers[{i}]") for i, o in enumerate(self._optimizers)],
        }
        feed(hasher, parts)
        return hasher.hexdigest()

    def fingerprint(self, buffers: bool = False) -> str:
        """Return a cheap fingerprint of this rank's parameters and optimizer state.

        See `fft.train.state.fingerprint`.

        Args:
            buffers: Include the buffers that all groups should share.
        """
        reshard(self._models)
        names = self._parameters or self.names()
        tensors = [leaf for parameter in names.values() for leaf in leaves_of(parameter)]
        for optimizer in self._optimizers:
            for parameter in names.values():
                tensors += leaves_in(optimizer.state.get(parameter, {}))
            tensors += leaves_in(own_state(optimizer))
        if buffers:
            tensors += (leaf for _, buffer in self._shared_buffers() for leaf in leaves_of(buffer))
        return fingerprint(tensors)

    def _shared_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that all groups should share, with their names in their modules.

        Each group has its own statistics of normalization layers.
        """
        for module in (module for model in self._models for module in model.modules()):
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(module, _NormBase):
                    yield name, buffer

    def statistics(self) -> list[torch.Tensor]:
        """Return the tensors of the running statistics of normalization layers, in order."""
        modules = (module for model in self._models for module in model.modules())
        layers = (module for module in modules if isinstance(module, _NormBase))
        buffers = (buffer for layer in layers for buffer in layer._buffers.values())
        return [leaf for b in buffers if b is not None for leaf in leaves_of(b)]

    def progress(self) -> dict[str, Any]:
        """Copy the state besides weights and optimizer state, as plain data.

        This covers settings of optimizers, LR schedules, registered objects, and flags.

        Raises:
            TypeError: A value is neither plain nor a tensor; the message names the place.
        """
        schedules, extra = enumerate(self._schedulers), self._extra.items()
        found = {
            "optimizers": self._export_settings(),
            "lr_schedulers": [plain(s.state_dict(), f"lr_schedulers[{i}]") for i, s in schedules],
            "extra": {name: plain(s.state_dict(), f"extra[{name}]") for name, s in extra},
            "flags": {k: v for k, v in self.export_flags().items() if k != "hooks"},
        }
        return copy.deepcopy(found)

    def start_over(self, progress: Mapping[str, Any]) -> None:
        """Load a state that `progress` returned, and clear the state of the optimizers.

        Parameters do not change.

        Raises:
            StateMismatch: It belongs to another job; nothing has been changed.
        """
        check_count("optimizers", progress["optimizers"], self._optimizers)
        check_count("lr_schedulers", progress["lr_schedulers"], self._schedulers)
        check_names("extra", progress["extra"], self._extra)
        progress = {**copy.deepcopy(dict(progress)), "extra": self._spread(progress["extra"])}
        for optimizer, settings in zip(self._optimizers, progress["optimizers"], strict=True):
            optimizer.state.clear()
            load_settings(optimizer, self.names(), settings)
        for scheduler, values in zip(self._schedulers, progress["lr_schedulers"], strict=True):
            scheduler.load_state_dict(values)
        for name, values in progress["extra"].items():
            self._extra[name].load_state_dict(values)
        self._flags.load(progress["flags"], self.names())
        self._drop_gradients()
        self.forget()

    def _spread(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Copy plain ``extra``, with DTensors where the objects here have them.

        Raises:
            StateMismatch: A part has another class, shape or dtype than here.
        """
        return {
            name: with_layout_of(
                copy.deepcopy(values), self._extra[name].state_dict(), f"extra[{name}]"
            )
            for name, values in extra.items()
        }

    def sharded_extra(self) -> str | None:
        """Return the name of an ``extra`` that holds a DTensor, or None."""
        extra = ((name, tensors_of(s.state_dict(), "")) for name, s in self._extra.items())
        return next((n for n, ts in extra if any(isinstance(t, DTensor) for _, t in ts)), None)

    def compared_digests(self) -> dict[str, str]:
        """Return digests of state that all groups should share but that votes do not compare.

        There is one digest for each ``extra``, over this rank's part if it is sharded, and one for
        the buffers of each name. Statistics of normalization layers are excluded, because each
        group has its own.

        Raises:
            TypeError: A value is neither plain nor a tensor; the message names the place.
        """
        found = {
            f"extra[{name!r}]": digest_of(plain(each.state_dict(), f"extra[{name}]"))
            for name, each in self._extra.items()
        }
        buffers: dict[str, list[torch.Tensor]] = {}
        for name, buffer in self._shared_buffers():
            buffers.setdefault(f"buffers {name!r}", []).extend(leaves_of(buffer))
        return found | {name: digest_of(tensors) for name, tensors in buffers.items()}

    def has_extra(self, thing: object) -> bool:
        """Return whether ``thing`` is registered in ``extra``."""
        return any(thing is each for each in self._extra.values())

    def unheld(self) -> str:
        """Return the names of objects in ``extra`` that the script has probably replaced.

        The script has no reference to them, and they have not changed since the previous call.
        """
        before, self._unheld = self._unheld, {}
        for name in self._extra.keys() - _module_states(self._models).keys():
            if sys.getrefcount(self._extra[name]) == 2:  # the dictionary, and this argument
                now = plain(self._extra[name].state_dict(), f"extra[{name}]")
                self._unheld[name] = digest_of(now)
        stale = sorted(name for name, now in self._unheld.items() if before.get(name) == now)
        return ", ".join(f"extra[{name!r}]" for name in stale)

    def count_entries(self) -> int:
        """Return the number of parameters for which an optimizer keeps state."""
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def refuse_replaced_parameters(self) -> None:
        """Raise FftError if an optimizer steps parameters that the models no longer have.

        `fully_shard`, ``load_state_dict(assign=True)`` and some conversions put new parameters into
        a module. An optimizer constructed earlier steps the old ones, so the model never changes.
        """
        named = {id(p): (n, p) for m in self._models for n, p in m.named_parameters()}
        stepped = {id(p): p for o in self._optimizers for g in o.param_groups for p in g["params"]}
        idle = [(n, p) for key, (n, p) in named.items() if key not in stepped and p.requires_grad]
        lost = [p for key, p in stepped.items() if key not in named]
        for name, parameter in idle:
            same_shape = [p for p in lost if p.shape == parameter.shape]
            is_sharded = isinstance(parameter, DTensor)
            were_plain = is_sharded and any(not isinstance(p, DTensor) for p in same_shape)
            if not (were_plain or (same_shape and len(lost) == len(stepped))):
                continue
            cause = "fully_shard()" if were_plain else "a call such as load_state_dict(assign=True)"
            raise FftError(
                f"{name} of the model is in no registered optimizer, but an optimizer has a "
                f"parameter of its shape {tuple(parameter.shape)} that is in no model: {cause} has "
                "put new parameters into the model after the optimizer was made; make the "
                "optimizer after it"
            )

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors in the optimizers: the parameters and the state kept for them."""
        for optimizer in self._optimizers:
            yield from (p for group in optimizer.param_groups for p in group["params"])
            for entries in optimizer.state.values():
                yield from (tensor for _, tensor in tensors_of(entries, ""))

    def parameters(self) -> list[torch.Tensor]:
        """Return all registered parameters."""
        return list((self._parameters or self.names()).values())

    def names(self) -> dict[str, torch.Tensor]:
        """Return all parameters by name; those in no model are named by their optimizer."""
        found: dict[str, torch.Tensor] = {}
        for i, model in enumerate(self._models):
            found.update((f"model{i}.{name}", p) for name, p in model.named_parameters())
        known = {id(p) for p in found.values()}
        for i, optimizer in enumerate(self._optimizers):
            listed = (p for group in optimizer.param_groups for p in group["params"])
            for j, parameter in enumerate(listed):
                if id(parameter) not in known:
                    known.add(id(parameter))
                    found[f"optimizer{i}.{j}"] = parameter
        return found

    def aliases(self) -> dict[str, str]:
        """Map further names of tied parameters and shared buffers to their names in the state."""
        found: dict[str, str] = {}
        for i, model in enumerate(self._models):
            for listed in (model.named_parameters, model.named_buffers):
                first = {id(tensor): name for name, tensor in listed()}
                for name, tensor in listed(remove_duplicate=False):
                    if (known := first[id(tensor)]) != name:
                        found[f"model{i}.{name}"] = f"model{i}.{known}"
        return found

    def resharded_named_parameters(self) -> dict[str, torch.Tensor]:
        """Reshard the modules, which an evaluation leaves gathered, and return `names`."""
        reshard(self._models)
        return self.names()

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"model{i}.{name}": buffer
            for i, model in enumerate(self._models)
            for name, buffer in model.named_buffers()
        }

    def _check_buffers(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatch if the buffers of ``state`` do not fit.

        A forward pass may resize and add buffers, as observers of quantization do. So buffers fit
        if sender and receiver had the same ones, with the same shapes, at their registration.
        """
        got, mine, modules = state["buffers"], self._buffers(), self._flags.modules()
        first = state["flags"].get("buffers", {"first": {}})["first"]
        for name in {**got, **mine}:
            is_alike = first.get(name) == self._first_shapes.get(name)
            if name in got and name in mine:
                here = _of_shape(mine[name], got[name]) if is_alike else mine[name]
                refuse_misfit(f"buffers[{name}]", got[name], here)
            elif not is_alike or name.rpartition(".")[0] not in modules:
                check_names("buffers", got, mine)

    def _load_buffers(self, got: Mapping[str, Any], notes: Any) -> None:
        mine, modules = self._buffers(), self._flags.modules()
        if notes is not None:
            self._first_shapes = notes["first"]
        for name in {**got, **mine}:
            place, _, slot = name.rpartition(".")
            if name not in got:
                del modules[place]._buffers[slot]
            elif name not in mine:
                near = (*modules[place].parameters(), *self.parameters(), torch.empty(0))[0]
                value = got[name].to(near.device, copy=True)
                modules[place].register_buffer(slot, value, name not in notes["transient"])
            else:
                if (large := _of_shape(mine[name], got[name])) is not mine[name]:
                    mine[name].data = large
                copy_into(mine[name], got[name])

    def export_buffers(self) -> dict[str, Any]:
        """Export this rank's part of the buffers by name; the tensors are the live ones."""
        return {name: exported(b, f"buffers[{name}]") for name, b in self._buffers().items()}

    def refuse_unfit(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatch if names, shapes or dtypes of ``state`` do not fit this rank."""
        names = self.names()
        expected = {"parameters", "buffers", "optimizers", "lr_schedulers", "extra", "flags"}
        check_names("state", state, expected)
        check_tensors("parameters", state["parameters"], names)
        self._check_buffers(state)
        check_count("optimizers", state["optimizers"], self._optimizers)
        check_count("lr_schedulers", state["lr_schedulers"], self._schedulers)
        check_names("extra", state["extra"], self._extra)
        for i, (optimizer, values) in enumerate(
            zip(self._optimizers, state["optimizers"], strict=True)
        ):
            check_optimizer(f"optimizers[{i}]", optimizer, names, values)


class _ModuleState:
    """The state of a module besides parameters and buffers (``nn.Module.get_extra_state``)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._module.get_extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._module.set_extra_state(state_dict["state"])


def _module_states(models: Sequence[nn.Module]) -> dict[str, Stateful]:
    """Return the states of the modules that have one, under torch's names."""
    return {
        f"{name}._extra_state": _ModuleState(module)
        for i, model in enumerate(models)
        for name, module in model.named_modules(prefix=f"model{i}")
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _of_shape(buffer: torch.Tensor, value: Any) -> torch.Tensor:
    """Return ``buffer``, or an uninitialized tensor of the shape of ``value`` if it differs."""
    if type(buffer) is not torch.Tensor or not isinstance(value, torch.Tensor):
        return buffer
    return buffer if buffer.shape == value.shape else buffer.new_empty(value.shape)


def export_parameters(names: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Export this rank's part of the parameters by name; the tensors are the live ones."""
    return {name: exported(p, f"parameters[{name}]") for name, p in names.items()}


def _capture_grad_mode() -> Callable[[], None]:
    """Return a function that restores the grad mode, which an interrupted evaluation leaves off."""
    enabled = torch.is_grad_enabled()

    def restore() -> None:
        torch.set_grad_enabled(enabled)

    return restore
