"""FFT (Fast Fault Tolerance): every PyTorch training step is a transaction.

``import fft`` stays light: torch is imported only when a name that needs it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fft import errors as errors
from fft.errors import *  # noqa: F403 - its `__all__` has the public exceptions
from fft.util.terminal import make_records_printable
from fft.util.version import __version__ as __version__

if TYPE_CHECKING:
    from fft import abort as abort
    from fft import active as active
    from fft import health_checks as health_checks
    from fft.checkpoints.plan import Checkpointing
    from fft.messages.identities import Peer
    from fft.train.api.live_set import LiveSet, live_set
    from fft.train.api.manager import ManagerFFT, Transaction
    from fft.train.api.restartable import Call, restartable
    from fft.train.data.loaders import CursorLoader, StreamLoader
    from fft.train.data.source import DataSource, Due
    from fft.train.paradigms.periodic.algorithms import DiLoCo, LocalSGD
    from fft.train.paradigms.stages.input import StageInput
    from fft.train.paradigms.stages.output import StageOutput
    from fft.train.process_groups.nccl import ShardProcessGroupNCCL
    from fft.train.process_groups.shard import ShardProcessGroupGloo
    from fft.train.session.settings import ManagerConfig
    from fft.train.session.step_results import StepResult
    from fft.train.step.preemption import FileNotice, HttpNotice, Notice

_HOME = {
    "Checkpointing": "fft.checkpoints.plan",
    "Call": "fft.train.api.restartable",
    "CursorLoader": "fft.train.data.loaders",
    "DataSource": "fft.train.data.source",
    "DiLoCo": "fft.train.paradigms.periodic.algorithms",
    "Due": "fft.train.data.source",
    "FileNotice": "fft.train.step.preemption",
    "HttpNotice": "fft.train.step.preemption",
    "LiveSet": "fft.train.api.live_set",
    "LocalSGD": "fft.train.paradigms.periodic.algorithms",
    "ManagerConfig": "fft.train.session.settings",
    "ManagerFFT": "fft.train.api.manager",
    "Notice": "fft.train.step.preemption",
    "Peer": "fft.messages.identities",
    "ShardProcessGroupGloo": "fft.train.process_groups.shard",
    "ShardProcessGroupNCCL": "fft.train.process_groups.nccl",
    "StageInput": "fft.train.paradigms.stages.input",
    "StageOutput": "fft.train.paradigms.stages.output",
    "StepResult": "fft.train.session.step_results",
    "StreamLoader": "fft.train.data.loaders",
    "Transaction": "fft.train.api.manager",
    "live_set": "fft.train.api.live_set",
    "restartable": "fft.train.api.restartable",
}

make_records_printable()

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
