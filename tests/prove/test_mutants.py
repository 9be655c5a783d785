"""Tests that planted bugs are caught by the property they break, and that teaching specs split."""

from __future__ import annotations

from pathlib import Path

import pytest

from fft.protocol.invariants import INVARIANTS
from fft.protocol.load import find_spec, load_spec
from fft.prove.bounds import Bounds
from fft.prove.checker import narrate, search
from fft.prove.mutant import Mutant, NotCaught, caught, run_sound
from fft.prove.mutants import MUTANTS
from fft.prove.mutants_page import BEGIN, END, row_of, simulated_table, write_table
from fft.prove.planting import small

ROOT = Path(__file__).resolve().parents[2]
PROOF = ROOT / "docs" / "proof.md"
HSDP = load_spec("hsdp")
OTHER_PROPERTIES = {"protocol", "eventually"}
TEACHING = ("plain_votes", "local_commit")


SLOW = {
    "block_not_recognised",
    "join_taken_for_late",
    "begin_of_any_epoch",
    "first_deferred_only",
    "learner_votes_early",
    "learner_not_counted",
    "joiner_weighted_at_once",
    "lease_lost_while_apart",
    "base_of_who_was_not_there",
    "left_out_though_alive",
    "abort_after_commit",
    "forgets_what_was_allowed",
    "joiner_ends_the_attempt",
    "apply_before_decision",
    "counts_steps",
    "skip_ignored",
    "learner_holds_a_lease",
    "follows_by_steps",
    "commit_not_finished",
    "bound_off_by_one",
    "skip_not_recognised",
    "acknowledges_once",
    "ahead_by_one_more",
    "bus_restart_unnoticed",
    "committed_state_given_up",
    "digests_not_compared",
    "job_forgotten_by_abort",
    "joiner_unlike_after_a_rollback_ends_the_job",
    "joiner_unmarked",
    "lease_lost_with_its_group",
    "leases_exchanged_by_an_epoch",
    "leaver_unmarked",
    "leaves_before_the_stage_before",
    "missed_skip_is_a_step",
    "no_fencing_by_epoch",
    "no_fencing_by_incarnation",
    "no_timers_at_start",
    "not_restored",
    "own_member_list",
    "passes_the_stage_before",
    "presumed_commit",
    "proposal_repeated_at_once",
    "quorum_of_those_ready",
    "skip_counted_as_step",
    "torn_taken_for_good",
}


@pytest.mark.one_in(10)
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, id=m.name, marks=[pytest.mark.long] if m.name in SLOW else [])
        for m in MUTANTS
    ],
)
def test_a_planted_bug_is_caught_where_the_shipped_table_is_clean(mutant: Mutant) -> None:
    made, result = caught(mutant)
    assert result.violation is not None
    reported = list(narrate(made.model, result.violation.path))
    assert len(reported) == len(result.violation.path) > 0
    sound = run_sound(mutant.bounds, mutant.sound)
    assert sound.violation is None, sound.violation
    assert sound.complete


def test_every_invariant_catches_a_mutant() -> None:
    expected = {mutant.expected for mutant in MUTANTS}
    assert expected <= set(INVARIANTS) | OTHER_PROPERTIES
    assert expected == set(INVARIANTS) | OTHER_PROPERTIES
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_bug_that_another_property_catches_is_refused() -> None:
    wrong = Mutant("wrong", "Nothing.", "validity", small())
    with pytest.raises(NotCaught, match="broke nothing"):
        caught(wrong)


# --- teaching specs -------------------------------------------------------------------------------


def few(**budget: int) -> Bounds:
    """Return bounds of two groups and two commits, with these faults."""
    return small(commits=2, **budget)


@pytest.mark.parametrize("name", TEACHING)
def test_teaching_spec_is_found_by_name_and_path_and_marked_as_wrong(name: str) -> None:
    path = find_spec(name)
    assert path.parent.name == "teaching"
    by_name, by_path = load_spec(name), load_spec(path)
    assert by_name == by_path
    assert by_name.name == name
    assert "wrong on purpose" in by_name.doc.lower()


@pytest.mark.parametrize("kind", ["", "no", "fault"])
def test_plain_votes_look_right_until_a_message_is_lost(kind: str) -> None:
    bounds = few(**{kind: 1}) if kind else few()
    result = search(load_spec("plain_votes"), bounds)[1]
    assert result.violation is None and result.complete


def test_plain_votes_split_when_a_decision_is_lost() -> None:
    made, result = search(load_spec("plain_votes"), few(lose=1))
    assert result.violation is not None
    assert result.violation.name == "agreement"
    expected = "\n".join(narrate(made.model, result.violation.path))
    assert "never hears commit 1.1" in expected
    assert "timer vote_window" in expected.splitlines()[-1]
    assert len(expected.splitlines()) == 12


def test_local_commit_looks_right_while_nothing_fails() -> None:
    # The lack of votes breaks these two by itself; everything else holds.
    others = (INVARIANTS.keys() | OTHER_PROPERTIES) - {"validity", "exactly_once"}
    result = search(load_spec("local_commit"), few(), only=others)[1]
    assert result.violation is None and result.complete


def test_local_commit_splits_when_a_collective_fails_on_one_side() -> None:
    made, result = search(load_spec("local_commit"), few(fault=1), only=("agreement",))
    assert result.violation is not None
    reported = list(narrate(made.model, result.violation.path))
    assert "NORMAL → COMMIT" in reported[0]
    assert "raises" in reported[1]
    assert "obeyed abort, another participant obeyed commit" in result.violation.text
    assert len(reported) == 4


# --- the table of the docs ------------------------------------------------------------------------


def test_the_table_in_the_docs_is_up_to_date() -> None:
    table = PROOF.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    for mutant, row in zip(MUTANTS, rows, strict=True):
        assert row.startswith(row_of(mutant)), f"{mutant.name}: write the table anew"


def test_the_table_of_simulated_mutants_in_the_docs_is_up_to_date() -> None:
    begin, end = "<!-- simulated: begin -->", "<!-- simulated: end -->"
    table = PROOF.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    assert table.strip() == simulated_table()


def test_the_table_is_written_between_its_markers(tmp_path: Path) -> None:
    path, found = tmp_path / "proof.md", [(mutant, 1_234, 5) for mutant in MUTANTS[:2]]
    write_table(path, found)
    once = path.read_text()
    write_table(path, found)
    assert path.read_text() == once
    assert [row_of(m) in once for m in MUTANTS[:3]] == [True, True, False]
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table(path, found)
    assert path.read_text().startswith(f"before\n{BEGIN}\n| mutant |")
    assert path.read_text().endswith(f"{END}\nafter\n")
    path.write_text("no markers")
    with pytest.raises(ValueError, match="mutants: begin"):
        write_table(path, found)
