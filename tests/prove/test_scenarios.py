"""Tests of scenario files: each runs as specified, invalid files are refused, and counterexamples.

``pytest tests/prove/test_scenarios.py --rewrite`` rewrites the output of ``tests/scenarios``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from specs import whole_text

from fft.errors import FftError
from fft.protocol.invariants import INVARIANTS
from fft.protocol.load import load_spec, parse_spec
from fft.prove.bounds import KINDS, Bounds, World
from fft.prove.checker import Search, narrate
from fft.prove.model import Model
from fft.prove.mutant import run
from fft.prove.mutants import MUTANTS
from fft.prove.scenario import (
    check_scenario,
    read_scenario,
    rewrite_scenario,
    run_scenario,
    save_counterexample,
)

FOLDER = Path(__file__).parent.parent / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))
TEXT = whole_text("hsdp")
TAKEN_FOR_GOOD = (
    "{to: ROLLBACK_REQ, effects: [mark_torn, next_txn, propose_abort]}",
    "{to: NORMAL, effects: [note_applied, next_txn, start_txn]}",
)
"""A planted bug: a step that failed half way counts as applied."""


def scenario(
    folder: Path, *commands: str, title: str = "t", output: str = "", **header: str
) -> Path:
    lines = [f"title: {title}"] if title else []
    lines += [f"{key}: {value}" for key, value in header.items()]
    path = folder / "made.txt"
    path.write_text("\n".join([*lines, "", *commands, "----", output]), encoding="utf-8")
    return path


# --- the files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_runs_as_written(path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite", default=False):
        rewrite_scenario(path)
    check_scenario(path)


def test_every_row_of_the_fault_table_has_its_scenario() -> None:
    """The table of docs/explanation/faults.md and the scenario files must match."""
    shown = {
        "exception in the step function": "exception_in_the_body",
        "collective fails on one side": "collective_fails_on_one_side",
        "fault after the vote": "fault_after_the_vote",
        "`optimizer.step()` fails after COMMIT": "optimizer_fails_after_commit",
        "rank or group killed": "group_killed_before_its_vote",
        "the whole job is asked to leave after a needed group was killed": (
            "drain_after_a_needed_group_died"
        ),
        "one rank of a group killed": "rank_lost_and_replaced",
        "a second rank lost while a group re-forms": "rank_lost_while_another_is_replaced",
        "the replacement of a lost rank is lost between its first txn and its first commit": (
            "successor_lost_too"
        ),
        "one rank of a group killed, and its script does not allow re-forming": (
            "one_rank_of_a_group_killed"
        ),
        "false suspicion": "false_suspicion_nothing_lost",
        "a joiner hangs in a step of the job": "joiner_hangs_in_its_first_step",
        "the user skips a step (an inf, a loss that is not finite)": "skip_by_one",
        "states of replicas differ": "states_differ_stop",
        "reduced gradients of replicas differ (a flipped bit, or a step function that changes "
        "them by its batch)": "gradient_flipped",
        "a group joins after all have left": "join_after_the_end",
        "a rank leaves while its group asks to join, and its group does not receive the message": (
            "mate_leaves_unheard"
        ),
        "decision message lost": "decision_lost_commit",
        "a participant misses more messages than the bus keeps (1,024), as in a long hang": (
            "overrun_in_doubt"
        ),
        "coordinator killed": "coordinator_killed",
        "coordinator silent": "coordinator_silent",
        "interpreter lock held, process stopped": "hang_that_its_process_cannot_tell",
        "a hang that its rollback does not end": "hang_that_a_rollback_does_not_free",
        "second process with one identity": "second_process_of_one_identity",
        "bus gone": "bus_comes_back_empty",
        "repeated rollbacks without a commit": "repeated_rollbacks_pause",
        "slow group of an asynchronous job": "group_left_behind",
        "group of an asynchronous job killed between two synchronizations": (
            "group_lost_while_apart"
        ),
    }
    beneath_the_core = {
        "the replacement of a lost rank is lost before its first txn": "launch/test_spares.py",
        "a host vanishes": "e2e/test_vanished_host.py",
        "a joiner cannot connect to any rank with the job's state": "e2e/test_networks.py",
        "a peer's gloo or store cannot be reached": "train/test_rollback_groups.py",
        "the replacement of a lost rank hangs before its first txn": "e2e/test_reforming.py",
        "a host is lost, and another one has spares for its group": "e2e/test_vanished_host.py",
        "a host of a group that spans hosts is lost": "e2e/test_spanning.py",
        "two groups on several hosts each lose a host, and no host has spares": (
            "e2e/test_spanning.py"
        ),
        "a partition": "e2e/test_vanished_host.py",
        'no quorum (`membership="lighthouse"`)': "e2e/test_lighthouse.py",
        "a member that the quorum leaves out (the same)": "e2e/test_lighthouse.py",
        "slow rank": "e2e/test_injected.py",
        "any fault, while another group evaluates between two txns": "e2e/test_evaluating.py",
        "a rank lost while its group evaluates": "e2e/test_evaluating.py",
        "connections of a process group cut": "e2e/test_injected.py",
        "NaN in a gradient": "e2e/test_injected.py",
        "a veto of the user refuses a result": "e2e/test_step_results.py",
        "lighthouse restarted": "e2e/test_injected.py",
        "the server of a `tcp://` bus stands still (a paused `fft run`)": "e2e/test_silent_bus.py",
        "a message, vote or state request that is unsigned, changed or replayed": (
            "bus/test_trust.py"
        ),
        "a register value from outside the job": "bus/test_trust.py",
        "the head register goes back to an older record": "bus/test_trust.py",
        "no `optimizer.step()` after a commit, since the loop caught an exception": (
            "e2e/test_updates.py"
        ),
        "`should_commit(timeout=…)` expires after the vote": "e2e/test_call_timeouts.py",
        "main thread hangs": "e2e/test_hangs.py",
        "a NATS server killed": "e2e/test_nats_training.py",
        "mistake in the script": "launch/test_mistakes.py",
        "an accelerator fails for good (an assert in a kernel, an ECC error)": (
            "e2e/test_device_lost.py"
        ),
        "disk full under traces and logs": "e2e/test_durable_short.py",
        "groups that reduce different gradients": "e2e/test_reducer.py",
        "a joiner hangs, compiles or fails in its first step, in FFT's own loop": (
            "e2e/test_rehearsals.py"
        ),
        "notice of preemption with a deadline": "e2e/test_notice.py",
        "the same, on one rank of a group": "e2e/test_notice.py",
        "the same, while the bus is silent": "e2e/test_deadline.py",
        "four rollbacks in a row at one step": "e2e/test_culprit.py",
        "ranks that draw different data": "e2e/test_ranks_data.py",
        "an item of the data cannot be loaded": "train/test_equal_data.py",
    }
    page = FOLDER.parent.parent / "docs" / "explanation" / "faults.md"
    table = page.read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")}
    assert rows - {"fault"} == {*shown, *beneath_the_core}
    assert {f"{name}.txt" for name in shown.values()} <= {path.name for path in FILES}
    assert all((FOLDER.parent / name).is_file() for name in beneath_the_core.values())


def test_every_kind_of_fault_happens_in_some_file() -> None:
    output = {
        "fault": "raises",
        "no": "body ends with NO",
        "misfit": "reduces nothing",
        "skip": "body skips",
        "block": "body is a live block",
        "final": "body is the final live block",
        "corrupt": "state is corrupted",
        "flip": "flips a gradient",
        "bare": "without a digest",
        "torn": "applies half",
        "heal": "fails to heal",
        "crash": "ends (crash)",
        "silent": "ends (silent)",
        "restart": "comes back",
        "twin": "is started twice",
        "drain": "is asked to leave",
        "loss": "ends (loss)",
        "replace": "is replaced",
        "over": "waits no longer for a rank",
        "late": "waits no longer for others",
        "hang": "is said to hang",
        "early": " early",
        "lose": "never hears",
        "twice": "will once more",
        "swap": "before what was said earlier",
        "lapse": "in vain",
        "outage": "bus away",
        "deaf": "is deaf from now on",
        "overrun": "falls behind, and hears again",
        "quit": "is shut down",
        "forget": "bus forgets",
    }
    assert set(output) == set(KINDS)
    written = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    assert not [kind for kind, text in output.items() if text not in written]


# --- the format -----------------------------------------------------------------------------------


def test_wrong_output_is_shown_and_fixed_by_a_rewrite(tmp_path: Path) -> None:
    path = scenario(tmp_path, "# a note", "A/0 raises", output="nothing\n")
    with pytest.raises(FftError, match=r"-nothing\n\+A/0 raises: NORMAL → ROLLBACK_REQ"):
        check_scenario(path)
    assert rewrite_scenario(path)
    check_scenario(path)
    assert not rewrite_scenario(path)
    assert path.read_text(encoding="utf-8").startswith(
        "title: t\n\n# a note\nA/0 raises\n----\nA/0 "
    )


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        (
            ["A/0 raises", "A/0 jumps"],
            r"made.txt:4: 'A/0 jumps' cannot happen here; what can: .*A/0",
        ),
        (["A/0 applies"], r":3: 'A/0 applies' cannot happen.*A/0 body ends, .*bus away"),
        (["jump"], r":3: unknown command 'jump'; the docstring of fft/prove/scenario.py"),
        (["Z/0 raises"], r":3: who is 'Z/0'\? A, A/0, A/0#2 or all"),
        (["C/0 raises"], r":3: there is no live C/0"),
        (["hears all", "A/0 hears"], r":4: 'A/0 hears' cannot happen"),
        (
            ["A/0 raises", "A/0 does all", "B/0 hears commit"],
            r":5: B/0 would hear something else: abo",
        ),
        (
            ["A/0 body ends", "A/0 does", "expect register commit"],
            r":5: .* does not hold:\nA/0 PREP",
        ),
        (
            ["expect A/0 NORMAL step 1"],
            r":3: 'expect A/0 NORMAL step 1' does not hold:\nA/0 NORMAL",
        ),
        (["expect A/0 flies"], r":3: a condition knows no 'flies'"),
        (["expect"], r":3: a condition says what must hold"),
        (["until A/0 step 9"], r":3: 'until A/0 step 9' (is never reached|does not end within)"),
        (["time passes"], r":3: no time passes while something else can happen"),
        (["A is started twice", "A/0 does"], r":4: which A/0\? A/0#1, A/0#2"),
        (["A/0 raises", ""], r":4: commands end with a line `----`"),
    ],
)
def test_ambiguous_scenario_line_is_refused_with_its_place(
    tmp_path: Path, commands: list[str], expected: str
) -> None:
    with pytest.raises(FftError, match=expected):
        run_scenario(scenario(tmp_path, *commands))


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"title": ""}, ":1: no title"),
        ({"colour": "red"}, ":2: not a header line; they are `key: value`: title, spec"),
        ({"groups": "two"}, ":1: groups: 'two' is no number"),
        ({"formed": "maybe"}, ":1: formed: yes or no, not 'maybe'"),
        ({"spec": "nowhere.yaml"}, ":1: .*nowhere.yaml"),
        ({"world": "flat"}, ":1: world: no switch 'flat'; there are write_once"),
        ({"expect": "agreement"}, "should leave agreement, but it leaves ok"),
        ({"expect": "eventually"}, "eventually: from here on everything can still settle"),
    ],
)
def test_bad_headers_are_refused(tmp_path: Path, header: dict[str, str], expected: str) -> None:
    with pytest.raises(FftError, match=expected):
        run_scenario(scenario(tmp_path, "A/0 raises", **header))


def test_a_block_without_its_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.txt"
    path.write_text("title: t\n\nA/0 raises\n", encoding="utf-8")
    with pytest.raises(FftError, match=r"cut.txt:3: the last commands lack their line `----`"):
        read_scenario(path)


# --- counterexamples ------------------------------------------------------------------------------


def found(model: Model, limit: int = 60_000) -> Search:
    search = Search(model, limit)
    search.run()
    assert search.result.violation is not None
    return search


def test_a_counterexample_replays_and_fails_once_the_bug_is_fixed(tmp_path: Path) -> None:
    (tmp_path / "torn.yaml").write_text(TEXT.replace(*TAKEN_FOR_GOOD), encoding="utf-8")
    spec = parse_spec(TEXT.replace(*TAKEN_FOR_GOOD), "torn.yaml")
    search = found(Model(spec, Bounds("one fault", faults=1, budget=(("torn", 1),))))
    violation = search.result.violation
    assert violation is not None
    path = tmp_path / "found.txt"
    save_counterexample(search, violation, path, spec="torn.yaml")
    written = path.read_text(encoding="utf-8")
    assert f"expect: {violation.name}\n" in written
    assert f"BROKEN {violation.name}: " in written
    check_scenario(path)
    assert len(list(narrate(search.model, violation.path))) == len(violation.path)
    path.write_text(written.replace(f"expect: {violation.name}", "expect: ok"), encoding="utf-8")
    with pytest.raises(FftError, match=f"should leave ok, but it leaves {violation.name}: "):
        run_scenario(path)
    path.write_text(written.replace("\nstate\n", "\nsettle\n"), encoding="utf-8")
    with pytest.raises(FftError, match=f"{violation.name} is broken: nothing can come after"):
        run_scenario(path)
    (tmp_path / "torn.yaml").write_text(TEXT, encoding="utf-8")
    path.write_text(written.replace("torn.yaml", "hsdp"), encoding="utf-8")
    with pytest.raises(FftError, match=r"found.txt:\d+: "):
        run_scenario(path)


def test_counterexample_names_its_bus(tmp_path: Path) -> None:
    bounds = Bounds("from the start", faults=0, formed=False)
    search = found(Model(load_spec("hsdp"), bounds, world=World(write_once=False)))
    violation = search.result.violation
    assert violation is not None
    path = tmp_path / "bus.txt"
    save_counterexample(search, violation, path)
    written = path.read_text(encoding="utf-8")
    assert "world: write_once\n" in written
    assert re.search(rf"BROKEN {violation.name}: ", written)
    check_scenario(path)


def test_counterexample_with_twins_distinguishes_them(tmp_path: Path) -> None:
    mutant = next(m for m in MUTANTS if m.name == "no_fencing_by_incarnation")
    made, result = run(mutant)
    assert result.violation is not None
    path = tmp_path / "twins.txt"
    save_counterexample(made, result.violation, path, mutant=mutant.name)
    assert "A/0#1 " in path.read_text(encoding="utf-8")
    check_scenario(path)


def test_a_livelock_is_a_counterexample_too(tmp_path: Path) -> None:
    """No participant asks the register, so one that misses the decision stays in doubt."""
    before, prepared, after = TEXT.partition("  PREPARED:\n")
    asks = "timer.vote_window:\n      - {effects: [propose_abort, rearm]}"
    assert asks in after.partition("  COMMIT:\n")[0]
    deaf = before + prepared + after.replace("[propose_abort, rearm]", "[rearm]", 1)
    (tmp_path / "deaf.yaml").write_text(deaf, encoding="utf-8")
    bounds = Bounds("one loss", commits=1, faults=1, budget=(("lose", 1),))
    search = found(Model(parse_spec(deaf, "deaf.yaml"), bounds))
    violation = search.result.violation
    assert violation is not None and violation.name == "eventually"
    path = tmp_path / "stuck.txt"
    save_counterexample(search, violation, path, spec="deaf.yaml")
    check_scenario(path)
    (tmp_path / "mended").mkdir()
    mended = tmp_path / "mended" / "stuck.txt"
    (tmp_path / "mended" / "deaf.yaml").write_text(TEXT, encoding="utf-8")
    mended.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(FftError, match="eventually: from here on everything can still settle"):
        run_scenario(mended)


def test_a_counterexample_names_its_mutant(tmp_path: Path) -> None:
    """A bug in the core is not a file; the scenario names it among the planted ones."""
    mutant = next(
        m
        for m in MUTANTS
        if m.place == "core" and m.expected in INVARIANTS and m.bounds.groups == 2
    )
    search = found(Model(mutant.spec, mutant.bounds, mutant.participant, mutant.world))
    violation = search.result.violation
    assert violation is not None
    path = tmp_path / "mutant.txt"
    save_counterexample(search, violation, path, mutant=mutant.name)
    check_scenario(path)
    with pytest.raises(FftError):
        save_counterexample(search, violation, path)
    path.write_text("title: t\nmutant: nobody\n\nsettle\n----\n", encoding="utf-8")
    with pytest.raises(FftError, match=f":1: no mutant 'nobody'; there are .*{mutant.name}"):
        run_scenario(path)
