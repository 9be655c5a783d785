"""`fft` in a process that has torch loaded from its start, and whose fork server has it, too.

The command is the real one; only the start of its fork server differs, or that of a rank without
one. A helper that the command has from its start forks itself instead of starting a new Python, and
the fork becomes a child of the supervisor. It leads a session, dies with the supervisor, has the
environment, descriptors and log of a rank, and runs `fft.launch.script_runner`. Tests that start
everything as users do, such as test_examples.py, test_cli.py and test_trust_run.py, show that a new
Python is started correctly.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from forked import Forked

from fft.launch import script_runner
from fft.launch.supervisor import script
from fft.util.die_with_parent import PR_SET_PDEATHSIG, ignore_warnings

LONGEST = 1 << 17
MOST_DESCRIPTORS = 32
ABOVE_ALL = 1000
"""A number greater than that of any descriptor that a rank is given."""


class FftRun(Forked):
    """The command ``fft ARGUMENT…``; its output goes to its own files in ``folder``.

    ``new_ranks``: Start the ranks as the real command does.
    """

    def __init__(
        self,
        *arguments: str,
        folder: Path,
        env: Mapping[str, str | None] | None = None,
        new_ranks: bool = False,
    ) -> None:
        made = Path(tempfile.mkdtemp(prefix="said-", dir=folder))
        self._out, self._err = made / "stdout", made / "stderr"
        self._out.touch(), self._err.touch()
        files = str(self._out), str(self._err)
        super().__init__(run_command, os.getcwd(), files, arguments, new_ranks, env=env)

    @property
    def stdout_text(self) -> str:
        """Return its standard output so far."""
        return self._out.read_text(errors="replace")

    @property
    def stderr_text(self) -> str:
        """Return its standard error so far."""
        return self._err.read_text(errors="replace")

    def tail(self) -> str:
        """Return all of its output, for the message of a failed test."""
        return self.stdout_text + self.stderr_text


@contextmanager
def running(*arguments: str, **options: Any) -> Iterator[FftRun]:
    """Run the command in the block; end it and its ranks when the block is left."""
    process = FftRun(*arguments, **options)
    try:
        yield process
    finally:
        process.end()


def fft(*arguments: str, within: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. Fail if it does not end in time."""
    with running(*arguments, **options) as process:
        code = process.wait(within)
    return subprocess.CompletedProcess(arguments, code, process.stdout_text, process.stderr_text)


# --- in the process of the command ----------------------------------------------------------------


def run_command(
    folder: str, files: tuple[str, str], arguments: Sequence[str], new_ranks: bool
) -> None:
    from fft.cli import app

    for number, path in enumerate(files, 1):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    if not new_ranks:
        script._exec = _Starter(_helper())  # type: ignore[assignment]
    sys.argv = ["fft", *arguments]
    app()


def _helper() -> socket.socket:
    """Start the helper before this process has other threads or files; return its control
    socket."""
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor = os.getpid()
    if os.fork() == 0:
        line.close()
        _fork_ranks(theirs, supervisor)
    theirs.close()
    return line


def _prctl(option: int, value: int) -> None:
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0


class _Starter:
    """A replacement for `script._exec`."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def __call__(
        self, script: Sequence[str], env: Mapping[str, str], log: Path, inherits: Sequence[int]
    ) -> _Rank:
        words = json.dumps([list(script), dict(env), list(inherits)]).encode()
        assert len(words) < LONGEST and max(inherits, default=0) < ABOVE_ALL
        # a fork of the helper's child becomes ours, because the supervisor is a subreaper
        with log.open("ab") as output:
            socket.send_fds(self._line, [words], [output.fileno(), *inherits])
        return _Rank(int(self._line.recv(LONGEST)))


class _Rank:
    """The part of the interface of `subprocess.Popen` that `script` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


# --- in the helper, and in the ranks --------------------------------------------------------------


def _fork_ranks(line: socket.socket, supervisor: int) -> None:
    """Fork ranks until the supervisor has ended; does not return."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ignore_warnings()  # as `tied` does for a new rank
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a test may send it to all processes of the job
    code = 1
    try:
        while True:
            words, descriptors, _, _ = socket.recv_fds(line, LONGEST, MOST_DESCRIPTORS)
            if not words:
                break
            _fork_rank(line, supervisor, json.loads(words), descriptors)
            for number in descriptors:
                os.close(number)
        code = 0
    except BaseException:  # noqa: BLE001 - the supervisor sees the end of the line
        traceback.print_exc()
    finally:
        os._exit(code)


def _fork_rank(line: socket.socket, supervisor: int, task: Any, descriptors: list[int]) -> None:
    """Fork a process that forks the rank and ends, so that the rank becomes the supervisor's
    child."""
    told, tells = os.pipe()
    waits, goes = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            os.setsid()  # before the number of the process is known
            os.write(tells, str(os.getpid()).encode())
            os.close(goes)
            os.read(waits, 1)
            _be_rank(supervisor, task, descriptors)
        os._exit(0)
    pid = os.read(told, 64)
    os.waitpid(between, 0)
    for number in (told, tells, waits, goes):
        os.close(number)
    line.send(pid)


def _be_rank(supervisor: int, task: Any, descriptors: Sequence[int]) -> None:
    """Run a script as its supervisor has requested; does not return."""
    script, env, wanted = task
    code = 1
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getppid() != supervisor:
            os._exit(1)
        _give(descriptors, wanted)
        os.environ.clear()
        os.environ.update(env)
        # as in a process that multiprocessing has not started
        multiprocessing.current_process().name = "MainProcess"
        multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
        resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
        forkserver._forkserver.__init__()  # type: ignore[misc]
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        unbuffered = bool(env.get("PYTHONUNBUFFERED"))
        sys.stdout.reconfigure(write_through=unbuffered)  # type: ignore[union-attr]
        sys.argv = [script_runner.__file__, *script]
        sys.path.insert(0, "what the runner puts the script's folder in place of")
        runpy.run_path(script_runner.__file__, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - this process has no caller
        traceback.print_exc()
    finally:
        ctypes.pythonapi.Py_Exit(ctypes.c_int(code))  # as Python's own end


def _give(descriptors: Sequence[int], wanted: Sequence[int]) -> None:
    """Give this process its log, and the other descriptors under their requested numbers."""
    import fcntl

    high = [fcntl.fcntl(number, fcntl.F_DUPFD, ABOVE_ALL) for number in descriptors]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number in (1, 2):
        os.dup2(high[0], number)
    os.closerange(3, ABOVE_ALL)
    for number, own in zip(wanted, high[1:], strict=True):
        os.dup2(own, number)
    for number in high:
        os.close(number)
