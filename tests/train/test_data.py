"""Tests of data by the cursor: replay gives equal objects, joiners continue, invalid use is
refused."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fft
from fft.errors import DataError, FftError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Token
from fft.train.data import retries
from fft.train.data.sharded import ShardedSource, ShardStateStore
from fft.train.data.source import Due, Inputs, StreamSource, as_source
from fft.train.data.step_input import StepInput


class Stream:
    """A stateful loader of ``[n]`` for n from 0 to ``end``."""

    def __init__(self, end: int = 100) -> None:
        self.position = 0
        self.end = end

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> list[int]:
        if self.position >= self.end:
            raise StopIteration
        self.position += 1
        return [self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def plan(cursor: int, index: int | None, participants: int, step: int = 0) -> StartTxn:
    """Return the begin of a txn as the engine sends it."""
    return StartTxn(Token(1, 1), step, "lineage", cursor, index, participants, ("0",), 0)


def drawn(inputs: Inputs, begin: StartTxn) -> StepInput:
    """Return the input of a txn that has one."""
    found = inputs.draw(begin)
    assert found is not None
    return found


def test_a_replay_sees_the_same_objects() -> None:
    source = as_source(Stream())
    first = source.take(Due(0, 2, 3))
    assert source.take(Due(0, 2, 3)) is first
    assert source.take(Due(2, 2, 2)) is first
    assert source.take(Due(2, 3, 2)) == [3]


class Breaks(Stream):
    """A loader whose item 5 cannot be read."""

    def __next__(self) -> list[int]:
        if self.position == 5:
            raise OSError("bad sector")
        return super().__next__()


class Items(Sequence[int]):
    """A sequence whose item 5 cannot be read."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: Any) -> Any:
        if index == 5:
            raise OSError("bad sector")
        return index


class Data(torch.utils.data.Dataset[int]):
    """A data set whose sample 11, in item 5, cannot be read."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == 11:
            raise OSError("bad sector")
        return index


@pytest.mark.parametrize("kind", ["stream", "items", "main thread", "worker", "batch"])
def test_loading_error_names_item_step_and_rank(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PAUSES_S", (0.0, 0.0))
    made: dict[str, Callable[[], Any]] = {
        "stream": Breaks,
        "items": Items,
        "main thread": lambda: fft.CursorLoader(Data(), 2, shuffle=False),
        "worker": lambda: fft.CursorLoader(Data(), 2, shuffle=False, num_workers=1),
        "batch": lambda: [threading.Lock() if n == 5 else n for n in range(9)],
    }
    source = as_source(made[kind]())
    inputs = Inputs(source, 2, 1)
    try:
        with pytest.raises((OSError, DataError)) as caught:
            for step in range(3):  # 2 ranks, 1 group: rank 1 gets the items 1, 3, 5
                assert inputs.draw(plan(step, 0, 1, step)) is not None
    finally:
        source.close()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "rank 1 of its group was drawn for the txn of step 2" in text
    assert "item 5 of the data, of slice 2" in text
    if kind == "stream":
        assert "while item 5 of a " in text and "Breaks was drawn" in text
    elif kind in ("main thread", "worker"):
        assert "while sample 11 of the dataset was read" in text
        assert "while item 5 (samples [10, 11]) of fft.CursorLoader was loaded" in text


def test_a_joiner_goes_on_at_the_cursor_although_more_was_drawn() -> None:
    source, joiner = as_source(Stream()), as_source(Stream())
    assert source.holds(0, 4)
    joiner.load(source.export(2), 2)
    for number in (2, 3, 4):
        assert joiner.take(Due(2, number, 3)) == source.take(Due(2, number, 3)) == [number]


def test_exhausted_stream_holds_no_further_items() -> None:
    source = as_source(Stream(3))
    assert source.holds(0, 3)
    assert not source.holds(0, 4)
    assert not source.holds(3, 1)


class Circular(Stream):
    """It begins anew when it is iterated after its end, like torchdata's StatefulDataLoader."""

    def __iter__(self) -> Stream:
        self.position %= self.end
        return self


def test_state_from_the_end_of_the_data_begins_no_further_pass() -> None:
    first, resumed = as_source(Circular(3)), as_source(Circular(3))
    assert first.holds(0, 3) and not first.holds(0, 4)
    for _ in range(2):  # the second one as after a further restart
        resumed.load(first.export(3), 3)
        assert not resumed.holds(3, 1)


def test_state_from_the_end_of_a_shard_begins_no_further_pass() -> None:
    def source() -> ShardedSource:
        shelf = ShardStateStore(lambda name: None, lambda name, value: None)
        return ShardedSource(Circular(3), "group", "0", 0, 1, shelf)

    first, resumed = source(), source()
    for step in range(3):
        found = first.draw(plan(step, 0, 1, step))
        assert found is not None and found[0] == [step]
        first.positions["0"] = step + 1
    resumed.load(first.export(3), 3)
    assert resumed.draw(plan(3, 0, 1, 3)) is None


def test_a_cursor_that_goes_back_is_refused() -> None:
    source = as_source(Stream())
    source.holds(5, 1)
    with pytest.raises(DataError, match="expected item 3 of the data, but the items 5 to 6 are"):
        source.holds(3, 1)


# --- what a user may pass ------------------------------------------------------------------------


def numbers() -> Iterator[int]:
    """A generator."""
    yield from range(10)


def test_a_plain_loader_is_refused_with_the_fix() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)
    with pytest.raises(DataError, match=r"DataLoader.*CursorLoader\(dataset, 4, num_workers=2"):
        as_source(loader)


def test_a_loader_of_a_stream_is_refused_with_another_fix() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return numbers()

    with pytest.raises(DataError, match=r"fft.StreamLoader\(open_stream\)"):
        as_source(torch.utils.data.DataLoader(Endless(), batch_size=4))


def test_a_generator_is_refused() -> None:
    with pytest.raises(DataError, match=r"a generator, which has no state_dict.*replay_only=True"):
        as_source(numbers())


def test_replay_only_source_is_used_and_refuses_to_resume_elsewhere() -> None:
    source = as_source(fft.Loader(numbers(), replay_only=True))
    assert source.take(Due(0, 1, 2)) == 1
    with pytest.raises(DataError, match="load_state_dict"):
        source.load(None, 2)
    with pytest.raises(DataError, match=r"continues at item 6.*begin at its first"):
        as_source(fft.Loader(numbers(), replay_only=True)).holds(6, 1)


def test_a_list_is_had_in_any_order() -> None:
    source = as_source([[0], [1], [2]])
    assert source.in_any_order
    assert source.take(Due(2, 2, 1)) == [2]
    assert source.take(Due(0, 1, 2)) == [1]
    assert source.holds(0, 3)
    assert not source.holds(0, 4)


def test_joiner_with_different_data_is_refused_with_the_difference() -> None:
    data = list(range(20))
    source = fft.CursorLoader(data, 4, seed=1)
    fft.CursorLoader(data, 4, seed=1).load(source.export(3), 3)
    with pytest.raises(DataError, match="batch_size is 5 here but 4 in the state"):
        fft.CursorLoader(data, 5, seed=1).load(source.export(3), 3)
    with pytest.raises(DataError, match="another kind of loader"):
        as_source([1, 2, 3]).load(source.export(3), 3)


# --- which item a rank takes ---------------------------------------------------------------------


def test_each_rank_of_each_group_takes_an_item_of_its_own() -> None:
    taken = [
        drawn(Inputs(as_source([[n] for n in range(40)]), 2, rank), plan(5, index, 3)).batch
        for index in range(3)
        for rank in range(2)
    ]
    assert taken == [[n] for n in range(10, 16)]


def test_stream_of_groups_of_two_ranks_resumes_at_the_cursor() -> None:
    """The cursor counts slices; for the loader of such a group each slice is two items."""
    ranks, cursor = 2, 3
    source = StreamSource(Stream())
    for at in range(cursor):
        assert drawn(Inputs(source, ranks, 1), plan(at, 0, 1)).batch == [2 * at + 1]
    first = cursor * ranks
    state = source.export(first)
    assert state["loader_state"] == {"position": first}, "of the first item not committed"
    for rank in range(ranks):
        joiner = StreamSource(Stream())
        joiner.load(state, first)
        for index in range(3):
            got = drawn(Inputs(joiner, ranks, rank), plan(cursor, index, 3)).batch
            assert got == [first + 2 * index + rank]
        after = drawn(Inputs(joiner, ranks, rank), plan(cursor + 3, 1, 3)).batch
        assert after == [first + 3 * ranks + 2 + rank]


def test_non_contributing_rank_takes_an_item() -> None:
    inputs = Inputs(as_source([[n] for n in range(40)]), 2, 1)
    assert drawn(inputs, plan(5, None, 2)).batch == [11]


def test_last_txn_is_recognized_one_before_without_loading_items() -> None:
    class Untouched(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            raise AssertionError("loaded to find the end")

    source = fft.CursorLoader(Untouched(), 2, data_epochs=1)
    assert [source.holds(first, 4) for first in (0, 2, 3)] == [True, True, False]
    inputs = Inputs(as_source([[n] for n in range(7)]), 1, 0)
    ends = [drawn(inputs, plan(cursor, 0, 2)).is_last for cursor in (0, 2, 4)]
    assert ends == [False, False, True]
    assert inputs.draw(plan(6, 0, 2)) is None


@pytest.mark.parametrize("make", [Stream, lambda: [[n] for n in range(9)]])
def test_replay_of_an_edited_batch_gets_the_loaded_one(make: Any) -> None:
    inputs = Inputs(as_source(make()), 1, 0)
    first = drawn(inputs, plan(0, 1, 3)).batch
    first.append("edited")
    assert drawn(inputs, plan(0, 1, 3)).batch == [1]


def test_the_wait_for_the_input_of_a_step_is_that_of_all_its_attempts() -> None:
    inputs = Inputs(as_source([torch.zeros(8) for _ in range(9)]), 1, 0)
    first, again = (drawn(inputs, plan(3, 0, 1, step=7)).waited_ms for _ in range(2))
    assert 0 < first < again


def test_long_temporary_folder_is_named_before_workers_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    with pytest.raises(FftError, match="TMPDIR is too long for worker processes"):
        fft.CursorLoader(list(range(8)), batch_size=2, num_workers=1)
    fft.CursorLoader(list(range(8)), batch_size=2)
