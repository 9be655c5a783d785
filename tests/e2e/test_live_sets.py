"""Tests of live blocks in real processes: failures, misuse, kills, and blocks between steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchft
from forked_run import fft as run_fft
from forked_run import running

import fft
from fft.errors import LiveBlockFailed, LiveBlockMisuse
from fft.trace.report import refusals
from tests.acceptance.live_kills import EXAMPLES, Job, judged, kill_at_random

SCRIPT = Path(__file__).with_name("live_script.py")
STEPS = Path(__file__).with_name("live_steps_script.py")


def start(arguments: list[str], folder: Path) -> Job:
    return running(*arguments, folder=folder)  # type: ignore[return-value]


def run_script(folder: Path, *arguments: str) -> list[str]:
    """Run the script to its successful end, audit it, and return the logs of its processes."""
    traces = folder / "run"
    options = ["--groups", "2", "--trace-dir", str(traces), "--max-restarts", "0"]
    done = run_fft("run", *options, str(SCRIPT), *arguments, folder=folder, within=120)
    logs = [log.read_text() for log in sorted((traces / "logs").iterdir())]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    judged(traces)
    return logs


@pytest.mark.multiprocess
def test_live_block_fails_on_all_members_and_misuse_is_refused(tmp_path: Path) -> None:
    for log in run_script(tmp_path):
        assert log.count("failed as expected") == 2 and "misuse refused" in log
        assert "done 2" in log


@pytest.mark.long
@pytest.mark.multiprocess
def test_live_block_that_a_living_process_does_not_enter_is_refused(tmp_path: Path) -> None:
    waited, late = run_script(tmp_path, "late")
    assert "missed a member" in waited and "missed a member" not in late
    assert "done 2" in waited and "done 2" in late


@pytest.mark.long
@pytest.mark.multiprocess
def test_training_with_live_blocks_survives_kills(tmp_path: Path) -> None:
    killed, traces = kill_at_random(
        EXAMPLES / "training.py", 2, seed=1, folder=tmp_path, start=start
    )
    assert killed
    found = judged(traces)
    assert found.bytes_healed == 0, "the program moves its weights itself"


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("program", ["collectives.py", "training.py"])
def test_program_survives_many_kills(tmp_path: Path, program: str) -> None:
    killed, traces = kill_at_random(EXAMPLES / program, 10, seed=2, folder=tmp_path, start=start)
    assert killed >= 3
    judged(traces)


def manager_of_one(traces: Path) -> fft.ManagerFFT:
    return fft.ManagerFFT(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        trace_dir=traces,
    )


def test_live_block_with_a_bug_is_not_repeated_for_ever(tmp_path: Path) -> None:
    manager = manager_of_one(tmp_path)
    failures: list[type[Exception]] = []
    for _ in range(2):
        try:
            with manager.live():
                raise ValueError("always")
        except (fft.errors.LiveBlockFailed, fft.errors.StepRetriesExceeded) as error:
            failures.append(type(error))
    assert failures == [fft.errors.LiveBlockFailed, fft.errors.StepRetriesExceeded]
    manager.shutdown()
    judged(tmp_path)


def test_live_blocks_between_steps_consume_no_data(tmp_path: Path) -> None:
    manager = manager_of_one(tmp_path)
    model = torch.nn.Linear(1, 1)
    manager.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.sync_gradients(model)
    dataset = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(-1, 1))
    seen: list[float] = []
    for txn in manager.transactions(fft.CursorLoader(dataset, batch_size=2), max_steps=4):
        with txn:
            (x,) = txn.batch
            model(x).mean().backward()
            with pytest.raises(LiveBlockMisuse, match="inside an open transaction"):
                manager.live().__enter__()
        seen += x.flatten().tolist()
        if not txn.skipped and txn.step < 3:
            with manager.live() as members:
                assert members == (manager.me,)
        elif not txn.skipped:
            with pytest.raises(LiveBlockFailed, match=r"cannot follow the last step.*after the lo"):
                manager.live().__enter__()
    manager.shutdown()
    assert len(seen) == len(set(seen)) == 8
    found = judged(tmp_path)
    assert found.commits == 4 + 2 * 3
    assert refusals(tmp_path) is None, "a live block is not a step whose batches were skipped"


def run_with_steps(folder: Path, place: str) -> tuple[str, str]:
    """Run `live_steps_script.py`; return the logs of the survivor and of the replacement."""
    traces = folder / "run"
    options = ["--groups", "2", "--trace-dir", str(traces)]
    done = run_fft("run", *options, str(STEPS), place, str(folder), folder=folder, within=120)
    logs = [log.read_text() for log in sorted((traces / "logs").iterdir())]
    text = "\n".join([done.stdout, done.stderr, *logs])
    assert done.returncode == 0 and len(logs) == 3, text
    judged(traces)
    survivor, _, returned = logs
    ends = [line for log in (survivor, returned) for line in log.splitlines() if "done at" in line]
    assert len(ends) == 2 and ends[0] == ends[1] and "done at step 12:" in ends[0], text
    return survivor, returned


@pytest.mark.multiprocess
def test_members_in_a_block_take_the_step_of_a_group_that_returns(tmp_path: Path) -> None:
    survivor, returned = run_with_steps(tmp_path, "after")
    assert "entered 1" in survivor and "entered 2" in survivor and "entered 2" in returned
    for line in survivor.splitlines():
        if "failed:" in line and "not entered" in line:
            assert "0/0#1: entry of live_steps_script.py:" in line and "1/0#2: a step" in line
            assert "Go on with the next transaction" in line and "txn.committed" not in line
            break
    else:
        raise AssertionError(f"no entry met the step of the group that returned:\n{survivor}")


@pytest.mark.multiprocess
def test_group_that_returns_to_a_block_takes_the_step_of_the_members(tmp_path: Path) -> None:
    survivor, returned = run_with_steps(tmp_path, "before")
    assert "entered 2" in survivor and "failed:" not in survivor
    assert returned.count("failed:") == 1 and "entered" not in returned.replace("not entered", "")
    assert "1/0#2: entry of live_steps_script.py:" in returned and "0/0#1: a step" in returned
