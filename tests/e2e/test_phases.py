"""Bit-exactness: 8 steps with each transient fault, at each phase, on each rank.

Four real processes (2 groups x 2 FSDP2 ranks) train through all cases in turn; every case must
end with the bits of the run without a fault, with no state fetched and a clean audit.
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
from fft.trace.report import Incident, incidents

STEPS = 8
FAULT_STEP = 5
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


def _cases() -> dict[str, dict[str, Any] | None]:
    cases: dict[str, dict[str, Any] | None] = {"no-fault": None}
    for group, rank in RANKS:
        for phase in PHASES:
            cases[f"{phase}-g{group}r{rank}"] = {
                "name": "f", "kind": "exception", "step": FAULT_STEP,
                "group": int(group), "rank": rank, "phase": phase,
            }  # fmt: skip
        cases[f"one-sided-g{group}r{rank}"] = {
            "name": "f", "kind": "one_sided", "step": FAULT_STEP, "group": int(group), "rank": rank,
        }  # fmt: skip
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, run once; each leaves traces and results in a folder of its name."""
    root = tmp_path_factory.mktemp("phases")
    bus = serve_tcp()
    address = bus.url.rsplit("/", 1)[0]
    keep: list[Any] = []
    config: dict[str, Any] = {"steps": STEPS, "cases": []}
    for name, fault in CASES.items():
        folder = root / name
        folder.mkdir()
        stores = {}
        for group in ("0", "1"):
            store, stores[group] = host_store()
            keep.append(store)
        plan = ""
        if fault is not None:
            (folder / "plan.yaml").write_text(yaml.safe_dump({"faults": [fault]}))
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
            # FFT_MONITOR: else one per rank and case, each a process that starts
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


def _injected(directory: Path) -> Incident | None:
    """What the planned fault cost. There may be others: a slow name service fails a rendezvous."""
    return next((i for i in incidents(directory) if i.fault.startswith("f (")), None)


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", [name for name in CASES if name != "no-fault"])
def test_a_transient_fault_leaves_no_bit_changed(runs: Path, case: str) -> None:
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
    assert _injected(runs / case) is not None, "the fault must have happened"


@pytest.mark.multiprocess
def test_every_sample_is_consumed_once(runs: Path) -> None:
    seen: list[int] = []
    for group, rank in RANKS:
        for batch in _result(runs, "no-fault", group, rank)["consumed"]:
            seen += batch
    assert len(seen) == STEPS * 4 * 4
    # 64 samples a pass, 128 consumed: each exactly twice
    assert sorted(seen) == sorted(list(range(64)) * 2)


@pytest.mark.multiprocess
def test_shows_how_long_a_transient_fault_costs(runs: Path) -> None:
    clean = _result(runs, "no-fault", "0", 0)["times"]
    step = statistics.median(b - a for a, b in pairwise(clean)) * 1e3
    costs = []
    for case in CASES:
        if case != "no-fault":
            fault = _injected(runs / case)
            assert fault is not None
            assert fault.next_commit_ms is not None or "vote" in case
            if fault.next_commit_ms is not None and fault.attempts_lost:
                costs.append(fault.next_commit_ms)
    print(
        f"\nstep {step:.1f} ms; fault to next commit of the last rank: median "
        f"{statistics.median(costs):.1f} ms, max {max(costs):.1f} ms over {len(costs)} cases"
    )
