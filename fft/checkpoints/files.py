"""Durable checkpoints as files: the manifest and the checkpoints of a store.

This module does not import torch, because `fft run` and `fft checkpoint` use it, too. A checkpoint
is a directory ``step-N`` with files of every rank and a manifest, which is written last. `contents`
defines the contents of the ranks' files. Receipts and manifests are JSON with a digest of their
contents, which detects edits. The format is strict: a reader rejects data with unknown fields.

Jobs publish, replace and remove checkpoints while other processes read. A reader that finds a
problem therefore reads again, and reports the problem only if the store has not changed in between.

A checkpoint exists once its manifest exists. The subsequent rename may be interrupted at any point.
Then readers find the checkpoint in the directory of the attempt. If a step has two complete
checkpoints, readers use the later one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fft.checkpoints.stores import MANIFEST, PARTIAL, REMOVED, Store
from fft.errors import CheckpointError
from fft.util.names import in_file_name
from fft.util.version import __version__

logger = logging.getLogger(__name__)

# --- receipts and manifests ---

FORMAT = 1
"""Version of the files and the manifest; a reader rejects any other version."""
_NAME = re.compile(r"^step-(0|[1-9][0-9]{0,17})$")
_FILE = r"^g[A-Za-z0-9_.-]{1,200}r[0-9]{1,6}\.(json|safetensors)$"

Count = Annotated[int, Field(ge=0)]
Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class DamagedCheckpoint(CheckpointError):
    """A checkpoint must not be loaded; the message gives its name, the file and the problem."""


class Strict(BaseModel):
    """Data of a file or a message of FFT, without unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class File(Strict):
    """One file of a checkpoint."""

    name: Annotated[str, Field(pattern=_FILE)]
    size: Count
    sha256: Sha


class Scope(Strict):
    """The position of one scope of the job."""

    step: Count
    lineage: str
    batches: Count
    cursor: Count
    returned: tuple[Count, ...]
    """Slices before the cursor that no txn has consumed."""


class Receipt(Strict):
    """The files that one rank has written and read back; the receipt is written after them.

    A rank writes a receipt without files to decline; the writer of the manifest does not wait for
    it then.
    """

    attempt: str
    group: str
    rank: Count
    files: tuple[File, ...]
    at: Scope | None = None
    """Position of the rank's scope, if each stage has its own scope."""


class Origin(Strict):
    """The checkpoint from which the job of this checkpoint had resumed."""

    step: Count
    lineage: str


class Manifest(Strict):
    """The description of a checkpoint and the list of its files.

    Attributes:
        step: Number of committed steps. If each stage has its own scope, ``step``, ``lineage``,
            ``batches``, ``cursor`` and ``returned`` are those of the first stage. Other stages may
            be some slices behind.
        scopes: Position of each scope by name; ``job`` for a job with one scope.
        writer: The group whose files contain the shared state of all groups.
        groups: The groups whose buffers and RNG states are in the checkpoint.
        ranks: Number of ranks of each group.
        mesh: The layout of the mesh of each group; empty if it has one dimension.
        items: Number of data items in a slice; 0 in checkpoints of earlier versions.
    """

    format: Literal[1] = 1
    step: Count
    lineage: str
    batches: Count
    cursor: Count
    returned: tuple[Count, ...]
    scopes: dict[str, Scope]
    writer: str
    groups: tuple[str, ...]
    ranks: Annotated[int, Field(ge=1)]
    mesh: str = ""
    items: Count = 0
    spec: str
    spec_digest: str
    fft_version: str
    torch_version: str
    attempt: str
    written_at: float
    resumed_from: Origin | None = None
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.size for file in self.files)

    def files_of(self, group: str, rank: int) -> dict[str, File]:
        """Return a rank's files by suffix, ``json`` or ``safetensors``; empty if it wrote none."""
        stem = file_stem(group, rank)
        return {
            file.name.rpartition(".")[2]: file
            for file in self.files
            if file.name.rpartition(".")[0] == stem
        }


_Sealed = TypeVar("_Sealed", Receipt, Manifest)


def step_of(directory: str) -> int | None:
    """Return the step in the name of a checkpoint directory, or None for another directory."""
    found = _NAME.match(directory)
    return int(found[1]) if found else None


def name_of(step: int) -> str:
    """Return the directory name of the checkpoint of ``step``."""
    return f"step-{step}"


def partial_name(step: int, attempt: str) -> str:
    """Return the directory name of an unfinished attempt at a checkpoint."""
    return f"{name_of(step)}{PARTIAL}{attempt}"


def attempt_name(life: str, record: str) -> str:
    """Return the name of an attempt, which is equal on all ranks.

    Args:
        life: The generation of the bus.
        record: A text that identifies the attempt within that generation.
    """
    return f"{_short(life, 4)}-{_short(record, 8)}"


def life_of(attempt: str) -> str:
    """Return the bus generation (hashed) in the name of an attempt, or an empty string."""
    life, dash, _ = attempt.partition("-")
    return life if dash else ""


def _short(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def file_stem(group: str, rank: int) -> str:
    """Return the stem of the file names of a rank, which is unique to its group."""
    return f"g{in_file_name(group)}r{rank}"


def receipt_name(group: str, rank: int) -> str:
    """Return the file name of a rank's receipt, which is not part of the checkpoint."""
    return f"{file_stem(group, rank)}.receipt"


def sealed(thing: Receipt | Manifest) -> bytes:
    """Encode a receipt or manifest as JSON with a digest of its contents."""
    data = thing.model_dump(mode="json")
    return json.dumps({**data, "sha256": _digest(data)}, indent=1).encode()


def unsealed(kind: type[_Sealed], data: bytes, place: str) -> _Sealed:
    """Decode the output of `sealed`. Raises DamagedCheckpoint with ``place`` in its message."""
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{place}: no JSON ({error})") from None
    if not isinstance(found, dict):
        raise DamagedCheckpoint(f"{place}: no JSON object")
    digest = found.pop("sha256", None)
    if digest != _digest(found):
        raise DamagedCheckpoint(f"{place}: it was changed after it was written")
    try:
        return kind.model_validate_json(json.dumps(found))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        there = found.get("fft_version", __version__)
        fix = "" if there == __version__ else f" ({of_other_version(there)})"
        raise DamagedCheckpoint(f"{place}: {where}: {first['msg']}{fix}") from None


def of_other_version(there: str) -> str:
    """Return the hint of an error in a checkpoint that another version of FFT has written."""
    return (
        f"FFT {there} has written it, and this is FFT {__version__}: an older version may not read "
        f"it; resume with FFT {there}, or a newer one"
    )


def _digest(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# --- the checkpoints of a store ---
_LOOKS = 20
"""Maximum number of reads.

A read is repeated only after a change by a writer, which changes the store every few seconds.
"""


class Passed(CheckpointError):
    """The checkpoint is superseded by a published one of a later step or of more groups."""


@dataclass(frozen=True)
class Found:
    """A directory of the store that holds a checkpoint or an attempt at one."""

    name: str
    step: int | None
    """Step of the checkpoint, or None if it is unfinished or superseded."""
    manifest: Manifest | None
    problem: str | None
    """The reason why the checkpoint is unusable, or None if there is none."""


class Checkpoints:
    """All checkpoints in one store. Every method raises OSError if the store is unavailable."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def found(self) -> list[Found]:
        """Return all checkpoints by step, then the unfinished ones. Only manifests are read."""
        entries = self._looked_at()
        whole = {e.step: e for e in entries if e.manifest is not None}
        entries = [
            _surplus(e) if e.step in whole and e is not whole[e.step] else e for e in entries
        ]
        return sorted(entries, key=lambda e: (e.step is None, e.step or 0, e.name))

    def _looked_at(self) -> list[Found]:
        """Return a consistent list of all directories by age, the newest of a step last."""
        for _ in range(_LOOKS):
            names = self._names()
            entries = [self._look(name) for name in names]
            if self._is_settled(names, [e for e in entries if e.manifest is None]):
                break
        return sorted(entries, key=_age)

    def _names(self) -> list[str]:
        return list(filter(_is_ours, self.store.directories()))

    def _is_settled(self, names: Sequence[str], problems: Sequence[Found]) -> bool:
        """Return whether the store has not changed since ``names`` and ``problems`` were read."""
        return not problems or (
            all(self._look(entry.name) == entry for entry in problems) and self._names() == names
        )

    def _look(self, name: str) -> Found:
        step = step_of(name)
        try:
            manifest = self._manifest_in(name)
            return Found(name, manifest.step, manifest, None)
        except DamagedCheckpoint as error:
            if step is not None:
                return Found(name, step, None, str(error))
            return Found(name, None, None, f"{name}: it was not finished, or is being written")

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of the checkpoint of ``step``, after checking its files' sizes.

        Raises:
            DamagedCheckpoint: The checkpoint does not exist or is not complete.
        """
        found = self.found()
        for entry in found:
            if entry.step == step and entry.manifest is not None:
                return entry.manifest
        if not any(entry.step == step for entry in found):
            there = ", ".join(str(entry.step) for entry in found if entry.step is not None)
            raise DamagedCheckpoint(
                f"{self.store.url}: no checkpoint of step {step}; there are: {there or 'none'}"
            )
        return self._manifest_in(name_of(step))

    def origin_of(self, life: str) -> Origin | None:
        """Return the checkpoint from which the running start ``life`` has resumed, or None."""
        whole = [each.manifest for each in self.found() if each.step is not None and each.manifest]
        own = [each for each in whole if life_of(each.attempt) == life]
        if own or not whole:
            return own[0].resumed_from if own else None
        return Origin(step=whole[-1].step, lineage=whole[-1].lineage)

    def directory(self, manifest: Manifest) -> str:
        """Return the directory of the files: that of the attempt if its rename was interrupted."""
        attempt = partial_name(manifest.step, manifest.attempt)
        return attempt if MANIFEST in self.store.files(attempt) else name_of(manifest.step)

    def _manifest_in(self, name: str) -> Manifest:
        """Read and check the manifest in a directory.

        Raises:
            DamagedCheckpoint: The directory's name does not match, or the checkpoint is incomplete.
        """
        try:
            data, there = self.store.read(f"{name}/{MANIFEST}"), self.store.files(name)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{name}: it has no {MANIFEST}; it is not whole") from None
        except OSError as error:
            raise DamagedCheckpoint(f"{name}: it cannot be read: {error}") from error
        manifest = unsealed(Manifest, data, f"{name}/{MANIFEST}")
        if name not in (name_of(manifest.step), partial_name(manifest.step, manifest.attempt)):
            raise DamagedCheckpoint(f"{name}/{MANIFEST}: it is that of step {manifest.step}")
        _refuse_incomplete(name, manifest)
        for file in manifest.files:
            if file.name not in there:
                raise DamagedCheckpoint(f"{name}/{file.name}: the file is missing")
            if there[file.name] != file.size:
                size = f"{there[file.name]} bytes, {file.size} were written"
                raise DamagedCheckpoint(f"{name}/{file.name}: it has {size}")
        return manifest

    def verify(self, step: int) -> Manifest:
        """Read every file of the checkpoint of ``step`` and compare its digest with the manifest.

        Raises:
            DamagedCheckpoint: The checkpoint does not exist, or a file is missing or damaged.
        """
        for _ in range(_LOOKS):
            names, manifest = self._names(), self.manifest(step)
            name = self.directory(manifest)
            try:
                return self._verified(name, manifest)
            except DamagedCheckpoint as error:
                damage = error
            if self._is_settled(names, [Found(name, step, manifest, None)]):
                break
        raise damage

    def _verified(self, name: str, manifest: Manifest) -> Manifest:
        for file in manifest.files:
            path = f"{name}/{file.name}"
            try:
                digest = self.store.digest(path)
            except OSError as error:
                raise DamagedCheckpoint(f"{path}: it cannot be read: {error}") from error
            if digest != file.sha256:
                raise DamagedCheckpoint(f"{path}: its SHA-256 is not that in the manifest")
        return manifest

    def newest(self, below: int | None = None) -> tuple[Manifest | None, list[str]]:
        """Return the newest checkpoint that verifies, or None, and the problems of newer ones.

        Args:
            below: It must be of an earlier step than this one.
        """
        for _ in range(_LOOKS):
            names, problems, damaged = self._names(), list[str](), list[Found]()
            whole: Manifest | None = None
            for entry in reversed([e for e in self._looked_at() if e.step is not None]):
                if below is not None and (entry.step or 0) >= below:
                    continue
                try:
                    if entry.manifest is None:
                        raise DamagedCheckpoint(str(entry.problem))
                    whole = self._verified(entry.name, entry.manifest)
                    break
                except DamagedCheckpoint as error:
                    problems.append(str(error))
                    damaged.append(entry)
            if self._is_settled(names, damaged):
                break
        return whole, problems

    # --- writing ---

    def receipts(
        self, directory: str, attempt: str, known: Mapping[tuple[str, int], Receipt] | None = None
    ) -> dict[tuple[str, int], Receipt]:
        """Return the receipts of ``attempt`` by (group, rank) whose files have the right sizes.

        Args:
            known: Receipts that an earlier call returned; this call does not read them again.
        """
        found = dict(known or {})
        seen = {receipt_name(*place) for place in found}
        there = self.store.files(directory)
        for name in there:
            if not name.endswith(".receipt") or name in seen:
                continue
            try:
                receipt = unsealed(Receipt, self.store.read(f"{directory}/{name}"), name)
            except (DamagedCheckpoint, FileNotFoundError) as error:
                logger.warning("a receipt in %s cannot be used: %s", directory, error)
                continue
            fits = all(there.get(file.name) == file.size for file in receipt.files)
            if fits and receipt.attempt == attempt:
                found[receipt.group, receipt.rank] = receipt
        return found

    def deliver(self, directory: str, receipt: Receipt) -> None:
        """Write a rank's receipt, which confirms that its files are complete."""
        path = f"{directory}/{receipt_name(receipt.group, receipt.rank)}"
        self.store.write(path, sealed(receipt))

    def publish(self, directory: str, manifest: Manifest) -> None:
        """Publish the checkpoint of a step: write the manifest, then rename the directory.

        Checkpoints of later steps belong to a history that the job has abandoned. This method
        renames them, so they are no longer listed as checkpoints. `prune` removes them once the job
        has passed their step.

        Raises:
            Passed: The job has published a later step in this generation of its bus, or a
                checkpoint of this state has more groups.
        """
        self._refuse_poorer(manifest)
        self._give_up_after(manifest.step, life_of(manifest.attempt))
        self.store.write(f"{directory}/{MANIFEST}", sealed(manifest))
        try:
            self.store.rename(directory, name_of(manifest.step))
        except OSError as error:
            if not self._is_there(manifest):
                raise
            text = "the checkpoint of step %d is whole, though it was not published to the end: %s"
            logger.warning(text, manifest.step, error)

    def _is_there(self, manifest: Manifest) -> bool:
        """Return whether this checkpoint is complete, under either of its names."""
        with suppress(DamagedCheckpoint):
            return self._manifest_in(self.directory(manifest)).attempt == manifest.attempt
        return False

    def _refuse_poorer(self, manifest: Manifest) -> None:
        here = (e.manifest for e in self.found() if e.step == manifest.step and e.problem is None)
        for there in here:
            if there is None or (there.scopes, there.ranks) != (manifest.scopes, manifest.ranks):
                continue
            if more := sorted(set(there.groups) - set(manifest.groups)):
                names = ", ".join(more)
                raise Passed(f"that of the same state is there, which has group {names}, too")

    def refuse_passed(self, step: int, attempt: str) -> None:
        """Raise Passed if the job of ``attempt`` has published a later step."""
        if any((_begun(name) or 0) > step for name in self.store.directories()):
            self._later(step, life_of(attempt))

    def _later(self, step: int, life: str) -> list[Found]:
        """Return the checkpoints after ``step``. Raises Passed if one is of ``life``."""
        later = [e for e in self.found() if e.step is not None and e.step > step]
        for entry in later:
            if life and entry.manifest is not None and life_of(entry.manifest.attempt) == life:
                raise Passed(f"that of step {entry.step} is there already")
        return later

    def give_up_tainted(self, sound: int) -> int | None:
        """Rename the checkpoints after step ``sound``, whose states may be wrong.

        Returns:
            The step of the newest checkpoint that is kept. None if there is none; then no
            checkpoint is renamed, because one of them may be right.
        """
        kept = [e.step for e in self.found() if e.step is not None and e.problem is None]
        kept = [step for step in kept if step <= sound]
        if kept:
            self._give_up_after(sound, life="")
        return max(kept, default=None)

    def _give_up_after(self, step: int, life: str) -> None:
        """Rename the checkpoints after ``step``, which the job has abandoned.

        The rename precedes the write of the manifest. After a kill in between, the newest
        checkpoint is the one from which the job resumed.
        """
        while later := self._later(step, life):
            for entry in later:  # a rename can reveal an older checkpoint of the same step
                assert entry.step is not None
                aside = partial_name(entry.step, "given-up")
                logger.warning(
                    "%s is %s now: the job has gone on from before it, and is at step %d",
                    entry.name,
                    aside,
                    step,
                )
                self.store.rename(entry.name, aside)

    def prune(self, keep: int) -> list[str]:
        """Remove what is `surplus`; log a warning for each directory that cannot be removed.

        Returns:
            The names of the removed directories.
        """
        names = self.surplus(keep)
        failed = self.remove(names)
        return [name for name in names if name not in failed]

    def surplus(self, keep: int) -> list[str]:
        """Return the names of old checkpoints and of the remains of attempts at them.

        Args:
            keep: Number of newest checkpoints with complete manifests to keep; 0 keeps all.
        """
        entries = self.found()
        usable = [e for e in entries if e.step is not None and e.problem is None]
        newest = usable[-1].step if usable else None
        gone = [e.name for e in usable[:-keep]] if keep > 0 else []
        kept = {e.name for e in usable[-keep:]} if keep > 0 else set()
        oldest = min((e.step for e in usable if e.name in kept and e.step is not None), default=0)
        for entry in entries:
            if entry.step is None:
                begun = _begun(entry.name)
                if newest is not None and begun is not None and begun <= newest:
                    gone.append(entry.name)
            elif entry.problem is not None and entry.step < oldest:
                gone.append(entry.name)
        return gone

    def leftovers(self) -> list[str]:
        """Return the directories of attempts that are incomplete or partly removed.

        They can become checkpoints only if a process is still writing them. The list does not
        include complete checkpoints that the job has abandoned and renamed.
        """
        names = [name for name in self.store.directories() if PARTIAL in name and _is_ours(name)]
        return [
            name
            for name in names
            if name.partition(PARTIAL)[2].startswith(REMOVED) or self._lacks_manifest(name)
        ]

    def _lacks_manifest(self, name: str) -> bool:
        try:
            return MANIFEST not in self.store.files(name)
        except OSError:
            return False  # it may have one

    def remove(self, names: Iterable[str]) -> dict[str, OSError]:
        """Remove directories, ignoring those that do not exist.

        Returns:
            The errors of those that cannot be removed, each of which is logged as a warning.
        """
        failed = {}
        for name in names:
            try:
                self.store.remove(name)
            except FileNotFoundError:  # another writer of this job may remove it, too
                continue
            except OSError as error:
                logger.warning("%s at %s cannot be removed: %s", name, self.store.url, error)
                failed[name] = error
        return failed


def _age(entry: Found) -> tuple[int, bool, float, bool]:
    """Return a sort key of a directory.

    Of two complete checkpoints of a step, the one written later is last, because the job may have
    resumed from an earlier step in between. A directory without a manifest is first, because an
    object store may still be copying it from another directory.
    """
    written = 0.0 if entry.manifest is None else entry.manifest.written_at
    is_named = entry.name == name_of(entry.step or 0)
    return (entry.step or 0, entry.manifest is not None, written, is_named)


def _surplus(entry: Found) -> Found:
    return Found(entry.name, None, None, f"{entry.name}: step-{entry.step} is there without it")


def _is_ours(name: str) -> bool:
    return _begun(name) is not None


def _begun(name: str) -> int | None:
    """Return the step of a checkpoint or an attempt, or None for another directory."""
    return step_of(name.partition(PARTIAL)[0])


def _refuse_incomplete(name: str, manifest: Manifest) -> None:
    """Raise DamagedCheckpoint unless every rank of the manifest's groups has its two files."""
    listed = [file.name for file in manifest.files]
    if len(set(listed)) != len(listed):
        raise DamagedCheckpoint(f"{name}/{MANIFEST}: a file is listed twice")
    for group, rank in _ranks_of(manifest):
        if set(manifest.files_of(group, rank)) != {"json", "safetensors"}:
            stem = file_stem(group, rank)
            raise DamagedCheckpoint(f"{name}/{MANIFEST}: it lacks files of {stem}")


def _ranks_of(manifest: Manifest) -> Iterator[tuple[str, int]]:
    for group in {manifest.writer, *manifest.groups}:
        for rank in range(manifest.ranks):
            yield group, rank


# --- the checkpoint that a job resumes from ---


def choose(
    checkpoints: Checkpoints, resume: bool | int, below: int | None = None
) -> Manifest | None:
    """Return the checkpoint to resume from, or None to start from scratch.

    Args:
        checkpoints: The checkpoints of the store.
        resume: The setting of `fft.checkpoints.plan.Checkpointing`.
        below: The newest one must be of an earlier step than this one.

    Raises:
        CheckpointError: Checkpoints exist but ``resume`` is False, all of them are unusable, or the
            store cannot be read.
        DamagedCheckpoint: The checkpoint of the requested step does not exist or is damaged.
    """
    url = checkpoints.store.url
    try:
        if resume is False:
            _refuse_used(checkpoints)
            return None
        if resume is not True:
            return checkpoints.manifest(resume)
        manifest, problems = checkpoints.newest(below)
        _name_leftovers(checkpoints, manifest)
        _refuse_foreign(checkpoints, manifest)
    except OSError as error:
        raise CheckpointError(f"the checkpoints at {url} cannot be read: {error}") from error
    for problem in problems:
        logger.error("a checkpoint is not used: %s", problem)
    if manifest is None and problems:
        raise CheckpointError(
            f"no checkpoint at {url} can be used: {'; '.join(problems)}. To begin anew, name "
            "another place"
        )
    return manifest


def _name_leftovers(checkpoints: Checkpoints, manifest: Manifest | None) -> None:
    """Log a warning if the chosen checkpoint lacks its final name, or all are unfinished."""
    if manifest is None:
        if left := [entry.name for entry in checkpoints.found() if entry.step is None]:
            names = ", ".join(left)
            logger.warning("%s has only unfinished checkpoints: %s", checkpoints.store.url, names)
    elif (name := checkpoints.directory(manifest)) != name_of(manifest.step):
        logger.warning(
            "the checkpoint of step %d is in %s: whole, but cut off before it got its name",
            manifest.step,
            name,
        )


def _refuse_foreign(checkpoints: Checkpoints, chosen: Manifest | None) -> None:
    """Raise CheckpointError if checkpoints are not of the run of the chosen one.

    A run consists of starts, each of which resumed from a checkpoint of an earlier one. An imported
    checkpoint belongs to any run. If the checkpoint from which a start resumed is gone or damaged,
    all earlier checkpoints may be of its run.
    """
    if chosen is None:
        return
    rest = [e.manifest for e in checkpoints.found() if e.step is not None and e.manifest]
    known = {_as_origin(each) for each in rest}
    related, rest = [chosen], [each for each in rest if each != chosen]
    for one in related:
        related += (near := [each for each in rest if _are_related(one, each, known)])
        rest = [each for each in rest if each not in near]
    if rest:
        parts = [sorted(each.step for each in part) for part in (related, rest)]
        names = [", ".join(map(name_of, part)) for part in parts]
        raise CheckpointError(
            f"{checkpoints.store.url} has checkpoints of different runs: {names[0]} of one, "
            f"{names[1]} of another. Move those of the run that is not to go on to another place"
        )


def _are_related(one: Manifest, other: Manifest, known: Collection[Origin]) -> bool:
    """Return whether two checkpoints are, or may be, of one start or of successive starts.

    Args:
        known: The checkpoints that exist; a start that resumed from another one may have followed
            any start. Publishing removes all later steps, so its steps are the later ones.
    """
    lives = {life_of(each.attempt) for each in (one, other)}
    places = [{each.resumed_from, _as_origin(each)} for each in (one, other)]
    is_unknown = max(one, other, key=lambda each: each.step).resumed_from not in {None, *known}
    return len(lives) == 1 or "" in lives or is_unknown or bool((places[0] & places[1]) - {None})


def _as_origin(manifest: Manifest) -> Origin:
    return Origin(step=manifest.step, lineage=manifest.lineage)


def _refuse_used(checkpoints: Checkpoints) -> None:
    """Raise CheckpointError if checkpoints exist, because a new job must not add its own."""
    steps = [entry.name for entry in checkpoints.found() if entry.step is not None]
    if steps:
        raise CheckpointError(
            f"{checkpoints.store.url} has checkpoints already (the newest: {steps[-1]}): go on "
            "from them by --resume (resume=True), or name another place for those of a new job"
        )
