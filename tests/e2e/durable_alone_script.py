"""Groups that train locally, for test_durable_alone.py; `fft run` starts it.

``durable_alone_script.py SPEC STEPS OUT [CUT …]``: leaves digests of this rank's final state. In
the middle of the window after step CUT all ranks end, as in a power cut; once for each CUT.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from durable_script import cut
from ranks import LIMIT, WIDTH, Samples, written
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo

import fft

EVERY = 2
"""Inner steps between two synchronizations of one fragment."""


def layer() -> nn.Module:
    """Return layers with each group's own statistics, and random masks."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1))


def manager_of(spec: str) -> fft.ManagerFFT:
    several = spec == "hsdp_diloco"
    return fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        shard_pg=fft.ShardProcessGroupGloo(timeout=LIMIT) if several else None,
        load_state_dict=None,
        state_dict=None,
        spec=spec,
        min_replica_size=2,
        replica_id=os.environ["REPLICA_GROUP_ID"],
        init_sync=False,
        timeouts={"join_window": 30.0, "quorum": 60.0},
        config=fft.ManagerConfig(digest="commit"),
    )


def synchronised(manager: fft.ManagerFFT, spec: str, model: Any, inner: Any) -> Any:
    """Synchronize by the spec's algorithm; `diloco` in two fragments, reduced beside a step and
    mixed in."""
    if spec == "local_sgd":
        return fft.LocalSGD(manager, model, inner, EVERY, weighted=True)
    if spec == "hsdp_diloco":
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return fft.DiLoCo(manager, [model], inner, outer, EVERY)
    outers = [torch.optim.SGD(part.parameters(), lr=0.5, momentum=0.5) for part in model]
    return fft.DiLoCo(
        manager, list(model), inner, outers, 2 * EVERY, fragment_sync_delay=1,
        fragment_update_alpha=0.25, weighted=True,
    )  # fmt: skip


def main() -> None:
    """Train to the end."""
    spec, steps, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    cuts = [int(text) for text in sys.argv[4:]]
    group, number = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    torch.set_num_threads(1)
    (out / f"pid-{os.getpid()}").touch()
    manager = manager_of(spec)
    torch.manual_seed(3)
    model = nn.Sequential(layer(), layer())
    if spec == "hsdp_diloco":
        fully_shard(model, mesh=manager.shard_mesh())
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 3, 0.9)
    manager.register(model, inner, schedule)
    synchroniser = synchronised(manager, spec, model, inner)
    torch.manual_seed(100 + 10 * int(group) + number)
    try:
        loader = fft.CursorLoader(Samples(), batch_size=8, seed=5)
        for txn in manager.transactions(loader, max_steps=steps):
            with txn:
                written()
                if txn.step in cuts and txn.inner_step == 1:
                    cut(f"after-{txn.step}", out)
                F.mse_loss(model(txn.batch), txn.batch).backward()
                if spec != "hsdp_diloco":
                    txn.weigh(1.0 + txn.inner_step + int(group))
        assert manager._parts.state.registered_state is not None
        found = {
            "shared": synchroniser.shared.digest(),
            "own": manager._parts.state.registered_state.digest(),
            "step": manager.current_step(),
            "schedule": schedule.state_dict()["last_epoch"],
            "random": int(torch.get_rng_state().sum()),
        }
        path = out / f"final-{group}-{number}.json"
        path.with_suffix(".new").write_text(json.dumps(found))
        path.with_suffix(".new").rename(path)
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()
