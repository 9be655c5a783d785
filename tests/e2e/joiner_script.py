"""A job for test_joiners.py that changes what a joiner fetches, in steps or between two steps.

`fft run` starts it. The first argument is ``rate`` (a rate from ``txn.progress``), ``clamp`` (the
weights), ``thaw`` (the first layer is trained after step 4), ``late_sync`` (as ``thaw``, with
``sync_gradients`` after the layer is frozen), ``always`` (as ``late_sync``, where a joiner computes
while it fetches) or ``fsdp`` (as ``thaw``, with FSDP2). The second is a folder, where each rank
leaves its final state. Group 1 is killed at step 6, unless the folder has ``killed`` at the start,
and group 0 waits for its return. With a layer that is thawed all samples are equal, so the weights
do not depend on the groups that take part in a step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torchft
from torch.distributed.fsdp import fully_shard
from waiting import is_true_within

import fft
from fft.train.state.local_tensors import local_of

KILLED_AT, STEPS = 6, 30


def main(kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    group, killed, back = os.environ["REPLICA_GROUP_ID"], folder / "killed", folder / "back"
    thaws = kind not in ("rate", "clamp")
    manager = fft.ManagerFFT(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2 if thaws else 1,
        shard_pg=fft.ShardProcessGroupGloo() if kind == "fsdp" else None,
        config=fft.ManagerConfig(
            digest="commit", learners="always" if kind == "always" else "auto"
        ),
    )
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(480, 8), torch.randn(480, 1))
    model: torch.nn.Module = torch.nn.Linear(8, 1)
    if thaws:
        data = torch.utils.data.TensorDataset(*(t[:1].expand(480, -1) for t in data.tensors))
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), model)
    if kind == "fsdp":
        fully_shard(model, mesh=manager.shard_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if thaws else 0.3)
    manager.register(model, optimizer)
    if kind in ("late_sync", "always"):
        model.get_submodule("0").requires_grad_(False)
    manager.sync_gradients(model)
    if thaws:
        model.get_submodule("0").requires_grad_(False)
    loader = fft.CursorLoader(data, batch_size=8, data_epochs=1)
    for txn in manager.transactions(loader, max_steps=STEPS):
        with txn:
            x, y = txn.batch
            with torch.no_grad():
                for parameter in model.parameters() if kind == "clamp" else ():
                    parameter.clamp_(-0.1, 0.1)
            if kind == "rate":
                optimizer.param_groups[0]["lr"] = 0.3 * (1 - txn.progress)
            torch.nn.functional.mse_loss(model(x), y).backward()
            is_victim = group == "1" and os.environ["RANK"] == "0"
            if txn.step == KILLED_AT and is_victim and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if group == "1" and killed.exists() and txn.committed:  # not while it rehearses
            back.touch()
        if thaws and txn.committed and txn.step == 4:
            model.get_submodule("0").requires_grad_(True)
        if group == "0" and killed.exists():
            # a commit lets the group in, so each step waits for its part of a minute
            is_true_within(back.exists, 60 / (STEPS - KILLED_AT))
    weights = [local_of(parameter).tolist() for parameter in model.parameters()]
    end = folder / f"end-{group}{os.environ['RANK']}"
    end.write_text(f"{weights} {optimizer.param_groups[0]['lr']}")
    manager.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
