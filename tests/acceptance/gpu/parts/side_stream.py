"""Part 2: a user's own stream is still busy when the step function ends, and the vote waits for it.

It also measures the cost of that wait, beside a wait for the whole device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch

from fft.train.guard import accelerator
from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import Setting
from tests.acceptance.gpu.parts import nets

LIMIT = timedelta(seconds=20)
BUSY_MS = 50.0
"""Time for which a stream is kept busy: longer than everything that the process does meanwhile."""


def run(pen: Pen, setting: Setting) -> None:
    """Run the whole part; on a GPU only."""
    torch.cuda.init()
    with pen.trial("the wait sees every stream"):
        _every_stream(pen)
    with pen.trial("the wait has a limit"):
        _limit(pen)
    with pen.trial("what the wait costs"):
        _cost(pen, setting)
    with pen.trial("a transaction waits for a side stream"):
        _transaction(pen, setting)
    with pen.trial("a rollback waits for a side stream"):
        _rollback(pen, setting)


def _streams() -> dict[str, Any]:
    least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    return {
        "default": torch.cuda.default_stream(),
        "of a pool": torch.cuda.Stream(),
        **{f"priority {p}": torch.cuda.Stream(priority=p) for p in range(greatest, least + 1)},
    }


def _every_stream(pen: Pen) -> None:
    for name, stream in _streams().items():
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            nets.keep_busy("cuda", BUSY_MS)
        end = stream.record_event()
        before = end.query()
        busy = accelerator.wait(LIMIT)
        what = f"the wait sees a busy stream: {name}"
        pen.check(what, busy >= 1 and end.query() and not before, busy_streams=busy)


def _limit(pen: Pen) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        nets.keep_busy("cuda", 2 * BUSY_MS)
    began = time.perf_counter()
    try:
        accelerator.wait(timedelta(milliseconds=5))
        said = ""
    except TimeoutError as error:
        said = str(error)
    took = 1e3 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    pen.check("a stream that does not end is said after the limit", bool(said), said, ms=took)


def _cost(pen: Pen, setting: Setting) -> None:
    count = 20 if setting.small else 300
    ways: dict[str, Callable[[], object]] = {
        "stream by stream": lambda: accelerator.wait(LIMIT),
        "whole device": torch.cuda.synchronize,
        "current stream": lambda: torch.cuda.current_stream().synchronize(),
    }
    for state, busy_ms in (("idle", 0.0), ("busy for 5 ms", 5.0)):
        found = {}
        for name, wait in ways.items():
            took = []
            for _ in range(count):
                torch.cuda.synchronize()
                began = time.perf_counter()
                if busy_ms:
                    nets.keep_busy("cuda", busy_ms)
                wait()
                took.append(1e3 * (time.perf_counter() - began))
            found[f"{name} (ms)"] = round(median(took), 4)
        pen.measured(f"a wait for the device, {state}", **found)


def _transaction(pen: Pen, setting: Setting) -> None:
    from tests.acceptance.gpu.parts import alone

    side, ends, at_vote = torch.cuda.Stream(), [], []

    def body(job: Any, txn: Any) -> torch.Tensor:
        loss = alone.plain_body(job, txn)
        with torch.cuda.stream(side):
            nets.keep_busy("cuda", BUSY_MS)
        ends.append(side.record_event())
        at_vote.append(ends[-1].query())
        return loss

    at_commit: list[bool] = []

    def prepare(job: Any) -> None:
        # the optimizer steps after COMMIT, so the vote was before
        job.optimizer.register_step_pre_hook(lambda *_: at_commit.append(ends[-1].query()))

    alone.train(setting.device, setting.small, 5, body, prepare)
    holds = len(at_commit) == 5 and all(at_commit) and not any(at_vote)
    in_flight = at_vote.count(False)
    what = "the vote waits for a side stream"
    pen.check(what, holds, f"{at_vote} {at_commit}", steps=5, in_flight=in_flight)


def _rollback(pen: Pen, setting: Setting) -> None:
    """A side stream of a failed attempt writes into a buffer after the rollback began."""
    from tests.acceptance.gpu.parts import alone

    side, in_flight = torch.cuda.Stream(), []

    def body(job: Any, txn: Any) -> torch.Tensor:
        norm = job.model.layers[1]
        if txn.step != 2 or job.failed:
            return alone.plain_body(job, txn)
        with torch.cuda.stream(side):
            nets.keep_busy("cuda", 2 * BUSY_MS)
            norm.running_mean.fill_(99.0)
        try:
            return alone.plain_body(job, txn)
        except alone.Planned:
            in_flight.append(not side.query())
            raise

    plain, _ = alone.train(setting.device, setting.small, 5, alone.plain_body)
    faulty, job = alone.train(setting.device, setting.small, 5, body, fails=[(2, "forward")])
    nets.synchronize(setting.device)
    holds = plain == faulty and job.failed == 1 and in_flight == [True]
    what = "a side stream of a failed attempt changes nothing"
    pen.check(what, holds, f"{plain} {faulty}", in_flight=sum(in_flight))
