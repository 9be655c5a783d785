"""``fft.LocalSGD`` and ``fft.DiLoCo``: the contribution of a group and the update from the mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchft.manager import Manager

from fft.errors import FftError
from fft.train.limits import Feature
from fft.train.paradigms.periodic.contribution import Packing
from fft.train.paradigms.periodic.shared_state import Fragment, Storage
from fft.train.paradigms.periodic.synchronizer import Synchronizer, SyncSchedule
from fft.train.state.local_tensors import like, local_of


class LocalSGD(Synchronizer):
    """Averages the parameters of the groups every ``sync_every`` steps (arXiv:1805.09767).

    The arguments are those of ``torchft.LocalSGD``. Each txn of ``manager.transactions`` is one
    local step of a group.

    Args:
        manager: A manager with ``spec="local_sgd"``, with ``model`` and ``optimizer`` registered.
        model: The model whose parameters are averaged.
        optimizer: The inner optimizer.
        sync_every: Local steps between two synchronizations.
        weighted: Weight each group by the sum of its ``txn.weigh`` values.

    Raises:
        FftError: The spec, the registration or a parameter is not supported. The message gives
            the fix.
    """

    algorithm = "local_sgd"
    feature = Feature.LOCAL_SGD

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync_every: int,
        *,
        weighted: bool = False,
    ) -> None:
        schedule, packing = SyncSchedule(sync_every), Packing(weighted)
        super().__init__(manager, [model], optimizer, [], schedule, packing, Storage())

    def _values(self, fragment: Fragment) -> dict[str, torch.Tensor]:
        return {name: local_of(p).detach().clone() for name, p in fragment.trained.items()}

    def _step(self, fragment: Fragment, mean: dict[str, torch.Tensor]) -> None:
        for name, value in mean.items():
            fragment.globals[name].copy_(value)
        fragment.put_globals()


class DiLoCo(Synchronizer):
    """Updates the shared parameters with an outer optimizer on averaged pseudo-gradients.

    This is DiLoCo (arXiv:2311.08105), and with several fragments Streaming DiLoCo
    (arXiv:2501.18512). The fragments are synchronized in turn, each every ``sync_every`` local
    steps. The arguments are those of ``torchft.DiLoCo``. Each txn of ``manager.transactions`` is
    one local step of a group.

    Args:
        manager: A manager with ``spec="diloco"``, with the model and ``inner_optimizer``
            registered.
        model_fragments: Modules that together contain each trained parameter exactly once.
        inner_optimizer: The optimizer of the group's local parameters.
        outer_optimizer: The optimizer of the shared parameters: one for all fragments, or one per
            fragment.
        sync_every: Local steps between two synchronizations of one fragment; a multiple of the
            number of fragments.
        backup_device: Device of the shared parameters. Defaults to the CPU.
        pin_memory: Keep them in page-locked memory if there is an accelerator.
        use_bucketization: Has no effect, because values are always reduced in buckets.
        bucket_cap_mb: Maximum size of a bucket in MiB. Defaults to 1024.
        should_quantize: Not supported.
        fragment_sync_delay: Number of local steps that overlap with the reduction.
        fragment_update_alpha: Fraction of its local value that a group keeps when it adopts the
            shared parameters (0: none, 1: all).
        weighted: Weight each group by the sum of its ``txn.weigh`` values, such as its tokens.
            Otherwise all groups have equal weight.

    Raises:
        FftError: An argument, the spec, the registration or a parameter is not supported.
    """

    algorithm = "diloco"
    feature = Feature.DILOCO

    def __init__(
        self,
        manager: Manager,
        model_fragments: Sequence[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: float | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        *,
        weighted: bool = False,
    ) -> None:
        if isinstance(model_fragments, nn.Module):
            raise FftError("DiLoCo: model_fragments is a list of modules; for one, [model]")
        single = isinstance(outer_optimizer, torch.optim.Optimizer)
        outer: list[Any] = [outer_optimizer] if single else list(outer_optimizer)  # type: ignore[arg-type]
        if not single and len(outer) != len(model_fragments):
            raise FftError(
                f"{len(outer)} outer optimizers for {len(model_fragments)} fragments: give one for "
                "each, or one for all"
            )
        if should_quantize:
            raise FftError("should_quantize is not supported: leave it out")
        if not 0 <= fragment_update_alpha <= 1:
            raise FftError(f"fragment_update_alpha={fragment_update_alpha}: give 0 to 1")
        if not model_fragments:
            raise FftError("fft.DiLoCo: no model to synchronise")
        self._alpha = fragment_update_alpha
        super().__init__(
            manager,
            model_fragments,
            inner_optimizer,
            outer,
            SyncSchedule(sync_every, len(model_fragments), fragment_sync_delay),
            Packing(weighted, bucket_cap_mb),
            Storage(torch.device("cpu") if backup_device is None else backup_device, pin_memory),
        )
        self._by_fragment = outer if not single else outer * len(model_fragments)

    def _settings(self) -> dict[str, Any]:
        return {"fragment_update_alpha": self._alpha}

    def _values(self, fragment: Fragment) -> dict[str, torch.Tensor]:
        """Return the pseudo-gradients: the shared parameters minus the local parameters."""
        return {
            name: fragment.globals[name].to(p.device) - local_of(p)
            for name, p in fragment.trained.items()
        }

    def _step(self, fragment: Fragment, mean: dict[str, torch.Tensor]) -> None:
        own = {name: local_of(p).clone() for name, p in fragment.parameters.items()}
        fragment.put_globals()
        for name, value in mean.items():
            fragment.parameters[name].grad = like(fragment.parameters[name], value)
        optimizer = self._by_fragment[self.shared.fragments.index(fragment)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for name, parameter in fragment.parameters.items():
            value = local_of(parameter)
            fragment.globals[name].copy_(value)
            value.lerp_(own[name], self._alpha)
