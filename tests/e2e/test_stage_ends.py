"""Tests of how jobs of stages that step by themselves end; in threads of one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import Change, nth_note, rewrite, saying
from stage import Member, job, notes, slices
from staged import WIDTH, Plan, run
from waiting import wait_until

import fft
from fft.bus import open_bus
from fft.checkpoints.files import Checkpoints, attempt_name, name_of
from fft.checkpoints.stores import open_store
from fft.messages.protocol import Token
from fft.trace.audit import trace_files
from fft.trace.format import scope_folder
from fft.trace.resumed import audit_job
from fft.train.paradigms.stages.due import Announcement, announce

BATCHES = 8


@pytest.mark.one_in(3)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "skips",
    [
        pytest.param(([BATCHES - 1], [BATCHES - 1]), id="both"),
        pytest.param(([BATCHES - 1], []), id="first"),
        pytest.param(([], [BATCHES - 1]), id="last"),
    ],
)
def test_data_that_end_with_a_skipped_step_end_the_job(
    groups: int, skips: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    """No group leaves with a skipped step, and no data are left."""
    plan = Plan(BATCHES, overflows=skips)
    made = run(tmp_path, plan, groups)
    steps = [BATCHES // groups - bool(skipped) for skipped in skips]
    assert plan.ends == {f"{g}.{stage}": steps[stage] for g in range(groups) for stage in range(2)}
    for stage, name in enumerate(("", "stage1")):
        taken = slices(scope_folder(tmp_path, name))
        assert sorted(taken[stage]) == list(range(BATCHES))
    made.audit()


def test_a_skipped_step_under_max_steps_is_made_with_another_batch(tmp_path: Path) -> None:
    plan = Plan(BATCHES, steps=(4, 4), overflows=([3], [3]))
    made = run(tmp_path, plan)
    assert plan.ends == {"0.0": 4, "0.1": 4}
    assert sorted(slices(tmp_path)[0]) == list(range(5))
    made.audit()


def test_data_that_end_with_a_skipped_step_end_a_job_without_stages(tmp_path: Path) -> None:
    """This also holds for a group that reaches the end after the other has left, which it
    needed."""
    ends: dict[str, int] = {}
    data = [torch.randn(4, 8) for _ in range(BATCHES)]

    def train(member: Member) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        manager, model = member.manager, torch.nn.Linear(8, 1)
        torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
        optimizer = torch.optim.AdamW(model.parameters())
        manager.register(model, optimizer, scaler=scaler)
        manager.sync_gradients(model)
        for txn in manager.transactions(data):
            with txn:
                loss = model(txn.batch).square().mean()
                is_last = txn._drawn.item >= BATCHES - 2
                scaler.scale(loss * torch.inf if is_last else loss).backward()
            if txn.skipped and member.group == "1":
                wait_until(lambda: not made.members[0].is_at_work, "the other group has left")
        ends[member.name] = manager.current_step()

    with job(tmp_path, 2) as made:
        torch.manual_seed(3)
        made.run(train, register=False, min_replica_size=2)
        assert ends == {"0": BATCHES // 2 - 1, "1": BATCHES // 2 - 1}
        made.audit()


def kept(place: Path, every: int = 4, resume: bool = True) -> dict[str, object]:
    """Return the settings of a job that keeps checkpoints."""
    return {"checkpoint": fft.Checkpointing(place, every=every, keep=0, resume=resume)}


def cursors(place: Path, whole: bool = True) -> dict[int, list[int]]:
    """Return the stages' cursors in each checkpoint by step of the first stage.

    With ``whole``, check that the place holds only these checkpoints.
    """
    found = Checkpoints(open_store(str(place)))
    assert not whole or all(entry.manifest is not None for entry in found.found()), (
        "nothing is left over"
    )
    manifests = [entry.manifest for entry in found.found() if entry.manifest is not None]
    assert len({manifest.groups for manifest in manifests}) == 1, "all groups are in each"
    steps = [manifest.step for manifest in manifests]
    return {step: [at.cursor for at in found.verify(step).scopes.values()] for step in steps}


@pytest.mark.long
@pytest.mark.parametrize("groups", [1, 2])
def test_later_stage_goes_on_after_the_first_one_is_complete(groups: int, tmp_path: Path) -> None:
    """It got additional steps; the first stage's entries are recomputed, and the end is in a
    checkpoint."""
    place = tmp_path / "checkpoints"
    run(tmp_path / "1", Plan(32, steps=(7, 2)), groups, **kept(place))
    assert cursors(place)[7] == [7 * groups, 2 * groups]
    plan = Plan(32, steps=(7, 7))
    made = run(tmp_path / "2", plan, groups, **kept(place))
    assert plan.ends == {f"{g}.{stage}": 7 for g in range(groups) for stage in range(2)}
    assert cursors(place)[7] == [7 * groups, 7 * groups]
    made.audit()


@pytest.mark.long
@pytest.mark.parametrize("groups", [1, 2])
def test_later_stage_that_begins_complete_is_in_the_first_checkpoints(
    groups: int, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoints"
    run(tmp_path / "1", Plan(32, steps=(7, 2)), groups, **kept(place))

    def meanwhile(member: Member, step: int) -> None:
        """Wait until the checkpoint of step 8 is published, because that of the end may be done
        first."""
        if step == 10:
            wait_until(lambda: (place / name_of(8)).exists(), "it is published")

    plan = Plan(32, steps=(12, 2), meanwhile=meanwhile)
    made = run(tmp_path / "2", plan, groups, **kept(place))
    assert plan.ends == {f"{g}.{stage}": (12, 2)[stage] for g in range(groups) for stage in (0, 1)}
    for step in (8, 12):
        assert cursors(place)[step] == [step * groups, 2 * groups]
    made.audit()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("skips", [([7], [7]), ([7], []), ([], [7])])
def test_data_that_end_with_a_skipped_step_end_with_a_checkpoint(
    skips: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    place = tmp_path / "checkpoints"
    run(tmp_path / "traces", Plan(8, overflows=skips), 2, **kept(place, every=1000))
    assert cursors(place) == {4 - bool(skips[0]): [8, 8]}


def test_entry_of_a_failed_attempt_is_in_no_checkpoint(tmp_path: Path) -> None:
    """An example is an attempt of two groups whose slices the next one, of one group, does not all
    take."""
    place = tmp_path / "checkpoints"
    run(tmp_path / "traces", Plan(32, steps=(4, 2), strays=2), **kept(place))
    plan = Plan(32, steps=(7, 7))
    run(tmp_path / "traces" / "start2", plan, **kept(place))
    given = [n["data"]["slice"] for n in notes(tmp_path / "traces" / "start2", "entry_restored")]
    assert max(given, default=0) < cursors(place)[4][0]
    report = audit_job(tmp_path / "traces")
    assert report.ok and report.resumed.checks, report.render()
    for stage, change, text in ODD:
        traces = shutil.copytree(tmp_path / "traces", tmp_path / "odd")
        rewrite(trace_files(scope_folder(traces / "start2", stage))[0], change())
        assert text in audit_job(traces).render()
        shutil.rmtree(traces)


ODD: tuple[tuple[str, Callable[[], Change], str], ...] = (
    (
        "",
        lambda: nth_note("entry_restored", 0, saying(version=5)),
        "is said to be from",
    ),
    ("", lambda: nth_note("entry_restored", 0, saying(slice=9)), "is said to be from"),
    ("stage1", lambda: nth_note("resumed", 0, saying(attempt="x")), "begins with the checkpoint x"),
    ("stage1", lambda: beginning_at(1), "begin at step 2, cursor 1 and"),
)
"""Changes that the audit must detect: the stage whose traces are modified, and the finding."""


def beginning_at(cursor: int) -> Change:
    """Modify the position at which the process began."""

    def of_header(line: dict[str, Any]) -> list[dict[str, Any]]:
        is_header = line["kind"] == "header"
        return [{**line, "start": {**line["start"], "cursor": cursor}} if is_header else line]

    return of_header


def test_checkpoint_without_a_last_stage_writer_is_not_awaited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The present ranks report it. Once the writer is there, too, checkpoints are taken."""
    expected = "rank 1 of group 0 delivers nothing, as it has said"
    plan = Plan(80, steps=(16, 16))
    plan.late = lambda: wait_until(lambda: expected in caplog.text, "the first is given up", 20.0)
    place, limits = tmp_path / "checkpoints", {"join_window": 0.5, "flow_limit": 40.0}
    run(tmp_path / "traces", plan, 2, timeouts=limits, **kept(place))
    assert plan.ends.keys() == {"0.0", "0.1", "1.0", "1.1"}
    assert 16 in cursors(place, whole=False)


def test_a_stage_that_has_passed_the_place_delivers_no_other_state(tmp_path: Path) -> None:
    """The first stage's message comes when the last one has left the place, as happens with
    different numbers of groups."""
    place, name = tmp_path / "checkpoints", attempt_name("life", "late")

    def name_it_late(member: Member, step: int) -> None:
        if member.name == "0.1" and step == 2:
            word = Announcement(Token(99, 1), 2, "0", name, 2, False)
            with open_bus(member.job.bus) as bus:
                announce(bus, (), word)

    plan = Plan(32, steps=(6, 6), meanwhile=name_it_late)
    run(tmp_path / "traces", plan, **kept(place, every=1000))
    traces = tmp_path / "traces" / "scopes" / "stage1"
    (left_out,) = notes(traces, "checkpoint_skipped")
    assert left_out["data"]["step"] == 2 and "has come to its place" in left_out["data"]["reason"]
    assert {note["data"]["step"] for note in notes(traces, "checkpoint_begun")} == {6}


@pytest.mark.parametrize("groups", [1, 2])
def test_job_that_begins_complete_ends_at_once_without_leftovers(
    groups: int, tmp_path: Path
) -> None:
    """This also holds for a later stage whose only group waits for data that will not come."""
    place = tmp_path / "checkpoints"
    run(tmp_path / "1", Plan(32, steps=(4, 4)), groups, **kept(place))
    before = cursors(place)
    run(tmp_path / "2", Plan(32, steps=(4, 4)), groups, **kept(place))
    assert not notes(tmp_path / "2", "checkpoint_failed")
    assert cursors(place) == before


def test_each_stage_sees_the_ends_of_passes(tmp_path: Path) -> None:
    """It sees them with the txn that takes a data epoch's last slice, though it loads nothing
    itself."""
    samples = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(7))
    data = torch.utils.data.TensorDataset(samples)
    seen: dict[str, list[tuple[int, bool]]] = {}

    def train(member: Member) -> None:
        loader = fft.CursorLoader(data, batch_size=2, data_epochs=2, shuffle=False)
        stage, model = member.manager._group_rank, member.model
        member.manager.register(model, member.optimizer)
        member.manager.sync_gradients(model)
        source: Any = fft.StageInput(member.manager, loader) if stage else loader
        output = None if stage else fft.StageOutput(member.manager, model)
        found = seen[member.name] = []
        for txn in member.manager.transactions(source):
            with txn:
                vectors = model(txn.batch if stage else txn.batch[0])
                if output is not None:
                    output.put(txn, vectors)
                vectors.square().mean().backward()
            if txn.committed:
                found.append((txn.data_epoch, txn.ends_data_epoch))

    with job(tmp_path, 1) as made:
        given = [{"spec": "pipeline_ahead", "register": False} for _ in range(2)]
        ranks = made.ranks("0", [{**g, "model": torch.nn.Linear(WIDTH, WIDTH)} for g in given])
        for member in ranks:
            member.start(train)
        for member in ranks:
            member.end()
            assert member.error is None
    of_a_pass = [(0, False), (0, False), (0, False), (1, True)]
    expected = [*of_a_pass, *((n + 1, ends) for n, ends in of_a_pass)]
    assert seen == {"0.0": expected, "0.1": expected}
