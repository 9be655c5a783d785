"""Tests of lost state: a group SIGKILLed in its backward pass, a failed optimizer step, and a
drain.

They use the traces of one job of 2 groups x 2 FSDP2 ranks under ``fft run``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_run import fft
from stage import aborts, fetches, records, slices

from fft.trace.audit import audit_dir, read_lines
from fft.trace.report import RunReport

SCRIPT = Path(__file__).with_name("kill_script.py")
LIMIT_S = 240
PLAN = """
faults:
  - {name: torn, kind: exception, step: 4, group: 0, rank: 1, phase: apply}
  - {name: kill, kind: kill, step: 8, group: 1, phase: backward}
  - {name: leave, kind: drain, step: 12, group: 1, with_groups: 2, settled_steps: 5,
     return_after_steps: 5}
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traces of the job, which is run once to its successful end."""
    root = tmp_path_factory.mktemp("kill")
    (root / "plan.yaml").write_text(PLAN)
    arguments = ["--groups", "2", "--ranks", "2", "--trace-dir", str(root / "run")]
    arguments += ["--faults", str(root / "plan.yaml"), "--stop-after-plan", "5"]
    arguments += ["--timeout", str(LIMIT_S - 20), str(SCRIPT)]
    done = fft("run", *arguments, folder=root, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "run"


@pytest.mark.multiprocess
def test_all_groups_have_equal_bits_at_equal_lineage(traces: Path) -> None:
    report = audit_dir(traces)
    assert report.ok, report.render()
    digests: dict[tuple[str, int], set[str]] = {}
    seen: dict[tuple[str, int], set[str]] = {}
    for line in read_lines(traces):
        event: dict[str, Any] = line.get("event") or {}
        if event.get("type") in ("applied", "healed") and event.get("digest"):
            key = (line["lineage"], line["rank"])
            digests.setdefault(key, set()).add(event["digest"])
            seen.setdefault(key, set()).add(line["group"])
    assert all(len(found) == 1 for found in digests.values())
    assert sum(groups == {"0", "1"} for groups in seen.values()) > 20


@pytest.mark.multiprocess
def test_state_is_fetched_once_by_exactly_the_ranks_that_lost_it(traces: Path) -> None:
    found = fetches(traces)
    assert [fetch[4] for fetch in found] == ["1"] + ["0"] * 4
    # the rank with lost state; the killed group; the group that came back from its drain
    assert [fetch[:2] for fetch in found[:1]] == [("0", 1)]
    killed, returned = (sorted(fetch[:3] for fetch in each) for each in (found[1:3], found[3:]))
    assert [fetch[:2] for fetch in killed] == [("1", 0), ("1", 1)]
    # a rank may be killed later than its mate, which then is started once more
    assert {inc for *_, inc in killed} <= {2, 3}
    assert returned == [(group, rank, inc + 1) for group, rank, inc in killed]
    assert not list(traces.glob("g0r*i2.jsonl")), "group 0 was never started again"


@pytest.mark.multiprocess
def test_every_slice_is_consumed_exactly_once(traces: Path) -> None:
    by_rank = slices(traces)
    cursor = max(record["cursor"] for record in records(traces))
    assert cursor > 40
    for rank in (0, 1):
        assert sorted(by_rank[rank]) == list(range(cursor))


@pytest.mark.multiprocess
def test_a_drained_group_leaves_after_a_commit_without_a_rollback(traces: Path) -> None:
    # gloo may notice the SIGKILL before the supervisor's message; a machine may add faults
    causes = [record["cause"] for record in aborts(traces)]
    assert sum("optimizer step failed after COMMIT" in cause for cause in causes) == 1, causes
    history = records(traces)
    (left,) = (i for i, record in enumerate(history) if record["leavers"] == ["1"])
    assert history[left]["kind"] == "commit"
    alone = history[left + 1]
    assert alone["kind"] == "epoch", "nothing was rolled back for the drain"
    assert [g["group"] for g in alone["members"]] == ["0"]
    back = [r for r in history[left:] if r["kind"] == "epoch"][-1]
    assert [g["group"] for g in back["members"]] == ["0", "1"]
    assert history[-1]["leavers"] == ["0", "1"], "the job ends with one commit for all"


@pytest.mark.multiprocess
def test_incidents_of_kills_are_reported(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()
        for found in RunReport(traces).incidents:
            back, following = (
                "-" if ms is None else f"{ms:.0f}"
                for ms in (found.rolled_back_ms, found.next_commit_ms)
            )
            print(
                f"  {found.fault}: rolled back after {back} ms, next commit after {following} ms, "
                f"{found.bytes_healed} bytes healed; {found.noticed[:100]}"
            )
    assert len(RunReport(traces).incidents) >= 4
