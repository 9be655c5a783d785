"""The facts that a judge collects from moves, and how they are forgotten."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from fft.protocol.invariants.claims import Key

_OF_EPOCHS = frozenset({"members", "epoch", "in barrier"})
"""Kinds of facts about an epoch, whose number is the second element of the key. They are needed
while it lasts and when the next one begins."""
_EPOCHS = 2


class Facts:
    """Facts by key.

    Register records are divided into buckets of ``window``. A fact belongs to the bucket of the
    record at which it was last mentioned, and is forgotten with this bucket.
    """

    def __init__(self, window: int | None) -> None:
        """Keep all facts if ``window`` is None."""
        self._window = window
        self.at = 0
        """The register record of the move that is being checked."""
        self._reached = 0
        self._epoch = 0
        self._values: dict[Key, Any] = {}
        self._bucket_of: dict[Key, int] = {}
        self._keys: dict[int, set[Key]] = {}

    @property
    def bucket(self) -> int:
        """The bucket of facts that are mentioned now."""
        return 0 if self._window is None else self.at // self._window

    def put(self, key: Key, value: Any) -> Any:
        """Store a value unless ``key`` has one already; return the stored value."""
        if self._window is not None and self._bucket_of.get(key, -1) < (bucket := self.bucket):
            self._touch(key, bucket)
        return self._values.setdefault(key, value)

    def _touch(self, key: Key, bucket: int) -> None:
        self._bucket_of[key] = bucket
        self._keys.setdefault(bucket, set()).add(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def has(self, keys: Iterable[Key]) -> bool:
        """Return whether all keys are known."""
        return self._values.keys() >= set(keys)

    def __getitem__(self, key: Key) -> Any:
        return self._values[key]

    def due(self, record: int, epoch: int) -> Iterator[int]:
        """Yield the buckets that are complete once the moves have reached ``record`` in ``epoch``.

        These are all buckets before the last one.
        """
        self.at, self._epoch = record, max(self._epoch, epoch)
        if self._window is None:
            return
        while self._reached < record // self._window - 1:
            yield self._reached
            self._reached += 1

    def forget(self, bucket: int) -> Iterator[Key]:
        """Forget the facts that were not mentioned since this bucket, and yield their keys."""
        keys = self._keys.pop(bucket, set())
        for key in keys:
            if self._bucket_of.get(key) != bucket:
                continue
            if key[0] in _OF_EPOCHS and key[1] > self._epoch - _EPOCHS:  # type: ignore[operator]
                self._touch(key, bucket + 1)
                continue
            del self._values[key], self._bucket_of[key]
            yield key


class Numbers:
    """A set of integers, stored as runs, so that a nearly contiguous set takes little memory."""

    def __init__(self, runs: int | None = None) -> None:
        """Create an empty set.

        Args:
            runs: Keep only this many of the highest runs; None keeps all. All numbers below them
                then count as members, without adding to ``len``, so numbers must arrive nearly in
                order.
        """
        self._runs = runs
        self._floor: float = -math.inf
        """All numbers below it are members."""
        self._begins: list[int] = []
        self._ends: list[int] = []
        """The end of each run, exclusive."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        at = bisect_right(self._begins, number)
        return number < self._floor or (at > 0 and number < self._ends[at - 1])

    def add(self, number: int) -> None:
        """Add a number unless it is a member."""
        if number in self:
            return
        self._count += 1
        at = bisect_right(self._begins, number)
        joins_left = at > 0 and self._ends[at - 1] == number
        joins_right = at < len(self._begins) and self._begins[at] == number + 1
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            del self._begins[at]
        elif joins_left:
            self._ends[at - 1] = number + 1
        elif joins_right:
            self._begins[at] = number
        else:
            self._begins.insert(at, number)
            self._ends.insert(at, number + 1)
            if self._runs is not None and len(self._begins) > self._runs:
                del self._begins[0]
                self._floor = self._ends.pop(0)
