"""Spares: what they load before they have a place, and what becomes of those that have died."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fft.launch import script_runner
from fft.launch.supervisor.children import Child
from fft.launch.supervisor.spares import Spares

SCRIPT = """\
'''What the script is.'''
from __future__ import annotations
import colorsys, not_there_at_all
import ours
LOADED = 1
import mimetypes
print(ours.RANK, LOADED, flush=True)
"""
WAIT_S = 30


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "ours.py").write_text("import os\nRANK = os.environ['RANK']\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def test_a_spare_loads_installed_packages_that_come_first_and_nothing_of_the_users(
    script: Path,
) -> None:
    """That might depend on its place, or on what the script does before."""
    code = f"""
import sys
sys.path.insert(0, {str(script.parent)!r})
from fft.launch import script_runner
script_runner._load_imports_of({str(script)!r})
print(sorted({{"colorsys", "mimetypes", "ours"}} & {{*sys.modules}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['colorsys']"


def test_a_spare_runs_the_script_as_whom_it_is_told_and_into_that_log(script: Path) -> None:
    script.write_text("import json, os\nprint('rank', os.environ['RANK'], flush=True)\n")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        env = {**os.environ, "FFT_ROLE_FD": str(theirs.fileno()), "RANK": "none"}
        command = [sys.executable, script_runner.__file__, str(script)]
        spare = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
        ours.settimeout(WAIT_S)
        assert ours.recv(1) == b"r"
        log = script.parent / "log"
        word = {"env": {"RANK": "3"}, "log": str(log)}
        ours.sendall(json.dumps(word).encode() + b"\n")
        assert spare.wait(WAIT_S) == 0
    assert log.read_text() == "rank 3\n"


def test_a_spare_whose_supervisor_lets_go_of_it_ends(script: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        env = {**os.environ, "FFT_ROLE_FD": str(theirs.fileno())}
        command = [sys.executable, script_runner.__file__, str(script)]
        spare = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
    ours.close()
    assert spare.wait(WAIT_S) == 0


def test_no_place_is_given_to_a_spare_that_has_died(script: Path, tmp_path: Path) -> None:
    script.write_text("import json\n")

    def start(number: int, fd: int) -> Child:
        env = {**os.environ, "FFT_ROLE_FD": str(fd)}
        log = tmp_path / f"spare-{number}.log"
        return Child("spare", number, 1, [str(script)], env, log, (fd,))

    spares = Spares(2, start)
    first, second = spares.started()
    try:
        deadline = time.monotonic() + WAIT_S
        while not all(spare.is_ready for spare in spares._spares):
            assert time.monotonic() < deadline
        first.signal(signal.SIGKILL)
        assert first.dies_within(WAIT_S)
        assert spares.take({"RANK": "1"}, tmp_path / "log") is second
        assert spares.take({"RANK": "1"}, tmp_path / "log") is None
        assert spares.started() == [], "the job has the processor for itself for a while"
    finally:
        spares.end()
        for child in (first, second):
            assert child.dies_within(WAIT_S)
            child.reap()
