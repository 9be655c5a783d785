"""Tests of the public exceptions, their tree, and their old names."""

from __future__ import annotations

import inspect
import re

import fft
import fft.errors

CLASSES = {
    name: kind
    for name, kind in vars(fft.errors).items()
    if inspect.isclass(kind) and issubclass(kind, BaseException)
}


def test_public_exceptions_are_few_and_documented() -> None:
    assert len(fft.errors.__all__) <= 16
    for name in fft.errors.__all__:
        assert CLASSES[name].__doc__
    assert fft.FftError is fft.errors.FftError


def test_tree_in_the_docstring_is_that_of_the_classes() -> None:
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (fft.errors.__doc__ or "").split("::")[1].splitlines():
        if found := re.match(r"([ │├└─]*)(\w+)(  |$)", line):
            depth, name = len(found[1]), found[2]
            above = [entry for entry in above if entry[0] < depth]
            if above:
                drawn[name] = above[-1][1]
            above.append((depth, name))
    assert drawn == {name: CLASSES[name].__base__.__name__ for name in fft.errors.__all__}


def test_every_other_exception_has_a_public_base() -> None:
    public = {CLASSES[name] for name in fft.errors.__all__}
    for kind in CLASSES.values():
        assert public & set(kind.__mro__)
