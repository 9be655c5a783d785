"""``fft.LocalSGD`` and ``fft.DiLoCo``: what is averaged, and what the average does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchft.manager import Manager

from fft.errors import FftError
from fft.train.local_tensors import like, local_of
from fft.train.paradigms.periodic.contribution import Packing
from fft.train.paradigms.periodic.shared_state import Fragment, Storage
from fft.train.paradigms.periodic.synchronizer import Synchronizer, SyncSchedule


class LocalSGD(Synchronizer):
    """The groups' parameters are averaged every ``sync_every`` inner steps (arXiv:1805.09767).

    Arguments as of ``torchft.LocalSGD``. The groups step in ``manager.transactions``: each txn is
    an inner step of the group alone.

    Args:
        manager: with ``spec="local_sgd"``; ``model`` and ``optimizer`` are registered with it.
        model: whose parameters are averaged.
        optimizer: the inner one.
        sync_every: inner steps between two synchronisations.
        weighted: each group counts by the sum of what its bodies give to ``txn.weigh``.

    Raises:
        FftError: the spec, the registration or a parameter does not fit; says the mend.
    """

    algorithm = "local_sgd"

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
    """An outer optimizer steps the job's parameters by how far the groups have come on average.

    DiLoCo (arXiv:2311.08105), and with several fragments Streaming DiLoCo (arXiv:2501.18512): they
    are synchronised in turn, each every ``sync_every`` inner steps. Arguments as of
    ``torchft.DiLoCo``. The groups step in ``manager.transactions``: each txn is an inner step of
    the group alone.

    Args:
        manager: with ``spec="diloco"``; the model and ``inner_optimizer`` are registered with it.
        model_fragments: modules that together have all trained parameters, each in one of them.
        inner_optimizer: steps the group's own parameters.
        outer_optimizer: steps the job's: one for all fragments, or one for each.
        sync_every: inner steps between two synchronisations of one fragment; a multiple of the
            number of fragments.
        backup_device: where the job's parameters are kept; None: the CPU.
        pin_memory: page-lock them there, if there is an accelerator.
        use_bucketization: accepted; values are always reduced in buckets.
        bucket_cap_mb: MiB that are reduced at once; None: 1024.
        should_quantize: not supported.
        fragment_sync_delay: inner steps that are made while the reduction is under way.
        fragment_update_alpha: how much of its own value a group keeps when it takes over the job's:
            0: nothing, 1: all.
        weighted: each group counts by the sum of what its bodies give to ``txn.weigh``, such as
            its tokens; else all count alike.

    Raises:
        FftError: an argument, the spec, the registration or a parameter does not fit.
    """

    algorithm = "diloco"

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
        """The pseudo-gradients: where the job was, less where this group is."""
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
