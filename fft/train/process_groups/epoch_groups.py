"""The process groups of an epoch: across the replica groups, and inside of this one.

`abort`, `run_deferred_abort` and `pending` are thread-safe; all other methods run on the main
thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import AllreduceOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _update_default_pg, _world
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torchft.manager import Manager
from torchft.process_group import ProcessGroup

from fft.errors import FftError, GradientLayoutMismatch, GroupNotReformable
from fft.messages.effects import Heal
from fft.messages.protocol import Peer, Record
from fft.train.guard.torch_adapter import fsdp_groups, fsdp_state
from fft.train.process_groups import AbortableGroup, GroupAborted
from fft.train.process_groups.mesh_layout import MeshLayout
from fft.train.process_groups.shard import ShardGroup, mesh_over

_DIGESTS = "\x1f"
"""Separates the gradient layout of a member from its digests, in the note that it exchanges."""


class EpochGroups:
    """The process groups of the current epoch, rebuilt for each epoch, aborted by each rollback."""

    def __init__(
        self,
        manager: Manager,
        peer: Peer,
        home: str,
        pg: ProcessGroup,
        shard: ProcessGroup | None,
        is_replacement: bool,
        address: str,
    ) -> None:
        """Create the groups without connecting them.

        Args:
            manager: Manager of this rank.
            peer: This participant.
            home: Address of the store where this replica group meets now.
            pg: Process group across the replica groups.
            shard: Process group over which the model is sharded, or None.
            is_replacement: Whether this process replaces a lost rank. The other ranks of its group
                are in the job, and can be connected only in the first epoch of this process.
            address: Address of this host for gloo's connections.
        """
        self._manager = manager
        self._peer = peer
        self.home = home
        """Address of the store where this group meets; that of the newest epoch."""
        first = os.environ.get("FFT_GROUP_STORE", "")
        self.spans_hosts = bool(first)
        """The ranks of this group run on several hosts."""
        self.store = first or home
        """Address of the store where this group met first, which identifies the group."""
        self._is_replacement = is_replacement
        self._has_stages = False
        self._incarnations: dict[int, int] = {}
        """Incarnation of each rank of this replica group in the last epoch."""
        self.replicate = AbortableGroup(pg, "replicate")
        self.shard = _Shard(shard, self, "shard") if shard is not None else None
        self._lines: list[AbortableGroup] = []
        """The groups of this rank along the dimensions of the mesh, each over some of the ranks."""
        self.layout: MeshLayout | None = None
        """The layout of the mesh that the script has requested."""
        self._mesh: DeviceMesh | None = None
        self._is_default = False
        """Whether the shard group is torch's default process group because of the mesh."""
        for group in self:
            group.address = address
        self.shard_aborted = False
        """The shard group was aborted since it was built."""
        self.shard_has_own_scope = False
        """The shard group is rebuilt for epochs of the group's own scope, not of the job."""
        self._deferred_abort: str | None = None
        """The cause of a deferred abort of the shard group, or None."""

    def __iter__(self) -> Iterator[AbortableGroup]:
        yield self.replicate
        yield from self.inner

    @property
    def inner(self) -> Iterator[AbortableGroup]:
        """The groups inside of this replica group."""
        if self.shard is not None:
            yield self.shard
        yield from self._lines

    def pending(self) -> int:
        """Number of pending collectives of this rank."""
        return sum(group.pending() for group in self)

    def abort(self, cause: str, may_defer: Callable[[], bool] = lambda: False) -> None:
        """Abort the groups, which releases threads blocked in a collective. Thread-safe.

        If ``may_defer()``, the shard group is aborted only in `run_deferred_abort` or `unwind`.
        """
        self.replicate.abort(cause)
        # set before the question: the main thread looks at it after it has changed the answer
        self._deferred_abort = cause
        if self.shard_has_own_scope or not may_defer():
            self.run_deferred_abort()

    def run_deferred_abort(self) -> None:
        """Abort the shard group, if that was deferred. Thread-safe."""
        if (cause := self._deferred_abort) is not None:
            self._deferred_abort = None
            self.abort_shard(cause)

    def abort_shard(self, cause: str) -> None:
        """Abort the groups inside of this replica group, which releases threads blocked in their
        collectives. Thread-safe."""
        self.shard_aborted = True
        for group in self.inner:
            group.abort(cause)

    def unwind(self, cause: str, waiting: AbstractContextManager[None], limit: timedelta) -> None:
        """Abort the groups, and wait, within ``waiting``, until no old operation can write."""
        self.shard_aborted, self._deferred_abort = True, None
        for group in self:
            group.abort(cause)
            with waiting:
                group.quiesce(limit)

    def unwind_shard(self, cause: str, waiting: AbstractContextManager[None]) -> None:
        """Abort the shard group, and wait until no old operation can write."""
        self.abort_shard(cause)
        for group in self.inner:
            with waiting:
                group.quiesce(self._manager._torchft.timeout)

    def cut(self) -> None:
        """End the connections, as a network would."""
        for group in self:
            group.cut()

    def close(self) -> None:
        """End the groups. Idempotent."""
        for group in self:
            group.close()
        for line in self._lines:
            line.pg.unregister()
        if self._is_default and _world.default_pg is self.stages:
            _update_default_pg(None)
        self._is_default = False

    def shard_mesh(self) -> DeviceMesh:
        """Device mesh of one dimension over the ranks of this replica group."""
        return self._ready("shard_mesh").mesh()

    def mesh(self, layout: MeshLayout) -> DeviceMesh:
        """Device mesh over the ranks of this replica group.

        Raises:
            FftError: There is another mesh already, or the groups of this one cannot be made.
        """
        if self.layout not in (None, layout):
            raise FftError(
                f"manager.mesh(): expected the mesh of the first call, {self.layout}, got "
                f"{layout}; FFT makes one mesh. Use its slices, or manager.shard_mesh(), which has "
                "one dimension"
            )
        if self._mesh is None:
            root = self._ready("mesh")
            if len(layout.sizes) == 1:
                self._mesh = root.mesh(*layout.sizes)
            else:
                self._mesh = self._make_mesh(layout, root)
            self.layout = layout
        return self._mesh

    def _make_mesh(self, layout: MeshLayout, root: ShardGroup) -> DeviceMesh:
        """Make a group along each dimension, and the mesh over them."""
        is_other = torch.distributed.is_initialized() and _world.default_pg is not root
        if is_other and torch.distributed.get_rank() != layout.rank:
            raise FftError(
                f"manager.mesh(): torch slices a mesh by the rank in its default process group, "
                f"which is {torch.distributed.get_rank()}, but this is rank {layout.rank} of its "
                "replica group: do not call torch.distributed.init_process_group()"
            )
        assert self.shard is not None, "it is ready"
        groups = []
        for name, size in layout.sizes.items():
            if size == root.size():
                groups.append(root)
                continue
            ranks = layout.line(name)
            group = root.line(ranks)
            line = _Shard(group, self, name)
            line.address, line.waiting = self.shard.address, self.shard.waiting
            if self._is_replacement:
                group.use_fake_backend(ranks.index(layout.rank), size)
            else:
                self._configure_inner(line, self._boot_name, 0)
            self._lines.append(line)
            groups.append(group)
        root.register("shard")
        root.register_as_default()
        self._is_default = _world.default_pg is root
        return mesh_over(groups, layout.sizes, layout.rank)

    @property
    def mesh_text(self) -> str:
        """The layout of the mesh as text; empty if it has one dimension of different batches."""
        layout = self.layout
        is_plain = layout is None or (len(layout.sizes) == 1 and not layout.same_batch)
        return "" if is_plain else str(layout)

    @property
    def ranks_with_replicas(self) -> int:
        """Number of ranks of this replica group that hold equal plain tensors.

        A model on a mesh has them on all ranks; stages of a pipeline have different ones.
        """
        group = self.stages
        if isinstance(group, ShardGroup) and group.is_registered and not self._has_stages:
            return int(group.size())
        return 1

    def average_in_group(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its mean over the ranks of this group, if FFT connects them."""
        if self.has_shard_group:
            self.sum_in_group(tensor)
            tensor /= self._manager._torchft.group_world_size

    def sum_in_group(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by its sum over the ranks of this group; `has_shard_group` is true."""
        assert self.shard is not None, "has_shard_group is true"
        self.shard.pg.allreduce([tensor], AllreduceOptions()).wait()

    def stage_group(self) -> ProcessGroup:
        """The process group over the ranks of this replica group, known to torch."""
        shard = self._ready("stage_group")
        self._has_stages = True
        shard.register("shard")
        shard.register_as_default()
        return shard

    @property
    def stages(self) -> ProcessGroup | None:
        """The process group over the ranks of this replica group, or None."""
        return None if self.shard is None else self.shard.pg

    def refuse_unconnected(self) -> None:
        """Raise FftError if the ranks of this replica group have nothing to shard a model over."""
        ranks = self._manager._torchft.group_world_size
        if ranks > 1 and self.shard is None and not _world.pg_map:
            raise FftError(
                f"this replica group has {ranks} ranks but no process group between them, so each "
                "would train its own model: pass shard_pg=fft.ShardProcessGroupGloo() (of NCCL "
                "on GPUs) and shard the model over manager.shard_mesh(); or start it with "
                "--ranks 1, and more groups"
            )

    def refuse_foreign(self, models: Sequence[nn.Module], others: Iterable[torch.Tensor]) -> None:
        """Raise FftError if the models, or DTensors among ``others``, use a foreign process group.

        FFT cannot abort collectives of a group that it did not create, so after a fault on one rank
        the other ranks would wait until that group's timeout.
        """
        own = [group.pg for group in self.inner]
        for place, group in _groups_used(models, others):
            if group.size() > 1 and not any(group is each for each in own):
                raise FftError(
                    f"{place} communicates over the process group {group.group_name!r} of "
                    f"{group.size()} ranks, which FFT cannot abort: after a fault on one rank the "
                    "others would wait in it until its own timeout; pass "
                    "shard_pg=fft.ShardProcessGroupGloo() (of NCCL on GPUs) to ManagerFFT, and "
                    "build the model on manager.shard_mesh(), or on manager.mesh(names, sizes) for "
                    "several dimensions"
                )

    @property
    def has_shard_group(self) -> bool:
        """Whether the ranks of this replica group can exchange messages over their shard group."""
        return self.shard is not None and isinstance(self.shard.pg, ShardGroup)

    @property
    def can_reform(self) -> bool:
        """Whether other ranks of this replica group may be replaced while this process lives.

        FFT's groups must be their only process groups, and they must not rely on one-time
        exchanges: the stages of a pipeline send each other their shapes in their first step.
        """
        own = [group.pg for group in self.inner]
        others = any(not any(pg is each for each in own) for pg in _world.pg_map)
        return self.has_shard_group and not (others or self._has_stages)

    def _ready(self, asked: str) -> ShardGroup:
        if self.shard is None or not isinstance(self.shard.pg, ShardGroup):
            raise FftError(
                f"{asked}() needs shard_pg=fft.ShardProcessGroupGloo(...), or of NCCL on GPUs"
            )
        if self.shard.pg._pg is None and self._is_replacement:
            torchft = self._manager._torchft
            self.shard.pg.use_fake_backend(torchft.group_rank, torchft.group_world_size)
        elif self.shard.pg._pg is None:
            self._configure_inner(self.shard, self._boot_name, 0)
        return self.shard.pg

    @property
    def _boot_name(self) -> str:
        """Name of the rendezvous before the first epoch."""
        # the incarnation of a replaced rank differs from that of its peers
        return f"boot/{os.environ.get('FFT_START') or self._peer.inc}"

    def configure(self, command: Heal, models: str, digests: Mapping[str, str] | None) -> None:
        """Build the replicate group and the shard group for the epoch of ``command``.

        Args:
            models: description of the gradients that this rank reduces.
            digests: digests by name of state that the members compare, or None if this one does
                not.

        Raises:
            GradientLayoutMismatch: Groups reduce different gradients, and this rank does not have
                the job's state, or all ranks have it.
            GroupNotReformable: A rank of this group was replaced, but the group uses a process
                group that the new process cannot join.
        """
        self._refuse_replaced_ranks(command)
        manager, record = self._manager, command.record
        rank, world, members = (
            manager._torchft.group_rank,
            manager._torchft.group_world_size,
            command.record.members,
        )
        manager._torchft.quorum_id = record.epoch
        self.home = members[command.index].meets_at
        # Both rendezvous at once; torchft's quorum thread has nothing else to do here.
        inner = None
        if self.shard is not None and not self.shard_has_own_scope:
            self.shard_aborted = False
            name = f"{record.n}"
            inner = manager._torchft.executor.submit(self._configure_all, name, record.epoch)
        self.replicate.note = models
        if digests is not None:
            self.replicate.note += _DIGESTS + json.dumps(digests)
        self.replicate.configure(
            f"{members[0].meets_at}/fft/{record.n}.{record.epoch}/{rank}",
            self._peer.group,
            command.index,
            len(members),
            record.epoch,
            rank,
            world,
            [i * world + rank for i in range(len(members))],
            timeout=manager._torchft.quorum_timeout,
        )
        if inner is not None:
            inner.result()
        self._check_layouts(command)

    def build_shard(
        self, record: Record, note: str, is_superseded: Callable[[], bool]
    ) -> dict[int, str]:
        """Build the group inside of this replica group for ``record``, of the group's own scope.

        Returns the notes of the other ranks, by rank.

        Raises:
            GroupAborted: ``is_superseded`` is true; the caller that makes it true aborts the group.
        """
        assert self.shard is not None, "asked before"
        self.shard_aborted = False
        if is_superseded():
            self.shard_aborted = True
            raise GroupAborted("another scope has rolled back")
        self.shard.note = note
        self._configure_all(f"{record.n}", record.epoch)
        return self.shard.notes

    def _refuse_replaced_ranks(self, command: Heal) -> None:
        """Raise GroupNotReformable if a rank of this group was replaced but cannot join it.

        The launcher checks this before it starts a replacement, but the script may have created a
        process group since.
        """
        ranks = command.record.members[command.index].ranks
        incarnations = {entry.rank: entry.inc for entry in ranks}
        new = [r for r, inc in incarnations.items() if self._incarnations.get(r, inc) != inc]
        if new and not self.can_reform:
            raise GroupNotReformable(
                f"rank {new[0]} of group {self._peer.group} is a new process, and this group also "
                "uses a process group of torch's own, which that process cannot join, so the "
                "group must be restarted. Use only manager.shard_mesh(), or fft run --no-reform"
            )
        self._incarnations = incarnations

    def _check_layouts(self, command: Heal) -> None:
        """Raise if the groups reduce different gradients, because gloo would crash the process.

        A rank that has the job's state continues without the groups that differ.
        """
        mine, record = self.replicate.note.partition(_DIGESTS)[0], command.record
        notes = {r: note.partition(_DIGESTS)[0] for r, note in self.replicate.notes.items()}
        different = {r: note for r, note in notes.items() if note != mine}
        if not different:
            return
        held = [entry.entry(self._manager._torchft.group_rank).current for entry in record.members]
        index, note = next(iter(different.items()))
        text = (
            f"group {self._peer.group} reduces {mine or 'nothing by sync_gradients'}, but group "
            f"{record.members[index].group} {note or 'nothing by sync_gradients'}: all groups "
            "must have the same model with the same frozen parameters, and average it by the "
            "same calls of sync_gradients()"
        )
        is_right = held[command.index] and not all(held)
        raise RuntimeError(text) if is_right else GradientLayoutMismatch(text)

    def differing_digests(self, command: Heal) -> dict[str, str] | None:
        """Return the names of digests that differ from another group's, each with that group.

        Compares the digests that the members passed to `configure`. None if this member, or all
        others, passed none.
        """
        own = self.replicate.note.partition(_DIGESTS)[2]
        theirs = {i: n.partition(_DIGESTS)[2] for i, n in sorted(self.replicate.notes.items())}
        theirs.pop(command.index, None)
        if not own or not any(theirs.values()):
            return None
        found: dict[str, str] = {}
        mine: dict[str, str] = json.loads(own)
        for index, text in theirs.items():
            its = json.loads(text) if text else mine
            for name in mine.keys() | its.keys():
                if mine.get(name) != its.get(name):
                    found.setdefault(name, command.record.members[index].group)
        return found

    def _configure_all(self, name: str, epoch: int) -> None:
        """Build the groups inside of this replica group. ``name`` was never used before."""
        for group in self.inner:
            self._configure_inner(group, name, epoch)

    def _configure_inner(self, group: AbortableGroup, name: str, epoch: int) -> None:
        torchft = self._manager._torchft
        place, rank, ranks = f"shard/{name}", torchft.group_rank, range(torchft.group_world_size)
        if group is not self.shard:
            ranks = group.pg.ranks
            place = f"mesh/{name}/{group.name}.{min(ranks)}"
        group.configure(
            f"{self.home}/fft/{place}",
            self._peer.group,
            ranks.index(rank),
            len(ranks),
            epoch,
            ranks.index(rank),
            len(ranks),
            None,
            timeout=torchft.quorum_timeout,
        )


def _groups_used(
    models: Sequence[nn.Module], others: Iterable[torch.Tensor]
) -> Iterator[tuple[str, Any]]:
    """Places that use a process group of torch's, and the group."""
    tensors: list[tuple[str, torch.Tensor]] = []
    for model in models:
        tensors += [*model.named_parameters(), *model.named_buffers()]
        for name, module in model.named_modules():
            place = f"module {name!r} ({type(module).__name__}) of the model"
            if isinstance(module, FSDPModule):
                for group in fsdp_groups(fsdp_state(module)):
                    yield from _groups_of(place, group.mesh_info.mesh)
            if isinstance(module, nn.SyncBatchNorm | FullyShardedDataParallel):
                own = module.process_group or _world.default_pg
                if isinstance(own, torch.distributed.ProcessGroup):
                    yield place, own
    tensors += [("state of an optimizer", tensor) for tensor in others]
    for place, tensor in tensors:
        if isinstance(tensor, DTensor):
            yield from _groups_of(place, tensor.device_mesh)


def _groups_of(place: str, mesh: DeviceMesh) -> Iterator[tuple[str, Any]]:
    for group in mesh.get_all_groups():
        yield place, group


class _Shard(AbortableGroup):
    """A group inside of a replica group, which is also aborted if an abort came just before it is
    built."""

    def __init__(self, pg: ProcessGroup, groups: EpochGroups, name: str) -> None:
        self._groups = groups
        super().__init__(pg, name)

    def _begin(self, call: Any) -> Any:
        generation = super()._begin(call)
        if self._groups.shard_aborted:
            self.abort("aborted as it began to be built")
        return generation
