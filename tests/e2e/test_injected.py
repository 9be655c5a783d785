"""Tests of faults of every kind on real jobs of 2 groups x 1 rank: their effects, and FFT's
reactions.

Planned faults come from ``fft run --faults``, commanded ones from ``fft dev inject``. A job takes
20 s.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import forked
import pytest
from forked_run import fft
from stage import aborts, fetches, notes, records

from fft.trace.audit import audit_dir

SCRIPT = Path(__file__).with_name("fault_script.py")
LIMIT_S = 150

SURVIVED = """
faults:
  - {name: hang, kind: hang, step: 4, group: 0, rank: 0, phase: forward, seconds: 1.5}
  - {name: hang-gil, kind: hang, step: 7, group: 1, rank: 0, phase: backward, seconds: 1.5,
     holding_gil: true}
  - {name: stop, kind: stop, step: 10, group: 0, rank: 0, phase: before_allreduce, seconds: 1.5}
  - {name: slow, kind: slow, step: 13, group: 1, rank: 0, seconds: 0.3, steps: 3}
  - {name: lighthouse, kind: lighthouse_restart, step: 17}
  - {name: cut, kind: network_cut, step: 20, group: 1, rank: 0, phase: before_allreduce}
"""


def run(
    root: Path, plan: str, *arguments: str, code: int = 0, timeouts: tuple[str, ...] = ()
) -> tuple[Path, str]:
    """Run a job to its end; return its traces, and its stderr."""
    (root / "plan.yaml").write_text(plan)
    command = ["run", "--groups", "2", "--trace-dir", str(root / "run"), "--no-progress"]
    command += ["--faults", str(root / "plan.yaml"), "--timeout", str(LIMIT_S - 20)]
    command += [*arguments, str(SCRIPT), *timeouts]
    env = {"FFT_MONITOR": "0"}  # test_hangs.py covers hangs with a monitor
    done = fft(*command, folder=root, within=LIMIT_S, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    return root / "run", done.stderr


def injected(traces: Path) -> dict[str, dict[str, Any]]:
    return {note["data"]["name"]: note for note in notes(traces, "inject")}


def broken(traces: Path) -> set[str]:
    """Return the guarantees that the audit finds violated."""
    return {finding.name for finding in audit_dir(traces).findings if finding.violation}


def seconds_to_commit(traces: Path, note: dict[str, Any]) -> float:
    """Return the seconds from the injection to the commit of that step on that rank."""
    consumed = [n for n in notes(traces, "consumed") if n["group"] == note["group"]]
    step = note["data"]["step"]
    return float(next(n["wall"] for n in consumed if n["data"]["step"] == step) - note["wall"])


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("survived")
    return run(root, SURVIVED, "--stop-after-plan", "3", "--max-restarts", "0")[0]


@pytest.mark.long
@pytest.mark.multiprocess
def test_transient_fault_keeps_the_processes(survived: Path) -> None:
    report = audit_dir(survived)
    assert report.ok, report.render()
    assert set(injected(survived)) == {"hang", "hang-gil", "stop", "slow", "cut"}
    assert len(list(survived.glob("g*.jsonl"))) == 2, "nobody was started again"
    assert fetches(survived) == [], "and nobody lost its state"


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_rank_that_hangs_or_is_stopped_is_waited_for(survived: Path) -> None:
    found = injected(survived)
    for name in ("hang", "hang-gil", "stop"):
        assert seconds_to_commit(survived, found[name]) >= 1.4, name
    slowed = [n for n in notes(survived, "consumed") if n["group"] == "1"]
    walls = {n["data"]["step"]: n["wall"] for n in slowed}
    first = found["slow"]["data"]["step"]
    assert all(walls[step] - walls[step - 1] >= 0.29 for step in range(first, first + 3))


@pytest.mark.multiprocess
def test_a_cut_network_is_rolled_back_and_built_anew(survived: Path) -> None:
    cut = injected(survived)["cut"]
    aborted = [r for r in aborts(survived) if r["epoch"] == cut["epoch"]]
    assert [r["step"] for r in aborted] == [cut["data"]["step"]]
    assert records(survived)[-1]["step"] > cut["data"]["step"]


@pytest.mark.multiprocess
def test_lighthouse_restart_is_sent_to_all_groups_and_costs_no_step(survived: Path) -> None:
    commands = [n for n in notes(survived, "command") if n["data"]["fault"]["name"] == "lighthouse"]
    assert {n["group"] for n in commands} == {"0", "1"}
    assert not [r for r in aborts(survived) if 14 <= r["step"] <= 19]


LONG_HANGS = """
faults:
  - {name: hang, kind: hang, step: 4, group: 1, rank: 0, phase: vote, seconds: 8}
  - {name: hang-gil, kind: hang, step: 8, group: 1, rank: 0, phase: vote, seconds: 8,
     holding_gil: true, with_groups: 2, settled_steps: 2}
"""


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_long_hang_is_gone_on_without_and_let_in_again(tmp_path: Path) -> None:
    """It hangs at the vote, where its peers wait for a message and not in a collective.

    Takes half a minute.
    """
    short = ("vote_window=2", "ack_window=1", "bus_retry=0.5")
    arguments = ["--stop-after-plan", "3", "--max-restarts", "0"]
    traces, _ = run(tmp_path, LONG_HANGS, *arguments, timeouts=short)
    assert broken(traces) == set()
    assert len(list(traces.glob("g*.jsonl"))) == 2, "nobody was started again"
    for note in injected(traces).values():
        after = [r for r in records(traces) if r["epoch"] > note["epoch"] and r["members"]]
        sizes = [len(r["members"]) for r in after]
        assert 1 in sizes and 2 in sizes[sizes.index(1) :], (note["data"]["name"], sizes)


POISONED = """
faults:
  - {name: nan, kind: nan_gradient, step: 4, group: 1, rank: 0, where: WHERE}
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("where", ["before", "after"])
def test_injected_nan_is_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("FFT_MONITOR", "0")
    plan = tmp_path / "plan.yaml"
    plan.write_text(POISONED.replace("WHERE", where))
    traces = forked.run_job(SCRIPT, "steps=8", folder=tmp_path, within=LIMIT_S, plan=plan)
    assert injected(traces)["nan"]["data"]["phase"] == f"{where}_allreduce"
    last: dict[str, float] = {}
    for note in notes(traces, "metrics"):
        last[note["group"]] = note["data"]["loss"]
    report = audit_dir(traces)
    assert all(map(math.isfinite, last.values()))
    assert [r["code"] for r in aborts(traces)] == ["result_refused"]
    refused = {note["group"] for note in notes(traces, "result_refused")}
    # a NaN before the reduction is in the gradients of both groups, and the first one refuses
    assert refused and (where == "before" or refused == {"1"})
    owed = next(finding for finding in report.findings if finding.name == "digests")
    assert owed.checks >= 2 * 8 and owed.violation is None, "each commit, as the headers state"
    assert report.ended and report.ok, report.render()


BUS_LOSS = """
faults:
  - {name: lost, kind: bus_loss, step: 4, group: 1, rank: 0, phase: forward}
"""


@pytest.mark.long
@pytest.mark.multiprocess
def test_rank_that_loses_the_bus_restarts_as_a_new_process(tmp_path: Path) -> None:
    traces, _ = run(tmp_path, BUS_LOSS, "--stop-after-plan", "3")
    assert broken(traces) <= {"decided"}, "it may stop in doubt, and nothing worse"
    assert "lost" in injected(traces)
    assert list(traces.glob("g1r0i2.jsonl")), "it was started again"
    assert not list(traces.glob("g0r0i2.jsonl")), "the other group went on"
    assert "InDoubt" in (traces / "logs" / "g1r0-1.log").read_text()


BUS_RESTART = """
faults:
  - {name: forgot, kind: bus_restart, step: 4}
"""


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_bus_that_was_restarted_ends_the_job_with_a_reason(tmp_path: Path) -> None:
    traces, output = run(tmp_path, BUS_RESTART, code=1)
    assert broken(traces) <= {"decided"}, "it may stop in doubt, and nothing worse"
    assert "the bus was restarted, and has forgotten the job" in output
    assert len(list(traces.glob("g*.jsonl"))) == 2, "nobody was started again"
    for group in (0, 1):
        assert "InDoubt" in (traces / "logs" / f"g{group}r0-1.log").read_text()
