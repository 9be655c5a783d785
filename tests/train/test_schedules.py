"""Tests of the lengths of schedules, their warnings, and the consumed fraction of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs

import fft
from fft.errors import FftError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Token
from fft.train.data.source import Inputs, as_source
from fft.train.data.step_input import LOCAL_STEPS, SHARDED
from fft.train.state.updates import Updates, length_of
from fft.train.step.transaction import Transaction


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)


def cosine_with_warmup(step: int, *, num_training_steps: int) -> float:
    return 1 - step / num_training_steps


def in_a_row(o: Any) -> torchs.SequentialLR:
    parts = [torchs.LinearLR(o, 0.1, 1.0, 10), torchs.CosineAnnealingLR(o, 20)]
    return torchs.SequentialLR(o, parts, [10])


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (lambda o: torchs.CosineAnnealingLR(o, 128), 128),
        (lambda o: torchs.OneCycleLR(o, 1.0, total_steps=30), 30),
        (lambda o: torchs.PolynomialLR(o, 40), 40),
        (lambda o: torchs.LinearLR(o, 1.0, 0.1, 50), 50),
        (lambda o: torchs.LinearLR(o, 0.1, 1.0, 50), None),
        (lambda o: torchs.ConstantLR(o, 0.1, 5), None),
        (lambda o: torchs.MultiStepLR(o, [3, 6]), None),
        (lambda o: torchs.CosineAnnealingWarmRestarts(o, 5), None),
        (in_a_row, 30),
        (lambda o: torchs.ChainedScheduler([torchs.CosineAnnealingLR(o, 7)], o), 7),
        (lambda o: torchs.LambdaLR(o, partial(cosine_with_warmup, num_training_steps=60)), 60),
        (lambda o: torchs.LambdaLR(o, lambda step: 1.0), None),
        (lambda o: object(), None),
    ],
)
def test_length_of_a_schedule_is_known(make: Callable[[Any], Any], length: int | None) -> None:
    assert length_of(make(optimizer())) == length


@pytest.mark.parametrize("make", [lambda o: torchs.CosineAnnealingLR(o, 3), in_a_row])
def test_first_step_beyond_a_schedule_is_warned_about_once(
    make: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    own = optimizer()
    scheduler = make(own)
    length = length_of(scheduler)
    assert length is not None
    updates = Updates([own], [scheduler])
    for _ in range(length):
        updates.apply()
    updates.lengths.data_ended()
    assert not caplog.records
    for _ in range(3):
        updates.apply()
    (record,) = caplog.records
    text = record.getMessage()
    assert f"step {length + 1} is beyond its {length} steps, so" in text
    assert "txn.progress" in text
    updates.close()


def test_data_that_end_before_a_schedule_are_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = optimizer()
    updates = Updates([own], [torchs.CosineAnnealingLR(own, 3)])
    updates.apply()
    updates.lengths.data_ended()
    assert "CosineAnnealingLR: the data ended at step 1 of 3, so" in caplog.text
    updates.close()


def test_progress_is_equal_on_all_ranks_and_ends_at_one() -> None:
    data = list(range(40))
    loaders: list[Callable[[], Any]] = [
        lambda: fft.CursorLoader(data, 4, data_epochs=2),
        lambda: fft.StreamLoader(lambda first, step: iter(range(first, 99, step)), items=20),
        lambda: data[:20],
    ]
    for make in loaders:
        reported: list[list[float]] = []
        for rank in (0, 1):
            inputs, cursor, fractions = Inputs(as_source(make()), 2, rank), 0, []
            for groups in (2, 2, 1, 1):  # items of two ranks: 4, 4, 2, 2 of 20
                after = cursor + groups
                head = Token(1, 1), 0, "l", cursor, 0, groups, ("0", "1"), 0
                drawn = inputs.draw(StartTxn(*head, next_cursor=after))
                assert drawn is not None
                fractions.append(drawn.progress)
                cursor = after
            reported.append(fractions)
        assert reported[0] == reported[1] == [0.2, 0.4, 0.5, 0.6]


def test_progress_is_one_with_the_last_txn_and_refused_without_an_end() -> None:
    plan = StartTxn(Token(1, 1), 0, "l", 0, 0, 2, ("0", "1"), 0, next_cursor=2)
    drawn = Inputs(as_source([1, 2, 3]), 1, 0).draw(plan)
    assert drawn is not None and drawn.is_last and drawn.progress == 1.0
    endless = Inputs(fft.CursorLoader(list(range(40)), 4), 1, 0).draw(plan)
    assert endless is not None
    with pytest.raises(FftError, match=r"an fft\.CursorLoader with data_epochs="):
        _ = endless.progress
    for counted in (SHARDED, LOCAL_STEPS):
        with pytest.raises(FftError, match=r"^txn\.progress: not available with (sharded|local)"):
            _ = replace(endless, counted=counted).progress


def test_transaction_has_its_data_epoch() -> None:
    plan = StartTxn(Token(1, 1), 0, "l", 1, 0, 1, ("0",), 0, next_cursor=2)
    drawn = Inputs(fft.CursorLoader(list(range(8)), 4), 1, 0).draw(plan)
    assert drawn is not None
    loop: Any = SimpleNamespace(attempt=None)
    txn = Transaction(loop, plan, drawn, False, {})
    assert (txn.data_epoch, txn.ends_data_epoch) == (1, True)


def test_schedule_with_step_on_the_object_only_is_stepped() -> None:
    """A proxy passes ``step`` on; an object may have it as an attribute."""

    class Counter:
        def __init__(self) -> None:
            self.count = 0
            self.step = self._add

        def _add(self) -> None:
            self.count += 1

    counter = Counter()
    updates = Updates((), [counter])
    updates.apply()
    assert counter.count == 1


@pytest.mark.parametrize("wrong", [None, 3])
def test_object_without_step_is_refused_by_its_type(wrong: object) -> None:
    with pytest.raises(FftError, match=f"with step.., got {type(wrong).__name__}"):
        Updates((), [wrong])
