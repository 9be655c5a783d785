"""Tests of bit-exactness: each transient fault, at each phase, on each rank.

Four real processes (2 groups x 2 FSDP2 ranks) train once without a fault, and once for each rank,
on which every fault happens in a different step. Each run must end with the bits of the one without
a fault, with no state fetched and a clean audit.
"""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import Forked, as_main

from fft.bus import serve_tcp
from fft.bus.tcpserver import host_store
from fft.trace.audit import audit_dir
from fft.trace.report import Incident, RunReport

STEPS = 12
FIRST_STEP = 2
"""First step with a fault."""
PHASES = [
    "forward",
    "backward",
    "before_allreduce",
    "during_allreduce",
    "after_allreduce",
    "vote",
    "after_vote",
]
RANKS = [(g, r) for g in ("0", "1") for r in (0, 1)]
WORKER = Path(__file__).with_name("phase_worker.py")


def _faults(group: str, rank: int) -> list[dict[str, Any]]:
    """Return one fault at each phase and a one-sided one; a phase meets another step on each
    rank."""
    kinds = [{"name": phase, "kind": "exception", "phase": phase} for phase in PHASES]
    kinds.append({"name": "one-sided", "kind": "one_sided"})
    first, place = RANKS.index((group, rank)), {"group": int(group), "rank": rank}
    return [
        {**kind, **place, "step": FIRST_STEP + (first + n) % len(kinds)}
        for n, kind in enumerate(kinds)
    ]


CASES = {"no-fault": []} | {f"g{group}r{rank}": _faults(group, rank) for group, rank in RANKS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, run once; each leaves traces and results in a folder of its name."""
    root = tmp_path_factory.mktemp("phases")
    bus = serve_tcp()
    address = bus.url.rsplit("/", 1)[0]
    keep: list[Any] = []
    config: dict[str, Any] = {"steps": STEPS, "cases": []}
    for name, faults in CASES.items():
        folder = root / name
        folder.mkdir()
        stores = {}
        for group in ("0", "1"):
            store, stores[group] = host_store()
            keep.append(store)
        plan = ""
        if faults:
            (folder / "plan.yaml").write_text(yaml.safe_dump({"faults": faults}))
            plan = str(folder / "plan.yaml")
        config["cases"].append(
            {"stores": stores, "bus": f"{address}/{name}", "plan": plan, "traces": str(folder)}
        )
    (root / "config.json").write_text(json.dumps(config))
    children = {}
    try:
        for group, rank in RANKS:
            place = str(root / "config.json"), group, str(rank)
            log = root / f"g{group}r{rank}.log"
            # else each rank of each case would start a monitor process
            children[group, rank] = Forked(
                as_main, str(WORKER), *place, env={"FFT_MONITOR": "0"}, log=log
            )
        for where, child in children.items():
            code = child.wait(240)
            assert code == 0, f"{where} ended with {code}:\n{child.tail()}"
    finally:
        for child in children.values():
            child.end()
        bus.close()
    return root


def _result(runs: Path, case: str, group: str, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs / case / f"result-{group}-{rank}.json").read_text())
    return found


def _injected(runs: Path, case: str) -> list[Incident]:
    """Return the costs of the planned faults, in order.

    There may be other incidents, such as a rendezvous that a slow name service fails.
    """
    planned = sorted(CASES[case], key=lambda fault: fault["step"])
    found = RunReport(runs / case).incidents
    return [next(i for i in found if i.fault.startswith(f"{f['name']} (")) for f in planned]


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("case", [name for name in CASES if name != "no-fault"])
def test_transient_faults_leave_no_bit_changed(runs: Path, case: str) -> None:
    for group, rank in RANKS:
        clean, faulty = (_result(runs, c, group, rank) for c in ("no-fault", case))
        assert faulty["steps"] == STEPS
        for what in (
            "parameters",
            "optimizers",
            "buffers",
            "schedule",
            "rng",
            "consumed",
            "digest",
        ):
            assert faulty[what] == clean[what], f"{what} differ on group {group} rank {rank}"
    report = audit_dir(runs / case)
    assert report.ok, report.render()
    assert report.commits == STEPS
    assert report.bytes_healed == 0
    assert len(_injected(runs, case)) == 1 + len(PHASES), "each fault must have happened"


@pytest.mark.long
@pytest.mark.multiprocess
def test_every_sample_is_consumed_once(runs: Path) -> None:
    seen: list[int] = []
    for group, rank in RANKS:
        for batch in _result(runs, "no-fault", group, rank)["consumed"]:
            seen += batch
    assert len(seen) == STEPS * 4 * 4
    # 64 samples per data epoch, 192 consumed: each exactly three times
    assert sorted(seen) == sorted(list(range(64)) * 3)


@pytest.mark.long
@pytest.mark.multiprocess
def test_shows_how_long_a_transient_fault_costs(runs: Path) -> None:
    clean = _result(runs, "no-fault", "0", 0)["times"]
    step = statistics.median(b - a for a, b in pairwise(clean)) * 1e3
    costs = []
    for case in CASES:
        for fault in _injected(runs, case):
            assert fault.next_commit_ms is not None or "vote" in fault.fault
            if fault.next_commit_ms is not None and fault.attempts_lost:
                costs.append(fault.next_commit_ms)
    print(
        f"\nstep {step:.1f} ms; fault to next commit of the last rank: median "
        f"{statistics.median(costs):.1f} ms, max {max(costs):.1f} ms over {len(costs)} faults"
    )
