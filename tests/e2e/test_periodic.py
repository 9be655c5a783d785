"""Tests of local groups: refusals and their fixes, leases, checkpoints, and lost progress."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import Change, in_turn, nth_note, rewrite, saying
from stage import Job, Member, Numbers, batch_of, job, records
from torch import nn
from torchft.optim import OptimizerWrapper

import fft
from fft.errors import FftError, StepRetriesExceeded
from fft.messages.effects import StartTxn
from fft.messages.protocol import Token
from fft.trace.audit import audit_dir, read_lines, trace_files
from fft.trace.report import incidents

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
    outer = member.job.outer = _outer(model)  # type: ignore[attr-defined]
    return fft.DiLoCo(manager, [model], member.optimizer, outer, every, **options)


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


def _outer_over_a_copy(m: Member) -> None:
    fft.DiLoCo(m.manager, [m.model], m.optimizer, _outer(copy.deepcopy(m.model)), 4)


def _outer_swapped(m: Member) -> None:
    parts = [m.model[0], m.model[1]]
    fft.DiLoCo(m.manager, parts, m.optimizer, [_outer(parts[1]), _outer(parts[0])], 4)


def _outer_of_more(m: Member) -> None:
    outer = torch.optim.SGD([*m.model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    fft.DiLoCo(m.manager, [m.model], m.optimizer, outer, 4)


def _frozen_part(m: Member) -> None:
    m.model[0].requires_grad_(False)
    fft.DiLoCo(m.manager, [m.model[0], m.model[1]], m.optimizer, _outer(m.model), 4)


def _thawed(m: Member) -> None:
    m.model[0].requires_grad_(False)
    diloco = _diloco(m, 1)
    m.model[0].requires_grad_(True)
    diloco.begin(_plan(0, 0))
    diloco.launch()


def _too_few_items(m: Member) -> None:
    _diloco(m)
    next(m.manager.transactions([torch.arange(4)] * (EVERY - 1)))


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
        (_outer_registered, r"give it to fft\.DiLoCo alone"),
        (_too_few_outer, "give one for each, or one for all"),
        (_not_a_list, r"\[model\]"),
        (_does_not_divide, "give a multiple of their number"),
        (lambda m: _diloco(m, fragment_sync_delay=EVERY), "give less"),
        (lambda m: _diloco(m, fragment_update_alpha=1.5), "give 0 to 1"),
        (lambda m: _diloco(m, should_quantize=True), "leave it out"),
        (_outer_over_a_copy, "make the optimizer over the parameters of the fragment"),
        (_outer_swapped, "in no parameter group of its outer optimizer"),
        (_outer_of_more, "make it over the same model"),
        (_frozen_part, "leave it out, or join it"),
        (_thawed, "freeze it after that"),
        (_too_few_items, "pass more items, or synchronize more often"),
        (_synced, "leave the call, or the wrapper, out"),
        (_synced_after, "leave the call, or the wrapper, out"),
        (_changed_after, "when the model is complete"),
        (lambda m: next(m.manager.transactions(_loader())), "make fft.LocalSGD"),
    ],
)
def test_a_mistake_is_refused_with_its_fix(
    made: Job, mistake: Callable[[Member], object], mend: str
) -> None:
    with pytest.raises(FftError, match=mend):
        mistake(_registered(made))


def test_local_sgd_requires_a_periodic_spec(made: Job) -> None:
    member = _registered(made, spec="hsdp")
    with pytest.raises(FftError, match="spec='local_sgd'"):
        fft.LocalSGD(member.manager, member.model, member.optimizer, 2)


def test_groups_that_step_together_have_no_weights(made: Job) -> None:
    member = made.member("0")
    with pytest.raises(FftError, match=r"only fft\.LocalSGD and fft\.DiLoCo weigh steps"):
        for txn in member.manager.transactions(_loader(), 1):
            assert txn.inner_step == 0
            with txn:
                txn.weigh(2.0)


def test_diloco_requires_a_registered_inner_optimizer(made: Job) -> None:
    member = _member(made)
    with pytest.raises(FftError, match=r"call manager\.register"):
        _diloco(member)


def test_a_loader_that_is_read_from_its_beginning_is_refused(made: Job) -> None:
    member = _registered(made)
    _diloco(member)
    with pytest.raises(FftError, match="CursorLoader"):
        next(member.manager.transactions(fft.Loader(iter([1]), replay_only=True)))


@pytest.mark.parametrize(
    ("body", "mend"),
    [
        (lambda m, txn: m.manager.allreduce(torch.ones(1)), "before the synchronization"),
        (lambda m, txn: None, r"no backward\(\)"),
        (lambda m, txn: (_step(m, txn), txn.weigh(1.0)), "else never"),
        (lambda m, txn: txn.weigh(-1), "positive"),
        (lambda m, txn: m.job.outer.step(), "remove the call"),  # type: ignore[attr-defined]
    ],
)
def test_forbidden_calls_in_an_inner_step_raise(
    made: Job, body: Callable[[Member, Any], object], mend: str
) -> None:
    member = _registered(made)
    _diloco(member)
    with pytest.raises(FftError, match=mend):
        for txn in member.manager.transactions(_loader(), 2):
            with txn:
                body(member, txn)


def test_no_step_of_a_group_alone_is_the_last_of_a_pass(made: Job) -> None:
    member = _registered(made)
    _diloco(member)
    for txn in member.manager.transactions(_loader(), 1):
        with txn:
            _step(member, txn)
        with pytest.raises(FftError, match="not available with local steps"):
            txn.ends_data_epoch  # noqa: B018
        with pytest.raises(FftError, match=r"txn\.progress: not available with local"):
            txn.progress  # noqa: B018


def test_the_same_error_again_and_again_leaves_the_process(made: Job) -> None:
    member = _registered(made)
    _diloco(member)
    with pytest.raises(StepRetriesExceeded, match="the cause") as caught:
        for txn in member.manager.transactions(_loader(), 2):
            with txn:
                raise ValueError("of the user's")
    assert "at step 0, inner step 0" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert any("item 0" in note for note in caught.value.__cause__.__notes__)


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
    assert any(
        ("sync_every: 3 here, 4 there" in e or "sync_every: 4 here, 3 there" in e)
        and "Start all processes with the same script" in e
        for e in errors
    ), errors


def test_resumed_job_returns_the_slices_that_were_not_consumed(
    tmp_path: Path,
) -> None:
    saved: dict[str, Any] = {}

    def first(member: Member) -> None:
        synchronizer = _diloco(member)
        for txn in member.manager.transactions(_loader(), 4):
            if txn.step == 2 and txn.inner_step == 0 and member.group not in saved:
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
        assert member.manager.state_dict()["returned"] == [
            4,
            5,
        ]  # saved again before the first step
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
    """The optimizer raises half way: the parameters are restored to the job's, and no slice is
    lost."""
    member = _member(made)
    schedule = torch.optim.lr_scheduler.StepLR(member.optimizer, 1, 0.5)
    member.manager.register(member.model, member.optimizer, schedule)
    failed: list[int] = []
    before = member.optimizer.step

    def step(*args: Any) -> Any:
        if not failed and txn.inner_step == 1:
            failed.append(1)
            with torch.no_grad():
                member.model[0].weight.add_(1.0)
            raise ValueError("out of memory")
        return before(*args)

    member.optimizer.step = step  # type: ignore[method-assign]
    _diloco(member)
    positions = []
    for txn in member.manager.transactions(_loader(), 2):
        positions.append(txn.inner_step)
        with txn:
            _step(member, txn)
    member.manager.shutdown()
    assert positions == [0, 1, 0, 1, 2, 0, 1, 2]
    assert schedule.last_epoch == 2 * EVERY
    made.audit()
    notes = [line["note"] for line in read_lines(tmp_path / "traces") if line.get("note")]
    assert notes.count("inner_torn") == notes.count("inner_void") == 1
    assert [r["kind"] for r in records(tmp_path / "traces")].count("abort") == 0


def test_report_does_not_count_inner_step_faults_as_job_faults(
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


def test_reductions_of_a_fetching_joiner_do_not_count_for_its_first_lease(made: Job) -> None:
    """Its first txn was rolled back after its state had arrived, so it recomputes what it
    reduces."""
    member = _registered(made)
    synchronizer = _diloco(member)
    state = copy.deepcopy(synchronizer.state_dict())
    reduced: list[torch.Tensor] = []
    member.manager._parts.reductions.reduce_gradients = (  # type: ignore[method-assign]
        lambda tensor, layout: reduced.append(tensor.clone())
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
    assert torch.equal(reduced[1], reduced[2])  # the repetition equals the first attempt


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

    def reduce(tensor: torch.Tensor, layout: str) -> Done:
        made_of.append(tensor.clone())
        return Done()

    member.manager._parts.reductions.reduce_gradients = reduce  # type: ignore[method-assign,assignment]
    synchronizer.begin(_plan(0, 0))
    with torch.no_grad():
        member.model[1].bias.add_(-1.0)
    synchronizer.stepped(1e6)
    synchronizer.launch()
    assert made_of[0].dtype == torch.float32 and made_of[0].isfinite().all()
    before = member.model[1].bias.clone()
    synchronizer.apply()
    assert member.model[1].bias.isfinite().all() and not torch.equal(member.model[1].bias, before)


@contextmanager
def _raising(member: Member, at: Callable[[], bool]) -> Iterator[list[float]]:
    """Make the inner optimizer raise half way at ``at``; return what it was to apply."""
    before, applied = member.optimizer.step, []

    def step(*args: Any) -> Any:
        applied.append(max(float(p.grad.abs().max()) for p in member.model.parameters()))
        if at():
            with torch.no_grad():
                member.model[0].weight.add_(1.0)
            raise ValueError("out of memory")
        return before(*args)

    member.optimizer.step = step  # type: ignore[method-assign]
    yield applied
    member.optimizer.step = before  # type: ignore[method-assign]


@pytest.mark.parametrize("inner_step", [EVERY - 1, 0])
def test_inner_step_lost_beside_a_reduction_voids_the_reduction(
    tmp_path: Path, inner_step: int
) -> None:
    """Otherwise a COMMIT would apply what was reduced before, or nothing."""
    at: dict[str, tuple[int, int]] = {}
    torn: list[int] = []

    def work(member: Member) -> None:
        diloco = _diloco(member, fragment_sync_delay=1)

        def is_due() -> bool:
            due = member.group == "1" and at.get("1") == (2, inner_step) and not torn
            torn.extend([1] * due)
            return due

        with _raising(member, is_due):
            for txn in member.manager.transactions(_loader(), 6):
                at[member.group] = (txn.step, txn.inner_step)
                with txn:
                    _step(member, txn)
        member.consumed = [diloco.shared.fingerprint()]  # type: ignore[list-item]

    with job(tmp_path / "traces", 2) as made:
        members = [_registered(made, str(g), check_replicas=1) for g in (0, 1)]
        for member in members:
            member.start(work)
        for member in members:
            member.end()
            assert member.error is None, repr(member.error)
        made.audit()
    assert torn and members[0].consumed == members[1].consumed
    aborts = [r for r in records(tmp_path / "traces") if r["kind"] == "abort"]
    assert len(aborts) == (inner_step == EVERY - 1)


def test_an_update_that_always_fails_leaves_the_process(made: Job) -> None:
    member = _registered(made)
    _diloco(member)
    with _raising(member, lambda: True) as applied, pytest.raises(StepRetriesExceeded) as caught:
        for txn in member.manager.transactions(_loader(), 2):
            with txn:
                _step(member, txn)
    assert len(applied) == 2 and isinstance(caught.value.__cause__, ValueError)


def test_recurring_late_update_failure_raises_step_retries_exceeded(made: Job) -> None:
    """Such an update is a schedule that is over: the steps before it are committed again and
    again."""
    member = _registered(made)
    _diloco(member)
    with _raising(member, lambda: txn.inner_step == 2), pytest.raises(StepRetriesExceeded):
        for txn in member.manager.transactions(_loader(), 2):
            with txn:
                _step(member, txn)


@pytest.mark.parametrize("fails", ["in the body", "in the update"])
def test_a_scaler_has_unscaled_nothing_when_a_step_is_computed_again(made: Job, fails: str) -> None:
    member = _member(made)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    member.manager.register(member.model, member.optimizer, scaler=scaler)
    _diloco(member)
    failed: list[int] = []

    def once() -> bool:
        due = not failed and txn.inner_step == 1
        failed.extend([1] * due)
        return due

    with _raising(member, lambda: fails == "in the update" and once()) as applied:
        for txn in member.manager.transactions(_loader(), 3):
            with txn:
                scaler.scale(member.model(batch_of(txn.batch)).square().mean()).backward()
                if fails == "in the body":
                    scaler.unscale_(member.optimizer)
                    if once():
                        raise ValueError("after unscale_")
    assert failed and max(applied) < 100 * min(applied)


def test_restarted_group_has_the_synchronized_state_only(made: Job) -> None:
    member = _member(made)
    schedule = torch.optim.lr_scheduler.StepLR(member.optimizer, 1, 0.5)
    counted = torch.nn.Linear(1, 1)
    member.manager.register(member.model, member.optimizer, schedule, extra={"counted": counted})
    diloco = _diloco(member)

    def inner_step() -> None:
        member.model(torch.ones(2, 8)).square().mean().backward()
        member.optimizer.step()
        schedule.step()
        with torch.no_grad():
            counted.bias.add_(1.0)

    def stands() -> Any:
        others = (schedule.last_epoch, float(counted.bias), member.optimizer.param_groups[0]["lr"])
        return others, [p.detach().clone() for p in member.model.parameters()]

    diloco.shared.take()
    inner_step()
    with torch.no_grad():
        for fragment in diloco.shared.fragments:
            for name, parameter in fragment.parameters.items():
                fragment.globals[name].copy_(parameter)
    diloco.skip()  # the end of a window
    there = stands()
    sent = copy.deepcopy(diloco.state_dict())
    for begin in (diloco.start_over, lambda: diloco.load_state_dict(sent)):
        inner_step()
        begin()
        now = stands()
        assert now[0] == there[0]
        assert all(map(torch.equal, now[1], there[1]))
        assert not member.optimizer.state
    inner_step()
    diloco.skip()  # its own schedule is one step ahead, but the fetched state's schedule counts
    diloco.load_state_dict(sent)
    diloco.start_over()
    assert stands()[0] == there[0]


def test_bucket_layout_names_its_parameters(made: Job) -> None:
    """This makes votes of groups that reduce other parameters of equal size mismatch."""
    member = _registered(made)
    parts, laid = [member.model[0], member.model[1]], []
    diloco = fft.DiLoCo(
        member.manager, parts, member.optimizer, _outer(member.model), 4, bucket_cap_mb=1e-4
    )
    diloco.shared.take()
    member.manager._parts.reductions.reduce_gradients = (  # type: ignore[method-assign]
        lambda tensor, layout: laid.append(layout)
    )
    for step in (0, 1):
        diloco.begin(_plan(step, step))
        diloco.launch()
        diloco.skip()
    assert len(set(laid)) == len(laid) == 3  # the first part is too long for one bucket
    names = [name for fragment in diloco.shared.fragments for name in fragment.trained]
    assert all(sum(repr(name) in layout for layout in laid) == 1 for name in names)


def test_each_fragment_has_the_weight_of_its_own_steps(made: Job) -> None:
    member, taken = _registered(made), []
    parts = [member.model[0], member.model[1]]
    diloco = fft.DiLoCo(
        member.manager, parts, member.optimizer, _outer(member.model), 4, weighted=True
    )
    diloco.shared.take()
    member.manager._parts.reductions.reduce_gradients = (  # type: ignore[method-assign]
        lambda tensor, layout: taken.append(float(tensor[-1]))
    )
    for step in range(3):
        diloco.begin(_plan(step, step))
        diloco.stepped(10.0**step)
        diloco.launch()
        diloco.skip()
    assert taken == [1.0, 11.0, 110.0]


def test_frozen_parameters_do_not_move(made: Job) -> None:
    member, reduced = _member(made), []
    member.model[0].requires_grad_(False)
    member.manager.register(member.model, member.optimizer)
    diloco = _diloco(member)
    diloco.shared.take()
    member.manager._parts.reductions.reduce_gradients = (  # type: ignore[method-assign]
        lambda tensor, layout: reduced.append(tensor.numel())
    )
    diloco.begin(_plan(0, 0))
    diloco.launch()
    assert reduced == [sum(p.numel() for p in member.model[1].parameters())]


@pytest.mark.parametrize("delay", [0, 2])
def test_error_reported_in_the_step_function_prevents_the_commit(
    made: Job, tmp_path: Path, delay: int
) -> None:
    """It rolls the job's txn back, as elsewhere, and the inner step with it."""
    member = _registered(made)
    _diloco(member, fragment_sync_delay=delay)
    positions = []
    for txn in member.manager.transactions(_loader(), 2):
        positions.append(txn.inner_step)
        with txn:
            _step(member, txn)
            if len(positions) == 2:
                member.manager.report_error(ValueError("not this one"))
    member.manager.shutdown()
    # it is recomputed; so may be any step that the job's rollback finds in the middle
    assert [at for at, _ in itertools.groupby(positions)] == [0, 1, 2] * 2
    assert positions[:3] == [0, 1, 1]
    made.audit()
    assert [r["cause"] for r in records(tmp_path / "traces") if r["kind"] == "abort"]


INNER: dict[str, tuple[Callable[[], Change], str]] = {
    "one is missing": (lambda: nth_note("inner_commit", 1, lambda note: []), "inner step 2 of"),
    "one is there twice": (lambda: nth_note("inner_commit", 1, lambda n: [n, n]), "follows 2"),
    "the last is missing": (
        lambda: nth_note("inner_commit", EVERY - 1, lambda note: []),
        "were committed by the job, and here were",
    ),
    "another item": (
        lambda: nth_note("inner_commit", 1, saying(item=9)),
        "inner step 1 of slice 0 has item 9 of the data, and not 1",
    ),
    "fewer than in other slices": (
        lambda: in_turn(
            nth_note("inner_commit", EVERY - 1, lambda note: []),
            nth_note("consumed", 0, saying(inner_steps=EVERY - 1)),
        ),
        f"slice 1 has {EVERY} inner steps, another {EVERY - 1}",
    ),
    "not a word": (
        lambda: lambda r: [] if str(r.get("note")).startswith("inner") else [bare(r)],
        "slice 0 was consumed without a word of its inner steps",
    ),
}


def bare(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record without notes of inner steps."""
    if record.get("note") == "consumed":
        del record["data"]["inner_steps"]
    return record


def test_the_audit_finds_inner_steps_that_are_left_out_or_odd(made: Job, tmp_path: Path) -> None:
    member = _registered(made)
    _train(member, 2)
    member.manager.shutdown()
    assert audit_dir(tmp_path / "traces").ok
    for how, (change, text) in INNER.items():
        traces = shutil.copytree(tmp_path / "traces", tmp_path / how)
        rewrite(trace_files(traces)[0], change())
        found = {f.name: f.violation for f in audit_dir(traces).findings if f.violation}
        assert found.keys() == {"inner_steps"}, how
        assert text in str(found), how


def test_torchft_loop_in_a_diloco_job_is_refused_with_the_right_call(made: Job) -> None:
    member = _registered(made)
    wrapped = OptimizerWrapper(member.manager, member.optimizer)
    with pytest.raises(FftError, match=r"manager\.transactions"):
        wrapped.zero_grad()
