"""The cost of a durable checkpoint, or of a copy in memory, for the steps beside it.

``python -m benchmarks.checkpoint_stall`` measures it, with ``--memory`` that of copies in shared
memory. One run of one job of one process alternates
blocks of `BLOCK` steps with a checkpoint every `EVERY` steps and blocks without. The stall of a
checkpoint is the additional time of the `EVERY` steps in which it is taken and written, compared
with the steps at the same place in the next block. A step takes 50 ms, and the state is 100 MB.
``wait``: the step is a wait, as for a device. ``busy``: it computes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch
import torchft
from torch import nn

import fft
from fft.checkpoints.plan import MemoryPlan

STEP_S = 0.05
STATE_MB = 100
EVERY = 10
BLOCK = 40
PAIRS = 12
"""Number of pairs of blocks, after one pair that is not counted."""
AFTER = EVERY // 2
"""Steps from a checkpoint to the start of a block, so that the last one is written within its
block."""


class Model(nn.Module):
    """A model with much state, of which little is trained: a step must not be a copy of the
    memory."""

    def __init__(self, state_mb: int) -> None:
        super().__init__()
        self.trained = nn.Linear(64, 64)
        count = state_mb * 10**6 // 4 // 25
        self.rest = nn.ParameterList(
            nn.Parameter(torch.randn(count), requires_grad=False) for _ in range(25)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(x)


def compute(until: float) -> None:
    """Keep one core busy, as most steps on a CPU do: in operators, without Python's lock."""
    matrix = torch.randn(256, 256)
    while time.monotonic() < until:
        matrix = torch.tanh(matrix @ matrix)


def peak_of(process: psutil.Process, ended: threading.Event, found: list[int]) -> None:
    """Watch the memory of this process."""
    while not ended.wait(0.005):
        found.append(process.memory_info().rss)


def switch_of(manager: fft.ManagerFFT, is_memory: bool) -> Callable[[bool], None]:
    """Return a function that makes checkpoints, or copies in memory, due or not."""
    if is_memory:
        copies = manager._parts.memory
        assert copies is not None

        def copy(is_on: bool) -> None:
            copies._plan = replace(copies._plan, every=EVERY if is_on else 10**9)

        return copy
    checkpointer = manager._parts.checkpointer
    assert checkpointer is not None
    schedule, plan = checkpointer._due, checkpointer.plan

    def take(is_on: bool) -> None:
        schedule._plan = plan if is_on else replace(plan, every=10**9)

    return take


def measure(kind: str, place: Path, traces: Path, is_memory: bool) -> dict[str, object]:
    """Train, and compare the blocks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if is_memory:
        os.environ.update(MemoryPlan(place, EVERY, 10**12).to_env())
    manager = fft.ManagerFFT(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        trace_dir=traces,
        config=fft.ManagerConfig(check_replicas=0),
        checkpoint=None if is_memory else fft.Checkpointing(place, every=EVERY, keep=2),
    )
    switch = switch_of(manager, is_memory)
    model = Model(STATE_MB)
    trained = [p for p in model.parameters() if p.requires_grad]
    manager.register(model, torch.optim.SGD(trained, lr=1e-3))
    manager.sync_gradients(model)
    at, memory, ended = [time.monotonic()], list[int](), threading.Event()
    watch = threading.Thread(target=peak_of, args=(psutil.Process(), ended, memory))
    before = psutil.Process().memory_info().rss
    watch.start()
    items = [torch.randn(8, 64) for _ in range(AFTER + BLOCK * (1 + 2 * PAIRS))]
    for txn in manager.transactions(items):
        with txn:
            switch((txn.step - AFTER) // BLOCK % 2 == 1)
            until = time.monotonic() + STEP_S
            model(txn.batch).square().mean().backward()
            if kind == "busy":
                compute(until)
            time.sleep(max(0.0, until - time.monotonic()))
        at.append(time.monotonic())
    manager.shutdown()
    ended.set()
    watch.join()
    took = [b - a for a, b in itertools.pairwise(at)]
    stalls = [
        sum(took[i : i + EVERY]) - sum(took[i + BLOCK : i + BLOCK + EVERY])
        for block in range(AFTER + BLOCK, len(took), 2 * BLOCK)
        for i in range(block, block + BLOCK, EVERY)
    ]
    step = statistics.median(took)
    stall = statistics.median(stalls)
    return {
        "kind": kind,
        "step_ms": round(step * 1e3, 2),
        "checkpoints": len(stalls),
        "stall_ms": round(stall * 1e3, 2),
        "stall_mean_ms": round(statistics.mean(stalls) * 1e3, 2),
        "stall_range_ms": [round(min(stalls) * 1e3, 2), round(max(stalls) * 1e3, 2)],
        "stall_of_a_step": round(stall / step, 4),
        "interval_for_1_percent": round(100 * stall / step),
        "memory_added_mb": round((max(memory) - before) / 1e6),
        **traced(traces),
    }


def traced(traces: Path) -> dict[str, float]:
    """Return the figures in the job's own traces: their number, and medians of the main thread's
    share, copy, write."""
    found: dict[str, list[float]] = {}
    names = ("checkpoint", "checkpoint_skipped", "checkpoint_failed", "memory_copy")
    counts = dict.fromkeys(names, 0)
    for path in traces.glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line.get("note") in counts:
                counts[line["note"]] += 1
            if str(line.get("note", "")).startswith(("checkpoint", "memory_copy")):
                for name, value in line["data"].items():
                    if name.endswith("_ms"):
                        found.setdefault(f"{line['note']}.{name}", []).append(value)
    medians = {name: round(statistics.median(values), 2) for name, values in sorted(found.items())}
    return {**counts, **medians}


def main() -> None:
    """Measure, and print one JSON object per kind of step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--memory", action="store_true", help="measure copies in shared memory")
    args = parser.parse_args()
    place = Path("/dev/shm") if args.memory else args.place
    for kind in ("wait", "busy"):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            places = Path(folder, "checkpoints"), Path(folder, "traces")
            found = measure(kind, *places, args.memory)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
