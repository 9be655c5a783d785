"""Part 8: errors of the device: out of memory, a failed assert in a kernel, an ECC error.

After the first the step is rolled back and repeated. After the others the process cannot use its
device: it ends, ``fft run`` restarts it, and it fetches the state. An ECC error cannot be provoked,
so its error is raised. Without a GPU this applies to all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting

# comes when the group is back after the last loss, so that the plan does not end before
AFTER = {"name": "after", "kind": "exception", "step": 9, "group": 1, "rank": 0} | {
    "phase": "forward",
    "with_groups": 2,
    "settled_steps": 3,
}


def run(pen: Pen, setting: Setting) -> None:
    """Run the whole part."""
    with pen.trial("an error without a device"):
        _judged(pen)
    with pen.trial("out of memory in backward"):
        _memory(pen, setting)
    with pen.trial("the device is lost"):
        _lost(pen, setting)


def _judged(pen: Pen) -> None:
    from fft.errors import DeviceLost
    from fft.train.guard import accelerator
    from tests.acceptance.gpu.parts.broken import CODES, error_of

    for way in CODES:
        try:
            accelerator.refuse_lost(error_of(way))
            said = ""
        except DeviceLost as lost:
            said = str(lost)
        pen.check(f"an error of a lost device is told from others: {way}", bool(said), said)
    accelerator.refuse_lost(torch.OutOfMemoryError("CUDA out of memory"))


class _Hungry(torch.autograd.Function):
    """A function that returns its input; its backward requests more memory than there is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if grad.device.type == "cuda":
            torch.empty(1 << 45, dtype=torch.uint8, device=grad.device)
        raise torch.OutOfMemoryError("CUDA out of memory (injected)")


def _memory(pen: Pen, setting: Setting) -> None:
    from tests.acceptance.gpu.parts import alone

    failed = []

    def body(job: Any, txn: Any) -> torch.Tensor:
        from tests.acceptance.gpu.parts import nets

        x = txn.batch[0].to(job.device)
        if txn.step == 3 and not failed:
            failed.append(txn.step)
            loss = nets.loss_of(job.model, _Hungry.apply(x.requires_grad_()))
        else:
            loss = nets.loss_of(job.model, x)
        loss.backward()
        return loss

    plain, _ = alone.train(setting.device, setting.small, 6, alone.plain_body)
    faulty, _ = alone.train(setting.device, setting.small, 6, body)
    holds = plain == faulty and failed == [3]
    pen.check("out of memory in backward: the same bits", holds, f"{plain} {faulty} {failed}")


def _lost(pen: Pen, setting: Setting) -> None:
    """Group 1 loses its device twice; the second time as soon as it is back."""
    from tests.acceptance.gpu.parts import jobs
    from tests.acceptance.gpu.parts.broken import CODES

    ended = jobs.run(setting, "lost", [AFTER], breaks="4=assert,5=ecc")
    what = "an assert in a kernel, then an ECC error (injected): the group is back, the bits equal"
    pen.check(what, ended.is_whole, ended.in_words())
    for way, (_, text) in CODES.items():
        lines = [s for s in ended.log.splitlines() if "DeviceLost" in s and text in s]
        said = lines[-1] if lines else ended.log[-300:]
        pen.check(f"{way}: the process said so and ended", bool(lines), said)
