"""Tests of digests of drawn data, orders of samples, and retries of items whose loading fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import fft
from fft.errors import DataError, UnequalData
from fft.messages.effects import StartTxn
from fft.messages.protocol import Token
from fft.train.data import retries
from fft.train.data.digests import digest_of
from fft.train.data.source import Due, Inputs, StreamSource, as_source
from fft.train.data.step_input import StepInput


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(retries, "PAUSES_OF_OTHERS_S", (0.0,))


def drawn(inputs: Inputs, cursor: int, index: int = 0, participants: int = 1) -> StepInput:
    plan = StartTxn(Token(1, 1), cursor, "lineage", cursor, index, participants, ("0",), 0)
    found = inputs.draw(plan)
    assert found is not None
    return found


class Counter:
    """A stateful loader of tensors ``[n + offset]`` for n below 100."""

    def __init__(self, offset: int = 0, moves_on: bool = True) -> None:
        self.position, self.offset, self.moves_on = 0, offset, moves_on

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 100:
            self.position += 1
            yield torch.tensor([self.position - 1 + self.offset])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        self.offset += not self.moves_on


# --- digests --------------------------------------------------------------------------------------


@dataclass
class Batch:
    x: torch.Tensor
    name: str


def _batches() -> list[Any]:
    large = torch.arange(100_000, dtype=torch.float32).reshape(100, 1000)
    other = large.clone()
    other[50:] += 1
    return [
        torch.zeros(3),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(1, 3),
        torch.tensor([0.0, 0.0, 1.0]),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.tensor(2.0),
        torch.zeros(0),
        large,
        other,
        other.t(),
        large.numpy(),
        other.numpy(),
        {"x": 1},
        {"x": 2},
        [1, 2],
        (1, 2),
        [[1], 2],
        "ab",
        b"ab",
        Batch(torch.zeros(2), "a"),
        Batch(torch.zeros(2), "b"),
        np.arange(3),
        None,
        1,
        1.0,
        True,
    ]


def test_digests_differ_where_batches_do_and_only_there() -> None:
    digests = [digest_of(batch) for batch in _batches()]
    assert len(set(digests)) == len(digests)
    assert digests == [digest_of(batch) for batch in _batches()]


def _unusual(value: float) -> dict[str, Any]:
    rows = [torch.full((2, 4), value), torch.ones(3, 4)]
    dense = torch.tensor([[0.0, value], [1.0, 0.0]])
    scales, zeros = torch.tensor([0.1, 0.1]), torch.tensor([0, 0])
    objects = np.empty(2, dtype=object)
    objects[:] = [value, "a"]
    gaps = torch.nested.narrow(
        torch.stack([dense, dense]), 1, torch.tensor([0, 0]), torch.tensor([1, 2]), torch.jagged
    )
    return {
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "jagged with gaps": gaps,
        "strided nested": torch.nested.nested_tensor(rows),
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 1)),
        "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
        "quantized by channel": torch.quantize_per_channel(dense, scales, zeros, 0, torch.qint8),
        "set": {"ab", "cd", value},
        "objects": objects,
        "masked": np.ma.array([value, 1.0], mask=[False, True]),
    }


@pytest.mark.filterwarnings("ignore")  # torch calls some of these tensors prototypes
@pytest.mark.parametrize("kind", _unusual(2.0))
def test_digest_depends_on_the_content_of_unusual_values(kind: str) -> None:
    digests = [digest_of(_unusual(value)[kind]) for value in (2.0, 2.0, 3.0)]
    assert digests[0] == digests[1] != digests[2]


def test_digest_ignores_masked_data_but_not_the_mask() -> None:
    first, hidden, shown = (
        np.ma.array([1, value], mask=[False, masked])
        for value, masked in ((0, True), (7, True), (0, False))
    )
    assert digest_of(first) == digest_of(hidden) != digest_of(shown)


@pytest.mark.parametrize("column", range(10))
def test_digest_of_a_large_batch_sees_every_column(column: int) -> None:
    """2048 samples of 20480 elements: a distance of 10 would meet the first column only."""
    rows = torch.zeros(2048, 10)
    other = rows.clone()
    other[:, column] += 1
    assert digest_of(rows) != digest_of(other)
    assert digest_of(rows.numpy()) != digest_of(other.numpy())


def test_digest_of_an_object_without_known_content_is_that_of_its_class() -> None:
    assert digest_of([object()]) == digest_of([object()]) != digest_of([threading_lock()])


def threading_lock() -> object:
    import threading

    return threading.Lock()


def test_digest_compares_only_the_key_of_a_batch() -> None:
    first, again = [torch.tensor(7), torch.rand(3)], [torch.tensor(7), torch.rand(3)]
    assert digest_of(first) != digest_of(again)
    assert digest_of(first, lambda batch: batch[0]) == digest_of(again, lambda batch: batch[0])


# --- equal draws ----------------------------------------------------------------------------------


def test_ranks_with_equal_streams_bring_equal_digests_and_others_do_not() -> None:
    digests = [
        [drawn(Inputs(as_source(Counter(offset)), 2, rank), 0, group, 2).digest for rank in (0, 1)]
        for group, offset in enumerate((0, 0, 1))
    ]
    assert digests[0][0] == digests[0][1] == digests[1][0] == digests[1][1] != digests[2][0]


def test_lists_and_loaders_over_different_data_have_different_digests() -> None:
    def loaders(offset: int) -> list[Any]:
        data = [torch.tensor([float(n + offset)]) for n in range(8)]
        return [data, fft.CursorLoader(data, 2), fft.CursorLoader(data, 2, seed=offset)]

    mine, equal, other = (
        [drawn(Inputs(as_source(loader), 1, 0), 0).digest for loader in loaders(offset)]
        for offset in (0, 0, 1)
    )
    assert mine == equal and all(a != b for a, b in zip(mine, other, strict=True))
    assert len(set(mine)) == 2, "the seed of the two loaders is the same"


class Augmented(torch.utils.data.Dataset[Any]):
    """Sample n is (n + ``offset``, a draw from a generator of its own)."""

    def __init__(self, offset: int = 0) -> None:
        self.offset, self.draws = offset, iter(np.random.default_rng().permutation(1000))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index < 0 or index >= 8:
            raise IndexError(index)
        return index + self.offset, int(next(self.draws)) // 500


class Batches(Augmented, Sequence[Any]):
    """The same as a sequence of batches."""


@pytest.mark.parametrize("make", [lambda: fft.CursorLoader(Augmented(), 2, shuffle=False), Batches])
def test_own_generator_of_a_dataset_never_makes_digests_differ(make: Callable[[], Any]) -> None:
    """Two equal reads do not prove that a third one is equal."""
    digests = {drawn(Inputs(as_source(make()), 1, 0), 0).digest for _ in range(8)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda n, f: fft.CursorLoader(Augmented(n), 2, shuffle=False, identify=f),
        lambda n, f: fft.Loader(Batches(n), identify=f),
    ],
    ids=["loader", "sequence"],
)
def test_identify_compares_and_traces_items_by_number(
    make: Callable[[int, Any], Any], request: pytest.FixtureRequest
) -> None:
    def first(offset: int) -> StepInput:
        source = as_source(make(offset, lambda batch: batch[0]))
        return drawn(Inputs(source, 1, 0), 0)

    found = [first(offset) for offset in (0, 0, 0, 1)]
    assert len({each.digest for each in found[:3]}) == 1 != len({each.digest for each in found})
    ids = [found[0].ids, found[3].ids]
    assert ids == ([[0], [1]] if "sequence" in request.node.name else [[0, 1], [1, 2]])


def test_unreadable_first_item_is_named_instead_of_a_digest_of_its_own() -> None:
    """Without the first item the digest would differ from those of the other ranks."""
    data = FailingData(ValueError("never"), 99)
    loader = fft.CursorLoader(data, 1, order=lambda _: range(3, 9), identify=lambda batch: batch)
    inputs = Inputs(as_source(loader), 1, 0)
    with pytest.raises(ValueError, match="never") as caught:
        drawn(inputs, 1)
    assert caught.value.fft_item == "item 0"  # type: ignore[attr-defined]


def test_settings_that_a_data_source_would_ignore_are_refused() -> None:
    class Own:
        in_any_order = True
        open = close = lambda self: None
        holds = take = export = load = lambda self, *_: None

    for settings in ({"identify": str}, {"sharded": "group"}, {"replay_only": True}):
        with pytest.raises(DataError, match=r"define ids\(batch\) in a source of yours"):
            fft.Loader(Own(), **settings)
    assert fft.Loader(Own(), global_batch=8).global_batch == 8


@pytest.mark.parametrize("identify", [None, lambda batch: batch])
def test_loader_that_does_not_restore_its_order_is_refused(identify: Any) -> None:
    source, joiner = StreamSource(Counter(), identify), StreamSource(Counter(moves_on=False))
    source.take(Due(0, 3, 4))
    joiner.load(source.export(2), 2)
    with pytest.raises(UnequalData, match=r"Counter does not continue with .* item 2 has digest"):
        joiner.take(Due(2, 2, 4))


def test_loader_that_restores_its_order_continues() -> None:
    source, joiner = StreamSource(Counter()), StreamSource(Counter())
    source.take(Due(0, 3, 4))
    joiner.load(source.export(2), 2)
    assert [int(joiner.take(Due(2, n, 4))) for n in range(2, 8)] == list(range(2, 8))


# --- attempts -------------------------------------------------------------------------------------


class Fails(Counter):
    """A loader whose items 3 and 5 cannot be read the first ``times`` times."""

    def __init__(self, error: Exception, times: int) -> None:
        super().__init__()
        self.error, self.left = error, dict.fromkeys((3, 5), times)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for item in super().__iter__():
            self.fail(int(item))
            yield item

    def fail(self, item: int) -> None:
        if self.left.get(item, 0) > 0:
            self.left[item] -= 1
            raise self.error


class FailingData(Fails, torch.utils.data.Dataset[int]):
    """The same as a data set, whose workers count their own attempts."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.fail(index)
        return index


def _loaders() -> dict[str, Callable[[Exception, int], Any]]:
    return {
        "stream": Fails,
        "main thread": lambda e, n: fft.CursorLoader(FailingData(e, n), 1, shuffle=False),
        "worker": lambda e, n: fft.CursorLoader(FailingData(e, n), 1, shuffle=False, num_workers=1),
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", _loaders())
@pytest.mark.parametrize(
    ("error", "times"), [(ConnectionError("reset"), 3), (ValueError("once"), 1)]
)
def test_an_error_that_passes_costs_no_item(kind: str, error: Exception, times: int) -> None:
    source = as_source(_loaders()[kind](error, times))
    try:
        got = [int(drawn(Inputs(source, 1, 0), cursor).batch) for cursor in range(8)]
    finally:
        source.close()
    assert got == list(range(8))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", _loaders())
@pytest.mark.parametrize(
    ("error", "attempts"),
    [(ConnectionError("reset"), 4), (FileNotFoundError("gone"), 2), (ValueError("never"), 2)],
)
def test_a_permanent_error_names_the_item_after_some_attempts(
    kind: str, error: Exception, attempts: int
) -> None:
    source = as_source(_loaders()[kind](error, 99))
    try:
        with pytest.raises(type(error)) as caught:
            for cursor in range(8):
                drawn(Inputs(source, 1, 0), cursor)
    finally:
        source.close()
    assert caught.value.fft_item == "item 3"  # type: ignore[attr-defined]
    notes = "\n".join(caught.value.__notes__)
    assert f"item 3 could not be loaded in {attempts} attempts" in notes


class AdoptsLate(Fails):
    """A loader that adopts a loaded state only with its next item; its state is stale until then.

    With ``never``, its state is stale after a load to the end.
    """

    def __init__(self, never: bool, error: Exception, times: int) -> None:
        super().__init__(error, times)
        self.never, self.begin, self.told = never, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for item in range(self.begin, 100):
            self.fail(item)
            if not self.never:
                self.told = item + 1
            yield torch.tensor(item)

    def state_dict(self) -> dict[str, int]:
        return {"told": self.told}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["told"]
        if self.never:
            self.told = self.begin


def test_read_error_after_a_load_continues_at_the_loaded_state() -> None:
    loader = AdoptsLate(False, ConnectionError("reset"), 2)
    source = StreamSource(loader)
    source.load({"told": 3}, 3)
    got = [int(drawn(Inputs(source, 1, 0), cursor).batch) for cursor in range(3, 9)]
    assert got == list(range(3, 9))
    source.load({"told": 20}, 20)
    assert source.export(20)["loader_state"] == {"told": 20}, "not the state of item 9"


def test_read_error_of_a_loader_with_a_stale_state_draws_no_item_twice() -> None:
    source = StreamSource(AdoptsLate(True, ConnectionError("reset"), 1))
    inputs = Inputs(source, 1, 0)
    assert [int(drawn(inputs, cursor).batch) for cursor in range(2)] == [0, 1]
    with pytest.raises(ConnectionError) as caught:
        drawn(inputs, 2)
    notes = "\n".join(caught.value.__notes__)
    assert "would repeat earlier ones: its state_dict() has not changed" in notes
    assert caught.value.fft_item == "item 3"  # type: ignore[attr-defined]


@pytest.mark.parametrize("group", [0, 1])
def test_unreadable_item_ahead_keeps_its_name_and_the_earlier_step(group: int) -> None:
    inputs = Inputs(as_source(Fails(ValueError("never"), 99)), 1, 0)
    assert int(drawn(inputs, 0, group, 2).batch) == group
    with pytest.raises(ValueError, match="never") as caught:
        drawn(inputs, 2, group, 2)
    assert caught.value.fft_item == "item 3"  # type: ignore[attr-defined]


def test_failure_of_identify_skips_no_item() -> None:
    failures = [ValueError("once")]

    def identify(batch: torch.Tensor) -> torch.Tensor:
        if int(batch) == 3 and failures:
            raise failures.pop()
        return batch

    inputs = Inputs(as_source(fft.Loader(Counter(), identify=identify)), 1, 0)
    assert [int(drawn(inputs, cursor).batch) for cursor in range(5)] == list(range(5))


def test_pauses_between_attempts_give_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor would take a silent pause for a hang."""
    monkeypatch.setattr(retries, "PAUSES_S", (0.1, 0.5))
    alive: list[float] = []
    inputs = Inputs(as_source(Fails(ConnectionError("reset"), 2)), 1, 0)
    inputs.alive = lambda: alive.append(time.monotonic())
    for cursor in range(3):
        drawn(inputs, cursor)
    assert alive[-1] - alive[0] >= 0.6 and len(alive) >= 5


def test_a_loader_without_a_state_is_not_asked_again() -> None:
    def batches() -> Iterator[int]:
        yield 0
        raise ConnectionError("reset")

    with pytest.raises(ConnectionError, match="reset"):
        drawn(Inputs(as_source(fft.Loader(batches(), replay_only=True)), 1, 0), 0)


# --- orders ---------------------------------------------------------------------------------------


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([0.0, 1.0, 2.0, 3.0] * 4, 12)


@pytest.mark.parametrize("workers", [0, 1])
def test_weighted_sampler_gives_the_same_order_in_any_process(workers: int) -> None:
    data = list(range(16))
    loader = fft.CursorLoader(data, 4, sampler=weighted(), num_workers=workers)
    again = fft.CursorLoader(data, 4, sampler=weighted())
    assert loader.items_per_data_epoch == 3
    try:
        taken = [loader.take(Due(n, n, 1)).tolist() for n in range(6)]
    finally:
        loader.close()
    assert (
        taken
        == [again[n].tolist() for n in (0, 1, 2, 3, 4, 5)]
        == [again.indices(n) for n in range(6)]
    )
    assert not {0, 4, 8, 12} & {i for batch in taken for i in batch}, "their weight is 0"
    assert taken[:3] != taken[3:], "each data epoch has its own order"
    assert fft.CursorLoader(data, 4, sampler=weighted(), seed=1)[0].tolist() != taken[0]


def test_an_order_by_length_is_kept() -> None:
    lengths = torch.tensor([5, 1, 4, 2, 8, 7, 3, 6])

    def by_length(data_epoch: int) -> torch.Tensor:
        groups = lengths.argsort().reshape(-1, 2)
        return groups[torch.randperm(len(groups))].reshape(-1)  # FFT seeds the generators

    loader = fft.CursorLoader(list(range(8)), 2, order=by_length)
    batches = [sorted(lengths[loader.indices(n)].tolist()) for n in range(4)]
    assert sorted(batches) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [loader.indices(n) for n in range(8)] == [
        fft.CursorLoader(list(range(8)), 2, order=by_length).indices(n) for n in range(8)
    ]


def test_an_order_that_changes_is_refused_in_a_resumed_job() -> None:
    loader = fft.CursorLoader(list(range(16)), 4, sampler=weighted())
    other = fft.CursorLoader(list(range(16)), 4, sampler=WeightedRandomSampler([1.0] * 16, 12))
    with pytest.raises(DataError, match=r"order is .* here but"):
        other.load(loader.export(0), 0)


def test_orders_that_differ_in_a_later_pass_give_different_digests() -> None:
    def order(data_epoch: int, rank: int) -> list[int]:
        return [*range(7), 7 - data_epoch * rank]

    loaders = [
        fft.CursorLoader(list(range(8)), 2, order=lambda n, rank=rank: order(n, rank))
        for rank in (0, 1)
    ]
    assert len({loader.fingerprint(0, 1) for loader in loaders}) == 1
    assert len({loader.fingerprint(4, 1) for loader in loaders}) == 2
    assert len({loader.fingerprint(3, 2) for loader in loaders}) == 2, "it needs both orders"


class Drifting(SequentialSampler):
    """Its order depends on the number of calls."""

    calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter([*range(self.calls % 8, 8), *range(self.calls % 8)])


def test_order_that_depends_on_its_calls_is_refused() -> None:
    with pytest.raises(DataError, match=r"expected the same sample indexes .* epoch 0 begins"):
        fft.CursorLoader(list(range(8)), 2, sampler=Drifting(range(8)))


def test_sampler_that_is_an_iterator_is_refused() -> None:
    with pytest.raises(DataError, match=r"got a range_iterator, an iterator, which ends"):
        fft.CursorLoader(list(range(8)), 2, sampler=iter(range(8)))


@pytest.mark.parametrize(
    ("indexes", "words"),
    [
        (torch.arange(8) % 2 == 0, "bool of shape (8,)"),
        ([True, False] * 4, "bool of shape (8,)"),
        (np.arange(8) / 1.5, "float64 of shape (8,)"),
        ([0.0, 1.5, 2.0], "float32 of shape (3,)"),
        (np.arange(8).reshape(4, 2), "int64 of shape (4, 2)"),
        (torch.tensor(3), "int64 of shape ()"),
        (["a", "b"], "values that do not make up a tensor"),
        (BatchSampler(SequentialSampler(range(7)), 2, False), "values that do not make up"),
    ],
)
def test_order_of_other_values_than_indexes_is_refused(indexes: Any, words: str) -> None:
    with pytest.raises(DataError, match="expected integer sample indexes in one dim") as caught:
        fft.CursorLoader(list(range(8)), 2, order=lambda _: indexes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "indexes", [np.arange(8)[::-1], np.arange(7, -1, -1, dtype=np.uint8), list(np.arange(8)[::-1])]
)
def test_order_takes_arrays_and_lists_of_any_integers(indexes: Any) -> None:
    assert fft.CursorLoader(list(range(8)), 2, order=lambda _: indexes).indices(0) == [7, 6]


@pytest.mark.parametrize("workers", [0, 1])
def test_cursor_loader_keeps_the_batches_of_a_batch_sampler(workers: int) -> None:
    batches = [[3, 1], [0], [2, 4, 5]]
    loader = fft.CursorLoader(
        list(range(6)), None, sampler=batches, micro_batches=2, num_workers=workers
    )
    try:
        taken = [loader.take(Due(n, n, 1)) for n in range(3)]
    finally:
        loader.close()
    parts = [[batch.tolist() for batch in item] for item in taken]
    assert parts == [[[3, 1], [0]], [[2, 4, 5]], [[3, 1], [0]]]
    assert loader.items_per_data_epoch == 2
    alone = fft.CursorLoader(list(range(6)), None, sampler=batches)
    assert [alone.indices(n) for n in range(4)] == [*batches, batches[0]]


def test_micro_batches_divide_the_samples_of_an_item() -> None:
    data = list(range(11))
    full = fft.CursorLoader(data, 2, shuffle=False, micro_batches=2)
    assert [full.indices(n) for n in range(3)] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[0, 1], [2, 3]],
    ]
    rest = fft.CursorLoader(data, 2, shuffle=False, micro_batches=2, drop_last=False)
    assert rest.items_per_data_epoch == 3
    assert rest.indices(2) == [[8, 9], [10]]
    assert full.export(0) != fft.CursorLoader(data, 4, shuffle=False).export(0)


def test_orders_of_batches_are_compared_and_checked() -> None:
    def order(data_epoch: int) -> list[list[int]]:
        return [[0, 1], [2, 3]] if data_epoch else [[0, 1, 2], [3]]

    one = fft.CursorLoader(list(range(4)), None, order=order)
    other = fft.CursorLoader(list(range(4)), None, order=lambda n: [[0, 1], [2, 3]])
    assert one.fingerprint(0, 1) != other.fingerprint(0, 1)
    for batches, words in (
        ([[0], []], "found an empty one in data epoch 0"),
        ([[0, 4]], "found indexes from 0 to 4"),
        ([], "at least one batch"),
        ([0, 1], "expected integer sample indexes in one dimension"),
    ):
        with pytest.raises(DataError, match=words):
            fft.CursorLoader(list(range(4)), None, order=lambda n, b=batches: b).indices(0)
    with pytest.raises(DataError, match="got None without an order"):
        fft.CursorLoader(list(range(4)), None)
    shorter = fft.CursorLoader(list(range(4)), None, order=lambda n: [[0]] * (2 - n))
    with pytest.raises(DataError, match=r"expected 2 batches .* epoch 1, .* found 1"):
        shorter.indices(2)


def test_an_order_with_another_length_in_a_later_pass_is_refused() -> None:
    loader = fft.CursorLoader(list(range(8)), 2, order=lambda n: range(8 - 2 * n))
    with pytest.raises(
        DataError, match=r"expected 8 sample indexes .* epoch 1, .* found 6; return"
    ):
        loader.indices(4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: DataLoader(d, 4, sampler=weighted()), "drop_last=False"),
        (lambda d: DataLoader(d, 4, sampler=weighted(), drop_last=True), "sampler=sampler, …)"),
        (lambda d: DataLoader(d, 4, shuffle=True, drop_last=True), "4, num_workers=0, …)"),
        (lambda d: DataLoader(d, 4), "shuffle=False, drop_last=False, …)"),
        (
            lambda d: DataLoader(d, 4, drop_last=True, sampler=DistributedSampler(d, 2, 0)),
            "4, num_workers=0, …)",
        ),
        (
            lambda d: DataLoader(d, batch_sampler=[[0, 1], [2, 3]]),
            "fft.CursorLoader(dataset, None, num_workers=0, sampler=batch_sampler, …), ",
        ),
        (lambda d: zip(d, d, strict=True), "StackDataset(first, second)"),
        (lambda d: zip(fft.CursorLoader(d, 4), d, strict=False), "StackDataset(first, second)"),
        (lambda d: [fft.CursorLoader(d, 4), fft.CursorLoader(d, 4)], "a list of loaders; a roll"),
        (lambda d: enumerate(d), "over the result. txn.step counts the steps"),
    ],
)
def test_refusals_show_how_to_keep_the_order(make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        as_source(make(list(range(16))))
    assert words in str(caught.value)


def test_a_sampler_that_gives_a_share_of_the_data_is_refused() -> None:
    data = list(range(16))
    with pytest.raises(DataError, match="takes no DistributedSampler"):
        fft.CursorLoader(data, 4, sampler=DistributedSampler(data, 2, 0))  # type: ignore[arg-type]
    assert fft.CursorLoader(data, 4, sampler=SequentialSampler(data)).indices(0) == [0, 1, 2, 3]
