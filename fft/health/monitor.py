"""A process beside each trainer that notices what the trainer itself cannot: that it hangs or died.

The trainer starts it (`MonitorProcess`) and gives it two descriptors: its pulse, and a pidfd of
itself. Only the process of this pidfd is ever signalled, so no process can be ended that did not
ask to be watched, nor another one that got its number. The monitor looks at the pulse every
``interval_s`` (`fft.health.detectors.trainer`, pure, decides), and

- writes one JSON line to its standard output when it begins, ``{"v":1,"type":"watching",…}``, and
  one when the verdict becomes worse:
  ``{"v":1,"type":"verdict","level":"yellow","reason":…,"group":…,"rank":…,"pid":…,"step":…,"at":…}``
- sends ``suspect`` to the others, through the supervisor if there is one, else on the bus, when a
  suspected trainer cannot be expected to send it: no thread of it runs, or its own rollback has not
  freed it after ``min_s``;
- on red ends the trainer: SIGTERM, SIGCONT (a stopped process receives nothing else, and the
  SIGTERM is waiting when it wakes), and SIGKILL ``term_s`` later. Before that, the pulse says that
  the SIGTERM is no request to drain;
- when the trainer has ended without having said so, writes the ``death`` message of the bus as a
  line, sends it on the bus if it was given one, and ends;
- if it was given a bus, and so has no supervisor, beats there for its trainer, looks whether others
  beat (`fft.health.hosts`), and holds the trainer's death mutex, which reports its death at once.

It shares neither the interpreter lock nor the session of the trainer, so a thread that keeps the
lock, SIGSTOP and Ctrl-C do not reach it. It never waits for its standard output: what does not fit
into the pipe is dropped. torch is not imported.
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

from fft.bus import BusError, ErrorBus, open_job_bus
from fft.bus.token import JobToken
from fft.health.busy_children import BusyChildren
from fft.health.death_mutex import DeathMutex, Hold, supported
from fft.health.detectors.base import Level
from fft.health.detectors.pulse import Pulse, PulseReader, Reading
from fft.health.detectors.trainer import Look, Monitor, MonitorConfig
from fft.protocol.timeouts import bus_operation
from fft.util import pidfd
from fft.util.errors import FftError

if TYPE_CHECKING:
    from fft.health.hosts import HostWatch

_VANISH_S = 10.0  # how long a SIGKILLed process may take to vanish before we say so
_LEAVE_S = 2.0  # for leaving the roll of hosts, where nobody would miss us for more than a while
_FAREWELL_S = 30.0  # for opening the bus, if it is not open yet, and saying one thing on it

logger = logging.getLogger(__name__)


class MonitorError(FftError):
    """The monitor cannot be started or run as asked; says what to change."""


# --- in the monitor's process ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Charge:
    """Who is watched and how, as handed over in the first line of standard input.

    Not on the command line, which everybody may read: the bus's URL may have a password in it.
    ``pulse``, ``pidfd``, ``death_mutex`` and ``supervisor`` (a datagram socket) are inherited
    descriptors' numbers.
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
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises MonitorError for a text that `to_json` did not make."""
        try:
            data = json.loads(text)
            return cls(**{**data, "config": MonitorConfig(**data["config"])})
        except (ValueError, TypeError, KeyError) as error:
            raise MonitorError(f"this is started by trainers, not by hand: {error!r}") from None


class Runner:
    """The main loop of the monitor's process. ``out`` gets the lines; standard input ends it."""

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
        self._announcer = _Announcer(charge, charge.bus_url) if charge.bus_url else None
        self._level = Level.GREEN
        self._concerns_others = False
        self._cause = "ended without leaving the job"
        os.set_blocking(out, False)

    def run(self) -> None:
        """Watch until the trainer has ended, or says that it is to be watched no more."""
        left = self._watch()
        if not left:
            self._tell_death()
        if self._announcer is not None and (not left or self._announcer.beats):
            self._announcer.close(_LEAVE_S if left else _FAREWELL_S)

    def _watch(self) -> bool:
        """Until one of the two; whether it was that it has left the job."""
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
                waiter.unregister(self._control)  # it closes its files: it is about to end
            self._look(reading)

    def _look(self, reading: Reading) -> None:
        now = time.monotonic()
        is_stopped = self._monitor.is_mute(now) and pidfd.is_stopped(self._charge.pid)
        waits = reading.in_txn and self._monitor.stands_still(now)
        is_busy = waits and self._children.are_busy(reading.begun)
        self._monitor.observe(Look(now, reading, is_stopped, is_busy))
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
        """SIGTERM, SIGCONT, grace, SIGKILL, all by pidfd; the loop then finds it dead."""
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

    # --- saying it ---

    def _tell_suspicion(self, reason: str) -> None:
        word = json.dumps(self._word("suspect", reason)).encode()
        if self._charge.supervisor is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(self._charge.supervisor)) as there:
                there.send(word, socket.MSG_DONTWAIT)  # it has ended, or has no time for it
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
        with suppress(OSError):  # nobody reads, or nobody is left to
            os.write(self._out, json.dumps(line).encode() + b"\n")


class _Announcer:
    """Says things on the bus, and beats there for the trainer, which has no supervisor.

    On threads of its own: opening a bus may take seconds.
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
        """Whether it is on the roll of hosts, where somebody could miss it."""
        return self._hosts is not None

    def say(self, payload: bytes) -> None:
        """Have it said; returns at once."""
        self._words.put(payload)

    def close(self, limit_s: float) -> None:
        """Have all said, or be late by ``limit_s``."""
        self._words.put(None)
        self._thread.join(limit_s)

    def _open(self) -> ErrorBus:
        from fft.health.hosts import HostWatch, Process  # pydantic takes time, and most need no bus

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
        with suppress(BusError):  # then it is tried again when there is something to say
            self._bus = self._open()
        while (payload := self._words.get()) is not None:
            self._broadcast(payload)
        self._shut()

    def _broadcast(self, payload: bytes) -> None:
        """Peers find out by themselves too, so a lost bus is no stop. Tried on a fresh one once."""
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
    """What ``python -m fft.health.monitor`` runs."""
    # A scheduler may send these to all processes of a step; the monitor ends with its trainer.
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
    """The first line, and nothing of what comes after it."""
    line = b""
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return line


# --- in the trainer --------------------------------------------------------------------------


class MonitorProcess:
    """The trainer's monitor, from its making until ``close``.

    ``on_line`` gets each line, read from JSON, on a thread of this object: verdicts only while
    the interpreter can run, of course. ``out`` is a descriptor that gets the lines in its stead.
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
        on_line: Callable[[dict[str, Any]], None] | None = None,
        out: int | None = None,
    ) -> None:
        """Main thread only: with a bus, its end is taken for that of the process.

        Raises OSError if no process can be started, MonitorError for two places to write to.
        """
        if on_line is not None and out is not None:
            raise MonitorError("give on_line or out, not both: a line is written once")
        self._pulse = pulse
        self._on_line = on_line
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
                stdout=_stdout(on_line is not None, out),
                pass_fds=[fd for fd in passed if fd is not None],
                env=_env(),
                start_new_session=True,  # who ends the trainer's group must not end its monitor
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
        if on_line is not None:
            self._thread = threading.Thread(target=self._read, name="fft-monitor", daemon=True)
            self._thread.start()

    @property
    def pid(self) -> int:
        """The monitor's process."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None and self._on_line is not None
        for line in self._process.stdout:
            try:
                self._on_line(json.loads(line))
            except Exception:  # a listener's bug must not deafen this trainer
                logger.exception("the listener of the monitor failed on %r", line)

    def close(self, limit_s: float = 5.0) -> None:
        """End it; from here on the end of this process is no fault. Idempotent."""
        self._pulse.leave()
        if self._hold is not None:
            self._hold.release()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        if not stdin.closed:
            with suppress(BrokenPipeError):
                # said, not just closed: a forked child may hold the other end open
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


def _stdout(piped: bool, out: int | None) -> int:
    if piped:
        return subprocess.PIPE
    return subprocess.DEVNULL if out is None else out


def _env() -> dict[str, str]:
    """The trainer's, with this very FFT found first."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    main()
