"""Tests of the stores: durable files, names that are assigned last, and removal."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import bytes_below, deliver, manifest_of, published, written
from forked import Forked
from refused_calls import refuse

from fft.checkpoints.files import (
    Checkpoints,
    Manifest,
    Origin,
    Passed,
    attempt_name,
    choose,
    file_stem,
    life_of,
    partial_name,
    sealed,
    step_of,
)
from fft.checkpoints.plan import Checkpointing, checkpointing_of
from fft.checkpoints.stores import MANIFEST, LocalStore, NoRoom, Store, StoreError, open_store
from fft.errors import CheckpointError
from fft.launch.resuming import about_newest
from fft.launch.supervisor import JobOutcome


@pytest.fixture(params=["directory", "file-url", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of each kind, with the same guarantees."""
    places = {
        "directory": str(tmp_path / "store"),
        "file-url": f"file://{tmp_path}/store",
        "memory": f"memory://{tmp_path.name}",
    }
    made = open_store(places[request.param])
    made.prepare()
    return made


def test_published_checkpoint_verifies_and_is_found_by_step(store: Store) -> None:
    found = published(store, 2, 9, 10)
    assert [entry.step for entry in found.found()] == [2, 9, 10]
    assert found.verify(9).cursor == 18
    newest, problems = found.newest()
    assert newest is not None and newest.step == 10 and not problems


def test_one_that_lacks_groups_does_not_replace_one_of_the_same_state(store: Store) -> None:
    """A checkpoint that an abandoned history left does not count as the same state either."""
    found = published(store, 2, 4)
    directory = written(store, 4, "a2")
    made = manifest_of(store, directory, "a2", 4)
    poorer = made.model_copy(update={"groups": ("0",)})
    with pytest.raises(Passed, match="of the same state is there, which has group 1, too"):
        found.publish(directory, poorer)
    assert found.verify(4).attempt == "a1"
    other = made.scopes["job"].model_copy(update={"lineage": "another"})
    found.publish(directory, poorer.model_copy(update={"scopes": {"job": other}}))
    assert found.manifest(4).attempt == "a2"


def test_unpublished_attempt_is_listed_and_never_chosen(store: Store) -> None:
    published(store, 2)
    written(store, 5)
    found = Checkpoints(store)
    assert [(e.step, e.problem is None) for e in found.found()] == [(2, True), (None, False)]
    newest, _ = found.newest()
    assert newest is not None and newest.step == 2


def test_receipt_of_another_attempt_or_without_its_file_is_ignored(store: Store) -> None:
    directory = written(store, 5, "new")
    deliver(store, directory, "old", "1", 1, 5)
    assert ("1", 1) not in Checkpoints(store).receipts(directory, "new")
    assert len(Checkpoints(store).receipts(directory, "new")) == 3
    store.write(f"{directory}/{file_stem('0', 1)}.json", b"{}")  # from another attempt, and shorter
    assert ("0", 1) not in Checkpoints(store).receipts(directory, "new")


def test_newest_checkpoints_are_kept_and_older_attempts_removed(store: Store) -> None:
    found = published(store, 2, 4, 6, 8)
    written(store, 3, "killed")
    written(store, 8, "once-more")
    written(store, 9, "under-way")
    removed = found.prune(2)
    old = partial_name(3, "killed"), partial_name(8, "once-more")
    assert sorted(removed) == sorted(["step-2", "step-4", *old])
    assert [e.name for e in found.found()] == ["step-6", "step-8", partial_name(9, "under-way")]
    assert found.prune(0) == []
    assert found.verify(6).step == 6


def test_damaged_checkpoint_among_the_kept_ones_is_not_removed(store: Store) -> None:
    found = published(store, 2, 4, 6, 8)
    for step in (2, 6):
        store.write(f"step-{step}/{MANIFEST}", b"{")
    assert found.prune(2) == ["step-2"]
    assert [e.name for e in found.found()] == ["step-4", "step-6", "step-8"]


def test_later_steps_are_of_a_past_that_is_given_up(store: Store) -> None:
    found = published(store, 4, 8, 12)
    directory = written(store, 6)
    found.publish(directory, manifest_of(store, directory, "a1", 6))
    assert [e.step for e in found.found()] == [4, 6, None, None]
    newest, _ = found.newest()
    assert newest is not None and newest.step == 6


def test_one_that_is_taken_again_takes_the_place_of_the_first(store: Store) -> None:
    found = published(store, 4)
    directory = written(store, 4, "again")
    found.publish(directory, manifest_of(store, directory, "again", 4))
    assert found.verify(4).attempt == "again"


def test_interrupted_publication_does_not_reappear_after_removal(
    tmp_path: Path,
) -> None:
    """The attempt's directory was left behind only because an object store has no rename."""
    store = open_store(str(tmp_path))
    found = published(store, 4, 8)
    left = tmp_path / partial_name(8, "a1")
    shutil.copytree(tmp_path / "step-8", left)
    assert [e.step for e in found.found()] == [4, 8, None]
    directory = written(store, 6)
    found.publish(directory, manifest_of(store, directory, "a1", 6))
    assert [e.step for e in found.found()] == [4, 6, None]
    newest, _ = found.newest()
    assert newest is not None and newest.step == 6


def test_later_of_two_complete_checkpoints_of_a_step_counts(store: Store) -> None:
    found = published(store, 4, 6)
    directory = written(store, 6, "again")
    later = manifest_of(store, directory, "again", 6).model_copy(update={"written_at": 1.0})
    store.write(f"{directory}/{MANIFEST}", sealed(later))
    newest, _ = found.newest()
    assert newest is not None and newest.attempt == "again"
    assert found.directory(newest) == directory
    assert [e.step for e in found.found()] == [4, 6, None]


def test_if_the_later_one_of_a_step_is_damaged_the_other_is_read(store: Store) -> None:
    found = published(store, 4, 6)
    directory = written(store, 6, "again")
    later = manifest_of(store, directory, "again", 6).model_copy(update={"written_at": 1.0})
    store.write(f"{directory}/{MANIFEST}", sealed(later))
    file = later.files[0]
    store.write(f"{directory}/{file.name}", bytes(file.size))
    newest, problems = found.newest()
    assert newest is not None and (newest.step, newest.attempt) == (6, "a1")
    assert problems == [f"{directory}/{file.name}: its SHA-256 is not that in the manifest"]


def test_one_that_cannot_get_its_name_is_whole_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unwritable(LocalStore):
        def rename(self, old: str, new: str) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    store = Unwritable(tmp_path)
    found, name = published(open_store(str(tmp_path)), 2), written(store, 4)
    Checkpoints(store).publish(name, manifest_of(store, name, "a1", 4))
    assert "the checkpoint of step 4 is whole, though" in caplog.text
    assert "not published to the end" in caplog.text and "Permission denied" in caplog.text
    assert (tmp_path / name / MANIFEST).exists()
    caplog.clear()
    assert choose(found, resume=True) == found.verify(4)
    assert "whole, but cut off before it got its name" in caplog.text
    outcome, plan = JobOutcome(True, step=4), Checkpointing(str(tmp_path), 2)
    text = f"the newest checkpoint is step-4 (all but its name: {name}) at {tmp_path}, of the last"
    assert about_newest(plan, outcome).startswith(text)


def test_publishing_a_removed_attempt_raises_file_not_found(tmp_path: Path) -> None:
    class Pruned(LocalStore):
        def rename(self, old: str, new: str) -> None:
            self.remove(old)
            super().rename(old, new)

    store = Pruned(tmp_path)
    name = written(store, 4)
    with pytest.raises(FileNotFoundError):
        Checkpoints(store).publish(name, manifest_of(store, name, "a1", 4))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_reason_to_go_elsewhere(number: int, tmp_path: Path) -> None:
    """The error only advises to free space.

    The kernel fails the writes of one process as a full disk does.
    """
    ended_well(_prepare_without_room, number, tmp_path, log=tmp_path / "log")


def _prepare_without_room(number: int, place: Path) -> None:
    refuse("write", number)
    with pytest.raises(NoRoom, match="What is there stays as it is: free room"):
        LocalStore(place).prepare()


def test_a_name_that_something_else_has_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(str(tmp_path))
    (tmp_path / "step-4").write_text("no directory")
    assert published(store, 4).verify(4).step == 4
    assert "cannot be removed, which step-4 replaces" in caplog.text


def test_checkpoint_without_parent_fsync_is_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unsynced(LocalStore):
        def rename(self, old: str, new: str) -> None:
            super().rename(old, new)
            raise OSError("fsync")

    assert published(Unsynced(tmp_path), 4).verify(4).step == 4
    assert "is whole, though it was not published to the end: fsync" in caplog.text


def test_failed_rename_leaves_the_existing_directory(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    found = published(store, 4)
    with pytest.raises(FileNotFoundError):
        store.rename(partial_name(4, "nobody"), "step-4")
    assert found.verify(4).attempt == "a1"
    assert store.directories() == ["step-4"]


def test_files_are_synced_before_their_names_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is that of the system calls."""
    output: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(fd: int) -> None:
        output.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        sync(fd)

    def noted_rename(self: Path, target: Path) -> Path:
        output.append(f"rename {self.name} {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    store = LocalStore(tmp_path)
    store.write("step-1.partial-a/x.json", b"{}")
    store.rename("step-1.partial-a", "step-1")
    assert output == [
        "sync .x.json.new",
        "rename .x.json.new x.json",
        "sync step-1.partial-a",
        "rename step-1.partial-a step-1",
        f"sync {tmp_path.name}",
    ]
    output.clear()
    store.write("step-1.partial-b/x.json", b"{}")
    store.rename("step-1.partial-b", "step-1")  # a checkpoint of this name exists already
    aside = f"step-1.partial-removed-{os.getpid()}"
    assert output[3:] == [
        f"rename step-1 {aside}",
        f"sync {tmp_path.name}",
        "rename step-1.partial-b step-1",
        f"sync {tmp_path.name}",
    ], "half of what is removed never has the name of a whole one"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_keeps_a_job_with_a_warning(
    number: int, tmp_path: Path
) -> None:
    """On such a file system the lock call fails with this error; here the kernel refuses it for one
    process."""
    output = ended_well(_hold_without_locks, number, tmp_path / "place", log=tmp_path / "log")
    assert "held; at work: None\n" in output
    assert "a second job there is not refused" in output


def _hold_without_locks(number: int, place: Path) -> None:
    logging.basicConfig()
    place.mkdir()
    refuse("flock", number)
    store = LocalStore(place)
    with store.hold(), store.at_work():
        sys.stderr.write(f"held; at work: {store.is_at_work()}\n")


def ended_well(work: Callable[..., None], *given: Any, log: Path) -> str:
    """Run ``work`` in its own process and return its output."""
    process = Forked(work, *given, log=log)
    try:
        assert process.wait(60) == 0, process.tail()
    finally:
        process.end()
    return log.read_text()


def test_a_write_that_fails_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(OSError, match="no room"), store.writing("d/file") as path:
        path.write_bytes(b"half")
        raise OSError("no room")
    assert bytes_below(tmp_path) == {}


def test_a_file_that_is_being_written_is_none_yet(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with store.writing("d/file") as path:
        path.write_bytes(b"half")
        assert store.files("d") == {}
    assert store.files("d") == {"file": 4}


def test_a_place_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreError, match="give a directory that this user may write to"):
        open_store(str(tmp_path / "file" / "x")).prepare()
    with pytest.raises(StoreError, match="nosuchscheme"):
        open_store("nosuchscheme://x")


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [(7, 7, None), ("7", 7, None), ("90s", None, 90.0), ("1.5m", None, 90.0), ("2h", None, 7200.0)],
)
def test_the_interval_is_of_steps_or_of_time(
    every: int | str, steps: int | None, seconds: float | None
) -> None:
    plan = Checkpointing("x", every)
    assert (plan.steps, plan.seconds) == (steps, seconds)


@pytest.mark.parametrize("every", ["", "0", "-1", "1.5", "s", "0s", "10 s", "abc", "1e3s"])
def test_another_interval_is_refused(every: str) -> None:
    with pytest.raises(CheckpointError, match="such as 100, or a time"):
        Checkpointing("x", every)


def test_environment_overrides_the_script_with_the_same_settings(tmp_path: Path) -> None:
    plan = Checkpointing(tmp_path, "30s", 5)
    env = plan.to_env(12)
    assert checkpointing_of("elsewhere", env) == Checkpointing(str(tmp_path), "30s", 5, 12)
    assert checkpointing_of("elsewhere", {}) == Checkpointing("elsewhere")
    assert checkpointing_of(None, plan.to_env(None)) == Checkpointing(str(tmp_path), "30s", 5)
    for name in ("FFT_RESUME", "FFT_CHECKPOINT_KEEP", "FFT_CHECKPOINT_EVERY"):
        with pytest.raises(CheckpointError):
            checkpointing_of(None, {**env, name: "never mind"})


def test_a_new_job_does_not_begin_among_the_checkpoints_of_another(store: Store) -> None:
    assert choose(Checkpoints(store), resume=False) is None
    assert choose(Checkpoints(store), resume=True) is None
    found = published(store, 3)
    with pytest.raises(CheckpointError, match=r"has checkpoints already \(the newest: step-3\)"):
        choose(found, resume=False)
    chosen = choose(found, resume=True)
    assert chosen is not None and chosen.step == 3


def test_job_with_only_damaged_checkpoints_does_not_start_over(tmp_path: Path) -> None:
    found = published(open_store(str(tmp_path)), 3)
    (tmp_path / "step-3" / "g0r0.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-3/g0r0\.json: the file is missing"):
        choose(found, resume=True)


def test_checkpoint_directory_is_held_by_one_running_job(tmp_path: Path) -> None:
    one, other = open_store(str(tmp_path)), open_store(str(tmp_path))
    with one.hold():
        with pytest.raises(StoreError, match="another job keeps its checkpoints in"), other.hold():
            pass
        assert one.directories() == []
    with other.hold():
        pass


# --- a process that is killed between two operations ----------------------------------------------


class Killed(BaseException):
    """Raised in the place of the end of the process."""


class Clock:
    """A limit on the number of operations that take effect."""

    def __init__(self, left: int) -> None:
        self.left = left

    def counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            if not self.left:
                raise Killed
            self.left -= 1
            return operation(*args, **options)

        return counting


DISK = [(os, "unlink"), (os, "rmdir"), (os, "rename"), (Path, "rename")]
OF_URLS = ("cp_file", "rm_file", "rm", "pipe_file", "put_file")


def killed_after(
    count: int, store: Store, do: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Run ``do`` until it has changed the store ``count`` times; return whether it was killed
    then."""
    clock = Clock(count)
    with monkeypatch.context() as patch:
        places = DISK if isinstance(store, LocalStore) else [(store._fs, n) for n in OF_URLS]  # type: ignore[attr-defined]
        for place, name in places:
            patch.setattr(place, name, clock.counted(getattr(place, name)))
        try:
            do()
        except Killed:
            return True
    return False


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["directory", "memory"])
@pytest.mark.parametrize(
    "case",
    [
        "published",
        pytest.param("published again", marks=pytest.mark.long),
        "removed",
        pytest.param("given up", marks=pytest.mark.long),
    ],
)
def test_killed_writer_leaves_no_complete_looking_checkpoint(
    case: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill at each operation, a directory with a manifest has all files that the manifest
    lists. On a disk, a directory with the name of a checkpoint is complete."""
    steps = {"published": 8, "published again": 6, "removed": 7, "given up": 3}
    for count in range(100):
        place = tmp_path / str(count)
        store = open_store(str(place) if kind == "directory" else f"memory:/{place}")
        store.prepare()
        found = published(store, 2, 6)
        directory = written(store, steps[case], "again")
        manifest = manifest_of(store, directory, "again", steps[case])

        def do(
            found: Checkpoints = found, directory: str = directory, manifest: Manifest = manifest
        ) -> None:
            if case == "removed":
                found.prune(1)
            else:
                found.publish(directory, manifest)

        is_killed = killed_after(count, store, do, monkeypatch)
        for name in store.directories():
            step = step_of(name)
            if MANIFEST in store.files(name) and step is not None:
                assert found.verify(step).step == step, (count, name)
            if kind == "directory":
                assert step is None or MANIFEST in store.files(name), (count, name)
        newest, _ = found.newest()
        assert newest is not None and newest.step >= 2
        if not is_killed:
            assert count > 3, "it was killed at none of its operations"
            return
    raise AssertionError("it comes to no end")


def test_writers_of_one_job_keep_the_checkpoints_of_each_other(store: Store) -> None:
    """If groups write at the same time, the later step may be published first."""
    found, old, life, other = Checkpoints(store), "a1", "11-a", "22-a"
    for step, attempt in ((8, old), (6, life)):
        directory = written(store, step, attempt)
        found.publish(directory, manifest_of(store, directory, attempt, step))
    assert [e.step for e in found.found() if e.step is not None] == [6], "8 was of another past"
    late = written(store, 4, "11-b")
    with pytest.raises(Passed, match="that of step 6 is there already"):
        found.publish(late, manifest_of(store, late, "11-b", 4))
    assert found.verify(6).attempt == life
    again = written(store, 4, other)
    found.publish(again, manifest_of(store, again, other, 4))
    assert [e.step for e in found.found() if e.step is not None] == [4], "another life of the bus"


def test_attempt_name_contains_the_lifetime_of_its_bus() -> None:
    one, other, elsewhere = (
        attempt_name("g", "1|x"),
        attempt_name("g", "2|y"),
        attempt_name("h", ""),
    )
    assert one != other and life_of(one) == life_of(other) != life_of(elsewhere)
    assert life_of("a1") == ""


def _failing_once(number: int, carries_out: bool) -> Callable[[Path, Path], Path]:
    """Return a `Path.rename` that fails at its first call, as on NFS, before or after it takes
    effect."""
    plain, failed = Path.rename, []

    def rename(old: Path, new: Path) -> Path:
        if failed:
            return plain(old, new)
        failed.append(old)
        if carries_out:
            plain(old, new)
        raise OSError(number, os.strerror(number), str(old))

    return rename


@pytest.mark.parametrize("carries_out", [False, True])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EBUSY])
def test_rename_that_fails_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, carries_out: bool
) -> None:
    store = LocalStore(tmp_path)
    directory = written(store, 4, "a")
    monkeypatch.setattr(Path, "rename", _failing_once(number, carries_out))
    Checkpoints(store).publish(directory, manifest_of(store, directory, "a", 4))
    assert Checkpoints(store).verify(4).attempt == "a"


def test_rename_that_fails_by_another_error_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "rename", _failing_once(errno.EIO, False))
    with pytest.raises(OSError, match="Input/output error"):
        LocalStore(tmp_path).write("file", b"data")


def _move_away(root: Path, name: str) -> Path:
    """Move a checkpoint to another folder, and leave a link to it, as an operator does."""
    cold = root.parent / "cold" / name
    cold.parent.mkdir(exist_ok=True)
    shutil.move(root / name, cold)
    (root / name).symlink_to(cold)
    return cold


def test_link_to_a_checkpoint_is_used_and_its_removal_keeps_the_files(tmp_path: Path) -> None:
    root = tmp_path / "store"
    found = published(LocalStore(root), 2, 4, 6, 8)
    cold, used = _move_away(root, "step-2"), _move_away(root, "step-6")
    files = bytes_below(cold)
    assert found.verify(2).step == 2
    assert found.prune(2) == ["step-2", "step-4"]
    assert sorted(path.name for path in root.iterdir()) == ["step-6", "step-8"]
    assert files == bytes_below(cold) and len(files) == 13
    directory = written(found.store, 6, "a2")
    found.publish(directory, manifest_of(found.store, directory, "a2", 6))
    assert not (root / "step-6").is_symlink() and found.verify(6).attempt == "a2"
    assert found.store.directories() == ["step-6", "step-8.partial-given-up"]
    assert (used / MANIFEST).exists()


@pytest.mark.parametrize("target", ["step-8", "/nowhere/step-8", "file"])
def test_link_that_leads_nowhere_is_named_and_ends_nothing(target: str, tmp_path: Path) -> None:
    root = tmp_path / "store"
    found = published(LocalStore(root), 2, 4, 6)
    (root / "file").touch()
    (root / "step-8").symlink_to(target)
    (root / "step-1").symlink_to(target)
    assert [e.step for e in found.found() if e.problem is None] == [2, 4, 6]
    chosen, problems = found.newest()
    assert chosen is not None and chosen.step == 6
    assert len(problems) == 1 and problems[0].startswith("step-8: ")
    assert found.prune(2) == ["step-2", "step-1"]
    directory = written(found.store, 8)
    found.publish(directory, manifest_of(found.store, directory, "a1", 8))
    assert found.verify(8).step == 8


def test_undeletable_checkpoint_does_not_stop_the_other_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = published(LocalStore(tmp_path), 2, 4, 6, 8)
    rmtree = shutil.rmtree

    def refuses(path: Path) -> None:
        if path.name.startswith("step-2"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", refuses)
    assert found.prune(1) == ["step-4", "step-6"]
    assert "step-2 at" in caplog.text and "cannot be removed: [Errno 13]" in caplog.text
    (left,) = found.leftovers()
    assert left.startswith("step-2.partial-removed-")
    assert list(found.remove([left])) == [left]
    assert found.store.directories() == [left, "step-8"]


LIVES = [attempt_name(life, "1|x") for life in "abc"]


def _publish(found: Checkpoints, step: int, start: int, origin: int | None = None) -> None:
    """Publish a checkpoint of the start with that number, which resumed from step ``origin``."""
    directory = written(found.store, step, LIVES[start])
    made = manifest_of(found.store, directory, LIVES[start], step)
    at = None if origin is None else Origin(step=origin, lineage=f"lineage{origin}")
    found.publish(directory, made.model_copy(update={"resumed_from": at}))


def test_starts_of_one_run_are_recognized_after_older_checkpoints_are_gone(store: Store) -> None:
    found = Checkpoints(store)
    _publish(found, 2, 0)
    _publish(found, 4, 0)
    _publish(found, 5, 1, origin=4)
    _publish(found, 7, 2, origin=4)  # step 5 was damaged
    assert choose(found, resume=True) == found.manifest(7)
    found.remove(["step-2", "step-4"])
    assert choose(found, resume=True) == found.manifest(7)
    published(store, 9)  # an imported checkpoint names no start
    assert choose(found, resume=True) == found.manifest(9)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_run_is_resumed_with_a_missing_middle_checkpoint(is_damaged: bool, tmp_path: Path) -> None:
    found = Checkpoints(LocalStore(tmp_path))
    _publish(found, 10, 0)
    _publish(found, 20, 0)
    _publish(found, 30, 1, origin=20)
    if is_damaged:
        next((tmp_path / "step-20").glob("*.safetensors")).write_bytes(b"")
    else:
        found.remove(["step-20"])
    assert choose(found, resume=True) == found.manifest(30)
    _publish(found, 98, 2)  # no start of the run resumed from it, and it did not resume either
    with pytest.raises(CheckpointError, match="step-98 of one, step-10, step-30 of another"):
        choose(found, resume=True)


@pytest.mark.parametrize(("own", "foreign"), [((2, 4), 98), ((50, 52), 7)])
def test_checkpoint_of_another_run_is_not_resumed_silently(
    own: tuple[int, int], foreign: int, store: Store
) -> None:
    found = Checkpoints(store)
    for step in sorted([*own, foreign]):
        _publish(found, step, start=int(step == foreign))
    mine = f"step-{own[0]}, step-{own[1]}"
    with pytest.raises(CheckpointError, match="has checkpoints of different runs") as caught:
        choose(found, resume=True)
    assert mine in str(caught.value) and f"step-{foreign}" in str(caught.value)
    assert choose(found, resume=foreign) == found.manifest(foreign)  # asked for by its step
    found.remove([f"step-{foreign}"])
    assert choose(found, resume=True) == found.manifest(own[1])


def test_joiner_names_the_checkpoint_from_which_its_job_resumed(store: Store) -> None:
    found = Checkpoints(store)
    assert found.origin_of(life_of(LIVES[0])) is None
    _publish(found, 4, 0)
    assert found.origin_of(life_of(LIVES[0])) is None
    assert found.origin_of(life_of(LIVES[1])) == Origin(step=4, lineage="lineage4")
    _publish(found, 6, 1, origin=4)
    assert found.origin_of(life_of(LIVES[1])) == Origin(step=4, lineage="lineage4")
