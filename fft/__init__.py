"""FFT (Fast Fault Tolerance): every PyTorch training step is a transaction.

``import fft`` stays light: torch is imported only when a name that needs it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fft import errors as errors
from fft.errors import *  # noqa: F403 - its `__all__` has the public exceptions
from fft.util.version import __version__ as __version__

if TYPE_CHECKING:
    from fft import abort as abort
    from fft import active as active
    from fft import health_checks as health_checks
    from fft.messages.identities import Peer
    from fft.train.checkpoint.plan import Checkpointing
    from fft.train.data.loaders import CursorLoader, StreamLoader
    from fft.train.data.source import DataSource, Due
    from fft.train.live_set import LiveSet, live_set
    from fft.train.manager import ManagerFFT, Transaction
    from fft.train.paradigms.periodic.algorithms import DiLoCo, LocalSGD
    from fft.train.paradigms.stages.input import StageInput
    from fft.train.paradigms.stages.output import StageOutput
    from fft.train.preemption import FileNotice, HttpNotice, Notice
    from fft.train.process_group.nccl import ShardProcessGroupNCCL
    from fft.train.process_group.shard import ShardProcessGroupGloo
    from fft.train.restartable import Call, restartable
    from fft.train.settings import ManagerConfig
    from fft.train.step_results import StepResult

_HOME = {
    "Checkpointing": "fft.train.checkpoint.plan",
    "Call": "fft.train.restartable",
    "CursorLoader": "fft.train.data.loaders",
    "DataSource": "fft.train.data.source",
    "DiLoCo": "fft.train.paradigms.periodic.algorithms",
    "Due": "fft.train.data.source",
    "FileNotice": "fft.train.preemption",
    "HttpNotice": "fft.train.preemption",
    "LiveSet": "fft.train.live_set",
    "LocalSGD": "fft.train.paradigms.periodic.algorithms",
    "ManagerConfig": "fft.train.settings",
    "ManagerFFT": "fft.train.manager",
    "Notice": "fft.train.preemption",
    "Peer": "fft.messages.identities",
    "ShardProcessGroupGloo": "fft.train.process_group.shard",
    "ShardProcessGroupNCCL": "fft.train.process_group.nccl",
    "StageInput": "fft.train.paradigms.stages.input",
    "StageOutput": "fft.train.paradigms.stages.output",
    "StepResult": "fft.train.step_results",
    "StreamLoader": "fft.train.data.loaders",
    "Transaction": "fft.train.manager",
    "live_set": "fft.train.live_set",
    "restartable": "fft.train.restartable",
}

_MODULES = ("abort", "active", "health_checks")

__all__ = [
    *errors.__all__,
    "Checkpointing",
    "Call",
    "CursorLoader",
    "DataSource",
    "DiLoCo",
    "Due",
    "FileNotice",
    "HttpNotice",
    "LiveSet",
    "LocalSGD",
    "ManagerConfig",
    "ManagerFFT",
    "Notice",
    "Peer",
    "ShardProcessGroupGloo",
    "ShardProcessGroupNCCL",
    "StageInput",
    "StageOutput",
    "StepResult",
    "StreamLoader",
    "Transaction",
    "abort",
    "active",
    "errors",
    "health_checks",
    "live_set",
    "restartable",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"fft.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fft' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
