"""Tests of commands in environments in which they cannot work: one line of error, no traceback.

They use real processes and the limits that `ulimit` sets.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fft.bus import open_bus
from fft.cli import app
from fft.cli.shared import plain_errors

LIMIT_S = 100.0
NESTED = "[" * 100_000


def fft(
    *arguments: str, limits: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fft.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, preexec_fn=limits
    )


def few_files(number: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def is_plain(done: subprocess.CompletedProcess[str], expected: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("fft: ") and expected in line, done.stderr


@pytest.mark.parametrize("port", ["99999", pytest.param("-1", marks=pytest.mark.long)])
def test_a_port_that_there_is_not(port: str) -> None:
    is_plain(fft("serve", "--no-lighthouse", "--port", port), f"127.0.0.1:{port}")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    made = tmp_path / "script.py"
    made.write_text("import time; time.sleep(60)")
    return made


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere"])
def test_a_trace_directory_that_cannot_be(script: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    done = fft("run", "--trace-dir", str(tmp_path / place), str(script))
    is_plain(done, f"--trace-dir {tmp_path / place} cannot be written: ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("files", "expected"),
    [(64, ("could not be started: ", "Too many open files")), (16, ("ulimit -n",))],
)
def test_too_few_open_files(
    script: Path, tmp_path: Path, files: int, expected: tuple[str, ...]
) -> None:
    traces, size = str(tmp_path / "traces"), ["--groups", "4", "--ranks", "4"]
    command = ["run", "--no-lighthouse", "--no-progress", *size, "--trace-dir", traces]
    done = fft(*command, str(script), limits=few_files(files))
    for words in expected:
        is_plain(done, words)
    assert "ulimit -n" in done.stderr


def test_lists_within_lists(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text(NESTED)
    (tmp_path / "g0r0i1.jsonl").write_text(NESTED + "\n")
    run = CliRunner()
    with open_bus("memory://deep") as bus:
        received: list[bytes] = []
        bus.subscribe(received.append, lambda error: None)
        arguments = ["dev", "say", "--raw", str(tmp_path / "deep.json"), "--bus", "memory://deep"]
        assert run.invoke(app, arguments).exit_code == 0
        arguments.remove("--raw")
        assert "not JSON" in run.invoke(app, arguments).output
    audited = run.invoke(app, ["audit", str(tmp_path)])
    assert audited.exit_code == 1 and "g0r0i1.jsonl:1: not JSON" in audited.output
    reported = run.invoke(app, ["report", str(tmp_path)])
    assert reported.exit_code == 0 and "g0r0i1.jsonl:1: not JSON" in reported.output


DIAGNOSIS = """
import resource
from pathlib import Path
from fft.launch.supervisor.culprit import Diagnoser
from fft.trace.course import Rollback

diagnoser = Diagnoser("memory://nowhere", None, Path(), 1)
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20,) * 2)
diagnoser.look([Rollback(1, 1, "0/0", "", frozenset())], 0)
diagnoser.close()
"""


def test_no_memory_for_the_thread_of_a_diagnosis() -> None:
    """The end of the command must not hide the reason: a thread that never started cannot be
    joined."""
    command = [sys.executable, "-c", DIAGNOSIS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "there is no diagnosis: can't start new thread\n"


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), MemoryError(), OSError(24, "Too many")]
)
def test_resource_limit_is_reported_in_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BaseException, match="2"), plain_errors():
        raise error
    assert "ulimit -n (files), -v (memory)" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="a bug"), plain_errors():
        raise RuntimeError("a bug")
