"""Interrupts the step function of a transaction that is rolled back, wherever its Python code is.

An ``Interrupter`` uses one signal of the process, ``SIGUSR2`` by default. A signal that another
sender raised still reaches the handler that was installed before. The main thread leaves a blocked
system call, a lock, a sleep or a loop at once. A call that is blocked in C++ is released by the
abort of the process groups, and ends with their error or with this one.

One condition variable joins the requesting thread and the main thread:

- The step function is *open* from the end of ``enter`` to the start of ``leave``. Only an open one
  is interrupted. A request that arrives too early returns False; its sender must have left a mark
  that the main thread checks when it enters a step function.
- ``request`` asks for the interruption, and the sender thread sends the signal. It sends the signal
  again if the exception was lost, for example inside a ``__del__``, where Python drops it. While
  the exception is alive and is being handled, as in a ``finally`` of the step function, it is not
  raised again.
- Inside ``atomic`` a request waits until the section ends.

Python runs a signal handler between two bytecodes, or inside a call that waits. At a place where an
exception would leave something half done (`fft.train.guard.unsafe_places`) the handler does not
raise. There are two kinds of such places:

- *short*: the handler sends itself the signal again, so it runs at the next possible bytecode and
  raises at the first safe one. If two signals of the sender in a row find the main thread at the
  same bytecode, the main thread is in a blocking call, and the handler raises out of that call. (A
  call that ends in the few microseconds before that signal looks the same.)
- *long*, an import or a compilation: the next signal of the sender checks again.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from fft.errors import FftError
from fft.health.compiling import never_compiled
from fft.train.guard.unsafe_places import Safety, classify, guarded, owner

DEFAULT_SIGNAL = signal.SIGUSR2
_REPEAT_S = 0.02
"""Seconds to wait for the exception to be raised or lost, before the signal is repeated."""

_FIRST_WAIT_S = 0.002
"""The same after the first signal, which may have found the main thread in a call that waits. Each
further wait is three times as long."""

_MAX_UNHANDLED_SIGNALS = 25
"""Number of signals in a row that find the exception alive but not handled, before it counts as
lost. (While it passes through C++ it is not handled, and a destructor may run Python code.)"""

_SAME_BYTECODE_SIGNALS = 2
"""Number of signals in a row that find the main thread at the same bytecode before it counts as
waiting in a call. One may be chance, because threads take turns."""

_MAX_RECHECKS = 500
"""Number of times that the handler checks again by itself after a signal of the sender. It covers a
few milliseconds of a long ``__enter__``."""


class Interrupted(BaseException):
    """The transaction is rolled back. Not an ``Exception``, because step functions catch those."""


class Interrupter:
    """The interrupter of one main thread, which creates it and calls everything but ``request``.

    A step function that runs on another thread cannot be interrupted and is never open.
    """

    def __init__(self, number: signal.Signals = DEFAULT_SIGNAL) -> None:
        """Install the handler.

        Raises:
            FftError: The caller is not the main thread, and handlers run only there.
        """
        if threading.current_thread() is not threading.main_thread():
            raise FftError("an Interrupter works on the main thread only")
        self._number = number
        self._main = threading.get_ident()
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._open = False
        self._atomic = 0
        self._cause: str | None = None
        """Cause of the pending request, or None."""
        self._raised: weakref.ref[Interrupted] | None = None
        self._closed = False
        self._unseen = 0
        self._in_flight = False
        """A signal was sent, and its handler has not run yet."""
        self._body: FrameType | None = None
        """Frame of the step function."""
        self._rechecks_left = 0
        """Number of checks that the handler may still trigger before the sender's next signal."""
        self._sent = False
        """The sender has sent a signal since the handler last ran."""
        self._seen: tuple[int, int] | None = None
        """Frame id and bytecode at which the last signal found the main thread in a short unsafe
        place."""
        self._stays = 0
        """Number of signals in a row that found it there."""
        self.repeated = 0
        """Exceptions that were lost on their way and raised again."""
        never_compiled(Interrupter._handle)
        self._previous = signal.signal(number, self._handle)
        self._sender = threading.Thread(target=self._send, name="fft-interrupt", daemon=True)
        self._sender.start()

    # --- any thread ---

    def request(self, cause: str) -> bool:
        """Interrupt the open step function, and return at once whether one was open."""
        with self._changed:
            if not self._open or self._cause is not None:
                return self._open
            self._cause = cause
            self._changed.notify_all()
            return True

    # --- the main thread ---

    @property
    def signal_name(self) -> str:
        """Name of the signal in use."""
        return self._number.name

    @property
    def is_replaced(self) -> bool:
        """Whether another handler replaced this one, so that interruption no longer works."""
        return not self._closed and signal.getsignal(self._number) != self._handle

    @guarded
    def enter(self, is_superseded: Callable[[], bool] = lambda: False) -> None:
        """Open a step function; interrupt it if it was rolled back before it began."""
        with self._changed:
            self._cause, self._raised = None, None
            self._open = threading.get_ident() == self._main
            self._body, self._seen, self._stays = owner(sys._getframe()), None, 0
        if is_superseded():
            self.request("rolled back before it began")

    @guarded
    def leave(self) -> bool:
        """Close the step function, which returned or raised.

        Return whether its interruption was requested.
        """
        with self._changed:
            self._open = False
            asked, self._cause, self._raised = self._cause is not None, None, None
            self._body = None
            self._changed.notify_all()
        return asked

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Delay requests until the end of the ``with`` block. Blocks may be nested."""
        self._atomic += 1
        try:
            yield
        finally:
            self._end_atomic()

    @guarded
    def _end_atomic(self) -> None:
        with self._changed:
            self._atomic -= 1
            self._changed.notify_all()

    @guarded
    def close(self) -> None:
        """End the sender thread and restore the previous handler. Idempotent.

        Python restores handlers only on the main thread. After a call on another thread this
        handler stays and passes signals on, until the main thread calls ``close``.
        """
        with self._changed:
            self._closed, self._open, self._cause = True, False, None
            self._changed.notify_all()
        self._sender.join()
        is_main = threading.get_ident() == self._main
        if is_main and signal.getsignal(self._number) == self._handle:
            signal.signal(self._number, self._previous)

    @guarded
    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked worker never has an open step function
            signal.signal(number, self._previous)
            signal.raise_signal(number)
            return
        cause = self._cause
        ours, self._in_flight = self._in_flight, False
        sent, self._sent = self._sent, False
        if not ours and callable(self._previous):
            self._previous(number, frame)
        if cause is None or frame is None or not self._open or self._atomic:
            return
        if self._on_its_way() and not self._is_lost():
            return
        safety = classify(frame, self._body)
        if safety is Safety.SAFE or (safety is Safety.SOON and self._waits(frame, sent)):
            self._raise(cause)
        if safety is Safety.SOON and self._may_recheck(sent):
            again = map(_thread.interrupt_main, (self._number,))
            self._in_flight = True
            # No call from here on: the interpreter checks for signals after each call, so the
            # handler would run again inside this one.
            [_] = again

    def _waits(self, frame: FrameType, sent: bool) -> bool:
        """Whether the main thread is in a call that waits: no bytecode ran since the last check."""
        if not sent:  # the handler asked for this check, so the interpreter has run since
            self._stays = 0
            return False
        before, self._seen = self._seen, (id(frame), frame.f_lasti)
        self._stays = self._stays + 1 if before == self._seen else 0
        return self._stays >= _SAME_BYTECODE_SIGNALS

    def _may_recheck(self, sent: bool) -> bool:
        self._rechecks_left = _MAX_RECHECKS if sent else self._rechecks_left - 1
        if self._rechecks_left <= 0:
            self._seen = None  # the thread may have been elsewhere in between
            self._stays = 0
        return self._rechecks_left > 0

    def _raise(self, cause: str) -> NoReturn:
        if self._raised is not None:
            self.repeated += 1
        self._unseen = 0
        error = Interrupted(cause)
        self._raised = weakref.ref(error)
        try:
            raise error
        finally:
            del error  # else its traceback keeps it alive, through this frame

    def _on_its_way(self) -> bool:
        return self._raised is not None and self._raised() is not None

    def _is_lost(self) -> bool:
        """Whether the exception is referenced but has not been handled for many signals."""
        assert self._raised is not None
        ours, error = self._raised(), sys.exc_info()[1]
        while error is not None and error is not ours:
            error = error.__context__
        self._unseen = 0 if error is not None else self._unseen + 1
        return self._unseen >= _MAX_UNHANDLED_SIGNALS

    # --- the sender's thread ---

    def _send(self) -> None:
        patience = _FIRST_WAIT_S
        while True:
            with self._changed:
                if not self._due():
                    patience = _FIRST_WAIT_S
                self._changed.wait_for(lambda: self._closed or self._due())
                if self._closed:
                    return
                # Hold the lock, so that the step function cannot end between the check and the
                # signal.
                self._in_flight = self._sent = True
                signal.pthread_kill(self._main, self._number)
                self._changed.wait_for(lambda: self._closed or not self._due(), patience)
                patience = min(3 * patience, _REPEAT_S)
                if self._on_its_way():
                    self._changed.wait_for(self._is_over, _REPEAT_S)

    def _due(self) -> bool:
        return self._open and not self._atomic and self._cause is not None

    def _is_over(self) -> bool:
        return self._closed or not self._due() or not self._on_its_way()
