"""What FFT has to do with torch.compile: whoever compiles does not hang, and FFT is not compiled.

Dynamo says when it begins and ends to compile (the backward, too, and recompilations). While it
does, the main thread is in a critical section for the monitor: it may wait for a C++ compiler for
longer than many steps take. Imports neither torch nor Dynamo, whose loading takes seconds: it looks
whether they are loaded.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def never_compiled(function: Callable[..., Any]) -> None:
    """Dynamo shall run ``function``, and what it calls, as it is.

    Dynamo takes every function that is called while a compiled one runs, so also the handler of a
    signal that comes then: it would compile it, in the middle of somebody's step.
    """
    if (dynamo := sys.modules.get("torch._C._dynamo.eval_frame")) is not None:
        as_it_is = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
        dynamo.set_code_exec_strategy(function.__code__, as_it_is)


class Compilations:
    """The main thread is in ``section`` while it compiles. Made there."""

    def __init__(self, section: AbstractContextManager[None]) -> None:
        self._section = section
        self._main = threading.get_ident()
        self._inside = False

    def attach(self) -> None:
        """Listen from now on, if there is somebody to listen to. Cheap; to be called often.

        (``torch._dynamo.reset()`` sends all listeners away.)
        """
        handler = self._handler()
        if handler is not None and self._begun not in handler.start_callbacks:
            handler.register_start_callback(self._begun)
            handler.register_end_callback(self._ended)

    def detach(self) -> None:
        """Listen no more. Idempotent."""
        handler = self._handler()
        if handler is not None and self._begun in handler.start_callbacks:
            handler.remove_start_callback(self._begun)
            handler.remove_end_callback(self._ended)
        self._ended()

    def _handler(self) -> Any:
        module = sys.modules.get("torch._dynamo.callback")
        return getattr(module, "callback_handler", None)  # None while it is being imported

    def _begun(self, _: object = None) -> None:
        if threading.get_ident() == self._main and not self._inside:
            self._inside = True
            self._section.__enter__()

    def _ended(self, _: object = None) -> None:
        if self._inside:
            self._inside = False
            self._section.__exit__(None, None, None)
