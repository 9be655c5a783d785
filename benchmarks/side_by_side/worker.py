"""One rank of a job, under FFT or plain torchft: it trains until it is ended, and writes its
events.

``BENCH_PLAN`` (JSON, from `rows.Row.plan`) has its settings, ``BENCH_DIR`` the folder of its
events. The drop-in loop is torchft's; only the class of the manager differs.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

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
from benchmarks.side_by_side.place import meet, memory_kib
from benchmarks.side_by_side.victim import Victim

TUNED_PG = timedelta(seconds=1)
TUNED_MANAGER = timedelta(seconds=2)
TUNED_QUORUM = timedelta(seconds=5)
WARM_COMMITS = 30
"""Steps that are not measured, because of caches and first connections."""


class Meter:
    """A meter of the main thread's time in the manager's calls, beyond the reductions."""

    CALLS = ("start_quorum", "wait_quorum", "should_commit")

    def __init__(self, manager: Manager) -> None:
        self._spent, self._inside = 0, False
        for name in self.CALLS:
            setattr(manager, name, self._timed(getattr(manager, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a nested call
                return call(*args, **kwargs)
            self._inside, began = True, time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self._inside = False
                self._spent += time.perf_counter_ns() - began

        return timed

    def take(self) -> int:
        """Return the nanoseconds since the last call of this method."""
        spent, self._spent = self._spent, 0
        return spent


class Worker:
    """A rank, ready to train."""

    def __init__(self, plan: dict[str, Any], pen: Pen) -> None:
        self.plan, self.pen = plan, pen
        self.group, self.rank = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["RANK"])
        self.victim = Victim(plan, pen, self.group, self.rank)
        self.committed = self.leaving = False
        self._commits = self._measured = self._before = 0
        self.shard_pg: Any = None
        self.pg = ProcessGroupGloo(timeout=TUNED_PG) if plan["tuned"] else ProcessGroupGloo()
        self.manager = self._make_manager()
        self.net = built(plan["pace"], lambda: self.victim.at("backward"))
        self.model = self._spread(self.net)
        self.inner = plain_optimizer(self.net)
        self.inner.register_step_pre_hook(self._before_step)
        self.inner.register_step_post_hook(self._after_step)
        self.meter = Meter(self.manager)
        self.victim.listen(self.manager, self.pg)

    # --- making it ---

    def _make_manager(self) -> Manager:
        kind, arguments = Manager, self._arguments()
        if self.plan["manager"] == "fft":
            import fft

            kind = fft.ManagerFFT
            if self.plan["ranks"] > 1:
                self.shard_pg = arguments["shard_pg"] = fft.ShardProcessGroupGloo()
        elif self.plan["ranks"] > 1:
            self.shard_pg = self._plain_shard_group()
        return kind(
            pg=self.pg,
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=1,
            replica_id=f"bench_{self.group}",
            **arguments,
        )

    def _arguments(self) -> dict[str, Any]:
        if not self.plan["tuned"]:
            return {}
        return {"timeout": TUNED_MANAGER, "quorum_timeout": TUNED_QUORUM}

    def _plain_shard_group(self) -> dist.ProcessGroup:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
        )
        limit = {"timeout": TUNED_PG} if self.plan["tuned"] else {}
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("shard", store),
            rank=self.rank,
            world_size=self.plan["ranks"],
            **limit,
        )
        return dist.group.WORLD

    def _spread(self, net: nn.Module) -> nn.Module:
        """Apply FSDP2 or DDP, as planned, with the reductions across the groups."""
        if self.plan["model"] == "ddp":
            return DistributedDataParallel(self.manager, net)
        if self.plan["model"] == "fsdp":
            is_fft = self.plan["manager"] == "fft"
            mesh = (
                self.manager.shard_mesh() if is_fft else DeviceMesh.from_group(self.shard_pg, "cpu")
            )
            for layer in net.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
            if self.plan["loop"] == "drop-in":
                for module in net.modules():
                    if isinstance(module, FSDPModule):
                        module.set_all_reduce_hook(lambda t: self.manager.allreduce(t).wait())
        return net

    # --- state ---

    def _state(self) -> dict[str, Any]:
        state = {name: value.clone() for name, value in self._local().items()}
        return {"step": self.manager.current_step(), "model": state}

    def _load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, value in self._local().items():
                value.copy_(state["model"][name])
        self.pen.say("recovered", step=state["step"])

    def _local(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the parameters."""
        return {
            name: getattr(p, "to_local", lambda p=p: p)().detach()
            for name, p in self.net.named_parameters()
        }

    # --- the optimizer's step: here it was committed ---

    def _before_step(self, *_: Any) -> None:
        self._before = checksum(self.net)

    def _after_step(self, *_: Any) -> None:
        cost, manager, self.committed = self.meter.take(), self.manager, True
        whole = manager.num_participants() == self.plan["groups"]
        self._commits += whole
        measured = bool(self.plan["steps"]) and whole and self._commits > WARM_COMMITS
        self.pen.say(
            "commit",
            step=manager.current_step(),
            before=self._before,
            after=checksum(self.net),
            cost_ns=cost,
            measured=measured,
            **self._membership(),
        )
        self.victim.count(whole and self._is_watched())
        self._measured += measured
        if measured and self._measured == self.plan["steps"]:
            self.pen.say("enough", kib=memory_kib())

    def _is_watched(self) -> bool:
        """Whether FFT's monitor is watching already; it takes a moment to start."""
        parts = getattr(self.manager, "_parts", None)  # torchft's own manager has none
        monitor = None if parts is None else parts.watchers.monitor
        return monitor is None or bool(monitor.begun.is_set())

    def _membership(self) -> dict[str, Any]:
        manager = self.manager
        return {
            "n": manager.num_participants(),
            "in": manager.is_participating(),
            "q": manager._quorum_id,
        }

    # --- the loops ---

    def train(self) -> None:
        """Train until the process is ended, or has left."""
        if self.plan["loop"] == "transactions":
            self._transactions()
        else:
            self._drop_in()

    def _drop_in(self) -> None:
        optimizer, samples = Optimizer(self.manager, self.inner), Samples()
        draw = torch.Generator().manual_seed(100 + self.group)
        while not self.leaving:
            self.meter.take()
            optimizer.zero_grad()
            self._begin()
            x = samples.x[torch.randint(SAMPLES, (BATCH,), generator=draw)]
            try:
                self._body(x)
                if self.plan["model"] == "plain":
                    grads = [p.grad for p in self.net.parameters()]
                    for work in [self.manager.allreduce(grad) for grad in grads]:
                        work.wait()
                self.pen.say("reduced")
                self.victim.at("after")
            except Exception as error:  # noqa: BLE001 any error means that the step failed
                self.manager.report_error(error)
                if isinstance(self.net, FSDPModule):
                    self.net.reset_iter_state()
            optimizer.step()
            self._end()

    def _transactions(self) -> None:
        import fft

        self.manager.register(self.net, self.inner)
        self.manager.sync_gradients(self.net)
        loader = fft.CursorLoader(Samples(), batch_size=BATCH, seed=5)
        for txn in self.manager.transactions(loader):
            self._begin()
            with txn:
                self._body(txn.batch)
                self.pen.say("reduced")
                self.victim.at("after")
            self._end()

    def _begin(self) -> None:
        self.committed = False
        self.pen.say("begin", step=self.manager.current_step())
        self.victim.begin()

    def _body(self, x: torch.Tensor) -> None:
        self.victim.at("forward")
        loss_of(self.model, x).backward()

    def _end(self) -> None:
        if not self.committed:
            self.pen.say("abort", step=self.manager.current_step(), **self._membership())


def main() -> None:
    """Train, and record how it ended."""
    torch.set_num_threads(1)
    plan, directory = json.loads(os.environ["BENCH_PLAN"]), Path(os.environ["BENCH_DIR"])
    pen = Pen(directory, int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["RANK"]))
    pen.say("start")
    meet(directory, plan["groups"], plan["ranks"])
    worker = Worker(plan, pen)
    if plan["manager"] == "torchft":  # it has no drain, so leave after the step

        def leave(_number: int, _frame: Any) -> None:
            worker.leaving = True

        signal.signal(signal.SIGTERM, leave)
    try:
        worker.train()
        pen.say("exit", why="left")
    except BaseException as error:
        pen.say("exit", why=f"{type(error).__name__}: {error}"[:500])
        raise
    finally:
        with suppress(Exception):
            worker.manager.shutdown()


if __name__ == "__main__":
    main()
