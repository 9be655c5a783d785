"""The state of one rank: what a rollback puts back, and what a heal carries over.

A step that does not commit has changed no optimizer state, and mostly no parameter, so `capture`
copies neither: it keeps what a forward and a backward change (buffers, RNG states, what the user
registered) and what code around them may change (LR schedules, hyperparameters). Bodies that do
change parameters, such as clamps of weights, are seen to do so in their first step, of which
all parameters are kept; from then on those are, and only those. `export` and
`load` are the whole state of this rank, for a peer that lost its own. Touches the modules,
optimizers and generators it was given, by reference, and never a process group.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from fft.train.local_tensors import bits_of, edit_count, leaves_of, put_bits, same_bits
from fft.train.state.buffers import Buffer, capture_buffers, restore_buffers
from fft.train.state.composite import copy_into, exported
from fft.train.state.fingerprint import fingerprint
from fft.train.state.random_states import capture_random
from fft.train.state.serial import (
    check_optimizer,
    export_entries,
    export_settings,
    feed,
    hyper_of,
    leaves_in,
    load_optimizer,
    merged,
    plain,
    put_hyper,
    same_count,
    same_names,
    same_tensors,
    spread_as,
    tensors_of,
    without_tensors,
)
from fft.train.state.sharded import capture_settings, reset_fsdp, reshard
from fft.util.errors import FftError

logger = logging.getLogger(__name__)


class TornState(FftError):
    """A rolled back body had changed parameters of which nothing was kept; names them."""


class Stateful(Protocol):
    """Anything with the two methods torch uses for state."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Rewindable(Protocol):
    """What keeps parts of a step until its end."""

    def capture(self) -> None:
        """A step begins."""

    def clear(self) -> None:
        """The step is cut: nothing of it is left."""


@dataclass
class _Capture:
    parameters: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Copies of the bits of those that a body may change."""
    versions: dict[str, int] = field(default_factory=dict)
    """Of all parameters: torch's counts of edits in place."""
    modes: list[tuple[nn.Module, bool]] = field(default_factory=list)
    """Whether each module was in training mode: a body may be cut in an evaluation."""
    trained: dict[str, bool] = field(default_factory=dict)
    """Whether each parameter needed a gradient: a body may be cut while some are frozen."""
    settings: list[Callable[[], None]] = field(default_factory=list)
    """Each function restores switches that the step function may have been using: those of FSDP2's
    modules, and whether torch records gradients."""
    buffers: list[Buffer] = field(default_factory=list)
    rng: list[Callable[[], None]] = field(default_factory=list)
    hyper: list[list[dict[str, Any]]] = field(default_factory=list)
    schedules: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)


class StepState:
    """What a rollback puts back, and what a heal transfers.

    Args:
        models: the modules whose parameters and buffers count, plain or under ``fully_shard``.
        optimizers: the optimizers over their parameters.
        lr_schedulers: anything with ``state_dict`` and ``load_state_dict``.
        extra: whatever else belongs to the state, by name.
        generators: the random generators a step draws from. None means the process's own: torch
            CPU, all accelerators if in use, NumPy's global one, and `random`. Where several
            ranks live in one process as threads, give each its own.
        pipelines: what keeps parts of a step until its end; more may be added later.

    No method uses a process group. None of them may run while a collective of the step is pending.
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
        self._optimizers = list(optimizers)
        self._schedulers = list(lr_schedulers)
        self._extra = extra if extra is not None else {}
        self.generators = generators
        self._pipelines = pipelines
        self._captured: _Capture | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        """Every parameter by name, as the last `capture` found them."""
        self._edited: set[str] | None = None
        """Parameters that bodies have changed; None: no body has come to its end yet."""

    # -- one step

    def capture(self) -> None:
        """Remember what `restore` puts back. At the start of a step, on the training thread."""
        reshard(self._models)  # on all ranks alike: an evaluation has left modules gathered
        names = self.names()
        if [*map(id, names.values())] != [*map(id, self._parameters.values())]:
            # the model has other parameters than before: keep all of them, as in the first step
            self._parameters, self._edited = names, None
        kept = self._parameters if self._edited is None else self._edited
        modules = [module for model in self._models for module in model.modules()]
        for pipeline in self._pipelines:
            pipeline.capture()
        self._captured = _Capture(
            parameters={name: bits_of(self._parameters[name]) for name in kept},
            versions={name: edit_count(p) for name, p in self._parameters.items()},
            modes=[(module, module.training) for module in modules],
            trained={name: p.requires_grad for name, p in self._parameters.items()},
            settings=[*capture_settings(self._models), _capture_grad_mode()],
            buffers=list(capture_buffers(modules)),
            rng=capture_random(self.generators),
            hyper=[[hyper_of(g) for g in o.param_groups] for o in self._optimizers],
            schedules=[copy.deepcopy(s.state_dict()) for s in self._schedulers],
            extra={name: copy.deepcopy(s.state_dict()) for name, s in self._extra.items()},
        )

    def note_edits(self) -> None:
        """The body is over: keep the parameters that it has changed, from the next step on."""
        saved = self._captured
        if saved is None:
            return
        found = self._edits(saved)
        if self._edited is None:  # all are kept, so that edits past torch's counts are seen, too
            for name, bits in saved.parameters.items():
                now = leaves_of(self._parameters[name])
                if not all(same_bits(a, b) for a, b in zip(bits, now, strict=True)):
                    found.add(name)
        self._edited = found | (self._edited or set())

    def _edits(self, saved: _Capture) -> set[str]:
        return {
            name
            for name, parameter in self._parameters.items()
            if edit_count(parameter) != saved.versions[name]
        }

    def restore(self) -> None:
        """Put everything back to the last `capture`, and drop all gradients. Idempotent.

        On the training thread, when the process groups are quiet.

        Raises:
            RuntimeError: nothing was captured.
            TornState: the body changed parameters for the first time; all the rest is put back.
        """
        saved = self._captured
        if saved is None:
            raise RuntimeError("restore() before the first capture()")
        self.unwind()
        lost = self._edits(saved) - set(saved.parameters)
        with torch.no_grad():
            for name, value in saved.parameters.items():
                put_bits(self._parameters[name], value)
        saved.versions = {name: edit_count(p) for name, p in self._parameters.items()}
        for module, mode in saved.modes:
            module.training = mode
        for name, trained in saved.trained.items():
            self._parameters[name].requires_grad_(trained)
        for put_back in saved.settings:
            put_back()
        restore_buffers((module for module, _ in saved.modes), saved.buffers)
        for optimizer, groups in zip(self._optimizers, saved.hyper, strict=True):
            # one that the user has added since has nothing to be put back
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                put_hyper(group, values)
        for scheduler, values in zip(self._schedulers, saved.schedules, strict=True):
            scheduler.load_state_dict(copy.deepcopy(values))
        for name, values in saved.extra.items():
            self._extra[name].load_state_dict(copy.deepcopy(values))
        for put_back in saved.rng:
            put_back()
        if lost:
            self._edited = (self._edited or set()) | lost
            raise TornState(
                f"the body has changed {', '.join(sorted(lost)[:5])} for the first time, in a step "
                "that is rolled back; from now on they are kept, like those of the first step"
            )

    @property
    def captured(self) -> bool:
        """Whether `restore` has something to put back."""
        return self._captured is not None

    def forget(self) -> None:
        """The step was committed, or another state was loaded: the last `capture` is void."""
        self._captured = None

    def unwind(self) -> None:
        """Take FSDP2 and pipelines out of the middle of a step and drop all gradients."""
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
        """Parameters that bodies have changed; None: no body has come to its end yet."""
        return None if self._edited is None else frozenset(self._edited)

    # -- the whole state

    def export(self, across_body: bool = False) -> dict[str, Any]:
        """The state of this rank as plain containers, scalars and local tensors.

        The tensors are the live ones: serialise or copy them before the next optimizer step, or,
        unless ``across_body``, before the next forward. With it, what a body changes is a copy:
        all but parameters and optimizer state. Loads with ``torch.load(..., weights_only=True)``.

        Raises:
            TypeError: something in it is neither plain nor a tensor; names the place.
        """
        lasting = self.export_lasting(self.sharded_names())
        changing = {"buffers": self.export_buffers(), **self.export_changing()}
        return merged(copy.deepcopy(changing) if across_body else changing, lasting)

    def export_changing(self) -> dict[str, Any]:
        """The part of `export`, but for buffers, that a body, or code around it, may change."""
        return {
            "lr_schedulers": [
                plain(s.state_dict(), f"lr_schedulers[{i}]") for i, s in enumerate(self._schedulers)
            ],
            "extra": {n: plain(s.state_dict(), f"extra[{n}]") for n, s in self._extra.items()},
            "optimizers": [
                export_settings(optimizer, f"optimizers[{i}]")
                for i, optimizer in enumerate(self._optimizers)
            ],
        }

    def export_lasting(self, names: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The part of `export` that lasts until the next update, by `names`. Any thread."""
        return {
            "parameters": export_parameters(names),
            "optimizers": [
                {"state": export_entries(optimizer, names, f"optimizers[{i}]")}
                for i, optimizer in enumerate(self._optimizers)
            ],
        }

    def load(self, state: Mapping[str, Any], keep_gradients: bool = False) -> int:
        """Take over what a peer exported, in place; returns how many bytes of tensors it held.

        Optimizer state that does not exist here yet is created, sharded as its parameter is.
        ``keep_gradients``: those that are here belong to the state that comes.

        Raises:
            StateMismatch: names, shapes or dtypes differ; nothing has been changed.
        """
        names = self.sharded_names()
        self.refuse_unfit(state)
        extra = self._spread(state["extra"])
        with torch.no_grad():
            for name, parameter in names.items():
                copy_into(parameter, state["parameters"][name])
            for name, buffer in self._buffers().items():
                copy_into(buffer, state["buffers"][name])
            for optimizer, values in zip(self._optimizers, state["optimizers"], strict=True):
                load_optimizer(optimizer, names, values)
        for scheduler, values in zip(self._schedulers, state["lr_schedulers"], strict=True):
            scheduler.load_state_dict(copy.deepcopy(values))
        for name, values in extra.items():
            self._extra[name].load_state_dict(values)
        self._warn_of_partial_loads(state["extra"])
        if not keep_gradients:
            self._drop_gradients()
        self.forget()
        return sum(tensor.nbytes for _, tensor in tensors_of(state, ""))

    def _warn_of_partial_loads(self, came: Mapping[str, Any]) -> None:
        """Warn of ``extra`` whose state after loading differs from the loaded state."""
        for name, values in came.items():
            now = plain(self._extra[name].state_dict(), f"extra[{name}]")
            if _digest_of(now) != _digest_of(values):
                logger.warning(
                    "extra[%r]: its state_dict() after load_state_dict() differs from the state "
                    "that was loaded, so this group differs from the others; load every entry",
                    name,
                )

    def digest(self, buffers: bool = True) -> str:
        """Blake2b (128 bit, hex) over this rank's parameters, optimizer state and buffers; of
        tensors on a device over their fingerprints, so that the same bits on CPU have another one.
        ``buffers=False``: without buffers, which replicas need not have in common.
        """
        names = self.sharded_names()
        hasher = hashlib.blake2b(digest_size=16)
        parts: dict[str, object] = {
            "parameters": export_parameters(names),
            "buffers": self.export_buffers() if buffers else {},
            "optimizers": [
                export_entries(o, names, f"optimizers[{i}]") for i, o in enumerate(self._optimizers)
            ],
        }
        feed(hasher, parts)
        return hasher.hexdigest()

    def fingerprint(self) -> str:
        """Cheap fingerprint of this rank's parameters and optimizer state
        (`fft.train.state.fingerprint`)."""
        reshard(self._models)
        names = self._parameters or self.names()
        tensors = [leaf for parameter in names.values() for leaf in leaves_of(parameter)]
        for optimizer in self._optimizers:
            for parameter in names.values():
                tensors += leaves_in(optimizer.state.get(parameter, {}))
        return fingerprint(tensors)

    def progress(self) -> dict[str, Any]:
        """How far it has come besides weights and optimizer state: hyperparameters, schedules, and
        what the user registered. A copy, as plain data.

        Raises TypeError: something in it is neither plain nor a tensor; names the place.
        """
        schedules, extra = enumerate(self._schedulers), self._extra.items()
        found = {
            "hyper": [[hyper_of(g) for g in o.param_groups] for o in self._optimizers],
            "lr_schedulers": [plain(s.state_dict(), f"lr_schedulers[{i}]") for i, s in schedules],
            "extra": {name: plain(s.state_dict(), f"extra[{name}]") for name, s in extra},
        }
        return copy.deepcopy(found)

    def start_over(self, progress: Mapping[str, Any]) -> None:
        """Put ``progress`` back; the optimizers have stepped nothing yet. No parameter changes.

        Raises StateMismatch: it is that of another job; nothing has been changed.
        """
        same_count("hyper", progress["hyper"], self._optimizers)
        same_count("lr_schedulers", progress["lr_schedulers"], self._schedulers)
        same_names("extra", progress["extra"], self._extra)
        progress = {**copy.deepcopy(dict(progress)), "extra": self._spread(progress["extra"])}
        for optimizer, groups in zip(self._optimizers, progress["hyper"], strict=True):
            optimizer.state.clear()
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                put_hyper(group, values)
        for scheduler, values in zip(self._schedulers, progress["lr_schedulers"], strict=True):
            scheduler.load_state_dict(values)
        for name, values in progress["extra"].items():
            self._extra[name].load_state_dict(values)
        self._drop_gradients()
        self.forget()

    def _spread(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of plain ``extra``, with the DTensors that it has here. Raises StateMismatch."""
        return {
            name: spread_as(copy.deepcopy(values), self._extra[name].state_dict(), f"extra[{name}]")
            for name, values in extra.items()
        }

    def sharded_extra(self) -> str | None:
        """The name of one that the ranks of a group have in parts; None: there is none."""
        extra = ((name, tensors_of(s.state_dict(), "")) for name, s in self._extra.items())
        return next((n for n, ts in extra if any(isinstance(t, DTensor) for _, t in ts)), None)

    def compared_digests(self) -> dict[str, str]:
        """Digests of what all groups should have in common and no comparison of replicas covers.

        One for each ``extra``, of this rank's part where it is sharded, and one for the buffers of
        each name, but for the statistics of normalisations, which belong to a group.

        Raises TypeError: something in it is neither plain nor a tensor; names the place.
        """
        found = {
            f"extra[{name!r}]": _digest_of(plain(each.state_dict(), f"extra[{name}]"))
            for name, each in self._extra.items()
        }
        buffers: dict[str, list[torch.Tensor]] = {}
        for module in (module for model in self._models for module in model.modules()):
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(module, _NormBase):
                    buffers.setdefault(f"buffers {name!r}", []).extend(leaves_of(buffer))
        return found | {name: _digest_of(tensors) for name, tensors in buffers.items()}

    def has_extra(self, thing: object) -> bool:
        """Whether it is registered by a name of the user's."""
        return any(thing is each for each in self._extra.values())

    def count_entries(self) -> int:
        """Number of parameters for which an optimizer keeps state, over all optimizers."""
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def refuse_replaced_parameters(self) -> None:
        """Raise FftError if an optimizer steps parameters that the models had before they changed.

        `fully_shard`, ``load_state_dict(assign=True)`` and some conversions put new parameters into
        a module. An optimizer made before that steps the old ones, and the model never changes.
        """
        named = {id(p): (n, p) for m in self._models for n, p in m.named_parameters()}
        stepped = {id(p): p for o in self._optimizers for g in o.param_groups for p in g["params"]}
        idle = [(n, p) for key, (n, p) in named.items() if key not in stepped and p.requires_grad]
        lost = [p for key, p in stepped.items() if key not in named]
        for name, parameter in idle:
            twins = [p for p in lost if p.shape == parameter.shape]
            is_sharded = isinstance(parameter, DTensor)
            were_plain = is_sharded and any(not isinstance(p, DTensor) for p in twins)
            if not (were_plain or (twins and len(lost) == len(stepped))):
                continue
            cause = "fully_shard()" if were_plain else "a call such as load_state_dict(assign=True)"
            raise FftError(
                f"{name} of the model is in no registered optimizer, but an optimizer has a "
                f"parameter of its shape {tuple(parameter.shape)} that is in no model: {cause} has "
                "put new parameters into the model after the optimizer was made; make the "
                "optimizer after it"
            )

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors in the optimizers: what they step, and what they keep for it."""
        for optimizer in self._optimizers:
            yield from (p for group in optimizer.param_groups for p in group["params"])
            for entries in optimizer.state.values():
                yield from (value for value in entries.values() if torch.is_tensor(value))

    def parameters(self) -> list[torch.Tensor]:
        """All that is registered."""
        return list((self._parameters or self.names()).values())

    def names(self) -> dict[str, torch.Tensor]:
        """Every parameter by name; those that no model has, by their place in the optimizer."""
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
        """Further names of tied parameters and shared buffers, each with the name in the state."""
        found: dict[str, str] = {}
        for i, model in enumerate(self._models):
            for listed in (model.named_parameters, model.named_buffers):
                first = {id(tensor): name for name, tensor in listed()}
                for name, tensor in listed(remove_duplicate=False):
                    if (known := first[id(tensor)]) != name:
                        found[f"model{i}.{name}"] = f"model{i}.{known}"
        return found

    def sharded_names(self) -> dict[str, torch.Tensor]:
        """As `names`, of modules that are sharded again: an evaluation leaves them gathered."""
        reshard(self._models)
        return self.names()

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"model{i}.{name}": buffer
            for i, model in enumerate(self._models)
            for name, buffer in model.named_buffers()
        }

    def export_buffers(self) -> dict[str, Any]:
        """This rank's part of them, by name, in the form of `exported`: the live tensors."""
        return {name: exported(b, f"buffers[{name}]") for name, b in self._buffers().items()}

    def refuse_unfit(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatch if names, shapes or dtypes of what was exported are others here."""
        names = self.names()
        expected = {"parameters", "buffers", "optimizers", "lr_schedulers", "extra"}
        same_names("state", state, expected)
        same_tensors("parameters", state["parameters"], names)
        same_tensors("buffers", state["buffers"], self._buffers())
        same_count("optimizers", state["optimizers"], self._optimizers)
        same_count("lr_schedulers", state["lr_schedulers"], self._schedulers)
        same_names("extra", state["extra"], self._extra)
        for i, (optimizer, values) in enumerate(
            zip(self._optimizers, state["optimizers"], strict=True)
        ):
            check_optimizer(f"optimizers[{i}]", optimizer, names, values)


def _digest_of(state: Any) -> str:
    """Digest of plain data, the same on every device."""
    found = list(tensors_of(state, ""))
    places = [f"{place} {t.dtype} {tuple(t.shape)}" for place, t in found]
    hasher = hashlib.blake2b(fingerprint(t for _, t in found).encode(), digest_size=8)
    feed(hasher, [places, without_tensors(state)])
    return hasher.hexdigest()


def export_parameters(names: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """This rank's part of the parameters, in the form of `exported`: the live tensors."""
    return {name: exported(p, f"parameters[{name}]") for name, p in names.items()}


def _capture_grad_mode() -> Callable[[], None]:
    """``torch.set_grad_enabled(False)`` for an evaluation has no ``finally``."""
    enabled = torch.is_grad_enabled()

    def restore() -> None:
        torch.set_grad_enabled(enabled)

    return restore
