"""Copies of the state in the memory of a host: a folder in shared memory in the form of a store.

After some commits each rank writes its files into the directory of an attempt, as for a durable
checkpoint, and last its *part*: a manifest of its own files alone. No rank waits for another. A
resume combines the parts of one attempt into the manifest of a checkpoint (`HeldCopies.newest`),
which is then loaded like any other. Each group writes the shared state, so that the files of one
group, or of several groups that hold different ranks, are enough.

This module does not import torch.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fft.checkpoints.files import (
    Checkpoints,
    DamagedCheckpoint,
    File,
    Manifest,
    file_stem,
    partial_name,
    sealed,
    unsealed,
)
from fft.checkpoints.stores import MANIFEST, PARTIAL, LocalStore

PART = ".part"
"""Suffix of the part of a rank, which is written when its files are complete."""
_READERS = 8
"""Number of files that are read at the same time for their digests."""
_OWN = {"files", "writer", "written_at", "resumed_from"}
"""Fields in which the parts of one copy may differ."""

Parts = dict[tuple[str, int], Manifest]
"""The parts of one copy by (group, rank)."""


def deliver(store: LocalStore, directory: str, part: Manifest, rank: int) -> None:
    """Write the part of a rank of group ``part.writer``, which confirms that its files are
    complete."""
    store.write(f"{directory}/{file_stem(part.writer, rank)}{PART}", sealed(part))


def keep_newest(root: Path, group: str, rank: int, below: int) -> None:
    """Remove the files of a rank in all copies but its newest complete one.

    Args:
        root: The folder of the copies.
        below: Step of the copy that begins; its own directory is not touched.
    """
    stem = file_stem(group, rank)
    own = [(step, path) for path in root.glob("step-*") if (step := _step(path.name)) != below]
    whole = [step for step, path in own if (path / f"{stem}{PART}").exists() and step < below]
    for step, path in own:
        if step == max(whole, default=None):
            continue
        for name in (MANIFEST, f"{stem}{PART}", f"{stem}.json", f"{stem}.safetensors"):
            (path / name).unlink(missing_ok=True)
        with suppress(OSError):  # another rank still has files there
            path.rmdir()


def _step(name: str) -> int:
    return int(name.partition(PARTIAL)[0].removeprefix("step-"))


class HeldCopies:
    """The copies in one folder, as `fft run` sees them. Methods may raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = Checkpoints(LocalStore(root))

    def steps(self) -> list[int]:
        """Return the steps of which at least one rank has a complete copy."""
        return sorted({_step(path.parent.name) for path in self.root.glob(f"step-*/*{PART}")})

    def newest(self, below: int | None = None) -> tuple[Manifest | None, list[str]]:
        """Return the newest copy whose parts agree and whose files verify, ready to be loaded.

        A copy that has the own state of all groups (buffers, random states) is preferred to a newer
        one that lacks some.

        Args:
            below: The copy must be of an earlier step.

        Returns:
            The manifest, which is also written into the directory of the copy, or None; and why
            other copies, or parts of this one, are not used.
        """
        problems, partial = list[str](), list[Manifest]()
        names = sorted((p.name for p in self.root.glob("step-*")), key=_step, reverse=True)
        for name in names:
            if below is not None and _step(name) >= below:
                continue
            if not (parts := self._parts(name, problems)):
                continue  # the job ended in the midst of the first part
            try:
                found = self._combined(name, parts, problems)
            except DamagedCheckpoint as error:
                problems.append(str(error))
                continue
            if found is not None and set(found.groups) >= _expected(parts):
                return self._chosen(name, found), problems
            partial += filter(None, (found,))
        if not partial:
            return None, problems
        return self._chosen(_directory(partial[0]), partial[0]), problems

    def _chosen(self, name: str, found: Manifest) -> Manifest:
        self.checkpoints.store.write(f"{name}/{MANIFEST}", sealed(found))
        return found

    def remove_others(self, kept: Manifest | None) -> None:
        """Remove all copies but ``kept``."""
        store = self.checkpoints.store
        for name in store.directories():
            if kept is None or name != _directory(kept):
                store.remove(name)

    def _combined(self, name: str, parts: Parts, problems: list[str]) -> Manifest | None:
        """Return a manifest of the sound files in a directory.

        None if a part of the shared state is in none: the job ended in the midst of the copy, or
        files are damaged. Raises DamagedCheckpoint if the parts do not belong together.
        """
        first = next(iter(parts.values()))
        for place, part in parts.items():
            if _common(part) != _common(first):
                group, rank = place
                raise DamagedCheckpoint(
                    f"{name}: group {group} rank {rank} has another lineage or place in the data"
                )
        sound = self._sound(name, parts, problems)
        ranks, groups = range(first.ranks), sorted(_expected(parts))
        whole = [g for g in groups if all((g, rank) in sound for rank in ranks)]
        writer = next(iter(whole or groups))
        files = [file for g in whole for rank in ranks for file in sound[g, rank]]
        if not whole:  # each rank from a group that has it
            for rank in ranks:
                held = next((sound[g, rank] for g in groups if (g, rank) in sound), ())
                if not held:
                    return None
                files += [self._lent(name, file, writer, rank) for file in held]
        origins = [part.resumed_from for part in parts.values() if part.resumed_from is not None]
        update = {"writer": writer, "groups": tuple(whole), "files": tuple(files)}
        return first.model_copy(update=update | {"resumed_from": next(iter(origins), None)})

    def _parts(self, name: str, problems: list[str]) -> Parts:
        store, found = self.checkpoints.store, Parts()
        for file in sorted(store.files(name)):
            if not file.endswith(PART):
                continue
            try:
                part = unsealed(Manifest, store.read(f"{name}/{file}"), f"{name}/{file}")
            except DamagedCheckpoint as error:
                problems.append(str(error))
                continue
            rank = int(file.removesuffix(PART).rpartition("r")[2])
            if _directory(part) == name:
                found[part.writer, rank] = part
        return found

    def _sound(
        self, name: str, parts: Parts, problems: list[str]
    ) -> dict[tuple[str, int], tuple[File, ...]]:
        """Return the files of the ranks whose digests are right."""

        def problem_of(file: File) -> str | None:
            try:
                is_same = self.checkpoints.store.digest(f"{name}/{file.name}") == file.sha256
            except OSError as error:
                return f"{name}/{file.name}: it cannot be read: {error}"
            return None if is_same else f"{name}/{file.name}: its SHA-256 is not that of its copy"

        files = [file for part in parts.values() for file in part.files]
        with ThreadPoolExecutor(_READERS) as pool:
            found = dict(zip(files, pool.map(problem_of, files), strict=True))
        problems += filter(None, found.values())
        return {
            place: part.files
            for place, part in parts.items()
            if len(part.files) == 2 and not any(found[file] for file in part.files)
        }

    def _lent(self, name: str, file: File, group: str, rank: int) -> File:
        """Give a file of another group the name that it has in ``group``; both stay."""
        new = f"{file_stem(group, rank)}.{file.name.rpartition('.')[2]}"
        if new != file.name:
            target = self.root / name / new
            target.unlink(missing_ok=True)
            os.link(self.root / name / file.name, target)
        return file.model_copy(update={"name": new})


def _directory(manifest: Manifest) -> str:
    return partial_name(manifest.step, manifest.attempt)


def _expected(parts: Parts) -> set[str]:
    """Return the groups of the epoch in which a copy was made."""
    return {group for part in parts.values() for group in part.groups}


def _common(part: Manifest) -> dict[str, object]:
    return part.model_dump(exclude=_OWN)
