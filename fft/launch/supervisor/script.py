"""Start processes of the training script, by a fork server if possible, otherwise by exec.

The fork server is a process that has imported torch and FFT, which takes the first seconds of every
rank. It forks each rank, which then runs the script from its first line. `fft.launch.script_runner`
contains the server's code. Linux only: a forked rank becomes a child of the supervisor, which is
the subreaper of its descendants.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from fft.launch import script_runner
from fft.util.die_with_parent import tied

logger = logging.getLogger(__name__)

_LOAD_S = 60.0  # timeout for the fork server's imports of torch and FFT, which take about 5 s
_FORK_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36


class Process(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Its process ID."""

    def wait(self) -> int:
        """Wait for its end, reap it, and return its exit code, negative for a signal."""


class Script:
    """A script with its arguments.

    The thread that calls `start` must live as long as the processes, because the kernel ends them
    when that thread ends.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = argv
        self._server: _ForkServer | None = None

    @property
    def server_pid(self) -> int | None:
        """The process ID of the fork server, or None if there is none."""
        return None if self._server is None else self._server.process.pid

    def open(self, env: Mapping[str, str], log: Path) -> None:
        """Start the fork server with the environment that all ranks share, if none runs.

        Without a fork server, later processes start by exec, which only takes longer.
        """
        if self._server is not None and self._server.lives():
            return
        self.close()
        try:
            self._server = _ForkServer(self.argv, env, log)
        except OSError as error:
            logger.warning("ranks start without a fork server: %s", error)

    def start(self, env: Mapping[str, str], log: Path, inherits: Sequence[int]) -> Process:
        """Start a process.

        Args:
            env: The complete environment.
            log: File to which output and errors are appended.
            inherits: Descriptors that the process and its children inherit. If a variable named
                ``…_FD`` holds one of these numbers, its value becomes the descriptor's number in
                the new process.

        Raises:
            OSError: The process cannot be started.
        """
        if self._server is not None:
            if (pid := self._server.fork(env, log, inherits)) is not None:
                return _Forked(pid)
            self.close()
        return _exec(self.argv, env, log, inherits)

    def close(self) -> None:
        """End the fork server; ranks that it forked run on."""
        if self._server is not None:
            self._server.close()
            self._server = None


class _Forked:
    """A rank that the fork server has forked; it is a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class _ForkServer:
    """The supervisor's end of the fork server."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._log = log
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "this process cannot be a subreaper")
        self._socket, theirs = socket.socketpair()
        with theirs:
            env = {**env, script_runner.FORK_SERVER: str(theirs.fileno())}
            try:
                self.process = _exec(argv, env, log, (theirs.fileno(),))
            except BaseException:
                self._socket.close()
                raise
        self._is_ready = False

    def fork(self, env: Mapping[str, str], log: Path, inherits: Sequence[int]) -> int | None:
        """Fork a rank and return its process ID, or None if ranks are to start by exec."""
        names = {str(fd): at for at, fd in enumerate(inherits)}
        places = {n: names[v] for n, v in env.items() if n.endswith("_FD") and v in names}
        request_fd = os.memfd_create("fft-fork")
        try:
            with log.open("ab") as output, os.fdopen(request_fd, "wb", closefd=False) as file:
                request = {"env": dict(env), "fds": places, "parent": os.getpid()}
                file.write(json.dumps(request).encode())
                file.flush()
                if not self._has_loaded():
                    return None
                self._socket.settimeout(_FORK_S)
                socket.send_fds(self._socket, [b"f"], [request_fd, output.fileno(), *inherits])
                answer = self._socket.recv(32)
        except OSError as error:  # a timeout among others
            logger.warning("ranks start without the fork server from now on: %s", error)
            return None
        finally:
            os.close(request_fd)
        if not answer:
            logger.warning("ranks start without the fork server from now on: it has ended")
        return int(answer) if answer else None

    def lives(self) -> bool:
        """Return whether the process has not closed its end of the socket."""
        self._socket.settimeout(0)
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:  # nothing to read
            return True
        except OSError:
            return False

    def _has_loaded(self) -> bool:
        """Wait until it has imported torch; return whether ranks can be forked."""
        if not self._is_ready:
            self._socket.settimeout(_LOAD_S)
            answer = self._socket.recv(256).decode()
            self._is_ready = answer == script_runner.READY
            if not self._is_ready:
                logger.info("ranks start without a fork server: %s", answer or "it has ended")
        return self._is_ready

    def close(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            if self._log.stat().st_size == 0:
                self._log.unlink()


def _exec(
    argv: Sequence[str], env: Mapping[str, str], log: Path, inherits: Sequence[int]
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            tied([sys.executable, script_runner.__file__, *argv]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            pass_fds=tuple(inherits),
            start_new_session=True,  # a Ctrl-C on the terminal is for the supervisor alone
        )
