"""Tests that an invalid spec is refused with one error that names file, line, place and fix."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from specs import whole_text

from fft.errors import ConfigError, FftError
from fft.protocol.graph import (
    edges,
    in_mermaid,
    reactions,
    scopes_to_dot,
    scopes_to_mermaid,
    to_dot,
    to_mermaid,
)
from fft.protocol.load import find_spec, json_schema, load_machine, load_spec, parse_spec
from fft.protocol.spec import FsmSpec, Row
from fft.protocol.spec_checks import check_spec
from fft.prove.checker import all_rows
from fft.prove.sets_of_bounds import sets_for

ROOT = Path(__file__).resolve().parents[2]
SPECS = ROOT / "fsm_specs"
FILES = {
    str(path.relative_to(SPECS)): path.read_text(encoding="utf-8")
    for path in (SPECS / "hsdp.yaml", *sorted((SPECS / "parts").glob("*.yaml")))
}
"""The files of hsdp."""
Files = dict[str, str]


def write(folder: Path, files: Files) -> Path:
    """Write hsdp with some of its files changed."""
    (folder / "parts").mkdir()
    for name, text in {**FILES, **files}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "hsdp.yaml"


def refusal(folder: Path, files: Files) -> str:
    """Return the error that loading hsdp with these files raises, without the folder."""
    with pytest.raises(ConfigError) as caught:
        load_spec(write(folder, files))
    return str(caught.value).replace(f"{folder}/", "")


def changed(old: str, new: str, count: int = 1) -> Files:
    """Change the first file that contains ``old``."""
    name = next((name for name, text in FILES.items() if old in text), None)
    assert name is not None, f"{old!r} is not in the spec any more"
    return {name: FILES[name].replace(old, new, count)}


def two_scopes(more: str, sync: str = "every_step") -> Files:
    """Return hsdp with a second parameter group, and a second scope that commits it."""
    return changed(
        "  model: {ranks: shards}\nscopes:\n"
        "  step: {members: job, commits: [model], sync: every_step}",
        "  model: {ranks: shards}\n  head: {ranks: shards}\nscopes:\n"
        f"  step: {{members: job, commits: [model], sync: {sync}}}\n  more: {more}",
    )


def stages(flow: str, *more: str) -> Files:
    """Return two or more stages with their own scopes, and the edges between them."""
    names = ["one", "two", *more]
    held = "".join(f"  {n}: {{ranks: stages, samples: per_group}}\n" for n in names)
    scopes = "".join(
        f"  s_{n}: {{members: stage, commits: [{n}], sync: every_step}}\n" for n in names
    )
    return changed(
        "  model: {ranks: shards}\nscopes:\n"
        "  step: {members: job, commits: [model], sync: every_step}\n",
        f"{held}scopes:\n{scopes}flow: {flow}\n",
    )


LIMBO = """
  LIMBO:
    role: healing
    on: {drain: [{to: EXIT}]}
    ignore: {prepared: x, fault: x, decision: x}
"""
PREPARED = "        - {guard: [votes_yes, is_healed], to: PREPARED, effects: [vote_yes]}\n"
BAD = {
    "a parameter group that is not there": (
        changed("commits: [model]", "commits: [modle]"),
        "scopes.step.commits.0",
        "did you mean 'model'",
    ),
    "a parameter group that two scopes commit": (
        changed("commits: [model]", "commits: [model, model]"),
        "scopes.step.commits.1",
        "'model' is committed by 'step' already",
    ),
    "a parameter group that nobody commits": (
        changed("  model: {ranks: shards}", "  model: {ranks: shards}\n  head: {ranks: shards}"),
        "parameter_groups.head",
        "no scope commits it",
    ),
    "ranks that hold parameter groups unlike each other": (
        changed(
            "  model: {ranks: shards}\nscopes:\n  step: {members: job, commits: [model]",
            "  model: {ranks: shards}\n  head: {ranks: one}\nscopes:\n"
            "  step: {members: job, commits: [model, head]",
        ),
        "parameter_groups",
        "not ['one', 'shards']",
    ),
    "ranks that take samples unlike each other": (
        changed(
            "  model: {ranks: shards}\nscopes:\n  step: {members: job, commits: [model]",
            "  model: {ranks: shards}\n  head: {ranks: shards, samples: per_group}\nscopes:\n"
            "  step: {members: job, commits: [model, head]",
        ),
        "parameter_groups",
        "not ['per_group', 'per_rank']",
    ),
    "stages of unlike samples": (
        changed("  model: {ranks: shards}", "  model: {ranks: stages}"),
        "parameter_groups.model",
        "say per_group",
    ),
    "a scope of the group over stages": (
        changed(
            "  model: {ranks: shards}\nscopes:\n"
            "  step: {members: job, commits: [model], sync: every_step}",
            "  copy: {ranks: stages, samples: per_group}\n"
            "  model: {ranks: stages, samples: per_group}\nscopes:\n"
            "  inner: {members: group, commits: [copy], sync: every_step}\n"
            "  outer: {members: job, commits: [model], sync: periodic}",
        ),
        "scopes.inner.commits.0",
        "say ranks: one, or ranks: shards",
    ),
    "two scopes that commit the same": (
        changed(
            "  step: {members: job, commits: [model], sync: every_step}",
            "  step: {members: job, commits: [model], sync: every_step}\n"
            "  more: {members: job, commits: [model], sync: every_step}",
        ),
        "scopes.more.commits.0",
        "'model' is committed by 'step' already; take one away",
    ),
    "two scopes of the job": (
        two_scopes("{members: job, commits: [head], sync: every_step}"),
        "scopes",
        "one scope has the members `job`, not ['step', 'more']",
    ),
    "a scope of the group beside one of every step": (
        two_scopes("{members: group, commits: [head], sync: every_step}"),
        "scopes.step.sync",
        "say periodic: it follows the commits of 'more'",
    ),
    "a scope of the group that is not of every step": (
        two_scopes("{members: group, commits: [head], sync: periodic}", "periodic"),
        "scopes.more.sync",
        "say every_step",
    ),
    "a period of nothing": (
        changed("sync: every_step", "sync: periodic"),
        "scopes.step.sync",
        "add one, or say every_step",
    ),
    "a stage beside a scope of the job": (
        two_scopes("{members: stage, commits: [head], sync: every_step}"),
        "scopes.step.members",
        "other scopes are those of stages",
    ),
    "a flow from a scope that is not there": (
        stages("[{from: s_on, to: s_two, ahead: 1}]"),
        "flow.0.from",
        "did you mean 's_one'",
    ),
    "a flow between scopes of other kinds": (
        changed("policies:\n", "flow: [{from: step, to: step, ahead: 1}]\npolicies:\n"),
        "flow.0.from",
        "is no scope of a stage",
    ),
    "an edge twice": (
        stages("[{from: s_one, to: s_two, ahead: 1}, {from: s_one, to: s_two, ahead: 2}]"),
        "flow.1",
        "stands here already",
    ),
    "a circle": (
        stages("[{from: s_one, to: s_two, ahead: 1}, {from: s_two, to: s_one, ahead: 1}]"),
        "flow.0",
        "'s_one' would wait for itself: s_one → s_two → s_one",
    ),
    "an edge that lets nobody go on": (
        stages("[{from: s_one, to: s_two, ahead: 0}]"),
        "flow.0.ahead",
        "greater than or equal to 1",
    ),
    "a bound below the depth": (
        stages(
            "[{from: s_one, to: s_two, ahead: 1}, {from: s_two, to: s_three, ahead: 1}, "
            "{from: s_one, to: s_three, ahead: 1}]",
            "three",
        ),
        "flow.2.ahead",
        "s_one → s_two → s_three is 2 steps deep",
    ),
    "a stage that nothing flows to": (
        stages("[{from: s_one, to: s_two, ahead: 1}]", "three"),
        "scopes.s_three",
        "no edge of the flow leads to this stage",
    ),
    "a bounded scope without a bound": (
        changed(
            "  model: {ranks: shards}\nscopes:\n"
            "  step: {members: job, commits: [model], sync: every_step}",
            "  copy: {ranks: shards}\n  model: {ranks: shards}\nscopes:\n"
            "  inner: {members: group, commits: [copy], sync: every_step}\n"
            "  outer: {members: job, commits: [model], sync: bounded}",
        ),
        "policies",
        "scope 'outer' is bounded, and nothing says by what: give policies a bound",
    ),
    "a bound of nothing": (
        changed("  min_reductions: 1\n", "  min_reductions: 1\n  bound: 4\n"),
        "policies.bound",
        "no scope has sync: bounded; remove the bound",
    ),
    "a bound below 1": (
        changed("  min_reductions: 1\n", "  min_reductions: 1\n  bound: 0\n"),
        "policies.bound",
        "greater than or equal to 1",
    ),
    "a quorum that is no majority": (
        changed("  min_reductions: 1\n", "  min_reductions: 1\n  quorum: 0.4\n"),
        "policies.quorum",
        "greater than or equal to 0.5",
    ),
    "a quorum of more than all": (
        changed("  min_reductions: 1\n", "  min_reductions: 1\n  quorum: 1.0\n"),
        "policies.quorum",
        "less than 1",
    ),
    "bounded steps of nothing": (
        changed("sync: every_step", "sync: bounded"),
        "scopes.step.sync",
        "bounded counts the commits of a scope with members `group`, and there is none",
    ),
    "unknown members": (changed("members: job", "members: jobs"), "scopes.step.members", "'job'"),
    "unknown key": ({"hsdp.yaml": FILES["hsdp.yaml"] + "intial: INIT\n"}, "intial", "spelling"),
    "unknown row key": (changed("to: PREPARED, eff", "goto: PREPARED, eff"), "goto", "remove it"),
    "unknown state": (changed("to: PREPARED, eff", "to: PREPAERD, eff"), ".to", "'PREPARED'"),
    "a state that has sub-states": (
        changed("to: HEALING.formed", "to: HEALING"),
        ".to",
        "say which one: HEALING.forming, HEALING.formed",
    ),
    "unknown sub-state": (
        changed("to: HEALING.formed", "to: HEALING.fromed"),
        ".to",
        "did you mean 'HEALING.formed'",
    ),
    "a sub-state that says it twice": (
        changed(
            "      formed:\n        doc: >\n",
            "      formed:\n        ignore: {restored: x}\n        doc: >\n",
        ),
        "HEALING.states.formed",
        "keep one",
    ),
    "unknown guard": (changed("[votes_yes, is_healed]", "[vote_yes]"), "guard", "'votes_yes'"),
    "unknown effect": (changed("[vote_yes]", "[vote_yse]"), "effects", "'vote_yes'"),
    "unknown reason": (changed("{stop: no_epoch}", "{stop: no_epok}"), "effects", "'no_epoch'"),
    "unknown armed timer": (changed("{arm: quorum}", "{arm: qorum}"), "effects", "'quorum'"),
    "no argument": (changed("{stop: no_epoch}", "stop"), "effects", "unknown argument of stop"),
    "factor of no timer": (
        changed("{ready_window: 1.5}", "{ready_window: -1}"),
        "effects",
        "a factor above 0",
    ),
    "argument too many": (
        changed("{not: paused}", "{not: {paused: now}}"),
        "guard",
        "unknown argument of paused 'now'",
    ),
    "unknown event": (changed("      prepared:\n", "      perpared:\n"), "on", "'prepared'"),
    "unknown timer": (changed("timers: [vote_window]", "timers: [vote_widow]"), "timers", "window"),
    "unknown initial": (changed("initial: INIT", "initial: START"), "initial", "known"),
    "no time": (changed("default: 0.1", "default: -0.1"), "timers.pause.default", "greater than 0"),
    "wrong type": (changed("default: 0.1", "default: soon"), "timers.pause.default", "soon"),
    "unknown time": (changed("of: join_window", "of: join_widow"), "quorum", "'join_window'"),
    "unknown argument": (changed("follows: timeout", "follows: time"), "timers", "'timeout'"),
    "rules in a circle": (
        changed("of: ack_window", "of: quorum"),
        "timers.coordinator_window.at_least",
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
        changed("on:\n      ballot:", "on:\n      prepared: [{to: EXIT}]\n      ballot:"),
        "states.PREPARED",
        "keep one",
    ),
    "unreachable state": (
        {"parts/drain.yaml": FILES["parts/drain.yaml"] + LIMBO},
        "states.LIMBO",
        "cannot be reached",
    ),
    "no way to an end": (
        {name: text.replace("to: EXIT", "to: INIT") for name, text in FILES.items()},
        "states",
        "EXIT",
    ),
    "a phase with the name of a state": (
        changed("      DRAIN_COMMIT: {guard", "      DRAIN_WAIT: {guard"),
        "states.COMMIT.phases.DRAIN_WAIT",
        "give the phase a name of its own",
    ),
    "unknown guard of a phase": (
        changed("      DRAIN_COMMIT: {guard: [i_leave]", "      DRAIN_COMMIT: {guard: [i_leav]"),
        "states.COMMIT.phases.DRAIN_COMMIT.guard.0",
        "'i_leave'",
    ),
    "unknown role of a phase": (
        changed("role: last_commit", "role: applying"),
        "states.COMMIT.phases.DRAIN_COMMIT.role",
        "unknown role 'applying'",
    ),
    "terminal with rows": (
        changed("    role: terminal", "    role: terminal\n    timers: [pause]"),
        "states.EXIT",
        "terminal",
    ),
    "a key twice": (changed("initial: INIT", "initial: INIT\ninitial: NORMAL"), "initial", "twice"),
    "not YAML": ({"parts/txn.yaml": "states: ["}, "not YAML", "parts/txn.yaml"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_spec_is_refused_with_place_and_fix(case: str, tmp_path: Path) -> None:
    files, place, mend = BAD[case]
    error = refusal(tmp_path, files)
    assert error.startswith(tuple(files))
    assert place in error
    assert mend in error
    if case != "not YAML":
        assert re.match(r"[a-z/]+\.yaml:\d+: ", error), error


def test_the_line_in_the_error_is_that_of_the_mistake_in_its_part(tmp_path: Path) -> None:
    error = refusal(tmp_path, changed("[vote_yes]", "[vote_yse]"))
    name, number, _ = error.split(":", 2)
    assert name == "parts/txn.yaml"
    assert "[vote_yes]" in FILES[name].splitlines()[int(number) - 1]


LAID_OVER = """
name: other
include: [hsdp.yaml]
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("include: hsdp.yaml\n", ":1: include: write a list of files"),
        ("include: []\n", ":1: include: write a list of files"),
        ("include: [hdsp.yaml]\n", ":1: .*hdsp.yaml cannot be included: No such file"),
        ("include: [other.yaml]\n", ":1: .*other.yaml includes itself"),
        ("instead: {x: y}\n", ":1: instead: needs an include"),
        (
            LAID_OVER + "instead: {vote: tell}\n",
            ":4: no included row has the effect or target 'vote'",
        ),
        (LAID_OVER + "instead: [vote]\n", ":4: instead: write effect or state: the other one"),
        (LAID_OVER + "states:\n  PREPAERD:\n", ":5: there is no 'PREPAERD' to take away"),
        (
            LAID_OVER + "states:\n  LIMBO: {role: idle}\n",
            ":5: states.LIMBO.role: unknown role 'idle'",
        ),
        ("include: [hsdp.yaml, parts/txn.yaml]\n", "parts/txn.yaml:.* stands in .*txn.yaml:"),
        ("", "the file is empty"),
    ],
)
def test_conflicting_includes_are_refused_with_their_line(
    text: str, expected: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {}).with_name("other.yaml")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=expected):
        load_spec(path)


@pytest.mark.parametrize("circle", [["one"], ["one", "two"], ["one", "two", "three"]])
def test_parts_that_include_each_other_in_a_circle_are_refused(
    circle: list[str], tmp_path: Path
) -> None:
    """The file that is loaded is not in the cycle; only files that it includes are."""
    path = tmp_path / "whole.yaml"
    path.write_text("name: whole\ninclude: [one.yaml]\n", encoding="utf-8")
    for part, following in zip(circle, circle[1:] + circle[:1], strict=True):
        text = f"# {part}\ninclude: [{following}.yaml]\n"
        path.with_name(f"{part}.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{circle[-1]}.yaml:2: .*one.yaml includes itself"):
        load_spec(path)


def test_spec_overrides_the_file_it_includes(tmp_path: Path) -> None:
    path = write(tmp_path, {}).with_name("other.yaml")
    over = """
instead: {start_txn: start_first_txn}
timers: {pause: {default: 7.0}}
states:
  NORMAL: {on: {suspect: }}
"""
    path.write_text(LAID_OVER + over, encoding="utf-8")
    hsdp, other = load_spec("hsdp"), load_spec(path)
    assert other.timeouts == {**hsdp.timeouts, "pause": 7.0}
    assert "suspect" in hsdp.states["NORMAL"].on and "suspect" not in other.states["NORMAL"].on
    assert other.states["COMMIT"].on["applied"][4].effects[-1] == "start_first_txn"
    assert other.states["HEALING"] == hsdp.states["HEALING"]


def test_the_digest_is_that_of_the_whole(tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    for folder, files in ((same, {}), (other, changed("why: the bus is back", "why: it is back"))):
        folder.mkdir()
        write(folder, files)
    whole = parse_spec(whole_text("hsdp"), "whole.yaml")
    digests = [load_spec(folder / "hsdp.yaml").digest() for folder in (same, other)]
    assert digests[0] == load_spec("hsdp").digest() == whole.digest() != digests[1]


def test_a_deferral_without_an_end_is_refused() -> None:
    values = load_spec("hsdp").model_dump()
    for name in ("vote_yes", "say_no"):
        del values["sequences"][name]  # of the rows that go
    for state in values["states"].values():
        if state["role"] != "terminal":
            state["on"].pop("prepared", None)
            state["ignore"].pop("prepared", None)
            state["defer"]["prepared"] = "later"
    problems = check_spec(FsmSpec.model_validate(values))
    assert any("deferred, but no state" in message for _, message in problems)


def test_a_spec_is_found_by_name_and_by_path() -> None:
    assert load_spec("hsdp").digest() == load_spec(ROOT / "fsm_specs" / "hsdp.yaml").digest()
    with pytest.raises(ConfigError, match=r"there are: .*hsdp"):
        find_spec("hdsp")
    with pytest.raises(ConfigError, match="no such spec file"):
        find_spec("elsewhere/hsdp.yaml")


def test_no_code_asks_for_a_state_by_name() -> None:
    """A spec may choose the names of its states, as the code uses roles."""
    specs = [load_machine(name) for name in ("hsdp", "main_thread")]
    states = {name for spec in specs for name in (*spec.states, *spec.names)}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for room in ("fft", "benchmarks")
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in states
    ]
    assert not found


def test_a_negated_guard_and_an_argument_are_one_text() -> None:
    row = Row.model_validate(
        {
            "guard": ["proposed", {"not": "paused"}, {"not": {"armed": "bus_limit"}}],
            "effects": [{"stop": "fenced"}, {"arm": "quorum"}, {"arm": {"ready_window": 1.5}}],
        }
    )
    assert row.guard == ["proposed", "not paused", "not armed bus_limit"]
    assert row.effects == ["stop fenced", "arm quorum", "arm ready_window 1.5"]
    assert Row.model_validate(row.model_dump()) == row


def test_state_is_printed_with_the_rows_of_its_outer_state_and_of_common() -> None:
    spec = load_spec("hsdp")
    text = "\n".join(reactions(spec, "HEALING.forming"))
    assert "timers: ack_window, coordinator_window, quorum\n" in text
    assert "  timer.coordinator_window\n    else\n      [not i_gather] suspect_coordinator" in text
    assert "  death\n    else\n      note_death\n      [about_a_member] blame_death" in text
    assert "ignores prepared: the rollback is under way, or it belongs to the epoch" in text
    leaf = spec.leaves["HEALING.forming"]
    rows = sum(map(len, leaf.on.values())) + len(leaf.exit)
    assert sum(line.startswith("    ") and line[4] != " " for line in text.splitlines()) == rows
    with pytest.raises(FftError, match=r"unknown state 'HEALING'; did you mean"):
        list(reactions(spec, "HEALING"))


def test_the_schema_file_for_editors_is_the_schema_of_the_models() -> None:
    stored = json.loads((ROOT / "fsm_specs" / "schema.json").read_text())
    assert stored == json_schema(), "write it again: fft dev schema > fsm_specs/schema.json"


def test_diagrams_in_the_reference_are_drawn_from_the_tables() -> None:
    page = (ROOT / "docs" / "reference" / "machine.md").read_text()
    for name in ("hsdp", "main_thread"):
        assert to_mermaid(load_machine(name)) in page, f"put in the output of: fft dev graph {name}"


def test_both_diagrams_have_every_state_and_every_edge() -> None:
    spec = load_spec("hsdp")
    mermaid, dot = to_mermaid(spec), to_dot(spec)
    for source, target, _ in edges(spec):
        assert f"{in_mermaid(source)} --> {in_mermaid(target)}" in mermaid
        assert f'"{source}" -> "{target}"' in dot


@pytest.mark.parametrize("name", ["ddp", "pipeline", "local_sgd", "diloco"])
def test_specs_with_the_rows_of_hsdp_share_its_proof(
    name: str,
) -> None:
    """Their machine equals that of hsdp row by row, and so do the timers and policies."""
    own = {"name", "doc", "parameter_groups", "scopes"}
    assert load_spec(name).model_dump(exclude=own) == load_spec("hsdp").model_dump(exclude=own)
    assert load_spec(name).digest() != load_spec("hsdp").digest()


def test_free_stage_shares_the_proof_of_hsdp() -> None:
    """Its rows are those of hsdp, except for rows that open a txn by way of ``held``, and leave
    that state at once if no other scope holds a participant; so `fft dev check` searches only what
    flow adds."""
    ahead, hsdp = (dict(all_rows(load_spec(name))) for name in ("pipeline_ahead", "hsdp"))
    assert set(hsdp) <= set(ahead)
    other = {place for place, row in ahead.items() if hsdp.get(place) != row}
    assert {place for place in other if place in hsdp} == {
        "states.COMMIT.on.applied.4",
        "states.HEALING.states.formed.on.begin.0",
        "states.HEALING.states.formed.exit.1",
    }
    opens = [ahead[place] for place in other if place in hsdp]
    assert {(row.to, row.effects[-1]) for row in opens} == {("NORMAL.held", "open_txn")}
    flow = "scope_record", ".held.", "timer.flow_interval", "timer.flow_limit"
    assert all(any(word in place for word in flow) for place in other - set(hsdp))
    held = load_spec("pipeline_ahead").states["NORMAL"].states["held"]
    assert held.exit[0].guard == ["in_flow"]
    assert {bounds.stage for bounds in sets_for(load_spec("pipeline_ahead"))} == {0, 1}


def test_scopes_and_their_flows_are_drawn() -> None:
    ahead, guide = load_spec("pipeline_ahead"), ROOT / "docs" / "guides" / "paradigms.md"
    assert scopes_to_mermaid(ahead) in guide.read_text(), (
        "put in: fft dev graph pipeline_ahead --scopes"
    )
    assert '"stage0" -> "stage1" [label="at most 2 ahead"];' in scopes_to_dot(ahead)
    assert 'inner -->|"after some commits"| outer' in scopes_to_mermaid(load_spec("diloco"))
