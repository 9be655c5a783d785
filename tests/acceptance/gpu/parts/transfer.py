"""Part 5: transfer of a whole state from device memory to device memory, as a joiner fetches it.

Both ends run here. The copies alone, by pageable and by pinned memory, and the digests are measured
beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import torch
from torch import nn

from fft.train.state.step_state import StepState
from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import nets

LIMIT = timedelta(seconds=60)


def run(pen: Pen, setting: Setting) -> None:
    """Run the whole part."""
    count = (1 << 20) if setting.small else (1 << 28)  # 4 MB, or 1 GiB
    flat = torch.randn(count, device=setting.device)
    with pen.trial("copies"):
        _copies(pen, setting, flat)
    with pen.trial("digests"):
        _digests(pen, setting, flat)
    del flat
    with pen.trial("a state fetched"):
        _fetched(pen, setting)


def _rate(nbytes: int, work: Callable[[], object], device: str, rounds: int = 3) -> float:
    """Return the median rate in MB/s."""
    took = []
    for _ in range(rounds):
        nets.synchronize(device)
        began = time.perf_counter()
        work()
        nets.synchronize(device)
        took.append(time.perf_counter() - began)
    return round(nbytes / median(took) / 1e6)


def _copies(pen: Pen, setting: Setting, flat: torch.Tensor) -> None:
    if setting.device != "cuda":
        pen.absent("copies to and from the host", "needs a GPU")
        return
    host = torch.empty(flat.shape)
    pinned = torch.empty(flat.shape, pin_memory=True)
    pen.measured(
        "copies to and from the host (MB/s)",
        to_host=_rate(flat.nbytes, flat.cpu, setting.device),
        to_pinned=_rate(flat.nbytes, lambda: pinned.copy_(flat, non_blocking=True), "cuda"),
        from_host=_rate(flat.nbytes, lambda: flat.copy_(host), setting.device),
        from_pinned=_rate(flat.nbytes, lambda: flat.copy_(pinned, non_blocking=True), "cuda"),
    )


def _digests(pen: Pen, setting: Setting, flat: torch.Tensor) -> None:
    on_host = flat.cpu()
    same = nets.bits([flat]) == nets.bits([on_host])
    pen.check("the fingerprint on the device is that of the same bits on the host", same)
    changed = flat.clone()
    changed[flat.numel() // 3] += 1
    pen.check("and another one for other bits", nets.bits([changed]) != nets.bits([flat]))
    model = nn.Linear(16, 16).to(setting.device)
    state = StepState([model], [])
    before = state.digest()
    with torch.no_grad():
        model.bias[3] += 1
    pen.check("a digest of the state sees a changed bit", state.digest() != before)
    pen.measured(
        "fingerprint (MB/s)",
        on_device=_rate(flat.nbytes, lambda: nets.bits([flat]), setting.device),
        on_host=_rate(flat.nbytes, lambda: nets.bits([on_host]), setting.device, 1),
    )


def _state(setting: Setting, seed: int) -> tuple[nn.Module, StepState]:
    """Return a model that was trained for a step: weights and two moments of Adam."""
    torch.manual_seed(seed)
    width = 128 if setting.small else 4096
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(setting.device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, width, device=setting.device)).sum().backward()
    optimizer.step()
    return model, StepState([model], [optimizer])


def _fetched(pen: Pen, setting: Setting) -> None:
    from fft.train.state.transfer import StateTransfer

    (_, source), (_, target) = _state(setting, 1), _state(setting, 2)
    sender, receiver = (StateTransfer(None, LIMIT, address="127.0.0.1") for _ in range(2))
    try:
        began = time.perf_counter()
        sender.send_checkpoint([1], 1, source.export(), LIMIT)
        nets.synchronize(setting.device)
        staged = time.perf_counter()
        state = receiver.recv_checkpoint(0, sender.metadata(), 1, LIMIT)
        fetched = time.perf_counter()
        nbytes = target.load(state)
        nets.synchronize(setting.device)
        loaded = time.perf_counter()
        sender.disallow_checkpoint()
    finally:
        sender.shutdown()
        receiver.shutdown()
    same = source.fingerprint() == target.fingerprint()
    pen.check("a state that was fetched has the same bits", same, MB=round(nbytes / 1e6))
    times = {"staged": staged - began, "fetched": fetched - staged, "loaded": loaded - fetched}
    rates = {name: round(nbytes / s / 1e6) for name, s in times.items()}
    pen.measured("a state fetched (MB/s)", **rates, whole=round(nbytes / (loaded - began) / 1e6))
