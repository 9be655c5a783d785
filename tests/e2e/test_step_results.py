"""Tests of results that are refused before the vote: not finite, or vetoed by the user.

Real groups run in threads over gloo. A refused step changes the state of no rank.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_run import fft as forked_fft
from stage import Job, Member, Numbers, aborts, batch_of, job, notes, parameters, records
from torch import nn
from waiting import wait_until

import fft
import fft.train.session.step_results as step_results
from fft.errors import FftError, ResultRefused, StepRetriesExceeded
from fft.messages.causes import CauseCode
from fft.messages.effects import Heal
from fft.trace.format import RESULT_REFUSED
from fft.trace.report import RunReport
from fft.train.checkpoint.contents import read_tensors
from fft.train.session.step_results import StepResult, sum_of_squares

STEPS, BAD = 6, 3
Body = Callable[[Member, fft.Transaction, torch.Tensor], torch.Tensor]


def _train(member: Member, spoil: Body, steps: int = STEPS) -> None:
    loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
    for txn in member.manager.transactions(loader, steps):
        with txn:
            x = batch_of(txn.batch)
            loss = member.model(x).sub(x.mean(1, keepdim=True)).square().mean()
            loss = spoil(member, txn, loss)
            loss.backward()
            txn.log(loss=loss.item())
        if txn.committed:
            member.consumed += txn.batch.tolist()


def _nan_at(attempts: int, group: str = "1", step: int = BAD) -> Body:
    """Make the loss of ``group`` NaN in its first ``attempts`` attempts at ``step``."""
    left = [attempts]

    def spoil(member: Member, txn: fft.Transaction, loss: torch.Tensor) -> torch.Tensor:
        if member.group != group or txn.step != step or not left[0]:
            return loss
        left[0] -= 1
        return loss * float("nan")

    return spoil


def _unspoilt(member: Member, txn: fft.Transaction, loss: torch.Tensor) -> torch.Tensor:
    return loss


def _run(made: Job, spoil: Body, **settings: Any) -> list[Member]:
    return made.run(lambda member: _train(member, spoil), **settings)


def _errors(
    made: Job,
    spoil: Body = _unspoilt,
    train: Callable[[Member], None] | None = None,
    **settings: Any,
) -> list[BaseException | None]:
    """Run all groups to their end; return their errors."""
    members = [made.member(str(g), **settings) for g in range(made.groups)]
    for member in members:
        member.start(train or (lambda member: _train(member, spoil)))
    for member in members:
        member.end()
    return [member.error for member in members]


def _finite(made: Job) -> bool:
    return all(bool(p.isfinite().all()) for m in made.members for p in m.model.parameters())


def test_nan_that_does_not_recur_is_replayed_to_the_same_bits(tmp_path: Path) -> None:
    with job(tmp_path / "undisturbed", 2) as made:
        expected = [parameters(m.model) for m in _run(made, _unspoilt)]
    with job(tmp_path / "disturbed", 2) as made:
        members = _run(made, _nan_at(1))
        assert [parameters(member.model) for member in members] == expected
        (abort,) = aborts(made.traces)
        assert (abort["code"], abort["accused"], abort["step"]) == ("result_refused", [], BAD)
        made.audit()


def test_nan_that_recurs_ends_the_job_on_all_groups_with_a_finite_state(tmp_path: Path) -> None:
    with job(tmp_path, 2) as made:
        for error in _errors(made, _nan_at(9)):
            assert isinstance(error, StepRetriesExceeded), repr(error)
            assert isinstance(error.__cause__, ResultRefused)
        assert _finite(made)
        assert [member.manager.current_step() for member in made.members] == [BAD, BAD]


def test_stop_ends_the_job_on_all_groups_without_a_second_attempt(tmp_path: Path) -> None:
    with job(tmp_path, 2) as made:
        for error in _errors(made, _nan_at(1), on_nonfinite="stop"):
            assert isinstance(error, ResultRefused), repr(error)
            assert f"step {BAD} was not committed" in str(error)
        assert _finite(made)


def _delay_in_epoch(late: Member, number: int, drains: bool) -> None:
    """Let ``late`` begin no step of its epoch ``number``, counted from 0, before a peer has
    left.

    With ``drains`` it then gets the request to leave.
    """
    worker = late.manager._parts.worker
    connect, epochs = worker._work["connect"], itertools.count()

    def connect_late(command: Heal) -> None:
        connect(command)
        if next(epochs) == number:
            engine = late.manager._parts.job.engine
            assert engine is not None
            wait_until(lambda: engine.local.cause.code == CauseCode.LEFT, "the peer left")
            if drains:
                late.manager.drain()

    worker._work["connect"] = connect_late


@pytest.mark.parametrize(("needed", "drains"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize(
    ("reaction", "attempts", "expected"),
    [("stop", 1, ResultRefused), ("replay", 2, StepRetriesExceeded)],
)
def test_refused_result_ends_a_rank_after_its_peer_has_left(
    reaction: str,
    attempts: int,
    expected: type[FftError],
    needed: int,
    drains: bool,
    tmp_path: Path,
) -> None:
    """If two groups are needed, the rank that is left waits in vain for an epoch."""
    settings = {"min_replica_size": needed, "quorum_timeout": timedelta(seconds=8)}
    with job(tmp_path, 2) as made:
        members = [made.member(str(g), on_nonfinite=reaction, **settings) for g in range(2)]
        _delay_in_epoch(members[0], attempts, drains)
        for member in members:
            member.start(lambda member: _train(member, _nan_at(attempts)))
        for member in members:
            member.end()
            assert isinstance(member.error, expected), repr(member.error)


def test_skip_consumes_the_batch_on_all_groups_and_is_reported(tmp_path: Path) -> None:
    with job(tmp_path, 2) as made:
        members = _run(made, _nan_at(1), on_nonfinite="skip")
        made.audit()
        (skip,) = [r for r in records(tmp_path) if r["kind"] == "commit" and r["skip"]]
        assert skip["step"] == BAD and not aborts(tmp_path)
        assert len(members[0].consumed) == len(members[1].consumed) == 4 * (STEPS + 1)
        assert parameters(members[0].model) == parameters(members[1].model)
        text = RunReport(tmp_path).refusals()
        assert text is not None
        assert text.startswith("refused results; steps skipped, whose batches had no update: 1\n")
        assert f"step {BAD}, skip: the gradients contain NaN or inf, on " in text
        assert "1/0 (norm nan, loss nan)" in text


def test_skips_end_the_job_if_the_weights_are_not_finite(tmp_path: Path) -> None:
    def train(member: Member) -> None:
        with torch.no_grad():  # as a checkpoint with bad weights does, on both groups
            for parameter in member.model.parameters():
                parameter.fill_(float("nan"))
        _train(member, _unspoilt)

    with job(tmp_path, 2) as made:
        for error in _errors(made, train=train, on_nonfinite="skip"):
            assert isinstance(error, ResultRefused), repr(error)
            assert "the weights contain NaN or inf" in str(error)
            assert "a checkpoint with finite weights" in str(error)
            assert 'on_nonfinite="skip"' not in str(error), "this advice cannot help"


def test_skips_in_a_row_are_bounded_and_blame_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_results, "_MANY_SKIPS", 2)
    monkeypatch.setattr(step_results, "_MOST_SKIPS", 3)

    judged = threading.Event()

    def train(member: Member) -> None:
        reactions = iter(["replay"] if member.group == "0" else [])

        def refuse(result: StepResult) -> Any:
            """Repeat the first of these batches after the other group has counted it."""
            if result.step != BAD:
                return None
            if member.group == "1":
                judged.set()
            assert judged.wait(30)
            return next(reactions, None)

        member.manager.veto(refuse)
        _train(member, _nan_at(10_000))

    with job(tmp_path, 2) as made:
        for error in _errors(made, train=train, on_nonfinite="skip"):
            assert isinstance(error, ResultRefused), repr(error)
            assert "the gradients of 3 batches in a row contain NaN or inf" in str(error)
            assert "but the weights are finite" in str(error)
        assert len([r for r in records(tmp_path) if r["kind"] == "commit" and r["skip"]]) == 2
        assert _finite(made)
    assert "of 2 batches in a row" in caplog.text and "ends after 3" in caplog.text


def test_finite_step_ends_the_count_of_skips_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_results, "_MOST_SKIPS", 2)
    is_bad = itertools.cycle([True, False])

    def spoil(member: Member, txn: fft.Transaction, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("nan") if member.group == "1" and next(is_bad) else loss

    with job(tmp_path, 2) as made:
        _run(made, spoil, on_nonfinite="skip")
        commits = [r["skip"] for r in records(tmp_path) if r["kind"] == "commit"]
        assert commits == [True, False] * STEPS


def test_skipped_step_leaves_no_trace_in_buffers_or_registered_state(tmp_path: Path) -> None:
    """The batch of one group makes the running statistics NaN before the loss."""
    counts: dict[str, list[int]] = {"0": [], "1": []}

    class Steps:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    def work(member: Member) -> None:
        counter, left = Steps(), [1]
        extra = {"counter": counter}
        member.manager.register(member.model, member.optimizer, extra=extra)
        loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in member.manager.transactions(loader, STEPS):
            with txn:
                x = batch_of(txn.batch)
                if member.group == "1" and txn.step == BAD and left[0]:
                    left[0] -= 1
                    x = x * float("inf")
                counter.value += 1
                member.model(x).square().mean().backward()
            counts[member.group].append(counter.value)
            assert all(bool(b.isfinite().all()) for b in member.model.buffers())

    with job(tmp_path, 2) as made:
        made.run(work, on_nonfinite="skip")
        assert _finite(made)
        made.audit()
    expected = [1, 2, 3, 3, 4, 5, 6]
    assert counts == {"0": expected, "1": expected}


def test_commit_policy_commits_a_nan(tmp_path: Path) -> None:
    with job(tmp_path, 2) as made:
        _run(made, _nan_at(1), on_nonfinite="commit", digest="never")
        assert not _finite(made)
        assert not notes(tmp_path, RESULT_REFUSED)


def test_veto_of_one_rank_holds_for_all_groups(tmp_path: Path) -> None:
    seen: list[StepResult] = []

    def work(member: Member) -> None:
        left = [1]

        def refuse(result: StepResult) -> str | None:
            seen.append(result)
            if member.group != "0" or result.step != BAD or not left[0]:
                return None
            left[0] -= 1
            return "skip"

        member.manager.veto(refuse)
        _train(member, _unspoilt)

    with job(tmp_path, 2) as made:
        made.run(work)
        made.audit()
    (skip,) = [r for r in records(tmp_path) if r["kind"] == "commit" and r["skip"]]
    assert skip["step"] == BAD
    assert all(result.is_finite and result.loss is not None for result in seen)
    attempts = Counter((result.step, result.grad_norm) for result in seen)
    # both groups see the norm of the same reduced gradients
    assert len(attempts) == STEPS + 1 and set(attempts.values()) == {2}
    assert {note["group"] for note in notes(tmp_path, RESULT_REFUSED)} == {"0"}


def test_veto_with_an_unknown_reaction_raises_and_names_the_choices(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        member.manager.veto(lambda result: True)  # type: ignore[arg-type,return-value]
        _train(member, _unspoilt)

    with job(tmp_path, 1) as made, pytest.raises(FftError, match=r"returned True: .*'skip'"):
        made.run(work)


def test_veto_is_refused_in_a_torchft_loop_and_after_the_first_step(tmp_path: Path) -> None:
    def work(member: Member) -> None:
        _train(member, _unspoilt, steps=1)
        member.manager.veto(lambda result: None)

    with job(tmp_path / "late", 1) as made, pytest.raises(FftError, match="before the first step"):
        made.run(work)
    with job(tmp_path / "loop", 1) as made:
        member = made.member("0")
        member.manager.veto(lambda result: None)
        message = (
            r"manager\.veto\(\) with start_quorum.*start_quorum\(\) again without should_commit"
        )
        with pytest.raises(FftError, match=message):
            member.manager.start_quorum()


def test_scaler_decides_about_its_own_overflow(tmp_path: Path) -> None:
    scalers = []

    def work(member: Member) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scalers.append(scaler)
        member.manager.register(member.model, member.optimizer, scaler=scaler)
        spoil = _nan_at(1)
        _train(member, lambda m, txn, loss: scaler.scale(spoil(m, txn, loss)))

    with job(tmp_path, 2) as made:
        made.run(work)
        made.audit()
    assert not aborts(tmp_path) and not notes(tmp_path, RESULT_REFUSED)
    assert [scaler.get_scale() for scaler in scalers] == [2.0, 2.0]


class _Bare(nn.Linear):
    """A layer with the generator that the members expect."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(8, 1)
        self.generator = torch.Generator()


def test_norm_of_a_veto_covers_all_ranks_of_the_group(tmp_path: Path) -> None:
    """Each rank holds other parameters, like the stages of a pipeline."""
    own: dict[str, list[float]] = {}
    seen: dict[str, list[float]] = {}

    def work(member: Member) -> None:
        def look(result: StepResult) -> str | None:
            own.setdefault(member.name, []).append(
                float(
                    sum_of_squares(
                        [p.grad for p in member.model.parameters() if p.grad is not None]
                    )
                )
            )
            seen.setdefault(member.name, []).append(result.grad_norm)
            is_bad = member.name == "0.1" and result.step == 1 and len(seen[member.name]) == 2
            return "replay" if is_bad else None

        member.manager.veto(look)
        _train(member, _unspoilt, steps=3)

    with job(tmp_path, 1) as made:
        given = [{"shard_pg": fft.ShardProcessGroupGloo(), "model": _Bare(s)} for s in range(2)]
        members = made.ranks("0", given)
        for member in members:
            member.start(work)
        for member in members:
            member.end()
            assert member.error is None, repr(member.error)
        made.audit()
        assert [r["code"] for r in aborts(tmp_path)] == [CauseCode.RESULT_REFUSED]
    pairs = zip(own["0.0"], own["0.1"], strict=True)
    totals = [math.sqrt(a + b) for a, b in pairs]
    assert len(totals) == 4 and totals[1] == totals[2], "one step was repeated"
    for found in seen.values():
        assert found == pytest.approx(totals, rel=1e-6)


def test_veto_sees_all_ranks_although_the_scaler_of_one_skips(tmp_path: Path) -> None:
    """The ranks add up their norms together; each rank has its own scaler, like stages."""
    skipped: dict[str, list[bool]] = {}

    def work(member: Member) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        member.manager.register(member.model, member.optimizer, scaler=scaler)
        member.manager.sync_gradients(member.model)
        member.manager.veto(lambda result: None)
        loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
        for txn in member.manager.transactions(loader, 3):
            with txn:
                loss = member.model(batch_of(txn.batch)).square().mean()
                is_bad = member.name == "0.1" and txn.step == 1 and len(skipped[member.name]) == 1
                scaler.scale(loss * torch.inf if is_bad else loss).backward()
            skipped.setdefault(member.name, []).append(txn.skipped)

    with job(tmp_path, 1) as made:
        given: list[dict[str, Any]] = [
            {"shard_pg": fft.ShardProcessGroupGloo(), "model": _Bare(s), "register": False}
            for s in range(2)
        ]
        ranks = made.ranks("0", given)
        for member in ranks:
            member.start(work)
        for member in ranks:
            member.end()
            assert member.error is None, repr(member.error)
        assert aborts(tmp_path) == []
        made.audit()
    assert skipped == {"0.0": [False, True, False, False], "0.1": [False, True, False, False]}


# --- local steps ----------------------------------------------------------------------------------


def _diloco(member: Member, spoil: Body, steps: int = 3) -> None:
    member.manager.register(member.model, member.optimizer)
    outer = torch.optim.SGD(member.model.parameters(), lr=0.7)
    fft.DiLoCo(member.manager, [member.model], member.optimizer, outer, 2)
    loader = fft.CursorLoader(Numbers(), batch_size=4, seed=1)
    for txn in member.manager.transactions(loader, steps):
        with txn:
            loss = member.model(batch_of(txn.batch)).square().mean()
            loss = spoil(member, txn, loss)
            loss.backward()
            txn.log(loss=loss.item())


def _net() -> Any:
    torch.manual_seed(3)
    net: Any = nn.Linear(8, 1)
    net.generator = torch.Generator()
    return net


def _local(made: Job, spoil: Body, **settings: Any) -> list[BaseException | None]:
    given = {"spec": "diloco", "register": False, "digest": "commit", **settings}
    members = [made.member(str(g), model=_net(), **given) for g in range(made.groups)]
    for member in members:
        member.start(lambda member: _diloco(member, spoil))
    for member in members:
        member.end()
    return [member.error for member in members]


@pytest.mark.parametrize(("policy", "note"), [("replay", "inner_abort"), ("skip", "inner_commit")])
def test_nan_of_a_local_step_stays_in_its_group(tmp_path: Path, policy: str, note: str) -> None:
    with job(tmp_path, 2) as made:
        assert _local(made, _nan_at(1, step=1), on_nonfinite=policy) == [None, None]
        assert _finite(made) and not aborts(tmp_path)
        made.audit()
    found = [n for n in notes(tmp_path, note) if n["data"].get("skipped", True)]
    assert [n["group"] for n in found] == ["1"]
    assert "steps skipped" in str(RunReport(tmp_path).refusals())


def test_non_finite_contribution_is_recomputed_and_never_averaged(
    tmp_path: Path,
) -> None:
    """The gradients were finite and the update was not."""
    left = [1]

    def overflow(member: Member, txn: fft.Transaction, loss: torch.Tensor) -> torch.Tensor:
        if member.group == "1" and txn.step == 1 and txn.inner_step == 1 and left[0]:
            left[0] -= 1
            member.manager.on_commit(lambda: _overflow_once(member, done))
        return loss

    done: list[int] = []
    with job(tmp_path, 2) as made:
        assert _local(made, overflow) == [None, None]
        assert done and _finite(made)
        made.audit()
    assert [n["group"] for n in notes(tmp_path, "inner_torn")] == ["1"]
    assert [r["code"] for r in aborts(tmp_path)] == [CauseCode.RESULT_REFUSED]


def _overflow_once(member: Member, done: list[int]) -> None:
    if not done:
        done.append(1)
        with torch.no_grad():
            member.model.weight[0, 0] = float("inf")


# --- the measure ----------------------------------------------------------------------------------


def test_sum_of_squares_covers_types_and_shows_every_nonfinite_element() -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    tensors = [torch.randn(33, generator=generator).to(kind) for kind in kinds]
    tensors += [torch.complex(tensors[0], tensors[0]), torch.eye(4).to_sparse()]
    expected = sum(float(t.to_dense().abs().double().square().sum()) for t in tensors)
    assert math.isclose(float(sum_of_squares(tensors)), expected, rel_tol=1e-5)
    for value in (float("inf"), -float("inf"), float("nan")):
        for tensor in tensors[:4]:
            spoilt = tensor.clone()
            spoilt[17] = value
            assert not math.isfinite(float(sum_of_squares([*tensors, spoilt])))


@pytest.mark.parametrize("has_veto", [True, False])
def test_large_finite_gradients_are_not_refused(has_veto: bool, tmp_path: Path) -> None:
    """Their squares overflow in float32."""

    def work(member: Member) -> None:
        seen: list[StepResult] = []
        if has_veto:
            member.manager.veto(seen.append)  # type: ignore[arg-type]
        _train(member, lambda m, txn, loss: loss * 1e30, steps=2)
        assert [result.is_finite for result in seen] == [True, True] * has_veto
        assert member.manager.current_step() == 2

    with job(tmp_path, 1) as made:
        made.run(work)


# --- whole jobs -----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("policy", "ends_at"),
    [(("skip",), 8), (("replay",), 8), (("replay", "always"), 5), (("stop",), 5)],
    ids=["skip", "replay", "replay-always", "stop"],
)
def test_kept_checkpoints_are_finite_after_a_nan(
    tmp_path: Path, policy: tuple[str, ...], ends_at: int
) -> None:
    """A checkpoint is due after each step, and two are kept."""
    kept = ["--checkpoint", str(tmp_path / "kept"), "--keep", "2", "--every", "1"]
    common = ["--groups", "2", "--no-lighthouse", "--no-progress", "--timeout", "120"]
    traces = ["--trace-dir", str(tmp_path / "traces")]
    script = str(Path(__file__).with_name("nonfinite_script.py"))
    done = forked_fft("run", *common, *traces, *kept, script, *policy, folder=tmp_path, within=150)
    assert done.returncode == (0 if ends_at == 8 else 1), done.stdout + done.stderr
    assert max(r["step"] for r in records(tmp_path / "traces")) == ends_at
    found = sorted((tmp_path / "kept").glob("step-*/*.safetensors"))
    assert found
    for path in found:
        assert all(bool(t.isfinite().all()) for t in read_tensors(path).values()), path
    if ends_at == 5:
        assert "ended with ResultRefused" in done.stdout + done.stderr
