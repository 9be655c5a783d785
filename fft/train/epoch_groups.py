"""The process groups of an epoch: across the replica groups, and inside of this one.

`abort`, `run_deferred_abort` and `pending` are thread-safe; all other methods run on the main
thread.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import AllreduceOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torchft.manager import Manager
from torchft.process_group import ProcessGroup

from fft.errors import FftError, GradientLayoutMismatch, GroupNotReformable
from fft.messages.effects import Heal
from fft.messages.protocol import Peer, Record
from fft.train.process_group import AbortableGroup, GroupAborted
from fft.train.process_group.shard import ShardGroup

logger = logging.getLogger(__name__)

_DIGESTS = "\x1f"
"""Separates the gradient layout of a member from its digests, in the note that it exchanges."""


class EpochGroups:
    """The process groups of the current epoch, rebuilt for each epoch, aborted by each rollback."""

    def __init__(
        self,
        manager: Manager,
        peer: Peer,
        store: str,
        pg: ProcessGroup,
        shard: ProcessGroup | None,
        is_replacement: bool,
        address: str,
    ) -> None:
        """Create the groups without connecting them.

        Args:
            manager: Manager of this rank.
            peer: This participant.
            store: Address of the store of this replica group.
            pg: Process group across the replica groups.
            shard: Process group over which the model is sharded, or None.
            is_replacement: Whether this process replaces a lost rank. The other ranks of its group
                are in the job, and can be connected only in the first epoch of this process.
            address: Address of this host for gloo's connections.
        """
        self._manager = manager
        self._peer = peer
        self.store = store
        self._is_replacement = is_replacement
        self._has_stages = False
        self._incarnations: dict[int, int] = {}
        """Incarnation of each rank of this replica group in the last epoch."""
        self.replicate = AbortableGroup(pg, "replicate")
        self.shard = _Shard(shard, self) if shard is not None else None
        for group in self:
            group.address = address
        self.shard_aborted = False
        """The shard group was aborted since it was built."""
        self.shard_has_own_scope = False
        """The shard group is rebuilt for epochs of the group's own scope, not of the job."""
        self._warned_of: set[str] = set()
        """Places of foreign process groups that a warning has named."""
        self._deferred_abort: str | None = None
        """The cause of a deferred abort of the shard group, or None."""

    def __iter__(self) -> Iterator[AbortableGroup]:
        yield self.replicate
        if self.shard is not None:
            yield self.shard

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
        """Abort the shard group, which releases threads blocked in its collectives. Thread-safe."""
        self.shard_aborted = True
        if self.shard is not None:
            self.shard.abort(cause)

    def unwind(self, cause: str, waiting: AbstractContextManager[None], limit: timedelta) -> None:
        """Abort the groups, and wait, within ``waiting``, until no old operation can write."""
        self.shard_aborted, self._deferred_abort = True, None
        for group in self:
            group.abort(cause)
            with waiting:
                group.quiesce(limit)

    def unwind_shard(self, cause: str, waiting: AbstractContextManager[None]) -> None:
        """Abort the shard group, and wait until no old operation can write."""
        assert self.shard is not None, "asked before"
        self.abort_shard(cause)
        with waiting:
            self.shard.quiesce(self._manager._torchft.timeout)

    def cut(self) -> None:
        """End the connections, as a network would."""
        for group in self:
            group.cut()

    def close(self) -> None:
        """End the groups. Idempotent."""
        for group in self:
            group.close()

    def mesh(self) -> DeviceMesh:
        """Device mesh over the ranks of this replica group."""
        return self._ready("shard_mesh").mesh()

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
        shard.mesh()
        shard.register_as_default()
        return shard

    @property
    def stages(self) -> ProcessGroup | None:
        """The process group that `stage_group` returns, without its side effects."""
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
        the other ranks would wait until that group's timeout. Two-dimensional meshes cannot be
        built in another way, and get a warning.
        """
        for place, group, is_only in _groups_used(models, others):
            if group.size() < 2 or (self.shard is not None and group is self.shard.pg):
                continue
            text = (
                f"{place} communicates over the process group {group.group_name!r} of "
                f"{group.size()} ranks, which FFT cannot abort: after a fault on one rank the "
                "others would wait in it until its own timeout"
            )
            if is_only:
                raise FftError(
                    f"{text}; pass shard_pg=fft.ShardProcessGroupGloo() (of NCCL on GPUs) to "
                    "ManagerFFT, and build the model on manager.shard_mesh()"
                )
            if group.group_name not in self._warned_of:
                self._warned_of.add(group.group_name)
                logger.warning("%s; keep that timeout short", text)

    @property
    def has_shard_group(self) -> bool:
        """Whether the ranks of this replica group can exchange messages over their shard group."""
        return self.shard is not None and isinstance(self.shard.pg, ShardGroup)

    @property
    def can_reform(self) -> bool:
        """Whether other ranks of this replica group may be replaced while this process lives.

        FFT's shard group must be their only process group, and they must not rely on one-time
        exchanges: the stages of a pipeline send each other their shapes in their first step.
        """
        others = any(pg is not self.stages for pg in _world.pg_map)
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
            # the incarnation of a replaced rank differs from that of its peers
            start = os.environ.get("FFT_START") or self._peer.inc
            self._configure_shard(f"boot/{start}", 0)
        return self.shard.pg

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
        # Both rendezvous at once; torchft's quorum thread has nothing else to do here.
        shard = None
        if self.shard is not None and not self.shard_has_own_scope:
            name = f"{record.n}"
            shard = manager._torchft.executor.submit(self._configure_shard, name, record.epoch)
        self.replicate.note = models
        if digests is not None:
            self.replicate.note += _DIGESTS + json.dumps(digests)
        self.replicate.configure(
            f"{members[0].store}/fft/{record.n}.{record.epoch}/{rank}",
            self._peer.group,
            command.index,
            len(members),
            record.epoch,
            rank,
            world,
            [i * world + rank for i in range(len(members))],
            timeout=manager._torchft.quorum_timeout,
        )
        if shard is not None:
            shard.result()
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
        self._configure_shard(f"{record.n}", record.epoch)
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

    def _configure_shard(self, name: str, epoch: int) -> None:
        assert self.shard is not None
        rank, world = self._manager._torchft.group_rank, self._manager._torchft.group_world_size
        self.shard.configure(
            f"{self.store}/fft/shard/{name}",
            self._peer.group,
            rank,
            world,
            epoch,
            rank,
            world,
            None,
            timeout=self._manager._torchft.quorum_timeout,
        )


def _groups_used(
    models: Sequence[nn.Module], others: Iterable[torch.Tensor]
) -> Iterator[tuple[str, Any, bool]]:
    """Places that use a process group of torch's, the group, and whether it is their only one."""
    tensors: list[tuple[str, torch.Tensor]] = []
    for model in models:
        tensors += [*model.named_parameters(), *model.named_buffers()]
        for name, module in model.named_modules():
            place = f"module {name!r} ({type(module).__name__}) of the model"
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    yield from _groups_of(place, group.mesh_info.mesh)
            if isinstance(module, nn.SyncBatchNorm | FullyShardedDataParallel):
                own = module.process_group or _world.default_pg
                if isinstance(own, torch.distributed.ProcessGroup):
                    yield place, own, True
    tensors += [("state of an optimizer", tensor) for tensor in others]
    for place, tensor in tensors:
        if isinstance(tensor, DTensor):
            yield from _groups_of(place, tensor.device_mesh)


def _groups_of(place: str, mesh: DeviceMesh) -> Iterator[tuple[str, Any, bool]]:
    is_only = mesh._get_root_mesh().ndim == 1
    for dimension in range(mesh.ndim):
        yield place, mesh.get_group(dimension), is_only


class _Shard(AbortableGroup):
    """Shard group that is also aborted if the abort was requested just before its construction."""

    def __init__(self, pg: ProcessGroup, groups: EpochGroups) -> None:
        self._groups = groups
        super().__init__(pg, "shard")

    def _begin(self, call: Any) -> Any:
        generation = super()._begin(call)
        if self._groups.shard_has_own_scope and self._groups.shard_aborted:
            self.abort("aborted as it began to be built")
        return generation
