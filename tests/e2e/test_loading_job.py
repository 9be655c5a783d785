"""Tests of data from worker processes in whole jobs: faults, changing members, one main thread."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import forked_run
import numpy as np
import pytest
import torch
from stage import Member, aborts, fetches, job, notes, parameters, records, slices, weights
from torch import nn
from waiting import wait_until

import fft
from fft.errors import DataError
from fft.trace.audit import audit_dir
from fft.train.data.source import Due

SIDE = 6


class Augmented(torch.utils.data.Dataset[Any]):
    """Small images, flipped, shifted and made noisy with all three global generators."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.sin(torch.arange(SIDE * SIDE) * (index + 1.0)).reshape(1, SIDE, SIDE)
        if random.random() < 0.5:
            x = x.flip(2)
        x = x.roll(int(np.random.randint(3)), 1) + 0.1 * torch.randn(x.shape)
        return {"x": x, "index": index}


class Convolutions(nn.Module):
    """A small CNN with batch norm; the same in all groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.last = nn.Linear(4 * (SIDE - 2) ** 2, 1)
        self.generator = torch.Generator()  # Member requires it, but no code draws from it
        drawn = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))).flatten(1))


def images(workers: int = 2) -> fft.CursorLoader:
    """Return the loader of one rank."""
    return fft.CursorLoader(Augmented(), 4, seed=7, num_workers=workers)


def train(member: Member, steps: int | None, trouble: Any = None, workers: int = 2) -> None:
    """Train; the step function edits its batch in place, and then has ``trouble``, if any."""
    for txn in member.manager.transactions(images(workers), max_steps=steps):
        with txn:
            indices = txn.batch.pop("index").tolist()
            x = txn.batch["x"].mul_(2)
            loss = member.model(x).square().mean()
            if trouble is not None:
                trouble(member, txn)
            loss.backward()
        if txn.committed and member.manager.participating_rank() is not None:
            member.consumed += indices


@pytest.mark.long
@pytest.mark.multiprocess
def test_batch_norm_with_augmentation_in_workers_is_bit_equal_under_faults(tmp_path: Path) -> None:
    failed: set[tuple[str, int]] = set()

    def trouble(member: Member, txn: fft.Transaction) -> None:
        first = (member.group, txn.step) not in failed
        if first and txn.step in ({1, 4} if member.group == "0" else {2, 4, 5}):
            failed.add((member.group, txn.step))
            raise RuntimeError("planned")

    ends = []
    for name, what, workers in (
        ("calm", None, 2),
        ("faulty", trouble, 2),
        ("alone", trouble, 0),
    ):
        failed.clear()
        with job(tmp_path / name, 2) as made:
            made_model = [made.member(group, model=Convolutions()) for group in "01"]
            for member in made_model:
                member.start(lambda m, what=what, workers=workers: train(m, 7, what, workers))
            for member in made_model:
                member.end()
                assert member.error is None, repr(member.error)
            assert len(aborts(tmp_path / name)) >= (0 if what is None else 4)
            made.audit()
            ends.append([(weights(m.model), m.consumed) for m in made_model])
    assert ends[0] == ends[1] == ends[2]


class Deadly(Augmented):
    """Images, one of which ends the worker that reads it, twice in each group."""

    def __init__(self, marks: Path) -> None:
        self.marks = marks
        marks.mkdir()

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 64 == 5 and len(list(self.marks.iterdir())) < 2:
            (self.marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.multiprocess
def test_killed_workers_cost_no_step_and_change_no_bit(tmp_path: Path) -> None:
    def work(member: Member, data: Any) -> None:
        loader = fft.CursorLoader(data, 4, seed=7, num_workers=2)
        for txn in member.manager.transactions(loader, max_steps=30):
            with txn:
                member.model(txn.batch["x"]).square().mean().backward()
            member.consumed += txn.batch["index"].tolist()

    ends = []
    for name in ("calm", "killed"):
        with job(tmp_path / name, 2) as made:
            members = [made.member(group, model=Convolutions()) for group in "01"]
            marks = [tmp_path / f"{name}-{member.group}" for member in members]
            for member, folder in zip(members, marks, strict=True):
                data = Augmented() if name == "calm" else Deadly(folder)
                member.start(lambda m, data=data: work(m, data))
            for member in members:
                member.end()
                assert member.error is None, repr(member.error)
            assert aborts(tmp_path / name) == []
            made.audit()
            ends.append([(weights(m.model), m.consumed) for m in members])
    assert any(len(list(folder.iterdir())) == 2 for folder in marks), "workers were killed"
    assert ends[0] == ends[1]


@pytest.mark.multiprocess
def test_members_come_and_go_and_no_worker_is_started_anew(tmp_path: Path) -> None:
    alive: dict[str, set[tuple[int, ...]]] = {}

    class Watched(fft.CursorLoader):
        def take(self, due: Due) -> Any:
            batch = super().take(due)
            pids = tuple(worker.pid for worker in self._iterator._workers)
            alive.setdefault(threading.current_thread().name, set()).add(pids)
            return batch

    def work(member: Member) -> None:
        loader = Watched(Augmented(), 4, seed=7, num_workers=2)
        for txn in member.manager.transactions(loader):
            with txn:
                member.model(txn.batch["x"]).square().mean().backward()
            if txn.committed:
                member.consumed.append(txn.step)

    with job(tmp_path / "traces", 2) as made:
        early = [made.member(group, model=Convolutions()).start(work) for group in "01"]
        wait_until(lambda: len(early[0].consumed) > 4, "two groups train")
        late = made.member("2", model=Convolutions()).start(work)
        wait_until(lambda: len(late.consumed) > 4, "the third group takes part")
        early[0].manager.drain()
        early[0].end()
        before = len(late.consumed)
        wait_until(lambda: len(late.consumed) > before + 4, "the others go on")
        for member in (early[1], late):
            member.manager.drain()
        for member in made.members:
            member.end()
            assert member.error is None, repr(member.error)
        assert {len(pids) for pids in alive.values()} == {1}
        assert sorted(alive) == ["group-0", "group-1", "group-2"]
        used = sorted(slices(made.traces)[0])
        assert used == list(range(len(used)))
        assert [f[0] for f in fetches(made.traces)] == ["2"]
        assert parameters(early[1].model) == parameters(late.model)
        made.audit()


@pytest.mark.multiprocess
def test_main_thread_rollback_interrupts_the_body_but_not_the_loading(
    tmp_path: Path,
) -> None:
    with job(tmp_path / "traces", 1) as made:
        member = made.member("0", monitor=False)
        manager = member.manager
        inside: list[tuple[str, bool]] = []
        pids: set[tuple[int, ...]] = set()
        failed: set[int] = set()

        class Watched(fft.CursorLoader):
            def take(self, due: Due) -> Any:
                inside.append(("take", manager._parts.watchers.interrupter._open))
                batch = super().take(due)
                pids.add(tuple(worker.pid for worker in self._iterator._workers))
                inside.append(("taken", manager._parts.watchers.interrupter._open))
                return batch

        seen: list[tuple[int, list[float]]] = []
        for txn in manager.transactions(Watched(Augmented(), 4, num_workers=2), max_steps=6):
            with txn:
                x = txn.batch["x"]
                seen.append((txn.step, x.flatten().tolist()))
                x.zero_()
                txn.batch["more"] = 1
                if txn.step in (2, 4) and txn.step not in failed:
                    failed.add(txn.step)
                    error = RuntimeError("planned, elsewhere")
                    asker = threading.Timer(0.0, manager.report_error, [error])
                    asker.start()
                    time.sleep(60)  # until it is unwound
                member.model.last.weight.sum().backward()
        assert [step for step, _ in seen] == [0, 1, 2, 2, 3, 4, 4, 5]
        values = dict(seen)
        assert all(values[step] == x for step, x in seen), "each replay had what was loaded"
        assert inside == [("take", False), ("taken", False)] * 8
        assert len(pids) == 1
        waits = [note["data"]["input_ms"] for note in notes(made.traces, "consumed")]
        assert len(waits) == 6
        assert all(wait > 0 for wait in waits)


def test_a_plain_loader_is_refused_before_the_job_is_joined(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(Augmented(), batch_size=4)
    with job(tmp_path / "traces", 1) as made:
        member = made.member("0")
        with pytest.raises(DataError, match=r"fft\.CursorLoader\(dataset, 4"):
            member.train(3, loader)
        assert member.manager._parts.job.engine is None


PLAN = """
faults:
  - {name: fails, kind: exception, step: 3, group: 0, rank: 1, phase: backward}
  - {name: kill, kind: kill, step: 7, group: 1, rank: 0, phase: backward}
"""


@pytest.mark.long
@pytest.mark.multiprocess
def test_processes_with_workers_through_an_exception_and_a_kill(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "workers").mkdir()
    script = str(Path(__file__).with_name("loading_script.py"))
    command = ["run", "--groups", "2", "--ranks", "2"]
    command += ["--faults", str(tmp_path / "plan.yaml"), "--trace-dir", str(tmp_path / "run")]
    command += ["--stop-after-plan", "5", "--timeout", "200", script, str(tmp_path / "workers")]
    done = forked_run.fft(*command, folder=tmp_path, within=240)
    assert done.returncode == 0, done.stdout + done.stderr
    report = audit_dir(tmp_path / "run")
    assert report.ok, report.render()
    cursor = max(record["cursor"] for record in records(tmp_path / "run"))
    for consumed in slices(tmp_path / "run").values():
        assert sorted(consumed) == list(range(cursor))
    started = [path.name.split("-") for path in (tmp_path / "workers").iterdir()]
    assert len(started) == 5, "4 ranks, and the one that took the place of the killed one"
    places = [Path("/proc", pid) for pids in started for pid in pids]
    # init reaps the workers of the killed rank
    wait_until(lambda: not any(map(Path.exists, places)), "all processes have ended", 30)
