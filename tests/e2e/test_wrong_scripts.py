"""Tests of mistakes that show after some steps: the job ends at once, with an error and the
reason."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from forked_run import fft

from fft.trace.starts import start_folders

SCRIPT = Path(__file__).with_name("wrong_script.py")
LIMIT_S = 120

pytestmark = pytest.mark.multiprocess


def run(
    folder: Path, groups: int, *script: str, every: int = 100, resume: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a job with checkpoints, of which by default none is due."""
    flags = ["--no-lighthouse", "--no-progress", "--groups", str(groups)]
    flags += ["--checkpoint", str(folder / "checkpoints"), "--every", str(every)]
    flags += ["--resume"] * resume
    flags += ["--trace-dir", str(folder / "traces"), "--timeout", str(LIMIT_S - 20)]
    return fft("run", *flags, str(SCRIPT), *script, folder=folder, within=LIMIT_S)


@pytest.mark.parametrize(("groups", "starts"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_an_error_of_the_script_is_not_tried_again_and_again(
    groups: int, starts: int, tmp_path: Path
) -> None:
    """The job is not retried from a checkpoint either. One group alone retries the step once."""
    done = run(tmp_path, groups, "raises", "3")
    assert done.returncode == 1
    assert done.stderr.count("ValueError: in the evaluation") == starts, done.stderr
    assert len(start_folders(tmp_path / "traces")) == starts


def test_an_update_that_fails_on_all_groups_ends_the_job_and_is_shown(tmp_path: Path) -> None:
    """No group has the state then, and the job does not restart from a checkpoint either."""
    done = run(tmp_path, 2, "updates", "3", every=2)
    assert done.returncode == 1
    assert "ended with KeyError at" in done.stderr
    assert "failed in the same place" in done.stderr
    assert len(start_folders(tmp_path / "traces")) == 1, done.stderr


def test_gradient_that_only_one_group_has_ends_the_job(tmp_path: Path) -> None:
    """The error names the rank and the parameter on whichever group ends first, and the job is not
    started again."""
    done = run(tmp_path, 2, "branches", "3")
    assert done.returncode == 1, done.stderr
    assert "step 3 was not committed: 1/0#1: parameter 'bias' got no" in done.stderr
    assert "all ranks must contribute to the same parameters" in done.stderr
    assert len(start_folders(tmp_path / "traces")) == 1, done.stderr


@pytest.mark.parametrize(
    ("mistake", "warnings"),
    [
        ("head", ["SGD.step() of an unregistered optimizer"]),
        (
            "averages_one",
            [
                "2 parameters of the optimizers are in no model of sync_gradients()",
                "register(generators=…) without torch.default_generator",
                "registered optimizers without any gradient in their first steps: SGD.",
            ],
        ),
        (
            "replaces",
            [
                "the script has no reference to extra['ema'] any more",
                "the script calls accelerator.accumulate()",
            ],
        ),
        pytest.param("nothing", [], marks=pytest.mark.long),
    ],
)
def test_state_outside_of_the_job_is_shown_once_by_fft_run(
    mistake: str, warnings: list[str], tmp_path: Path
) -> None:
    done = run(tmp_path, 2, mistake, "0")
    assert done.returncode == 0, done.stderr
    assert [done.stderr.count(text) for text in warnings] == [1] * len(warnings), done.stderr
    assert done.stderr.count("rank 0/0: ") + done.stderr.count("rank 1/0: ") == len(warnings)


def test_loop_left_early_by_all_logs_the_step_and_the_break(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "breaks", "3")
    assert done.returncode == 0, done.stderr
    for log in (tmp_path / "traces" / "logs").glob("g*.log"):
        assert "the loop was left (`break`?) after step 3, before the job ended" in log.read_text()


@pytest.mark.long
def test_completed_job_started_again_reports_nothing_left_to_do(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "nothing", "0", every=10).returncode == 0
    done = run(tmp_path, 2, "nothing", "0", every=10, resume=True)
    assert done.returncode == 0, done.stderr
    assert "nothing was left to do after step 20" in done.stderr


@pytest.mark.long
def test_group_left_alone_by_a_finished_group_fails(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "leaves", "3")
    assert done.returncode == 1, done.stderr
    assert "NotEnoughGroups: 1 whole replica groups" in done.stderr
    assert "group 1 rank 0 ended with exit status 0 after step 3, unasked" in done.stderr
    assert "the others could not go on without it" in done.stderr


@pytest.mark.long
def test_error_of_one_group_is_printed_when_the_group_restarts(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "once", "3")
    assert "group 1 rank 0 (pid " in done.stderr and "ended with ValueError at" in done.stderr
    assert "group 1 is started again" in done.stderr


@pytest.mark.long
def test_averaging_across_groups_between_transactions_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "averages", "3")
    assert done.returncode == 1
    assert "allreduce() between two transactions" in done.stderr
