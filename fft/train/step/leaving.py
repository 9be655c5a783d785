"""Drains of one participant, requested by a call, a signal or a notice.

`fft.train.step.preemption` enforces the deadline. This module runs on any thread and in signal
handlers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from fft.engine.core import Host
from fft.errors import FftError
from fft.messages.effects import Finish
from fft.messages.protocol import Drain, Stop
from fft.train.guard.unsafe_places import guarded
from fft.train.guard.watchers import Watchers
from fft.train.session.participation import Participation
from fft.train.session.settings import drain_within
from fft.train.step.preemption import (
    DrainTimer,
    Notice,
    NoticeSource,
    Poller,
    source_of,
    waiting_for,
)

_FRAMES = 4
"""Number of the main thread's calls to report when it is too late to leave with a commit."""
_TORCHRUN_S = 30.0
"""Seconds from SIGTERM to SIGKILL by torchrun (``PContext.close``)."""
_LONGEST_CAUSE = 1500
"""Maximum characters of the cause that is sent to the others, since messages are limited."""


class Leaving:
    """Drains of one participant, until ``close``.

    Owns the threads of the timer and of the notices.
    """

    def __init__(self, job: Participation, watchers: Watchers, host: Host, margin_s: float) -> None:
        """Start the timer. ``margin_s`` before a deadline, it leaves without a commit."""
        self.is_asked = False
        self._job = job
        self._watchers = watchers
        self._pollers: list[Poller] = []
        self._clock = DrainTimer(_Leaver(job, watchers, host), margin_s)

    def drain(self, within: float | None, reason: str) -> None:
        """See ``ManagerFFT.drain``."""
        notice = Notice(reason, within)
        self.is_asked = True
        self.ask()
        self._clock.on_notice(notice)

    def ask(self) -> None:
        """Pass the request to the engine, if there is a request and an engine."""
        if self.is_asked:
            peer = self._job.peer
            self._job.post(Drain(groups=(peer.group,), by=f"{peer}", local=True))

    def on_notice(self, drain: Callable[..., None], source: NoticeSource) -> None:
        """Call ``drain`` with the notices of ``source``.

        ``drain`` is a method, whose object is not kept alive.
        """
        reader = weakref.WeakMethod(drain)
        self._pollers.append(Poller(source, lambda n: _pass_on(reader, n)))

    def on_signal(
        self, drain: Callable[..., None], number: signal.Signals, within: float | None
    ) -> None:
        """Call ``drain`` when the process gets this signal. Main thread only."""
        previous, owner = signal.getsignal(number), os.getpid()

        @guarded
        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() != owner:  # a forked worker is no participant and cannot drain
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
                signal.raise_signal(number)
                return
            if self._watchers.doomed:
                signal.signal(number, signal.SIG_DFL)  # no request to drain: this process hangs
                signal.raise_signal(number)
            drain(within, signal.Signals(number).name)
            if callable(previous):
                previous(number, frame)

        signal.signal(number, handle)

    def configure_from_env(self, drain: Callable[..., None], group: str, rank: int) -> None:
        """Drain on the signal and the notices that the environment names.

        torchrun ends its processes by SIGTERM, so that is the signal there if none is named.
        """
        is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and "FFT_GROUP" not in os.environ
        name = os.environ.get("FFT_DRAIN_SIGNAL", "SIGTERM" if is_torchrun else "")
        within = drain_within() or (_TORCHRUN_S if is_torchrun else None)
        if name and threading.current_thread() is threading.main_thread():
            drain(within, on=_signal_of(name))
        if notice := os.environ.get("FFT_NOTICE"):
            drain(on=source_of(notice, group, rank))

    def left(self, error: str | None = None) -> None:
        """Record that this participant has left; ``error`` is the class of the error that ended
        it."""
        self._clock.left(error)

    def end_notices(self) -> None:
        """Stop polling all sources. Idempotent."""
        for poller in self._pollers:
            poller.close()
        self._pollers.clear()

    def close(self) -> None:
        """End the threads. Idempotent."""
        self.end_notices()
        self._clock.close()


class _Leaver:
    """Callbacks of the drain's timer; they do not keep the manager alive."""

    def __init__(self, job: Participation, watchers: Watchers, host: Host) -> None:
        self._job = weakref.ref(job)
        self._watchers = weakref.ref(watchers)
        self._host = host

    def describe_wait(self) -> str | None:
        job, watchers = self._job(), self._watchers()
        engine = job.engine if job is not None else None
        if engine is None or watchers is None:
            return None  # it has not joined, so no participant waits for it
        if engine.ended.is_set():
            return None
        local = engine.local
        text = waiting_for(local, engine.participant.config, time.monotonic())
        if (stall := engine.describe_stall()) is not None:
            text = f"{stall}; before that, {text}"
        return f"{text}; its main thread is in {_calls_of(watchers.main)}"

    def leave(self, cause: str, limit_s: float) -> bool:
        job = self._job()
        engine = job.engine if job is not None else None
        if engine is None:
            return True
        engine.post(Stop(cause[:_LONGEST_CAUSE]))
        told = engine.ended.wait(limit_s / 2)
        # the bus does not respond; the supervisor reports the death of a process that ends with an
        # error
        if not told:
            doubt = f"stopped before the deadline without notifying the other ranks: {cause}"
            engine.abandon(Finish(doubt, error="InDoubt"))
        # Only now: the others must receive the cause before their connections end.
        self._host.cancel_futures(cause)
        self._host.abort_groups(cause)
        return told

    def note(self, name: str, data: dict[str, Any]) -> None:
        job = self._job()
        if job is not None and job.engine is not None:
            job.note(name, data)


def _signal_of(name: str) -> signal.Signals:
    """Return the signal that FFT_DRAIN_SIGNAL names. Raises FftError."""
    try:
        return signal.Signals[name]
    except KeyError:
        raise FftError(
            f"FFT_DRAIN_SIGNAL={name}: expected a signal name such as SIGTERM, or nothing"
        ) from None


def _pass_on(drain: weakref.WeakMethod[Callable[..., None]], notice: Notice) -> None:
    """Pass a notice on to a manager that still exists. Thread of the source."""
    if (call := drain()) is not None:
        call(notice.within_s, notice.reason)


def _calls_of(thread: int | None) -> str:
    """Return the stack of a thread, innermost call first: file, line and function."""
    frame = sys._current_frames().get(thread or -1)
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        found.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or "no Python code"
