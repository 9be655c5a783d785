"""Part 3: a rollback restores the device's random numbers; nondeterministic kernels are named."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

from fft.train.state.step_state import StepState
from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import nets


def run(pen: Pen, setting: Setting) -> None:
    """Run the whole part."""
    with pen.trial("dropout masks after a restore"):
        _masks(pen, setting)
    with pen.trial("kernels that vary"):
        _varying(pen, setting)
    with pen.trial("a job with dropout"):
        _job(pen, setting)


def _masks(pen: Pen, setting: Setting) -> None:
    torch.manual_seed(1)
    width = nets.width_of(setting.small)
    model = nets.Net(width, dropout=0.5).to(setting.device)
    state = StepState([model], [torch.optim.AdamW(model.parameters())])
    x = nets.batch(width, setting.device)

    def attempt() -> str:
        nets.loss_of(model, x).backward()
        return nets.bits([p.grad for p in model.parameters() if p.grad is not None])

    state.capture()
    first = attempt()
    varies = attempt() != first
    torch.randn(1000, device=setting.device)
    state.restore()
    again = attempt()
    pen.check("gradients under dropout are the same after a restore", again == first)
    pen.check("and another attempt without one has others", varies)
    state.restore()
    drawn = torch.rand(8, device=setting.device)
    state.restore()
    same = torch.equal(drawn, torch.rand(8, device=setting.device))
    pen.check("numbers of the device's generator are the same after a restore", same)


def _operations(device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Return operations that may add in varying order (see torch.use_deterministic_algorithms)."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(1 << 16, generator=generator).to(device)
    places = torch.randint(0, 97, (1 << 16,), generator=generator).to(device)
    image = torch.randn(2, 3, 33, 33, generator=generator).to(device)

    def embedding() -> torch.Tensor:
        table = nn.Embedding(97, 8, device=device)
        table(places).sum(1).mul(values).sum().backward()
        assert table.weight.grad is not None
        return table.weight.grad

    def interpolated() -> torch.Tensor:
        given = image.clone().requires_grad_()
        scaled = nn.functional.interpolate(given, scale_factor=2.3, mode="bilinear")
        scaled.square().sum().backward()
        assert given.grad is not None
        return given.grad

    return {
        "index_add_": lambda: values.new_zeros(97).index_add_(0, places, values),
        "scatter_add_": lambda: values.new_zeros(97).scatter_add_(0, places, values),
        "index_put_ with accumulate": lambda: values.new_zeros(97).index_put_(
            (places,), values, accumulate=True
        ),
        "cumsum": lambda: values.cumsum(0),
        "Embedding backward": embedding,
        "bilinear interpolate backward": interpolated,
        "matmul": lambda: values.view(256, 256) @ values.view(256, 256),
    }


def _varying(pen: Pen, setting: Setting) -> None:
    rounds = 4 if setting.small else 50
    vary, warned = [], []
    for name, operation in _operations(setting.device).items():
        found = set()
        for _ in range(rounds):
            torch.manual_seed(3)
            found.add(nets.bits([operation()]))
        vary += [name] if len(found) > 1 else []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for name, operation in _operations(setting.device).items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                operation()
            if any("deterministic" in str(each.message) for each in caught):
                warned.append(name)
    finally:
        torch.use_deterministic_algorithms(False)
    text = f"varied in {rounds} runs: {', '.join(vary) or 'none'}; "
    pen.measured("kernels that vary", text + f"torch warns of: {', '.join(warned) or 'none'}")


def _job(pen: Pen, setting: Setting) -> None:
    from tests.acceptance.gpu.parts import alone

    steps = 6 if setting.small else 20
    plain, _ = alone.train(setting.device, setting.small, steps, alone.plain_body)
    fails = [(2, "forward"), (4, "backward")]
    faulty, job = alone.train(setting.device, setting.small, steps, alone.plain_body, fails=fails)
    holds = plain == faulty and job.failed == 2
    pen.check(
        "a job with dropout, rolled back twice, has the same bits", holds, f"{plain} {faulty}"
    )
