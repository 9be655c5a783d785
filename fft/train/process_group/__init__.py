"""Process groups whose collectives can be aborted and whose members can be replaced.

`AbortableGroup` and `ShardProcessGroupGloo` are the interface; the other modules support them.
"""

from __future__ import annotations

from fft.errors import StateMismatch
from fft.train.process_group.abortable import AbortableGroup
from fft.train.process_group.op_names import CollectiveFailed, GroupAborted
from fft.train.process_group.shard import ShardProcessGroupGloo
from fft.train.state.step_state import StepState

__all__ = [
    "AbortableGroup",
    "CollectiveFailed",
    "GroupAborted",
    "ShardProcessGroupGloo",
    "StateMismatch",
    "StepState",
]
