"""What a rollback does to torch: abort process groups, and put a step's state back.

`process_group`, `shard` and `state` are the parts others use; the rest serves the first.
"""

from __future__ import annotations

from fft.train.process_group.abortable import AbortableGroup
from fft.train.process_group.op_names import CollectiveFailed, GroupAborted
from fft.train.process_group.shard import ShardProcessGroupGloo
from fft.train.state.step_state import StateMismatch, StepState

__all__ = [
    "AbortableGroup",
    "CollectiveFailed",
    "GroupAborted",
    "ShardProcessGroupGloo",
    "StateMismatch",
    "StepState",
]
