"""Tests of jobs that run one after another under one `fft serve`, by the same command."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from forked import Forked, as_main
from forked_run import fft, running
from waiting import wait_until

from fft.trace.audit import audit_dir

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]
WORKER = Path(__file__).with_name("starts_worker.py")
LIMIT_S = 180
STEPS = 3


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the environment that `fft serve` announces for the processes of a job."""
    with running("serve", "--no-lighthouse", folder=tmp_path) as server:
        wait_until(lambda: "\n" in server.stdout_text, "where it serves", LIMIT_S)
        announced = dict(word.split("=", 1) for word in server.stdout_text.split())
        yield {**os.environ, **announced, "FFT_TRACE_DIR": str(tmp_path / "traces")}


class Plain:
    """A rank that was not started by an FFT launcher."""

    def __init__(self, stack: ExitStack, env: dict[str, str], group: int, *more: str) -> None:
        command = str(WORKER), str(group), str(STEPS), *more
        self.process = Forked(as_main, *command, env=env, talks=True)
        stack.callback(self.process.close)

    def until(self, word: str) -> str:
        """Return the rest of its first line that begins with ``word``."""
        for line in self.process.stdout:
            if f"{line.strip()} ".startswith(f"{word} "):
                return line.removeprefix(word).strip()
        raise AssertionError(
            f"it ended, with {self.process.wait(LIMIT_S)}, and never said {word!r}"
        )

    def ended(self) -> tuple[int, list[str]]:
        """Wait for its end; return its exit status and its remaining lines."""
        lines = self.process.stdout.read().splitlines()
        return self.process.wait(LIMIT_S), lines


def pair(stack: ExitStack, env: dict[str, str], *more: str) -> list[Plain]:
    return [Plain(stack, env, group, *more) for group in (0, 1)]


def whole_job(env: dict[str, str]) -> str:
    """Run a job to its end; return its name on the bus."""
    with ExitStack() as stack:
        ranks = pair(stack, env)
        names = {rank.until("at") for rank in ranks}
        for rank in ranks:
            status, lines = rank.ended()
            assert status == 0
            assert lines == [f"step {n}" for n in range(1, STEPS + 1)]
    assert len(names) == 1, names
    return names.pop()


def killed_job(env: dict[str, str]) -> str:
    """Kill all processes of a job in the middle; return its name on the bus."""
    with ExitStack() as stack:
        ranks = pair(stack, env, "--stay")
        names = {rank.until("at") for rank in ranks}
        for rank in ranks:
            rank.until(f"step {STEPS}")
        for rank in ranks:
            rank.process.end()
    assert len(names) == 1, names
    return names.pop()


def test_plain_scripts_that_end_or_are_killed(env: dict[str, str], tmp_path: Path) -> None:
    name = env["FFT_BUS"].rpartition("/")[2]
    assert whole_job(env) == name
    assert killed_job(env) == f"{name}.start2"
    assert whole_job(env) == f"{name}.start3"
    for traces in ("traces", "traces/start2", "traces/start3"):
        report = audit_dir(tmp_path / traces)
        assert report.ok, report.render()


@pytest.mark.long
def test_a_process_that_still_lives_gets_into_no_other_job(
    env: dict[str, str], tmp_path: Path
) -> None:
    """The process is stopped while the next job begins, and resumes in the middle of it."""
    with ExitStack() as stack:
        killed, stopped = pair(stack, env, "--stay")
        for rank in (killed, stopped):
            rank.until("step")
        stopped.process.stop()
        killed.process.end()
        others = pair(stack, env, "--stay")
        for rank in others:
            assert rank.until("at").endswith(".start2")
            rank.until("step")
        stopped.process.signal(signal.SIGCONT)
        status, lines = stopped.ended()
        assert status == 3, lines
        for rank in others:  # three groups would be members by now
            rank.until("step")
            rank.until("step")
            rank.process.signal(signal.SIGTERM)
    for traces in ("traces", "traces/start2"):
        report = audit_dir(tmp_path / traces)
        assert report.ok, report.render()


@pytest.mark.long
def test_fft_run(env: dict[str, str], tmp_path: Path) -> None:
    for number in (1, 2):
        traces = tmp_path / f"run{number}"
        command = ["run", "--join", "--groups", "2", "--trace-dir", str(traces)]
        command += [str(WORKER), "-", str(STEPS)]
        done = fft(*command, folder=tmp_path, env=env, within=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        logs = [log.read_text().splitlines() for log in (traces / "logs").iterdir()]
        output = [[line for line in lines if line.startswith("step ")] for lines in logs]
        assert output == [[f"step {n}" for n in range(1, STEPS + 1)]] * 2
        report = audit_dir(traces)
        assert report.ok, report.render()
