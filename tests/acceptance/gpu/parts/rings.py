"""Groups as FFT builds them for an epoch: of NCCL, and by its library alone where torchft is not
installed; of gloo, to test the tests themselves without a GPU. Each test accepts any of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fft.train.guard import accelerator
from fft.train.process_groups.nccl_library import TorchNccl, abort_within, connect_all

LIMIT = timedelta(seconds=30)


class Ring(Protocol):
    """One rank of a group that is rebuilt repeatedly."""

    def build(self, record: int) -> None:
        """Meet the other ranks for that epoch."""

    def reduce(self, tensor: torch.Tensor) -> Any:
        """Queue an all-reduce; return its Work."""

    def abort(self) -> None:
        """Abort all operations in progress."""

    def quiet(self) -> None:
        """After `abort`, wait until no operation can write any more."""

    def close(self) -> None:
        """Close the group permanently."""


class LibraryRing:
    """A group by `TorchNccl` and torch alone."""

    def __init__(self, port: int, rank: int, size: int) -> None:
        self._store = dist.TCPStore("localhost", port, wait_for_workers=False, timeout=LIMIT)
        self._rank, self._size = rank, size
        self._library = TorchNccl()
        self._made: Any = None

    def build(self, record: int) -> None:
        store = dist.PrefixStore(f"library/{record}", self._store)
        self._made = self._library.make(store, self._rank, self._size, LIMIT, f"trial-{record}")
        connect_all(self._library, self._made, store, self._rank, self._size)

    def reduce(self, tensor: torch.Tensor) -> Any:
        return self._made.allreduce([tensor], dist.AllreduceOptions())

    def abort(self) -> None:
        if not abort_within(self._made.abort, LIMIT.total_seconds(), "a trial's group"):
            raise TimeoutError(f"an abort is not over after {LIMIT.total_seconds():g} s")

    def quiet(self) -> None:
        accelerator.wait(LIMIT)
        self._made = None

    def close(self) -> None:
        self._made = None


class GroupRing:
    """A group by FFT's shard group, held as the manager holds it."""

    kind = "ShardProcessGroupNCCL"

    def __init__(self, port: int, rank: int, size: int) -> None:
        import fft
        from fft.train.process_groups import AbortableGroup

        self.pg = getattr(fft, self.kind)(LIMIT)
        self._group = AbortableGroup(self.pg, "shard")
        self._port, self._rank, self._size = port, rank, size

    def build(self, record: int) -> None:
        rank, size = self._rank, self._size
        address = f"localhost:{self._port}/fft/shard/{record}"
        self._group.configure(address, "0", rank, size, record, rank, size, None, timeout=LIMIT)

    def reduce(self, tensor: torch.Tensor) -> Any:
        return self.pg.allreduce([tensor], dist.AllreduceOptions())

    def abort(self) -> None:
        self._group.abort("planned")

    def quiet(self) -> None:
        self._group.quiesce(LIMIT)

    def close(self) -> None:
        self._group.close()


class GlooRing(GroupRing):
    """A group of gloo, on CPU."""

    kind = "ShardProcessGroupGloo"


RINGS: dict[str, dict[str, type[LibraryRing] | type[GroupRing]]] = {
    "cuda": {"the library alone": LibraryRing, GroupRing.kind: GroupRing},
    "cpu": {GlooRing.kind: GlooRing},
}
"""The classes by device and name."""
