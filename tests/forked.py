"""Real processes that have torch from their start, forked from a server that has imported it.

Importing torch and FFT takes a process two to three seconds of a core. A forked process does not
need that, and is real in everything else: memory, connections, threads, signals and exit code. The
start of a process is tested by `fft run` instead.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from waiting import wait_until

from fft.bus import serve_tcp
from fft.bus.tcpserver import host_store

CONTEXT = multiprocessing.get_context("forkserver")
# The server must not start a thread, or read environment variables that a test may set.
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torchft",
        "fft.train.api.manager",
        "frozen_heap",  # the last
    ]
)
LOG_TAIL = 6000


class Forked:
    """A process that runs ``work(*arguments)``, with one thread per operation of torch.

    ``env`` is added to the current environment of this process; None removes a variable. ``log``
    gets the output. With ``talks``, standard input and output are connected to this process as
    text.
    """

    stdin: TextIO
    stdout: TextIO

    def __init__(
        self,
        work: Callable[..., Any],
        *arguments: Any,
        env: Mapping[str, str | None] | None = None,
        log: Path | None = None,
        talks: bool = False,
    ) -> None:
        merged = {**os.environ, **(env or {})}
        whole = {name: value for name, value in merged.items() if value is not None}
        self.log = log
        if log is not None:
            log.touch()
        ends: list[Connection] = []
        if talks:
            (their_in, mine_in), (mine_out, their_out) = os.pipe(), os.pipe()
            self.stdin, self.stdout = open(mine_in, "w"), open(mine_out)  # noqa: SIM115
            ends = [Connection(their_in, writable=False), Connection(their_out, readable=False)]
        self._process = CONTEXT.Process(target=_run, args=(whole, log, ends, work, arguments))
        self._process.start()
        for end in ends:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, within: float) -> int:
        """Return its exit code, negative for a signal. Fail if it does not end in time."""
        self._process.join(within)
        code = self._process.exitcode
        assert code is not None, f"not through after {within:g} s:\n{self.tail()}"
        return code

    @property
    def runs(self) -> bool:
        """Whether it is still running."""
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.runs:
            os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop the process; return when the last of its threads has stopped."""
        self.signal(signal.SIGSTOP)
        wait_until(self._is_stopped, "it is stopped")

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def end(self) -> None:
        """Kill it if it is still running."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """End a process with ``talks``, and close the pipes to it."""
        self.end()
        for pipe in (self.stdin, self.stdout):
            with suppress(BrokenPipeError):  # input that was not read
                pipe.close()

    def tail(self) -> str:
        """Return the end of its log."""
        return "" if self.log is None else self.log.read_text(errors="replace")[-LOG_TAIL:]


def _run(
    env: dict[str, str],
    log: Path | None,
    ends: list[Connection],
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # the usual one, as in a new process
    if log is not None:
        with log.open("ab") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    if ends:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it was closed
    work(*arguments)


def as_main(script: str, *arguments: str) -> None:
    """Run a script as Python would."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def run_script(script: Path, *arguments: str, log: Path, within: float) -> str:
    """Run one script to its successful end and return its output."""
    process = Forked(as_main, str(script), *arguments, log=log)
    try:
        code = process.wait(within)
        assert code == 0, f"ended with {code}:\n{process.tail()}"
    finally:
        process.end()
    return log.read_text(errors="replace")


def run_job(
    script: Path,
    *arguments: str,
    folder: Path,
    within: float,
    ranks: int = 1,
    plan: Path | None = None,
) -> Path:
    """Run a job of two groups without a supervisor to its successful end; return its traces'
    folder.

    The environment of the processes has the variables that `fft run` sets for its children.
    """
    traces, deadline = folder / "run", time.monotonic() + within
    traces.mkdir(parents=True)
    with serve_tcp() as bus:
        stores = [host_store() for _ in range(2)]
        env = {"FFT_BUS": bus.url, "FFT_TRACE_DIR": str(traces), "NUM_REPLICA_GROUPS": "2"}
        env |= {"FFT_FAULTS": str(plan)} if plan is not None else {}
        members: list[Forked] = []
        try:
            for group, (_, port) in enumerate(stores):
                env |= {"REPLICA_GROUP_ID": str(group), "WORLD_SIZE": str(ranks)}
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                for rank in range(ranks):
                    log = folder / f"g{group}r{rank}.log"
                    own = {**env, "RANK": str(rank)}
                    made = Forked(as_main, str(script), *arguments, env=own, log=log)
                    members.append(made)
            codes = [member.wait(deadline - time.monotonic()) for member in members]
            assert not any(codes), (codes, [member.tail() for member in members])
        finally:
            for member in members:
                member.end()
    return traces
