"""The structural gates count what they claim to count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import house

SOURCE = '''"""Who reads this: nobody."""
import x

class Wide:
    """Of one place."""

    def __init__(self, a, b, c, d, e, f, g, h):
        ATTRIBUTES

class Adapter(Manager):
    def step(self):
        return self._step + self._not_of_torchft

def branch(job):
    return job.spec.bound

def use(manager):
    """Return what is left.

    What is left is a list.
    """
    return manager._errored

def long():
LONG
'''


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with one offence of each kind."""
    attributes = "\n        ".join(f"self.a{i} = {i}" for i in range(21))
    long = "\n".join(f"    a{i} = {i}" for i in range(59))
    package = tmp_path / "fft"
    package.mkdir()
    text = SOURCE.replace("ATTRIBUTES", attributes).replace("LONG", long)
    (package / "a.py").write_text(text)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "PACKAGE", package)
    house.trees.cache_clear()
    yield
    house.trees.cache_clear()


@pytest.mark.usefixtures("planted")
def test_gates_find_planted_offences() -> None:
    assert [line.split(" ", 1)[1] for line in house.wide_constructors()] == [
        "Wide.__init__: 8 arguments"
    ]
    assert [line.split(" ", 1)[1] for line in house.wide_classes()] == ["Wide: 21 attributes"]
    assert [line.split(" ", 1)[1] for line in house.long_functions()] == ["long: 60 lines"]
    assert sorted(line.split(" ", 1)[1] for line in house.private_uses()) == [
        "manager._errored",
        "self._step",
    ]
    assert [line.split(" ", 1)[1] for line in house.paradigm_branches()] == ["job.spec.bound"]
    assert len(house.code_lines()) == 1 + 1 + 1 + 21 + 3 + 2 + 2 + 1 + 59


def test_arguments_of_another_librarys_class_do_not_count() -> None:
    kept = house.mirrored("DiLoCo")
    assert "outer_optimizer" in kept and "weighted" not in kept
    assert house.mirrored("Synchronizer") == set()


def test_prose_patterns_match_subjects_and_fragments() -> None:
    bad = ["Who asked: none.", "It ends. What is left is dropped.", "Of one place."]
    good = ["What is left?", "Of course.", "A group of one place.", "Return what is left."]
    for text in bad:
        assert house.SUBJECT.search(text) or house.FRAGMENT.search(text), text
    for text in good:
        assert not house.SUBJECT.search(text) and not house.FRAGMENT.search(text), text


def test_circles_are_the_sets_of_modules_that_reach_each_other() -> None:
    below = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": ["d"], "f": ["a"]}
    assert sorted(house.circles(below)) == [["a", "b", "c"], ["d", "e"]]
