"""Models in torch's or torchft's DistributedDataParallel: the wrapper stays, but not its reducer.

The reducer of DDP cannot be rolled back. An aborted reduction may write to its buckets later. An
interrupted backward leaves it unusable ("Expected to have finished reduction in the prior
iteration"). And it rebuilds its buckets in the order in which gradients arrived, which a joining
group does not know. So `fft.train.gradients.reducer` replaces it by a reducer of the same design;
only DDP's forward stays in use. This module changes the wrapper, and uses no process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchft.ddp import DistributedDataParallel as TorchftDdp
from torchft.ddp import PureDistributedDataParallel

from fft.errors import FftError
from fft.util.living import living

_SYNC = "require_backward_grad_sync"
_KINDS = (DistributedDataParallel, PureDistributedDataParallel)


class PausableReducer(Protocol):
    """The reducer that replaces DDP's."""

    finds_unused: bool
    """Whether a rank may have no gradient for a parameter that others have one for."""

    def quiet(self, quiet: bool) -> bool:
        """Set whether backward only accumulates from now on; return the previous setting."""


def wrappers(model: nn.Module) -> list[Any]:
    """Return the active averaging wrappers in the model, including the model itself."""
    return [module for module in model.modules() if _at_work(module)]


def wrappers_around(models: Iterable[nn.Module]) -> list[Any]:
    """Return all active wrappers of this process that share a parameter with the models.

    A parameter has no reference to its wrapper, so all live wrappers are searched.
    """
    own = {parameter for model in models for parameter in model.parameters()}
    return [w for w in living(_KINDS) if _at_work(w) and not own.isdisjoint(w.parameters())]


def _at_work(thing: object) -> bool:
    if not issubclass(type(thing), _KINDS):
        return False
    # constructed, and not taken over
    return "_modules" in vars(thing) and "no_sync" not in vars(thing)


def take_over(model: nn.Module, reducer: PausableReducer) -> None:
    """Make ``reducer`` do the work of the wrappers in the model."""
    for wrapper in wrappers(model):
        reducer.finds_unused |= wrapper.find_unused_parameters
        wrapper.reducer._remove_autograd_hooks()
        wrapper.require_forward_param_sync = False  # FFT shares running statistics
        vars(wrapper).update(no_sync=_no_sync(reducer), register_comm_hook=_refuse_hook)
        kind = type(wrapper)
        wrapper.__class__ = type(kind.__name__, (kind,), {_SYNC: _sync_switch(reducer)})


def refuse_unfit(model: nn.Module) -> None:
    """Raise FftError if a wrapper in the model averages in a way that cannot be taken over."""
    for wrapper in wrappers(model):
        _refuse_unfit(wrapper)


def _refuse_unfit(wrapper: Any) -> None:
    if isinstance(wrapper, PureDistributedDataParallel):
        raise FftError(
            "torchft's PureDistributedDataParallel starts to average gradients and never waits "
            "for them, so the step function could read partly averaged gradients: call "
            "manager.sync_gradients(model.module), and use that module in the step function"
        )
    if (size := wrapper.process_group.size()) > 1:
        raise FftError(
            f"DistributedDataParallel averages over a process group of {size} ranks, which FFT "
            "cannot abort when one of them fails: make each rank a separate replica group "
            "(`fft run --groups N --ranks 1`, which gives init_process_group() a world of one), "
            "or pass process_group=torchft.process_group.ProcessGroupDummy(0, 1)"
        )
    if wrapper.static_graph:
        raise FftError(
            "DistributedDataParallel(static_graph=True) is not supported: remove static_graph; "
            "FFT averages in the place of the wrapper and does not need it"
        )
    own = [hook for hook, _ in wrapper._comm_hooks if hook is not TorchftDdp._comm_hook]
    if own:
        name = getattr(own[0], "__qualname__", repr(own[0]))
        raise FftError(
            f"the communication hook {name} of DistributedDataParallel would reduce over its "
            "process group, not across the replica groups: register it by "
            "manager.register_comm_hook(state, hook), after sync_gradients(model)"
        )
    if wrapper.mixed_precision is not None:
        raise FftError(
            "DistributedDataParallel(mixed_precision=…) reduces by its own hooks: use autocast, "
            "and sync_gradients(model, reduce_dtype=…) to reduce in another type"
        )


def _sync_switch(reducer: PausableReducer) -> property:
    """Make the property that nanoGPT sets instead of using ``no_sync()``. It reads as False, so
    that forward does not prepare the reducer of DDP."""

    def switch(wrapper: nn.Module, syncs: bool) -> None:
        reducer.quiet(not syncs)

    return property(lambda wrapper: False, switch)


def _no_sync(reducer: PausableReducer) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def no_sync() -> Iterator[None]:
        """See DistributedDataParallel's ``no_sync``."""
        before = reducer.quiet(True)
        try:
            yield
        finally:
            reducer.quiet(before)

    return no_sync


def _refuse_hook(state: Any, hook: Any) -> None:
    raise FftError(
        "gradients of this model are averaged by FFT: register the hook by "
        "manager.register_comm_hook(state, hook)"
    )
