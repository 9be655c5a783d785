"""Part 6: NCCL with one rank: abort in the middle of a collective, build anew, many times.

Memory, threads and file descriptors are counted after the first rounds and after the last.
"""

from __future__ import annotations

import gc
import os
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.findings import Pen
from benchmarks.gpu.part import Setting
from benchmarks.gpu.parts import nets
from benchmarks.gpu.parts.rings import RINGS, Ring

WARM = 10
SLACK_MB = 16
"""Of the device's memory: NCCL and the allocator take it in pieces."""


def run(pen: Pen, setting: Setting) -> None:
    """With each sort of group."""
    if setting.device == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.init()
    for name, make in RINGS[setting.device].items():
        with pen.trial(f"one rank, by {name}"):
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            ring = make(store.port, 0, 1)
            _rounds(pen, name, ring, setting)
            ring.close()


def _rounds(pen: Pen, name: str, ring: Ring, setting: Setting) -> None:
    count, device = 20 if setting.small else 200, setting.device
    tensor = torch.ones(1 << 22, device=device)
    before: dict[str, int] = {}
    built, aborted, right = [], [], 0
    for record in range(count + WARM):
        if record == WARM:
            before = _held(device)
        began = time.perf_counter()
        ring.build(record)
        built.append(1e3 * (time.perf_counter() - began))
        tensor.fill_(1.0)
        ring.reduce(tensor).wait()
        right += float(tensor[0]) == 1.0
        nets.keep_busy(device, 4_000_000)  # what is reduced next waits behind it
        ring.reduce(tensor)
        began = time.perf_counter()
        ring.abort()
        aborted.append(1e3 * (time.perf_counter() - began))
        ring.quiet()
    after = _held(device)
    grown = {key: after[key] - before[key] for key in before}
    pen.check(f"by {name}: every group reduces", right == count + WARM, groups=count + WARM)
    holds = grown["threads"] <= 2 and grown["descriptors"] <= 2 and grown["device_mb"] <= SLACK_MB
    pen.check(f"by {name}: nothing is left behind", holds, f"grown after {WARM} rounds", **grown)
    pen.measured(
        f"by {name}",
        build_ms=round(median(built), 2),
        build_ms_most=round(max(built), 2),
        abort_ms=round(median(aborted), 2),
        abort_ms_most=round(max(aborted), 2),
    )


def _held(device: str) -> dict[str, Any]:
    gc.collect()
    nets.synchronize(device)
    free, total = torch.cuda.mem_get_info() if device == "cuda" else (0, 0)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "device_mb": (total - free) >> 20,
        "resident_mb": resident >> 20,
    }
