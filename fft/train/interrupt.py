"""Unwinds the body of a txn that is being rolled back, wherever in Python the main thread is.

Touches one signal of the process (``SIGUSR2`` unless said otherwise) while an ``Interrupter``
lives; whoever handled it before still gets what is not ours. A blocked system call, a lock, a sleep
and a loop are all left at once. What is blocked in C++ is freed by the abort of the process groups,
and then unwinds by their error or by this one.

One condition variable joins the thread that asks and the main thread:

- A body is *open* from the end of ``enter`` to the begin of ``leave``. Only an open body is
  unwound. Who asks too early is told so, and has to have left a sign that the main thread looks for
  then.
- ``request`` asks for it; a thread of ours sends the signal, and sends it again if the exception
  was lost on its way (raised inside a ``__del__``, say, where Python drops it). While it is alive
  and being handled, in a ``finally`` of the body's, say, it is on its way, and is not raised again.
- Inside ``atomic`` the request waits, and is carried out at its end.

The handler of a signal runs between two bytecodes, whichever, or in a call that waits. Where an
exception would leave something half done (`fft.train.unsafe_places`) it raises nothing. Such a
place is short, or it is none for as long as it takes (an import, a compilation):

- *short*: the handler sends itself the signal again, so that it runs at the next bytecode at which
  it can, and raises at the first that is safe. If it then finds the main thread where it was, at a
  signal of the sender's, no bytecode has run in between: this is a call that waits, and the
  exception comes out of that call. (A call that ends in the few microseconds before that very
  signal looks the same.)
- *long*: the sender's next signal asks again.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from fft.health.compiling import never_compiled
from fft.train.unsafe_places import Safety, guarded, look, owner
from fft.util.errors import FftError

DEFAULT_SIGNAL = signal.SIGUSR2
_AGAIN_S = 0.02
"""How long an exception may take to be raised, or be found lost, before the signal is repeated."""

_FIRST_S = 0.002
"""The same after the first signal, which may have found the main thread in a call that waits; three
times as long after each further one."""

_UNSEEN = 25
"""Signals in a row at which a living exception was not being handled, before it counts as lost.
(On its way through C++ it is not, and a destructor may run Python code then.)"""

_STAYS = 2
"""How often in a row a signal must find the main thread where the one before it did, with no
bytecode between, until it counts as waiting in a call. Once may be chance: threads take turns."""

_LOOKS = 500
"""Bytecodes at which the handler looks again by itself, for each signal of the sender's: a few
milliseconds of a long ``__enter__``."""


class Interrupted(BaseException):
    """The txn is being rolled back; unwinds its body. Not an ``Exception``: bodies catch those."""


class Interrupter:
    """For one main thread; made there. Everything but ``request`` and ``close`` belongs there.

    A body on another thread cannot be unwound, and is never open.
    """

    def __init__(self, number: signal.Signals = DEFAULT_SIGNAL) -> None:
        """Take the signal. Raises ``FftError`` off the main thread, where no handler could run."""
        if threading.current_thread() is not threading.main_thread():
            raise FftError("an Interrupter works on the main thread only")
        self._number = number
        self._main = threading.get_ident()
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._open = False
        self._atomic = 0
        self._cause: str | None = None
        """Of the request that is to unwind the open body; None: there is none."""
        self._raised: weakref.ref[Interrupted] | None = None
        self._closed = False
        self._unseen = 0
        self._in_flight = False
        """A signal was sent, and its handler has not run yet."""
        self._body: FrameType | None = None
        """Whose the open body is."""
        self._looks = 0
        """That the handler may still take by itself before the sender's next signal."""
        self._sent = False
        """The sender's signal has come, or comes, since the handler ran last."""
        self._seen: tuple[int, int] | None = None
        """Frame (its id) and bytecode at which the sender's last signal found the main thread, in a
        place that is short."""
        self._stays = 0
        """How often in a row it was found there, and not seen to run between."""
        self.repeated = 0
        """Exceptions that were lost on their way and raised again."""
        never_compiled(Interrupter._handle)
        self._previous = signal.signal(number, self._handle)
        self._sender = threading.Thread(target=self._send, name="fft-interrupt", daemon=True)
        self._sender.start()

    # --- any thread ---

    def request(self, cause: str) -> bool:
        """Unwind the body that is open now. Whether there was one. Returns at once."""
        with self._changed:
            if not self._open or self._cause is not None:
                return self._open
            self._cause = cause
            self._changed.notify_all()
            return True

    # --- the main thread ---

    @property
    def signal_name(self) -> str:
        """Name of the signal that unwinds a body."""
        return self._number.name

    @property
    def is_replaced(self) -> bool:
        """Whether another handler has taken the signal, so that nothing is unwound any more."""
        return not self._closed and signal.getsignal(self._number) != self._handle

    @guarded
    def enter(self) -> None:
        """A body begins."""
        with self._changed:
            self._cause, self._raised = None, None
            self._open = threading.get_ident() == self._main
            self._body, self._seen, self._stays = owner(sys._getframe()), None, 0

    @guarded
    def leave(self) -> bool:
        """The body has ended, however. Whether it was asked to unwind."""
        with self._changed:
            self._open = False
            asked, self._cause, self._raised = self._cause is not None, None, None
            self._body = None
            self._changed.notify_all()
        return asked

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A section that is not interrupted; a request waits for its end. May be nested."""
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
        """End the thread and give the signal back. Idempotent.

        Python lets only the main thread give it back: called on another, the handler stays until
        it is called there, and only passes on what comes.
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
        if os.getpid() != self._pid:  # a forked worker: no body is ever unwound there
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
        if self._on_its_way() and not self._seems_lost():
            return
        safety = look(frame, self._body)
        if safety is Safety.SAFE or (safety is Safety.SOON and self._waits(frame, sent)):
            self._raise(cause)
        if safety is Safety.SOON and self._may_look_again(sent):
            again = map(_thread.interrupt_main, (self._number,))
            self._in_flight = True
            # No call from here on: the interpreter looks for signals after each, thus inside this.
            [_] = again

    def _waits(self, frame: FrameType, sent: bool) -> bool:
        """Whether this is a call that waits: where the last look was, and no bytecode ran since."""
        if not sent:  # a look that the handler asked for: the interpreter has run since
            self._stays = 0
            return False
        before, self._seen = self._seen, (id(frame), frame.f_lasti)
        self._stays = self._stays + 1 if before == self._seen else 0
        return self._stays >= _STAYS

    def _may_look_again(self, sent: bool) -> bool:
        self._looks = _LOOKS if sent else self._looks - 1
        if self._looks <= 0:
            self._seen = None  # who is found here again may have been elsewhere
            self._stays = 0
        return self._looks > 0

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

    def _seems_lost(self) -> bool:
        """Somebody keeps the exception, and nobody has handled it for long."""
        assert self._raised is not None
        ours, error = self._raised(), sys.exc_info()[1]
        while error is not None and error is not ours:
            error = error.__context__
        self._unseen = 0 if error is not None else self._unseen + 1
        return self._unseen >= _UNSEEN

    # --- the sender's thread ---

    def _send(self) -> None:
        patience = _FIRST_S
        while True:
            with self._changed:
                if not self._due():
                    patience = _FIRST_S
                self._changed.wait_for(lambda: self._closed or self._due())
                if self._closed:
                    return
                # Under the lock: the body cannot end between the question and the signal.
                self._in_flight = self._sent = True
                signal.pthread_kill(self._main, self._number)
                self._changed.wait_for(lambda: self._closed or not self._due(), patience)
                patience = min(3 * patience, _AGAIN_S)
                if self._on_its_way():
                    self._changed.wait_for(self._is_over, _AGAIN_S)

    def _due(self) -> bool:
        return self._open and not self._atomic and self._cause is not None

    def _is_over(self) -> bool:
        return self._closed or not self._due() or not self._on_its_way()
