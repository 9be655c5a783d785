"""Loading of the checkpoint that a rank resumes from, before it joins its job.

A checkpoint is loaded only if the job is not running. Otherwise another group sends the state. A
rank reads the files of the group that wrote the shared state, and its own files for buffers and RNG
states. It modifies no state until all files are read and validated.

For a group with another number of ranks, the state is resharded. Each rank's file contains the
offset and shape of its shards in the full tensors. Optimizer state has the sharding of its
parameter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import torch

from fft.bus.base import HEAD
from fft.checkpoints.files import (
    Checkpoints,
    DamagedCheckpoint,
    Manifest,
    Origin,
    Scope,
    attempt_name,
    choose,
    life_of,
    name_of,
    of_other_version,
)
from fft.checkpoints.peers import CopyStore
from fft.checkpoints.plan import Checkpointing, MemoryPlan
from fft.errors import CheckpointError, StateMismatch, UnfitCheckpoint
from fft.messages.protocol import lineage_of
from fft.trace.inputs import RESTORED
from fft.train.checkpoint.contents import (
    Layout,
    UnreadableFile,
    from_json,
    layout_of,
    read_tensors,
    unpacked,
)
from fft.train.session.rank_context import RankContext
from fft.train.session.rank_state import RankState
from fft.train.session.scope import RankScope
from fft.train.state.local_tensors import local_of, same_bits
from fft.train.state.plain_state import with_layout_of
from fft.train.state.random_states import load_random
from fft.train.state.step_state import StepState
from fft.train.state.tensor_subclasses import CLASS, is_marked
from fft.util.version import __version__

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The position at which the job continues."""

    manifest: Manifest
    at: Scope
    """Position of this rank's scope in the checkpoint."""
    lineage: str
    cursor: int
    entries: Sequence[tuple[int, int]] = ()
    """Slice and version of each restored entry for the next stage."""


class CheckpointLoader:
    """Loads a checkpoint for one rank, on the main thread.

    Attributes:
        origin: The checkpoint that this job resumed from, if any.
    """

    def __init__(self, plan: Checkpointing, checkpoints: Checkpoints, rank: RankContext) -> None:
        self.origin: Origin | None = None
        self._plan, self._checkpoints = plan, checkpoints
        self._job, self._scope, self._state = rank.job, rank.scope, rank.state
        self._spec, self._groups = rank.settings.spec, rank.settings.expected_groups
        self._rank, self._ranks = rank, rank.world
        self._is_done = False
        self._notes: list[tuple[str, dict[str, Any]]] = []

    def resume(self) -> None:
        """Load the requested checkpoint, if any, before this rank joins the job. Idempotent.

        Raises CheckpointError, DamagedCheckpoint, StateMismatch.
        """
        if self._is_done or self._job.engine is not None:
            return
        self._is_done = True
        began = time.monotonic()
        if (manifest := self.choose()) is None:
            if self._plan.resume is not False:  # a joiner that writes a checkpoint names it, too
                with suppress(OSError):
                    life = life_of(attempt_name(self._job.bus.generation, ""))
                    self.origin = self._checkpoints.origin_of(life)
            return
        found = self.load(manifest, self._state)
        self.origin = Origin(step=manifest.step, lineage=manifest.lineage)
        seconds = time.monotonic() - began
        told = {"step": found.at.step, "lineage": found.at.lineage, "as": found.lineage}
        told |= {"place": self._checkpoints.store.url, "seconds": round(seconds, 3)}
        told |= {"attempt": manifest.attempt, **self._tier(manifest)}
        entries = [{"slice": number, "version": version} for number, version in found.entries]
        self._notes = [("resumed", told), *((RESTORED, entry) for entry in entries)]
        logger.info("resumed from the checkpoint of step %d, in %.1f s", manifest.step, seconds)
        spec = self._spec.name
        is_other = manifest.spec_digest != self._spec.digest()
        if manifest.spec and (is_other or manifest.fft_version != __version__):
            logger.warning(  # an imported checkpoint has no spec
                "the checkpoint of step %d was written by FFT %s with spec %s, and this is FFT %s "
                "with spec %s, or another version of it",
                manifest.step,
                manifest.fft_version,
                manifest.spec,
                __version__,
                spec,
            )

    def _tier(self, manifest: Manifest) -> dict[str, Any]:
        """Return which kind of place the state is from, and why copies in memory are not used."""
        url, memory = self._checkpoints.store.url, MemoryPlan.from_env()
        store = self._checkpoints.store
        if isinstance(store, CopyStore) and memory is not None:
            hosts = sorted({urlsplit(url).netloc for url in store.fetched.values()})
            told = {"tier": "peer" if hosts else "memory", "from": hosts, "files": store.used}
            return {**told, "unused": memory.unused}
        tier = "store" if "://" in url else "disk"
        return {"tier": tier, "unused": () if memory is None else memory.unused}

    def trace(self) -> None:
        """Trace the checkpoint that the job resumed from; the trace must have its header."""
        for name, data in self._notes:
            self._job.note(name, data)

    def choose(self) -> Manifest | None:
        """Return the checkpoint to resume from, or None to start from scratch.

        Raises:
            CheckpointError: Checkpoints exist although no resume was requested, or no checkpoint is
                usable.
            DamagedCheckpoint: The requested checkpoint is damaged.
        """
        if self._scope.bus.read(HEAD) is not None:
            return None  # the job is running, and another group sends the state
        return choose(self._checkpoints, self._plan.resume)

    def load(self, manifest: Manifest, state: RankState) -> Loaded:
        """Load the checkpoint into ``state``.

        Raises CheckpointError, DamagedCheckpoint, StateMismatch.
        """
        peer, at = self._job.peer, self._at(manifest)
        # with another mesh a rank may have a shard of the same shape from another place
        mesh = self._rank.groups.mesh_text
        is_same = (manifest.ranks, manifest.mesh) == (self._ranks, mesh)
        # in a copy in memory each group has written the shared state, and its own is here
        has_own = self._plan.source and peer.group in manifest.groups
        group = peer.group if has_own else manifest.writer
        try:
            if is_same:
                tree = tree_of(self._checkpoints, manifest, group, peer.rank)
            else:
                trees = [
                    tree_of(self._checkpoints, manifest, group, r) for r in range(manifest.ranks)
                ]
                tree = resharded(trees, state)
        except OSError as error:
            raise CheckpointError(f"{name_of(manifest.step)} cannot be read: {error}") from error
        own = self._own(manifest, peer.group, peer.rank, state) if is_same else None
        found = Loaded(manifest, at, at.lineage, at.cursor)
        if not is_same:
            found = self._stands_anew(manifest, at)
        place = f"{self._checkpoints.store.url}/{self._checkpoints.directory(manifest)}"
        try:
            self._take(tree, own, state)
        except StateMismatch as error:
            there = manifest.fft_version
            hint = "" if there == __version__ else f". {of_other_version(there)}"
            raise StateMismatch(
                f"the checkpoint of step {manifest.step}, {place}, does not fit what this script "
                f"registers: {error} (what came is the checkpoint's). Resume with the model and "
                "the optimizers that wrote it; to begin anew, name another --checkpoint directory, "
                f"and leave out --resume{hint}"
            ) from error
        state.resume_at(at, found.lineage, found.cursor, tree["data"])
        found = replace(found, entries=state.paradigm.load_entries(own))
        if not is_same:
            logger.warning(
                "%s was written by groups of %d ranks%s, and this job has %d%s: the state is "
                "resharded; from here on the same bits as without this are not promised",
                name_of(manifest.step),
                manifest.ranks,
                manifest.mesh and f" on the mesh {manifest.mesh}",
                self._ranks,
                mesh and f" on the mesh {mesh}",
            )
        return found

    def _stands_anew(self, manifest: Manifest, at: Scope) -> Loaded:
        """Return the position for another number of ranks, or another mesh.

        Raises UnfitCheckpoint.
        """
        items = self._state.paradigm.items_per_step
        had = manifest.items or (1 if items == 1 else manifest.ranks)
        mesh = self._rank.groups.mesh_text
        lineage = lineage_of(f"{manifest.lineage}|ranks {self._ranks}{mesh and f'|mesh {mesh}'}")
        if items == had:
            return Loaded(manifest, at, lineage, manifest.cursor)
        position = manifest.cursor * had
        if manifest.returned:
            raise UnfitCheckpoint(
                f"of {name_of(manifest.step)} some of the data is still to be given out again, in "
                f"slices of {had} batches for each group, and this job has slices of {items}: "
                f"resume with groups of {manifest.ranks} ranks, or from another checkpoint"
            )
        if position % items:
            raise UnfitCheckpoint(
                f"{name_of(manifest.step)} stands at item {position} of the data, which groups "
                f"that take {items} at a time cannot begin with: resume with another number of "
                f"ranks, such as {manifest.ranks}, or from another checkpoint"
            )
        return Loaded(manifest, at, lineage, position // items)

    def _at(self, manifest: Manifest) -> Scope:
        """Return the position of this rank's scope.

        Raises UnfitCheckpoint if the checkpoint lacks it.
        """
        refuse_other_scopes(manifest, self._scope)
        return manifest.scopes[self._scope.name]

    def _own(
        self, manifest: Manifest, group: str, rank: int, state: RankState
    ) -> dict[str, Any] | None:
        """Return this rank's own state, or None if the checkpoint has none for this rank."""
        if self._groups == 1 and len(manifest.groups) == 1:
            (group,) = manifest.groups  # its name may differ between starts
        if group not in manifest.groups:
            logger.warning(
                "%s has no buffers and random states of group %s: %s",
                name_of(manifest.step),
                group,
                state.paradigm.without_own(manifest.writer),
            )
            return None
        own: dict[str, Any] = tree_of(self._checkpoints, manifest, group, rank)["own"]
        return own

    def _take(
        self, tree: Mapping[str, Any], own: Mapping[str, Any] | None, state: RankState
    ) -> None:
        loads = state.loads
        if missing := sorted(loads.keys() - tree["user"].keys()):
            raise UnfitCheckpoint(
                f"the checkpoint has no state of {missing[0]!r}, which is registered here by "
                "register_state_dict_fn() or state_dict=: resume with the script that wrote it"
            )
        if state.registered_state is None and not loads:
            raise CheckpointError(
                "a checkpoint is to be loaded, and there is nothing to load it into: pass "
                "state_dict and load_state_dict, or call manager.register(model, optimizer)"
            )
        if state.registered_state is not None:
            if tree["state"] is None:
                raise UnfitCheckpoint(
                    "the checkpoint was taken without register(), which this script calls: resume "
                    "with the script that wrote it"
                )
            local = tree["own"] if own is None else own
            state.paradigm.load_checkpoint(tree["state"], own, local.get("buffers"))
        for key, load in loads.items():
            try:
                load(with_layout_of(tree["user"][key], None, f"state_dict of {key!r}"))
            except Exception as error:  # raised by the script's own function
                error.add_note(f"while it loaded {key!r} of a checkpoint at {self._plan.place}")
                raise
        state.updates.loaded()
        if own is not None:
            load_random(
                state.registered_state.generators if state.registered_state is not None else None,
                own["random"],
            )


def refuse_other_scopes(manifest: Manifest, scope: RankScope) -> None:
    """Raise UnfitCheckpoint unless the checkpoint has the scopes of this job."""
    names = scope.by_rank or [scope.name]
    if set(names) != manifest.scopes.keys():
        raise UnfitCheckpoint(
            f"{name_of(manifest.step)} was taken with spec {manifest.spec!r}, with the scopes "
            f"{', '.join(manifest.scopes)}, and this job has {', '.join(names)}: resume with "
            "the spec that it was taken with"
        )


def refuse_at_once(plan: Checkpointing, checkpoints: Checkpoints, scope: RankScope) -> None:
    """Check that the checkpoint selected by `fft run` has the scopes of this job.

    The check runs before a model is built. Loading checks everything else.

    Raises UnfitCheckpoint.
    """
    if isinstance(plan.resume, bool):
        return
    try:
        manifest = checkpoints.manifest(plan.resume)
    except (DamagedCheckpoint, OSError):  # a running job may have removed it in the meantime
        return
    refuse_other_scopes(manifest, scope)


def refuse_other_kind(found: Mapping[str, Any], are_alone: bool) -> None:
    """Raise UnfitCheckpoint unless the checkpoint and this job agree on local steps."""
    has_local_steps = "plan" in found
    if has_local_steps != are_alone:
        kinds = {True: "by groups that step alone", False: "by groups that step together"}
        raise UnfitCheckpoint(
            f"the checkpoint was taken {kinds[has_local_steps]}, and this job trains "
            f"{kinds[are_alone]}: resume with the script that wrote it"
        )


def tree_of(checkpoints: Checkpoints, manifest: Manifest, group: str, rank: int) -> dict[str, Any]:
    """Return the contents of a rank's files. Raises DamagedCheckpoint, OSError."""
    store, files = checkpoints.store, manifest.files_of(group, rank)
    name = checkpoints.directory(manifest)
    for file in files.values():
        if store.digest(f"{name}/{file.name}") != file.sha256:
            raise DamagedCheckpoint(f"{name}/{file.name}: its SHA-256 is not as it was written")
    try:
        data = from_json(store.read(f"{name}/{files['json'].name}"), files["json"].name)
        with store.reading(f"{name}/{files['safetensors'].name}") as path:
            tree: dict[str, Any] = unpacked(data, read_tensors(path))
    except UnreadableFile as error:
        raise DamagedCheckpoint(f"{name}: {error}") from error
    return tree


def completed(
    found: Mapping[str, Any], buffers: Mapping[str, torch.Tensor] | None, step: StepState
) -> dict[str, Any]:
    """Return a complete state for `StepState.load`.

    An imported checkpoint contains only a model; the rest is the current state of this process.
    """
    if found["optimizers"] is not None:
        # an older checkpoint has no flags
        return {"flags": step.export_flags(), **found, "buffers": buffers}
    logger.warning("only a model was imported: optimizers, schedules and the rest begin anew")
    mine, tensors = step.export(), dict(found["parameters"])
    for alias, name in step.aliases().items():
        if alias in tensors:
            value: torch.Tensor = tensors.pop(alias)
            _refuse_untied(alias, value, name, tensors.setdefault(name, value))
    own = step.export_buffers()
    theirs = {name: tensors.pop(name) for name in own if name in tensors}
    return {**mine, "parameters": tensors, "buffers": theirs}


def _refuse_untied(alias: str, value: torch.Tensor, name: str, other: torch.Tensor) -> None:
    """Raise StateMismatch unless both names of a tied tensor have the same values."""
    if value.shape != other.shape or value.dtype != other.dtype or not same_bits(value, other):
        raise StateMismatch(
            f"{alias} and {name} are tied in this model, but the checkpoint has different values "
            "for them: tie them in the checkpoint, or untie them in the model"
        )


# --- conversion to another number of ranks, on the CPU, tensor by tensor ---

Part = tuple[Layout, torch.Tensor]


def whole_of(parts: Sequence[Part], name: str = "a sharded tensor") -> torch.Tensor:
    """Return the full tensor of the parts.

    Raises CheckpointError if elements are missing, or replicas of a part differ.
    """
    shape = parts[0][0].shape
    whole = torch.empty(shape, dtype=parts[0][1].dtype, device="cpu")
    filled, known = 0, dict[tuple[int, ...], torch.Tensor]()
    for layout, part in parts:
        if (other := known.setdefault(layout.offset, part)) is not part:
            _refuse_different(name, other, part)
            continue
        whole[_place(layout.offset, part.shape)] = part
        filled += part.numel()
    if filled < whole.numel():
        raise CheckpointError(f"the parts of {name} have {filled} of its {whole.numel()} elements")
    return whole


def _place(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def local_shard(
    whole: torch.Tensor, layout: Mapping[str, Any] | None, shape: torch.Size
) -> torch.Tensor:
    """Return a rank's shard of a tensor with the sharding of a parameter.

    Args:
        whole: The full tensor.
        layout: The layout of the parameter, as stored in a file, or None if it is not sharded.
        shape: Shape of the parameter. A tensor of another shape is not sharded.
    """
    if layout is None or whole.shape != shape or whole.dim() == 0:
        return whole
    return whole[_place(layout["offset"], layout["local"])]


def unsharded(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole state from the states of all ranks of a group.

    Raises CheckpointError if they cannot be combined.
    """
    first = trees[0]
    if first["state"] is None or first["state"]["optimizers"] is None:
        if len(trees) == 1 and first["state"] is not None:
            return dict(first)  # an imported model, which is not sharded
        raise CheckpointError("what state_dict= gave is not resharded: use register()")
    if "plan" in first["state"]:
        raise CheckpointError(
            "the groups that wrote it take local steps, so each has its own state, which cannot be "
            "resharded; resume with as many ranks"
        )
    _refuse_stages(trees)
    layouts = [_layouts(tree) for tree in trees]

    def joined(name: str, values: Sequence[Any]) -> Any:
        local = [each["state"]["parameters"][name] for each in trees]
        known = [each.get(name) for each in layouts]
        marked = [value for value in values if is_marked(value)]
        if marked and known[0] is not None and len(trees) > 1:
            _refuse_marked(name, marked[0])
        is_part = isinstance(values[0], torch.Tensor) and values[0].shape == local[0].shape
        if not is_part or known[0] is None or values[0].dim() == 0:
            for each in values[1:]:
                _refuse_different(name, values[0], each)
            return values[0]
        pairs = zip(known, values, strict=True)
        return whole_of([(layout, value) for layout, value in pairs if layout is not None], name)

    state = dict(first["state"])
    state["parameters"] = {
        name: joined(name, [tree["state"]["parameters"][name] for tree in trees])
        for name in first["state"]["parameters"]
    }
    state["optimizers"] = [
        {
            **optimizer,
            "state": {
                name: {
                    key: joined(
                        name, [t["state"]["optimizers"][i]["state"][name][key] for t in trees]
                    )
                    for key in entries
                }
                for name, entries in optimizer["state"].items()
            },
        }
        for i, optimizer in enumerate(first["state"]["optimizers"])
    ]
    return {**first, "state": state, "layouts": {}}


def resharded(trees: Sequence[Mapping[str, Any]], state: RankState) -> dict[str, Any]:
    """Return this rank's part of the full state of ``trees``. Raises CheckpointError."""
    whole = unsharded(trees)
    if state.registered_state is None:
        raise CheckpointError("what state_dict= gave is not resharded: use register()")
    if (extra := state.registered_state.sharded_extra()) is not None:
        raise UnfitCheckpoint(
            f"extra[{extra!r}] is sharded over the ranks of a group, and such state is not "
            "resharded: resume with as many ranks"
        )
    names = state.registered_state.names()

    def mine(name: str, value: Any) -> Any:
        tensor = names.get(name)
        layout = None if tensor is None else layout_of(tensor)
        if layout is not None and is_marked(value):
            _refuse_marked(name, value)
        if tensor is None or layout is None or not isinstance(value, torch.Tensor):
            return value
        if tuple(value.shape) != layout.shape or value.dim() == 0:
            return value
        return value[_place(layout.offset, local_of(tensor).shape)]

    found = whole["state"]
    parameters = {name: mine(name, value) for name, value in found["parameters"].items()}
    optimizers = [
        {
            **optimizer,
            "state": {
                name: {key: mine(name, value) for key, value in entries.items()}
                for name, entries in optimizer["state"].items()
            },
        }
        for optimizer in found["optimizers"] or ()
    ]
    taken = optimizers if found["optimizers"] is not None else None
    return {**whole, "state": {**found, "parameters": parameters, "optimizers": taken}}


def _refuse_different(name: str, value: Any, other: Any) -> None:
    """Raise CheckpointError if two ranks hold different bits where they should hold replicas."""
    if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
        return
    if value.shape != other.shape or value.dtype != other.dtype or not same_bits(value, other):
        raise CheckpointError(
            f"{name}: ranks of a group hold different values of the same part, such as experts of "
            "their own, so there is no one full tensor: make it a DTensor that is sharded over "
            "these ranks, or resume with as many ranks on the same mesh"
        )


def _refuse_marked(name: str, value: Mapping[str, Any]) -> None:
    kind = f"of class {value[CLASS]}" if CLASS in value else "with its own layout"
    raise UnfitCheckpoint(
        f"{name}: a tensor {kind} cannot be resharded; resume with as many ranks per group as the "
        "checkpoint has"
    )


def _layouts(tree: Mapping[str, Any]) -> dict[str, Layout]:
    return {
        name: Layout(tuple(each["shape"]), tuple(each["offset"]))
        for name, each in tree["layouts"].items()
    }


def _refuse_stages(trees: Sequence[Mapping[str, Any]]) -> None:
    names = [set(tree["state"]["parameters"]) for tree in trees]
    if any(each != names[0] for each in names):
        raise CheckpointError(
            "the ranks of the group that wrote it have different parameters, as stages of a "
            "pipeline do: resume with as many ranks"
        )
