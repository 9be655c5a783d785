"""Tests of torchtitan's trainer on FFT's transactions, with real processes on CPU.

The trainer, model, optimizer container, dataloader and checkpoints are torchtitan's. The patches
that a CPU needs are those of ``examples/torchtitan_cpu.py``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked_run import fft, running
from waiting import wait_until

from fft.launch.exit_status import ExitStatus
from fft.trace.audit import audit_dir

pytest.importorskip("torchtitan", reason="the extra `titan` is not installed")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("titan_script.py")
LIMIT_S = 280
TENSOR_PARALLEL = ("--parallelism.tensor-parallel-degree", "2")
TRANSIENT = """
faults:
  - {name: exception, kind: exception, step: 2, group: 1, rank: 1, phase: backward}
  - {name: one-sided, kind: one_sided, step: 4, group: 0}
  - {name: cut, kind: network_cut, step: 6, group: 1, rank: 0, phase: during_allreduce}
"""
INSIDE = """
faults:
  - {name: exception, kind: exception, step: 2, group: 0, rank: 1, phase: backward}
  - {name: cut, kind: network_cut, step: 4, group: 0, rank: 2, phase: backward}
"""
KILLS_AND_DRAIN = """
faults:
  - {name: kill-rank, kind: kill, step: 4, group: 1, rank: 0, phase: backward}
  - {name: kill-group, kind: kill, step: 10, group: 1, phase: backward, with_groups: 2,
     settled_steps: 3}
  - {name: drain, kind: drain, step: 16, group: 1, with_groups: 2, settled_steps: 4}
"""


def arguments(folder: Path, name: str, steps: int, *others: str) -> list[str]:
    """Return the command of a rank, which writes its result to the folder ``name``."""
    (folder / name).mkdir()
    options = ["--training.steps", f"{steps}", "--dump-folder", str(folder / f"{name}-files")]
    return [str(SCRIPT), str(folder / name), *options, *others]


@contextmanager
def torchtitans(folder: Path, replicas: int, *command: str, ranks: int = 2) -> Iterator[None]:
    """Run replicas of ``ranks`` processes of torchtitan without FFT in the block; await the end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--nproc-per-node", f"{ranks * replicas}"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    plain = ["--fault-tolerance.no-enable"]
    plain += ["--parallelism.data-parallel-replicate-degree", f"{replicas}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "plain.log").open("wb") as log:
        whole = [*torchrun, *command, *plain]
        process = subprocess.Popen(whole, stdout=log, stderr=log, env=env)
        try:
            yield
            assert process.wait(LIMIT_S) == 0, (folder / "plain.log").read_text()
        finally:
            process.kill()


def job(
    folder: Path,
    *command: str,
    plan: str = "",
    name: str = "run",
    groups: int = 2,
    ranks: int = 2,
) -> Path:
    """Train on groups of ``ranks``; return the folder of the traces, which the audit accepts."""
    traces = folder / f"traces-{name}"
    options = ["--groups", f"{groups}", "--ranks", f"{ranks}", "--no-progress", "--no-lighthouse"]
    options += ["--timeout", f"{LIMIT_S - 20}", "--trace-dir", str(traces)]
    if plan:
        (folder / "plan.yaml").write_text(plan)
        options += ["--faults", str(folder / "plan.yaml")]
    done = fft("run", *options, *command, folder=folder, within=LIMIT_S)
    assert done.returncode in (ExitStatus.COMPLETE, ExitStatus.FEWER_GROUPS), (
        done.stdout + done.stderr
    )
    assert "did not fire" not in done.stderr, done.stderr
    found = audit_dir(traces)
    assert found.ok, found.render()
    return traces


def results(folder: Path) -> dict[str, str]:
    """Return the final step and digest of each rank."""
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def logged_steps(traces: Path) -> list[int]:
    """Return the steps that all ranks together have logged, in the order of time."""
    found = []
    for log in (traces / "logs").iterdir():
        found += re.findall(r"(\d\d:\d\d:\d\d,\d+) - root - INFO - step: +(\d+) ", log.read_text())
    return [int(step) for _, step in sorted(found)]


@pytest.mark.parametrize("options", [(), TENSOR_PARALLEL], ids=["fsdp", "tensor"])
def test_trainer_under_faults_has_the_bits_of_torchtitans_hsdp(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    with torchtitans(tmp_path, 2, *arguments(tmp_path, "plain", 8, *options)):
        traces = job(tmp_path, *arguments(tmp_path, "own", 8, *options), plan=TRANSIENT)
    theirs, ours = results(tmp_path / "plain"), results(tmp_path / "own")
    assert len(theirs) == 4
    assert ours == theirs
    assert logged_steps(traces) == list(range(1, 9)), "each committed step is logged once"


@pytest.mark.long
def test_fsdp_with_tensor_parallelism_has_the_bits_of_torchtitan(
    tmp_path: Path,
) -> None:
    with torchtitans(tmp_path, 1, *arguments(tmp_path, "plain", 6, *TENSOR_PARALLEL), ranks=4):
        command = arguments(tmp_path, "own", 6, *TENSOR_PARALLEL)
        job(tmp_path, *command, plan=INSIDE, groups=1, ranks=4)
    theirs, ours = results(tmp_path / "plain"), results(tmp_path / "own")
    assert len(theirs) == 4
    assert ours == theirs


@pytest.mark.long
def test_accumulation_has_the_bits_of_torchtitan_also_under_faults(
    tmp_path: Path,
) -> None:
    """The gradients of several groups are added in another order than by torchtitan."""
    options = ["--training.global-batch-size", "8"]
    with torchtitans(tmp_path, 1, *arguments(tmp_path, "plain", 6, *options)):
        job(tmp_path, *arguments(tmp_path, "one", 6, *options), groups=1, name="one")
    assert results(tmp_path / "one") == results(tmp_path / "plain")
    options = ["--training.global-batch-size", "16"]
    job(tmp_path, *arguments(tmp_path, "calm", 8, *options), name="calm")
    job(tmp_path, *arguments(tmp_path, "faulty", 8, *options), plan=TRANSIENT, name="faulty")
    assert results(tmp_path / "faulty") == results(tmp_path / "calm")


@pytest.mark.long
@pytest.mark.parametrize("options", [(), TENSOR_PARALLEL], ids=["fsdp", "tensor"])
def test_trainer_survives_lost_ranks_a_lost_group_and_a_drain(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    command = ["--stop-after-plan", "5", *arguments(tmp_path, "own", 1000, *options)]
    traces = job(tmp_path, *command, plan=KILLS_AND_DRAIN)
    steps = logged_steps(traces)
    assert steps == list(range(1, len(steps) + 1)), "group 0 logs each committed step once"
    assert len(steps) > 20


@pytest.mark.long
def test_killed_job_resumes_with_the_same_bits(tmp_path: Path) -> None:
    job(tmp_path, *arguments(tmp_path, "undisturbed", 16), name="undisturbed")
    durable = ["--checkpoint", str(tmp_path / "checkpoints"), "--every", "5"]
    first = tmp_path / "first"
    command = ["run", "--groups", "2", "--ranks", "2", "--trace-dir", str(first), "--no-progress"]
    with running(
        *command, *durable, *arguments(tmp_path, "killed", 16), folder=tmp_path
    ) as process:

        def has_passed_a_checkpoint() -> bool:
            text = "".join(file.read_text() for file in first.glob("*.jsonl"))
            return '"step":8,' in text

        wait_until(has_passed_a_checkpoint, "a checkpoint and some steps", LIMIT_S)
        os.kill(process.pid, signal.SIGKILL)  # its ranks die with it
    assert not results(tmp_path / "killed")
    job(tmp_path, *durable, "--resume", *arguments(tmp_path, "resumed", 16), name="resumed")
    assert results(tmp_path / "resumed") == results(tmp_path / "undisturbed")


@pytest.mark.long
@pytest.mark.parametrize("options", [(), TENSOR_PARALLEL], ids=["fsdp", "tensor"])
def test_torchtitans_own_checkpoint_resumes_with_the_same_bits(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    job(tmp_path, *arguments(tmp_path, "whole", 12, *options), name="whole")
    files = ["--checkpoint.enable", "--checkpoint.interval", "4", "--dump-folder", str(tmp_path)]
    files += options
    job(tmp_path, *arguments(tmp_path, "half", 8, *files), name="half")
    saved = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert saved == ["step-4", "step-8"]
    traces = job(tmp_path, *arguments(tmp_path, "rest", 12, *files), name="rest")
    assert logged_steps(traces) == [9, 10, 11, 12]
    assert results(tmp_path / "rest") == results(tmp_path / "whole")
