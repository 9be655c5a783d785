"""Data by the cursor: every sample once a pass, replay gives the same objects, joiners go on."""

from __future__ import annotations

from typing import Any

import pytest

from fft.data import CursorLoader, DataError, as_source, loaded


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


def test_a_cursor_loader_visits_every_sample_once_a_pass() -> None:
    loader = CursorLoader(list(range(20)), batch_size=4, seed=1, collate=list)
    first = [i for n in range(5) for i in loader[n]]
    second = [i for n in range(5, 10) for i in loader[n]]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second, "each pass has an order of its own"
    assert CursorLoader(list(range(20)), 4, seed=1, collate=list)[7] == loader[7]


def test_a_cursor_loader_ends_after_its_passes() -> None:
    source = as_source(CursorLoader(list(range(8)), 4, passes=1, collate=list))
    assert source.items(0, 2) is not None
    assert source.items(1, 2) is None


def test_a_dataset_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match="batch_size=4"):
        CursorLoader([1, 2], batch_size=4)


def test_a_replay_sees_the_same_objects() -> None:
    source = as_source(Stream())
    first = source.items(0, 3)
    again = source.items(0, 2)
    assert first is not None
    assert again is not None
    assert all(a is b for a, b in zip(first, again, strict=False))
    assert [loaded(item) for item in source.items(2, 2) or []] == [[2], [3]]


def test_a_joiner_goes_on_at_the_cursor_although_more_was_drawn() -> None:
    source, joiner = as_source(Stream()), as_source(Stream())
    source.items(0, 4)
    joiner.load(source.export(2), 2)
    assert joiner.items(2, 3) == source.items(2, 3) == [[2], [3], [4]]


def test_a_stream_that_ends_says_so() -> None:
    source = as_source(Stream(3))
    assert source.items(0, 3) == [[0], [1], [2]]
    assert source.items(3, 1) is None


def test_a_loader_without_a_state_cannot_be_joined() -> None:
    with pytest.raises(DataError, match="load_state_dict"):
        as_source([1, 2, 3]).load(None, 2)


def test_a_cursor_that_goes_back_is_refused() -> None:
    source = as_source(Stream())
    source.items(5, 1)
    with pytest.raises(DataError, match="item 3 is due"):
        source.items(3, 1)
