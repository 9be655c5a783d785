"""Tests that a group that loses one rank keeps the other, and another process replaces the lost
one.

The jobs have 2 groups x 2 FSDP2 ranks under ``fft run``; the tests use their traces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_run import fft
from stage import fetches, records, slices

from fft.launch.services import start_services
from fft.launch.supervisor import RunConfig, Supervisor, reforming
from fft.messages.fault_plans import load_plan
from fft.trace.audit import audit_dir, read_lines
from fft.trace.report import RunReport

SCRIPT = Path(__file__).with_name("kill_script.py")
LIMIT_S = 150
ONE_BY_ONE = """
faults:
  - {name: one, kind: kill, step: 6, group: 1, rank: 1, phase: backward}
  - {name: first, kind: kill, step: 12, group: 0, rank: 0, phase: backward, with_groups: 2,
     settled_steps: 3}
  - {name: all, kind: kill, step: 18, group: 1, phase: backward, with_groups: 2, settled_steps: 3}
"""
ONE = ONE_BY_ONE.partition("  - {name: first")[0]
"""The fault plan with only the first of its kills."""
WHOLE = """
faults:
  - {name: all, kind: kill, step: 6, group: 1, phase: backward}
  - {name: back, kind: exception, step: 8, group: 0, rank: 0, phase: forward, with_groups: 2}
"""
LATE = """
faults:
  - {name: one, kind: kill, step: 6, group: 1, rank: 0, phase: backward}
  - {name: seen, kind: exception, step: 8, group: 1, rank: 1, phase: forward, with_groups: 2}
"""


def job(
    root: Path, plan: str, *options: str, script: Path = SCRIPT, arguments: Sequence[str] = ()
) -> Path:
    (root / "plan.yaml").write_text(plan)
    command = ["--groups", "2", "--ranks", "2", "--trace-dir", str(root / "run")]
    command += ["--faults", str(root / "plan.yaml"), "--stop-after-plan", "4", *options]
    command += ["--timeout", str(LIMIT_S - 20), str(script), *arguments]
    done = fft("run", *command, folder=root, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (root / "said").write_text(done.stderr)
    return root / "run"


def headers(traces: Path) -> dict[str, dict[str, Any]]:
    """Return the first record of each trace, if the process lived to write one."""
    files = [p for p in sorted(traces.glob("*.jsonl")) if p.stat().st_size]
    return {p.stem: json.loads(p.open().readline()) for p in files}


@pytest.fixture(scope="module")
def waited_for(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job in which others wait for the replacements, run to its successful end."""
    root = tmp_path_factory.mktemp("waited")
    return job(root, ONE_BY_ONE, "--spares", "1", "--reform-window", "30")


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_run_is_exactly_once_and_all_groups_have_equal_bits(waited_for: Path) -> None:
    report = audit_dir(waited_for)
    assert report.ok, report.render()
    digests: dict[tuple[str, int], set[str]] = {}
    for line in read_lines(waited_for):
        event: dict[str, Any] = line.get("event") or {}
        if event.get("type") in ("applied", "healed") and event.get("digest"):
            digests.setdefault((line["lineage"], line["rank"]), set()).add(event["digest"])
    assert len(digests) > 40
    assert all(len(found) == 1 for found in digests.values())
    cursor = max(record["cursor"] for record in records(waited_for))
    for taken in slices(waited_for).values():
        assert sorted(taken) == list(range(cursor))


@pytest.mark.multiprocess
def test_only_the_lost_shard_moves_and_the_others_live_on(waited_for: Path) -> None:
    moved = [fetch[:3] for fetch in fetches(waited_for)]
    assert moved[:2] == [("1", 1, 2), ("0", 0, 2)]
    (_, first, new0), (_, second, new1) = sorted(moved[-2:])
    assert (first, second) == (0, 1), "all ranks of group 1 were killed"
    # a rank may be replaced before the other one is killed, and then ends with its group
    assert moved[2:-2] in ([], [("1", 0, 2)], [("1", 1, 3)])
    # a spare that got a place and ended with its group may have used a number
    assert new0 in (2, 3) and new1 in (3, 4)
    found = headers(waited_for)
    assert {"g0r0i1", "g0r0i2", "g0r1i1", "g1r0i1", "g1r1i1", "g1r1i2"} < set(found)
    stores = {name: header["config"]["store"] for name, header in found.items()}
    assert stores["g1r1i2"] == stores["g1r0i1"]
    assert stores["g1r0i1"] != stores[f"g1r0i{new0}"] == stores[f"g1r1i{new1}"]


@pytest.mark.multiprocess
def test_no_step_is_committed_without_a_group_that_is_waited_for(waited_for: Path) -> None:
    history = records(waited_for)
    epochs = [[g["group"] for g in r["members"]] for r in history if r["kind"] == "epoch"]
    assert epochs[:3] == [["0", "1"]] * 3, "at first, and after each rank that was lost alone"


@pytest.mark.multiprocess
def test_a_spare_takes_the_first_place(waited_for: Path) -> None:
    logs = waited_for / "logs"
    assert "spare-1.log" in {path.name for path in logs.iterdir()}
    assert (logs / "g1r1-1.2.log").is_file()
    output = (waited_for.parent / "said").read_text()
    assert "group 1 lost rank 1" in output and "its other ranks run on: 0" in output


@pytest.mark.long
@pytest.mark.multiprocess
def test_no_rank_of_a_killed_group_is_reported_as_running_on(tmp_path: Path) -> None:
    """Either the replacement of one rank took part before the other rank ended, or the report
    states that it did not."""
    traces = job(tmp_path, WHOLE, "--spares", "1")
    output = (tmp_path / "said").read_text()
    took_part = {header["config"]["pid"] for header in headers(traces).values()}
    for pid in re.findall(r"group 1 lost rank \d .*: pid (\d+) is to take its place", output):
        assert int(pid) in took_part or f"pid {pid}, which was to take the place of rank" in output
    assert "live on" not in output
    fetched = {(group, rank) for group, rank, *_ in fetches(traces)}
    assert fetched == {("1", 0), ("1", 1)}, "the group came back, and both had to be healed"


@pytest.mark.long
@pytest.mark.multiprocess
def test_excluded_group_comes_back_with_its_surviving_rank(tmp_path: Path) -> None:
    traces = job(tmp_path, LATE)
    report = audit_dir(traces)
    assert report.ok, report.render()
    history = records(traces)
    epochs = [[g["group"] for g in r["members"]] for r in history if r["kind"] == "epoch"]
    assert epochs[:3] == [["0", "1"], ["0"], ["0", "1"]]
    found = {(group, rank, inc) for group, rank, inc, *_ in fetches(traces)}
    assert found == {("1", 0, 2), ("1", 1, 1)}, "the rank that lived on was behind, too"
    assert set(headers(traces)) == {"g0r0i1", "g0r1i1", "g1r0i1", "g1r0i2", "g1r1i1"}
    # the report does not wait for the surviving rank, which was excluded
    killed = next(x for x in read_lines(traces) if x.get("note") == "inject")["wall"]
    fetched = [x["wall"] for x in read_lines(traces) if x.get("on") == "healed" and x["inc"] == 2]
    next_commit_ms = RunReport(traces).incidents[0].next_commit_ms
    assert next_commit_ms is not None and killed + next_commit_ms / 1e3 < min(fetched)


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_fetch_that_fails_once_is_done_again_in_the_next_epoch(tmp_path: Path) -> None:
    """The donor had offered the state of the previous epoch until a txn began."""
    script = SCRIPT.with_name("lagging_donor_script.py")
    traces = job(tmp_path, ONE, "--reform-window", "30", script=script)
    assert audit_dir(traces).ok
    history = records(traces)
    lost = next(i for i, record in enumerate(history) if record["kind"] == "abort")
    assert [r["kind"] for r in history[lost:]][:5] == ["abort", "epoch", "abort", "epoch", "commit"]


@pytest.mark.multiprocess
@pytest.mark.long  # all its processes import torch themselves
def test_hanging_replacement_of_a_lost_rank_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its group is then restarted."""
    monkeypatch.setattr(reforming, "_HANGS_S", 5.0)
    monkeypatch.setattr(reforming, "_TIMES", 0.1)
    path, script = tmp_path / "plan.yaml", SCRIPT.with_name("hanging_script.py")
    path.write_text(ONE)
    traces, plan = tmp_path / "run", load_plan(path, 2, 2)
    config = RunConfig([str(script)], 2, 2, traces, faults=path, stop_after_plan=4)
    services = start_services(with_lighthouse=False)
    try:
        outcome = Supervisor(replace(config, timeout=LIMIT_S), plan, services).run()
    finally:
        services.close()
    assert outcome.ok, outcome.lines
    assert (traces / "logs" / "g1r1-1.2.log").exists(), "nobody came for it alone"
    assert set(headers(traces)) == {"g0r0i1", "g0r1i1", "g1r0i1", "g1r1i1", "g1r0i2", "g1r1i2"}
    assert "place of a lost rank, and was not ready after 5 s" in caplog.text
    assert audit_dir(traces).ok


@pytest.mark.multiprocess
@pytest.mark.long
def test_replacement_that_dies_before_a_commit_is_not_replaced(tmp_path: Path) -> None:
    """The next one would die, too, so the group is restarted."""
    script = SCRIPT.with_name("hanging_script.py")
    traces = job(tmp_path, ONE, "--reform-window", "30", script=script, arguments=("dies",))
    output = (tmp_path / "said").read_text()
    assert output.count("is to take its place") == 1
    assert "ended before it took part (SIGKILL); the group is not re-formed" in output
    assert audit_dir(traces).ok


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.parametrize("since", [3, 6])
def test_group_that_already_uses_a_torch_group_is_restarted(tmp_path: Path, since: int) -> None:
    """A new process could not enter that group.

    If it is created at this moment, a replacement starts and is refused.
    """
    plan = ONE
    if since == 3:  # the traces are read five times a second
        plan = plan.replace("step: 6", "step: 60")
    script = SCRIPT.with_name("late_group_script.py")
    traces = job(tmp_path, plan, "--reform-window", "30", script=script, arguments=(str(since),))
    assert audit_dir(traces).ok
    incs = ("g1r1i2", "g1r1i3") if since == 6 else ("g1r1i2",)
    assert set(headers(traces)) == {"g0r0i1", "g0r1i1", "g1r0i1", "g1r1i1", "g1r0i2", *incs}
    assert (traces / "logs" / "g1r1-1.2.log").exists() == (since == 6)
    survivor = (traces / "logs" / "g1r0-1.log").read_text()
    assert ("GroupNotReformable: rank 1 of group 1 is a new process" in survivor) == (since == 6)


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_group_is_started_again_where_that_is_wanted(tmp_path: Path) -> None:
    traces = job(tmp_path, LATE, "--no-reform")
    assert audit_dir(traces).ok
    assert "g1r1i2" in headers(traces)
