"""A rank of a small job whose script is wrong: ``mistake_worker.py WHERE STEPS``.

``WHERE`` is the place of the mistake: ``start``, ``body``, ``body1`` (in group 1 only), ``data``,
``after`` the loop, or ``none``. With ``stop`` group 1 alone decides to stop early; with ``any`` all
agree on that; with ``term`` a handler of the SIGTERM that group 1 sends to `fft run` decides it.
`fft run` starts it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

if sys.argv[1] == "start":
    undefined_name  # type: ignore[name-defined]  # noqa: B018, F821

import torch
from torch import nn
from torchft import ProcessGroupGloo

import fft

WHERE, STEPS, GROUP = sys.argv[1], int(sys.argv[2]), os.environ.get("REPLICA_GROUP_ID", "0")
BAD_STEP, BAD_SAMPLE = 2, 5


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """A data set with one item that cannot be loaded."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if WHERE == "data" and index == BAD_SAMPLE:
            raise KeyError("no such sample")
        return torch.full((4,), float(index))


def loss_of(model: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
    """Compute the loss, with a mistake.

    If others train on meanwhile, a step is as long as a real one.
    """
    if WHERE == "body1":
        time.sleep(0.05)
    if step >= BAD_STEP and (WHERE == "body" or (WHERE == "body1" and GROUP == "1")):
        return model(x).no_such_method()
    return model(x).square().mean()


def is_stopping(txn: fft.Transaction, requests: list[int]) -> bool:
    """Return whether this rank wants to stop after the step, and request it in group 1 for once."""
    is_due = GROUP == "1" and txn.step == BAD_STEP
    if WHERE == "any":
        return txn.any(is_due)
    if WHERE == "term" and is_due and not requests:
        os.kill(os.getppid(), signal.SIGTERM)
        while not requests:
            signal.sigtimedwait([], 0.01)
    return bool(requests) or (WHERE == "stop" and is_due)


def main() -> None:
    """Train."""
    requests: list[int] = []
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=GROUP,
        init_sync=False,
        timeouts={"join_window": 60.0},  # on a busy machine a group may start late
    )
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    manager.register(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    manager.sync_gradients(model)
    if WHERE == "term":
        signal.signal(signal.SIGTERM, lambda number, _: requests.append(number))
    try:
        loader = fft.CursorLoader(Numbers(), batch_size=2)
        for txn in manager.transactions(loader, max_steps=STEPS):
            with txn:
                loss_of(model, txn.batch, txn.step).backward()
                stops = is_stopping(txn, requests)
            if txn.committed and stops:
                manager.stop()
    finally:
        manager.shutdown()
    if WHERE == "after":
        raise ValueError("what comes after the loop is wrong")
    print(f"done at step {manager.current_step()}: {manager.digest()}")


if __name__ == "__main__":
    main()
