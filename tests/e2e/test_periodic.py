"""Groups that step alone: what is refused, with its mend; leases, checkpoints, lost progress."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import Job, Member, Numbers, batch_of, job, records
from torch import nn
from torchft.optim import OptimizerWrapper

import fft
from fft.messages.effects import StartTxn
from fft.messages.protocol import Token
from fft.trace.audit import read_lines
from fft.trace.report import incidents
from fft.util.errors import BodyKeepsFailing, FftError

EVERY = 3


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path / "traces", 1) as it:
        yield it


def _member(job: Job, group: str = "0", **settings: Any) -> Member:
    model = _net()
    model.generator = torch.Generator()
    values = {"spec": "diloco", "register": False, "model": model, "digest": "commit", **settings}
    return job.member(group, **values)


def _registered(job: Job, group: str = "0", **settings: Any) -> Member:
    member = _member(job, group, **settings)
    member.manager.register(member.model, member.optimizer)
    return member


def _outer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


def _diloco(member: Member, every: int = EVERY, **options: Any) -> fft.DiLoCo:
    model, manager = member.model, member.manager
    return fft.DiLoCo(manager, [model], member.optimizer, _outer(model), every, **options)


def _loader() -> fft.CursorLoader:
    return fft.CursorLoader(Numbers(), batch_size=4, seed=1)


def _step(member: Member, txn: fft.Transaction) -> None:
    member.model(batch_of(txn.batch)).square().mean().backward()


# --- what is refused ------------------------------------------------------------------------------


def _two_fragments_share(m: Member) -> None:
    fft.DiLoCo(m.manager, [m.model, m.model[0]], m.optimizer, _outer(m.model), 4)


def _one_is_forgotten(m: Member) -> None:
    fft.DiLoCo(m.manager, [m.model[0]], m.optimizer, _outer(m.model), 4)


def _empty_fragment(m: Member) -> None:
    fft.DiLoCo(m.manager, [m.model, nn.ReLU()], m.optimizer, _outer(m.model), 4)


def _foreign_fragment(m: Member) -> None:
    fft.DiLoCo(m.manager, [m.model, nn.Linear(2, 2)], m.optimizer, _outer(m.model), 4)


def _outer_registered(m: Member) -> None:
    fft.DiLoCo(m.manager, [m.model], m.optimizer, m.optimizer, 4)


def _too_few_outer(m: Member) -> None:
    parts = [m.model[0], m.model[1]]
    fft.DiLoCo(m.manager, parts, m.optimizer, [_outer(m.model)], 4)


def _not_a_list(m: Member) -> None:
    fft.DiLoCo(m.manager, m.model, m.optimizer, _outer(m.model), 4)  # type: ignore[arg-type]


def _does_not_divide(m: Member) -> None:
    parts = [m.model[0], m.model[1]]
    fft.DiLoCo(m.manager, parts, m.optimizer, _outer(m.model), 5)


def _synced(m: Member) -> None:
    m.manager.sync_gradients(m.model)
    _diloco(m)


def _synced_after(m: Member) -> None:
    _diloco(m)
    m.manager.sync_gradients(m.model)


def _changed_after(m: Member) -> None:
    _diloco(m)
    m.model.append(nn.Linear(1, 1))
    next(m.manager.transactions(_loader()))


def test_ranks_that_step_together_need_a_group_to_meet_in(made: Job) -> None:
    with pytest.raises(FftError, match=r"pass shard_pg=fft\.ShardProcessGroupGloo"):
        _member(made, spec="hsdp_diloco", ranks=2)


def test_ranks_of_a_group_cannot_have_unlike_weights(made: Job) -> None:
    shard_pg = fft.ShardProcessGroupGloo()
    with pytest.raises(FftError, match="give all ranks equally many"):
        _diloco(_registered(made, spec="hsdp_diloco", ranks=2, shard_pg=shard_pg), weighted=True)


@pytest.mark.parametrize(
    ("mistake", "mend"),
    [
        (_two_fragments_share, "give it to one of them"),
        (_one_is_forgotten, "put it into one, or freeze it"),
        (_empty_fragment, "leave it out"),
        (_foreign_fragment, "register the model that the fragments are parts of"),
        (_outer_registered, "give it to diloco alone"),
        (_too_few_outer, "give one for each, or one for all"),
        (_not_a_list, r"\[model\]"),
        (_does_not_divide, "give a multiple of their number"),
        (lambda m: _diloco(m, fragment_sync_delay=EVERY), "give less"),
        (lambda m: _diloco(m, fragment_update_alpha=1.5), "give 0 to 1"),
        (lambda m: _diloco(m, should_quantize=True), "leave it out"),
        (_synced, "leave the call out"),
        (_synced_after, "leave the call out"),
        (_changed_after, "when the model is complete"),
        (lambda m: next(m.manager.transactions(_loader())), "make fft.LocalSGD"),
    ],
)
def test_a_mistake_is_refused_with_its_mend(
    made: Job, mistake: Callable[[Member], object], mend: str
) -> None:
    with pytest.raises(FftError, match=mend):
        mistake(_registered(made))


def test_it_needs_a_periodic_spec(made: Job) -> None:
    member = _registered(made, spec="hsdp")
    with pytest.raises(FftError, match="spec='local_sgd'"):
        fft.LocalSGD(member.manager, member.model, member.optimizer, 2)


def test_it_needs_the_inner_optimizer_registered(made: Job) -> None:
    member = _member(made)
    with pytest.raises(FftError, match=r"call manager\.register"):
        _diloco(member)


def test_a_loader_that_is_read_from_its_beginning_is_refused(made: Job) -> None:
    member = _registered(made)
    _diloco(member)
    with pytest.raises(FftError, match="CursorLoader"):
        next(member.manager.transactions(iter([1]), replay_only=True))


@pytest.mark.parametrize(
    ("body", "mend"),
    [
        (lambda m, txn: m.manager.allreduce(torch.ones(1)), "Groups meet when they synchronise"),
        (lambda m, txn: None, r"no backward\(\)"),
        (lambda m, txn: (_step(m, txn), txn.weigh(1.0)), "else never"),
        (lambda m, txn: txn.weigh(-1), "positive"),
    ],
)
def test_what_no_inner_step_may_do_is_told(
    made: Job, body: Callable[[Member, Any], object], mend: str
) -> None:
    member = _registered(made)
    _diloco(member)
    with pytest.raises(FftError, match=mend):
        for txn in member.manager.transactions(_loader(), 2):
            with txn:
                body(member, txn)


def test_the_same_error_again_and_again_leaves_the_process(made: Job) -> None:
    member = _registered(made)
    _diloco(member)
    with pytest.raises(BodyKeepsFailing, match="the cause") as told:
        for txn in member.manager.transactions(_loader(), 2):
            with txn:
                raise ValueError("of the user's")
    assert isinstance(told.value.__cause__, ValueError)
    assert any("item 0" in note for note in told.value.__cause__.__notes__)


# --- jobs -----------------------------------------------------------------------------------------


def _train(member: Member, syncs: int, **options: Any) -> fft.DiLoCo:
    synchronizer = _diloco(member, **options)
    for txn in member.manager.transactions(_loader(), syncs):
        with txn:
            _step(member, txn)
        if txn.committed:
            member.consumed += txn.batch.tolist()
    return synchronizer


def test_a_period_that_differs_between_groups_is_named(tmp_path: Path) -> None:
    with job(tmp_path / "traces", 2) as made:
        members = [_registered(made, str(g), init_sync=True) for g in (0, 1)]
        for g, member in enumerate(members):
            member.start(lambda m, g=g: _train(m, 3, every=EVERY + g))  # type: ignore[misc]
        for member in members:
            member.end()
    errors = [str(m.error) for m in members if m.error is not None]
    assert any("sync_every is" in error and "give all groups the same" in error for error in errors)


def test_a_job_goes_on_from_a_checkpoint_with_the_slices_that_were_not_consumed(
    tmp_path: Path,
) -> None:
    saved: dict[str, Any] = {}

    def first(member: Member) -> None:
        synchronizer = _diloco(member)
        for txn in member.manager.transactions(_loader(), 4):
            if txn.step == 2 and txn.inner_step == 0 and member.group not in saved:  # type: ignore[attr-defined]
                saved[member.group] = {
                    "manager": member.manager.state_dict(),
                    "shared": torch.load(_bytes(synchronizer.state_dict()), weights_only=True),
                }
            with txn:
                _step(member, txn)

    with job(tmp_path / "first", 2) as made:
        members = [_registered(made, str(g)) for g in (0, 1)]
        for member in members:
            member.start(first)
        for member in members:
            member.end()
            assert member.error is None
        made.audit()
    checkpoint = saved["0"]
    assert checkpoint["manager"]["returned"] == [4, 5]
    assert checkpoint["manager"]["cursor"] == 6

    def second(member: Member) -> None:
        member.manager.load_state_dict(checkpoint["manager"])
        synchronizer = _diloco(member)
        synchronizer.load_state_dict(checkpoint["shared"])
        for txn in member.manager.transactions(_loader(), 4):
            with txn:
                _step(member, txn)

    with job(tmp_path / "second", 2) as made:
        again = [_registered(made, str(g)) for g in (0, 1)]
        for member in again:
            member.start(second)
        for member in again:
            member.end()
            assert member.error is None, member.error
        made.audit()
    consumed = [
        line["data"]["slice"]
        for line in read_lines(tmp_path / "second")
        if line.get("note") == "consumed"
    ]
    assert sorted(consumed) == [4, 5, 6, 7]


def _bytes(state: Any) -> Any:
    import io

    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return stream


def test_a_torn_inner_step_begins_the_window_anew(made: Job, tmp_path: Path) -> None:
    """The optimizer raises half way: the parameters are the job's again, and no slice is lost."""
    member = _member(made)
    schedule = torch.optim.lr_scheduler.StepLR(member.optimizer, 1, 0.5)
    member.manager.register(member.model, member.optimizer, schedule)
    failed: list[int] = []
    before = member.optimizer.step

    def step(*args: Any) -> Any:
        if not failed and txn.inner_step == 1:  # type: ignore[attr-defined]
            failed.append(1)
            with torch.no_grad():
                member.model[0].weight.add_(1.0)
            raise ValueError("out of memory")
        return before(*args)

    member.optimizer.step = step  # type: ignore[method-assign]
    _diloco(member)
    positions = []
    for txn in member.manager.transactions(_loader(), 2):
        positions.append(txn.inner_step)  # type: ignore[attr-defined]
        with txn:
            _step(member, txn)
    member.manager.shutdown()
    assert positions == [0, 1, 0, 1, 2, 0, 1, 2]
    assert schedule.last_epoch == 2 * EVERY
    made.audit()
    notes = [line["note"] for line in read_lines(tmp_path / "traces") if line.get("note")]
    assert notes.count("inner_torn") == notes.count("inner_void") == 1
    assert [r["kind"] for r in records(tmp_path / "traces")].count("abort") == 0


def test_a_fault_of_an_inner_step_is_no_fault_of_the_job_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.yaml"
    fault = "{name: own, kind: exception, step: 1, group: 0, rank: 0, phase: backward}"
    plan.write_text(f"faults:\n  - {fault}\n")
    monkeypatch.setenv("FFT_FAULTS", str(plan))
    with job(tmp_path / "traces", 1) as made:
        member = _registered(made)
        _train(member, 3)
        member.manager.shutdown()
    (found,) = [i for i in incidents(tmp_path / "traces") if "own" in i.fault]
    assert "group 0 alone: InjectedFault" in found.noticed
    assert found.next_commit_ms is not None and found.bytes_healed == 0


def _plan(step: int, lease: int | None) -> StartTxn:
    return StartTxn(Token(1, step + 1), step, "", 0, None, 1, ("0",), 0, lease=lease)


def test_what_a_learner_has_reduced_is_no_contribution_of_its_first_lease(made: Job) -> None:
    """Its first txn was rolled back after its state had come: it reduces anew, what it computes."""
    member = _registered(made)
    synchronizer = _diloco(member)
    state = copy.deepcopy(synchronizer.state_dict())
    reduced: list[torch.Tensor] = []
    member.manager.reduce_gradients = (  # type: ignore[method-assign]
        lambda tensor, layout, op: reduced.append(tensor.clone())
    )
    synchronizer.begin(_plan(0, None))
    synchronizer.launch()
    synchronizer.load(state, keep_gradients=True)
    synchronizer.begin(_plan(0, 4))
    with torch.no_grad():
        member.model[1].bias.add_(1.0)
    synchronizer.launch()
    assert reduced[0].abs().sum() == 0 and reduced[1].abs().sum() > 0.5
    synchronizer.begin(_plan(0, 4))  # rolled back
    with torch.no_grad():
        member.model[1].bias.add_(1.0)
    synchronizer.launch()
    assert torch.equal(reduced[1], reduced[2])  # what is repeated is the same


def test_short_numbers_are_weighted_in_long_ones(made: Job) -> None:
    member = _member(made)
    member.model.half()
    member.manager.register(member.model, member.optimizer)
    synchronizer = _diloco(member, weighted=True)
    synchronizer.shared.take()
    made_of: list[torch.Tensor] = []

    class Done:
        def wait(self) -> bool:
            return True

    def reduce(tensor: torch.Tensor, layout: str, op: Any) -> Done:
        made_of.append(tensor.clone())
        return Done()

    member.manager.reduce_gradients = reduce  # type: ignore[method-assign,assignment]
    synchronizer.begin(_plan(0, 0))
    with torch.no_grad():
        member.model[1].bias.add_(-1.0)
    synchronizer.stepped(1e6)
    synchronizer.launch()
    assert made_of[0].dtype == torch.float32 and made_of[0].isfinite().all()
    before = member.model[1].bias.clone()
    synchronizer.apply()
    assert member.model[1].bias.isfinite().all() and not torch.equal(member.model[1].bias, before)


def test_what_the_user_reports_in_a_body_is_not_committed(made: Job, tmp_path: Path) -> None:
    """It rolls the job's txn back, as anywhere; and the inner step with it."""
    member = _registered(made)
    _diloco(member)
    positions = []
    for txn in member.manager.transactions(_loader(), 2):
        positions.append(txn.inner_step)  # type: ignore[attr-defined]
        with txn:
            _step(member, txn)
            if len(positions) == 2:
                member.manager.report_error(ValueError("not this one"))
    member.manager.shutdown()
    assert positions == [0, 1, 1, 2, 0, 1, 2]
    made.audit()
    assert [r["cause"] for r in records(tmp_path / "traces") if r["kind"] == "abort"]


def test_the_audit_finds_an_inner_step_that_is_left_out(made: Job, tmp_path: Path) -> None:
    from fft.trace.inner_steps import judge_inner_steps

    member = _registered(made)
    _train(member, 2)
    member.manager.shutdown()
    lines = [line for line in read_lines(tmp_path / "traces") if line["kind"] == "note"]
    notes = [(f"line {i}", line) for i, line in enumerate(lines)]
    assert judge_inner_steps([notes]).violation is None
    commits = [i for i, (_, line) in enumerate(notes) if line["note"] == "inner_commit"]
    assert len(commits) == 2 * EVERY
    for doctored in (
        notes[: commits[1]] + notes[commits[1] + 1 :],  # one is missing
        [*notes[: commits[1]], notes[commits[1]], *notes[commits[1] :]],  # one is twice
        notes[: commits[2]] + notes[commits[2] + 1 :],  # the last one is missing
    ):
        assert judge_inner_steps([doctored]).violation is not None


def test_torchfts_loop_is_told_that_it_is_another_paradigms(made: Job) -> None:
    member = _registered(made)
    wrapped = OptimizerWrapper(member.manager, member.optimizer)
    with pytest.raises(FftError, match=r"manager\.transactions"):
        wrapped.zero_grad()
