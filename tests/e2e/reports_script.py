"""A job whose model, optimizer or process does what public bug reports describe, for
test_reported.py.

``reports_script.py CASE OUT`` leaves the digest of the final state of each group.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import FakeQuantizeBase, get_default_qat_qconfig, prepare_qat

import fft


class Scaled(nn.Linear):
    """A layer with a history outside of its buffers, as delayed scaling in FP8 has."""

    history: tuple[float, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Divide by the largest of the last values."""
        scale = max(self.history, default=1.0)
        last = float(self.weight.detach().abs().max())
        self.history = (*self.history[-3:], 1.0 + len(self.history) + last)
        return super().forward(x) / scale

    def get_extra_state(self) -> Any:
        """See torch."""
        return list(self.history)

    def set_extra_state(self, state: Any) -> None:
        """See torch."""
        self.history = tuple(state)


class Cached(nn.Module):
    """A module that registers its cache in the first forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale by the cache."""
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.linspace(0.9, 1.1, 8), persistent=False)
        return x * self.cache


def main() -> None:
    """Train for 16 steps."""
    case, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    manager = fft.ManagerFFT(min_replica_size=2)
    torch.manual_seed(0)
    layer = Scaled(8, 8) if case == "extra_state" else nn.Linear(8, 8)
    model = nn.Sequential(layer, Cached() if case == "cache" else nn.Tanh(), nn.Linear(8, 1))
    if case == "observers":
        model.qconfig = get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        prepare_qat(model.train(), inplace=True)
        # statistics of the activations are those of each group
        for name, module in model.named_modules():
            if isinstance(module, FakeQuantizeBase) and "weight" not in name:
                module.fake_quant_enabled[0] = 0
    data = torch.utils.data.TensorDataset(torch.randn(1024, 8), torch.randn(1024, 1))
    added = case.startswith("added_group")
    optimizer = torch.optim.Adam((model[2] if added else model).parameters(), 1e-2)
    if case == "default_device":
        torch.set_default_device("meta")  # a tensor of FFT's own that lands there has no data
    if added:
        model[0].requires_grad_(False)
    if case == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    is_lbfgs = isinstance(optimizer, torch.optim.LBFGS)
    manager.register(
        model, [] if is_lbfgs else optimizer, extra={"o": optimizer} if is_lbfgs else {}
    )
    manager.sync_gradients(model)
    loader = fft.CursorLoader(data, batch_size=8, num_workers=1)
    for txn in manager.transactions(loader, max_steps=16):
        with txn:
            x, y = txn.batch
            if case == "added_group_in_step" and txn.step == 4:
                optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 1e-3})

            def closure(x: Any = x, y: Any = y, txn: Any = txn) -> Any:
                model.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return txn.mean(loss.detach())

            optimizer.step(closure) if is_lbfgs else closure()
        if case == "added_group" and txn.committed and txn.step == 3:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 1e-3})
    hasher = hashlib.sha256(repr([*model.state_dict()]).encode())
    hasher.update(repr(getattr(layer, "history", None)).encode())
    for tensor in model.parameters():
        hasher.update(tensor.detach().numpy().data)
    (out / os.environ["REPLICA_GROUP_ID"]).write_text(hasher.hexdigest())


if __name__ == "__main__":
    main()
