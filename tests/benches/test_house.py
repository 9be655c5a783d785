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
    assert [(n, place.split(" ", 1)[1]) for n, place in house.constructors()] == [
        (8, "Wide.__init__: 8 arguments")
    ]
    assert max(house.classes())[1].split(" ", 1)[1] == "Wide: 21 attributes"
    assert [line.split(" ", 1)[1] for line in house.long_functions()] == ["long: 60 lines"]
    assert sorted(line.split(" ", 1)[1] for line in house.private_uses()) == [
        "manager._errored",
        "self._step",
    ]
    assert [line.split(" ", 1)[1] for line in house.paradigm_branches()] == ["job.spec.bound"]
    assert len(house.code_lines()) == 1 + 1 + 1 + 21 + 3 + 2 + 2 + 1 + 59


def test_names_gates_find_repeated_replaced_and_unused_names(planted: None, tmp_path: Path) -> None:
    (tmp_path / "fft" / "b.py").write_text(
        "class Wide: ...\n\ndef tell_all(words, sword): long()\n"
    )
    house.trees.cache_clear()
    assert house.repeated_class_names() == ["Wide: fft/a.py, fft/b.py"]
    assert [line.split(" ", 1)[1] for line in house.replaced_words()] == ["tell_all", "words"]
    unused = [line.split(" ", 1)[1] for line in house.unused_names()]
    assert unused == ["Adapter", "branch", "use", "tell_all"]


def test_room_limit_rises_only_with_a_reason_and_falls_with_its_room(
    planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "limits.md"
    monkeypatch.setattr(house, "LIMITS", page)
    figure = len(house.code_lines())
    page.write_text(f"| `fft` | {figure - 1} | - | - |\n")
    assert house.rooms_over_limit() == [f"fft: {figure} code lines, limit {figure - 1}"]
    raised = page.read_text() + f"| `fft` | {figure} | | |\n"
    page.write_text(raised)
    assert house.rooms_over_limit() == [
        f"fft: {figure} is a raise; name the feature and what was removed"
    ]
    page.write_text(raised.replace("| | |", "| a feature | its double |"))
    assert house.rooms_over_limit() == []
    page.write_text(f"| `fft` | {2 * figure} | - | - |\n| `bus` | 1 | - | - |\n")
    assert house.rooms_over_limit() == [
        "bus: a limit, but no code",
        f"fft: {figure} code lines, limit {2 * figure}; run tools.house --lower",
    ]
    house.lower_limits()
    assert f"| `fft` | {figure} | - | - |" in page.read_text()
    page.write_text("")
    assert house.rooms_over_limit() == [
        f"fft: {figure} code lines without a limit; add a row to limits.md"
    ]


def test_lowered_limit_leaves_the_name_of_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "limits.md"
    monkeypatch.setattr(house, "LIMITS", page)
    monkeypatch.setattr(house, "rooms", lambda: {"layer9": 7})
    page.write_text("| `layer9` | 9 | 9 lines | - |\n")
    house.lower_limits()
    assert page.read_text() == "| `layer9` | 7 | 9 lines | - |\n"


def test_rooms_of_train_have_limits_of_their_own() -> None:
    assert house.room_of("fft/bus/nats.py") == "bus"
    assert house.room_of("fft/train/paradigms/periodic/loop.py") == "train/paradigms"
    assert house.room_of("fft/errors.py") == "fft"


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
