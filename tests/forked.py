"""Real processes that have torch from their start: forked from a server that has imported it.

To import torch and FFT takes a process two to three seconds of a core. A forked one does not need
them, and is as real in all else: memory, connections, threads, signals, exit code. How a process is
started is not what these are for: that is tested by `fft run`.
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
# Nothing that starts a thread, or that reads what a test may set in the environment.
CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torchft",
        "fft.train.manager",
        "frozen_heap",  # the last
    ]
)
LOG_TAIL = 6000


class Forked:
    """A process that runs ``work(*arguments)``, with one thread per operation of torch.

    ``env``: added to the environment of this process as it is now; None takes a variable away.
    ``log``: gets its output. ``talks``: has its standard input and output here, as text.
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
        """Its exit code, negative for a signal. Fails if it does not end in time."""
        self._process.join(within)
        code = self._process.exitcode
        assert code is not None, f"not through after {within:g} s:\n{self.tail()}"
        return code

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        """Send a signal; one that has ended is left alone."""
        if self.runs:
            os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop it; returns when the last of its threads has stopped."""
        self.signal(signal.SIGSTOP)
        wait_until(self._is_stopped, "it is stopped")

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def end(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """End one that talks, and the pipes to it."""
        self.end()
        for pipe in (self.stdin, self.stdout):
            with suppress(BrokenPipeError):  # what was not read
                pipe.close()

    def tail(self) -> str:
        """The end of its log."""
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
    """One script to its good end; what it wrote."""
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
    """A job of two groups to its good end, with no supervisor; where its traces are.

    What `fft run` tells its children is in the environment of these as well.
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
