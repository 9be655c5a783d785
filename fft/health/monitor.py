"""A process beside each trainer that detects what the trainer itself cannot: that it hangs or died.

The trainer starts it (`MonitorProcess`) and gives it two descriptors: its pulse, and a pidfd of
itself. Only the process of this pidfd is ever signalled. So the monitor cannot end a process that
did not ask to be watched, or another process that got its number. The monitor looks at the pulse
every ``interval_s`` (`fft.health.detectors.trainer`, pure, decides), and

- writes one JSON line to its standard output when it begins, ``{"v":1,"type":"watching",…}``, and
  one when the verdict becomes worse:
  ``{"v":1,"type":"verdict","level":"yellow","reason":…,"group":…,"rank":…,"pid":…,"step":…,"at":…}``
- sends ``suspect`` to the other participants, through the supervisor if there is one, else on the
  bus. It does so only if a suspected trainer cannot be expected to send it: no thread of it runs,
  or its own rollback has not freed it after ``min_s``;
- on red ends the trainer: SIGTERM, SIGCONT (a stopped process receives nothing else, and the
  SIGTERM is pending when it wakes), and SIGKILL ``term_s`` later. Before that, it marks in the
  pulse that the SIGTERM is not a request to drain;
- when the trainer has ended without marking that it leaves, writes the ``death`` message of the bus
  as a line, sends it on the bus if it was given one, and ends;
- if it was given a bus, and so has no supervisor, sends heartbeats there for its trainer, checks
  those of others (`fft.health.hosts`), and waits for the trainer's death mutex, which reports its
  death at once.

It shares neither the interpreter lock nor the session of the trainer, so a thread that keeps the
lock, SIGSTOP and Ctrl-C do not reach it. It never blocks on its standard output: output that does
not fit into the pipe is dropped. torch is not imported.

A main thread that waits for a C++ compiler or a build makes no progress of its own, but does not
hang. The monitor therefore reads in ``/proc`` whether the trainer waits for a child process that
computes, and for how long the trainer's threads have waited for a core.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fft.bus import ErrorBus, open_job_bus
from fft.bus.token import JobToken
from fft.errors import BusError, FftError
from fft.health.death_mutex import DeathMutex, Hold, supported
from fft.health.detectors.base import Level
from fft.health.detectors.trainer import Look, Monitor, MonitorConfig, Pulse, PulseReader, Reading
from fft.protocol.timeouts import bus_operation
from fft.util import pidfd

if TYPE_CHECKING:
    from fft.health.hosts import HostWatch

logger = logging.getLogger(__name__)


_VANISH_S = 10.0  # how long a SIGKILLed process may take to vanish before we report it
_LEAVE_S = 2.0  # for leaving the roll of hosts, which is not essential
_FAREWELL_S = 30.0  # for opening the bus, if it is not open yet, and sending one message


class MonitorError(FftError):
    """The monitor cannot be started or run as requested; the text states what to change."""


# --- in the monitor's process ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Charge:
    """The process to watch and its settings, passed in the first line of standard input.

    They are not on the command line, which every user can read, because the bus's URL may contain a
    password. ``pulse``, ``pidfd``, ``death_mutex`` and ``supervisor`` (a datagram socket) are
    numbers of inherited descriptors.
    """

    pulse: int
    pidfd: int
    death_mutex: int | None
    supervisor: int | None
    pid: int
    group: str
    rank: int
    bus_url: str | None
    config: MonitorConfig

    def to_json(self) -> str:
        """Return the charge as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the output of `to_json`. Raises MonitorError for any other text."""
        try:
            data = json.loads(text)
            return cls(**{**data, "config": MonitorConfig(**data["config"])})
        except (ValueError, TypeError, KeyError) as error:
            raise MonitorError(f"this is started by trainers, not by hand: {error!r}") from None


class Runner:
    """The main loop of the monitor's process.

    Args:
        charge: The process to watch.
        out: Descriptor that receives the lines.
        control: Descriptor of standard input, whose end stops the monitor.
    """

    def __init__(self, charge: Charge, out: int, control: int) -> None:
        self._charge = charge
        self._out = out
        self._control = control
        self._reader = PulseReader(charge.pulse)
        self._dying = os.eventfd(0)
        if charge.death_mutex is not None:
            DeathMutex(charge.death_mutex).watch(lambda: os.eventfd_write(self._dying, 1))
        self._monitor = Monitor(charge.config)
        self._children = BusyChildren(charge.pid)
        self._core_waits = CoreWaits(charge.pid)
        self._announcer = _Announcer(charge, charge.bus_url) if charge.bus_url else None
        self._level = Level.GREEN
        self._concerns_others = False
        self._cause = "ended without leaving the job"
        os.set_blocking(out, False)

    def run(self) -> None:
        """Watch until the trainer has ended, or has marked that it leaves."""
        left = self._watch()
        if not left:
            self._tell_death()
        if self._announcer is not None and (not left or self._announcer.beats):
            self._announcer.close(_LEAVE_S if left else _FAREWELL_S)

    def _watch(self) -> bool:
        """Watch until the trainer has ended or leaves. Returns whether it has left the job."""
        waiter = select.poll()
        ends = {self._charge.pidfd, self._dying}
        for fd in (*ends, self._control):
            waiter.register(fd, select.POLLIN)
        self._write({"v": 1, "type": "watching", **self._who()})
        while True:
            ready = {fd for fd, _ in waiter.poll(self._charge.config.interval_s * 1000)}
            reading = self._reader.read()
            if ends & ready:
                return reading.left
            if self._control in ready:
                if reading.left:
                    return True
                waiter.unregister(self._control)  # it closes its files because it is about to end
            self._look(reading)

    def _look(self, reading: Reading) -> None:
        now = time.monotonic()
        is_mute = self._monitor.is_mute(now)
        is_stopped = is_mute and pidfd.is_stopped(self._charge.pid)
        waits = reading.in_txn and self._monitor.stands_still(now)
        is_busy = waits and self._children.are_busy(reading.begun)
        starved = self._core_waits.take(is_mute or (waits and not reading.waiting))
        self._monitor.observe(Look(now, reading, is_stopped, is_busy, starved))
        verdict = self._monitor.verdict(now)
        told, self._concerns_others = self._concerns_others, self._monitor.concerns_others(now)
        if self._concerns_others and not told:
            self._tell_suspicion(verdict.reason)
        worse, self._level = verdict.level > self._level, verdict.level
        if not worse:
            return
        said = {"level": verdict.level.name.lower(), "reason": verdict.reason, "at": now}
        self._write({"v": 1, "type": "verdict", **self._who(), "step": reading.step, **said})
        if verdict.level is Level.RED:
            self._end(verdict.reason)

    def _who(self) -> dict[str, Any]:
        return {"group": self._charge.group, "rank": self._charge.rank, "pid": self._charge.pid}

    # --- ending it ---

    def _end(self, reason: str) -> None:
        """Send SIGTERM, SIGCONT and, after a grace period, SIGKILL, by pidfd."""
        self._reader.doom()
        self._cause = f"SIGTERM by the monitor: {reason}"
        for number in (signal.SIGTERM, signal.SIGCONT):
            pidfd.send(self._charge.pidfd, number)
        if pidfd.ends_within(self._charge.pidfd, self._charge.config.term_s):
            return
        self._cause = f"SIGKILL by the monitor: {reason}"
        pidfd.send(self._charge.pidfd, signal.SIGKILL)
        if not pidfd.ends_within(self._charge.pidfd, _VANISH_S):
            pid = self._charge.pid
            logger.error("pid %d did not end within %g s of its SIGKILL", pid, _VANISH_S)

    # --- sending messages ---

    def _tell_suspicion(self, reason: str) -> None:
        word = json.dumps(self._word("suspect", reason)).encode()
        if self._charge.supervisor is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(self._charge.supervisor)) as there:
                there.send(word, socket.MSG_DONTWAIT)  # it has ended, or its queue is full
        elif self._announcer is not None:
            self._announcer.say(word)

    def _tell_death(self) -> None:
        death = self._word("death", self._cause)
        self._write(death)
        if self._announcer is not None:
            self._announcer.say(json.dumps(death).encode())

    def _word(self, kind: str, cause: str) -> dict[str, Any]:
        told = {"by": "monitor", "cause": cause[:500], "host": socket.gethostname()}
        return {"v": 1, "type": kind, **self._who(), **told}

    def _write(self, line: dict[str, Any]) -> None:
        with suppress(OSError):  # the reader is slow or gone
            os.write(self._out, json.dumps(line).encode() + b"\n")


class _Announcer:
    """Send messages on the bus, and heartbeats for the trainer, which has no supervisor.

    It uses its own threads, because opening a bus may take seconds.
    """

    def __init__(self, charge: Charge, url: str) -> None:
        self._charge, self._url = charge, url
        self._hosts: HostWatch | None = None
        self._words: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._bus: ErrorBus | None = None
        self._thread = threading.Thread(target=self._run, name="fft-bus-say", daemon=True)
        self._thread.start()

    @property
    def beats(self) -> bool:
        """Whether it is on the roll of hosts, so that others would miss its heartbeats."""
        return self._hosts is not None

    def say(self, payload: bytes) -> None:
        """Queue a message; returns at once."""
        self._words.put(payload)

    def close(self, limit_s: float) -> None:
        """Send all queued messages and close; give up after ``limit_s``."""
        self._words.put(None)
        self._thread.join(limit_s)

    def _open(self) -> ErrorBus:
        # Importing pydantic takes time, and most monitors need no bus.
        from fft.health.hosts import HostWatch, Process

        bus = open_job_bus(self._url, JobToken.from_env(), bus_operation(self._url))
        charge = self._charge
        trainer = Process(charge.group, charge.rank, charge.pid)
        self._hosts = HostWatch(bus, "a monitor", charge.config.host_s, [trainer])
        return bus

    def _shut(self) -> None:
        for opened in (self._hosts, self._bus):
            if opened is not None:
                opened.close()
        self._hosts = self._bus = None

    def _run(self) -> None:
        with suppress(BusError):  # it is retried when there is a message to send
            self._bus = self._open()
        while (payload := self._words.get()) is not None:
            self._broadcast(payload)
        self._shut()

    def _broadcast(self, payload: bytes) -> None:
        """Send a message, with one retry on a new connection.

        Failure is not fatal, because the peers detect the fault themselves, too.
        """
        for last in (False, True):
            try:
                if self._bus is None:
                    self._bus = self._open()
                self._bus.broadcast(payload)
                return
            except BusError as error:
                if last:
                    logger.error("could not send %r on the bus: %s", payload, error)
                else:
                    self._shut()


def main() -> None:
    """Run the monitor: the entry point of ``python -m fft.health.monitor``."""
    # A scheduler may signal all processes of a step; the monitor ends with its trainer only.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control = sys.stdin.fileno()
    if len(sys.argv) != 1 or os.isatty(control):
        raise SystemExit(
            "usage: python -m fft.health.monitor < CHARGE; trainers start it by themselves"
        )
    try:
        runner = Runner(Charge.from_json(_line(control)), sys.stdout.fileno(), control)
    except (MonitorError, ValueError, OSError) as error:
        raise SystemExit(f"the monitor cannot run: {error}") from None
    runner.run()


def _line(fd: int) -> bytes:
    """Read the first line, and nothing after it."""
    line = b""
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return line


# --- in the trainer --------------------------------------------------------------------------


class MonitorProcess:
    """The trainer's monitor, from construction until ``close``.

    Args:
        pulse: The pulse of this process.
        config: Limits of the monitor.
        group: Group of this process.
        rank: Rank of this process.
        bus_url: Bus for the monitor's messages, if this process has no supervisor.
        supervisor: Descriptor of a datagram socket to the supervisor.
        on_line: Called with each parsed line, on a thread of this object; it gets verdicts only
            while the interpreter can run. A descriptor receives the lines itself.
    """

    def __init__(
        self,
        pulse: Pulse,
        config: MonitorConfig | None = None,
        *,
        group: str,
        rank: int,
        bus_url: str | None = None,
        supervisor: int | None = None,
        on_line: Callable[[dict[str, Any]], None] | int | None = None,
    ) -> None:
        """Start the monitor. Main thread only: with a bus, this thread's end counts as that of the
        process.

        Raises:
            OSError: The process cannot be started.
        """
        self._pulse = pulse
        self._on_line = on_line if callable(on_line) else None
        silent = subprocess.DEVNULL if on_line is None else on_line
        pid = os.getpid()
        own = os.pidfd_open(pid)
        config = config or MonitorConfig()
        death_mutex = DeathMutex() if bus_url is not None and supported() else None
        line = None if death_mutex is None else death_mutex.fd
        self._hold = None if line is None else Hold(line)
        charge = Charge(pulse.fd, own, line, supervisor, pid, group, rank, bus_url, config)
        passed = (pulse.fd, own, line, supervisor)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=silent if isinstance(silent, int) else subprocess.PIPE,
                pass_fds=[fd for fd in passed if fd is not None],
                env=_env(),
                # a signal to the trainer's process group must not end its monitor
                start_new_session=True,
            )
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already
                self._process.stdin.write(charge.to_json().encode() + b"\n")
                self._process.stdin.flush()
        except BaseException:
            if self._hold is not None:
                self._hold.release()
            raise
        finally:
            os.close(own)
            if death_mutex is not None:
                death_mutex.close()
        self._thread: threading.Thread | None = None
        if self._on_line is not None:
            self._thread = threading.Thread(target=self._read, name="fft-monitor", daemon=True)
            self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the monitor."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None and self._on_line is not None
        for line in self._process.stdout:
            try:
                self._on_line(json.loads(line))
            except Exception:  # a bug of the callback must not stop the reading of lines
                logger.exception("the listener of the monitor failed on %r", line)

    def close(self, limit_s: float = 5.0) -> None:
        """End the monitor; from here on the end of this process is not a fault. Idempotent."""
        self._pulse.leave()
        if self._hold is not None:
            self._hold.release()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        if not stdin.closed:
            with suppress(BrokenPipeError):
                # write, not only close: a forked child may hold the other end open
                stdin.write(b".")
                stdin.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit_s)
        if stdout is not None:
            stdout.close()


def _env() -> dict[str, str]:
    """Return the trainer's environment, with this FFT first on the import path."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


# --- busy children ---

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class BusyChildren:
    """The children that the main thread of one process has started."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[int, int] = {}

    def are_busy(self, since: float) -> bool:
        """Whether children that were started after ``since`` have computed since the last call.

        Older children do not count: workers of a data loader prefetch regardless of their parent.

        Args:
            since: Seconds on ``CLOCK_MONOTONIC``.
        """
        before, self._seen = self._seen, {}
        for child in _children(self._pid):
            self._add(child, since)
        return bool(self._seen) and self._seen != before

    def _add(self, pid: int, since: float) -> None:
        """Record the processor time of a child and of its descendants, in ticks."""
        with suppress(OSError, ValueError, IndexError):  # it has ended
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
            if _monotonic(int(fields[19])) < since - 2 * _TICK_S:  # the kernel rounds it down
                return
            # its own time, and that of its reaped children
            self._seen[pid] = sum(map(int, fields[11:15]))
            for child in _children(pid):
                self._add(child, since)


# --- waits for a core ---


class CoreWaits:
    """The waits of one process's threads for a core."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._seen: dict[str, int] = {}

    def take(self, is_wanted: bool) -> float:
        """Return the longest wait of a thread since the last call, in seconds.

        The kernel counts a wait when it ends. A thread that is new, or of which the kernel keeps no
        statistics, has not waited.

        Args:
            is_wanted: Whether to read the waits. The first call of a row of calls with True finds
                where they begin, and returns 0.
        """
        before, self._seen = self._seen, {}
        with suppress(OSError):  # the process has ended
            for task in os.listdir(self._tasks) if is_wanted else ():
                with suppress(OSError, IndexError):
                    fields = (self._tasks / task / "schedstat").read_bytes().split()
                    self._seen[task] = int(fields[1])
        waits = [ns - before.get(task, ns) for task, ns in self._seen.items()]
        return max(waits, default=0) / 1e9


def _children(pid: int) -> list[int]:
    """Return the children that the first thread of a process has started."""
    with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(number) for number in file.read().split()]
    return []


def _monotonic(ticks: int) -> float:
    """Convert ticks since boot to ``CLOCK_MONOTONIC``, which does not count suspends."""
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks * _TICK_S - asleep


if __name__ == "__main__":
    main()
