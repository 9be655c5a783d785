"""Tests of the search through all objects of the process: its results, and no effect on other
code."""

from __future__ import annotations

import threading

from torch import nn

from fft.util.living import living


class Kind(nn.Module):
    """The class that is searched for."""


class Special(Kind):
    """A subclass of it."""


class HalfMade(Kind):
    """A class that runs the search before its instance is complete."""

    def __init__(self) -> None:
        self.__dict__["found"] = living((Kind,))


def test_living_finds_instances_of_a_class_and_its_subclasses_only() -> None:
    kept = [Kind(), Special(), nn.Linear(1, 1)]
    assert sorted(map(id, living((Kind,)))) == sorted(map(id, kept[:2]))
    assert [type(found) for found in living((Special,))] == [Special]
    made = HalfMade()
    assert made in made.found
    assert living(()) == []


def test_a_thread_that_builds_a_tuple_meanwhile_does_not_notice() -> None:
    """``tuple(…)`` resizes its tuple while it builds it, which Python refuses if others hold it."""
    heap: list[object] = [[] for _ in range(200_000)]  # makes the search take a while
    errors: list[SystemError] = []
    over = threading.Event()

    def build() -> None:
        while not over.is_set():
            try:
                tuple(number for number in range(1000))
            except SystemError as error:
                errors.append(error)

    builder = threading.Thread(target=build)
    builder.start()
    try:
        for _ in range(50):
            living((Kind,))
    finally:
        over.set()
        builder.join()
    assert heap and not errors
