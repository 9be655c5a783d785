"""Facts about the running backward that the reducer needs. Reads torch's internals."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch


def hooks_of(parameter: torch.Tensor) -> dict[int, Any]:
    """Return the hooks on accumulated gradients, in the order in which they are called."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def is_nested() -> bool:
    """Whether the running backward is inside another one: a checkpoint with use_reentrant=True.

    A thread of the autograd engine has a call of the engine on its stack only in that case; a
    Python thread always has one, and one more in that case.
    """
    calls, frame = 0, sys._getframe()
    while frame is not None:
        calls += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back  # type: ignore[assignment]
    return calls > (1 if is_pythons_thread() else 0)


def is_pythons_thread() -> bool:
    """Whether this thread was started by Python, not by the autograd engine."""
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return thread is not None and not isinstance(thread, threading._DummyThread)
