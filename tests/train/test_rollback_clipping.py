"""Tests of gradients clipped by their norm over FSDP2 shards: two groups of two ranks.

The norm is a collective of DTensor on the shard group, and native code waits for it. The processes
are real; every case is its own job on one bus, and ends with the bits of the undisturbed one.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from rollback_harness import run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchft import ProcessGroupGloo

import fft
from fft.bus import serve_tcp
from fft.bus.tcpserver import host_store
from fft.trace.audit import audit_dir
from fft.trace.report import RunReport
from fft.train.state.step_state import StepState

STEPS = 6
FAULT_STEP = 3
WIDTH = 16
LATE_S = 0.2
"""A delay of several times the interval of checks for an abort."""
MINUTE = timedelta(seconds=60)
FAULTS: dict[str, dict[str, Any]] = {
    "exception": {"kind": "exception", "phase": "backward", "group": 0, "rank": 1},
    "after-vote": {"kind": "exception", "phase": "after_vote", "group": 1, "rank": 0},
    "one-sided": {"kind": "one_sided", "group": 1, "rank": 0},
}
CASES = ("calm", "late", "beside-a-blocked-clip", *FAULTS)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index]


def _train(case: str, group: str, rank: int, job: dict[str, Any]) -> dict[str, Any]:
    os.environ.pop("FFT_FAULTS", None)
    if job["plan"]:
        os.environ["FFT_FAULTS"] = job["plan"]
    shard_pg = fft.ShardProcessGroupGloo(timeout=MINUTE)
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=MINUTE),
        shard_pg=shard_pg,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        replica_id=group,
        store_addr="127.0.0.1",
        store_port=job["stores"][group],
        init_sync=False,
        bus=job["bus"],
        trace_dir=job["traces"],
        config=fft.ManagerConfig(digest="commit"),
        timeouts={"join_window": 30.0},
    )
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=manager.shard_mesh())
    fully_shard(model, mesh=manager.shard_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager.register(model, optimizer)
    manager.sync_gradients(model)
    torch.manual_seed(100 + 10 * int(group) + rank)
    odd = group == "0" and rank == 1
    failed, norms = [], []
    for txn in manager.transactions(fft.CursorLoader(Samples(), 4, seed=5), max_steps=STEPS):
        with txn:
            F.mse_loss(model(txn.batch), txn.batch).backward()
            if odd and case == "late":
                threading.Event().wait(LATE_S)
            if odd and case == "beside-a-blocked-clip" and txn.step == FAULT_STEP and not failed:
                threading.Event().wait(LATE_S)  # the other rank of the group is in its clip
                failed.append(txn.step)
                raise ValueError("this rank never enters the norm")
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms_of_attempt = norm.full_tensor().item()  # type: ignore[attr-defined]
        if txn.committed:
            norms.append(norms_of_attempt)
    result = {
        "digest": StepState([model], [optimizer]).digest(),
        "parameters": [p.to_local().tolist() for p in model.parameters()],  # type: ignore[attr-defined]
        "norms": norms,
        "rng": torch.get_rng_state().tolist(),
        "steps": manager.current_step(),
        "failed": failed,
    }
    manager.shutdown()
    shard_pg.unregister()
    return result


def _rank(number: int, ranks: int, port: int, jobs: dict[str, dict[str, Any]]) -> Any:
    group, rank = str(number // 2), number % 2
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", REPLICA_GROUP_ID=group, FFT_MONITOR="0")
    return {case: _train(case, group, rank, job) for case, job in jobs.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the final state of all four ranks by case, and the folder of the traces."""
    root = tmp_path_factory.mktemp("clipping")
    bus = serve_tcp()
    address = bus.url.rsplit("/", 1)[0]
    keep, jobs = [], {}
    for case in CASES:
        (root / case).mkdir()
        stores = {}
        for group in ("0", "1"):
            store, stores[group] = host_store()
            keep.append(store)
        plan = ""
        if case in FAULTS:
            fault = {"name": "f", "step": FAULT_STEP, **FAULTS[case]}
            plan = str(root / case / "plan.yaml")
            Path(plan).write_text(yaml.safe_dump({"faults": [fault]}))
        jobs[case] = {
            "bus": f"{address}/{case}",
            "traces": str(root / case),
            "stores": stores,
            "plan": plan,
        }
    try:
        return root, run(4, _rank, jobs)
    finally:
        bus.close()


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("case", CASES)
def test_clipping_by_the_norm_goes_on_and_leaves_no_trace_of_a_fault(
    trained: tuple[Path, list[dict[str, Any]]], case: str
) -> None:
    root, ranks = trained
    for found in ranks:
        calm, here = found["calm"], found[case]
        assert here["steps"] == STEPS and len(set(here["norms"])) == STEPS
        for what in ("norms", "parameters", "digest", "rng"):
            assert here[what] == calm[what], what
    assert ranks[0][case]["parameters"] == ranks[2][case]["parameters"], "replicas"
    assert ranks[1][case]["parameters"] == ranks[3][case]["parameters"], "replicas"
    assert bool(ranks[1][case]["failed"]) == (case == "beside-a-blocked-clip")
    report = audit_dir(root / case)
    assert report.ok, report.render()
    assert report.commits == STEPS
    assert report.bytes_healed == 0
    lost = sum(incident.attempts_lost for incident in RunReport(root / case).incidents)
    if case in ("calm", "late"):
        assert lost == 0, "nothing failed, and nothing was rolled back"
    elif case != "after-vote":  # the commit may have been faster
        assert lost >= 1
