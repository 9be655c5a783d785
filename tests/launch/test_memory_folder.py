"""Tests of the folder in shared memory that `fft run` makes for copies, and of its removal."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from fft.launch import memory
from fft.launch.memory import KEPT_S, copies_folder, free_memory
from fft.launch.supervisor import RunConfig
from fft.util import remove_after_death
from fft.util.remove_after_death import vanishing


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A job whose folder is below a directory of the test."""
    monkeypatch.setattr(memory, "ROOT", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return RunConfig([str(tmp_path / "script.py")], 2, 2, tmp_path / "traces", memory="auto")


def folders() -> list[Path]:
    return list(memory.ROOT.iterdir())


def test_folder_is_private_and_removed_at_the_end(config: RunConfig) -> None:
    with copies_folder(config, joins=False) as (plan, _, _):
        assert plan is not None and plan.place.stat().st_mode & 0o777 == 0o700
        assert folders() == [plan.place]
        assert 0 < plan.limit <= free_memory()
    assert folders() == []


def test_same_command_has_a_folder_of_its_own_while_it_runs_twice(config: RunConfig) -> None:
    with copies_folder(config, joins=False) as (plan, _, _):
        with copies_folder(config, joins=False) as (other, _, _):
            assert plan is not None and other is not None and plan.place != other.place
        assert plan.place.exists() and not other.place.exists()


def test_folder_stays_for_the_next_start_if_asked(config: RunConfig) -> None:
    with copies_folder(config, joins=False) as (plan, _, keep):
        assert plan is not None
        (plan.place / "step-4").mkdir()
        keep()
    with copies_folder(config, joins=False) as (again, _, _):
        assert again is not None and again.place == plan.place
        assert (again.place / "step-4").is_dir()
    assert folders() == []


def test_folder_of_another_user_is_not_used(config: RunConfig) -> None:
    with copies_folder(config, joins=False) as (plan, _, _):
        assert plan is not None
    plan.place.mkdir(mode=0o777)
    plan.place.chmod(0o777)
    with copies_folder(config, joins=False) as (other, _, _):
        assert other is not None and other.place != plan.place


def test_folder_that_no_process_removes_any_more_is_swept(config: RunConfig) -> None:
    old, held = (memory.ROOT / f"fft-{os.geteuid()}-{name}" for name in ("old", "new"))
    for folder in (old, held):
        folder.mkdir()
    long_ago = time.time() - 3 * KEPT_S
    os.utime(old, (long_ago, long_ago))
    with copies_folder(config, joins=False):
        assert not old.exists() and held.exists()


def test_hosts_without_a_token_have_no_copies(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with copies_folder(config, joins=True) as (plan, _, _):
        assert plan is None and folders() == []
    assert "set FFT_TOKEN_FILE" in caplog.text


def killed(folder: Path, kept_s: float, has_copy: bool = True) -> float:
    """Hold a folder in a process that is killed; return the time of its death."""
    if has_copy:
        (folder / "step-4").touch()
    source = (
        "import sys, pathlib, fcntl, contextlib\n"
        "from fft.util.remove_after_death import vanishing\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "with (folder / '.job.lock').open('a') as lock, vanishing(folder, float(sys.argv[2])):\n"
        "    with contextlib.suppress(BlockingIOError):  # the test holds it\n"
        "        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", source, str(folder), str(kept_s)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    at = time.monotonic()
    child.kill()
    child.communicate()
    return at


def removers(folder: Path, kept_s: str) -> list[psutil.Process]:
    """Return the processes that are to remove the folder after that time."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if {str(folder), kept_s} <= set(p.info["cmdline"] or ())]


def test_folder_of_a_killed_process_is_removed_after_some_time(tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    at = killed(folder, 0.5)
    wait_until(lambda: not folder.exists(), "its removal")
    assert time.monotonic() - at >= 0.5


def test_folder_that_another_process_has_taken_stays(tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    with vanishing(folder), (folder / remove_after_death.LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        killed(folder, 0.2)
        wait_until(lambda: not removers(folder, "0.2"), "the other remover ends")
        assert folder.exists()
    assert not folder.exists()


def test_empty_folder_of_a_killed_process_is_removed_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    killed(folder, 1e6, has_copy=False)
    wait_until(lambda: not folder.exists(), "its removal")
