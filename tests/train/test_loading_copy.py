"""Tests of the copy of a batch that a step function gets: equal, of the same form, nothing
shared."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fft.errors import DataError
from fft.train.data.batch_copy import copied


class Pair(NamedTuple):
    """A named tuple of a batch."""

    x: torch.Tensor
    y: list[int]


@dataclass
class Sample:
    """A user's class."""

    x: torch.Tensor
    name: str


def test_every_part_may_be_edited_and_the_original_stays() -> None:
    batch: dict[str, Any] = {
        "x": torch.arange(6.0).reshape(2, 3).t(),
        "n": np.arange(3),
        "pair": Pair(torch.ones(2), [1, 2]),
        "own": Sample(torch.ones(2), "a"),
        "ordered": OrderedDict(a=[1]),
        "tuple": (torch.zeros(1), "text"),
    }
    made = copied(batch)
    assert made["x"].stride() == batch["x"].stride()
    assert type(made["pair"]) is Pair
    made["x"].add_(1)
    made["n"] += 1
    made["pair"].x.zero_()
    made["pair"].y.pop()
    made["own"].x.zero_()
    made["ordered"]["a"].append(2)
    made["tuple"][0].add_(1)
    made["new"] = 1
    assert torch.equal(batch["x"], torch.arange(6.0).reshape(2, 3).t())
    assert batch["n"].tolist() == [0, 1, 2]
    assert batch["pair"].x.tolist() == [1, 1]
    assert batch["pair"].y == [1, 2]
    assert batch["own"].x.tolist() == [1, 1]
    assert batch["ordered"] == {"a": [1]}
    assert batch["tuple"][0].tolist() == [0]
    assert "new" not in batch


def test_shared_object_in_a_batch_stays_shared_in_the_copy() -> None:
    x = torch.ones(2)
    made = copied({"a": x, "b": [x], "own": Sample(x, "s")})
    assert made["a"] is made["b"][0] is made["own"].x
    loop: list[Any] = []
    loop.append(loop)
    again = copied(loop)
    assert again[0] is again
    assert again is not loop


def test_a_leaf_that_requires_gradients_is_still_one() -> None:
    made = copied(torch.ones(2, requires_grad=True))
    assert made.requires_grad
    assert made.is_leaf


def test_uncopyable_value_is_refused_with_place_and_type() -> None:
    with pytest.raises(DataError, match=r"batch\['a'\]\[1\] is a _thread.lock"):
        copied({"a": [1, threading.Lock()]})
