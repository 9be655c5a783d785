"""Tests of the checker: its output, and that its reductions lose no state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fft.cli import app
from fft.protocol.load import load_spec
from fft.prove.bounds import Bounds
from fft.prove.checker import Search, all_rows, search
from fft.prove.model import Model, State, Step
from fft.prove.scenario import check_scenario
from fft.prove.sets_of_bounds import DEEP, DEFAULT, budget, sets_for

HSDP = load_spec("hsdp")
FFT = [sys.executable, "-m", "fft.cli"]
SMALL = Bounds("small", commits=1, faults=1, budget=budget("crash", "torn", "silent"))


def fft(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FFT, *arguments], capture_output=True, text=True, timeout=120, env=os.environ
    )


class Unreduced(Model):
    """A model that explores every order of steps."""

    def steps(self, state: State, faults: bool = True, every: bool = False) -> Iterator[Step]:
        return super().steps(state, faults, every=True)


class Unfolded(Unreduced):
    """A model that keeps states apart that differ only in the names of groups."""

    def canonical(self, state: State) -> State:
        return state


def states(model: Model) -> tuple[set[State], set[State]]:
    """Return (all states, settled states) of a complete search without violations, folded."""
    made = Search(model)
    result = made.run()
    assert result.complete and result.violation is None
    folded = [Model.canonical(model, state) for state in made._order]
    settled = {s for s, is_settled in zip(folded, made._settled, strict=True) if is_settled}
    return set(folded), settled


def test_folding_by_the_names_of_groups_finds_the_same_states() -> None:
    folded, settled = states(Unreduced(HSDP, SMALL))
    other, other_settled = states(Unfolded(HSDP, SMALL))
    assert (len(folded), len(settled)) == (len(other), len(other_settled))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kinds", [("torn",), ("fault",), ("drain",)])
def test_hearing_quietly_first_reaches_the_same_ends(kinds: tuple[str, ...]) -> None:
    bounds = Bounds("small", commits=1, faults=1, budget=budget(*kinds))
    reduced, settled = states(Model(HSDP, bounds))
    whole, whole_settled = states(Unreduced(HSDP, bounds))
    assert len(reduced) < len(whole)
    assert len(settled) == len(whole_settled)


def test_state_counts_within_bounds_are_pinned() -> None:
    """These numbers are pinned: review every change of core, table or model that changes them."""
    counts = {}
    for name in ("twin", "storm"):
        bounds = next(s for s in DEFAULT if s.name == name)
        result = search(HSDP, bounds)[1]
        assert result.violation is None and result.complete
        counts[name] = (result.states, result.steps)
    assert counts == {"twin": (3_746, 7_632), "storm": (4_125, 6_369)}


def test_every_set_of_bounds_has_a_name_of_its_own() -> None:
    names = [bounds.name for bounds in DEEP]
    assert len(set(names)) == len(names)
    assert len({place for place, _ in all_rows(HSDP)}) == sum(1 for _ in all_rows(HSDP))


@pytest.mark.parametrize(
    "spec", ["hsdp", "ddp", "pipeline", "local_sgd", "diloco", "hsdp_diloco", "async"]
)
def test_every_set_of_bounds_has_a_first_state(spec: str) -> None:
    loaded = load_spec(spec)
    for bounds in sets_for(loaded):
        assert Model(loaded, bounds).initial() is not None


@pytest.mark.long
def test_check_prints_bounds_states_and_properties(tmp_path: Path) -> None:
    done = fft("dev", "check", "hsdp", "--bounds", "twin", "--save", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("twin ≤ 1", "agreement", "everyone decides", "verdict: no violation", "rows of"):
        assert word in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize(
    ("spec", "bounds"), [("local_commit", "processes"), ("plain_votes", "messages")]
)
def test_specs_that_do_without_the_register_are_found_splitting(
    tmp_path: Path, spec: str, bounds: str
) -> None:
    done = fft(
        "dev", "check", spec, "--property", "agreement", "--bounds", bounds, "--save", str(tmp_path)
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATED agreement" in done.stdout and "obeyed" in done.stdout
    (saved,) = tmp_path.iterdir()
    check_scenario(saved)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("hsdp", "--bounds", "nope"), "no bounds named 'nope'; there are: 'processes'"),
        (("hsdp", "--property", "nope"), "no property named 'nope'; there are: agreement"),
        (("nope",), "no spec named 'nope'; there are:"),
    ],
)
def test_wrong_argument_is_named_with_the_valid_ones(
    arguments: tuple[str, ...], words: str
) -> None:
    done = CliRunner().invoke(app, ["dev", "check", *arguments])
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.long
def test_search_that_reaches_its_limit_reports_not_complete() -> None:
    done = fft("dev", "check", "hsdp", "--bounds", "storm", "--limit", "500")
    assert done.returncode == 1
    assert "not complete" in done.stdout
    assert "verdict: NOT COMPLETE" in done.stdout
