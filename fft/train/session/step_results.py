"""Checks of a step's result before its vote: finite gradients, and the user's vetoes.

The checks run on the main thread. The gradients are read once, and only their norm is copied to the
CPU; a norm that is not finite needs a second pass. One vote to skip makes all ranks skip the step,
and one NO vote rolls it back on all ranks. `TransactionLoop.begin` ends the job where a replay
cannot help.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.distributed.tensor import DTensor

from fft.errors import FftError, ResultRefused
from fft.messages.effects import StartTxn
from fft.trace.format import RESULT_REFUSED
from fft.train.gradients.recomputation import Recomputation
from fft.train.process_groups.epoch_groups import EpochGroups
from fft.train.session.participation import Participation
from fft.train.session.settings import OnNonfinite
from fft.train.state.local_tensors import leaves_of
from fft.train.state.updates import Updates

Reaction = Literal["replay", "stop", "skip"]

NOT_FINITE = "the gradients contain NaN or inf"

_MANY_SKIPS = 10
"""Skips in a row because of NaN or inf after which a warning is logged. A scaler that starts with
torch's default scale finds a fitting one after fewer."""
_MOST_SKIPS = 100
"""Such skips in a row after which the job ends."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """The result of a step function, which a veto judges before the vote.

    Attributes:
        step: committed steps before this one.
        inner_step: local steps since the last synchronization; 0 in jobs without them.
        metrics: the values that this rank passed to ``txn.log`` in the step function.
        grad_norm: L2 norm of the gradients that the optimizers would apply, over the ranks of the
            replica group's shard process group, if FFT has one.
        is_finite: whether these gradients contain neither NaN nor inf.
    """

    step: int
    inner_step: int
    metrics: Mapping[str, float]
    grad_norm: float
    is_finite: bool

    @property
    def loss(self) -> float | None:
        """The ``loss`` that this rank passed to ``txn.log``, or None."""
        return self.metrics.get("loss")


Veto = Callable[[StepResult], Reaction | None]


class ResultJudge:
    """Judges the results of one rank's steps.

    Attributes:
        recomputation: The comparison of two attempts at a step.
        on_nonfinite: The reaction to gradients that are not finite.
        vetoes: The user's functions, in the order of registration.
    """

    def __init__(
        self,
        job: Participation,
        groups: EpochGroups,
        recomputation: Recomputation,
        on_nonfinite: OnNonfinite,
    ) -> None:
        self._job, self._groups = job, groups
        self.recomputation = recomputation
        self.on_nonfinite = on_nonfinite
        self.vetoes: list[Veto] = []
        self._metrics: dict[str, float] = {}
        self._skipped: list[tuple[int, int | None, int]] = []
        """Positions in the data of the batches skipped in a row because of NaN or inf."""

    def begin(self, plan: StartTxn) -> None:
        """Start a step function: it has logged nothing yet."""
        self._metrics.clear()
        self.recomputation.begin(plan)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Keep metrics of the running step function for the vetoes."""
        self._metrics.update(metrics)

    def must_skip(self, plan: StartTxn, updates: Updates, inner_step: int = 0) -> bool:
        """Return whether the scaler, ``on_nonfinite`` or a veto requires that the step is skipped.

        Args:
            plan: The open txn.
            updates: The update that a commit makes on this rank.
            inner_step: Number of local steps since the last synchronization.

        Raises:
            ResultRefused, Recompute, GradientsNotReproducible: The step must be rolled back.
            FftError: A veto returned neither None nor a reaction.
            GroupAborted, CollectiveFailed: A rollback, or a fault, came while the ranks of the
                group added up their norms.
        """
        self.recomputation.compare()
        skips = self._skips(plan, updates, inner_step)
        if skips and not are_finite(updates.gradients()):
            self._count_skip((plan.cursor, plan.lease, inner_step), updates.parameters())
        else:
            self._skipped.clear()
        return skips

    def _count_skip(
        self, batch: tuple[int, int | None, int], weights: Sequence[torch.Tensor]
    ) -> None:
        """Count a skip because of NaN or inf.

        Raises:
            ResultRefused: No skip can help: the weights are not finite, or skips do not end.
        """
        if batch not in self._skipped:  # an attempt may be repeated
            self._skipped.append(batch)
        count = len(self._skipped)
        if count in (1, _MANY_SKIPS, _MOST_SKIPS) and not are_finite(weights):
            why = "the weights contain NaN or inf, so the gradients of every batch do. Resume"
            raise ResultRefused(f"{why} from a checkpoint with finite weights", ends_job=True)
        why = (
            f"the gradients of {count} batches in a row contain NaN or inf, but the weights are "
            "finite: the loss function, the learning rate or the data is wrong"
        )
        if count >= _MOST_SKIPS:
            raise ResultRefused(why, ends_job=True)
        if count == _MANY_SKIPS:
            logger.warning("%s. The job ends after %d such batches", why, _MOST_SKIPS)

    def _skips(self, plan: StartTxn, updates: Updates, inner_step: int) -> bool:
        must_skip, gradients = updates.must_skip(), updates.gradients()
        if not self.vetoes:
            return must_skip or (
                not updates.has_scaler and self.must_skip_nonfinite(plan, gradients)
            )
        # the ranks of a group add up their norms together, whatever their own scalers have found
        norm, is_finite = self._measure(gradients)
        if must_skip or (updates.has_scaler and not is_finite):
            return True
        result = StepResult(plan.step, inner_step, dict(self._metrics), norm, is_finite)
        # vetoes run only on contributing ranks: a joiner computed its loss on weights that are not
        # the job's
        for veto in self.vetoes if plan.index is not None else ():
            if (reaction := veto(result)) is not None:
                why = f"{_name(veto)} refuses the step"
                return self._react(plan, _checked(reaction, veto), why, norm)
        return not is_finite and self._react_to_nonfinite(plan, norm)

    def must_skip_nonfinite(self, plan: StartTxn, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the step must be skipped because ``tensors`` are not finite.

        Raises:
            ResultRefused: The step must be rolled back.
        """
        if self.on_nonfinite == "commit" or not tensors:
            return False
        norm = math.sqrt(float(sum_of_squares(tensors)))
        is_finite = math.isfinite(norm) or are_finite(tensors)
        return not is_finite and self._react_to_nonfinite(plan, norm)

    def _measure(self, gradients: Sequence[torch.Tensor]) -> tuple[float, bool]:
        """Return the norm over the ranks of the group, and whether all elements are finite."""
        squares = sum_of_squares(gradients, self._groups.ranks_with_replicas)
        norm = math.sqrt(self._over_group(squares))
        if math.isfinite(norm):
            return norm, True
        # the squares may overflow although the elements are finite; all ranks of the group see the
        # same sum, so all take this branch
        bad = torch.full_like(squares, not are_finite(gradients))
        return norm, self._over_group(bad) == 0

    def _over_group(self, value: torch.Tensor) -> float:
        """Return the sum of a scalar over the ranks of the group, if they have a process group."""
        if self._groups.has_shard_group:
            self._groups.sum_in_group(value)
        return float(value)

    def _react_to_nonfinite(self, plan: StartTxn, norm: float) -> bool:
        reaction = self.on_nonfinite
        return reaction != "commit" and self._react(plan, reaction, NOT_FINITE, norm)

    def _react(self, plan: StartTxn, reaction: Reaction, why: str, norm: float) -> bool:
        note = {"token": list(plan.token), "reaction": reaction, "why": why, "grad_norm": norm}
        self._job.note(RESULT_REFUSED, {**note, "metrics": dict(self._metrics)})
        if reaction == "skip":
            return True
        raise ResultRefused(why, ends_job=reaction == "stop")


def sum_of_squares(tensors: Sequence[torch.Tensor], ranks: int = 1) -> torch.Tensor:
    """Return the sum of the squares of all elements, as a float64 scalar on their device.

    It is NaN or inf if an element is. Elements that several ranks hold are weighted so that they
    count once in the sum over the group.

    Args:
        tensors: Plain tensors, and DTensors over the mesh of the group or a slice of it.
        ranks: Number of ranks of the group that hold equal plain tensors. Along dimensions of the
            mesh that a DTensor lacks, ranks hold equal parts of it.
    """
    held: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        copies = _copies(tensor, ranks)
        for values in _values(tensor):
            wide = torch.float64 if values.dtype == torch.float64 else torch.float32
            part = values if copies == 1 else values / math.sqrt(copies)
            held.setdefault((values.device, wide), []).append(part)
    sums = [
        torch.stack(torch._foreach_norm(values, 2, wide)).double().square().sum()
        for (_, wide), values in held.items()
    ]
    if len({device for device, _ in held}) > 1:
        sums = [each.cpu() for each in sums]
    if not sums:
        return torch.zeros((), dtype=torch.float64, device=torch.accelerator.current_accelerator())
    return torch.stack(sums).sum()


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether no element is NaN or inf; exact, and slower than `sum_of_squares`."""
    return all(bool(torch.isfinite(v).all()) for each in tensors for v in _values(each))


def _values(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the real floating-point elements that this rank holds of ``tensor``."""
    for leaf in leaves_of(tensor):
        values = leaf.coalesce().values() if leaf.is_sparse else leaf
        values = torch.view_as_real(values) if values.is_complex() else values
        if values.is_floating_point():
            yield values


def _copies(tensor: torch.Tensor, ranks: int) -> int:
    """Return how many of ``ranks`` ranks hold the same elements."""
    if not isinstance(tensor, DTensor):
        return ranks
    mesh, placements = tensor.device_mesh, tensor.placements
    copies = math.prod(mesh.size(i) for i, p in enumerate(placements) if p.is_replicate())
    return copies * max(1, ranks // mesh.size())


def _checked(reaction: Any, veto: Veto) -> Reaction:
    if reaction not in get_args(Reaction):
        raise FftError(
            f"{_name(veto)} returned {reaction!r}: expected None to accept the result, or one of "
            f"{', '.join(map(repr, get_args(Reaction)))}"
        )
    return reaction  # type: ignore[no-any-return]


def _name(veto: Veto) -> str:
    return f"the veto {getattr(veto, '__qualname__', type(veto).__name__)}()"
