"""A bad spec is refused with one error that names file, line, place and the mend."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from fft.protocol.graph import edges, to_dot, to_mermaid
from fft.protocol.load import find_spec, json_schema, load_spec, parse_spec
from fft.protocol.spec import FsmSpec
from fft.protocol.spec_checks import check_spec
from fft.util.errors import SpecError

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "fsm_specs" / "hsdp.yaml").read_text()


def refusal(text: str) -> str:
    """The error that parsing ``text`` as ``spec.yaml`` ends in."""
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "spec.yaml")
    return str(caught.value)


def changed(old: str, new: str) -> str:
    assert TEXT.count(old) >= 1, f"{old!r} is not in the spec any more"
    return TEXT.replace(old, new, 1)


PREPARED = "        - {guard: [votes_yes, is_healed], to: PREPARED, effects: [cast_vote]}\n"
BAD = {
    "unknown key": (changed("initial: INIT", "intial: INIT"), "initial", "initial"),
    "unknown row key": (changed("to: PREPARED, eff", "goto: PREPARED, eff"), "goto", "remove it"),
    "unknown state": (changed("to: PREPARED, eff", "to: PREPAERD, eff"), ".to", "'PREPARED'"),
    "unknown guard": (changed("[votes_yes, is_healed]", "[vote_yes]"), "guard", "'votes_yes'"),
    "unknown effect": (changed("[cast_vote]", "[cast_votes]"), "effects", "'cast_vote'"),
    "unknown event": (changed("      prepared:\n", "      perpared:\n"), "on", "'prepared'"),
    "unknown timer": (changed("timers: [vote_window]", "timers: [vote_widow]"), "timers", "window"),
    "unknown initial": (changed("initial: INIT", "initial: START"), "initial", "known"),
    "no time": (changed("default: 0.1", "default: -0.1"), "timers.pause.default", "greater than 0"),
    "wrong type": (changed("default: 0.1", "default: soon"), "timers.pause.default", "soon"),
    "unknown time": (changed("of: join_window", "of: join_widow"), "quorum", "'join_window'"),
    "unknown argument": (changed("follows: timeout", "follows: time"), "timers", "'timeout'"),
    "rules in a circle": (
        changed("of: ack_window", "of: quorum"),
        "timers.quorum.at_least",
        "lead back to it",
    ),
    "rows that fight": (changed(PREPARED, PREPARED * 2), "on.prepared.1", "fight"),
    "row behind a wider one": (
        changed(PREPARED, "        - {to: ROLLBACK_REQ, effects: [propose_abort]}\n" + PREPARED),
        "on.prepared.1",
        "more guards first",
    ),
    "exit row without a guard": (
        changed("- {guard: [member_lost], to: ROLLBACK_REQ", "- {to: ROLLBACK_REQ"),
        "exit",
        "guard",
    ),
    "silent event": (
        changed("    ignore:\n      prepared: the vote is cast\n", ""),
        "states.PREPARED",
        "no way out",
    ),
    "named twice": (
        changed("      prepared: the vote is cast", "      fault: twice\n      prepared: x"),
        "states.PREPARED",
        "keep one",
    ),
    "unreachable state": (
        TEXT + "\n  LIMBO:\n    role: healing\n    on: {drain: [{to: EXIT}]}\n    ignore:\n"
        "      {prepared: x, fault: x, decision: x}\n",
        "states.LIMBO",
        "cannot be reached",
    ),
    "no way to an end": (TEXT.replace("to: EXIT", "to: INIT"), "states", "EXIT"),
    "terminal with rows": (
        changed("    role: terminal", "    role: terminal\n    timers: [pause]"),
        "states.EXIT",
        "terminal",
    ),
    "a key twice": (changed("initial: INIT", "initial: INIT\ninitial: NORMAL"), "line", "twice"),
    "not YAML": ("states: [", "not YAML", "spec.yaml"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_spec_is_refused_with_place_and_mend(case: str) -> None:
    text, place, mend = BAD[case]
    error = refusal(text)
    assert error.startswith("spec.yaml")
    assert place in error
    assert mend in error
    if case not in ("not YAML", "a key twice"):
        assert re.match(r"spec\.yaml:\d+: ", error), error


def test_the_line_in_the_error_is_the_line_of_the_mistake() -> None:
    error = refusal(changed("[cast_vote]", "[cast_votes]"))
    number = int(error.split(":")[1])
    assert "cast_vote" in TEXT.splitlines()[number - 1]


def test_a_deferral_without_an_end_is_refused() -> None:
    values = load_spec("hsdp").model_dump()
    for state in values["states"].values():
        if state["role"] != "terminal":
            state["on"].pop("prepared", None)
            state["ignore"].pop("prepared", None)
            state["defer"]["prepared"] = "later"
    problems = check_spec(FsmSpec.model_validate(values))
    assert any("deferred, but no state" in message for _, message in problems)


def test_a_spec_is_found_by_name_and_by_path() -> None:
    assert load_spec("hsdp").digest() == load_spec(ROOT / "fsm_specs" / "hsdp.yaml").digest()
    with pytest.raises(SpecError, match=r"there are: .*hsdp"):
        find_spec("hdsp")
    with pytest.raises(SpecError, match="no such spec file"):
        find_spec("elsewhere/hsdp.yaml")


def test_no_code_asks_for_a_state_by_name() -> None:
    """A spec may call its states as it likes: code asks for roles."""
    states = {part for name in load_spec("hsdp").states for part in (name, name.partition(".")[0])}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for room in ("fft", "benchmarks")
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in states
    ]
    assert not found


def test_the_schema_file_for_editors_is_the_schema_of_the_models() -> None:
    stored = json.loads((ROOT / "fsm_specs" / "schema.json").read_text())
    assert stored == json_schema(), "write it again: fft schema > fsm_specs/schema.json"


def test_the_diagram_in_the_design_is_drawn_from_the_table() -> None:
    design = (ROOT / "DESIGN.md").read_text()
    assert to_mermaid(load_spec("hsdp")) in design, "put in the output of: fft graph hsdp"


def test_both_diagrams_have_every_state_and_every_edge() -> None:
    spec = load_spec("hsdp")
    mermaid, dot = to_mermaid(spec), to_dot(spec)
    for source, target, _ in edges(spec):
        assert f"{'any' if source == '*' else source} --> {target}" in mermaid
        assert f'"{source}" -> "{target}"' in dot
