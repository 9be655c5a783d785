"""Asynchronous groups, for test_durable_async.py; `fft run` starts it.

``durable_async_script.py STEPS OUT [PLANT]``: group 0, which writes the checkpoint of step 2, then
computes for ever in its first start, and all ranks end as in a power cut when the checkpoint of
step 4 exists. With ``slow N`` as PLANT, group N is only slower than the others, and no rank ends.
With ``dropped`` or ``late`` the checkpoint is as a bug would write it: without the held leases, or
with the base of the group that only learns of the commit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from durable_script import cut
from ranks import LIMIT, WIDTH, Samples
from torch import nn
from torchft import ProcessGroupGloo
from waiting import wait_until

import fft
from fft.checkpoints.files import Manifest
from fft.messages.protocol import Record
from fft.train.checkpoint.checkpointer import Checkpointer
from fft.train.checkpoint.writer import RankWriter

EVERY = 2
"""Inner steps between two synchronizations."""
BEHIND_AT, CUT_AT = 2, 4
"""Steps at which group 0 stays behind and at which all are cut.

The others may advance further without group 0: the bound is 4.
"""
LIMIT_S = LIMIT.total_seconds()


def manager_of(group: str, join_s: float) -> fft.ManagerFFT:
    return fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        spec="async",
        min_replica_size=1,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": join_s, "join_interval": 0.1, "quorum": 60.0},
        config=fft.ManagerConfig(digest="commit", monitor=False),
        # group 0 computes for ever, which it would take for a hang
    )


def drops_leases() -> None:
    """Plant a bug: the holders of leases at the commit lose them, and no other group gets them."""
    manifest = RankWriter._manifest

    def without(self: RankWriter, receipts: Any) -> Manifest:
        made = manifest(self, receipts)
        scopes = {n: at.model_copy(update={"returned": ()}) for n, at in made.scopes.items()}
        return made.model_copy(update={"returned": (), "scopes": scopes})

    RankWriter._manifest = without  # type: ignore[method-assign]


def leaves_it_to_others() -> None:
    """Plant the first part of a bug: a group that is in the commit takes no checkpoint of it."""
    committed = Checkpointer.committed

    def only_before(self: Checkpointer, record: Record, epoch: Record | None) -> None:
        if record.step != CUT_AT:
            committed(self, record, epoch)

    Checkpointer.committed = only_before  # type: ignore[method-assign]


def takes_it_late(manager: fft.ManagerFFT) -> None:
    """Plant the second part: a group that learns of the commit takes it, with its own base."""
    job, checkpointer = manager._parts.job, manager._parts.checkpointer

    def heard() -> Record | None:
        head = job.local.head if job.local is not None else None
        return head if head is not None and (head.kind, head.step) == ("commit", CUT_AT) else None

    wait_until(lambda: heard() is not None, "the commit is heard of", LIMIT_S)
    head = heard()
    assert head is not None and checkpointer is not None
    mine = tuple(at.entry for at in head.standing if at.entry.group == job.peer.group)
    epoch = dataclasses.replace(head, members=mine)
    named = checkpointer._due.due(head, epoch)
    assert named is not None
    as_mine = named._replace(writer=job.peer.group)
    checkpointer._begin(as_mine, head, epoch)


class Body:
    """The additional behavior of a group in its inner steps, besides training."""

    def __init__(self, manager: fft.ManagerFFT, shared: Any, out: Path, plant: str) -> None:
        self.manager, self.shared, self.out, self.plant = manager, shared, out, plant
        self.group = os.environ["REPLICA_GROUP_ID"]
        self.slow = sys.argv[4] if plant == "slow" else None
        self.is_cut = (out / "cut-behind").exists() or plant == "slow"

    def come(self, txn: fft.Transaction) -> None:
        self.say_base(txn.step)
        if self.slow is not None:
            # Stands for the computation of a larger model
            time.sleep(0.4 if self.group == self.slow else 0.03)
        if self.is_cut:
            return
        place = Path(os.environ["FFT_CHECKPOINT"], f"step-{CUT_AT}", "manifest.json")
        if self.group == "0" and txn.step == BEHIND_AT:
            if self.plant == "late":
                takes_it_late(self.manager)
            threading.Event().wait(LIMIT_S)
        if self.group == "1" and txn.step == CUT_AT:
            wait_until(place.exists, "the checkpoint is there", LIMIT_S)
            cut("behind", self.out)

    def meet(self) -> None:
        """Wait until all groups are in the first synchronization of the first start."""
        if not self.is_cut:
            (self.out / f"here-{self.group}").touch()
            number = int(os.environ["NUM_REPLICA_GROUPS"])
            wait_until(lambda: len(list(self.out.glob("here-*"))) == number, "all", LIMIT_S)

    def say_base(self, step: int) -> None:
        """Print what the first step function of this process begins with."""
        path = self.out / f"base-{os.getpid()}.json"
        if path.exists():
            return
        (fragment,) = self.shared.fragments
        own = all(torch.equal(p, fragment.globals[n]) for n, p in fragment.parameters.items())
        told = {"group": self.group, "step": step, "is_own": own, "digest": self.shared.digest()}
        path.with_suffix(".new").write_text(json.dumps(told))
        path.with_suffix(".new").rename(path)


def main() -> None:
    """Train to the end."""
    steps, out = int(sys.argv[1]), Path(sys.argv[2])
    plant = sys.argv[3] if len(sys.argv) > 3 else ""
    group = os.environ["REPLICA_GROUP_ID"]
    torch.set_num_threads(1)
    (out / f"pid-{os.getpid()}").touch()
    if plant == "dropped":
        drops_leases()
    if plant == "late" and not (out / "cut-behind").exists():
        leaves_it_to_others()
    manager = manager_of(group, 0.3 if plant == "slow" else 2.0)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager.register(model, inner)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.3)
    body = Body(manager, fft.DiLoCo(manager, [model], inner, outer, EVERY).shared, out, plant)
    try:
        body.meet()
        loader = fft.CursorLoader(Samples(), batch_size=8, seed=5)
        for txn in manager.transactions(loader, max_steps=steps):
            with txn:
                body.come(txn)
                F.mse_loss(model(txn.batch), txn.batch).backward()
        (out / f"final-{group}.json").write_text(json.dumps(manager.current_step()))
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()
