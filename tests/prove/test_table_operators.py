"""Tests of the mutants that operators make of a table, and of the judges that find them."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase

import pytest

from fft.errors import ConfigError
from fft.protocol.load import load_spec
from fft.prove import judges, survivors
from fft.prove.judges import Fate, judged, keys_of, sound
from fft.prove.operators import Mutation, mutations
from fft.prove.planting import small
from fft.prove.survivors import EQUIVALENT, reason_for

HSDP = load_spec("hsdp")
MUTATIONS = {mutation.name: mutation for mutation in mutations(HSDP)}


def test_operators_change_every_row_guard_and_effect_once() -> None:
    lists = [rows for _, owner in HSDP.row_owners() for rows in owner.on.values()]
    lists += [getattr(owner, "exit", []) for _, owner in HSDP.row_owners()]
    rows = [row for each in lists for row in each]
    items = [part for parts in HSDP.sequences.values() for part in parts]
    parts = [*rows, *(part for part in items if not isinstance(part, str))]
    guards, effects = (sum(len(getattr(p, n)) for p in parts) for n in ("guard", "effects"))

    def made(*endings: str) -> int:
        return sum(name.endswith(endings) for name in MUTATIONS)

    assert len(MUTATIONS) == len(mutations(HSDP))
    assert made(": row dropped") == len(rows)
    assert made(": swapped with the next row") == sum(max(0, len(each) - 1) for each in lists)
    assert made(" taken as true") == made(" negated") == guards
    assert made(" skipped") == effects + len(items)
    timers = sum(len(getattr(owner, "timers", ())) for _, owner in HSDP.row_owners())
    assert sum(": unarmed " in name for name in MUTATIONS) == timers


@pytest.mark.parametrize(
    ("name", "event", "expected"),
    [
        (
            "NORMAL fault 0: note_cause after propose_abort",
            "fault",
            ["propose_abort", "note_cause"],
        ),
        ("NORMAL fault 0: propose_abort skipped", "fault", ["note_cause"]),
    ],
)
def test_effects_are_swapped_and_skipped(name: str, event: str, expected: list[str]) -> None:
    (row,) = MUTATIONS[name].of(HSDP).states["NORMAL"].on[event]
    assert row.effects == expected


def test_guards_are_negated_and_taken_as_true() -> None:
    place = "HEALING.forming exit 4"
    was = HSDP.leaves["HEALING.forming"].exit[-1].guard
    assert was[1:3] == ["not proposed", "not paused"]
    for change, guards in (
        ("not paused negated", [*was[:2], "paused", *was[3:]]),
        ("i_gather negated", ["not i_gather", *was[1:]]),
        ("not paused taken as true", [*was[:2], *was[3:]]),
    ):
        leaf = MUTATIONS[f"{place}: {change}"].of(HSDP).leaves["HEALING.forming"]
        assert leaf.exit[-1].guard == guards


def test_row_without_which_an_event_has_no_answer_is_refused_by_the_checks() -> None:
    with pytest.raises(ConfigError, match=r"event 'leave' has no way out of"):
        MUTATIONS["common leave 0: row dropped"].of(HSDP)
    fate = judged("hsdp", MUTATIONS["common leave 0: row dropped"])
    assert (fate.judge, fate.is_known) == ("spec", True)


def test_the_table_is_not_changed_by_its_mutants() -> None:
    MUTATIONS["NORMAL fault 0: propose_abort skipped"].of(HSDP)
    assert load_spec("hsdp") == HSDP


def unchanged(name: str) -> Mutation:
    """Return a mutation of that name and place which changes nothing."""
    return dataclasses.replace(MUTATIONS[name], edit=lambda rows: None)


FEW = small(no=1)


@pytest.fixture
def few_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge by one search alone."""
    monkeypatch.setattr(judges, "TINY", (FEW,))
    monkeypatch.setattr(judges, "SMALL", frozenset())
    monkeypatch.setattr(judges, "SEEDS", 0)
    monkeypatch.setattr(judges, "scenarios", lambda name: ())


@pytest.mark.usefixtures("few_judges")
def test_search_finds_a_skipped_effect_and_names_its_property() -> None:
    fate = judged("hsdp", MUTATIONS["unwind 0: abort_groups skipped"])
    assert fate.judge == "search" and fate.is_known
    assert fate.detail.startswith("eventually, 2 groups")


@pytest.mark.usefixtures("few_judges")
def test_change_without_an_effect_survives_and_must_be_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same = unchanged("unwind 0: abort_groups skipped")
    assert sound("hsdp", FEW).compared(HSDP, same)[0] > 0
    fate = judged("hsdp", same)
    assert not fate.judge and not fate.is_known and str(fate).startswith("SURVIVES unwind 0")
    monkeypatch.setattr(survivors, "EQUIVALENT", {"unwind 0: abort*": "a reason"})
    assert fate.is_known and str(fate).endswith("a reason")
    found = Fate(same.name, "search", "agreement")
    assert not found.is_known and "LISTED as equivalent: a reason" in str(found)
    assert Fate(same.name, "same", "it changes no answer").is_known


@pytest.mark.usefixtures("few_judges")
def test_another_order_that_changes_no_answer_is_equivalent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = MUTATIONS["common decision 0: count_failure after unwind"]
    assert judged("hsdp", order).judge == ""
    monkeypatch.setattr(judges, "ENOUGH", 1)
    assert judged("hsdp", order).judge == "same"
    unmet = MUTATIONS["common ready 0: note_ready after say_begin"]
    assert judged("hsdp", unmet).judge == ""


def test_a_scenario_finds_a_negated_guard() -> None:
    fate = judged("hsdp", MUTATIONS["common join 0: superseded negated"])
    assert fate.judge == "scenario"


def test_a_change_is_met_where_the_state_has_its_row() -> None:
    assert keys_of(HSDP, MUTATIONS["HEALING decision 0: propose_abort skipped"]) == [
        (f"{phase}.{sub}", "decision")
        for phase in ("HEALING", "ROLLBACK_SYNC")
        for sub in ("forming", "formed")
    ]


def test_every_pattern_of_equivalent_mutants_names_one() -> None:
    for like in EQUIVALENT:
        assert any(fnmatchcase(name, like) for name in MUTATIONS), like
    assert reason_for("nothing like that") == ""
