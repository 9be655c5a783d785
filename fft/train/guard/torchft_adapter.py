"""Access to the private attributes of torchft's ``Manager``, which no other file names.

This file also holds the differences between releases of torchft.

``ManagerFFT`` is a subclass of torchft's manager, so both keep the same step counter, error and
groups. torchft offers no public access to most of them. When a release of torchft renames one,
`TorchftAdapter` refuses to start and lists the missing names.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torchft.process_group
from torch._C._distributed_c10d import Store
from torchft.checkpointing import CheckpointTransport
from torchft.manager import Manager, WorldSizeMode
from torchft.process_group import ProcessGroup

from fft.errors import FftError
from fft.util.versions import found

T = TypeVar("T")


class _Attribute(Generic[T]):
    """An attribute of torchft's manager under its name without the underscore."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.private = f"_{name}"

    def __get__(self, adapter: TorchftAdapter, owner: type) -> T:
        value: T = getattr(adapter.of, self.private)
        return value

    def __set__(self, adapter: TorchftAdapter, value: T) -> None:
        setattr(adapter.of, self.private, value)


class TorchftAdapter:
    """torchft's side of a manager, readable and writable.

    Args:
        manager: A manager whose torchft constructor has run.

    Raises:
        FftError: The installed torchft lacks attributes that FFT needs.
    """

    # Identity and membership
    group_rank = _Attribute[int]()
    """Rank within the replica group."""
    group_world_size = _Attribute[int]()
    quorum_id = _Attribute[int]()
    """torchft's quorum id. FFT sets it to the number of its epoch."""
    participating_replica_rank = _Attribute[int | None]()
    """Index of this group among those whose gradients count; None for a spare."""
    participating_replica_world_size = _Attribute[int]()
    min_replica_size = _Attribute[int]()
    replica_world_size_mode = _Attribute[WorldSizeMode]()

    # The step
    step = _Attribute[int]()
    """Number of committed steps."""
    batches_committed = _Attribute[int]()
    commit_failures = _Attribute[int]()
    max_retries = _Attribute[int | None]()
    init_sync = _Attribute[bool]()
    quorum_future = _Attribute[Future[Any] | None]()

    # User callbacks, transports and process groups
    user_state_dicts = _Attribute[dict[str, Callable[[], Any]]]()
    load_state_dict_fns = _Attribute[dict[str, Callable[[Any], None]]]()
    checkpoint_transport = _Attribute[CheckpointTransport[Any]]()
    pg = _Attribute[ProcessGroup]()
    store = _Attribute[Store]()
    """The store of the replica group."""
    manager = _Attribute[Any]()
    """The server that sends heartbeats to the lighthouse; None except on rank 0."""
    executor = _Attribute[ThreadPoolExecutor]()
    logger = _Attribute[Any]()

    # Limits
    timeout = _Attribute[timedelta]()
    quorum_timeout = _Attribute[timedelta]()
    connect_timeout = _Attribute[timedelta]()

    def __init__(self, manager: Manager) -> None:
        self.of = manager
        missing = [
            attribute.private
            for attribute in vars(type(self)).values()
            if isinstance(attribute, _Attribute) and not hasattr(manager, attribute.private)
        ]
        if missing:
            raise FftError(
                f"torchft {found('torchft')} has no {', '.join(missing)} on its Manager, which "
                "this release of FFT needs: install torchft 0.2"
            )


def configuration_of(pg: Any) -> Callable[..., None]:
    """Return a function with the signature of ``configure`` that connects a process group.

    Groups of torchft 0.2 have ``configure``. Those of later releases have ``reconfigure`` instead,
    in which the order of handles defines the ranks; torchft exchanges the handles at the store.

    Raises:
        FftError: ``pg`` is not a process group of torchft.
    """
    if not isinstance(pg, ProcessGroup):
        raise FftError(
            f"expected a process group of torchft, got {pg!r}: FFT cannot free a rank that waits "
            "in a group of torch, even with enable_reconfigure=True. Leave pg out, or pass "
            "torchft.process_group.ProcessGroupGloo()"
        )
    if hasattr(pg, "configure"):
        configure: Callable[..., None] = pg.configure
        return configure

    def reconfigure(store_addr: str, _: str, rank: int, world_size: int, *__: Any) -> None:
        torchft.process_group.reconfigure_with_store(pg, store_addr, rank, world_size)

    return reconfigure
