"""Copies of the state in the memory of a host: a folder in shared memory in the form of a store.

After some commits each rank writes its files into the directory of an attempt, as for a durable
checkpoint, and last its *part*: a manifest of its own files alone. No rank waits for another. A
resume combines the parts of one attempt on all hosts into the manifest of a checkpoint (`chosen`),
which is then loaded like any other. Each group writes the shared state, so that the files of one
group, or of several groups that hold different ranks, are enough.

A host that lacks files of the chosen copy has their addresses on other hosts in `SOURCES`, from
which `fft.checkpoints.peers` fetches them. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from fft.checkpoints.files import (
    Checkpoints,
    DamagedCheckpoint,
    File,
    Manifest,
    Strict,
    file_stem,
    partial_name,
    sealed,
    unsealed,
)
from fft.checkpoints.stores import MANIFEST, PARTIAL, LocalStore

PART = ".part"
"""Suffix of the part of a rank, which is written when its files are complete."""
SOURCES = "sources.json"
"""File in the directory of a chosen copy: size, digest and addresses of files on other hosts."""
_READERS = 8
"""Number of files or hosts that are read at the same time."""
_OWN = {"files", "writer", "written_at", "resumed_from"}
"""Fields in which the parts of one copy may differ."""

Place = tuple[str, int]
"""Group and rank."""


class Listing(Strict):
    """The parts on one host by directory and file stem, and why others cannot be used."""

    parts: dict[str, dict[str, Manifest]]
    problems: tuple[str, ...]


class Checked(Strict):
    """The parts in one directory of a host whose files have the right digests, by file stem."""

    stems: tuple[str, ...]
    problems: tuple[str, ...]


class Choice(Strict):
    """The copy to resume from."""

    manifest: Manifest
    sources: dict[str, tuple[tuple[int, str], ...]]
    """For each file of the manifest the hosts that have it, as numbers, and its name there."""


class CopiesOfHost(Protocol):
    """The copies on one host."""

    def listing(self) -> Listing:
        """Return what the host has, without reading the files."""

    def checked(self, name: str) -> Checked:
        """Read the files in a directory and compare their digests."""


def deliver(store: LocalStore, directory: str, part: Manifest, rank: int) -> None:
    """Write the part of a rank of group ``part.writer``, which confirms that its files are
    complete."""
    store.write(f"{directory}/{file_stem(part.writer, rank)}{PART}", sealed(part))


def keep_newest(root: Path, stem: str, below: int) -> None:
    """Remove the files of a rank in all copies but its newest complete one.

    Args:
        root: The folder of the copies.
        stem: Stem of the files of the rank.
        below: Step of the copy that begins; its own directory is not touched.
    """
    own = [(step, path) for path in root.glob("step-*") if (step := step_of(path.name)) != below]
    whole = [step for step, path in own if (path / f"{stem}{PART}").exists() and step < below]
    for step, path in own:
        if step == max(whole, default=None):
            continue
        for name in (MANIFEST, f"{stem}{PART}", f"{stem}.json", f"{stem}.safetensors"):
            (path / name).unlink(missing_ok=True)
        if not any(path.glob(f"*{PART}")):  # else another rank still has files there
            shutil.rmtree(path, ignore_errors=True)


def step_of(name: str) -> int:
    """Return the step of the copy in a directory."""
    return int(name.partition(PARTIAL)[0].removeprefix("step-"))


class HeldCopies:
    """The copies in one folder, as `fft run` sees them. Methods may raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = Checkpoints(LocalStore(root))

    def steps(self) -> list[int]:
        """Return the steps of which at least one rank has a complete copy."""
        return sorted({step_of(path.parent.name) for path in self.root.glob(f"step-*/*{PART}")})

    def listing(self) -> Listing:
        """See `CopiesOfHost.listing`."""
        parts, problems = dict[str, dict[str, Manifest]](), list[str]()
        for path in sorted(self.root.glob(f"step-*/*{PART}")):
            name = path.parent.name
            try:
                part = unsealed(Manifest, path.read_bytes(), f"{name}/{path.name}")
            except DamagedCheckpoint as error:
                problems.append(str(error))
                continue
            if directory_of(part) == name:
                parts.setdefault(name, {})[path.stem] = part
        return Listing(parts=parts, problems=tuple(problems))

    def checked(self, name: str) -> Checked:
        """See `CopiesOfHost.checked`."""

        def problem_of(file: File) -> str | None:
            try:
                is_same = self.checkpoints.store.digest(f"{name}/{file.name}") == file.sha256
            except OSError as error:
                return f"{name}/{file.name}: it cannot be read: {error}"
            return None if is_same else f"{name}/{file.name}: its SHA-256 is not that of its copy"

        parts = self.listing().parts.get(name, {})
        files = [file for part in parts.values() for file in part.files]
        with ThreadPoolExecutor(_READERS) as pool:
            found = dict(zip(files, pool.map(problem_of, files), strict=True))
        sound = [
            stem
            for stem, part in parts.items()
            if len(part.files) == 2 and not any(found[file] for file in part.files)
        ]
        return Checked(stems=tuple(sound), problems=tuple(filter(None, found.values())))

    def adopt(self, choice: Choice, urls: Sequence[str], here: int | None) -> None:
        """Make the chosen copy ready to be loaded by the ranks of this host.

        Args:
            urls: The addresses of the hosts by number.
            here: Number of this host, or None if it has nothing.
        """
        name, away = directory_of(choice.manifest), dict[str, tuple[int, str, list[str]]]()
        folder = self.root / name
        folder.mkdir(mode=0o700, exist_ok=True)
        for file in choice.manifest.files:
            sources = choice.sources[file.name]
            own = next((there for number, there in sources if number == here), None)
            if own == file.name:
                continue
            (folder / file.name).unlink(missing_ok=True)  # it is damaged
            if own is not None:
                os.link(folder / own, folder / file.name)
            else:
                places = [f"{urls[number]}/{name}/{there}" for number, there in sources]
                away[file.name] = file.size, file.sha256, places
        store = self.checkpoints.store
        if away:
            store.write(f"{name}/{SOURCES}", json.dumps(away).encode())
        store.write(f"{name}/{MANIFEST}", sealed(choice.manifest))

    def remove_others(self, kept: Manifest | None) -> None:
        """Remove all copies but ``kept``."""
        store = self.checkpoints.store
        for name in store.directories():
            if kept is None or name != directory_of(kept):
                store.remove(name)


def chosen(
    hosts: Sequence[CopiesOfHost], below: int | None = None
) -> tuple[Choice | None, list[str]]:
    """Return the newest copy whose parts agree and whose files verify.

    A copy that has the own state of all groups (buffers, random states) is preferred to a newer
    one that lacks some.

    Args:
        hosts: The copies of all hosts.
        below: The copy must be of an earlier step.

    Returns:
        The copy, or None; and why other copies, or parts of this one, are not used.
    """
    problems, partial = list[str](), list[Choice]()
    with ThreadPoolExecutor(_READERS) as pool:
        listings = list(pool.map(lambda host: host.listing(), hosts))
        for listing in listings:
            problems += listing.problems
        names = {name for listing in listings for name in listing.parts}
        for name in sorted(names, key=step_of, reverse=True):
            if below is not None and step_of(name) >= below:
                continue
            there = [number for number, each in enumerate(listings) if name in each.parts]
            parts = [part for number in there for part in listings[number].parts[name].values()]
            if (
                odd := next((p for p in parts if _common(p) != _common(parts[0])), None)
            ) is not None:
                rank = _rank_of(odd.files[0].name.rpartition(".")[0])
                problems.append(
                    f"{name}: group {odd.writer} rank {rank} has another lineage or place in the "
                    "data"
                )
                continue
            checked = pool.map(lambda number, name=name: hosts[number].checked(name), there)
            found = dict(zip(there, checked, strict=True))
            problems += [problem for each in found.values() for problem in each.problems]
            held = dict[Place, tuple[Manifest, list[int]]]()
            for number, each in found.items():
                for stem in each.stems:
                    part = listings[number].parts[name][stem]
                    same = held.setdefault((part.writer, _rank_of(stem)), (part, []))
                    if same[0].files == part.files:
                        same[1].append(number)
            groups = sorted({group for part in parts for group in part.groups})
            choice = _combined(parts, groups, held)
            if choice is not None and set(choice.manifest.groups) >= set(groups):
                return choice, problems
            partial += filter(None, (choice,))
    return next(iter(partial), None), problems


def _combined(
    parts: Sequence[Manifest],
    groups: Sequence[str],
    held: dict[Place, tuple[Manifest, list[int]]],
) -> Choice | None:
    """Return a copy of the sound files ``held``.

    None if a part of the shared state is in none: the job ended in the midst of the copy, or
    files are damaged.
    """
    ranks = range(parts[0].ranks)
    whole = [group for group in groups if all((group, rank) in held for rank in ranks)]
    writer = next(iter(whole or groups))
    places = [((group, rank), (group, rank)) for group in whole for rank in ranks]
    if not whole:  # each rank from a group that has it
        for rank in ranks:
            if (place := next(((g, rank) for g in groups if (g, rank) in held), None)) is None:
                return None
            places.append(((writer, rank), place))
    files, sources = list[File](), dict[str, tuple[tuple[int, str], ...]]()
    for target, place in places:
        part, numbers = held[place]
        for file in part.files:
            name = f"{file_stem(*target)}.{file.name.rpartition('.')[2]}"
            files.append(file.model_copy(update={"name": name}))
            sources[name] = tuple((number, file.name) for number in numbers)
    origins = [part.resumed_from for part in parts if part.resumed_from is not None]
    update = {"writer": writer, "groups": tuple(whole), "files": tuple(files)}
    manifest = parts[0].model_copy(update=update | {"resumed_from": next(iter(origins), None)})
    return Choice(manifest=manifest, sources=sources)


def directory_of(manifest: Manifest) -> str:
    """Return the name of the directory of a copy."""
    return partial_name(manifest.step, manifest.attempt)


def _rank_of(stem: str) -> int:
    return int(stem.rpartition("r")[2])


def _common(part: Manifest) -> dict[str, object]:
    return part.model_dump(exclude=_OWN)
