"""Tests that the file with the job's token is removed with its process, however that ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from forked_run import FftRun, running
from waiting import wait_until

from fft.util.remove_after_death import vanishing

LIMIT_S = 60.0


def announced(process: FftRun) -> Path:
    """Return the path of the token that `fft run` or `fft serve` prints."""
    output = (process.stdout_text + process.stderr_text).split()
    paths = [word.partition("=")[2] for word in output if word.startswith("FFT_TOKEN_FILE=")]
    return Path(paths[0]) if paths else Path("/nowhere")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("command", ["run", "serve"])
def test_token_file_is_removed_with_its_creator(
    tmp_path: Path, command: str, number: signal.Signals
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(600)")
    arguments = [command, "--no-lighthouse"]
    if command == "run":
        arguments += ["--no-progress", "--trace-dir", str(tmp_path / "traces"), str(script)]
    with running(*arguments, folder=tmp_path) as process:
        wait_until(lambda: announced(process).exists(), "it has announced its token", LIMIT_S)
        path = announced(process)
        process.signal(number)
        process.wait(LIMIT_S)
        wait_until(lambda: not path.exists(), "the token is removed", LIMIT_S)


def test_another_file_in_its_place_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with vanishing(path):
        other = tmp_path / "other"
        other.write_text("another's")
        os.replace(other, path)
    assert path.read_text() == "another's"
    with vanishing(path):
        pass
    assert not path.exists()
