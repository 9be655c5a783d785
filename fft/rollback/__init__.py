"""What a rollback does to torch: abort process groups, and put a step's state back.

`process_group`, `shard` and `state` are the parts others use; the rest serves the first.
"""

from __future__ import annotations

from fft.rollback.places import CollectiveFailed, GroupAborted
from fft.rollback.process_group import AbortableGroup
from fft.rollback.shard import ShardProcessGroupGloo
from fft.rollback.state import StateMismatch, StepState

__all__ = [
    "AbortableGroup",
    "CollectiveFailed",
    "GroupAborted",
    "ShardProcessGroupGloo",
    "StateMismatch",
    "StepState",
]
