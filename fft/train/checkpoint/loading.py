"""Loading of the checkpoint that a rank resumes from, before it joins its job.

It happens only if the job is not running; otherwise the state comes from a group that has it. A
rank reads the files of the group that wrote the common state, and its own files for buffers and
random states. It changes nothing before all has been read and fits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fft.bus.base import HEAD
from fft.durable.checkpoints import Checkpoints
from fft.durable.choice import choose
from fft.durable.manifest import DamagedCheckpoint, Manifest, Origin, Scope, name_of
from fft.durable.plan import Checkpointing
from fft.errors import CheckpointError, StateMismatch, UnfitCheckpoint
from fft.messages.protocol import lineage_of
from fft.train.checkpoint.rank_file import UnreadableFile, from_json, read_tensors, unpacked
from fft.train.checkpoint.resharding import resharded
from fft.train.local_tensors import same_bits
from fft.train.participation import Participation
from fft.train.rank_state import RankState
from fft.train.scope import RankScope
from fft.train.state.plain_state import with_layout_of
from fft.train.state.random_states import load_random
from fft.train.state.step_state import StepState

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
    """Slice and version of each entry that this stage gives to the next one again."""


class Loader:
    """Loads a checkpoint for one rank. Main thread.

    Args:
        groups: Number of groups of this job, as far as it was announced.
        ranks: Number of ranks of each group of this job.
        scope: The scope of this rank.
    """

    def __init__(
        self,
        plan: Checkpointing,
        checkpoints: Checkpoints,
        job: Participation,
        groups: int,
        ranks: int,
        scope: RankScope,
    ) -> None:
        self._is_only_group = groups == 1
        self._scope = scope
        self._plan = plan
        self._checkpoints = checkpoints
        self._job = job
        self._ranks = ranks

    def choose(self) -> Manifest | None:
        """Return the checkpoint that the job resumes from, or None if it starts fresh.

        Raises:
            CheckpointError: There are checkpoints, but resuming was not requested; or none is
                usable.
            DamagedCheckpoint: The requested checkpoint is damaged.
        """
        if self._scope.bus.read(HEAD) is not None:
            return None  # the job is running, so the state comes from a group that has it
        return choose(self._checkpoints, self._plan.resume)

    def load(self, manifest: Manifest, state: RankState) -> Loaded:
        """Load the checkpoint into ``state``. Raises CheckpointError, DamagedCheckpoint,
        StateMismatch."""
        peer, at = self._job.peer, self._at(manifest)
        same_ranks = manifest.ranks == self._ranks
        try:
            if same_ranks:
                tree = tree_of(self._checkpoints, manifest, manifest.writer, peer.rank)
            else:
                trees = [
                    tree_of(self._checkpoints, manifest, manifest.writer, r)
                    for r in range(manifest.ranks)
                ]
                tree = resharded(trees, state)
        except OSError as error:
            raise CheckpointError(f"{name_of(manifest.step)} cannot be read: {error}") from error
        own = self._own(manifest, peer.group, peer.rank, state) if same_ranks else None
        found = _stands(manifest, at, self._ranks, state)
        place = f"{self._checkpoints.store.url}/{self._checkpoints.directory(manifest)}"
        try:
            self._take(tree, own, state)
        except StateMismatch as error:
            raise StateMismatch(
                f"the checkpoint of step {manifest.step}, {place}, does not fit what this script "
                f"registers: {error} (what came is the checkpoint's). Resume with the model and "
                "the optimizers that wrote it; to begin anew, name another --checkpoint directory, "
                "and leave out --resume"
            ) from error
        state.resume_at(at, found.lineage, found.cursor, tree["data"])
        found = replace(found, entries=state.paradigm.load_entries(own))
        if not same_ranks:
            logger.warning(
                "%s was written by groups of %d ranks, and this job has %d: the state is resharded;"
                " from here on the same bits as without this are not promised",
                name_of(manifest.step),
                manifest.ranks,
                self._ranks,
            )
        return found

    def _at(self, manifest: Manifest) -> Scope:
        """Return the position of this rank's scope. Raises UnfitCheckpoint if the checkpoint lacks
        it."""
        refuse_other_scopes(manifest, self._scope)
        return manifest.scopes[self._scope.name]

    def _own(
        self, manifest: Manifest, group: str, rank: int, state: RankState
    ) -> dict[str, Any] | None:
        """Return the state that only this rank had; None if no such rank wrote the checkpoint."""
        if self._is_only_group and len(manifest.groups) == 1:
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
        if state.step is None and not loads:
            raise CheckpointError(
                "a checkpoint is to be loaded, and there is nothing to load it into: pass "
                "state_dict and load_state_dict, or call manager.register(model, optimizer)"
            )
        if state.step is not None:
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
            except Exception as error:  # the script's own
                error.add_note(f"while it loaded {key!r} of a checkpoint at {self._plan.place}")
                raise
        state.updates.loaded()
        if own is not None:
            load_random(state.step.generators if state.step is not None else None, own["random"])


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
    """Check before a model is built that the checkpoint named by `fft run` has the right scopes.

    Other defects are found when it is loaded. Raises UnfitCheckpoint.
    """
    if isinstance(plan.resume, bool):
        return
    try:
        manifest = checkpoints.manifest(plan.resume)
    except (DamagedCheckpoint, OSError):  # a job that goes on may have removed it since
        return
    refuse_other_scopes(manifest, scope)


def refuse_other_kind(found: Mapping[str, Any], are_alone: bool) -> None:
    """Raise UnfitCheckpoint if groups trained locally there but not here, or the reverse."""
    were_alone = "plan" in found
    if were_alone != are_alone:
        kinds = {True: "by groups that step alone", False: "by groups that step together"}
        raise UnfitCheckpoint(
            f"the checkpoint was taken {kinds[were_alone]}, and this job trains "
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
    """Return a state in the form that `StepState.load` takes. For an imported checkpoint, which has
    a model only, the rest is taken from this process."""
    if found["optimizers"] is not None:
        return {**found, "buffers": buffers}
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
    """Raise StateMismatch unless both names of a tensor that is tied here have the same values."""
    if value.shape != other.shape or value.dtype != other.dtype or not same_bits(value, other):
        raise StateMismatch(
            f"{alias} and {name} are tied in this model, but the checkpoint has different values "
            "for them: tie them in the checkpoint, or untie them in the model"
        )


def _stands(manifest: Manifest, at: Scope, ranks: int, state: RankState) -> Loaded:
    """Return lineage and cursor for groups of ``ranks`` ranks. Raises UnfitCheckpoint."""
    if manifest.ranks == ranks:
        return Loaded(manifest, at, at.lineage, at.cursor)
    lineage = lineage_of(f"{manifest.lineage}|ranks {ranks}")
    if state.paradigm.takers != ranks:  # all ranks of a group take the same item
        return Loaded(manifest, at, lineage, manifest.cursor)
    items = manifest.cursor * manifest.ranks
    if manifest.returned:
        raise UnfitCheckpoint(
            f"of {name_of(manifest.step)} some of the data is still to be given out again, in "
            f"slices for groups of {manifest.ranks} ranks, and this job has {ranks}: resume with "
            f"{manifest.ranks}, or from another checkpoint"
        )
    if items % ranks:
        raise UnfitCheckpoint(
            f"{name_of(manifest.step)} stands at item {items} of the data, which groups of {ranks} "
            "ranks cannot begin with, for each takes so many at a time: resume with another number "
            f"of ranks, such as {manifest.ranks}, or from another checkpoint"
        )
    return Loaded(manifest, at, lineage, items // ranks)


def origin_of(found: Loaded) -> Origin:
    """Return the origin that is stored in the checkpoints of this job."""
    return Origin(step=found.manifest.step, lineage=found.manifest.lineage)
