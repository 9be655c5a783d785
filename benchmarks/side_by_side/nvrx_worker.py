"""One rank under NVIDIA's in-process restart: the same model, step and events as `worker`.

It runs in an environment without FFT and torchft. The model and the number of steps are kept across
restarts, as its documentation advises; gloo's timeout is a second, because nothing else frees a
rank that is blocked in it. Annotations must not be strings here, because the wrapper looks for its
own type in them.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist

from benchmarks.side_by_side.events import Pen
from benchmarks.side_by_side.model import (
    BATCH,
    SAMPLES,
    Samples,
    built,
    checksum,
    loss_of,
    plain_optimizer,
)
from benchmarks.side_by_side.place import measured_group
from benchmarks.side_by_side.victim import Victim

SETTINGS = {
    "monitor_thread_interval": 0.02,
    "monitor_process_interval": 0.05,
    "heartbeat_interval": 0.1,
    "progress_watchdog_interval": 0.05,
    "heartbeat_timeout": 1.0,
    "last_call_wait": 0.05,
    "soft_timeout": 1.0,
    "hard_timeout": 2.0,
    "termination_grace_time": 0.1,
    "barrier_timeout": 30.0,
    "completion_timeout": 30.0,
}
"""Timeouts in seconds, much shorter than its defaults, which are for large clusters."""
PG_TIMEOUT = timedelta(seconds=1)


class Reductions:
    """The reductions that the victim intercepts."""

    def allreduce(self, tensor: torch.Tensor) -> Any:
        """Reduce, with the interface of torchft's managers."""
        return dist.all_reduce(tensor, async_op=True)


class Work:
    """A rank's model and progress, which are kept across restarts."""

    def __init__(self, plan: dict[str, Any], pen: Pen) -> None:
        self.plan, self.pen, self.step = plan, pen, 0
        self.group = int(os.environ["REPLICA_GROUP_ID"])
        self.victim = Victim(plan, pen, self.group, 0)
        self.net = built(plan["pace"], lambda: self.victim.at("backward"))
        self.optimizer = plain_optimizer(self.net)
        self.reductions = Reductions()
        self.victim.listen(self.reductions, None)
        self.samples = Samples()
        self.draw = torch.Generator().manual_seed(100 + self.group)

    def train(self, store: dist.Store, era: int) -> None:
        """Train until the process is ended; this restarts after each fault."""
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(era), store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=PG_TIMEOUT,
        )
        while True:
            self._attempt(era)

    def _attempt(self, era: int) -> None:
        size = dist.get_world_size()
        self.pen.say("begin", step=self.step)
        self.victim.begin()
        ended = {"n": size, "in": True, "q": era}
        try:
            self._reduce(size)
        except BaseException:
            self.pen.say("abort", step=self.step, **ended)
            raise
        before = checksum(self.net)
        self.optimizer.step()
        self.step += 1
        after = checksum(self.net)
        self.pen.say(
            "commit", step=self.step, before=before, after=after, cost_ns=0, measured=False, **ended
        )
        self.victim.count(size == self.plan["groups"])

    def _reduce(self, size: int) -> None:
        self.optimizer.zero_grad()
        self.victim.at("forward")
        x = self.samples.x[torch.randint(SAMPLES, (BATCH,), generator=self.draw)]
        loss_of(self.net, x).backward()
        grads = [p.grad for p in self.net.parameters()]
        for work in [self.reductions.allreduce(grad) for grad in grads]:
            work.wait()
        for grad in grads:
            grad /= size
        self.pen.say("reduced")


def main() -> None:
    """Train under the wrapper."""
    torch.set_num_threads(1)
    with measured_group() as (plan, _, pen):
        wrapped(Work(plan, pen))()


def wrapped(work: Work) -> Callable[[], None]:
    """Return the training function under the wrapper."""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        port + 1,
        int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0",
        multi_tenant=True,
    )
    settings = {name: timedelta(seconds=value) for name, value in SETTINGS.items()}

    @inprocess.Wrapper(store_kwargs={"port": port + 2}, **settings)
    def train(call: inprocess.CallWrapper = None) -> None:
        work.train(store, call.iteration)

    return train


if __name__ == "__main__":
    main()
