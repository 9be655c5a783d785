"""What a rollback does to torch: abort process groups, and put a step's state back.

`process_group` and `state` are the parts others use; `rendezvous` and `sockets` serve the first.
"""

from __future__ import annotations

from fft.rollback.process_group import AbortableGroup, GroupAborted, ShardProcessGroupGloo
from fft.rollback.state import StateMismatch, StepState

__all__ = [
    "AbortableGroup",
    "GroupAborted",
    "ShardProcessGroupGloo",
    "StateMismatch",
    "StepState",
]
