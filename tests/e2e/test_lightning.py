"""Tests of Lightning's Trainer on FFT's transactions, with real processes.

Weights and logs are compared bit by bit with Lightning's own DDP.
"""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from forked_run import fft, running
from waiting import wait_until

from fft.launch.exit_status import ExitStatus
from fft.trace.audit import audit_dir

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")
pytestmark = pytest.mark.multiprocess

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_trainer.py"
GAN = Path(__file__).with_name("lightning_gan_script.py")
FSDP = Path(__file__).with_name("lightning_fsdp_script.py")
AVERAGE = Path(__file__).with_name("lightning_average_script.py")
STOP = Path(__file__).with_name("lightning_stop_script.py")
EPOCHS = Path(__file__).with_name("lightning_epochs_script.py")
LIMIT_S = 200
TRANSIENT = """
faults:
  - {name: exception, kind: exception, step: 3, group: 1, rank: 0, phase: backward}
  - {name: one-sided, kind: one_sided, step: 6, group: 0}
  - {name: cut, kind: network_cut, step: 9, group: 1, rank: 0, phase: during_allreduce}
"""
EXCEPTION = """
faults:
  - {name: exception, kind: exception, step: 2, group: 1, rank: 0, phase: backward}
"""
KILL = """
  - {name: kill, kind: kill, step: 12, group: 1, phase: backward}
"""
KILL_AND_DRAIN = """
faults:
  - {name: kill, kind: kill, step: 6, group: 1, phase: backward}
  - {name: drain, kind: drain, step: 10, group: 1, with_groups: 2, settled_steps: 4}
"""


@contextmanager
def lightnings_ddp(folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the script on two processes of Lightning's own DDP in the block; await it at the end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "ddp.log").open("wb") as log:
        process = subprocess.Popen([*torchrun, *command], stdout=log, stderr=log, env=env)
        try:
            yield process
            assert process.wait(LIMIT_S) == 0, (folder / "ddp.log").read_text()
        finally:
            process.kill()


def job(folder: Path, *command: str, plan: str = "", name: str = "run") -> Path:
    """Train on two groups to the end; return the folder of the traces, which the audit accepts."""
    traces = folder / name
    options = ["--groups", "2", "--no-progress", "--no-lighthouse", "--timeout", f"{LIMIT_S - 20}"]
    if plan:
        (folder / "plan.yaml").write_text(plan)
        options += ["--faults", str(folder / "plan.yaml")]
    done = fft("run", "--trace-dir", str(traces), *options, *command, folder=folder, within=LIMIT_S)
    assert done.returncode in (ExitStatus.COMPLETE, ExitStatus.FEWER_GROUPS), (
        done.stdout + done.stderr
    )
    assert "did not fire" not in done.stderr, done.stderr
    found = audit_dir(traces)
    assert found.ok, found.render()
    return traces


def results(*logs: Path) -> list[str]:
    """Return the lines in which the processes describe their final state."""
    # two processes that print at once may share a line
    line = re.compile(r"done at step .*?(?=done at step|$)", re.MULTILINE)
    return [found for log in logs for found in line.findall(log.read_text())]


def written(folder: Path) -> list[dict[str, str]]:
    """Return the rows that the loggers of all processes have written."""
    return [
        row for file in sorted(folder.rglob("metrics.csv")) for row in csv.DictReader(file.open())
    ]


def test_trainer_logs_each_committed_step_once(tmp_path: Path) -> None:
    traces = job(tmp_path, str(EXAMPLE), "--steps", "4", "--dir", str(tmp_path), plan=EXCEPTION)
    first, second = results(*(traces / "logs").iterdir())
    assert first == second
    steps = [int(row["step"]) for row in written(tmp_path) if row["train_loss_step"]]
    assert steps == [0, 1, 2, 3]


@pytest.mark.long
def test_trainer_under_faults_has_the_bits_of_lightnings_ddp(tmp_path: Path) -> None:
    script = [str(EXAMPLE), "--steps", "12"]
    ddp, own = tmp_path / "ddp", tmp_path / "own"
    with lightnings_ddp(tmp_path, *script, "--strategy", "ddp", "--dir", str(ddp)):
        traces = job(tmp_path, *script, "--dir", str(own), plan=TRANSIENT)
    theirs, ours = results(tmp_path / "ddp.log"), results(*(traces / "logs").iterdir())
    assert len(theirs) == len(ours) == 2 and {*theirs, *ours} == {theirs[0]}
    assert written(own) == written(ddp), "each committed step is logged once, with equal values"


@pytest.mark.long
def test_gan_under_faults_has_the_bits_of_lightnings_ddp(tmp_path: Path) -> None:
    ddp, own = tmp_path / "ddp", tmp_path / "own"
    with lightnings_ddp(tmp_path, str(GAN), "ddp", str(ddp)):
        traces = job(tmp_path, str(GAN), "fft", str(own), plan=TRANSIENT)
    theirs, ours = results(tmp_path / "ddp.log"), results(*(traces / "logs").iterdir())
    assert len(theirs) == len(ours) == 2 and {*theirs, *ours} == {theirs[0]}
    assert written(own) == written(ddp)


@pytest.mark.long
def test_trainer_survives_a_kill_and_a_drain(tmp_path: Path) -> None:
    until = ["--stop-after-plan", "5", str(EXAMPLE), "--dir", str(tmp_path / "own")]
    traces = job(tmp_path, *until, plan=KILL_AND_DRAIN)
    assert not results(*(traces / "logs").iterdir()), "a group that drains leaves fit() early"
    steps = [int(row["step"]) for row in written(tmp_path / "own") if row["train_loss_step"]]
    assert steps == list(range(len(steps))), "the first group logs each committed step once"
    assert len(steps) > 20


@pytest.mark.long
def test_groups_average_equal_weights_without_a_seed_and_after_a_kill(tmp_path: Path) -> None:
    traces = job(tmp_path, "--stop-after-plan", "5", str(AVERAGE), plan=KILL_AND_DRAIN)
    first, second = (
        dict(re.findall(r"step (\d+): average (\S+)", "".join(log.read_text() for log in logs)))
        for logs in ((traces / "logs").glob(f"g{group}*") for group in (0, 1))
    )
    both = first.keys() & second.keys()
    assert {step: first[step] for step in both} == {step: second[step] for step in both}
    assert len(both) > 10


@pytest.mark.long
def test_killed_job_resumes_with_the_same_bits(tmp_path: Path) -> None:
    script = [str(EXAMPLE), "--steps", "48", "--dir", str(tmp_path / "own")]
    undisturbed = job(tmp_path, *script, name="undisturbed")
    durable = ["--checkpoint", str(tmp_path / "checkpoints"), "--every", "10"]
    first = tmp_path / "first"
    command = ["run", "--groups", "2", "--trace-dir", str(first), "--no-progress", *durable]
    with running(*command, *script, folder=tmp_path) as process:

        def has_passed_the_checkpoint() -> bool:
            text = "".join(file.read_text() for file in first.glob("*.jsonl"))
            return '"step":36,' in text

        wait_until(has_passed_the_checkpoint, "a checkpoint and some steps", LIMIT_S)
        os.kill(process.pid, signal.SIGKILL)  # its ranks die with it
    resumed = job(tmp_path, *durable, "--resume", *script, name="resumed")
    expected = results(*(undisturbed / "logs").iterdir())
    assert results(*(resumed / "logs").iterdir()) == expected


@pytest.mark.long
def test_sharded_groups_under_faults_have_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    found = []
    for name, plan in (("undisturbed", ""), ("disturbed", TRANSIENT)):
        command = ["--ranks", "2", str(FSDP), str(tmp_path / name)]
        traces = job(tmp_path, *command, plan=plan, name=f"run-{name}")
        found.append(results(*sorted((traces / "logs").iterdir())))
        saved = torch.load(tmp_path / name / "last.ckpt", weights_only=True)
        assert saved["state_dict"]["first.weight"].shape == (16, 8), "the whole model is in a file"
    assert found[0] == found[1]
    first, second, *others = found[0]
    assert others == [first, second], "each shard is equal on both groups"


@pytest.mark.long
def test_early_stop_and_lightnings_own_checkpoint_have_the_same_bits(tmp_path: Path) -> None:
    found = {}
    checkpoint = [str(tmp_path / "1" / "last.ckpt")]
    for name, how, more in (("stop", "stop", []), ("1", "1", []), ("2", "2", checkpoint)):
        traces = job(tmp_path, str(STOP), how, str(tmp_path / name), *more, name=f"run-{name}")
        first, second = results(*(traces / "logs").iterdir())
        assert first == second
        found[name] = first
    assert found["stop"] == found["2"] != found["1"]
    assert "step 32, epoch 2" in found["2"]


@pytest.mark.long
def test_epochs_and_statistics_have_the_bits_of_lightnings_ddp(tmp_path: Path) -> None:
    with lightnings_ddp(tmp_path, str(EPOCHS), "ddp"):
        traces = job(tmp_path, str(EPOCHS), "fft", plan=TRANSIENT + KILL.lstrip("\n"))
    theirs, ours = results(tmp_path / "ddp.log"), results(*(traces / "logs").iterdir())
    assert len(theirs) == len(ours) == 2 and {*theirs, *ours} == {theirs[0]}
