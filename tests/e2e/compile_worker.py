"""One group of a job whose model is compiled, recomputed and autocast; `fft run` starts it.

``compile_worker.py STEPS OUT TORN [compile=BACKEND [whole=1]] [checkpoint=reentrant|free]
[autocast=1]``; with ``whole`` the model is one graph, not one per block.

If TORN is 1, each group fails once in its first step, while the other is in its first compilation,
or without a compilation at its first backward. It leaves its final state in the folder OUT.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from ranks import LIMIT, WIDTH, Samples
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchft import ProcessGroupGloo

import fft

LONG_S = 200.0
MOMENTS_S = (0.0, 0.4)
"""Delays from the start of a compilation to the other group's failure: none, and in its midst."""


class Block(nn.Module):
    """A block that draws random numbers, so that a recomputation must draw the same."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))
        self.run = compute if backend is None else torch.compile(compute, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, self.inner, self.outer)


def compute(x: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """Compute one block."""
    return x + F.dropout(F.gelu(x @ inner), 0.2) @ outer


class Net(nn.Module):
    """Three blocks, recomputed in the backward as ``recompute`` specifies."""

    def __init__(self, recompute: str | None, backend: str | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(backend) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()  # the reentrant form needs an input that requires a gradient
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.last(x)


def wait_for(path: Path) -> None:
    """Wait until another process has created the file."""
    deadline = time.monotonic() + LONG_S
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody made {path}"
        time.sleep(0.01)


def graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    compiled: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return compiled


def main() -> None:
    """Train; count how each failed step function ended."""
    steps, out, torn = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1"
    options = dict(word.split("=") for word in sys.argv[4:])
    group, backend = os.environ["REPLICA_GROUP_ID"], options.get("compile")
    other = str(1 - int(group))
    torch.set_num_threads(1)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 60.0, "ready_window": LONG_S},
        config=fft.ManagerConfig(digest="commit", max_body_failures=100),
    )
    torch.manual_seed(3)
    whole = "whole" in options
    model = Net(options.get("checkpoint"), None if whole else backend)
    run = torch.compile(model, backend=backend) if whole and backend else model
    manager.register(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    manager.sync_gradients(model)
    torch.manual_seed(100 + int(group))

    def at_work(_: object = None) -> None:
        (out / f"at-work-{group}").touch()

    if backend is not None:
        torch._dynamo.callback_handler.register_start_callback(at_work)

    def forward(x: torch.Tensor) -> torch.Tensor:
        cast: AbstractContextManager[object] = nullcontext()
        if "autocast" in options:
            cast = torch.autocast("cpu", dtype=torch.bfloat16)
        with cast:
            y = run(x)
        return F.mse_loss(y.float(), x.detach().mean(1, keepdim=True))

    ended: Counter[str] = Counter()
    unwound_with: list[int] = []
    slowest = 0.0
    for txn in manager.transactions(fft.CursorLoader(Samples(), batch_size=4, seed=5), steps):
        begun = time.monotonic()
        with txn:
            try:
                mine, theirs = out / f"failed-{group}", out / f"failed-{other}"
                if torn and not mine.exists() and (group == "1" or theirs.exists()):
                    wait_for(out / f"at-work-{other}")
                    time.sleep(MOMENTS_S[int(group)])
                    mine.touch()
                    raise RuntimeError("while the other compiles")
                loss = forward(txn.batch.clone())
                if backend is None:
                    at_work()
                loss.backward()
            except BaseException as raised:
                ended[type(raised).__name__] += 1
                if backend is not None and not isinstance(raised, RuntimeError):
                    unwound_with.append(graphs())
                slowest = max(slowest, time.monotonic() - begun)
                raise
    result = {
        "digest": manager.digest(),
        "steps": manager.current_step(),
        "compiled": graphs() if backend is not None else 0,
        "unwound_with": unwound_with,
        "ended": ended,
        "slowest": slowest,
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
        "generator": torch.get_rng_state().sum().item(),
    }
    manager.shutdown()
    (out / f"result-{group}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
