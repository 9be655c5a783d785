"""Tests that effects do not decide: every condition is a guard, of a row or of a part of a
sequence.

An effect that chooses would hide a row: the checker could not count it, and readers of the YAML
would not see it. Only choices about data may stay: a default for a missing value, or the contents
of a record.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from fft.protocol import effects
from fft.protocol.effects import EFFECTS

FILE = Path(inspect.getfile(effects))
CHOICES = (ast.If, ast.IfExp, ast.BoolOp, ast.Match, ast.While, ast.Try)

DATA = {
    "_tell": "An address: None means everyone.",
    "note_leave": "The cause that is known already stays.",
    "note_vote": "What the vote says: that its group leaves, if it may.",
    "note_scope": "Of several scopes the one that the event speaks of.",
    "note_cause": "An event without a cause leaves the one that is known.",
    "say_leave": "An event without a cause gets a text.",
    "_steps_held": "A text: which rank begins with which step, where they differ.",
    "finish": "An event without a cause gets a text.",
    "_cause_now": "An ABORT without a cause gets a text, or names the members that are missing.",
    "_open": "The cause stays that of a member that was lost during the last update.",
    "commit_record": "Data of the record: which groups leave, what follows, synchronous or not.",
    "succeed_epoch": "For teaching specs: outside every epoch, of the last record.",
}
"""Functions that choose, with what they choose. None of it is a step of the protocol."""


def choosing(text: str) -> dict[str, list[str]]:
    """Return the functions of a module that choose, by name, with the places; assertions do not
    count."""
    found: dict[str, list[str]] = {}
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef):
            asserted = {
                id(inner)
                for node in ast.walk(function)
                if isinstance(node, ast.Assert)
                for inner in ast.walk(node)
            }
            chosen = [
                f"{ast.unparse(node).splitlines()[0]}"
                for node in ast.walk(function)
                if isinstance(node, CHOICES) and id(node) not in asserted
            ]
            if chosen:
                found[function.name] = chosen
    return found


def test_branches_in_effects_are_data_with_a_reason() -> None:
    assert {Path(inspect.getfile(e)) for e in EFFECTS.values()} == {FILE}
    found = choosing(FILE.read_text(encoding="utf-8"))
    new = {name: chosen for name, chosen in found.items() if name not in DATA}
    assert not new, "make it a guard: of a row, or of a part of a sequence"
    assert not DATA.keys() - found.keys(), "they choose nothing any more: take them off the list"


@pytest.mark.parametrize(
    "body",
    [
        "if s.proposed: return ()",
        "s.cause = 'x' if s.proposed else ''",
        "s.cause = s.cause or 'x'",
        "match event: case 1: pass",
        "while s.proposed: s.proposed = False",
    ],
)
def test_conditional_effect_is_found(body: str) -> None:
    head, colon, case = body.partition(": case")
    lines = f"{head}:\n        case{case}" if colon else body
    assert list(choosing(f"def act(s, c, event):\n    {lines}\n")) == ["act"]


def test_asserting_and_filtering_are_no_choices() -> None:
    text = "def act(s):\n    assert s.a and s.b\n    s.c = {p for p in s.d if p.x}\n"
    assert choosing(text) == {}
