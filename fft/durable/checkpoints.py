"""The checkpoints of a store: which there are, whether each is whole, and which are kept.

Reads and writes files by the store. Nothing here knows what is in them.

Jobs publish, replace and remove checkpoints while others read. A reader that finds a problem
therefore looks again, and reports the problem only if the store has not changed in between.

A checkpoint is there from the moment when its manifest is, which is written last, into the
directory of the attempt. That it gets its own name then may be cut off at any point: it is read
under the attempt's name then. Of two whole ones of a step, the later counts.
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
from fft.util.errors import FftError

logger = logging.getLogger(__name__)

_LOOKS = 20
"""At most; each further look follows a change by a writer, which makes one every few seconds."""


class Passed(FftError):
    """The same job has published a checkpoint of a later step meanwhile."""


@dataclass(frozen=True)
class Found:
    """A directory of the store that is, or was to be, a checkpoint."""

    name: str
    step: int | None
    """None: it was not finished, is being written, or is not needed any more."""
    manifest: Manifest | None
    problem: str | None
    """Why it cannot be used; None: nothing is known of it that speaks against it."""


class Checkpoints:
    """All checkpoints at one place. Every method may raise OSError: the store is not there."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def found(self) -> list[Found]:
        """All of them by step, and what is unfinished. Reads manifests, and no other file."""
        entries = self._looked_at()
        whole = {e.step: e for e in entries if e.manifest is not None}
        entries = [
            _surplus(e) if e.step in whole and e is not whole[e.step] else e for e in entries
        ]
        return sorted(entries, key=lambda e: (e.step is None, e.step or 0, e.name))

    def _looked_at(self) -> list[Found]:
        """Return all directories by age, as they were at one moment: of a step the newest last."""
        for _ in range(_LOOKS):
            names = self._names()
            entries = [self._look(name) for name in names]
            if self._is_settled(names, [e for e in entries if e.manifest is None]):
                break
        return sorted(entries, key=_age)

    def _names(self) -> list[str]:
        return list(filter(_is_ours, self.store.directories()))

    def _is_settled(self, names: Sequence[str], problems: Sequence[Found]) -> bool:
        """Whether ``problems``, found in ``names``, are no effect of a write in between."""
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
        """Of the checkpoint of ``step``, whose files are there with their sizes.

        Raises DamagedCheckpoint.
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
        """Where its files are: the publication may have been cut off."""
        attempt = partial_name(manifest.step, manifest.attempt)
        return attempt if MANIFEST in self.store.files(attempt) else name_of(manifest.step)

    def _manifest_in(self, name: str) -> Manifest:
        """Of what a directory holds. Raises DamagedCheckpoint: it is not that which its name says,
        or not whole."""
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
        """Read every file of the checkpoint of ``step``. Raises DamagedCheckpoint."""
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
        """The newest that verifies, if one does; and what is wrong with those that are newer."""
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
        """What ranks have delivered for ``attempt``, and is there with its size.

        ``known``: what an earlier call has found, which is not read again.
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
        """Say that a rank's files are there as a whole."""
        path = f"{directory}/{receipt_name(receipt.group, receipt.rank)}"
        self.store.write(path, sealed(receipt))

    def publish(self, directory: str, manifest: Manifest) -> None:
        """Let it be the checkpoint of its step, which it is from its manifest on.

        Those of later steps belong to a past that the job has given up: they get another name, by
        which they are not found any more, and go with the next `prune` after their step. Raises
        Passed: one of them is of the job's own present, where groups write side by side; or that
        of the same state is there, with more groups.
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
        """Whether it is whole, by whatever name."""
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
        """Raise Passed if the job that makes ``attempt`` has published a later step meanwhile."""
        if any((_begun(name) or 0) > step for name in self.store.directories()):
            self._later(step, life_of(attempt))

    def _later(self, step: int, life: str) -> list[Found]:
        """Those after ``step``. Raises Passed: one of them is of this life of the bus."""
        later = [e for e in self.found() if e.step is not None and e.step > step]
        for entry in later:
            if life and entry.manifest is not None and life_of(entry.manifest.attempt) == life:
                raise Passed(f"that of step {entry.step} is there already")
        return later

    def _give_up_after(self, step: int, life: str) -> None:
        """Before the manifest is there: a kill in between leaves what the job has begun with."""
        while later := self._later(step, life):
            for entry in later:  # what one of them had made superfluous is found once it is gone
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
        """Remove all but the newest ``keep`` that are whole as far as their manifests tell, and
        what attempts at older ones have left; not ``besides``. The names of what was removed."""
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
        """What attempts have left that can become checkpoints only if somebody still writes them.

        What was given up for an older one is none: it is whole.
        """
        names = [name for name in self.store.directories() if PARTIAL in name and _is_ours(name)]
        return [
            name
            for name in names
            if name.partition(PARTIAL)[2].startswith(REMOVED)
            or MANIFEST not in self.store.files(name)
        ]

    def remove(self, names: Sequence[str]) -> list[str]:
        """Remove directories; those that are gone already are no error. Returns ``names``."""
        for name in names:
            with suppress(FileNotFoundError):  # another writer of this job removes it, too
                self.store.remove(name)
        return list(names)


def _age(entry: Found) -> tuple[int, bool, float, bool]:
    """Sort key. Of two whole ones of a step, the later counts: the job may have begun anew before
    it. One without a manifest counts least: an object store copies it from another directory."""
    written = 0.0 if entry.manifest is None else entry.manifest.written_at
    is_named = entry.name == name_of(entry.step or 0)
    return (entry.step or 0, entry.manifest is not None, written, is_named)


def _surplus(entry: Found) -> Found:
    return Found(entry.name, None, None, f"{entry.name}: step-{entry.step} is there without it")


def _is_ours(name: str) -> bool:
    return _begun(name) is not None


def _begun(name: str) -> int | None:
    """The step that a directory is, or was to be, the checkpoint of."""
    return step_of(name.partition(PARTIAL)[0])


def _refuse_incomplete(name: str, manifest: Manifest) -> None:
    """Raise DamagedCheckpoint unless every rank that the manifest speaks of has its two files."""
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
