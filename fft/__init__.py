"""FFT (Fast Fault Tolerance): every PyTorch training step is a transaction.

``import fft`` stays light: torch is imported only when a name that needs it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fft.data import DataSource, Due
    from fft.loading import CursorLoader, StreamLoader
    from fft.manager import ManagerFFT, Transaction
    from fft.preemption import FileNotice, HttpNotice, Notice
    from fft.rollback.shard import ShardProcessGroupGloo

__version__ = "0.1.0"

_HOME = {
    "CursorLoader": "fft.loading",
    "DataSource": "fft.data",
    "Due": "fft.data",
    "FileNotice": "fft.preemption",
    "HttpNotice": "fft.preemption",
    "ManagerFFT": "fft.manager",
    "Notice": "fft.preemption",
    "ShardProcessGroupGloo": "fft.rollback.shard",
    "StreamLoader": "fft.loading",
    "Transaction": "fft.manager",
}

__all__ = [
    "CursorLoader",
    "DataSource",
    "Due",
    "FileNotice",
    "HttpNotice",
    "ManagerFFT",
    "Notice",
    "ShardProcessGroupGloo",
    "StreamLoader",
    "Transaction",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fft' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
