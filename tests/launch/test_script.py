"""Tests of starting the script: by the fork server, and by exec where it cannot be used."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from fft.launch.supervisor.children import Child
from fft.launch.supervisor.script import Script

LIMIT_S = 60


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Script]]:
    """Scripts whose fork servers are ended after the test."""
    made: list[Script] = []
    yield made
    for script in made:
        script.close()


def opened(started: list[Script], path: Path, text: str, *arguments: str) -> Script:
    """Return a script with a fork server, in the supervisor's environment."""
    path.write_text(text)
    started.append(Script([str(path), *arguments]))
    started[-1].open({**os.environ, "OMP_NUM_THREADS": "1"}, path.with_suffix(".server"))
    return started[-1]


def run(script: Script, log: Path, rank: int = 0) -> Child:
    """Run a rank to its end, reap it, and return it."""
    child = Child("0", rank, 1, script, {**os.environ, "RANK": str(rank)}, log)
    assert child.dies_within(LIMIT_S)
    child.reap()
    return child


def test_forked_rank_has_its_own_environment_arguments_log_and_exit_code(
    started: list[Script], tmp_path: Path
) -> None:
    text = (
        "import os, sys\n"
        "is_leader = os.getsid(0) == os.getpid()\n"
        "print(sys.argv[1:], os.environ['RANK'], __name__, is_leader, flush=True)\n"
        "print(os.getppid(), file=sys.stderr)\n"
        "assert 'FFT_ERROR_FD' not in os.environ and 'FFT_FORK_SERVER_FD' not in os.environ\n"
        "os.fstat(int(os.environ['FFT_DEATH_MUTEX_FD']))\n"
        "sys.exit(3 + int(os.environ['RANK']))\n"
    )
    script = opened(started, tmp_path / "script.py", text, "--x", "1")
    for rank in (0, 1):
        log = tmp_path / f"{rank}.log"
        child = run(script, log, rank)
        assert child.code == 3 + rank
        assert child.error_place is not None and child.error_place.is_a(SystemExit)
        expected = f"['--x', '1'] {rank} __main__ True\n{os.getpid()}\n"
        assert log.read_text() == expected
    assert script.server_pid is not None


def test_signal_that_ends_a_forked_rank_is_its_exit_code(
    started: list[Script], tmp_path: Path
) -> None:
    script = opened(started, tmp_path / "script.py", "import signal\nsignal.pause()\n")
    child = Child("0", 0, 1, script, dict(os.environ), tmp_path / "log")
    child.signal(signal.SIGKILL)
    assert child.dies_within(LIMIT_S)
    assert child.exit_code() == child.reap() == -signal.SIGKILL


@pytest.mark.long
def test_forked_ranks_draw_different_random_numbers(started: list[Script], tmp_path: Path) -> None:
    text = (
        "import random, numpy, torch\n"
        "print(random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed())\n"
    )
    script = opened(started, tmp_path / "script.py", text)
    logs = [tmp_path / f"{rank}.log" for rank in (0, 1)]
    for rank, log in enumerate(logs):
        assert run(script, log, rank).code == 0
    numbers = [log.read_text().split() for log in logs]
    assert len(numbers[0]) == 4
    assert all(one != other for one, other in zip(*numbers, strict=True))
    assert script.server_pid is not None


def test_server_without_safe_forks_is_replaced_by_exec(
    started: list[Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import of the script, here of a numpy of the test, has started a thread."""
    packages = tmp_path / "packages"
    packages.mkdir()
    site = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (packages / "sitecustomize.py").write_text(site)
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ['PYTHONPATH']}")
    script = opened(started, tmp_path / "script.py", "print('ran')\n")
    assert run(script, tmp_path / "log").code == 0
    assert (tmp_path / "log").read_text() == "ran\n"
    assert script.server_pid is None


def test_killed_server_is_replaced_by_exec_with_a_warning(
    started: list[Script], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = opened(started, tmp_path / "script.py", "print('ran')\n")
    assert run(script, tmp_path / "log").code == 0
    assert script.server_pid is not None
    server = psutil.Process(script.server_pid)
    server.kill()
    wait_until(lambda: server.status() == psutil.STATUS_ZOMBIE, "it has ended")
    with caplog.at_level(logging.WARNING):
        assert run(script, tmp_path / "log").code == 0
    assert "without the fork server" in caplog.text
    assert (tmp_path / "log").read_text() == "ran\nran\n"
    assert script.server_pid is None


def test_server_and_forked_ranks_end_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import signal\nsignal.pause()\n")
    code = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from fft.launch.supervisor.script import Script\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "script = Script([str(folder / 'script.py')])\n"
        "script.open(dict(os.environ), folder / 'server')\n"
        "rank = script.start(dict(os.environ), folder / 'log', ())\n"
        "print(script.server_pid, rank.pid, flush=True)\n"
        "signal.pause()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(processes, LIMIT_S)
    assert len(processes) == 2 and not alive


@pytest.mark.parametrize(
    ("imports", "loaded"),
    [
        ("json, torchft", True),
        ("typing\nfrom torchft import manager", True),
        ("yaml, torchft", False),
    ],
)
def test_server_imports_nothing_that_may_depend_on_the_rank(
    imports: str, loaded: bool, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(f"import {imports}\n")
    code = (
        "import importlib\n"
        "from fft.launch import script_runner\n"
        "names = []\n"
        "importlib.import_module = names.append\n"
        f"script_runner._load_imports_of({str(tmp_path / 'script.py')!r}, is_for_all=True)\n"
        "print(*names)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("torchft" in done.stdout) is loaded
    assert "yaml" not in done.stdout
