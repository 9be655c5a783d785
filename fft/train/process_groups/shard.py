"""Process groups that a model is sharded over; they are rebuilt under the model, not replaced.

They extend torchft's groups by the operations that FSDP2, DTensor, pipelining or their users need
and that torchft does not forward. Between `mesh` and `unregister` they are in torch's registries of
process groups. A mesh of several dimensions (`mesh_over`) has one group for each dimension of each
rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    FakeProcessGroup,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store, Work, _update_default_pg, _world
from torchft.process_group import ProcessGroupGloo, ProcessGroupWrapper

from fft.errors import FftError
from fft.train.guard.torch_adapter import GroupName

_numbers = itertools.count(1)


class _NoStore(Store):
    """The store of the default group, with which torch would connect further groups."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise FftError(
            "torch.distributed was asked for another process group over ranks of this replica "
            "group, such as by new_group(), DeviceMesh._flatten() or fully_shard("
            "reshard_after_forward=<number>). FFT could not abort it: use the groups of "
            "manager.mesh(names, sizes), with a dimension for each group that you need"
        )

    set = get = add = wait = check = compare_set = _refuse


class ShardGroup(ProcessGroupWrapper):  # type: ignore[misc]
    """Base class of shard groups; a subclass creates the backend (``_create_pg``)."""

    backend: ClassVar[str]
    """torch's name for the backend."""
    device_type: ClassVar[str]
    """Device type of the mesh."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._group_name: str | None = None
        self._number = next(_numbers)
        self._shape: tuple[int, int] | None = None
        self.ranks: tuple[int, ...] | None = None
        """The members' ranks in the replica group; None if these are all of its ranks."""

    def line(self, ranks: Sequence[int]) -> Self:
        """Return a new group like this one, over some of its ranks; not configured yet."""
        made = self._anew()
        made.ranks = tuple(ranks)
        return made

    def _anew(self) -> Self:
        return type(self)(self._timeout)

    def rank(self) -> int:
        """Return the rank of the last configuration, or 0 before the first."""
        return self._rank or 0

    def check_shape(self, rank: int, world_size: int) -> None:
        """Raise ValueError if a mesh was created from this group with another rank or size."""
        if self._shape not in (None, (rank, world_size)):
            raise ValueError(
                f"the model is sharded as rank {self._shape[0]} of {self._shape[1]}; the group "
                f"cannot become rank {rank} of {world_size}: build a new model on a new group"
            )

    def use_fake_backend(self, rank: int, world_size: int) -> None:
        """Use a fake backend until `configure`, whose operations end at once without communication.

        A model can then be built before its weights are fetched; results of collectives are
        invalid.
        """
        alone: Any = FakeProcessGroup._create_internal(rank, world_size)
        self._pg, self._rank = alone, rank

    def mesh(self, name: str = "shard") -> DeviceMesh:
        """Return a one-dimensional mesh over this group, with a dimension called `name`.

        It needs no default process group. The mesh stays valid over later configurations of the
        same shape. From now on functional collectives find the group by its name, and functions of
        ``torch.distributed`` take its ranks as global ones.

        Raises:
            RuntimeError: The group has not been configured yet.
        """
        if self._rank is None or self._pg is None:
            raise RuntimeError("configure() the shard process group before mesh()")
        group_name = self.register(name)
        mesh = DeviceMesh(
            self.device_type,
            torch.arange(self.size(), dtype=torch.int, device="cpu"),
            mesh_dim_names=(name,),
            _init_backend=False,
            _rank=self._rank,
        )
        # DTensor caches results per mesh and reuses them for an equal mesh, so meshes over
        # different groups must differ. torch compares thread numbers, which are positive.
        mesh._thread_id = -self._number
        mesh._dim_group_names = [group_name]
        mesh._pg_registry[group_name] = self
        return mesh

    @property
    def is_registered(self) -> bool:
        """Whether the group is in torch's registries, which it is for a mesh."""
        return self._group_name is not None

    def register(self, name: str) -> GroupName:
        """Register the group as ``new_group`` does, and return its name. Idempotent.

        Otherwise torch finds no ranks, and if there is a default process group, it replaces every
        error of this group by a ValueError. The group keeps its present rank and size.
        """
        assert self._rank is not None, "configured before"
        self._shape = (self._rank, self.size())
        group_name = GroupName(self._group_name or f"fft-{name}-{self._number}")
        if self._group_name is None:
            self._set_group_name(group_name)
            _register_process_group(group_name, self)
            ranks = range(self.size()) if self.ranks is None else self.ranks
            _world.pg_group_ranks[self] = {rank: number for number, rank in enumerate(ranks)}
            _world.pg_map[self] = (self.backend, _NoStore())
            _world.pg_names[self] = group_name
            _world.pg_backend_config[self] = f"{self.device_type}:{self.backend}"
        return group_name

    def register_as_default(self) -> None:
        """Become torch's default process group if there is none; pipelining needs its ranks.

        Call it after `mesh` or `register`.
        """
        if not torch.distributed.is_initialized():
            _update_default_pg(self)

    def unregister(self) -> None:
        """Remove the group from torch's registries; its meshes become invalid."""
        if self._group_name is None:
            return
        if _world.default_pg is self:
            _update_default_pg(None)
        _unregister_process_group(GroupName(self._group_name))
        for registry in (
            _world.pg_group_ranks,
            _world.pg_map,
            _world.pg_names,
            _world.pg_backend_config,
        ):
            registry.pop(self, None)
        self._group_name = None
        self._shape = None

    # -- operations, by torch's older names and by the newer ones

    def _forward(self, name: str, *args: Any) -> Work:
        with self._run_context():
            work: Work = getattr(self.parent, name)(*args[:-1], self._opts_hook(args[-1]))
            wrapped: Work = self._wrap_work(work, args[-1])
            return wrapped

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        return self._forward("_allgather_base", output, input, opts or AllgatherOptions())

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        opts = opts or AllgatherOptions()
        return self._forward("allgather_into_tensor_coalesced", outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        return self._forward("allgather_coalesced", outputs, inputs, opts or AllgatherOptions())

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: ReduceScatterOptions | None = None
    ) -> Work:
        return self._forward("_reduce_scatter_base", output, input, opts or ReduceScatterOptions())

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        return self._forward("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        return self._forward("reduce_scatter", outputs, inputs, opts or ReduceScatterOptions())

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        opts = opts or AllToAllOptions()
        return self._forward("alltoall_base", output, input, output_splits, input_splits, opts)

    alltoall_base = all_to_all_single

    def alltoall(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        return self._forward("alltoall", outputs, inputs, opts or AllToAllOptions())

    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        opts: GatherOptions | None = None,
    ) -> Work:
        return self._forward("gather", outputs, inputs, opts or GatherOptions())

    def scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: ScatterOptions | None = None,
    ) -> Work:
        return self._forward("scatter", outputs, inputs, opts or ScatterOptions())

    def reduce(self, tensors: list[torch.Tensor], opts: ReduceOptions | None = None) -> Work:
        return self._forward("reduce", tensors, opts or ReduceOptions())

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        with self._run_context():
            work: Work = self._wrap_work(self.parent.recv_anysource(tensors, tag), None)
            return work

    def monitored_barrier(self, *_: Any, **__: Any) -> NoReturn:
        """Raise NotImplementedError, because nothing could free a thread that waits in it."""
        raise NotImplementedError("monitored_barrier() cannot be aborted: use barrier()")


class ShardProcessGroupGloo(ShardGroup, ProcessGroupGloo):  # type: ignore[misc]
    """The process group that FSDP2 shards over on CPU; it is rebuilt under the model.

    It is torchft's gloo group with all of gloo's operations except ``monitored_barrier``. Outside
    an `AbortableGroup` they behave as in gloo.
    """

    backend = "gloo"
    device_type = "cpu"


def mesh_over(groups: Sequence[ShardGroup], sizes: dict[str, int], rank: int) -> DeviceMesh:
    """Return a mesh of two or more dimensions.

    torch creates its slices with the rank in the default process group, which must be ``rank``.

    Args:
        groups: The group of this rank along each dimension.
        sizes: Name and size of each dimension.
        rank: Rank of this process in the replica group.
    """
    # imported here, because it imports torch's compiler
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    count = math.prod(sizes.values())
    ranks = torch.arange(count, dtype=torch.int, device="cpu").view(*sizes.values())
    mesh = DeviceMesh(
        groups[0].device_type, ranks, mesh_dim_names=tuple(sizes), _init_backend=False, _rank=rank
    )
    mesh._dim_group_names = [
        group.register(name) for name, group in zip(sizes, groups, strict=True)
    ]
    mesh._pg_registry.update(zip(mesh._dim_group_names, groups, strict=True))
    # torch's slices of equal meshes are equal, so DTensor could reuse the groups of an earlier one
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    return mesh
