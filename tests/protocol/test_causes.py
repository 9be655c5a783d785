"""Tests of the codes of causes and of the page that documents them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fft.messages.causes import Cause, CauseCode
from fft.messages.protocol import Peer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "causes.md"
ME = Peer("1", 0, 3)


def test_causes_page_documents_every_code_and_the_accused() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert [code for code, _ in rows] == [code.value for code in CauseCode]
    of_proposer = {code for code, accused in rows if accused == "this rank"}
    assert of_proposer == {code.value for code in CauseCode if code.accuses_proposer}


@pytest.mark.parametrize("code", CauseCode)
def test_own_cause_accuses_its_rank_only_if_its_code_does(code: CauseCode) -> None:
    assert Cause.of_own(ME, code, "x").accused == ((ME,) if code.accuses_proposer else ())


def test_cause_that_names_a_whole_host_accuses_no_rank() -> None:
    peers = tuple(Peer("0", rank, 1) for rank in range(33))
    assert Cause(CauseCode.DIED, "x", peers[:32]).accused == peers[:32]
    assert Cause(CauseCode.DIED, "x", peers).accused == ()


def test_no_decision_searches_the_text_of_a_cause() -> None:
    """Comparisons with ``in`` and searches by position or pattern would act on it."""
    found = []
    for path in sorted((PAGE.parents[2] / "fft").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            places: list[ast.expr] = []
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                places = node.comparators
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                searched = node.func.attr in {"search", "match", "fullmatch", "findall", "finditer"}
                tested = node.func.attr in {"startswith", "endswith", "find", "index", "count"}
                places = node.args if searched else [node.func.value] if tested else []
            texts = (ast.unparse(place) for place in places)
            if any(re.search(r"(^|\.|_)(cause|fault|noticed)(\.text)?$", text) for text in texts):
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    assert not found
