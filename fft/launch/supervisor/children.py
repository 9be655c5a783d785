"""One child process: starting it, detecting its death, ending it.

This module starts each process in a new session. It signals only these processes, by pidfd (Linux),
so that a reused pid never receives a signal. Each child has one log file.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fft.health.death_mutex import DeathMutex, supported
from fft.launch import script_runner
from fft.launch.supervisor.script import Script
from fft.launch.verdict import cause_of
from fft.messages.exits import Exit
from fft.messages.protocol import MAX_MESSAGE, Suspect, UnreadableMessage, decode
from fft.util import pidfd
from fft.util.error_places import Place

logger = logging.getLogger(__name__)


_HOST = socket.gethostname()
_REAP_S = 10.0  # time that a child may take to end after SIGKILL before that is logged
_TAIL_LINES = 12
_TAIL_BYTES = 16 * 1024
_LONGEST_LINE = 300
MISMATCH = re.compile(r"collective mismatch|Mismatch between collective", re.IGNORECASE)
"""Messages of gloo and torch for ranks of a group that call different collectives."""
_TELLING = re.compile(rf"{MISMATCH.pattern}|what\(\):|fatal|out of memory|error", re.IGNORECASE)
_LONGEST_ERROR = 256 * 1024


@dataclass
class Trainer:
    """A process that takes part in the job in the place of the one that started it, a wrapper."""

    pid: int = 0
    ended_at: float | None = None
    """When it was found to have ended, on the monotonic clock in seconds."""
    has_left: bool = False
    """It left the job in good order, and its wrapper was then asked to end."""


class Child:
    """A running rank. `fd` becomes readable when it has died; then call `exit_code` and `reap`.

    The thread that constructs it must live as long as the child is to run, because the kernel
    ends the child when that thread ends.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        start: int,
        script: Script,
        env: Mapping[str, str],
        log: Path,
        inherits: Sequence[int] = (),
    ) -> None:
        """Start the process.

        Args:
            start: Number of the group's start.
            env: The complete environment.
            log: File to which output and errors are appended.
            inherits: Descriptors that the child and its own children may use.
        """
        self.group = group
        self.rank = rank
        self.start = start
        self.log = log
        self.began = time.monotonic()
        self.code: int | None = None
        self.told_dead = False
        self.is_replaced = False
        """Another process takes its place while the other ranks live; set when its death is
        reported."""
        self.was_asked = False
        """The supervisor sent it SIGTERM."""
        self.was_killed = False
        """The supervisor sent it SIGKILL."""
        self.trainer = Trainer()
        self.loaded_torch = False
        """It ended without an error and had loaded torch; set by `reap`."""
        self.error_place: Place | None = None
        """The error in the script that ended the process; set by `reap`."""
        self.exit = Exit(group, rank, 0, "", took_part=False)
        """How it has ended, by its own register and by `collected`."""
        self._death_mutex = DeathMutex() if supported() else None
        if self._death_mutex is not None:
            inherits = (*inherits, self._death_mutex.fd)
            env = {**env, "FFT_DEATH_MUTEX_FD": str(self._death_mutex.fd)}
        self._error_fd = os.memfd_create(script_runner.ERROR_REPORT)
        try:
            env = {**env, "FFT_ERROR_FD": str(self._error_fd)}
            self._process = script.start(env, log, (*inherits, self._error_fd))
        except BaseException:
            os.close(self._error_fd)
            if self._death_mutex is not None:
                self._death_mutex.close()
            raise
        self.pid = self._process.pid
        self.fd = os.pidfd_open(self.pid)

    def watch(self, on_dying: Callable[[], None]) -> None:
        """Call ``on_dying`` on another thread as soon as the process is being killed.

        This precedes `fd`, and `exit_code` is not known yet. It only works for a process that
        trains with FFT.
        """
        if self._death_mutex is not None:
            self._death_mutex.watch(on_dying)

    @property
    def alive(self) -> bool:
        """Whether it has not been reaped yet."""
        return self.code is None

    def exit_code(self) -> int:
        """Return the exit code of the dead child, negative for a signal, without reaping it."""
        info = os.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOWAIT)
        assert info is not None  # without WNOHANG there is always an answer
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def dies_within(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for its death; return whether it died."""
        return pidfd.ends_within(self.fd, seconds)

    def reap(self) -> int:
        """Collect the dead child and kill the processes that it has left running."""
        # before the wait, while the zombie still keeps the number of its process group taken
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.code = self._process.wait()
        if self.code > 0:
            self.error_place = _read(self._error_fd)
        elif self.code == 0:
            self.loaded_torch = os.pread(self._error_fd, 16, 0) == script_runner.LOADED_TORCH
        os.close(self._error_fd)
        os.close(self.fd)
        if self._death_mutex is not None:
            self._death_mutex.close()
            self._death_mutex = None  # frees its page, which has its own descriptor
        return self.code

    def collected(self, written: Exit | None, step: int, took_part: bool, replaces: bool) -> None:
        """Derive `exit`, after `reap`.

        Args:
            written: The exit that the process itself has written.
            step: The last step that it is known to have committed.
            took_part: Whether it is known to have been a member of an epoch.
            replaces: It has taken the place of a lost rank of a living group.
        """
        found = written or Exit(self.group, self.rank, self.pid, _HOST, step, took_part=took_part)
        place = self.error_place
        self.exit = replace(
            found,
            step=max(step, found.step),
            status=0 if self.trainer.has_left else self.code,
            place=place and replace(place, text=""),
            asked=self.was_asked,
            early=self.exit.early,
            replaces=replaces,
            log=str(self.log),
        )

    @property
    def left_early(self) -> bool:
        """It ended with exit status 0 in the middle of the job."""
        return self.exit.early

    @left_early.setter
    def left_early(self, is_early: bool) -> None:
        self.exit = replace(self.exit, early=is_early)

    @property
    def has_failed(self) -> bool:
        """Whether it ended by a failure or too early; valid after `reap`."""
        return (self.code != 0 and not self.trainer.has_left) or self.left_early

    @property
    def came_too_late(self) -> bool:
        """Whether it returned after all others had left, as after a hang; valid after `reap`."""
        return self.exit.came_too_late

    def signal(self, number: int) -> None:
        """Send a signal, except to a child that is already dead.

        SIGTERM goes to the trainer below a wrapper script, because the end of the wrapper would end
        it in the middle of a step.
        """
        self.was_asked |= number == signal.SIGTERM
        self.was_killed |= number == signal.SIGKILL
        if number == signal.SIGTERM and self._has_trainer():
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.trainer.pid, number)
                return
        pidfd.send(self.fd, number)

    def outlives(self, pid: int) -> float:
        """Return how long ago ``pid``, which took part in its place, has ended, in seconds, or 0.

        Only a process of its session counts, because pids of another PID namespace mean nothing.
        """
        before, self.trainer.pid = self.trainer.pid, pid
        if pid in (0, self.pid) or self._has_trainer():
            self.trainer.ended_at = None
        elif self.trainer.ended_at is None and before == pid:
            self.trainer.ended_at = time.monotonic()
        elif self.trainer.ended_at is None:
            self.trainer.pid = before  # it was never seen to live
        return 0.0 if self.trainer.ended_at is None else time.monotonic() - self.trainer.ended_at

    def _has_trainer(self) -> bool:
        """Return whether the trainer below a wrapper lives."""
        pid = self.trainer.pid
        try:
            return pid != 0 and os.getsid(pid) == self.pid and not _is_zombie(pid)
        except ProcessLookupError:
            return False

    def verdict(self, known: set[tuple[str, str]]) -> str:
        """Describe how it ended, in one line followed by the last lines of its log.

        The log is omitted if the error that ended the process is in ``known``; otherwise the error
        is added to ``known``.
        """
        where = f"group {self.group} rank {self.rank} (pid {self.pid}, start {self.start})"
        line = f"{where} ended with {cause_of(self.code)}; its log: {self.log}"
        if (words := self.error_place) is not None:
            if words.signature in known:
                return f"{line}; by the same error, at {words.where}"
            known.add(words.signature)
        return f"{line}\n{self._last_lines()}".rstrip()  # the log of a killed process may be empty

    def last_said(self) -> str:
        """Return its traceback, or the last lines of its log if there is none or on SystemExit."""
        words = self.error_place
        if words is None or words.is_a(SystemExit):
            return self._last_lines()
        return words.text.rstrip()

    def decisive_line(self) -> str:
        """Return the line of its log that most likely gives the cause of death, or ''."""
        lines = [line.strip() for line in _tail(self.log) if line.strip()]
        telling = [line for line in lines if _TELLING.search(line)]
        return (telling or lines or [""])[-1][:_LONGEST_LINE]

    def _last_lines(self) -> str:
        return "\n".join(f"    {line}" for line in _tail(self.log))


def reap_all(children: Sequence[Child]) -> None:
    """Collect children that were sent SIGKILL; log those that do not end in time."""
    deadline = time.monotonic() + _REAP_S
    for child in children:
        if child.dies_within(deadline - time.monotonic()):
            child.reap()
        else:
            logger.error("pid %d did not end within %g s of its SIGKILL", child.pid, _REAP_S)


def _read(error_fd: int) -> Place | None:
    try:
        return Place.from_json(os.pread(error_fd, _LONGEST_ERROR, 0))
    except ValueError:  # it recorded no error, or was killed while writing it
        return None


def _tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    return list(deque(text.splitlines(), maxlen=_TAIL_LINES))


# --- orphans ---
# Reap orphans, whose parent is `fft run`: it is PID 1, as in a container, or their subreaper.
#
# Reads ``/proc``.

_LOOK_S = 1.0
"""Interval between two scans, in seconds."""
_OWN_S = 5.0
"""Time that a zombie is left to the code that may have started it, in seconds."""


class Orphans:
    """Reaps zombies that no other code collects."""

    def __init__(self) -> None:
        self._look_at = 0.0
        self._since: dict[int, float] = {}
        """Zombies by pid, with the time of the first sight in seconds."""

    def reap(self, own: Iterable[int]) -> None:
        """Collect orphans that have ended, except ``own``, which their owner collects."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        zombies = _zombies() - set(own)
        self._since = {pid: self._since.get(pid, now) for pid in zombies}
        for pid, since in list(self._since.items()):
            if now >= since + _OWN_S:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                del self._since[pid]


def _zombies() -> set[int]:
    """Return our children that have ended and were not collected."""
    found = set[int]()
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found.update(pid for pid in map(int, children.read_text().split()) if _is_zombie(pid))
    return found


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].startswith(b"Z")
    except OSError:  # collected meanwhile
        return False


# --- hang reports ---
# Hang reports from the monitors of children to the supervisor, over its own pair of sockets.

_REPORTS_A_TURN = 16  # bounded, so that many reports cannot delay the handling of deaths


class HangReports:
    """Receives hang reports about our children. Any process started by a child can write here."""

    def __init__(self) -> None:
        # Datagrams keep the messages of several writers separate.
        self.socket, self._children = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)

    @property
    def fd(self) -> int:
        """The descriptor that children write to."""
        return self._children.fileno()

    def take(self, living: Sequence[Child]) -> Iterator[Suspect]:
        """Yield the reports about one of the ``living``; reads at most 16 messages per call."""
        known = {(child.group, child.rank, child.pid) for child in living}
        with suppress(BlockingIOError):
            for _ in range(_REPORTS_A_TURN):
                report = self.socket.recv(MAX_MESSAGE)
                if (message := _about(known, report)) is not None:
                    yield message

    def close(self) -> None:
        """Close both ends."""
        self.socket.close()
        self._children.close()


def _about(known: set[tuple[str, int, int]], report: bytes) -> Suspect | None:
    """Return the reported hang if it concerns a known child, else log the message.

    The sender need not be a monitor.
    """
    try:
        message = decode(report)
    except UnreadableMessage as error:
        logger.warning("a process of the job sent something that is no message: %s", error)
        return None
    if (
        isinstance(message, Suspect)
        and message.host == socket.gethostname()
        and (message.group, message.rank, message.pid) in known
    ):
        return message
    logger.warning("a process of the job sent a message that it may not send: %r", report[:200])
    return None
