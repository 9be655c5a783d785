"""Tests of the manager's guarantees, one by one, with several managers in threads of one process.

The bus is in memory and every group has one rank; gloo and the stores are real.
"""

from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from stage import (
    Job,
    Member,
    Noisy,
    aborts,
    epochs,
    events,
    fetches,
    job,
    notes,
    parameters,
    records,
    slices,
    weights,
)
from torchft.checkpointing import HTTPTransport
from torchft.manager import WorldSizeMode
from waiting import wait_until

import fft
from fft.bus import BusUnreachable, open_bus
from fft.errors import Drained, Fenced, FftError, StepRetriesExceeded


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path / "traces", 2) as made:
        yield made


def same_weights(*members: Member) -> None:
    first = parameters(members[0].model)
    for other in members[1:]:
        assert parameters(other.model) == first


# --- rollback -------------------------------------------------------------------------------------


def test_rank_blocked_in_gloo_is_freed_and_its_tensor_stays_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three groups are in a collective on 16 MB that the third never enters."""
    failed_at: list[float] = []
    freed_at: dict[str, float] = {}
    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    entering = threading.Barrier(3)

    def body(member: Member, txn: fft.Transaction) -> None:
        if txn.step != 3 or txn.epoch > 1:
            return
        if member.group == "2":
            entering.wait(20)
            # There is no event for "is inside the collective", so let some data be transferred.
            with suppress(TimeoutError):
                member.manager._parts.job.engine.wait_command(limit=0.2)
            failed_at.append(time.monotonic())
            raise ValueError("the body of group 2 fails")
        tensor = torch.full((4 << 20,), float(member.group) + 1)
        entering.wait(20)
        try:
            member.manager.allreduce(tensor).wait()
        finally:
            freed_at[member.group] = time.monotonic()
            kept[member.group] = (tensor, tensor.clone())

    with job(tmp_path / "traces", 3) as made:
        members = made.run(lambda m: m.train(6, body=body))
        made.audit()
    waits = {g: (at - failed_at[0]) * 1e3 for g, at in freed_at.items()}
    with capsys.disabled():
        print(f"\nfault of a peer → out of the gloo collective (PG timeout 60 s), ms: {waits}")
    assert set(waits) == {"0", "1"} and max(waits.values()) < 30_000
    for tensor, snapshot in kept.values():
        assert torch.equal(tensor, snapshot)
    same_weights(*members)
    assert fetches(tmp_path / "traces") == []


def test_batch_norm_noise_and_data_are_as_if_the_fault_had_not_been(tmp_path: Path) -> None:
    ends = []
    for fails in (False, True):
        done: list[int] = []

        def body(member: Member, txn: fft.Transaction, done=done, fails=fails) -> None:
            member.model(torch.ones(4, 8))  # changes the statistics and draws noise
            if fails and txn.step == 2 and member.group == "1" and not done:
                done.append(txn.step)
                raise ValueError("once")

        with job(tmp_path / str(fails), 2) as made:
            members = made.run(lambda m: m.train(6, body=body))
            assert made.audit().bytes_healed == 0
        kinds = [r["kind"] for r in records(tmp_path / str(fails))]
        assert kinds.count("abort") == (1 if fails else 0)
        ends.append(
            [
                (weights(m.model), m.model.generator.get_state().tolist(), m.consumed)
                for m in members
            ]
        )
    assert ends[0] == ends[1]


def test_error_with_a_lone_surrogate_in_its_text_is_rolled_back(two: Job) -> None:
    done: list[int] = []

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "1" and txn.step == 1 and not done:
            done.append(txn.step)
            raise FileNotFoundError("no data-\udcff.bin")

    same_weights(*two.run(lambda m: m.train(3, body=body)))
    (abort,) = aborts(two.traces)
    assert "no data-?.bin" in abort["cause"]
    two.audit()


def test_rollback_before_the_txn_begins_here_keeps_the_last_commit(
    tmp_path: Path,
) -> None:
    """Group 1 is still in its optimizer step when group 0 has already failed at the next one."""

    class Slow(torch.optim.AdamW):
        wait_for: Any = None

        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if threading.current_thread().name == "group-1" and Slow.wait_for is not None:
                Slow.wait_for()
            return result

    ends = []
    for fails in (False, True):
        with job(tmp_path / str(fails), 2) as made:
            bus = open_bus(made.bus)
            failed = threading.Event()

            def aborted(bus=bus) -> bool:
                return b'"abort"' in (bus.read("head") or b"")

            def body(member: Member, txn: fft.Transaction, fails=fails, failed=failed) -> None:
                if fails and member.group == "1" and txn.step == 2:
                    Slow.wait_for = lambda: wait_until(aborted, "group 0 fails")
                if member.group == "1" and txn.step > 2:
                    Slow.wait_for = None
                if fails and member.group == "0" and txn.step == 3 and not failed.is_set():
                    failed.set()
                    raise ValueError("at once in the next txn")

            members = made.run(lambda m: m.train(6, body=body), optimizer=Slow)
            made.audit()
            bus.close()
        assert len(aborts(tmp_path / str(fails))) == int(fails)
        ends.append(
            [
                (weights(m.model), m.model.generator.get_state().tolist(), m.schedule.state_dict())
                for m in members
            ]
        )
    assert ends[0] == ends[1]


@pytest.mark.parametrize("given", [None, HTTPTransport])
def test_an_optimizer_that_fails_after_commit_heals_from_the_peer(
    two: Job, given: type[HTTPTransport[Any]] | None
) -> None:
    class FailsOnce(torch.optim.AdamW):
        left = 1

        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if threading.current_thread().name == "group-1" and int(self.count) == 2 and self.left:
                type(self).left = 0
                raise OSError("the step was half done")
            return result

        @property
        def count(self) -> float:
            first = self.param_groups[0]["params"][0]
            return float(self.state[first]["step"]) - 1

    members = []
    for group in "01":
        transport = {"checkpoint_transport": given(timedelta(seconds=30), 0)} if given else {}
        members.append(two.member(group, optimizer=FailsOnce, **transport))
    for member in members:
        member.start(lambda m: m.train(8))
    for member in members:
        member.end()
        assert member.error is None
        assert (member.manager._parts.healer.exchange.transfer is None) == (given is not None)
    two.audit()
    assert FailsOnce.left == 0
    same_weights(*members)
    (fetch,) = fetches(two.traces)
    assert (fetch[0], fetch[4]) == ("1", "0")
    aborts = [r for r in records(two.traces) if r["kind"] == "abort"]
    assert len(aborts) == 1 and "half done" in aborts[0]["cause"]
    assert sorted(slices(two.traces)[0]) == list(range(16))
    assert sum(r["kind"] == "commit" for r in records(two.traces)) == 8


def test_step_that_keeps_failing_raises_step_retries_exceeded(two: Job) -> None:
    tries = []

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "0" and txn.step == 2:
            tries.append(txn.attempt)
            raise ZeroDivisionError("always at this step")

    members = [two.member(g) for g in "01"]
    for member in members:
        member.start(lambda m: m.train(6, body=body))
    for member in members:
        member.end()
    assert isinstance(members[0].error, StepRetriesExceeded)
    assert isinstance(members[0].error.__cause__, ZeroDivisionError)
    assert len(tries) == 2
    (batch,) = members[0].error.__cause__.__notes__
    assert batch == "in the txn of step 2, on 0/0#1, with slice 4 of the data (item 4)"
    assert members[1].error is None and members[1].manager.current_step() == 6
    faults = notes(two.traces, "fault")
    assert {(n["group"], n["step"], n["data"]["type"]) for n in faults} == {
        ("0", 2, "ZeroDivisionError")
    }
    assert all(n["data"]["where"].startswith(f"{__file__}:") for n in faults)
    assert "always at this step" in faults[0]["data"]["traceback"]
    two.audit()


def test_errors_that_differ_are_tried_again_more_often(two: Job) -> None:
    tries = []

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "0" and txn.step == 2 and len(tries) < 4:
            tries.append(txn.attempt)
            raise ValueError(f"try {len(tries)}")

    same_weights(*two.run(lambda m: m.train(4, body=body)))
    assert len(tries) == 4
    two.audit()


def test_terminal_error_is_raised_on_every_call(two: Job) -> None:
    """A second process takes the identity; the owner gets the error on every call."""
    reached = threading.Event()
    reported: list[str] = []

    def stubborn(member: Member) -> None:
        member.train(None, body=lambda m, txn: reached.set())

    def asks_again(member: Member) -> None:
        try:
            stubborn(member)
        except Fenced:
            for _ in range(2):
                with pytest.raises(Fenced):
                    member.manager.start_quorum()
                reported.append(member.group)

    old = two.member("0").start(asks_again)
    peer = two.member("1").start(stubborn)
    assert reached.wait(30)
    newer = two.member("0").start(lambda m: m.train(None))
    old.end()
    assert reported == ["0", "0"] and old.error is None
    for member in (newer, peer):
        member.manager.drain()
    for member in (newer, peer):
        member.end()


def test_drained_is_raised_on_every_call(two: Job) -> None:
    def work(member: Member) -> None:
        member.train(2)
        for _ in range(2):
            with pytest.raises(Drained):
                member.manager.start_quorum()

    two.run(work)


# --- identity, bus --------------------------------------------------------------------------------


def test_newer_of_two_processes_with_one_identity_wins(two: Job) -> None:
    reached, enough = threading.Event(), threading.Event()
    last: list[int] = []

    def body(member: Member, txn: fft.Transaction) -> None:
        if txn.step >= 3:
            reached.set()
        if member.group == "1" and enough.is_set() and not last:
            last.append(txn.step + 1)  # the step that no group has begun
        if last and txn.step >= last[0]:
            member.manager.drain()

    old, peer = two.member("0"), two.member("1")
    for member in (old, peer):
        member.start(lambda m: m.train(None, body=body))
    assert reached.wait(30)
    newer = two.member("0").start(lambda m: m.train(None, body=body))
    old.end()
    assert isinstance(old.error, Fenced), repr(old.error)
    assert "is replaced by 0/0" in str(old.error) and "give each process its own" in str(old.error)
    begun = peer.manager.current_step()
    wait_until(lambda: newer.manager.current_step() > begun + 3, "the newer one takes part")
    enough.set()
    for member in (newer, peer):
        member.end()
        assert member.error is None
    same_weights(newer, peer)
    assert [(f[0], f[2]) for f in fetches(two.traces)] == [("0", 2)]
    two.audit()


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def test_unreachable_bus_raises_an_error_with_the_fix(
    two: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound but not listening, so connections are refused
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        before, began = _threads(), time.monotonic()
        with pytest.raises(BusUnreachable) as caught:
            two.member("0", bus=f"tcp://{address}/job", connect_timeout=timedelta(seconds=2))
        took = time.monotonic() - began
    with capsys.disabled():
        print(f"\nunreachable bus (connect timeout 2 s): error after {took * 1e3:.0f} ms")
    assert took < 17
    assert address in str(caught.value) and "fft serve" in str(caught.value)
    assert _threads() - before == set()


def test_no_bus_named_at_all_is_an_error(two: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FFT_BUS", raising=False)
    with pytest.raises(FftError, match="fft serve"):
        two.member("0", bus=None)


def test_ranks_of_a_group_that_could_not_share_a_model_are_refused(two: Job) -> None:
    """Each would train and commit its own model."""
    for member in two.ranks("0", [{}, {}]):
        with pytest.raises(FftError, match=r"2 ranks but no process group .* shard_pg="):
            member.train(1)


def test_timeout_unknown_to_the_spec_is_refused_and_leaves_no_threads(two: Job) -> None:
    before = _threads()
    with pytest.raises(FftError, match=r"unknown name 'vote'.*vote_window"):
        two.member("0", timeouts={"vote": 1.0})
    assert _threads() - before == set()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"trace_directory": "t"}, "did you mean 'trace_dir'"),  # FFT's
        ({"heartbeat_intervall": 1}, "did you mean 'heartbeat_interval'"),  # torchft's
        ({"qqq": 1}, r"'qqq'; known: bus, checkpoint,.* quorum_retries,.* world_size_mode$"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_one_that_was_meant(
    two: Job, given: dict[str, Any], meant: str
) -> None:
    before = _threads()
    with pytest.raises(TypeError, match=meant):
        two.member("0", **given)
    assert _threads() - before == set()


def test_an_unreadable_message_is_counted_traced_and_nothing_else(two: Job) -> None:
    rubbish = [b"\xff\xfe", b"{}", b'{"v":1,"type":"launch"}', b'{"v":1,"type":"ack","hello":3}']

    def body(member: Member, txn: fft.Transaction) -> None:
        if txn.step == 2 and member.group == "0":
            bus = open_bus(two.bus)
            for payload in rubbish:
                bus.broadcast(payload)
            bus.close()

    members = two.run(lambda m: m.train(8, body=body))
    for member in members:
        assert member.manager._parts.job.engine.unreadable == len(rubbish)
    assert [n["data"]["count"] for n in notes(two.traces, "unreadable")] == [1, 1]
    totals = [n["data"] for n in notes(two.traces, "dropped_messages")]
    assert totals == [{"unreadable": len(rubbish)}] * 2
    report = two.audit()
    assert (report.commits, epochs(two.traces)) == (8, 1)
    same_weights(*members)


# --- data -----------------------------------------------------------------------------------------


class Stream:
    """A stateful loader that counts up; its state is its position."""

    def __init__(self, end: int = 1_000_000) -> None:
        self.at, self.end = 0, end

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.end:
            self.at += 1
            yield torch.arange(4) + (self.at - 1) * 4

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def join_late(
    two: Job,
    body: Callable[[Member, fft.Transaction], None],
    steps: Sequence[object],
    loader: Callable[[], Any] = lambda: None,
    **settings: Any,
) -> None:
    """Let group 2 join after some steps; all leave when ``body`` has put four of its into
    ``steps``.

    They leave with one commit: no group has begun the step after the one that group 2 is in.
    """
    reached = threading.Event()
    last: list[int] = []

    def watched(member: Member, txn: fft.Transaction) -> None:
        if txn.step >= 3:
            reached.set()
        body(member, txn)
        if member.group == "2" and len(steps) > 3 and not last:
            last.append(txn.step + 1)
        if last and txn.step >= last[0]:
            member.manager.drain()

    for group in "01":
        two.member(group, **settings).start(lambda m: m.train(None, loader(), watched))
    assert reached.wait(30)
    two.member("2", **settings).start(lambda m: m.train(None, loader(), watched))
    for member in two.members:
        member.end()
        assert member.error is None, repr(member.error)


def test_a_stateful_loader_serves_a_late_group_and_every_item_once(two: Job) -> None:
    steps: list[int] = []

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "2":
            steps.append(txn.step)

    join_late(two, body, steps, Stream)
    same_weights(*two.members)
    assert two.members[2].consumed, "it took its share"
    drawn = sorted(index for member in two.members for index in member.consumed)
    assert drawn == list(range(len(drawn)))
    assert [f[0] for f in fetches(two.traces)] == ["2"]
    two.audit()


def test_joiner_that_need_not_wait_computes_during_its_fetch(
    two: Job,
) -> None:
    seen: list[tuple[int, int | None, int, bool]] = []

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "2":
            manager, own = member.manager, parameters(member.model) == parameters(Noisy("2"))
            place = (manager.participating_rank(), manager.num_participants())
            seen.append((txn.step, *place, own))

    join_late(two, body, seen, learners="always", digest="never")
    rehearsal, first, second = seen[:3]
    assert rehearsal[1:] == (None, 1, True), "no group has seen it yet"
    assert first[1:] == (None, 2, True), "its state had not come yet, and it gave no gradients"
    assert second == (first[0] + 1, 2, 3, False)
    same_weights(*two.members)
    used = sorted(slices(two.traces)[0])
    assert used == list(range(len(used))), "its first batch was nobody's"
    assert [f[0] for f in fetches(two.traces)] == ["2"]
    two.audit()


def test_one_rank_is_the_writer_in_each_step(two: Job) -> None:
    writers: list[tuple[int, str]] = []

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.manager.is_writer:
            writers.append((txn.step, member.group))

    def work(member: Member) -> None:
        assert not member.manager.is_writer, "no transaction has begun"
        member.train(3, body=body)
        assert member.manager.is_writer == (member.group == "0")

    two.run(work)
    assert writers == [(0, "0"), (1, "0"), (2, "0")]


def test_fetch_cut_short_by_a_rollback_leaves_no_state_behind(two: Job) -> None:
    """The joiner's step function is unwound, its fetch ends, and the next epoch waits for it."""
    failing = threading.Event()
    starts: list[int | None] = []

    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "2":
            starts.append(member.manager.participating_rank())
            if len(starts) > 1 and not failing.is_set():  # the first one is a rehearsal
                failing.set()
                raise RuntimeError("bad luck")

    join_late(two, body, starts, learners="always", digest="never")
    assert starts[:3] == [None, None, 2]
    assert not [t for t in threading.enumerate() if t.name == "fft-learning"]
    same_weights(*two.members)
    two.audit()


class Dice(Stream):
    """A stream that draws random numbers in the drawing process, as augmentations do."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for item in super().__iter__():
            yield item + 4 * torch.randint(0, 1000, (1,), generator=self.generator)

    generator: torch.Generator


def test_a_replay_is_the_same_where_the_loader_draws_random_numbers(tmp_path: Path) -> None:
    ends = []
    for fails in (False, True):
        done: list[int] = []

        def body(member: Member, txn: fft.Transaction, done=done, fails=fails) -> None:
            if fails and txn.step == 2 and member.group == "1" and not done:
                done.append(txn.step)
                raise ValueError("once")

        def work(member: Member, body=body) -> None:
            loader = Dice()
            loader.generator = member.model.generator
            member.model.generator.manual_seed(7)
            member.train(5, loader, body)

        with job(tmp_path / str(fails), 2) as made:
            members = made.run(work)
        assert len(aborts(tmp_path / str(fails))) == int(fails)
        ends.append([(weights(m.model), m.consumed) for m in members])
    assert ends[0] == ends[1]


def test_resumed_stateful_loader_starts_at_the_commit_after_prefetch(
    tmp_path: Path,
) -> None:
    saved: dict[str, dict[str, Any]] = {}

    def body(member: Member, txn: fft.Transaction) -> None:
        if txn.step == 3:
            saved[member.group] = member.manager.state_dict()

    def resumed(member: Member) -> None:
        member.manager.load_state_dict(saved[member.group])
        member.train(5, Stream())

    with job(tmp_path / "first", 2) as first:
        first.run(lambda m: m.train(6, Stream(), body))
    with job(tmp_path / "second", 2) as second:
        members = second.run(resumed)
    drawn = sorted(index for member in members for index in member.consumed)
    assert drawn == list(range(3 * 2 * 4, 5 * 2 * 4))


@pytest.mark.parametrize("items", [24, 25])
def test_when_the_data_end_all_groups_end_at_one_commit(two: Job, items: int) -> None:
    members = two.run(lambda m: m.train(None, Stream(items)))
    assert {m.manager.current_step() for m in members} == {12}
    same_weights(*members)
    drawn = sorted(index for m in members for index in m.consumed)
    assert drawn == list(range(24 * 4))
    assert [r["kind"] for r in records(two.traces)].count("abort") == 0
    two.audit()


def test_loader_without_state_refuses_a_late_group_with_the_reason(two: Job) -> None:
    reached = threading.Event()

    def body(member: Member, txn: fft.Transaction) -> None:
        if txn.step >= 3:
            reached.set()

    def train(member: Member) -> None:
        endless = fft.Loader(itertools.repeat(torch.arange(4)), replay_only=True)
        member.train(None, endless, body)

    first = two.member("0", expected_groups=1).start(train)
    assert reached.wait(30)
    late = two.member("1").start(train)
    late.end()
    assert "itertools.repeat has no load_state_dict" in str(late.error), repr(late.error)
    # the first group's own healing also ends with that epoch
    failed = [r["event"] for r in events(two.traces, "heal_failed") if r["group"] == "1"]
    assert [event["torn"] for event in failed] == [True], "its model was loaded already"
    before = first.manager.current_step()
    wait_until(lambda: first.manager.current_step() > before + 3, "the first group goes on")
    first.manager.drain()
    first.end()
    assert first.error is None, repr(first.error)
    two.audit()


# --- membership -----------------------------------------------------------------------------------


def test_max_steps_ends_all_groups_at_the_same_commit(tmp_path: Path) -> None:
    with job(tmp_path / "traces", 3) as made:
        members = made.run(lambda m: m.train(5))
        assert {m.manager.current_step() for m in members} == {5}
        assert all(m.has_left for m in members)
        same_weights(*members)
        report = made.audit()
    assert (report.commits, report.epochs) == (5, 1)
    last = records(tmp_path / "traces")[-1]
    assert last["kind"] == "commit" and last["leavers"] == ["0", "1", "2"]


def test_drained_group_leaves_after_a_commit_without_a_rollback(two: Job) -> None:
    def body(member: Member, txn: fft.Transaction) -> None:
        if member.group == "1" and txn.step == 3:
            member.manager.drain()

    members = two.run(lambda m: m.train(9, body=body))
    assert members[1].has_left
    assert members[1].manager.current_step() == 4
    assert members[0].manager.current_step() == 9
    kinds = [r["kind"] for r in records(two.traces)]
    assert "abort" not in kinds and kinds.count("epoch") == 2
    assert sorted(slices(two.traces)[0]) == list(range(4 * 2 + 5))
    two.audit()


def test_a_drain_before_the_first_step_ends_at_once(two: Job) -> None:
    member = two.member("0")
    member.manager.drain()
    member.start(lambda m: m.train(5))
    member.end()
    assert isinstance(member.error, Drained) and member.manager.current_step() == 0


def test_spares_train_along_without_a_share_of_the_data(tmp_path: Path) -> None:
    with job(tmp_path / "traces", 3) as made:
        members = made.run(
            lambda m: m.train(6),
            min_replica_size=2,
            world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
        )
        made.audit()
    same_weights(*members)
    shares = [len(m.consumed) for m in members]
    assert shares == [24, 24, 0]
    assert {m.manager.num_participants() for m in members} == {2}
    assert sorted(slices(tmp_path / "traces")[0]) == list(range(12))
    assert members[0].manager.batches_committed() == 12


def test_too_few_groups_raise_an_error_with_both_numbers(two: Job) -> None:
    member = two.member("0", min_replica_size=2, quorum_timeout=timedelta(seconds=1))
    member.start(lambda m: m.train(5))
    member.end()
    assert "1 whole replica groups within 1 s, but min_replica_size is 2" in str(member.error)


# --- the whole life of a manager ------------------------------------------------------------------


def test_a_checkpoint_resumes_step_lineage_and_data(tmp_path: Path) -> None:
    with job(tmp_path / "straight", 2) as made:
        straight = made.run(lambda m: m.train(8))
    with job(tmp_path / "first", 2) as made:
        first = made.run(lambda m: m.train(5))
        saved = [
            (
                m.manager.state_dict(),
                m.manager._parts.state.registered_state.export(),
                m.model.generator.get_state(),
            )
            for m in first
        ]
    assert saved[0][0] == saved[1][0]
    manager_state = saved[0][0]
    assert (manager_state["step"], manager_state["cursor"]) == (5, 10)
    with job(tmp_path / "second", 2) as made:
        members = [made.member(g) for g in "01"]
        for member, (values, state, noise) in zip(members, saved, strict=True):
            member.manager._parts.state.registered_state.load(state)
            member.model.generator.set_state(noise)
            member.manager.load_state_dict(values)
            assert member.manager.current_step() == 5
            member.start(lambda m: m.train(8))
        for member in members:
            member.end()
            assert member.error is None, repr(member.error)
        report = made.audit()
    assert (report.commits, report.bytes_healed) == (3, 0)
    assert records(tmp_path / "second")[0]["lineage"] == manager_state["lineage"]
    for early, late, whole in zip(first, members, straight, strict=True):
        assert early.consumed + late.consumed == whole.consumed
        assert weights(late.model) == weights(whole.model)
    with pytest.raises(FftError, match="before the first step"):
        members[0].manager.load_state_dict(manager_state)


def _open_files() -> Counter[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return Counter(f.split(":")[0] for f in found)


def test_shutdown_leaves_no_thread_and_no_file_behind(tmp_path: Path) -> None:
    def once(name: str) -> None:
        with job(tmp_path / name, 2) as made:
            made.run(lambda m: m.train(4))
            for member in made.members:
                member.manager.shutdown()  # a second call has no effect

    once("warm-up")  # torchft's runtime and gloo allocate some resources once
    gc.collect()
    threads, files = _threads(), _open_files()
    for i in range(3):
        once(f"again{i}")
    gc.collect()
    assert {t.name for t in _threads() - threads} == set()
    # stores and gloo close their sockets on their own threads
    wait_until(lambda: sum((_open_files() - files).values()) == 0, f"as before: {files}", within=10)


def test_beginning_a_step_twice_is_harmless(two: Job) -> None:
    def work(member: Member) -> None:
        manager = member.manager
        while manager.current_step() < 4:
            manager.start_quorum()
            manager.start_quorum()
            manager.wait_quorum()
            member.optimizer.zero_grad()
            member.model(torch.ones(4, 8)).sum().backward()
            if manager.should_commit():
                member.optimizer.step()

    members = two.run(work)
    same_weights(*members)
    report = two.audit()
    assert (report.commits, epochs(two.traces)) == (4, 1)
    assert aborts(two.traces) == []


def test_step_restarted_by_one_group_after_reducing_is_skipped_by_all(two: Job) -> None:
    again: list[int] = []

    def work(member: Member) -> None:
        manager = member.manager
        while manager.current_step() < 4:
            manager.start_quorum()
            member.optimizer.zero_grad()
            member.model(torch.ones(4, 8)).sum().backward()
            if member.group == "0" and manager.current_step() == 2 and not again:
                again.append(2)
                continue
            if manager.should_commit():
                member.optimizer.step()

    members = two.run(work)
    same_weights(*members)
    two.audit()
    skips = [r["skip"] for r in records(two.traces) if r["kind"] == "commit"]
    assert skips == [False, False, True, False, False]
    assert aborts(two.traces) == []


def test_the_drained_plain_loop_ends_the_process_well(two: Job) -> None:
    member = two.member("0", expected_groups=1)
    member.manager.drain()
    with pytest.raises(Drained) as caught:
        member.manager.start_quorum()
    assert caught.value.code == 0
