"""Tests that SIGKILL a process that publishes a checkpoint before each of its operations.

A job that resumes there begins with a complete checkpoint, or from its start if none was ever
complete; and it publishes the next checkpoint normally.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import GROUPS, RANKS, deliver, manifest_of, published
from forked import Forked
from s3_server import bucket_at, served

from fft.checkpoints.files import Checkpoints, choose, partial_name
from fft.checkpoints.stores import UrlStore, open_store

pytestmark = pytest.mark.timeout(1200)  # on S3, minutes for each test on a busy machine

LIMIT_S = 60.0
PLACES = [(group, rank) for group in GROUPS for rank in range(RANKS)]
LAST = PLACES[-1]
MOST = 100
"""An upper bound on the operations of one publication."""
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
OF_URLS = ("cp_file", "rm_file", "rm", "pipe_file", "put_file")


class Fuse:
    """A hook that kills its process before the ``count``-th operation."""

    def __init__(self, count: int) -> None:
        self._left = count

    def burn(self) -> None:
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def on_disk(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The interpreter reports every operation before it happens."""
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if event in CHANGES or opens:
            self.burn()

    def guarding(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            self.burn()
            return operation(*arguments, **options)

        return guarded


def publish(place: str, step: int, count: int) -> None:
    """Do the child's work as far as it gets: the last rank's files, and the publication."""
    store, fuse = open_store(place), Fuse(count)
    if isinstance(store, UrlStore):
        for name in OF_URLS:
            setattr(store._fs, name, fuse.guarding(getattr(store._fs, name)))
    else:
        sys.addaudithook(fuse.on_disk)
    directory = partial_name(step, "again")
    deliver(store, directory, "again", *LAST, step)
    Checkpoints(store).publish(directory, manifest_of(store, directory, "again", step))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    yield from served()


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.long)])
def places(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], str]:
    """Yield a new place for each kill."""
    if request.param == "directory":
        return lambda count: str(tmp_path / str(count))
    bucket = bucket_at(request.getfixturevalue("server"), tmp_path.name, monkeypatch)
    return lambda count: f"s3://{bucket}/{count}"


def killed(url: str, count: int, before: tuple[int, ...]) -> tuple[Checkpoints, bool]:
    """Kill a writer of step 6 at its ``count``-th operation; return what is left, and whether it
    was killed."""
    store = open_store(url)
    store.prepare()
    published(store, *before)
    for place in PLACES[:-1]:
        deliver(store, partial_name(6, "again"), "again", *place, 6)
    code = Forked(publish, store.url, 6, count).wait(LIMIT_S)
    assert code in (0, -signal.SIGKILL), (count, code)
    return Checkpoints(store), code != 0


@pytest.mark.parametrize(
    "before", [(), pytest.param((2, 6), marks=pytest.mark.long)], ids=["first", "again"]
)
def test_job_goes_on_after_a_writer_is_killed_at_any_point(
    before: tuple[int, ...], places: Callable[[int], str], caplog: pytest.LogCaptureFixture
) -> None:
    """This holds for the first checkpoint of all, and for a step that already has one."""
    attempt, came = partial_name(6, "again"), set[str]()
    for count in range(MOST):
        found, was_killed = killed(places(count), count, before)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            chosen = choose(found, resume=True)
        if chosen is None:
            assert not before
            assert f"only unfinished checkpoints: {attempt}" in caplog.text
            came.add("nothing")
        else:
            assert found.verify(6) == chosen and chosen.step == 6, count
            name = found.directory(chosen)
            assert (name == attempt) == ("cut off before it got its name" in caplog.text), count
            came.add(f"{chosen.attempt} in {name}")
        if count % 4 == 0 or not was_killed:
            published(found.store, 8)
            found.prune(1)
            assert found.store.directories() == ["step-8"], count
        if not was_killed:
            break
    else:
        raise AssertionError("it comes to no end")
    assert came == {
        "a1 in step-6" if before else "nothing", f"again in {attempt}", "again in step-6"
    }  # fmt: skip


def test_a_past_that_is_given_up_does_not_come_back(places: Callable[[int], str]) -> None:
    """The job has resumed from step 2 and is at step 6; an abandoned history of it had reached
    10."""
    steps: list[int] = []
    for count in range(MOST):
        found, was_killed = killed(places(count), count, (2, 10))
        chosen = choose(found, resume=True)
        assert chosen is not None
        steps.append(chosen.step)
        if not was_killed:
            break
    assert [step for step, _ in itertools.groupby(steps)] == [10, 2, 6]
