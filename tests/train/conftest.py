"""Fixtures of the tests of fft/train."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh

from fft.train.process_groups import ShardProcessGroupGloo


@pytest.fixture
def shard() -> Iterator[ShardProcessGroupGloo]:
    """A group whose collectives return at once."""
    group = ShardProcessGroupGloo()
    group.use_fake_backend(0, 2)
    yield group
    group.unregister()


@pytest.fixture
def mesh(shard: ShardProcessGroupGloo) -> DeviceMesh:
    """A mesh over such a group."""
    return shard.mesh()
