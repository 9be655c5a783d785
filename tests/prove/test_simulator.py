"""Tests of the simulator: a seed determines a life, fresh seeds break nothing, planted bugs are
found."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest
from rich.console import Console
from specs import table_of, whole_text
from typer.testing import CliRunner

from fft.cli import app
from fft.messages.protocol import BusMessage, Peer
from fft.protocol.load import load_spec, parse_spec
from fft.protocol.participant import Participant
from fft.prove.mutants import MUTANTS
from fft.prove.simulated_mutants import SIMULATED, SimulatedMutant
from fft.prove.simulator.batch import Batch, run_batch, simulate
from fft.prove.simulator.faults import CALM, CHANCES, DEFAULT, RATES, Weather
from fft.prove.simulator.job import Process, Violation, World
from fft.prove.simulator.run import live, never_taken, row_names, row_uses, run_seed
from fft.trace.audit import audit_dir

HSDP = load_spec("hsdp")
TEXT = whole_text("hsdp")
FFT = [sys.executable, "-m", "fft.cli"]
BUGS = {
    "replicas_equal": (
        "{to: ROLLBACK_REQ, effects: [mark_torn, next_txn, propose_abort]}",
        "{to: NORMAL, effects: [note_applied, next_txn, start_txn]}",
    ),
    "drain": (
        "- {effects: [hear_drain]}",
        "- {guard: [adopted], to: EXIT, effects: [note_drain, say_leave, finish]}\n"
        "    - {effects: [hear_drain]}",
    ),
}
"""Mutations of the table by the invariant that they break."""


SLOW = {"old_message_counts"}


def fft(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FFT, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )


def failures(batch: Batch) -> list[str]:
    return [
        f"fft dev simulate --seed {result.seed}: {violation.name}: {violation.text}"
        for result in batch.failures
        for violation in result.violations
    ]


# --- one seed, one life ---------------------------------------------------------------------------


@pytest.mark.long
def test_same_seed_gives_the_same_traces_under_any_hash_seed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from fft.prove.simulator.run import live, run_seed\n"
        "for seed in range(4):\n"
        "    result = run_seed(seed, trace_dir=Path(sys.argv[1]) / str(seed))\n"
        "    print(result.events, result.commits, sorted(result.faults.items()), result.seconds)"
    )
    lives = []
    for hash_seed in ("1", "2"):
        where = tmp_path / hash_seed
        done = subprocess.run(
            [sys.executable, "-c", script, str(where)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert done.returncode == 0, done.stderr
        files = {p.relative_to(where): p.read_bytes() for p in sorted(where.rglob("*.jsonl"))}
        lives.append((done.stdout, files))
    assert len(lives[0][1]) > 4
    assert lives[0] == lives[1]


def test_a_life_is_the_same_with_and_without_traces_and_after_another(tmp_path: Path) -> None:
    alone = run_seed(11, HSDP)
    run_seed(12, HSDP)
    assert run_seed(11, HSDP, trace_dir=tmp_path) == alone


def test_two_seeds_live_two_lives() -> None:
    assert run_seed(1, HSDP).events != run_seed(2, HSDP).events


def test_without_faults_every_attempt_commits() -> None:
    for seed in range(10):
        result = run_seed(seed, HSDP, CALM)
        assert (result.violations, result.aborts, dict(result.faults)) == ((), 0, {})
        assert result.commits >= 3
        assert result.settled_in is not None


def test_live_block_ends_where_one_rank_has_lost_the_bus_of_its_group() -> None:
    assert run_seed(138, HSDP).violations == ()


# --- the modelled world ---------------------------------------------------------------------------


def world(seed: int, weather: Weather = DEFAULT) -> World:
    return World(seed, HSDP, partial(Participant, table_of(HSDP)), weather)


def test_listeners_receive_one_order_and_the_register_is_a_chain() -> None:
    storm = Weather({**DEFAULT.rates, "lag": 2.0, "partition": 1.0}, {})
    heard_in_all = 0
    for seed in range(15):
        job = world(seed, storm)
        sent: list[BusMessage] = []
        received: dict[Peer, list[BusMessage]] = {}
        publish, deliver = job.bus.publish, job.bus._deliver

        def note_said(message: BusMessage, sent=sent, publish=publish) -> None:  # type: ignore[no-untyped-def]
            sent.append(message)
            publish(message)

        def note_heard(
            to: Process, message: BusMessage, received=received, deliver=deliver
        ) -> None:  # type: ignore[no-untyped-def]
            received.setdefault(to.peer, []).append(message)
            deliver(to, message)

        job.bus.publish, job.bus._deliver = note_said, note_heard  # type: ignore[method-assign]
        live([job], job.clock)
        place = {id(message): number for number, message in enumerate(sent)}
        for messages in received.values():
            # Messages to one participant only have no place in the order.
            places = [place[id(m)] for m in messages if id(m) in place]
            assert places == sorted(set(places))
            heard_in_all += len(places)
        numbers = [record.n for record in job.bus.history]
        assert numbers == list(range(1, len(numbers) + 1))
    assert heard_in_all > 500


def test_processes_die_between_two_operations_of_one_event() -> None:
    between = 0
    for seed in range(30):
        job = world(seed, Weather({"kill_rank": 1.0}, {}))
        live([job], job.clock)
        between += sum(p.call is not None for p in job.processes.values() if p.code == -9)
    assert between > 3


# --- batches --------------------------------------------------------------------------------------


SEEDS = [
    *(("hsdp", seed) for seed in (5949, 97, 10051, 2611404658)),
    *(("async", seed) for seed in (21931, 2611231154)),
    *(("pipeline_ahead", seed) for seed in (538, 1124462, 2611240212)),
]


@pytest.mark.parametrize(("spec", "seed"), SEEDS)
def test_fixed_seeds_break_nothing(spec: str, seed: int) -> None:
    assert not run_seed(seed, load_spec(spec)).violations


@pytest.mark.parametrize("seed", [100, 108])
def test_stages_pass_their_entries_in_order(seed: int, tmp_path: Path) -> None:
    result = run_seed(seed, load_spec("pipeline_ahead"), trace_dir=tmp_path)
    assert not result.violations
    report = audit_dir(tmp_path)
    found = [*report.findings, *report.stages[0].findings]
    assert [f.violation for f in found if f.violation] == []
    assert {"entries", "flow_order"} <= {f.name for f in found if f.checks}


def test_a_batch_breaks_nothing() -> None:
    """The seeds are new each time; a failure prints the command that replays it."""
    first = int(time.time()) // 60 * 100
    batch = run_batch(first, 40, HSDP, jobs=2)
    assert failures(batch) == []
    assert (batch.seeds, batch.failed) == (40, 0)
    assert batch.commits > 100


@pytest.mark.parametrize("spec", [pytest.param("async", marks=pytest.mark.long), "diloco"])
def test_a_batch_of_groups_that_step_alone_breaks_nothing(spec: str) -> None:
    """The seeds are new each time."""
    first = int(time.time()) // 60 * 100
    batch = run_batch(first, 8, load_spec(spec), jobs=2)
    assert failures(batch) == []
    assert batch.commits > 20


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, id=m.name, marks=[pytest.mark.long] if m.name in SLOW else [])
        for m in SIMULATED
    ],
)
def test_a_planted_bug_of_groups_that_step_alone_falls_to_its_seed(
    mutant: SimulatedMutant,
) -> None:
    spec = load_spec(mutant.spec)
    found = run_seed(mutant.seed, spec, participant=mutant.participant).violations
    assert [v.name for v in found][:1] == [mutant.expected], found
    assert not sound_violations(mutant.seed, mutant.spec)


@cache
def sound_violations(seed: int, spec: str) -> tuple[Violation, ...]:
    """Return the violations in a life of the shipped protocol; several bugs share seeds."""
    return run_seed(seed, load_spec(spec)).violations


def test_rows_that_no_seed_takes_are_named_with_state_event_and_guards() -> None:
    names = row_names(HSDP)
    assert never_taken(HSDP, set(names.values())) == []
    shared = "any join [from_older_self]"
    assert shared in never_taken(HSDP, set())
    one = next(name for name in names.values() if name.startswith("NORMAL join 2"))
    assert shared not in never_taken(HSDP, {one})
    missed = never_taken(HSDP, set())
    assert "PREPARED ballot [tally_commits]" in missed
    covered = [use.name for use in row_uses(HSDP, set()) if use.elsewhere]
    assert covered and not set(covered) & set(missed), "another test is named for these"


def test_simulate_warns_of_rows_that_its_seeds_never_took(tmp_path: Path) -> None:
    out = io.StringIO()
    assert simulate("diloco", 2, 0, 1, None, tmp_path, Console(file=out, width=200))
    reported = out.getvalue()
    assert "warning: never taken in 2 seeds, and shown by no named test:" in reported
    assert "PREPARED ballot [tally_aborts]" in reported


@pytest.mark.long
def test_every_kind_of_fault_of_the_mix_happens() -> None:
    wanted = {*DEFAULT.rates, *DEFAULT.chances}
    # see test_thread_rows.py; a flipped gradient has the chance of a corrupted state
    assert wanted == {*RATES, *CHANCES} - {"noticed_late", "flipped"}
    batch = Batch()
    for first in range(0, 600, 50):
        batch.merge(run_batch(first, 50, HSDP))
        if not wanted - set(batch.faults):
            return
    pytest.fail(f"never in {batch.seeds} seeds: {sorted(wanted - set(batch.faults))}")


@pytest.mark.long
def test_a_batch_in_processes_adds_up_to_the_same_as_in_one() -> None:
    one, two = run_batch(40, 16, HSDP), run_batch(40, 16, HSDP, jobs=2)
    for batch in (one, two):
        batch.wall = batch.seconds = 0.0  # sums of floats depend on the order of chunks
    assert one == two


@pytest.mark.long
@pytest.mark.parametrize(
    "invariant", [pytest.param("replicas_equal", marks=pytest.mark.long), "drain"]
)
def test_a_planted_bug_is_found_replayed_and_audited(invariant: str, tmp_path: Path) -> None:
    before, after = BUGS[invariant]
    assert before in TEXT
    planted = tmp_path / "planted.yaml"
    planted.write_text(TEXT.replace(before, after), encoding="utf-8")
    spec = parse_spec(planted.read_text(encoding="utf-8"), str(planted))
    batch = run_batch(0, 20, spec)
    found = [r for r in batch.failures if any(v.name == invariant for v in r.violations)]
    assert found, failures(batch)

    traces = tmp_path / "traces"
    out = io.StringIO()
    console = Console(file=out, width=200)
    first = found[0].seed
    assert not simulate(str(planted), 1, first, 1, None, traces, console)
    reported = out.getvalue().splitlines()
    assert any(invariant in line and f"seed {first}" in line for line in reported)
    command = next(line for line in reported if "replay: " in line).split("replay: ")[1]
    words = shlex.split(command)
    assert words[0] == "fft"
    again = fft(*words[1:])
    assert again.returncode == 1, again.stderr
    text = next(v.text for v in found[0].violations if v.name == invariant)
    assert text in again.stdout

    audited = fft("audit", str(traces / f"seed-{first}"))
    assert audited.returncode == 1
    assert text in audited.stdout


def test_live_blocks_of_a_seed_with_kills_are_entered_and_audited(tmp_path: Path) -> None:
    result = run_seed(60, HSDP, trace_dir=tmp_path)
    assert not result.violations and {"kill_group", "kill_rank"} <= result.faults.keys()
    report = audit_dir(tmp_path)
    assert report.ok, report.render()
    lines = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.open()]
    records = [(line.get("event") or {}).get("record") or {} for line in lines]
    found = Counter({r["n"]: r["live"] for r in records if r.get("live")}.values())
    assert found == {"entry": 4, "end": 2}, "two blocks failed"


@pytest.mark.parametrize(
    ("name", "seed", "broken"),
    [
        ("block_as_skip", 0, "samples_once"),
    ],
)
def test_planted_bug_of_live_blocks_breaks_its_seed(name: str, seed: int, broken: str) -> None:
    (mutant,) = (each for each in MUTANTS if each.name == name)
    violations = run_seed(seed, HSDP, participant=mutant.participant).violations
    assert [violation.name for violation in violations] == [broken]


def test_audit_of_a_good_seed_matches_the_simulator_counts(tmp_path: Path) -> None:
    result = run_seed(3, HSDP, CALM, trace_dir=tmp_path)
    report = audit_dir(tmp_path)
    assert result.violations == ()
    assert [f.violation for f in report.findings if f.violation] == []
    # A register value that was never announced (the last epoch of a drain) is in no trace.
    assert report.commits == result.commits


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (["--seeds", "0"], "give the number of seeds to run, 1 or more"),
        (["--jobs", "0"], "give the number of processes, 1 or more"),
        (["--first", "-1"], "a seed is a whole number from 0 on"),
        (["--seed", "1", "--seeds", "5"], "leave out --seeds and --first, or --seed"),
        (
            ["no_such_spec"],
            "no spec named 'no_such_spec'; there are: async, ddp, diloco, hsdp, hsdp_diloco, ",
        ),
    ],
)
def test_bad_arguments_get_one_line_that_names_the_fix(arguments: list[str], mend: str) -> None:
    done = CliRunner().invoke(app, ["dev", "simulate", *arguments])
    assert done.exit_code == 2
    assert mend in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_weather_of_unknown_kinds_or_impossible_chances_is_refused() -> None:
    with pytest.raises(ValueError, match="no fault kind 'hail'; there are: kill_rank"):
        Weather({"hail": 1.0}, {})
    with pytest.raises(ValueError, match=r"exception: 1\.5 is no chance"):
        Weather({}, {"exception": 1.5})
    with pytest.raises(ValueError, match=r"slow: -1\.0 is no rate"):
        Weather({"slow": -1.0}, {})
