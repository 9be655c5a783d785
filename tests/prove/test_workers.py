"""Tests of the search processes: their results, the report when one dies, and no remaining
process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from fft.errors import FftError
from fft.prove import workers
from fft.prove.workers import Tell, processes, spread

FFT = [sys.executable, "-m", "fft.cli"]
LIMIT_S = 200.0
SEARCHING_MIB = 75
"""More memory than a process has before it has found states."""


def tasks(*values: Any) -> list[tuple[str, Any]]:
    return [(f"task {number}", value) for number, value in enumerate(values)]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def twice(value: int, tell: Tell) -> tuple[int, int]:
    tell(value)
    return 2 * value, os.getpid()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("jobs", "fresh"),
    [pytest.param(1, True, marks=pytest.mark.long), (2, False), (2, True), (9, False)],
)
def test_every_task_is_done_once(jobs: int, fresh: bool) -> None:
    reported: list[tuple[int, int]] = []
    found = dict(
        spread(twice, tasks(0, 1, 2, 3, 4), jobs, lambda *word: reported.append(word), fresh=fresh)
    )
    assert {number: value for number, (value, _) in found.items()} == {n: 2 * n for n in range(5)}
    assert sorted(reported) == [(n, n) for n in range(5)]
    pids = {pid for _, pid in found.values()}
    assert os.getpid() not in pids
    assert len(pids) == 5 if fresh else len(pids) <= jobs
    assert not any(map(is_there, pids))


def dies(how: str, tell: Tell) -> str:
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            os._exit(3)
        case "raises":
            raise OSError("no such disk")
        case "memory":
            raise MemoryError
        case "stays":
            tell(os.getpid())
            threading.Event().wait()
    return how


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("how", "error", "expected"),
    [
        ("killed", FftError, r"^task 1: its process ended with SIGKILL .*fewer --jobs"),
        ("exits", FftError, r"^task 1: its process ended with exit code 3 before it was done$"),
        ("memory", FftError, r"^task 1: MemoryError; .*fewer --jobs"),
        ("raises", OSError, r"^no such disk$"),
    ],
)
def test_process_that_ends_before_its_task_raises_a_named_error(
    how: str, error: type[Exception], expected: str
) -> None:
    pids: list[int] = []
    with pytest.raises(error, match=expected):
        list(spread(dies, tasks("stays", how), 2, lambda _, pid: pids.append(pid)))
    assert not any(map(is_there, pids)), "the other one is ended, too"


def test_abandoned_search_leaves_no_process() -> None:
    pids: list[int] = []
    with closing(spread(dies, tasks("stays", "well"), 2, lambda _, pid: pids.append(pid))) as found:
        assert next(found) == (1, "well")
        # the other process was done first, or this one has reported its identity
    assert not any(map(is_there, pids))


def test_how_many_there_are_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(workers, "_free_mib", lambda: 1024)
    assert processes(None, 1024) == 1
    assert processes(None, 2048) == 1, "one, whatever it needs"
    assert processes(None, 1) == cores
    assert processes(7, 1024) == 7, "as asked for"
    with pytest.raises(FftError, match="--jobs 0: give the number"):
        processes(0, 1)


def test_the_memory_that_is_free_is_that_of_this_machine() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    assert 0 < workers._free_mib() <= total


# --- fft dev check --------------------------------------------------------------------------------


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FFT, "dev", "check", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ,
    )


@pytest.mark.long
def test_order_and_counts_are_the_same_for_any_number_of_processes() -> None:
    words = ["hsdp", *(f"--bounds={name}" for name in ("storm", "twin", "overrun", "deaf"))]
    reported = []
    for jobs in ("1", "3"):
        done = check(*words, "--jobs", jobs)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"in {jobs} process" in done.stdout
        of_time = r"(?m)\s+[\d.]+\s+│\s+\d+(?=\s+│ ok)|\s+[\d.]+ │\s+[\d,]+ │\s+│$|^\d+ s, in.*$"
        reported.append(re.sub(r"[ ─━]+", " ", re.sub(of_time, "", done.stdout)))
    assert reported[0] == reported[1]
    at = [reported[0].index(f"│ {name} ") for name in ("storm", "deaf", "overrun", "twin")]
    assert at == sorted(at), "in the order of the sets, whatever was searched first"


@pytest.mark.long
def test_violations_are_reported_in_the_order_of_the_sets(tmp_path: Path) -> None:
    words = ["plain_votes", "--property", "agreement", "--save", str(tmp_path), "--jobs", "2"]
    done = check(*words, "--bounds", "messages", "--bounds", "missed")
    assert done.returncode == 1, done.stderr
    reported = [line for line in done.stdout.splitlines() if "VIOLATED agreement" in line]
    assert [line.partition(":")[0] for line in reported] == ["messages", "missed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "plain_votes-messages.txt",
        "plain_votes-missed.txt",
    ]


def _resident_mib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def _hear_ctrl_c() -> None:
    """Make this process handle Ctrl-C, which a shell makes its background processes ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _while_it_searches(then: Callable[[int, list[int]], None]) -> tuple[int, str, str]:
    """Run ``fft dev check`` within two long sets; return exit code, output and errors.

    ``then`` gets its pid and those of its processes.
    """
    command = [
        *FFT,
        "dev",
        "check",
        "hsdp",
        "--jobs",
        "2",
        "--bounds",
        "shards",
        "--bounds",
        "processes",
    ]
    searching = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=_hear_ctrl_c,
    )
    children = Path(f"/proc/{searching.pid}/task/{searching.pid}/children")

    def at_work() -> list[int]:
        pids = map(int, children.read_text().split())
        return [p for p in pids if _resident_mib(p) > SEARCHING_MIB]

    try:
        wait_until(lambda: len(at_work()) == 2, "both search", LIMIT_S)
        found = at_work()
        then(searching.pid, found)
        output, errors = searching.communicate(timeout=LIMIT_S)
    finally:
        if searching.poll() is None:
            searching.kill()
            searching.wait()
    wait_until(lambda: not any(map(is_there, found)), "none is left", LIMIT_S)
    return searching.returncode, output, errors


@pytest.mark.long
def test_killed_search_process_is_an_error_naming_its_set() -> None:
    code, output, errors = _while_it_searches(lambda _, pids: os.kill(pids[1], signal.SIGKILL))
    assert code == 2
    assert "verdict" not in output
    assert re.search(r"^fft: the search within '(shards|processes)': .*SIGKILL", errors), errors
    assert len(errors.splitlines()) == 1


@pytest.mark.long
def test_ctrl_c_ends_all_searches() -> None:
    code, output, errors = _while_it_searches(lambda pid, _: os.killpg(pid, signal.SIGINT))
    assert code != 0
    assert "verdict" not in output
    assert "Traceback" not in errors


@pytest.mark.long
def test_searches_end_when_their_parent_is_killed() -> None:
    code, _, _ = _while_it_searches(lambda pid, _: os.kill(pid, signal.SIGKILL))
    assert code == -signal.SIGKILL
