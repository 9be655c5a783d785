"""Part 11: the passes that FFT makes over parameters or gradients in a step, at 1 GB of parameters.

Each is measured alone, beside a copy of as many bytes on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from fft.train.session.step_results import are_finite, sum_of_squares
from fft.train.state.step_state import StepState
from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import nets

LAYERS = 16


def run(pen: Pen, setting: Setting) -> None:
    """Run the whole part."""
    width = 64 if setting.small else 4096
    layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(setting.device)
    optimizer = torch.optim.AdamW(model.parameters())
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    state = StepState([model], [optimizer])
    copies = [torch.empty_like(parameter) for parameter in model.parameters()]

    def copy() -> None:
        torch._foreach_copy_(copies, list(model.parameters()))

    def roll_back() -> None:
        state.restore()
        state.capture()

    state.capture()
    passes: dict[str, Callable[[], object]] = {
        "a copy on the device": copy,
        "NaN pass: norm of the gradients": lambda: float(sum_of_squares(gradients)),
        "NaN pass: exact, if the norm overflows": lambda: are_finite(gradients),
        "fingerprint of the parameters": lambda: nets.bits(model.parameters()),
        "fingerprint of the state, with AdamW's moments": state.fingerprint,
        "capture before a step": state.capture,
        "restore and capture after a failed step": roll_back,
    }
    took = {}
    for name, work in passes.items():
        with pen.trial(name):
            took[name] = _ms(work, setting)
    megabytes = sum(p.nbytes for p in model.parameters()) / 1e6
    pen.measured("passes (ms)", parameters_mb=round(megabytes), **took)
    with torch.no_grad():
        gradients[-1][-1, -1] = float("nan")
    seen = not are_finite(gradients) and not torch.isfinite(sum_of_squares(gradients))
    pen.check("both NaN passes see one NaN in the last element", bool(seen))


def _ms(work: Callable[[], object], setting: Setting) -> float:
    """Return the median time of a call, without the first."""
    took = []
    for _ in range(3 if setting.small else 11):
        nets.synchronize(setting.device)
        began = time.perf_counter()
        work()
        nets.synchronize(setting.device)
        took.append(1e3 * (time.perf_counter() - began))
    return round(median(took[1:]), 3)
