"""Part 4: mixed precision with a scaler, ``torch.compile``, CUDA graphs of the step function.

Each is trained without and with rollbacks, and the bits are compared. Reductions stay outside of a
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import nets

STEPS = 7


def run(pen: Pen, setting: Setting) -> None:
    """Run the whole part; graphs on a GPU only."""
    with pen.trial("AMP with a scaler"):
        _amp(pen, setting)
    if setting.device == "cuda":
        for place in ("replay", "capture"):
            with pen.trial(f"CUDA graph, rolled back in a {place}"):
                _graph(pen, setting, place)
    else:
        pen.absent("CUDA graphs", "needs a GPU")
    with pen.trial("torch.compile"):
        _compiled(pen, setting)


def _compare(
    pen: Pen,
    setting: Setting,
    what: str,
    body: Callable[[], Callable[[Any, Any], torch.Tensor]],
    prepare: Callable[[Any], None],
    fails: Collection[tuple[int, str]],
) -> None:
    """Compare both runs. ``body`` creates a step function, since its captures belong to one job."""
    from tests.acceptance.gpu.parts import alone

    plain, _ = alone.train(setting.device, setting.small, STEPS, body(), prepare)
    faulty, job = alone.train(setting.device, setting.small, STEPS, body(), prepare, fails)
    # if a scaler skips every step, the states are equal whatever a rollback does
    applied = max((int(each["step"]) for each in job.optimizer.state.values()), default=0)
    holds = plain == faulty and job.failed == len(fails) and applied > 0
    text = f"{plain} {faulty}, {job.failed} rollbacks"
    pen.check(what, holds, text, steps=STEPS, applied=applied)


def _amp(pen: Pen, setting: Setting) -> None:

    kind = torch.float16 if setting.device == "cuda" else torch.bfloat16

    def body(job: Any, txn: Any) -> torch.Tensor:
        with torch.autocast(job.device, dtype=kind):
            loss = nets.loss_of(job.model, txn.batch[0].to(job.device))
        job.at(txn.step, "forward")
        job.scaler.scale(loss).backward()
        job.at(txn.step, "backward")
        return loss

    def prepare(job: Any) -> None:  # a scale that overflows at first: steps are skipped, too
        scale = 2.0**20 if kind is torch.float16 else 2.0**10
        job.scaler = torch.amp.GradScaler(job.device, init_scale=scale, growth_interval=3)

    fails = [(2, "forward"), (4, "backward")]
    _compare(pen, setting, "AMP with a scaler: the same bits", lambda: body, prepare, fails)


def _compiled(pen: Pen, setting: Setting) -> None:

    def make() -> Callable[[Any, Any], torch.Tensor]:
        torch.compiler.reset()
        loss_of = torch.compile(nets.loss_of)

        def body(job: Any, txn: Any) -> torch.Tensor:
            loss: torch.Tensor = loss_of(job.model, txn.batch[0].to(job.device))
            job.at(txn.step, "forward")
            loss.backward()
            job.at(txn.step, "backward")
            return loss

        return body

    fails = [(0, "forward"), (3, "forward"), (5, "backward")]
    what = "torch.compile, with dropout: the same bits"
    _compare(pen, setting, what, make, lambda job: None, fails)


class _Graphed:
    """A step function whose forward and backward are one graph; reduced tensors are outside of
    it."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._x = self._loss = torch.empty(0)
        self._grads: list[torch.Tensor] = []

    def __call__(self, job: Any, txn: Any) -> torch.Tensor:
        x = txn.batch[0].to(job.device)
        if self._graph is None:
            self._capture(job, txn, x)
        self._x.copy_(x)
        self._graph.replay()
        job.at(txn.step, "replay")
        for parameter, grad in zip(job.model.parameters(), self._grads, strict=True):
            # The graph writes into its own tensors; FFT may drop these
            parameter.grad = grad.clone()
            job.manager.allreduce(parameter.grad)
        return self._loss

    def _capture(self, job: Any, txn: Any, x: torch.Tensor) -> None:
        self._x = x.clone()
        parameters = list(job.model.parameters())
        side = torch.cuda.Stream()  # torch.cuda.graph's documentation: warm up on another stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                torch.autograd.grad(nets.loss_of(job.model, self._x), parameters)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = nets.loss_of(job.model, self._x)
            job.at(txn.step, "capture")
            self._grads = list(torch.autograd.grad(loss, parameters))
        self._loss, self._graph = loss, graph


def _graph(pen: Pen, setting: Setting, place: str) -> None:
    def prepare(job: Any) -> None:
        job.synced = False

    fails = [(0, "capture")] if place == "capture" else [(3, "replay"), (5, "replay")]
    what = f"CUDA graph with dropout, rolled back in a {place}: the same bits"
    _compare(pen, setting, what, _Graphed, prepare, fails)
