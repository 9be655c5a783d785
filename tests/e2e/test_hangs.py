"""Tests of hangs of a main thread: a hang in Python is rolled back; otherwise the process is ended.

The jobs have 2 groups x 2 FSDP2 ranks under ``fft run``, each process with its monitor.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import forked
import pytest
from forked_run import fft, running
from stage import aborts, fetches, records
from waiting import wait_until

from fft.trace.audit import audit_dir

WORKER = Path(__file__).with_name("hang_worker.py")
LOOP_WORKER = Path(__file__).with_name("hang_loop_worker.py")
STOP_WORKER = Path(__file__).with_name("stop_worker.py")
UPDATE_WORKER = Path(__file__).with_name("update_hang_worker.py")
LIMIT_S = 240


def calm_job(directory: Path, steps: int) -> dict[str, Any]:
    """Return the final state of each rank, by name, of a job without hangs."""
    script = str(steps), str(directory)
    forked.run_job(WORKER, *script, folder=directory, within=LIMIT_S, ranks=2)
    return results(directory)


def hung_job(
    directory: Path, steps: int, *kinds: str, worker: Path = WORKER, ranks: int = 2
) -> dict[str, Any]:
    """Return the final state of each rank, by name."""
    directory.mkdir()
    command = ["run", "--groups", "2", "--ranks", str(ranks)]
    command += ["--trace-dir", str(directory / "run"), "--timeout", str(LIMIT_S - 30)]
    command += [str(worker), str(steps), str(directory), *kinds]
    done = fft(*command, folder=directory, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all((directory / kind).exists() for kind in kinds), "all hangs must have happened"
    return results(directory)


def results(directory: Path) -> dict[str, Any]:
    """Audit a job and return the results that its ranks left."""
    report = audit_dir(directory / "run")
    assert report.ok, report.render()
    return {p.name: json.loads(p.read_text()) for p in sorted(directory.glob("result-*.json"))}


def causes(directory: Path) -> list[str]:
    """Return the causes of the rollbacks in which a rank was reported to hang."""
    return [a["cause"] for a in aborts(directory / "run") if "no progress" in a["cause"]]


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_hang_in_python_is_rolled_back_and_changes_no_bit(tmp_path: Path) -> None:
    clean, hung = calm_job(tmp_path / "clean", 12), hung_job(tmp_path / "hung", 12, "sleep")
    assert len(hung) == 4 and hung == clean
    assert audit_dir(tmp_path / "hung" / "run").bytes_healed == 0
    found = causes(tmp_path / "hung")
    assert any("1/0#1: hangs: no progress for" in cause for cause in found), found
    print(f"\n{found}")


@pytest.mark.long
@pytest.mark.multiprocess
def test_rank_hanging_in_torchft_loop_is_excluded_until_it_returns(tmp_path: Path) -> None:
    """No rollback frees its thread, so the others would wait for it in the barrier."""
    out = tmp_path / "hung"
    hung_job(out, 20, worker=LOOP_WORKER, ranks=1)
    assert json.loads((out / "hung").read_text())["went_on"], "the other group waited for it"
    assert not list((out / "run").glob("g1r0i2*.jsonl")), "it came back, and was not started anew"
    found = iter(records(out / "run"))
    pattern = re.compile(r"1/0#1:? (hangs|is suspected): ")
    assert any(r["kind"] == "abort" and pattern.search(r["cause"]) for r in found), causes(out)
    after = [[entry["group"] for entry in r["members"]] for r in found if r["kind"] == "epoch"]
    assert after[:2] == [["0"], ["0", "1"]], "left out at once, and in again when it was back"


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", [pytest.param("joiner", marks=pytest.mark.long), "busy"])
def test_joiner_hanging_in_its_first_step_is_excluded(tmp_path: Path, kind: str) -> None:
    """It has no steps of its own, so the steps of the other group give the limit."""
    out = tmp_path / "hung"
    hung_job(out, 20, kind, worker=LOOP_WORKER, ranks=1)
    assert json.loads((out / "hung").read_text())["went_on"], "the other group waited for it"
    assert any("by a process that joins (threshold" in cause for cause in causes(out)), causes(out)


@pytest.mark.long
@pytest.mark.multiprocess
def test_hangs_that_nothing_frees_are_ended_and_the_group_starts_again(tmp_path: Path) -> None:
    ended = hung_job(tmp_path / "hung", 150, "lock", "gil", "stop")
    assert {rank["steps"] for rank in ended.values()} == {150}
    assert len({rank["digest"] for name, rank in ended.items() if "-0.json" in name}) == 1
    assert list((tmp_path / "hung" / "run").glob("g1r0i4*.jsonl")), (
        "it was started three times anew"
    )
    # The rank cannot report this itself; its monitor does, through the supervisor, before it is
    # ended.
    found = causes(tmp_path / "hung")
    assert any(cause.startswith("1/0#1: hangs: no progress") for cause in found), found
    for inc in (2, 3):
        mine = [cause for cause in found if f"1/0#{inc} is suspected: no progress" in cause]
        assert any(cause.endswith("(seen by monitor)") for cause in mine), found
    print(f"\n{found}")


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("place", ["between", pytest.param("update", marks=pytest.mark.long)])
def test_rank_stopped_after_a_commit_is_excluded(tmp_path: Path, place: str) -> None:
    """`hang_limit` is 600 s, and so is the limit of the process group."""
    command = ["run", "--groups", "2", "--trace-dir", str(tmp_path / "run"), "--no-progress"]
    command += [str(STOP_WORKER), place, str(tmp_path)]
    with running(*command, folder=tmp_path) as job:
        wait_until((tmp_path / "went-on").exists, "the other group goes on", LIMIT_S / 2)
        os.kill(int((tmp_path / "stopped").read_text()), signal.SIGCONT)
        assert job.wait(LIMIT_S / 2) == 0, job.tail()
    assert not list((tmp_path / "run").glob("g1r0i2*.jsonl")), "it came back, and was not ended"
    report = audit_dir(tmp_path / "run")
    assert report.ok, report.render()


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("place", "groups"),
    [
        ("step", 2),
        pytest.param("step", 1, marks=pytest.mark.long),
        pytest.param("commit", 2, marks=pytest.mark.long),
    ],
)
def test_hang_in_an_update_is_interrupted_and_its_rank_fetches_the_state(
    tmp_path: Path, place: str, groups: int
) -> None:
    """This also holds if the job needs all groups, so that none can be excluded: no process is
    ended."""
    command = ["run", "--groups", "2", "--trace-dir", str(tmp_path / "run"), "--no-progress"]
    command += ["--timeout", str(LIMIT_S - 30)]
    command += [str(UPDATE_WORKER), place, str(groups), str(tmp_path)]
    done = fft(*command, folder=tmp_path, within=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = results(tmp_path)
    assert len(ended) == 2 and ended["result-0.json"] == ended["result-1.json"]
    assert not list((tmp_path / "run").glob("g1r0i2*.jsonl")), "the process went on"
    assert [(f[0], f[4]) for f in fetches(tmp_path / "run")] == [("1", "0")]
