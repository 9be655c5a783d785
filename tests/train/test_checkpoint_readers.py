"""Tests that read checkpoints while a job publishes, replaces and removes them.

The writer makes one change to the store at a time, and the reader's calls decide when. Each run
lets the writer begin at another call of the reader.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import manifest_of, published, written
from typer.testing import CliRunner

from fft.checkpoints.files import Checkpoints, partial_name, sealed
from fft.checkpoints.stores import MANIFEST, Store, UrlStore, open_store
from fft.cli import app

LIMIT_S = 60.0


class Turns:
    """Lets a writer's thread make one change at a time, whenever a reader asks for it."""

    def __init__(self) -> None:
        self._go, self._came = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._is_free = self._is_over = False

    def slowed(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``change``, which waits for its turn when the writer makes it."""

        def changed(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is self._thread and not self._is_free:
                self._came.release()
                assert self._go.acquire(timeout=LIMIT_S)
            return change(*arguments, **options)

        return changed

    def start(self, write: Callable[[], object]) -> None:
        """Run ``write`` up to its first change."""

        def run() -> None:
            try:
                write()
                self._is_over = True
            finally:
                self._came.release()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert self._came.acquire(timeout=LIMIT_S)

    def advance(self) -> None:
        """Let the writer make its next change."""
        if not self._is_over:
            self._go.release()
            assert self._came.acquire(timeout=LIMIT_S)

    def end(self) -> None:
        """Let the writer make all remaining changes."""
        assert self._thread is not None
        self._is_free = True
        self._go.release()
        self._thread.join(LIMIT_S)
        assert self._is_over, "the writer has failed"


class Watched:
    """A store whose reader lets the writer advance with every call after the ``first`` ones."""

    def __init__(self, store: Store, advance: Callable[[], None], first: int) -> None:
        self._store, self._advance = store, advance
        self.url, self.left = store.url, first

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if self.left == 0:
                self._advance()
            else:
                self.left -= 1
            return getattr(self._store, name)(*arguments)

        return call


def publish(store: Store) -> None:
    """Do what a job does at every checkpoint; that of step 4 never got its name."""
    found, attempt = Checkpoints(store), partial_name(6, "new")
    found.publish(attempt, manifest_of(store, attempt, "new", 6))
    found.prune(1)


def read_all(checkpoints: Checkpoints) -> None:
    entries = [entry for entry in checkpoints.found() if entry.step is not None]
    assert entries and all(entry.manifest is not None for entry in entries), entries
    assert any(entry.step == 6 for entry in entries), "step 6 is whole at every moment"


def read_newest(checkpoints: Checkpoints) -> None:
    newest, problems = checkpoints.newest()
    assert newest is not None and newest.step == 6 and not problems


def verify_by_command(checkpoints: Checkpoints) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fft.checkpoints.stores.open_store", lambda place: checkpoints.store)
        done = CliRunner().invoke(app, ["checkpoint", "verify", "memory://any"])
    assert done.exit_code == 0 and "DAMAGED" not in done.output, done.output


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 6 with their names, step 4 without, and a new attempt at 6, not yet published."""
    root = tmp_path_factory.mktemp("origin")
    store = open_store(str(root))
    published(store, 2, 6)
    directory = written(store, 4, "whole")
    store.write(f"{directory}/{MANIFEST}", sealed(manifest_of(store, directory, "whole", 4)))
    written(store, 6, "new")
    return root


def file_by_file(unlink: Callable[..., Any], rmdir: Callable[..., Any]) -> Callable[..., None]:
    """Run ``shutil.rmtree`` in single changes between which a test can wait."""

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if Path(path).exists():
            for name in sorted(os.listdir(path)):
                unlink(Path(path, name))
            rmdir(path)

    return rmtree


@pytest.fixture
def turns() -> Iterator[Turns]:
    """The turns of a writer to a directory."""
    made = Turns()
    with pytest.MonkeyPatch.context() as patch:
        remove = file_by_file(made.slowed(os.unlink), made.slowed(os.rmdir))
        patch.setattr(Path, "rename", made.slowed(Path.rename))
        patch.setattr(shutil, "rmtree", remove)
        yield made


@pytest.mark.parametrize("first", (0, 1, 2, 3, 5, 8, 13, 21))
@pytest.mark.parametrize("read", [read_all, read_newest, verify_by_command])
def test_reader_reports_no_damage_while_a_job_writes(
    read: Callable[[Checkpoints], None], first: int, origin: Path, turns: Turns, tmp_path: Path
) -> None:
    store = open_store(str(shutil.copytree(origin, tmp_path / "store")))
    turns.start(lambda: publish(store))
    try:
        read(Checkpoints(Watched(store, turns.advance, first)))  # type: ignore[arg-type]
    finally:
        turns.end()
    assert store.directories() == ["step-6"]
    assert Checkpoints(store).verify(6).attempt == "new"


@pytest.mark.parametrize("first", (0, 1, 2, 3, 5, 8, 13, 21))
@pytest.mark.parametrize("read", [read_all, read_newest, verify_by_command])
def test_reader_of_an_object_store_reports_no_damage_while_a_job_publishes(
    read: Callable[[Checkpoints], None], first: int, tmp_path: Path
) -> None:
    """An object store copies directories file by file."""
    store, turns = open_store(f"memory://{tmp_path.name}"), Turns()
    assert isinstance(store, UrlStore)
    published(store, 4, 6)
    attempt = written(store, 6, "new")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("cp_file", "rm_file", "pipe_file"):
            patch.setattr(store._fs, name, turns.slowed(getattr(store._fs, name)))
        manifest = manifest_of(store, attempt, "new", 6)
        turns.start(lambda: Checkpoints(store).publish(attempt, manifest))
        try:
            read(Checkpoints(Watched(store, turns.advance, first)))  # type: ignore[arg-type]
        finally:
            turns.end()
    assert Checkpoints(store).verify(6).attempt == "new"


def test_reader_still_reports_damage_beside_a_writer(
    origin: Path, turns: Turns, tmp_path: Path
) -> None:
    """A persistent problem is reported, although other directories change at every call."""
    store = open_store(str(shutil.copytree(origin, tmp_path / "store")))
    store.write(f"step-2/{MANIFEST}", b"{")
    manifest = manifest_of(store, partial_name(6, "new"), "new", 6)
    turns.start(lambda: Checkpoints(store).publish(partial_name(6, "new"), manifest))
    entries = Checkpoints(Watched(store, turns.advance, 0)).found()  # type: ignore[arg-type]
    turns.end()
    assert [e.problem for e in entries if e.step == 2] == [
        "step-2/manifest.json: no JSON (Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1))"
    ]
