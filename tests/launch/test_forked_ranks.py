"""Tests that the forks of forked_run.py see and end as the ranks that they replace."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_run import fft, running
from waiting import wait_until

LIMIT_S = 60.0
SHOWS = """
import atexit, ctypes, json, multiprocessing, os, signal, sys, threading, time
dies_by = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(dies_by), 0, 0, 0)  # PR_GET_PDEATHSIG
passed = ["FFT_DEATH_MUTEX_FD", "FFT_SUPERVISOR_FD"]
own = [*passed, "FFT_BUS", "FFT_TOKEN", "FFT_TOKEN_FILE", "MASTER_PORT", "TORCHFT_LIGHTHOUSE"]
opened = {}
for number in os.listdir("/proc/self/fd"):
    try:
        opened[number] = os.readlink(f"/proc/self/fd/{number}").split(":")[0]
    except FileNotFoundError:  # the look itself
        pass
seen = {
    "argv": sys.argv, "path": sys.path[0], "main": __file__, "name": __name__, "cwd": os.getcwd(),
    "of main": sorted(set(vars(sys.modules["__main__"])) - {"opened", "seen"}),
    "env": {k: v for k, v in os.environ.items() if k not in own}, "set": sorted(os.environ),
    "dies by": dies_by.value, "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "passed": [opened.get(os.environ[name]) for name in passed],
    "files": sorted(opened.values()), "umask": os.umask(0o22),
    "parent": str(multiprocessing.parent_process()),
    "process": multiprocessing.current_process().name, "threads": threading.active_count(),
    "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals() if n < 32
                and n != signal.SIGINT},  # a shell ignores it for what it runs in the background
    "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "through": [sys.stdout.write_through, sys.stdin.read()],
}
print(json.dumps(seen))
print("error", file=sys.stderr)
atexit.register(print, "at exit")
def after_the_traceback():
    until = time.monotonic() + 30
    while "no data" not in open("/proc/self/fd/2").read() and time.monotonic() < until:
        time.sleep(0.01)
    print("thread")
threading.Thread(target=after_the_traceback).start()
raise ValueError("no data")
"""


def seen(folder: Path, script: Path, new_ranks: bool) -> tuple[dict[str, Any], list[str], str]:
    """Return what a rank saw, the rest of its log, and the supervisor's output."""
    traces = folder / "traces"
    command = ["run", "--max-restarts", "0", "--no-progress", "--trace-dir", str(traces)]
    done = fft(
        *command, str(script), "a", "--b", folder=folder, within=LIMIT_S, new_ranks=new_ranks
    )
    assert done.returncode == 1
    (log,) = (traces / "logs").iterdir()
    found, *rest = log.read_text().splitlines()
    read = json.loads(found.replace(str(traces), "TRACES"))
    assert read["env"].pop("TORCHINDUCTOR_CACHE_DIR")  # each job has its own folder
    return read, rest, done.stderr


@pytest.mark.long  # checks the tests' own tools
def test_forked_rank_has_the_environment_of_a_new_process(tmp_path: Path) -> None:
    script = tmp_path / "shows.py"
    script.write_text(SHOWS)
    for name in ("new", "forked"):
        (tmp_path / name).mkdir()
    new, log, output = seen(tmp_path / "new", script, new_ranks=True)
    forked, its_log, its_output = seen(tmp_path / "forked", script, new_ranks=False)
    assert forked == new
    assert new["leads"] and new["dies by"] == signal.SIGKILL and all(new["passed"])
    assert its_log == log and log[0] == "error" and log[-1] == "at exit"
    for words in (output, its_output):
        assert "group 0 rank 0 ended with ValueError at" in words
        assert words.count("ValueError: no data") == 1


def test_forked_rank_is_the_supervisors_child_and_dies_with_fft_run(tmp_path: Path) -> None:
    script = tmp_path / "stays.py"
    script.write_text("import os, signal; print('ready', os.getpid(), '.'); signal.pause()")
    traces = tmp_path / "traces"
    with running("run", "--trace-dir", str(traces), str(script), folder=tmp_path) as job:

        def log_words() -> list[str]:
            return [word for log in traces.glob("logs/*") for word in log.read_text().split()]

        wait_until(lambda: "." in log_words(), "it runs", LIMIT_S)
        started = psutil.Process(job.pid).children(recursive=True)
        rank = psutil.Process(int(log_words()[1]))
        assert rank in started
        assert rank.ppid() == job.pid
        job.signal(signal.SIGKILL)
        assert job.wait(LIMIT_S) == -signal.SIGKILL
        assert psutil.wait_procs(started, timeout=LIMIT_S)[1] == []


@pytest.mark.parametrize("how", ["sys.exit(3)", "os.kill(os.getpid(), 9)", "os._exit(4)"])
def test_exit_of_a_forked_rank_is_reported_like_that_of_a_process(tmp_path: Path, how: str) -> None:
    script = tmp_path / "ends.py"
    script.write_text(f"import os, sys\n{how}\n")
    command = ["run", "--max-restarts", "0", "--no-progress", "--trace-dir", str(tmp_path / "t")]
    done = fft(*command, str(script), folder=tmp_path, within=LIMIT_S)
    word = {"sys.exit(3)": "SystemExit at", "os._exit(4)": "exit code 4"}.get(how, "SIGKILL")
    assert done.returncode == 1 and word in done.stderr, done.stderr
