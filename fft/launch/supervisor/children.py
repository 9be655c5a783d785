"""One child process: starting it, learning of its death, ending it.

Starts processes in sessions of their own and signals only those, by pidfd (Linux), so that a
pid that was used again is never hit. Opens one log file per child.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fft.health.death_mutex import DeathMutex, supported
from fft.launch import script_runner
from fft.util import pidfd
from fft.util.die_with_parent import tied
from fft.util.error_places import Place

logger = logging.getLogger(__name__)

_REAP_S = 10.0  # how long a SIGKILLed child may take to vanish before we say so
_TAIL_LINES = 12
_TAIL_BYTES = 16 * 1024
_LONGEST_LINE = 300
MISMATCH = re.compile(r"collective mismatch|Mismatch between collective", re.IGNORECASE)
"""Messages of gloo and torch for ranks of a group that call different collectives."""
_TELLING = re.compile(rf"{MISMATCH.pattern}|what\(\):|fatal|out of memory|error", re.IGNORECASE)
_LONGEST_WORDS = 256 * 1024


class Child:
    """A running rank. `fd` becomes readable when it has died; then call `exit_code`, `reap`.

    Must be made by a thread that lives as long as the child shall: the kernel ends the child
    when that thread ends.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        start: int,
        script: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        inherits: Sequence[int] = (),
    ) -> None:
        """``inherits``: descriptors that it and whoever it starts may use."""
        self.group = group
        self.rank = rank
        self.start = start
        self.log = log
        self.began = time.monotonic()
        self.code: int | None = None
        self.told_dead = False
        self.is_replaced = False
        """Once its death is told: another process takes its place, while its mates live."""
        self.was_asked = False
        """It was sent SIGTERM."""
        self.was_killed = False
        """It was sent SIGKILL from here."""
        self.left_early = False
        """It ended with exit status 0 in the middle of the job."""
        self.loaded_torch = False
        """Once it is reaped: it ended well, and torch was loaded."""
        self.last_words: Place | None = None
        """Once it is reaped: the error of its own by which it ended."""
        self._death_mutex = DeathMutex() if supported() else None
        if self._death_mutex is not None:
            inherits = (*inherits, self._death_mutex.fd)
            env = {**env, "FFT_DEATH_MUTEX_FD": str(self._death_mutex.fd)}
        self._paper = os.memfd_create(script_runner.LAST_WORDS)
        try:
            env = {**env, "FFT_LAST_WORDS_FD": str(self._paper)}
            self._process = _started(script, env, log, (*inherits, self._paper))
        except BaseException:
            os.close(self._paper)
            if self._death_mutex is not None:
                self._death_mutex.close()
            raise
        self.pid = self._process.pid
        self.fd = os.pidfd_open(self.pid)

    def watch(self, on_dying: Callable[[], None]) -> None:
        """Call ``on_dying``, on another thread, when it is being killed: `fd` tells later.

        Only of one that trains with FFT; `exit_code` is not known yet then.
        """
        if self._death_mutex is not None:
            self._death_mutex.watch(on_dying)

    @property
    def alive(self) -> bool:
        """Whether it has not been reaped yet."""
        return self.code is None

    def exit_code(self) -> int:
        """The exit code of the dead child, negative for a signal; leaves it unreaped."""
        info = os.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOWAIT)
        assert info is not None  # without WNOHANG there is always an answer
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def dies_within(self, seconds: float) -> bool:
        """Wait for its death, at most so long."""
        return pidfd.ends_within(self.fd, seconds)

    def reap(self) -> int:
        """Collect the dead child, ending what it had started and left running."""
        # before the wait, while the zombie still keeps the number of its process group taken
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.code = self._process.wait()
        if self.code > 0:
            self.last_words = _read(self._paper)
        elif self.code == 0:
            self.loaded_torch = os.pread(self._paper, 16, 0) == script_runner.LOADED_TORCH
        os.close(self._paper)
        os.close(self.fd)
        if self._death_mutex is not None:
            self._death_mutex.close()
            self._death_mutex = None  # its page goes with it, which has a descriptor of its own
        return self.code

    @property
    def has_failed(self) -> bool:
        """Once it is reaped: whether it was lost, and not at its own end."""
        return self.code != 0 or self.left_early

    @property
    def failed_by_itself(self) -> bool:
        """Once it is reaped: whether its script failed, and no machine or peer."""
        is_theirs = self.last_words is not None and self.last_words.may_pass
        return (self.code or 0) > 0 and not is_theirs

    @property
    def came_too_late(self) -> bool:
        """Once it is reaped: whether all others had left; it had been left out, after a hang."""
        return self.last_words is not None and self.last_words.type == "JobEnded"

    def signal(self, number: int) -> None:
        """Send a signal; a child that is already dead is left alone."""
        self.was_asked |= number == signal.SIGTERM
        self.was_killed |= number == signal.SIGKILL
        pidfd.send(self.fd, number)

    @property
    def ended_as_asked(self) -> bool:
        """Once it is reaped: whether it ended by our SIGTERM, which nothing in it took."""
        return self.was_asked and self.code == -signal.SIGTERM

    def verdict(self, known: set[tuple[str, str]]) -> str:
        """One line on how it ended, and the last lines of its log.

        Not these if it ended by one of the errors that are ``known``, to which its own is added.
        """
        where = f"group {self.group} rank {self.rank} (pid {self.pid}, start {self.start})"
        line = f"{where} ended with {cause_of(self.code)}; its log: {self.log}"
        if (words := self.last_words) is not None:
            if words.signature in known:
                return f"{line}; by the same error, at {words.where}"
            known.add(words.signature)
        return f"{line}\n{self._last_lines()}".rstrip()  # who was killed may have said nothing

    def last_said(self) -> str:
        """Its traceback; of a script that exits with a code the last lines of its log."""
        words = self.last_words
        if words is None or words.type == "SystemExit":
            return self._last_lines()
        return words.text.rstrip()

    def decisive_line(self) -> str:
        """The line of its log that most likely tells why it died; empty if there is none."""
        lines = [line.strip() for line in _tail(self.log) if line.strip()]
        telling = [line for line in lines if _TELLING.search(line)]
        return (telling or lines or [""])[-1][:_LONGEST_LINE]

    def _last_lines(self) -> str:
        return "\n".join(f"    {line}" for line in _tail(self.log))


def reap_all(children: Sequence[Child]) -> None:
    """Collect those that were sent SIGKILL; says which do not end in time."""
    deadline = time.monotonic() + _REAP_S
    for child in children:
        if child.dies_within(deadline - time.monotonic()):
            child.reap()
        else:
            logger.error("pid %d did not end within %g s of its SIGKILL", child.pid, _REAP_S)


def _started(
    script: Sequence[str], env: Mapping[str, str], log: Path, inherits: Sequence[int]
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            tied([sys.executable, script_runner.__file__, *script]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            pass_fds=tuple(inherits),
            start_new_session=True,  # a Ctrl-C on the terminal is for the supervisor alone
        )


def _read(paper: int) -> Place | None:
    try:
        return Place.from_json(os.pread(paper, _LONGEST_WORDS, 0))
    except ValueError:  # none were left, or it was killed as it wrote them
        return None


def cause_of(code: int | None) -> str:
    """An exit code in words: ``exit code 3`` or ``SIGKILL``."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    return list(deque(text.splitlines(), maxlen=_TAIL_LINES))
