"""The checkpoints of a store: lists, verifies, publishes and prunes them.

This module reads and writes files through the store; it does not interpret the ranks' files.

Jobs publish, replace and remove checkpoints while other processes read. A reader that finds a
problem therefore reads again, and reports the problem only if the store has not changed in between.

A checkpoint exists once its manifest exists, which is the last file written to the directory of the
attempt. The renaming that follows may be interrupted at any point; the checkpoint is then read
under the attempt's name. If a step has two complete checkpoints, the later one counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fft.durable.manifest import (
    DamagedCheckpoint,
    Manifest,
    Receipt,
    file_stem,
    life_of,
    name_of,
    partial_name,
    receipt_name,
    sealed,
    step_of,
    unsealed,
)
from fft.durable.stores import MANIFEST, PARTIAL, REMOVED, Store
from fft.errors import CheckpointError

logger = logging.getLogger(__name__)

_LOOKS = 20
"""Maximum number of reads. Each repetition follows a change by a writer, which makes one every few
seconds."""


class Passed(CheckpointError):
    """The job does not need this checkpoint: it has published a later step or a fuller one."""


@dataclass(frozen=True)
class Found:
    """A directory of the store that holds a checkpoint or an attempt at one."""

    name: str
    step: int | None
    """Step of the checkpoint; None if it is unfinished, is being written, or is superseded."""
    manifest: Manifest | None
    problem: str | None
    """Why it cannot be used; None if no problem is known."""


class Checkpoints:
    """All checkpoints in one store. Every method raises OSError if the store is unavailable."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def found(self) -> list[Found]:
        """Return all checkpoints by step, and the unfinished ones; read only manifests."""
        entries = self._looked_at()
        whole = {e.step: e for e in entries if e.manifest is not None}
        entries = [
            _surplus(e) if e.step in whole and e is not whole[e.step] else e for e in entries
        ]
        return sorted(entries, key=lambda e: (e.step is None, e.step or 0, e.name))

    def _looked_at(self) -> list[Found]:
        """Return a consistent list of all directories by age; the newest of a step comes last."""
        for _ in range(_LOOKS):
            names = self._names()
            entries = [self._look(name) for name in names]
            if self._is_settled(names, [e for e in entries if e.manifest is None]):
                break
        return sorted(entries, key=_age)

    def _names(self) -> list[str]:
        return list(filter(_is_ours, self.store.directories()))

    def _is_settled(self, names: Sequence[str], problems: Sequence[Found]) -> bool:
        """Whether the store has not changed since ``problems`` were found in ``names``."""
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

    def directory(self, manifest: Manifest) -> str:
        """Return the directory of its files: the attempt's, if publishing was interrupted."""
        attempt = partial_name(manifest.step, manifest.attempt)
        return attempt if MANIFEST in self.store.files(attempt) else name_of(manifest.step)

    def _manifest_in(self, name: str) -> Manifest:
        """Read and check the manifest in a directory.

        Raises:
            DamagedCheckpoint: The directory's name does not match, or the checkpoint is incomplete.
        """
        try:
            data = self.store.read(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{name}: it has no {MANIFEST}; it is not whole") from None
        manifest = unsealed(Manifest, data, f"{name}/{MANIFEST}")
        if name not in (name_of(manifest.step), partial_name(manifest.step, manifest.attempt)):
            raise DamagedCheckpoint(f"{name}/{MANIFEST}: it is that of step {manifest.step}")
        _refuse_incomplete(name, manifest)
        there = self.store.files(name)
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

    def newest(self) -> tuple[Manifest | None, list[str]]:
        """Return the newest checkpoint that verifies, or None, and the problems of newer ones."""
        for _ in range(_LOOKS):
            names, problems, damaged = self._names(), list[str](), list[Found]()
            whole: Manifest | None = None
            for entry in reversed([e for e in self._looked_at() if e.step is not None]):
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
        """Return the receipts of ``attempt``, by (group, rank), whose files have the right sizes.

        Args:
            known: Receipts that an earlier call has returned; they are not read again.
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
        """Make this the checkpoint of its step: write the manifest, then rename the directory.

        Checkpoints of later steps belong to a history that the job has abandoned. They are renamed
        so that they are no longer listed as checkpoints, and `prune` removes them once the job has
        passed their step.

        Raises:
            Passed: The job has published a later step in this life of its bus, as its groups may
                write at the same time; or the same state exists with more groups.
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
        """Whether this checkpoint is complete, under either of its names."""
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
        """Raise Passed if the job that writes ``attempt`` has published a later step meanwhile."""
        if any((_begun(name) or 0) > step for name in self.store.directories()):
            self._later(step, life_of(attempt))

    def _later(self, step: int, life: str) -> list[Found]:
        """Return the checkpoints after ``step``. Raises Passed if ``life`` has written one."""
        later = [e for e in self.found() if e.step is not None and e.step > step]
        for entry in later:
            if life and entry.manifest is not None and life_of(entry.manifest.attempt) == life:
                raise Passed(f"that of step {entry.step} is there already")
        return later

    def _give_up_after(self, step: int, life: str) -> None:
        """Rename the checkpoints after ``step``, which the job has abandoned.

        This comes before the manifest is written: after a kill in between, the newest checkpoint is
        the one from which the job resumed.
        """
        while later := self._later(step, life):
            for entry in later:  # renaming one can uncover an older checkpoint of the same step
                assert entry.step is not None
                aside = partial_name(entry.step, "given-up")
                logger.warning(
                    "%s is %s now: the job has gone on from before it, and is at step %d",
                    entry.name,
                    aside,
                    step,
                )
                self.store.rename(entry.name, aside)

    def prune(self, keep: int, besides: Sequence[str] = ()) -> list[str]:
        """Remove old checkpoints and the remains of attempts at them.

        Args:
            keep: Number of newest checkpoints to keep, complete by their manifests; 0 keeps all.
            besides: Names of directories to keep as well.

        Returns:
            The names of the removed directories.
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
        return self.remove([name for name in gone if name not in besides])

    def leftovers(self) -> list[str]:
        """Return the directories of attempts that are incomplete or half removed.

        They can become checkpoints only if a process is still writing them. A complete checkpoint
        that was renamed because the job had abandoned it is not among them.
        """
        names = [name for name in self.store.directories() if PARTIAL in name and _is_ours(name)]
        return [
            name
            for name in names
            if name.partition(PARTIAL)[2].startswith(REMOVED)
            or MANIFEST not in self.store.files(name)
        ]

    def remove(self, names: Sequence[str]) -> list[str]:
        """Remove directories, ignoring those that are already gone; return ``names``."""
        for name in names:
            with suppress(FileNotFoundError):  # another writer of this job may remove it, too
                self.store.remove(name)
        return list(names)


def _age(entry: Found) -> tuple[int, bool, float, bool]:
    """Return a sort key. If a step has two complete checkpoints, the one written later comes last,
    because the job may have resumed from an earlier step in between. One without a manifest comes
    first, because an object store may still be copying it from another directory."""
    written = 0.0 if entry.manifest is None else entry.manifest.written_at
    is_named = entry.name == name_of(entry.step or 0)
    return (entry.step or 0, entry.manifest is not None, written, is_named)


def _surplus(entry: Found) -> Found:
    return Found(entry.name, None, None, f"{entry.name}: step-{entry.step} is there without it")


def _is_ours(name: str) -> bool:
    return _begun(name) is not None


def _begun(name: str) -> int | None:
    """Return the step of a checkpoint or of an attempt at one; None for another directory."""
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
