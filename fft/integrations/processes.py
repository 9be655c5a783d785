"""Numbers of processes of a job, and their process groups, for the integrations."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torchft

import fft


def groups() -> int:
    """Return the number of replica groups at the start of the job."""
    return int(os.environ.get("NUM_REPLICA_GROUPS", "1"))


def ranks() -> int:
    """Return the number of ranks in a replica group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_group(is_nccl: bool, limit: timedelta) -> torchft.ProcessGroup:
    """Return torchft's process group for the replica groups."""
    return (torchft.ProcessGroupNCCL if is_nccl else torchft.ProcessGroupGloo)(limit)


def shard_process_group(is_nccl: bool, limit: timedelta) -> Any:
    """Return FFT's process group for the ranks of one replica group."""
    return (fft.ShardProcessGroupNCCL if is_nccl else fft.ShardProcessGroupGloo)(limit)
