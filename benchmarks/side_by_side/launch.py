"""One repetition: it starts the processes of a row, injects a fault, waits, and ends them all.

It signals only processes that it started, or that these started, by pidfd. No process outlives it:
the kernel ties children to this thread, and their remaining children are found by the repetition's
directory in their environment.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.side_by_side import nvrx
from benchmarks.side_by_side.events import LAUNCHER, Event, Pen, Reader
from benchmarks.side_by_side.measure import commits_after, fault_at, survivors, whole_at
from benchmarks.side_by_side.rows import LIGHTHOUSE_AWAY_S, SETTLED, STOPPED_S, Row, System
from benchmarks.side_by_side.services import Services
from fft.launch.supervisor.children import Child
from fft.launch.supervisor.script import Script
from fft.util import pidfd

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
NVRX_WORKER = WORKER.with_name("nvrx_worker.py")
EXAMPLE = WORKER.with_name("example_worker.py")
BECOME = WORKER.with_name("become.py")
START_S = 300.0
"""Seconds from the start of the processes to the fault, or to the end of a row without one."""
_LOOK_S = 0.2
"""Interval of reading the events, which takes time on the cores that are measured."""
_AFTER_DEATH_S = 3.0
_END_S = 10.0
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}


class LaunchError(Exception):
    """The repetition has no result, because it did not reach its fault; the message names the
    logs."""


class Launch:
    """One repetition in ``directory``, which must be new.

    ``limit_s`` is explained in `Row.limit_s`.
    """

    def __init__(self, row: Row, system: System, directory: Path, limit_s: float) -> None:
        self.row, self.system, self.directory, self._limit_s = row, system, directory, limit_s
        directory.mkdir(parents=True)
        self._pen = Pen(directory, LAUNCHER, LAUNCHER)
        self._reader = Reader(directory)
        self.events: list[Event] = []
        self._children: list[Child] = []
        self._watched: dict[int, int] = {}
        """pid → pidfd of the ranks, which are children of this process or of `fft run`."""
        self._places: dict[int, tuple[int, int]] = {}
        self._selector = selectors.DefaultSelector()
        # The path of a socket must be short, so it cannot be in a directory of any depth.
        self._home = tempfile.TemporaryDirectory(prefix="fft-bench-")
        self._words = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._words.bind(f"{self._home.name}/words")
        self._words.setblocking(False)
        self._selector.register(self._words, selectors.EVENT_READ)
        self._later: list[tuple[float, Callable[[], None]]] = []
        """Scheduled actions with their times."""
        self._dead_at: dict[int, float] = {}
        self._began = time.monotonic()
        # These systems have their own services
        alone = system.supervised or system.manager == "nvrx"
        self._services = None if alone else Services(system)

    def run(self) -> list[Event]:
        """Return all events, in order. Raises LaunchError."""
        try:
            self._start()
            look_at = 0.0
            while True:
                self._turn()
                if time.monotonic() >= look_at:
                    self._take_news()
                    if self._over():
                        break
                    look_at = time.monotonic() + _LOOK_S
            self._pen.say("over")
        finally:
            self._end()
        self.events += self._reader.news()
        return self.events

    # --- starting ---

    def _start(self) -> None:
        if self.system.supervised:
            again = "10" if self.row.fault is not None and self.row.fault.restart else "0"
            shape = ["--groups", str(self.row.groups), "--ranks", str(self.row.ranks)]
            command = [str(BECOME), sys.executable, "-m", "fft.cli", "run", "--no-progress", *shape]
            command += ["--max-restarts", again]
            command += ["--trace-dir", str(self.directory / "traces")]
            command.append(str(EXAMPLE if self.row.example else WORKER))
            self._child(LAUNCHER, LAUNCHER, command, {})
            return
        if self.system.manager == "nvrx":
            self._start_nvrx()
            return
        for group in range(self.row.groups):
            self._start_group(group)

    def _start_nvrx(self) -> None:
        """Start one job of all ranks, because it has no groups."""
        port = nvrx.free_ports()
        for group in range(self.row.groups):
            place = {
                "RANK": str(group),
                "WORLD_SIZE": str(self.row.groups),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "REPLICA_GROUP_ID": str(group),
            }
            script = EXAMPLE if self.row.example else NVRX_WORKER
            program = [str(BECOME), str(nvrx.python()), str(script)]
            child = self._child(group, 0, program, place)
            self._watch(child.pid, (group, 0))

    def _start_group(self, group: int) -> None:
        assert self._services is not None, "who brings its own is not started here"
        port = self._services.store()
        for rank in range(self.row.ranks):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.row.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": str(self.row.groups),
                **self._services.environment(),
            }
            if self.system.manager == "fft":
                place["FFT_TRACE_DIR"] = str(self.directory / "traces")  # as `fft run` sets it
                place["FFT_DRAIN_SIGNAL"] = "SIGTERM"
            child = self._child(group, rank, [str(WORKER)], place)
            self._watch(child.pid, (group, rank))

    def _child(self, group: int, rank: int, command: Sequence[str], place: dict[str, str]) -> Child:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("FFT_", "TORCHFT_"))}
        env |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
            "RUST_LOG": "error",
            # a lost packet of a name lookup is not the system's fault, and would cost 5 s
            "RES_OPTIONS": "timeout:1 attempts:1",
            "BENCH_DIR": str(self.directory),
            "BENCH_WORDS": f"{self._home.name}/words",
            "BENCH_PLAN": json.dumps(self.row.plan(self.system)),
            **place,
        }
        log = self.directory / f"log-{group}-{rank}.txt"
        child = Child(str(group), rank, 1, Script(command), env, log)
        self._children.append(child)
        return child

    def _watch(self, pid: int, place: tuple[int, int]) -> None:
        if pid in self._watched:
            return
        self._places[pid] = place
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_death(pid)
            return
        self._watched[pid] = fd
        self._selector.register(fd, selectors.EVENT_READ, pid)

    # --- one turn ---

    def _turn(self) -> None:
        due = [_LOOK_S]
        due += [max(0.0, at - time.monotonic()) for at, _ in self._later]
        for key, _ in self._selector.select(min(due)):
            if key.fileobj is self._words:
                self._on_words()
            else:
                self._selector.unregister(key.fileobj)
                self._on_death(key.data)
        for at, act in list(self._later):
            if time.monotonic() >= at:
                self._later.remove((at, act))
                act()

    def _on_words(self) -> None:
        with suppress(BlockingIOError):
            word, _, pid = self._words.recv(256).decode().partition(" ")
            if int(pid) not in self._watched:
                self._take_news()
            self._break(word, int(pid))

    def _break(self, kind: str, pid: int) -> None:
        """Inject the fault, because the victim is ready."""
        if kind in _SIGNALS:
            self._pen.say("fault", kind=kind, pid_of=pid)
            pidfd.send(self._watched[pid], _SIGNALS[kind])
            if kind == "stop":
                go_on = partial(pidfd.send, self._watched[pid], signal.SIGCONT)
                self._later.append((time.monotonic() + STOPPED_S, go_on))
            return
        assert self._services is not None, "these rows have no supervisor"
        self._pen.say("fault", kind=kind)
        if kind == "lighthouse":
            self._services.end_lighthouse()
            back_at = time.monotonic() + LIGHTHOUSE_AWAY_S
            self._later.append((back_at, self._services.begin_lighthouse))
        else:
            self._services.restart_bus()

    def _on_death(self, pid: int) -> None:
        place = self._places[pid]
        self._dead_at[pid] = time.monotonic()
        self._pen.say("died", of=list(place), pid_of=pid)
        fault = self.row.fault
        again = fault is not None and fault.restart and not self.system.supervised
        if again and place[0] == self.row.victim[0]:
            self._start_group(place[0])

    def _take_news(self) -> None:
        news = self._reader.news()
        self.events += news
        for event in news:
            if event["e"] == "start":
                self._watch(event["pid"], (event["g"], event["r"]))

    # --- when it is over ---

    def _over(self) -> bool:
        at = fault_at(self.events)
        if self.row.fault is None:
            said = {(e["g"], e["r"]) for e in self.events if e["e"] == "enough"}
            if len(said) == self.row.groups * self.row.ranks:
                return True
        if at is None:
            self._check_start()
            return False
        since = time.monotonic() - at / 1e9
        if since > self._limit_s:
            return True
        pids = survivors(self.row, self.events)
        living = [pid for pid in pids if pid not in self._dead_at]
        settled = all(len(commits_after(self.events, pid)) >= SETTLED for pid in living)
        if len(living) < len(pids):
            # dead processes commit no more; the others may still have results
            last = max(self._dead_at[pid] for pid in pids if pid in self._dead_at)
            return time.monotonic() - last > _AFTER_DEATH_S and (settled or not living)
        is_whole = since > self.row.whole_s or whole_at(self.row, self.events) is not None
        return settled and is_whole

    def _check_start(self) -> None:
        late = time.monotonic() - self._began > START_S
        gone = [c for c in self._children if c.dies_within(0)]
        if late or gone or self._dead_at:
            what = "did not begin in time" if late else "lost a process before its fault"
            raise LaunchError(f"{self.row.name} of {self.system.name} {what}: {self.directory}")

    # --- the end ---

    def _end(self) -> None:
        """End all processes."""
        for child in self._children:
            if self.system.supervised and child.alive:
                child.signal(signal.SIGTERM)  # it ends its own children
                child.dies_within(_END_S)
            child.signal(signal.SIGKILL)
        for child in self._children:
            if child.dies_within(_END_S):
                child.reap()
        deadline = time.monotonic() + _END_S
        while (left := list(self._left())) and time.monotonic() < deadline:
            if deadline - time.monotonic() < _END_S / 2:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)  # they end by themselves, soon after the processes that they watch
        for fd in self._watched.values():
            os.close(fd)
        self._selector.close()
        self._words.close()
        self._home.cleanup()
        self._pen.close()
        if self._services is not None:
            self._services.close()

    def _left(self) -> Iterator[int]:
        """Return the processes that were started in this repetition by any process."""
        mark = f"BENCH_DIR={self.directory}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                is_ours = mark in path.read_bytes().split(b"\0")
                if is_ours and int(path.parent.name) != os.getpid():
                    yield int(path.parent.name)
