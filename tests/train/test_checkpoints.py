"""Tests of durable checkpoints of one rank: their contents, disturbances, and what they never do.

Each job is one process without a launcher. The next start is a new manager with a new model, whose
weights differ until the checkpoint is loaded. `test_durable.py` runs whole jobs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_files import deliver, manifest_of, written
from forked import Forked
from torch import nn
from torchft import ProcessGroupGloo
from waiting import wait_until

import fft
from fft.checkpoints.files import (
    Checkpoints,
    DamagedCheckpoint,
    Manifest,
    Receipt,
    attempt_name,
    sealed,
    unsealed,
)
from fft.checkpoints.stores import LocalStore, open_store
from fft.errors import CheckpointError, DataError, Drained, FftError, StateMismatch
from fft.messages.progress import CheckpointReport, decode_report
from fft.messages.protocol import GroupEntry, Peer, Record
from fft.trace.audit import audit_dir, read_lines
from fft.trace.resumed import audit_job
from fft.train.checkpoint import contents, writer
from fft.train.checkpoint.contents import Snapshot, write_rank
from fft.train.checkpoint.writer import (
    NAME,
    RankWriter,
    WorkerPool,
    WriteAttempt,
    WriterContext,
    decline,
)
from fft.train.session.checkpoint_schedule import CheckpointSchedule, Named

SET_BY_LAUNCHERS = ("FFT_BUS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
WIDTH = 8


@pytest.fixture(autouse=True)
def nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SET_BY_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


class Counter:
    """A registered object with values that JSON cannot represent."""

    def __init__(self) -> None:
        self.seen: dict[Any, Any] = {1: 0.0, "nan": float("nan"), "pair": (1, b"x")}

    def count(self) -> None:
        self.seen[1] += 1.5

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "none": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["none"] is None and state["seen"]["pair"] == (1, b"x")
        self.seen = state["seen"]


class Stream:
    """A stateful loader that, like some, is right only if its state is restored before iteration,
    and that returns the state of the item drawn last."""

    def __init__(self, items: int = 64) -> None:
        self.items, self.at, self.resumed = items, 0, 0
        self.drawn: Callable[[], object] = lambda: None
        """Called with each item."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.items:
            self.at += 1
            self.drawn()
            yield torch.sin(torch.arange(4.0 * WIDTH).reshape(4, WIDTH) * self.at)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "resumed": self.resumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.resumed = state["at"], state["resumed"] + 1


class Start:
    """One start of a job."""

    def __init__(self, traces: Path, seed: int = 3, width: int = WIDTH, **settings: Any) -> None:
        self.manager = fft.ManagerFFT(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=1,
            trace_dir=traces,
            **settings,
        )
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, width), nn.BatchNorm1d(width), nn.Dropout(), nn.Linear(width, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=4)
        self.counter = Counter()
        extra = {"counter": self.counter}
        self.manager.register(
            self.model, self.optimizer, self.schedule, extra=extra, scaler=self.scaler
        )
        self.manager.on_commit(self.counter.count)
        self.manager.sync_gradients(self.model)
        self.losses: list[float] = []

    def train(
        self,
        loader: Any,
        steps: int,
        clamp_from: int | None = None,
        outruns: bool = False,
        between: Callable[[], bool] = lambda: False,
    ) -> Start:
        """Train to the end of step ``steps``; from ``clamp_from`` on the step function changes
        parameters.

        With ``outruns`` it does not wait for the disk; otherwise each checkpoint is written before
        the next step. ``between`` runs after each commit and returns whether to leave the loop.
        """
        try:
            for txn in self.manager.transactions(loader, max_steps=steps):
                if txn.step % 4 == 3 and not outruns:
                    wait_until(lambda: not is_writing(), "the checkpoint is written")
                with txn:
                    loss = self.model(txn.batch).square().mean() * (1 + 0.1 * random.random())
                    self.scaler.scale(loss).backward()
                    self.losses.append(loss.item())
                    if clamp_from is not None and txn.step >= clamp_from:
                        self.clamp()
                if txn.committed and between():
                    break
        finally:
            self.manager.shutdown()
        return self

    def clamp(self) -> None:
        """Change a parameter."""
        with torch.no_grad():
            self.model[0].weight.clamp_(-0.01, 0.01)

    def all(self) -> tuple[Any, ...]:
        """Return every bit of the state."""
        rest = (self.schedule.state_dict(), self.scaler.state_dict(), self.counter.seen[1])
        return (self.manager.digest(), *rest, torch.rand(3).tolist(), random.random())


def is_writing() -> bool:
    return any(thread.name == NAME for thread in threading.enumerate())


def reports(start: Start) -> list[CheckpointReport]:
    """Return the reports on the bus about its checkpoints, in order."""
    received = list[CheckpointReport]()

    def hear(payload: bytes) -> None:
        if isinstance(word := decode_report(payload), CheckpointReport):
            received.append(word)

    start.manager._parts.job.bus.subscribe(hear, lambda error: None, "progress")
    return received


def at(place: Path, **values: Any) -> fft.Checkpointing:
    return fft.Checkpointing(place, **{"every": 4, "resume": True, **values})


def notes(traces: Path, name: str) -> list[dict[str, Any]]:
    return [line["data"] for line in read_lines(traces) if line.get("note") == name]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loader", [Stream, lambda: fft.CursorLoader(data(), 4, seed=5)])
def test_job_resumed_twice_has_the_bits_of_an_uninterrupted_one(
    loader: Any, tmp_path: Path
) -> None:
    whole = Start(tmp_path / "whole").train(loader(), 18).all()
    place = tmp_path / "checkpoints"
    for number, steps in enumerate((5, 6, 13, 18)):  # the second start makes a single step
        traces = tmp_path / f"start{number}"
        start = Start(traces, seed=3 + 90 * number, checkpoint=at(place))
        start.train(loader(), steps)
        assert audit_dir(traces).ok
    assert start.all() == whole
    assert [n["step"] for n in notes(tmp_path / "start3", "resumed")] == [13]


class Validated(Start):
    """A schedule that halves its rate by a loss measured between two txns, with random numbers."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        self.plateau = plateau(self.optimizer, factor=0.5, patience=0)
        extra = {"counter": self.counter, "plateau": self.plateau}
        self.manager.register(self.model, self.optimizer, extra=extra, scaler=self.scaler)

    def validate(self) -> None:
        held_out = torch.rand(4, WIDTH) + random.random()
        self.model.eval()
        with torch.no_grad():
            self.plateau.step(self.model(held_out).square().mean().item() + random.random())
        self.model.train()

    def all(self) -> tuple[Any, ...]:
        rate = self.optimizer.param_groups[0]["lr"]
        return (rate, self.plateau.state_dict(), *super().all())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("leaves", [False, True])
def test_changes_made_after_a_commit_are_in_its_checkpoint(leaves: bool, tmp_path: Path) -> None:
    """A resumed job does not repeat them. ``leaves``: the loop is left by ``break``."""

    def run(name: str, steps: Sequence[int], **settings: Any) -> Validated:
        for number, until in enumerate(steps):
            start = Validated(tmp_path / f"{name}{number}", 3 + 90 * number, **settings)

            def between(start: Validated = start, until: int = until) -> bool:
                start.validate()
                return leaves and start.manager.current_step() == until

            start.train(Stream(), 99 if leaves else until, between=between)
        return start

    whole = run("whole", [18]).all()
    assert whole[0] < 1e-3, "the rate has changed often enough"
    resumed = run("part", [4, 8, 16, 18], checkpoint=at(tmp_path / "checkpoints"))
    assert resumed.all() == whole
    assert [n["step"] for n in notes(tmp_path / "part3", "resumed")] == [16]


def test_error_after_a_commit_leaves_no_partial_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "checkpoints"
    start = Start(tmp_path / "traces", checkpoint=at(place))

    def fails() -> bool:
        if start.manager.current_step() == 8:
            raise ValueError("in the evaluation")
        return False

    with pytest.raises(ValueError, match="in the evaluation"):
        start.train(Stream(), 12, between=fails)
    newest, _ = Checkpoints(open_store(str(place))).newest()
    assert newest is not None and newest.step == 4
    (skipped,) = notes(tmp_path / "traces", "checkpoint_skipped")
    assert skipped["step"] == 8 and "ended with an error" in skipped["reason"]


class Tensors(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(float(WIDTH)) * index)


def data() -> Tensors:
    return Tensors()


def test_first_change_during_the_copy_discards_the_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next checkpoint, which is copied at once, is correct for its step."""
    place, traces = tmp_path / "checkpoints", tmp_path / "traces"
    Start(traces, checkpoint=at(place, keep=0)).train(Stream(), 12, clamp_from=4)
    found = Checkpoints(open_store(str(place)))
    assert [e.step for e in found.found() if e.step is not None] == [8, 12]
    assert "0.weight was changed while it was copied" in caplog.text
    whole = Start(tmp_path / "whole").train(Stream(), 18, clamp_from=4).all()
    again = Start(tmp_path / "again", 7, checkpoint=at(place))
    assert again.train(Stream(), 18, clamp_from=4).all() == whole


def test_unchanged_tensors_are_copied_at_once_from_the_second_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loader changes its tensors with each item."""
    place, stream = tmp_path / "checkpoints", Stream()
    start = Start(tmp_path / "traces", checkpoint=at(place, keep=0))
    stream.drawn = start.clamp
    start.train(stream, 12)
    found = Checkpoints(open_store(str(place)))
    assert [e.step for e in found.found() if e.step is not None] == [8, 12]
    assert "0.weight was changed while it was copied" in caplog.text


@pytest.mark.parametrize("part", ["_look_up", "_copy"])
def test_no_update_is_applied_before_the_copy_is_done(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy lasts until the next vote, and is released only when that waits for it."""

    go_on, copy = threading.Event(), getattr(Snapshot, part)
    finish = Snapshot.finish

    def late(self: Snapshot) -> None:
        assert go_on.wait(60)
        copy(self)

    def waits(self: Snapshot, limit_s: float) -> float:
        go_on.set()
        return finish(self, limit_s)

    monkeypatch.setattr(Snapshot, part, late)
    monkeypatch.setattr(Snapshot, "finish", waits)
    place = tmp_path / "checkpoints"
    Start(tmp_path / "a", checkpoint=at(place)).train(Stream(), 7)
    # The checkpoint at the end of the job
    (tmp_path / "checkpoints" / "step-7").rename(tmp_path / "step-7")
    again = Start(tmp_path / "b", 7, checkpoint=at(place)).train(Stream(), 18)
    assert notes(tmp_path / "b", "resumed")[0]["step"] == 4
    assert again.all() == Start(tmp_path / "whole").train(Stream(), 18).all()


class AwaitedEvent(threading.Event):
    """An event that signals when a thread begins to wait for it."""

    def __init__(self, begun: threading.Event) -> None:
        super().__init__()
        self._begun = begun

    def wait(self, timeout: float | None = None) -> bool:
        self._begun.set()
        return super().wait(timeout)


def test_receipt_is_delivered_after_the_body_that_may_change_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step function changes a parameter after the files are written, so they do not match the
    step."""
    body_over, waited_for = threading.Event(), threading.Event()
    early: list[bool] = []
    made, deliver_ = Snapshot.__init__, Checkpoints.deliver

    def make(self: Snapshot, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.confirmed = AwaitedEvent(waited_for)

    def note(self: Checkpoints, directory: str, receipt: Receipt) -> None:
        early.append(not body_over.is_set())
        waited_for.set()
        deliver_(self, directory, receipt)

    monkeypatch.setattr(Snapshot, "__init__", make)
    monkeypatch.setattr(Checkpoints, "deliver", note)
    place = tmp_path / "checkpoints"
    start = Start(tmp_path / "traces", checkpoint=at(place, keep=0))
    for txn in start.manager.transactions(Stream(), max_steps=6):
        with txn:
            start.scaler.scale(start.model(txn.batch).square().mean()).backward()
            if txn.step == 4:
                assert waited_for.wait(60), "the files of step 4 are written"
                start.clamp()
                body_over.set()
    start.manager.shutdown()
    receipts = [path.parent.name for path in place.rglob("*.receipt")]
    assert not any(early), receipts
    entries = Checkpoints(open_store(str(place))).found()
    assert [entry.step for entry in entries if entry.step is not None] == [6]


@pytest.mark.parametrize("part", ["_look_up", "_copy"])
def test_slow_copy_costs_the_checkpoint_and_not_the_step(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended, copy = threading.Event(), getattr(Snapshot, part)
    held = iter([True])

    def stands(self: Snapshot) -> None:
        if next(held, False):
            assert ended.wait(60)
        copy(self)

    monkeypatch.setattr(Snapshot, part, stands)
    monkeypatch.setattr(contents, "COPY_LIMIT_S", 0.05)
    start = Start(tmp_path / "traces", checkpoint=at(tmp_path / "checkpoints", keep=0))
    start.manager.on_commit(lambda: ended.set() if len(start.losses) == 6 else None)
    start.train(Stream(), 12)
    found = Checkpoints(open_store(str(tmp_path / "checkpoints"))).found()
    assert [e.step for e in found if e.step is not None] == [8, 12]
    assert "its copy was not done 0.05 s after the vote" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_free_thread_is_reused_and_a_failed_one_is_not() -> None:
    threads, seen, go_on = WorkerPool(), list[int | None](), threading.Event()

    def works() -> None:
        seen.append(threading.get_native_id())

    def fails() -> None:
        works()
        raise SystemExit  # hooks of threads do not report it

    def waits() -> None:
        works()
        assert go_on.wait(30)

    for work in (works, works, fails, works):
        assert threads.do(work).wait(30)
    first, again, failed, other = seen
    assert first == again == failed != other
    busy = threads.do(waits)
    assert threads.do(works).wait(30), "another one"
    assert not busy.is_set()
    threads.close()
    go_on.set()
    assert busy.wait(30)
    wait_until(lambda: not any(t.name.startswith(NAME) for t in threading.enumerate()), "all end")


def test_job_is_marked_as_writing_until_its_end(tmp_path: Path) -> None:
    """This also holds between two checkpoints, and while no process of the job is writing."""
    store, seen = open_store(str(tmp_path / "checkpoints")), list[bool | None]()
    start = Start(tmp_path / "traces", checkpoint=at(tmp_path / "checkpoints"))
    start.manager.on_commit(lambda: seen.append(store.is_at_work()))
    start.train(Stream(), 3)
    assert seen == 3 * [True]
    assert store.is_at_work() is False


def test_a_store_that_goes_away_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues; log and trace report the place; the next checkpoint is complete."""
    place, traces = tmp_path / "checkpoints", tmp_path / "traces"
    start = Start(traces, checkpoint=at(place, keep=0))

    def disturb() -> None:
        step = len(start.losses)
        if step == 6:
            wait_until(lambda: (place / "step-4").exists(), "the first one is there")
            place.rename(tmp_path / "away")
            place.write_text("no directory any more")
        if step == 11:
            wait_until(lambda: bool(notes(traces, "checkpoint_failed")), "it has failed")
            place.unlink()
            (tmp_path / "away").rename(place)

    start.manager.on_commit(disturb)
    start.train(Stream(), 12)
    found = Checkpoints(open_store(str(place)))
    assert [e.step for e in found.found()] == [4, 12]
    assert found.verify(12).step == 12
    (failed,) = notes(traces, "checkpoint_failed")
    assert failed["step"] == 8 and "NotADirectoryError" in failed["error"]
    assert "no checkpoint of step 8" in caplog.text and str(place) in caplog.text


def test_slow_disk_delays_no_step_and_skips_due_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint in progress is finished; those that were due meanwhile are skipped."""
    place, go_on, write = tmp_path / "checkpoints", threading.Event(), LocalStore.write

    def slow(self: LocalStore, path: str, data: bytes) -> None:
        if path.startswith("step-4.") and path.endswith(".json"):
            assert go_on.wait(60)
        write(self, path, data)

    monkeypatch.setattr(LocalStore, "write", slow)
    start = Start(tmp_path / "traces", checkpoint=at(place, keep=0))

    def let_go() -> None:
        if len(start.losses) == 13:
            go_on.set()
            wait_until((place / "step-4").exists, "it is published")

    start.manager.on_commit(let_go)
    received = reports(start)
    start.train(Stream(), 16, outruns=True)
    left_out = [word.step for word in received if word.outcome == "too_often"]
    assert left_out == [8, 12]
    assert [n["step"] for n in notes(tmp_path / "traces", "checkpoint_skipped")] == [8, 12]
    assert "no checkpoint of step 8: the one before is still being written" in caplog.text
    steps = [e.step for e in Checkpoints(open_store(str(place))).found()]
    assert steps == [4, 16]


def test_an_attempt_that_others_remove_is_one_that_fails(tmp_path: Path) -> None:
    """A newer checkpoint has made it superfluous; the thread that writes continues with others."""

    class Pruned(LocalStore):
        def files(self, directory: str) -> dict[str, int]:
            self.remove(directory)
            return super().files(directory)

    with pytest.raises(OSError, match="was removed after it had been written"):
        write_rank(Pruned(tmp_path), "step-4.partial-a", ("0", 0), {}, {"a": torch.ones(1)})


def test_checkpoint_in_progress_at_the_end_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint waits for the previous one up to a limit, and then uses another copy."""
    last_is_written, same, write = threading.Event(), list[bool](), write_rank

    def slow(*given: Any) -> Any:
        store, directory, place, data, tensors = given
        if directory.startswith("step-4."):
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            assert last_is_written.wait(60)
            same.append(all(torch.equal(before[name], tensors[name]) for name in before))
            return write(store, directory, place, data, before)
        found = write(*given)
        last_is_written.set()
        return found

    monkeypatch.setattr(writer, "write_rank", slow)
    monkeypatch.setattr(writer, "_CLOSE_S", 0.5)
    settings = at(tmp_path / "checkpoints", keep=0)
    Start(tmp_path / "traces", checkpoint=settings).train(Stream(), 6, outruns=True)
    wait_until(lambda: not is_writing(), "all are written")
    assert same == [True]


def _fill_the_disk(root: Path) -> None:
    """Run in a process whose files cannot be longer than half a checkpoint's."""
    logging.basicConfig(filename=root / "log")
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    start = Start(root / "traces", width=40_000, checkpoint=at(root / "checkpoints", keep=0))
    start.train(Stream(), 9)
    (root / "steps").write_text(str(start.manager.current_step()))


def test_full_disk_costs_the_checkpoint_and_leaves_no_partial_one(tmp_path: Path) -> None:
    env = dict.fromkeys(SET_BY_LAUNCHERS)
    process = Forked(_fill_the_disk, tmp_path, env=env, log=tmp_path / "out")
    try:
        assert process.wait(120) == 0, process.tail()
    finally:
        process.end()
    assert (tmp_path / "steps").read_text() == "9"
    assert not list((tmp_path / "checkpoints").rglob("*.safetensors*"))
    failed = notes(tmp_path / "traces", "checkpoint_failed")
    assert [n["step"] for n in failed] == [4, 8, 9]
    assert all(n["phase"] == "writing" for n in failed)
    assert (tmp_path / "log").read_text().count("no checkpoint of step") == 3


@pytest.mark.parametrize(
    ("group", "groups", "is_own"), [("x", 1, True), ("0", 2, True), ("1", 2, False)]
)
def test_a_group_takes_the_random_states_that_were_its_own(
    group: str,
    groups: int,
    is_own: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The only group of a job may have another name than before.

    If there are several, a group that was not in the checkpoint does not draw the numbers of
    another one.
    """
    monkeypatch.setenv("FFT_GROUP", "0")
    whole = Start(tmp_path / "whole").train(Stream(), 5)
    Start(tmp_path / "first", checkpoint=at(tmp_path / "checkpoints")).train(Stream(), 4)
    monkeypatch.setenv("FFT_GROUP", group)
    again = Start(tmp_path / "second", 7, checkpoint=at(tmp_path / "checkpoints"))
    again.manager._parts.checkpointer.loader._groups = (
        groups  # a single process announces one group
    )
    again.train(Stream(), 5)
    assert (again.losses == whole.losses[4:]) == is_own
    assert ("no buffers and random states of group 1" in caplog.text) == (not is_own)


def test_audit_finds_a_start_that_resumes_an_uncommitted_state(tmp_path: Path) -> None:
    place, traces = tmp_path / "checkpoints", tmp_path / "traces"
    Start(traces, checkpoint=at(place)).train(Stream(), 6)
    Start(traces / "start2", 7, checkpoint=at(place)).train(Stream(), 9)
    found = audit_job(traces)
    assert found.ok and found.resumed.checks == 1, found.render()
    assert "2 starts: ok  resumed: each start began" in found.render()
    Start(tmp_path / "other", seed=3).train(Stream(), 6)  # the same steps on another lineage
    for path in traces.glob("*.jsonl"):
        path.unlink()
    for path in (tmp_path / "other").glob("*.jsonl"):
        path.rename(traces / path.name)
    found = audit_job(traces)
    assert not found.ok and not found.to_json()["ok"]
    assert "where no earlier start has committed" in found.render()
    assert "start2/" in found.resumed.place


def test_start_with_removed_traces_is_missed(tmp_path: Path) -> None:
    """This holds although it committed nothing from which the next one resumes."""
    place, traces = tmp_path / "checkpoints", tmp_path / "traces"
    Start(traces, checkpoint=at(place)).train(Stream(), 4)
    for number in (2, 3):
        Start(traces / f"start{number}", 7, checkpoint=at(place, resume=4)).train(Stream(), 6)
    assert audit_job(traces).ok
    shutil.rmtree(traces / "start2")
    found = audit_job(traces)
    assert not found.ok
    assert "start2 has no traces, and start3 came after it" in found.render()


# --- what does not fit ----------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Checkpoints of steps 4 and 6."""
    where = tmp_path / "checkpoints"
    Start(tmp_path / "first", checkpoint=at(where)).train(Stream(), 6)
    return where


def test_drain_before_the_first_step_ends_the_process_in_its_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = Start(tmp_path / "traces")
    start.manager.drain()
    with pytest.raises(Drained):
        start.train(Stream(), 5)
    assert start.losses == []
    assert "was no member of the job when it left and made no step" in caplog.text


def test_another_model_is_refused_before_anything_is_changed(place: Path, tmp_path: Path) -> None:
    start = Start(tmp_path / "second", seed=7, width=WIDTH + 1, checkpoint=at(place))
    before = start.manager.digest()
    with pytest.raises(StateMismatch, match=r"0.0.weight\]: expected shape") as raised:
        start.train(Stream(), 9)
    for text in (
        f"step 6, {place}/step-6,",
        "another --checkpoint directory",
        f"[{WIDTH}, {WIDTH}]",
    ):
        assert text in str(raised.value)
    assert start.manager.digest() == before


def test_other_data_are_refused(place: Path, tmp_path: Path) -> None:
    loader = fft.CursorLoader(data(), 4, seed=5)
    with pytest.raises(DataError, match="another kind of loader"):
        Start(tmp_path / "second", checkpoint=at(place)).train(loader, 9)


def test_a_new_job_is_not_mixed_into_the_checkpoints_of_another(
    place: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="go on from them by --resume"):
        Start(tmp_path / "second", checkpoint=at(place, resume=False)).train(Stream(), 9)


def test_damaged_requested_step_is_not_replaced_by_another(place: Path, tmp_path: Path) -> None:
    file = next((place / "step-4").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="its SHA-256 is not as it was written"):
        Start(tmp_path / "second", checkpoint=at(place, resume=4)).train(Stream(), 9)
    start = Start(tmp_path / "third", checkpoint=at(place)).train(Stream(), 9)
    assert len(start.losses) == 3, "the newest, of step 6, is whole"


def test_a_checkpoint_of_stages_is_refused_by_a_job_that_has_none(
    place: Path, tmp_path: Path
) -> None:
    path = place / "step-6" / "manifest.json"
    manifest = unsealed(Manifest, path.read_bytes(), "it")
    at_job = manifest.scopes["job"]
    stages = {"stage0": at_job, "stage1": at_job}
    path.write_bytes(sealed(manifest.model_copy(update={"scopes": stages})))
    refused = "the scopes stage0, stage1, and this job has job"
    with pytest.raises(CheckpointError, match=refused):
        Start(tmp_path / "second", checkpoint=at(place)).train(Stream(), 9)
    with pytest.raises(CheckpointError, match=refused):  # before a model is built
        Start(tmp_path / "third", checkpoint=at(place, resume=6))


@pytest.mark.parametrize("change", [{"format": 2}, {"more": 1}, {"step": "6"}])
def test_manifest_of_another_version_that_cannot_be_read_is_refused_with_both(
    place: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = place / "step-6" / "manifest.json"
    later = {**json.loads(path.read_text()), **change, "fft_version": "9.1.0"}
    del later["sha256"]
    text = json.dumps(later, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**later, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    refused = rf"FFT 9\.1\.0 has written it, and this is FFT {re.escape(fft.__version__)}: .* FFT 9"
    with pytest.raises(DamagedCheckpoint, match=refused):
        Start(tmp_path / "second", checkpoint=at(place, resume=6)).train(Stream(), 9)


def test_state_of_another_version_that_does_not_fit_is_refused_with_both(
    place: Path, tmp_path: Path
) -> None:
    path = place / "step-6" / "manifest.json"
    manifest = unsealed(Manifest, path.read_bytes(), "it")
    path.write_bytes(sealed(manifest.model_copy(update={"fft_version": "9.1.0"})))
    start = Start(tmp_path / "second", checkpoint=at(place), width=WIDTH + 1)
    with pytest.raises(StateMismatch, match=r"--resume\. FFT 9\.1\.0 has written it"):
        start.train(Stream(), 9)


def test_a_rate_that_the_next_body_sets_is_not_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many loops compute it for each step. Values that last until the update are read after it."""

    is_set, look_up = threading.Event(), Snapshot._look_up

    def late(self: Snapshot) -> None:
        assert is_set.wait(60)
        look_up(self)

    monkeypatch.setattr(Snapshot, "_look_up", late)
    start = Start(tmp_path / "traces", checkpoint=at(tmp_path / "checkpoints"))

    def forward(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        start.optimizer.param_groups[0]["lr"] = 0.5 + len(start.losses)
        if len(start.losses) == 4:
            is_set.set()

    start.model.register_forward_pre_hook(forward)
    start.train(Stream(), 5)
    (file,) = (tmp_path / "checkpoints" / "step-4").glob("g*r0.json")
    tree = json.loads(file.read_text())
    assert tree["state"]["optimizers"][0]["param_groups"][0]["lr"] == 3.5


def test_unsendable_optimizer_state_ends_the_job_after_the_first_step(
    tmp_path: Path,
) -> None:
    """Each group that joined would stop the others; the state exists since the first update."""
    start = Start(tmp_path / "traces")
    odd = start.model[0].weight
    start.manager.on_commit(lambda: start.optimizer.state[odd].update(odd=object()))
    with pytest.raises(FftError, match=r"a group that joins: .*\[model0.0.weight\]\[odd\]"):
        start.train(Stream(), 5)
    assert start.manager.current_step() == 1


def test_unserializable_late_optimizer_state_fails_only_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = Start(tmp_path / "traces", checkpoint=at(tmp_path / "checkpoints"))
    odd, received = start.model[0].weight, reports(start)

    def change() -> None:
        if start.manager.current_step() > 1:
            start.optimizer.state[odd].update(odd=object())

    start.manager.on_commit(change)
    start.train(Stream(), 5)
    assert start.manager.current_step() == 5
    assert [(word.step, word.outcome) for word in received] == [(4, "failed"), (5, "failed")]
    assert "optimizers[0].state[model0.0.weight][odd] is a object" in caplog.text
    assert not Checkpoints(open_store(str(tmp_path / "checkpoints"))).found()


def test_unserializable_state_is_logged_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = Start(tmp_path / "traces", checkpoint=at(tmp_path / "checkpoints"))
    start.manager.on_commit(
        lambda: start.counter.seen.update(odd=torch.ones(2, dtype=torch.cdouble))
    )
    start.train(Stream(), 5)
    assert start.manager.current_step() == 5
    assert "safetensors has no type for tensors of torch.complex128" in caplog.text


def test_checkpoint_of_a_lockstep_job_is_refused_by_local_sgd(place: Path, tmp_path: Path) -> None:
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        spec="local_sgd",
        checkpoint=at(place),
    )
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.register(model, optimizer)
    fft.LocalSGD(manager, model, optimizer, 2)
    try:
        with pytest.raises(CheckpointError, match="taken by groups that step together"):
            next(manager.transactions(fft.CursorLoader(data(), 4, seed=5), 4))
    finally:
        manager.shutdown()


EPOCH = Record(
    1, "epoch", 1, 0, 0, "lineage", 0, 0, Peer("0", 0, 1),
    members=(GroupEntry("0", "", ()), GroupEntry("1", "", ())),
)  # fmt: skip
"""An epoch of two groups."""


def context_of(place: Path, closing: threading.Event | None = None) -> WriterContext:
    """Return what the writers of group 0's first rank need, without a job around them."""
    job: Any = SimpleNamespace(local=None)
    due = CheckpointSchedule(fft.Checkpointing(place), job, lambda: False)
    found, closing = Checkpoints(open_store(str(place))), closing or threading.Event()
    return WriterContext(found, due, ("0", 0), 0, lambda *_: None, closing)


def test_rank_that_delivers_nothing_is_not_awaited(tmp_path: Path) -> None:
    """A checkpoint is published without its buffers; without the shared state it is given up."""
    record = Record(2, "commit", 1, 1, 5, "lineage", 9, 9, Peer("0", 0, 1))
    named = Named(attempt_name("life", "2"), 5, "0")
    attempt = WriteAttempt(named, record, EPOCH, 1, (), "async", "0" * 64, None)
    found, began = Checkpoints(open_store(str(tmp_path))), time.monotonic()

    def publish() -> None:
        RankWriter(context_of(tmp_path), attempt)._publish(0.0)

    decline(found, attempt, ("1", 0))
    decline(found, attempt, ("0", 0))
    with pytest.raises(FftError, match="rank 0 of group 0 delivers nothing, as it has said"):
        publish()
    deliver(found.store, attempt.directory, named.name, "0", 0, 5)
    publish()
    assert found.verify(5).groups == ("0",)
    assert time.monotonic() - began < 20


def publisher_of(
    place: Path, closing: threading.Event, ranks: int = 1, snapshot: Any = None
) -> tuple[WriteAttempt, RankWriter]:
    """Return the process that would publish an attempt of two groups, without taking part in it."""
    record = Record(2, "commit", 1, 1, 5, "lineage", 9, 9, Peer("0", 0, 1))
    named = Named(attempt_name("life", "2"), 5, "0")
    attempt = WriteAttempt(named, record, EPOCH, ranks, (), "hsdp", "0" * 64, None)
    return attempt, RankWriter(context_of(place, closing), attempt, snapshot)


def test_rank_of_the_writers_group_that_delivers_nothing_ends_attempt(tmp_path: Path) -> None:
    """The attempt ends at once, whether or not the other groups have reported anything."""
    found, began = Checkpoints(open_store(str(tmp_path))), time.monotonic()
    attempt, publisher = publisher_of(tmp_path, threading.Event(), ranks=2)
    deliver(found.store, attempt.directory, attempt.named.name, "0", 0, 5)
    decline(found, attempt, ("0", 1))
    with pytest.raises(FftError, match="rank 1 of group 0 delivers nothing, as it has said"):
        publisher._publish(0.0)
    assert time.monotonic() - began < 20
    assert not found.found() or found.found()[0].step is None


@pytest.mark.parametrize("case", ["delivers", "ends", "is whole"])
def test_failed_attempt_is_removed_after_its_writers_stop(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the process ends before that, the attempt stays; so does one with a manifest."""
    monkeypatch.setattr("fft.train.checkpoint.writer._CLOSING_S", 0.1)
    closing = threading.Event()
    attempt, writer = publisher_of(tmp_path, closing)
    thread = threading.Thread(target=writer.decline)
    thread.start()
    place, store = tmp_path / attempt.directory, open_store(str(tmp_path))
    wait_until((place / "g0r0.receipt").exists, "it has said that it delivers nothing")
    if case == "ends":
        closing.set()
    else:
        if case == "is whole":
            store.write(f"{attempt.directory}/manifest.json", b"{}")
        deliver(store, attempt.directory, attempt.named.name, "1", 0, 5)
    thread.join(30)
    assert not thread.is_alive()
    assert place.exists() == (case != "delivers")
    assert ("is left to the next start" in caplog.text) == (case == "ends")
    assert ("waiting for ranks that may still write in it" in caplog.text) == (case == "ends")


def test_one_that_waits_for_others_is_not_ended_by_the_next(tmp_path: Path) -> None:
    attempt, publisher = publisher_of(tmp_path, threading.Event())
    found = Checkpoints(open_store(str(tmp_path)))
    thread = threading.Thread(target=publisher._publish, args=(0.0,))
    thread.start()
    publisher.supersede()
    for group in ("0", "1"):
        deliver(found.store, attempt.directory, attempt.named.name, group, 0, 5)
    thread.join(30)
    assert found.verify(5).groups == ("0", "1")


def test_failed_attempt_is_removed_after_the_limit_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fft.train.checkpoint.writer._WAIT_S", 0.1)
    attempt, writer = publisher_of(tmp_path, threading.Event())
    writer.decline()
    assert not (tmp_path / attempt.directory).exists()


def test_directory_remade_by_a_late_rank_is_removed_before_the_next(tmp_path: Path) -> None:
    attempt, writer = publisher_of(tmp_path, threading.Event())
    found = Checkpoints(open_store(str(tmp_path)))
    thread = threading.Thread(target=writer.decline)
    thread.start()
    wait_until(lambda: writer.is_over, "it has begun")
    writer.supersede()
    thread.join(30)
    deliver(found.store, attempt.directory, attempt.named.name, "1", 0, 5)
    assert found.store.directories() == [attempt.directory]
    writer._context.sweep()
    assert found.store.directories() == []


@pytest.mark.parametrize("case", ["next one begins", "job ends"])
def test_wait_for_undeliverable_receipts_is_bounded(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others cannot report that they have stopped writing either.

    The attempt is removed with its files when the next one begins; at the end the job does not wait
    for a missing attempt.
    """
    closing = threading.Event()
    attempt, writer = publisher_of(tmp_path / "place", closing)
    if case == "next one begins":
        store = open_store(str(tmp_path / "place"))
        store.write(f"{attempt.directory}/g1r0.json", b"{}")
    else:
        (tmp_path / "place").write_text("no directory any more")
    thread = threading.Thread(target=writer.decline)
    thread.start()
    wait_until(lambda: writer.is_over, "it has begun")
    if case == "next one begins":
        writer.supersede()
    else:
        closing.set()
    thread.join(3.0)
    assert not thread.is_alive()
    assert not (tmp_path / "place" / attempt.directory).exists()
    assert "is left to the next start" not in caplog.text
    assert ("cannot be written" in caplog.text) == (case == "job ends")


def test_leftovers_of_a_stopped_writer_are_removed_when_it_wakes(tmp_path: Path) -> None:
    """Others have published a later one meanwhile, so no process writes in this one any more."""

    class Late:
        problem = "it was not copied in time"

        def copy(self) -> bool:
            return False

    attempt, publisher = publisher_of(tmp_path, threading.Event(), snapshot=Late())
    found, name = Checkpoints(open_store(str(tmp_path))), attempt_name("life", "3")
    directory = written(found.store, 9, name)
    found.publish(directory, manifest_of(found.store, directory, name, 9))
    deliver(found.store, attempt.directory, attempt.named.name, "0", 0, 5)
    thread = threading.Thread(target=publisher.run)
    thread.start()
    thread.join(3.0)
    assert not thread.is_alive()
    assert found.store.directories() == ["step-9"]


def cut_of(tmp_path: Path, cursor: int, **record: Any) -> tuple[WriteAttempt, RankWriter]:
    """Return the first stage's part of a checkpoint of two stages, at that place in the data."""
    held = Record(2, "commit", 1, 1, 5, "lineage", cursor, 9, Peer("0", 0, 1), **record)
    named = Named(attempt_name("life", "2"), 5, "0")
    stages = ("stage0", "stage1")
    attempt = WriteAttempt(named, held, EPOCH, 2, stages, "pipeline_ahead", "0" * 64, None)
    return attempt, RankWriter(context_of(tmp_path), attempt)


def test_group_with_stages_at_another_step_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    attempt, writer = cut_of(tmp_path, 9)

    def manifest(last_of_0: int, last_of_1: int) -> Manifest:
        places = {("0", 0): 9, ("1", 0): 9, ("0", 1): last_of_0, ("1", 1): last_of_1}
        return writer._manifest(
            {
                (group, rank): Receipt(
                    attempt=attempt.named.name,
                    group=group,
                    rank=rank,
                    files=(),
                    at=attempt.at.model_copy(update={"cursor": cursor}),
                )
                for (group, rank), cursor in places.items()
            }
        )

    found = manifest(8, 8)
    assert found.groups == ("0", "1")
    assert [found.scopes[name].cursor for name in ("stage0", "stage1")] == [found.cursor, 8]
    assert manifest(8, 7).groups == ("0",)
    with pytest.raises(FftError, match="'stage1' came to slice 10 of the data, and the stage"):
        manifest(10, 10)


def test_entries_that_are_on_their_way_at_the_cut_are_kept(tmp_path: Path) -> None:
    """The next stage is less than a txn behind, except at the end of the job."""
    for cursor in (8, 9):
        attempt, _ = cut_of(tmp_path, cursor)
        assert attempt.gives == range(cursor - len(attempt.groups), cursor)
        alone = replace(attempt, epoch=replace(EPOCH, members=EPOCH.members[:1]), most=3)
        assert alone.gives == range(cursor - 3, cursor), "the next stage may have all groups"
    assert cut_of(tmp_path, 9, last=True)[0].gives == range(9)


def test_a_torchft_loop_with_functions_of_its_own_resumes(tmp_path: Path) -> None:
    """The loop uses no `register`, and makes the update itself."""

    def run(traces: Path, steps: int, seed: int, **settings: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        model = nn.Linear(WIDTH, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        manager = fft.ManagerFFT(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=load,
            state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            min_replica_size=1,
            trace_dir=traces,
            **settings,
        )
        try:
            manager.start_quorum()
            while True:
                optimizer.zero_grad()
                batch = torch.sin(torch.arange(float(WIDTH)) * (manager.current_step() + 1))
                (model(batch) + 0.1 * torch.randn(1)).square().backward()
                for parameter in model.parameters():
                    manager.allreduce(parameter.grad).wait()
                assert manager.should_commit()
                optimizer.step()
                if manager.current_step() >= steps:
                    break
                manager.start_quorum()
        finally:
            manager.shutdown()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    whole = run(tmp_path / "whole", 11, 3)
    place = tmp_path / "checkpoints"
    run(tmp_path / "a", 6, 3, checkpoint=at(place))
    again = run(tmp_path / "b", 11, 55, checkpoint=at(place))
    assert json.dumps(again.tolist()) == json.dumps(whole.tolist())
    assert notes(tmp_path / "b", "resumed")[0]["step"] == 4


def test_long_work_of_a_script_between_two_steps_is_traced(tmp_path: Path) -> None:
    def evaluates() -> bool:
        if len(start.losses) == 2:
            time.sleep(1.2)  # the evaluation
        return False

    start = Start(tmp_path)
    start.train(Stream(), 4, between=evaluates)
    (note,) = notes(tmp_path, "idle")
    assert 1.2 <= note["seconds"] < 60
