"""Tests of signals to `fft run` and to the processes of its job: which drain, kill, or do
nothing."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from forked_run import running
from waiting import wait_until

from fft.cli.run import Interrupts
from fft.errors import FftError
from fft.trace.resumed import audit_job
from fft.train.data.worker import _end_later
from fft.train.step.leaving import Leaving

LIMIT_S = 60.0
SCRIPT = """
import sys, time, torch, torchft, fft
from pathlib import Path
torch.set_num_threads(1)
manager = fft.ManagerFFT(
    pg=torchft.ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=1
)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
manager.register(model, torch.optim.SGD(model.parameters(), lr=0.01))
manager.sync_gradients(model)
dataset = torch.utils.data.TensorDataset(torch.randn(256, 4))
loader = fft.CursorLoader(dataset, batch_size=2, num_workers=1)
for txn in manager.transactions(loader, max_steps=100000):
    with txn:
        time.sleep(0.01)
        model(txn.batch[0]).sum().backward()
manager.shutdown()
print("left after step", manager.current_step(), flush=True)
"""


def supervisor_calls(
    numbers: list[signal.Signals], monkeypatch: pytest.MonkeyPatch, gap_s: float
) -> int:
    """Return the number of calls to the supervisor: one to drain, a second one to kill."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    calls: list[None] = []
    interrupts = Interrupts()
    interrupts.go_to(lambda: calls.append(None))
    for number in numbers:
        interrupts.take(number, None)
        now[0] += gap_s
    return len(calls)


@pytest.mark.parametrize(
    ("numbers", "gap_s", "times"),
    [
        ([signal.SIGUSR1], 0, 1),
        ([signal.SIGHUP], 0, 1),
        ([signal.SIGUSR1, signal.SIGTERM], 60, 1),  # the warning, and then the time limit
        ([signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM], 60, 2),
        ([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], 60, 1),
        ([signal.SIGTERM, signal.SIGTERM], 0.5, 1),  # to the process, and to the whole step
        ([signal.SIGTERM, signal.SIGTERM], 5, 2),
        ([signal.SIGINT, signal.SIGINT], 0.1, 2),
        ([signal.SIGINT, signal.SIGTERM], 0.1, 2),
    ],
)
def test_first_signal_drains_and_second_that_may_kill_kills(
    numbers: list[signal.Signals], gap_s: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert supervisor_calls(numbers, monkeypatch, gap_s) == times


def test_signal_within_the_handler_of_another_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts, calls = Interrupts(), list[None]()
    interrupts.go_to(lambda: calls.append(None))
    within, is_repeated = [signal.SIGTERM], interrupts._is_repeated

    def interrupted(number: int) -> bool:
        found = is_repeated(number)
        if within:
            interrupts.take(within.pop(), None)
        return found

    monkeypatch.setattr(interrupts, "_is_repeated", interrupted)
    interrupts.take(signal.SIGINT, None)
    assert len(calls) == 2


def test_signals_before_the_supervisor_are_passed_on_once() -> None:
    interrupts, calls = Interrupts(), list[None]()
    for number in (signal.SIGUSR1, signal.SIGHUP):
        interrupts.take(number, None)
    interrupts.go_to(lambda: calls.append(None))
    assert len(calls) == 1


def test_lost_terminal_sends_output_to_a_file(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time; from fft.cli.run import Interrupts\n"
        "made = Interrupts(); made.output = sys.argv[1]\n"
        "signal.signal(signal.SIGHUP, made.take)\n"
        "print('here', flush=True)\n"
        "while made._terminals: time.sleep(0.01)\n"
        "print('after', flush=True)\n"
        "os._exit(0)\n"  # Python restores the default handlers before it exits by itself
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    assert b"here" in os.read(ours, 100)
    os.close(ours)  # the terminal is gone
    process.send_signal(signal.SIGHUP)
    assert process.wait(LIMIT_S) == 0
    assert "after" in (tmp_path / "log").read_text()


def test_signals_to_all_processes_of_a_step_are_one_clean_drain(tmp_path: Path) -> None:
    """The processes are ranks, their monitors, data-loader workers, and helpers of `fft run`."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    traces = tmp_path / "traces"
    command = ["run", "--groups", "2", "--no-progress", "--no-lighthouse"]
    with running(*command, "--trace-dir", str(traces), str(script), folder=tmp_path) as job:

        def committed() -> bool:
            found = [path.read_text() for path in traces.glob("*.jsonl")]
            return len(found) == 2 and all('"note":"consumed"' in text for text in found)

        wait_until(committed, "both groups have committed a step", LIMIT_S)
        tree = psutil.Process(job.pid).children(recursive=True)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            job.signal(number)
            for process in tree:
                with suppress(psutil.NoSuchProcess):  # it has left after the first signal
                    process.send_signal(number)
        code = job.wait(LIMIT_S)
    assert code == 75, job.tail()
    logs = [log.read_text() for log in sorted((traces / "logs").iterdir())]
    assert len(logs) == 2 and all("left after step" in text for text in logs), logs
    audit = audit_job(traces)
    assert audit.ok, audit.render()
    assert not any('"on":"suspect"' in path.read_text() for path in traces.glob("*.jsonl"))
    assert not (traces / "job.token").exists()


@pytest.mark.long
def test_serve_with_parent_ends_with_the_parent(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'fft.cli', 'serve', '--no-lighthouse',"
        " '--with-parent'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    token = Path(parent.stdout.readline().rpartition("=")[2].strip())  # the bus is served now
    assert token.exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    server.wait(LIMIT_S)
    wait_until(lambda: not token.exists(), "it has ended in good order")


ORPHANS = """
import ctypes, os, time
from fft.launch.supervisor import children
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
children._LOOK_S = children._OWN_S = 0.0
made = children.Orphans()
own = os.fork()
if own == 0:
    if os.fork() == 0:
        os._exit(0)
    os._exit(0)
until = time.monotonic() + 30
while len(found := children._zombies()) < 2:
    assert time.monotonic() < until
made.reap([own])
made.reap([own])
assert children._zombies() == {own}, children._zombies()
"""


def test_pid_1_reaps_orphans_and_leaves_its_own_children_alone() -> None:
    subprocess.run([sys.executable, "-c", ORPHANS], check=True, timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "x"}, [(signal.SIGTERM, 30.0)]),
        ({"TORCHELASTIC_RUN_ID": "x", "FFT_DRAIN_SIGNAL": ""}, []),
        ({"TORCHELASTIC_RUN_ID": "x", "FFT_DRAIN_WITHIN": "9"}, [(signal.SIGTERM, 9.0)]),
        ({"TORCHELASTIC_RUN_ID": "x", "FFT_GROUP": "0"}, []),
        ({}, []),
    ],
)
def test_sigterm_drains_by_default_under_torchrun(
    env: dict[str, str],
    expected: list[tuple[signal.Signals, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "FFT_DRAIN_SIGNAL", "FFT_DRAIN_WITHIN", "FFT_GROUP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    asked: list[tuple[signal.Signals, float]] = []
    leaving = object.__new__(Leaving)
    leaving.configure_from_env(lambda within, on: asked.append((on, within)), "0", 0)
    assert asked == expected


def test_unknown_drain_signal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FFT_DRAIN_SIGNAL", "TERM")
    leaving = object.__new__(Leaving)
    with pytest.raises(FftError, match="FFT_DRAIN_SIGNAL=TERM: expected a signal name such as SIG"):
        leaving.configure_from_env(lambda within, on: None, "0", 0)


@pytest.mark.parametrize(("setting", "expected"), [("60.0", 70.0), (None, 40.0)])
def test_data_worker_outlives_the_limit_of_a_drain(
    setting: str | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FFT_DRAIN_WITHIN", raising=False)
    if setting is not None:
        monkeypatch.setenv("FFT_DRAIN_WITHIN", setting)
    before = set(threading.enumerate())
    _end_later(signal.SIGTERM, None)
    (timer,) = set(threading.enumerate()) - before
    assert isinstance(timer, threading.Timer)
    timer.cancel()
    assert timer.interval == expected
