"""Process groups whose collectives can be aborted and whose members can be replaced.

`AbortableGroup` and `ShardProcessGroupGloo` are the interface; the other modules support them.
"""

from __future__ import annotations

from fft.train.process_groups.abortable import AbortableGroup
from fft.train.process_groups.op_errors import CollectiveFailed, GroupAborted
from fft.train.process_groups.shard import ShardProcessGroupGloo

__all__ = [
    "AbortableGroup",
    "CollectiveFailed",
    "GroupAborted",
    "ShardProcessGroupGloo",
]
