"""A measurement of the steps' waits for input with 10 ms of loading per sample, and of the copies.

The job has one group on a bus in memory, with and without workers; the waits are those of its
trace, as ``fft report`` shows them. It prints figures and asserts nothing. Run with fft installed:
``python benchmarks/loading.py [steps]``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchft import ProcessGroupGloo

import fft
from fft.bus.tcpserver import host_store
from fft.trace.report import input_wait
from fft.train.data.batch_copy import copied
from fft.train.data.source import Due

BATCH, SAMPLE_MS, STEP_MS = 4, 10, 30
"""Two workers deliver an item every 20 ms."""


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose samples take time to load, as files do."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE_MS / 1e3)
        return torch.randn(16)


def job(workers: int, steps: int, traces: Path) -> float:
    """Train; return the seconds of a step, without the first."""
    store, port = host_store()
    model = nn.Linear(16, 1)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id="0",
        store_addr="127.0.0.1",
        store_port=port,
        rank=0,
        world_size=1,
        init_sync=False,
        bus=f"memory://loading-{workers}",
        trace_dir=traces,
    )
    manager.register(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    manager.sync_gradients(model)
    loader = fft.CursorLoader(Slow(), BATCH, num_workers=workers)
    began = 0.0
    for txn in manager.transactions(loader, max_steps=steps + 1):
        with txn:
            # Stands for an accelerator's work, which leaves the cores free
            time.sleep(STEP_MS / 1e3)
            model(txn.batch).square().mean().backward()
        began = began or time.perf_counter()
    took = (time.perf_counter() - began) / steps
    manager.shutdown()
    del store
    return took


def call_ms(function: Callable[[], object], rounds: int = 50) -> str:
    """Return the median and the minimum time of some calls."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        found.append((time.perf_counter() - began) * 1e3)
    return f"{statistics.median(found):.3f} ms, at least {min(found):.3f}"


def main() -> None:
    """Run all measurements."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(f"a body of {STEP_MS} ms, {BATCH} samples of {SAMPLE_MS} ms each:")
    for workers in (0, 2):
        with tempfile.TemporaryDirectory() as directory:
            took = job(workers, steps, Path(directory)) * 1e3
            waits = input_wait(directory)
        print(f"  {workers} workers: step {took:.1f} ms = {took / STEP_MS:.2f} × body; {waits}")
    small = {"x": torch.randn(8, 512), "ids": torch.zeros(8, 512, dtype=torch.int64)}
    parts: list[Any] = [torch.randn(2**20 // 4) for _ in range(10)]
    for name, batch in (
        ("one tensor of 10 MB", torch.randn(10 * 2**20 // 4)),
        ("10 of 1 MB", parts),
    ):
        print(f"  copy of {name}: {call_ms(lambda batch=batch: copied(batch))}")
    print(f"  copy of 48 kB: {call_ms(lambda: copied(small))}")
    quick = fft.CursorLoader(torch.utils.data.TensorDataset(torch.zeros(4096, 4)), 1, shuffle=False)
    numbers = iter(range(4000))
    one = call_ms(lambda: quick.take(Due(n := next(numbers), n, 1)), 2000)
    print(f"  an item of nothing on the main thread, generators seeded and put back: {one}")


if __name__ == "__main__":
    main()
