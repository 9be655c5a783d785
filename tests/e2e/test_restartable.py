"""Tests of `fft.restartable` in real processes: errors, deaths, hooks, limits of restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_run import fft as run_fft

from fft.errors import LiveBlockFailed
from fft.train.api.restartable import _Restarts
from tests.acceptance.live_kills import judged

SCRIPT = Path(__file__).with_name("restart_script.py")
JOINS = """
import os, signal, time
from pathlib import Path
import fft

JOINER = Path(os.environ["FFT_TRACE_DIR"], "g1r0i2.jsonl")  # exists when the process joins


@fft.restartable(stop_on=KeyError)
def work(call):
    me = call.members[call.rank]
    print(f"iteration {call.iteration} of {me}", flush=True)
    if me.group == "1" and call.iteration == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while call.iteration == 0 or not JOINER.exists():
        time.sleep(0.01)
    raise KeyError("for ever")


try:
    work()
except BaseException as error:
    print(type(error).__name__, error, flush=True)
    raise
"""


def run_script(folder: Path, mode: str) -> tuple[str, list[str]]:
    """Run the script; return the output of `fft run`, and the logs of its processes by name."""
    traces = folder / "run"
    options = ["--groups", "2", "--trace-dir", str(traces)]
    done = run_fft("run", *options, str(SCRIPT), mode, folder=folder, within=120)
    logs = [log.read_text() for log in sorted((traces / "logs").iterdir())]
    assert len(logs) == 3, [done.stdout, done.stderr, *logs]
    judged(traces)
    return done.stdout + done.stderr, logs


@pytest.mark.multiprocess
def test_restartable_function_survives_an_error_and_a_death(tmp_path: Path) -> None:
    output, (first, killed, replacement) = run_script(tmp_path, "ends")
    for number in range(3):
        assert f"iteration {number} of 0/0#1" in first, output
    assert "iteration 1 of 1/0#1" in killed and "iteration 2 of 1/0#2" in replacement
    assert "sum 6.0" in first and "sum 6.0" in replacement
    attempt = "on_join health_check"
    rollback = f"on_abort on_unwound {attempt}"
    assert f"order {attempt} {rollback} {rollback} on_complete\n" in first
    assert f"order {attempt} on_complete\n" in replacement


@pytest.mark.multiprocess
def test_process_that_joins_when_the_job_ends_raises_its_refusal(tmp_path: Path) -> None:
    (tmp_path / "joins.py").write_text(JOINS)
    traces = tmp_path / "run"
    command = ["run", "--groups", "2", "--trace-dir", str(traces), str(tmp_path / "joins.py")]
    assert run_fft(*command, folder=tmp_path, within=120).returncode == 1
    log = (traces / "logs" / "g1r0-2.log").read_text()
    assert "\nRestartRefused KeyError: 'for ever' on 0/0#1, whose log has" in log, log
    assert "Drained" not in log.partition("Traceback")[0] and "iteration" not in log


def test_only_restarts_within_the_time_count() -> None:
    counts = []
    for within_s in (None, 1000.0, 1e-9):
        restarts = _Restarts(1, within_s, ())
        for _ in range(3):
            restarts.failed(LiveBlockFailed("a member died", ()))
        counts.append(restarts._recent())
    assert counts == [3, 3, 0]


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("stops", "KeyError: 'for ever' on 0/0#1, whose log has the traceback, is not followed"),
        ("fails", "3 restarts would exceed max_restarts=2; failed last: 0/0#1"),
    ],
)
def test_restarts_are_limited_on_all_members(tmp_path: Path, mode: str, reason: str) -> None:
    _, (first, _, replacement) = run_script(tmp_path, mode)
    for log in (first, replacement):
        assert f"RestartRefused {reason}" in log and "on_complete" not in log
        assert log.rstrip().endswith("on_leave")
