"""FFT (Fast Fault Tolerance): every PyTorch training step is a transaction.

``import fft`` stays light: torch is imported only when a name that needs it is first used.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fft.util.terminal import make_records_printable
from fft.util.version import __version__ as __version__

if TYPE_CHECKING:  # the public names; `_HOMES` is read from these lines
    from fft import abort as abort
    from fft import active as active
    from fft import errors as errors
    from fft import health_checks as health_checks
    from fft.checkpoints.plan import Checkpointing as Checkpointing
    from fft.errors import FftError as FftError
    from fft.errors import LiveBlockFailed as LiveBlockFailed
    from fft.train.api.live_set import live_set as live_set
    from fft.train.api.manager import ManagerFFT as ManagerFFT
    from fft.train.api.manager import Transaction as Transaction
    from fft.train.api.restartable import restartable as restartable
    from fft.train.data.loaders import CursorLoader as CursorLoader
    from fft.train.data.loaders import StreamLoader as StreamLoader
    from fft.train.data.source import DataSource as DataSource
    from fft.train.data.source import Loader as Loader
    from fft.train.paradigms.periodic.algorithms import DiLoCo as DiLoCo
    from fft.train.paradigms.periodic.algorithms import LocalSGD as LocalSGD
    from fft.train.paradigms.stages.input import StageInput as StageInput
    from fft.train.paradigms.stages.output import StageOutput as StageOutput
    from fft.train.process_groups.nccl import ShardProcessGroupNCCL as ShardProcessGroupNCCL
    from fft.train.process_groups.shard import ShardProcessGroupGloo as ShardProcessGroupGloo
    from fft.train.session.settings import ManagerConfig as ManagerConfig
    from fft.train.step.preemption import FileNotice as FileNotice
    from fft.train.step.preemption import HttpNotice as HttpNotice
    from fft.train.step.preemption import Notice as Notice

_HOMES = {
    alias.asname: node.module or ""
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if alias.asname and alias.asname != "__version__"
}
"""The module of each public name, which is imported when the name is first used."""
__all__ = sorted(_HOMES)

make_records_printable()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fft' has no attribute {name!r}")
    if (home := _HOMES[name]) == __name__:
        return importlib.import_module(f"fft.{name}")
    try:
        return getattr(importlib.import_module(home), name)
    except ImportError as error:
        from fft.util.versions import explain  # rarely needed

        explain(error)
        raise
