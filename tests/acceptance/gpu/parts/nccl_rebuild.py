"""Part 6: NCCL with one rank: abort in the middle of a collective and rebuild, many times.

Memory, threads and file descriptors are counted after the first rounds and after the last. Findings
are recorded at intervals, and again when the time is over.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import nets
from tests.acceptance.gpu.parts.rings import RINGS, Ring

WARM, LEAST, TOLD_EVERY = 10, 10, 50
"""Rounds before the first count; minimum rounds for a verdict; rounds between records."""
SLACK_MB = 16
"""Tolerance for the device's memory, which NCCL and the allocator take in pieces."""
BUSY_MS = 2.0


def run(pen: Pen, setting: Setting) -> None:
    """Run with each kind of group, which get equal shares of the time."""
    if setting.device == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.init()
    rings = list(RINGS[setting.device].items())
    for number, (name, make) in enumerate(rings):
        with pen.trial(f"one rank, by {name}"):
            ends = time.monotonic() + setting.left() / (len(rings) - number)
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            ring = make(store.port, 0, 1)
            _rounds(pen, name, ring, setting, ends)
            ring.close()


@dataclass
class Reached:
    """The results of the rounds so far."""

    wanted: int
    rounds: int = 0
    right: int = 0
    in_flight: int = 0
    built: list[float] = field(default_factory=list)
    aborted: list[float] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    """Resources held after ``WARM`` rounds."""

    def figures(self) -> dict[str, Any]:
        """Return the figures for a finding."""
        return {
            "rounds": self.rounds,
            "in_flight": self.in_flight,
            "build_ms": round(median(self.built), 2),
            "build_ms_most": round(max(self.built), 2),
            "abort_ms": round(median(self.aborted), 2),
            "abort_ms_most": round(max(self.aborted), 2),
        }


def value_of(record: int, rank: int = 0) -> float:
    """Return the value that a rank reduces in a round, unique to the round and the rank."""
    return 3.0 + 2 * record + 1000 * rank


def _rounds(pen: Pen, name: str, ring: Ring, setting: Setting, ends: float) -> None:
    device = setting.device
    reached = Reached(WARM + (20 if setting.small else 200))
    tensor = torch.empty(1 << (16 if setting.small else 22), device=device)
    for record in range(reached.wanted):
        if time.monotonic() > ends:
            break
        if record == WARM:
            reached.before = _held(device)
        _round(ring, record, tensor, device, reached)
        if reached.rounds % TOLD_EVERY == 0:
            pen.measured(f"by {name}: so far", right=reached.right, **reached.figures())
    _judge(pen, name, device, reached)


def _round(ring: Ring, record: int, tensor: torch.Tensor, device: str, reached: Reached) -> None:
    began = time.perf_counter()
    ring.build(record)
    reached.built.append(1e3 * (time.perf_counter() - began))
    tensor.fill_(value_of(record))
    ring.reduce(tensor).wait()
    reached.right += bool((tensor == value_of(record)).all())
    doomed = torch.ones_like(tensor)
    nets.keep_busy(device, BUSY_MS)  # what is reduced next waits behind it
    work = ring.reduce(doomed)
    reached.in_flight += not work.is_completed()
    began = time.perf_counter()
    ring.abort()
    reached.aborted.append(1e3 * (time.perf_counter() - began))
    ring.quiet()
    reached.rounds += 1


def _judge(pen: Pen, name: str, device: str, reached: Reached) -> None:
    rounds = reached.rounds
    over = "" if rounds == reached.wanted else f"the time was over after {rounds} rounds"
    if over:
        over += f" of {reached.wanted}"
    if rounds < WARM + LEAST:
        pen.check(f"by {name}: enough rounds to judge", False, over, rounds=rounds)
        return
    right = reached.right == rounds
    pen.check(f"by {name}: every group reduces", right, over, right=reached.right, groups=rounds)
    if device == "cuda":
        what = f"by {name}: most reductions were under way at the abort"
        pen.check(what, 2 * reached.in_flight > rounds, groups=rounds, in_flight=reached.in_flight)
    after = _held(device)
    grown = {key: after[key] - count for key, count in reached.before.items()}
    holds = grown["threads"] <= 2 and grown["descriptors"] <= 2 and grown["device_mb"] <= SLACK_MB
    text = f"grown after {WARM} rounds" + (f"; {over}" if over else "")
    pen.check(f"by {name}: nothing is left behind", holds, text, **grown)
    pen.measured(f"by {name}", over, **reached.figures())


def _held(device: str) -> dict[str, int]:
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
