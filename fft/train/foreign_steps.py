"""Optimizers that are not registered, and yet step parameters in a loop of transactions.

What they change is not rolled back and not brought to a group that joins. Runs on the training
thread; touches optimizers by torch's global hook only.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fft.errors import FftError
from fft.train.rank_state import RankState
from fft.train.reductions import TxnReductions

logger = logging.getLogger(__name__)


class ForeignSteps:
    """Refuses such a step inside a body, and warns of one between two txns. ``close`` ends it."""

    def __init__(self, state: RankState, reductions: TxnReductions) -> None:
        self._state = state
        self._reductions = reductions
        self._thread = threading.get_ident()
        self._has_warned = False
        self._hook = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._hook.remove()

    def _look(self, optimizer: Any, *_: Any) -> None:
        updates, step = self._state.updates, self._state.step
        if threading.get_ident() != self._thread or updates.has(optimizer):
            return
        if self._state.is_outer(optimizer):
            if updates.in_body:
                raise FftError(
                    f"{type(optimizer).__name__}.step() inside `with txn:`, of the outer "
                    "optimizer: it steps the job's parameters with each synchronisation; take the "
                    "call out"
                )
            return
        if step is not None and step.has_extra(optimizer) and not updates.in_body:
            return
        name = type(optimizer).__name__
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        if not stepped.isdisjoint(self._of_the_job()) and updates.in_body:
            raise FftError(
                f"{name}.step() inside `with txn:`, of an optimizer that is not registered, on "
                "parameters of the job: a rolled-back attempt would keep its update. Register it: "
                "manager.register(model, [optimizer, …]); the transaction steps it, after COMMIT"
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s.step() of an optimizer that is not registered: what it updates is not rolled "
                "back with a failed attempt, and its state is not brought to a group that joins; "
                "manager.register(model, [optimizer, …]) makes it part of the transaction",
                name,
            )

    def _of_the_job(self) -> set[torch.Tensor]:
        reduced = (p for r in self._reductions.reducers for p in r.parameters())
        step = self._state.step
        return {*reduced, *(() if step is None else step.parameters())}
