"""Support torch.compile: a process that compiles does not hang, and FFT itself is not compiled.

Dynamo calls back when a compilation begins and ends (also of the backward, and recompilations).
Meanwhile the main thread is in a critical section for the monitor, because it may wait for a C++
compiler for longer than many steps take. This module imports neither torch nor Dynamo, which take
seconds to load: it checks whether they are loaded.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def never_compiled(function: Callable[..., Any]) -> None:
    """Make Dynamo run ``function``, and the functions that it calls, uncompiled.

    Dynamo compiles every function that is called while a compiled one runs. That includes the
    handler of a signal that arrives then, which it would compile in the middle of a step.
    """
    if (dynamo := sys.modules.get("torch._C._dynamo.eval_frame")) is not None:
        as_it_is = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
        dynamo.set_code_exec_strategy(function.__code__, as_it_is)


class Compilations:
    """Keep the main thread in ``section`` while it compiles. Constructed on the main thread."""

    def __init__(self, section: AbstractContextManager[None]) -> None:
        self._section = section
        self._main = threading.get_ident()
        self._inside = False

    def attach(self) -> None:
        """Register the callbacks if Dynamo is loaded. Cheap, so that it can be called often.

        Repeated calls are necessary because ``torch._dynamo.reset()`` removes all callbacks.
        """
        handler = self._handler()
        if handler is not None and self._begun not in handler.start_callbacks:
            handler.register_start_callback(self._begun)
            handler.register_end_callback(self._ended)

    def detach(self) -> None:
        """Remove the callbacks. Idempotent."""
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
