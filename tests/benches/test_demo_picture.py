"""The picture of the demo in README is made from the output of the demo."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from fft.messages.fault_plans import load_plan
from tools.demo_picture import LEFT_OUT, main, picture, shortened

ROOT = Path(__file__).parents[2]
AT_WORK = (
    "  {at:4.1f} s  step 5 of 9, {fired} of 4 planned faults fired  |  "
    "group 0 running (start 1): training at step 5{fault}  |  group 1 ready"
)


def at_work(at: float, fired: int, fault: str = "") -> str:
    return AT_WORK.format(at=at, fired=fired, fault=fault)


def test_demo_picture_omits_repeated_lines_and_machine_names() -> None:
    places = [
        "   exceptions in ranks, and where they were raised",
        "│ 1/1 │ /home/me/x.py:3 │",
        "└─────┘",
    ]
    lines = ["fft: to watch", at_work(1, 0), at_work(2, 0), at_work(3, 1, " [1/1#1: Error]")]
    assert list(shortened([*lines, *places, "verdict: no violation"])) == [
        LEFT_OUT,
        at_work(1, 0),
        LEFT_OUT,
        at_work(3, 1),
        LEFT_OUT,
        "verdict: no violation",
    ]


def test_output_without_a_verdict_makes_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Traceback …\n"))
    before = (ROOT / "docs" / "demo.svg").read_bytes()
    assert main() == 1
    assert (ROOT / "docs" / "demo.svg").read_bytes() == before


def test_the_picture_in_readme_shows_the_faults_of_the_demo() -> None:
    svg = (ROOT / "docs" / "demo.svg").read_text(encoding="utf-8")
    for fault in load_plan(ROOT / "examples" / "hsdp_demo_faults.yaml", 2, 2).faults:
        assert fault.name in svg, "draw it again: make demo-picture"
    assert picture(["verdict: no violation"]).count("verdict") == svg.count("verdict") == 1
    assert not re.findall(r"/\w+/\w+/[\w/]+\.py", svg), "the picture has paths of a machine"
