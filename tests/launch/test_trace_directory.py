"""Tests of the trace directory: held by one job, shared by its hosts, with a folder for each
start."""

from __future__ import annotations

import multiprocessing
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from forked_run import fft, running
from waiting import wait_until

from fft.launch.services import start_services
from fft.launch.supervisor import SupervisorError
from fft.launch.trace_directory import folder_for, held_traces, refuse_launcher
from fft.trace.resumed import audit_job
from fft.trace.starts import folder_of, start_folder
from fft.util.files import claimed

LIMIT_S = 60.0
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "several-machines.md"
SCRIPT = """
import os, sys, torch, torchft, fft
torch.set_num_threads(1)
manager = fft.ManagerFFT(
    pg=torchft.ProcessGroupGloo(), load_state_dict=None, state_dict=None,
    min_replica_size=int(os.environ["NUM_REPLICA_GROUPS"]),
)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
manager.register(model, torch.optim.SGD(model.parameters(), lr=0.01))
manager.sync_gradients(model)
dataset = torch.utils.data.TensorDataset(torch.randn(256, 4))
for txn in manager.transactions(fft.CursorLoader(dataset, batch_size=2), max_steps=4):
    with txn:
        model(txn.batch[0]).sum().backward()
manager.shutdown()
"""


def _hold(root: Path, job: str | None, line: Connection) -> None:
    with held_traces(root, job):
        line.send("held")
        line.recv()


def holder(root: Path, job: str | None) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """Start a process that holds ``root`` until it is asked to end, or killed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(root, job, theirs), daemon=True)
    process.start()
    assert ours.poll(LIMIT_S) and ours.recv() == "held"
    return process, ours


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        (None, None, False),
        (None, "a", False),
        ("a", None, False),
        ("a", "b", False),
        ("a", "a", True),
    ],
)
def test_trace_directory_is_held_by_one_job(
    tmp_path: Path, first: str | None, second: str | None, is_shared: bool
) -> None:
    process, line = holder(tmp_path, first)
    if is_shared:
        with held_traces(tmp_path, second):
            pass
    else:
        with (
            pytest.raises(
                SupervisorError, match=rf"in use by the `fft run` with pid {process.pid}"
            ),
            held_traces(tmp_path, second),
        ):
            pass
    process.kill()  # the kernel releases the lock
    process.join()
    line.close()
    with held_traces(tmp_path, second):
        pass


def test_folder_of_a_start_is_the_same_on_all_hosts_and_for_no_other_start(tmp_path: Path) -> None:
    first = folder_for(tmp_path, "job-a")
    assert first == tmp_path == folder_for(tmp_path, "job-a")
    (first / "g0r0i1.jsonl").touch()
    assert folder_of(tmp_path, "job-a") == tmp_path
    second = folder_of(tmp_path, "job-b")
    assert second == tmp_path / "start2" == folder_of(tmp_path, "job-b")
    (second / "g0r0i1.jsonl").touch()
    assert folder_for(tmp_path, None) == tmp_path / "start3"
    assert folder_of(tmp_path, "job-a") == tmp_path


def test_next_start_folder_follows_all_others_including_empty_ones(
    tmp_path: Path,
) -> None:
    for name in ("a.jsonl", "start3/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "start2").mkdir()
    assert start_folder(tmp_path) == tmp_path / "start4"


def test_claimed_file_is_never_one_that_exists(tmp_path: Path) -> None:
    names = [claimed(tmp_path / "g0r0-1.log").name for _ in range(3)]
    assert names == ["g0r0-1.log", "g0r0-1.2.log", "g0r0-1.3.log"]


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "1"}, "torchrun starts 2 copies"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}, "srun starts 3 copies"),
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, None),  # a batch script
        ({}, None),
    ],
)
def test_copies_by_another_launcher_are_refused(
    environ: Mapping[str, str], named: str | None
) -> None:
    if named is None:
        refuse_launcher(environ)
        return
    with pytest.raises(SupervisorError, match=named):
        refuse_launcher(environ)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    made = tmp_path / "train.py"
    made.write_text(SCRIPT)
    return made


def test_run_refuses_a_trace_directory_in_use_until_its_job_is_killed(
    tmp_path: Path, script: Path
) -> None:
    traces = tmp_path / "traces"
    command = ["run", "--no-progress", "--no-lighthouse", "--trace-dir", str(traces)]
    waits = tmp_path / "waits.py"
    waits.write_text("import time\ntime.sleep(600)\n")
    with running(*command, str(waits), folder=tmp_path) as job:
        wait_until((traces / "logs" / "g0r0-1.log").exists, "it runs", LIMIT_S)
        second = fft(*command, str(script), folder=tmp_path, within=LIMIT_S)
        assert second.returncode == 2
        assert "in use by the `fft run` with pid" in second.stderr
        job.signal(signal.SIGKILL)
        job.wait(LIMIT_S)
    again = fft(*command, str(script), folder=tmp_path, within=LIMIT_S)
    assert again.returncode == 0, again.stderr
    assert (traces / "logs" / "g0r0-1.2.log").exists()
    assert audit_job(traces).ok


def commands_of_guide() -> list[list[str]]:
    """Return the `fft run --join` commands of the guide, in their order."""
    lines = re.findall(r"^fft (run --join .*) script\.py ARGS…$", GUIDE.read_text(), re.MULTILINE)
    return [line.split() for line in lines]


@pytest.mark.long
def test_commands_of_the_guide_work_in_one_directory(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two hosts of the guide share a disk; the second one joins again after its end."""
    monkeypatch.chdir(tmp_path)
    first, second, *_ = commands_of_guide()
    assert first[-2:] == second[-2:] == ["--trace-dir", "traces"]
    services = start_services(with_lighthouse=False)
    env = {"FFT_BUS": services.bus_url, "FFT_TOKEN": "0123456789abcdef" * 4}
    try:
        for _ in range(2):
            with ExitStack() as stack:
                start = [
                    running(*command, "--no-progress", str(script), folder=tmp_path, env=env)
                    for command in (first, second)
                ]
                for job in [stack.enter_context(each) for each in start]:
                    assert job.wait(LIMIT_S) == 0, job.tail()
    finally:
        services.close()
    for folder in (tmp_path / "traces", tmp_path / "traces" / "start2"):
        assert {path.name for path in folder.glob("*.jsonl")} == {
            f"g{group}r0i1.jsonl" for group in range(4)
        }
    audit = audit_job(tmp_path / "traces")
    assert audit.ok and len(audit.starts) == 2, audit.render()


@pytest.mark.long
@pytest.mark.multiprocess
def test_run_under_torchrun_is_refused(tmp_path: Path, script: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--standalone", "--no-python", sys.executable, "-m", "fft.cli", "run"]
    done = subprocess.run(
        [*launcher, "--trace-dir", "traces", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode != 0
    assert "torchrun starts 2 copies of `fft run`" in done.stderr
    assert not (tmp_path / "traces").exists()
