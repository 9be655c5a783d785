"""Tests of the copies of what ranks print, from the script runner to the supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fft.launch import script_runner
from fft.launch.supervisor.config import SupervisorError
from fft.launch.supervisor.tee import Tee


@pytest.fixture
def tee() -> Iterator[Tee]:
    made = Tee("first", 0)
    yield made
    made.close()


def ran(tee: Tee, folder: Path, code: str, group: str = "0", rank: int = 0) -> str:
    """Run a script as a rank of `fft run`; return its log."""
    script, log = folder / "script.py", folder / "log"
    script.write_text(code)
    place = {"FFT_GROUP": group, "RANK": str(rank), "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as output:
        command = [sys.executable, script_runner.__file__, str(script)]
        env = {**os.environ, **place, **tee.env(group, rank)}
        subprocess.run(command, stdout=output, stderr=output, env=env, timeout=60, check=True)
    return log.read_text()


def test_printed_lines_reach_the_supervisor_and_the_log(tee: Tee, tmp_path: Path) -> None:
    code = "import sys\nprint('loss', 0.5)\nprint('a', end='')\nprint('é')\n"
    code += "sys.stderr.write('warning')\nprint('unfinished', end='')"
    log = ran(tee, tmp_path, code)
    assert tee.lines() == ["loss 0.5", "aé"], "standard error is in the log only"
    assert log == "loss 0.5\naé\nwarningunfinished"
    assert tee.lines() == []


def test_ranks_that_were_not_chosen_send_no_copy(tee: Tee, tmp_path: Path) -> None:
    assert ran(tee, tmp_path, "print('x')", "1") == "x\n"
    assert tee.lines() == []


def test_several_ranks_are_labelled(tmp_path: Path) -> None:
    tee = Tee("all", 0)
    for rank in (0, 1):
        ran(tee, tmp_path, "print('x')", "1", rank)
    assert tee.lines() == ["[1.0] x", "[1.1] x"]
    tee.close()


def test_a_supervisor_that_does_not_read_stops_no_rank(tee: Tee, tmp_path: Path) -> None:
    log = ran(tee, tmp_path, "for n in range(50): print('x' * 5000)")
    assert len(log) == 50 * 5001
    assert set(map(len, tee.lines())) == {3500}, "long lines are cut in the copy"


def test_tee_rejects_names_that_are_no_ranks() -> None:
    with pytest.raises(SupervisorError, match=r"GROUP\.RANK.*found '3'"):
        Tee("0.1,3", 0)
