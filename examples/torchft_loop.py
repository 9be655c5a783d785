"""The plain torchft training loop, with either manager: ``--manager fft`` or ``torchft``.

Nothing but the class of the manager differs. With torchft's, a failure that shows on one group
only can commit on one side and not on the other; with FFT's it cannot. To run two groups:

    fft run --groups 2 --ranks 1 --min-groups 2 examples/torchft_loop.py --manager fft --steps 100

torchft's manager needs a lighthouse: ``fft run --lighthouse …``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

LIMIT = timedelta(seconds=30)


def make_manager(which: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Manager:
    """The manager asked for; both take the same arguments."""

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager_class = Manager
    if which == "fft":
        import fft

        manager_class = fft.ManagerFFT
    return manager_class(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        replica_id=f"loop_{os.environ.get('REPLICA_GROUP_ID', '0')}_",
        timeout=LIMIT,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manager", choices=["fft", "torchft"], default="fft")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, args.width), nn.ReLU(), nn.Linear(args.width, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = make_manager(args.manager, model, inner)
    optimizer = Optimizer(manager, inner)
    try:
        train(manager, optimizer, model, args.steps)
    finally:  # also when the group has drained, which ends the process with exit code 0
        print(f"weights {digest(model)} at step {manager.current_step()}")
        manager.shutdown()


def train(manager: Manager, optimizer: Optimizer, model: nn.Module, steps: int) -> None:
    """torchft's loop: the quorum begins with ``zero_grad``, the vote is in ``step``."""
    draw = torch.Generator().manual_seed(int(os.environ.get("REPLICA_GROUP_ID", "0")))
    while manager.current_step() < steps:
        x = torch.randn(32, 16, generator=draw)
        y = x.square().mean(dim=1, keepdim=True)

        optimizer.zero_grad()
        try:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            for work in [manager.allreduce(gradient) for gradient in gradients]:
                work.wait()
        except RuntimeError as error:
            manager.report_error(error)  # so that step() does not commit
        optimizer.step()
    print(f"step {manager.current_step()}: loss {loss.item():.4f}")


def digest(model: nn.Module) -> str:
    """A short name for the values of all weights, to compare the groups by."""
    hasher = hashlib.sha256()
    for parameter in model.parameters():
        hasher.update(parameter.detach().numpy().tobytes())
    return hasher.hexdigest()[:16]


if __name__ == "__main__":
    main()
