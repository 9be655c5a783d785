"""Part 1: gloo across the groups, with tensors on the device.

Real jobs of two groups run with and without faults, and their bits are compared. Then a reduction
of two ranks in this process is aborted at random points: it must not write after `quiesce` has
returned.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import nets

LIMIT = timedelta(seconds=30)
BUSY_MS = 10.0
TRANSIENT = [
    {
        "name": "exception",
        "kind": "exception",
        "step": 4,
        "group": 1,
        "rank": 0,
        "phase": "backward",
    },
    {"name": "one-sided", "kind": "one_sided", "step": 8, "group": 0},
    {"name": "cut", "kind": "network_cut", "step": 12, "group": 1, "rank": 0}
    | {"phase": "during_allreduce"},
]
# the exception comes when the group that was killed is back, and the plan is not over before
KILL = [
    {"name": "kill", "kind": "kill", "step": 5, "group": 1, "phase": "during_allreduce"},
    {"name": "after", "kind": "exception", "step": 6, "group": 1, "rank": 0, "phase": "forward"}
    | {"with_groups": 2, "settled_steps": 3},
]


def run(pen: Pen, setting: Setting) -> None:
    """Run the whole part."""
    with pen.trial("nothing of an aborted reduction writes afterwards"):
        _aborted(pen, setting)
    with pen.trial("a reduction's future"):
        _future(pen, setting)
    with pen.trial("two groups, transient faults"):
        _transient(pen, setting)
    with pen.trial("two groups, SIGKILL"):
        from tests.acceptance.gpu.parts import jobs

        ended = jobs.run(setting, "kill", KILL)
        pen.check("two groups, SIGKILL during a reduction", ended.is_whole, ended.in_words())
        jobs.overlap(pen, setting, "SIGKILL, seen by who stays", ended, False)


def _transient(pen: Pen, setting: Setting) -> None:
    from tests.acceptance.gpu.parts import jobs

    plain = jobs.run(setting, "plain", [], steps=18)
    pen.check("two groups without faults", plain.is_whole, plain.in_words())
    faulty = jobs.run(setting, "transient", TRANSIENT, steps=18)
    pen.check("exception, one-sided failure, cut connection", faulty.is_whole, faulty.in_words())
    jobs.overlap(pen, setting, "exception, one-sided failure, cut connection", faulty, True)
    same = bool(plain.bits) and plain.bits == faulty.bits
    pen.check("the same bits with and without these faults", same, f"{plain.bits} {faulty.bits}")


class _Pair:
    """Two ranks of a gloo group in this process."""

    def __init__(self) -> None:
        import torchft

        from fft.train.process_groups import AbortableGroup

        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.groups = [AbortableGroup(torchft.ProcessGroupGloo(LIMIT)) for _ in range(2)]

    def build(self, number: int) -> None:
        """Build both ranks for an epoch."""
        address = f"localhost:{self._store.port}/round{number}"
        with ThreadPoolExecutor(2) as pool:
            made = [
                pool.submit(group.configure, address, str(r), r, 2, timeout=LIMIT)
                for r, group in enumerate(self.groups)
            ]
            for each in made:
                each.result()

    def close(self) -> None:
        """Close both ranks."""
        for group in self.groups:
            group.close()


def _future(pen: Pen, setting: Setting) -> None:
    """Check that a waiter for a reduction's future, such as DDP, finds the result in the tensor."""
    pair, stale = _Pair(), 0
    pair.build(0)
    rounds, count = (4, 1 << 16) if setting.small else (20, 1 << 24)
    for _ in range(rounds):
        tensors = [torch.ones(count, device=setting.device) for _ in pair.groups]
        nets.keep_busy(setting.device, 2)
        works = [_reduce(g, t) for g, t in zip(pair.groups, tensors, strict=True)]
        for work, tensor in zip(works, tensors, strict=True):
            work.get_future().wait()
            stale += not bool((tensor == 2.0).all())
            work.wait()
    pair.close()
    what = "a reduction that was waited for by its future is in the tensor"
    pen.check(what, stale == 0, rounds=2 * rounds, stale=stale)


def _aborted(pen: Pen, setting: Setting) -> None:
    """Abort after a random time; then write into the tensors, and check that the values stay."""
    rounds, count = (8, 1 << 16) if setting.small else (60, 1 << 22)
    pair = _Pair()
    groups = pair.groups
    written, in_flight, quiet_ms = 0, 0, []
    pair.build(0)
    whole_s = _reduction_s(groups, count, setting.device)
    for number in range(rounds):
        pair.build(number + 1)
        tensors = [torch.ones(count, device=setting.device) for _ in groups]
        nets.keep_busy(setting.device, BUSY_MS)  # delays the copies to gloo
        works = [_reduce(g, t) for g, t in zip(groups, tensors, strict=True)]
        time.sleep(whole_s * number / rounds)  # a random point of an undisturbed reduction
        in_flight += not all(work.is_completed() for work in works)
        began = time.perf_counter()
        for group in groups:
            group.abort("planned")
        for group in groups:
            group.quiesce(LIMIT)
        quiet_ms.append(1e3 * (time.perf_counter() - began))
        written += _writes(tensors, setting.device)
    pair.close()
    pen.check(
        "no reduction, copy or kernel of an aborted attempt writes afterwards",
        written == 0,
        rounds=rounds,
        in_flight=in_flight,
        written=written,
        abort_ms=round(median(quiet_ms), 3),
        abort_ms_most=round(max(quiet_ms), 3),
        reduction_ms=round(1e3 * whole_s, 3),
    )
    if setting.device == "cuda":
        what = "most reductions were under way at the abort"
        pen.check(what, 2 * in_flight > rounds, rounds=rounds, in_flight=in_flight)


def _reduction_s(groups: list[Any], count: int, device: str) -> float:
    """Return the median time of a reduction behind a busy device."""
    took = []
    for _ in range(5):
        tensors = [torch.ones(count, device=device) for _ in groups]
        nets.synchronize(device)
        began = time.perf_counter()
        nets.keep_busy(device, BUSY_MS)
        for work in [_reduce(g, t) for g, t in zip(groups, tensors, strict=True)]:
            work.wait()
        nets.synchronize(device)
        took.append(time.perf_counter() - began)
    return median(took)


def _reduce(group: Any, tensor: torch.Tensor) -> Any:
    return group.pg.allreduce([tensor], dist.AllreduceOptions())


def _writes(tensors: list[torch.Tensor], device: str) -> bool:
    """Whether anything writes into them besides this function."""
    if device == "cuda":
        # on a stream of its own, as what is put back may be: no order but that of quiesce()
        with torch.cuda.stream(torch.cuda.Stream()):
            for tensor in tensors:
                tensor.fill_(7.0)
    else:
        for tensor in tensors:
            tensor.fill_(7.0)
    time.sleep(0.02)
    nets.synchronize(device)
    return not all(bool((tensor == 7.0).all()) for tensor in tensors)
