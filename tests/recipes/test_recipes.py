"""Tests that training loops, written as users write them, end with the same bits under any fault.

Two groups train each recipe undisturbed, with an exception and a one-sided failure, and with a
kill. Step, rank and phase are drawn from a seed (RECIPES_SEED, else from the clock), which a
failure prints.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from crew import Case, Crew, Run

from fft.trace.audit import audit_dir, read_lines

SEED = int(os.environ.get("RECIPES_SEED") or time.time())
PHASES = (
    "forward",
    "backward",
    "before_allreduce",
    "during_allreduce",
    "after_allreduce",
    "vote",
    "after_vote",
)

BOTH = "both"
"""The kind of a run with an exception and a one-sided failure."""


@dataclass(frozen=True)
class Recipe:
    """A recipe and how it is run."""

    name: str
    """``module.function``."""
    steps: int = 8
    parts: int = 1
    phases: tuple[str, ...] = PHASES
    """Phases that it reaches on every rank and in every step."""
    long: bool = False
    kill: bool = False
    """Whether a kill is tried by default, and not only in the long tests."""
    falls_by: float = 0.1
    """Minimum by which the mean of the last two losses is lower than that of the first two."""
    ranks: int = 1
    """Number of ranks of each group."""
    replays: bool = True
    """Whether a failed step is repeated; otherwise groups continue with their current state."""
    saves: bool = False
    """Whether it resumes from a checkpoint when it is restarted."""
    meets_between: bool = False
    """Whether ranks of a group communicate between two txns, where a lost connection ends them."""
    is_exact_after_kill: bool = True
    """Whether a heal brings all of the state, and only at the end of a step."""


BY_HAND = ("before_allreduce", "during_allreduce", "vote", "after_vote")
"""Phases of loops without `sync_gradients`."""
UNCAUGHT = ("vote", "after_vote")
"""Phases in which an exception is not one of the loop's code, in loops that catch none."""

RECIPES = [
    Recipe("language.clipping_accumulation_ema", kill=True),
    Recipe("language.accumulation_without_no_sync", long=True),
    Recipe("language.lora", long=True),
    Recipe("language.activation_checkpointing", long=True),
    Recipe("language.activation_checkpointing_reentrant", long=True),
    Recipe("language.eval_inside", long=True),
    Recipe("language.checkpoint_and_resume", saves=True, long=True),
    Recipe("language.mixed_precision", kill=True),
    Recipe("language.bfloat16", long=True),
    Recipe("language.compiled", long=True),
    Recipe("language.compiled_by_inductor", long=True),
    Recipe("language.hugging_face", long=True),
    Recipe("language.hsdp_clipping_accumulation", ranks=2),
    Recipe("language.hsdp_evaluation", ranks=2, meets_between=True, long=True),
    Recipe("pipelines.one_forward_one_backward", ranks=2),
    Recipe("pipelines.interleaved", ranks=2, long=True),
    Recipe("pipelines.zero_bubble", ranks=2, long=True),
    Recipe("scenes.tied_shared_unused"),
    Recipe("scenes.batchnorm_cnn", long=True),
    Recipe("scenes.gan"),
    Recipe("scenes.wgan_clamp", long=True),
    Recipe("scenes.sparse_embedding"),
    Recipe("scenes.compressed"),
    Recipe("scenes.adaptive_clipping", long=True),
    Recipe("torchft_loops.ddp_with_scaler", phases=UNCAUGHT),
    Recipe("torchft_loops.by_hand", phases=("forward", "backward", *BY_HAND)),
    Recipe("torchft_loops.metrics_after_the_step", phases=UNCAUGHT, kill=True),
    Recipe("torchft_loops.local_sgd", phases=UNCAUGHT, replays=False, is_exact_after_kill=False),
    Recipe("torchft_loops.diloco", phases=UNCAUGHT, is_exact_after_kill=False),
]
BY_NAME = {recipe.name: recipe for recipe in RECIPES}


def _marks(recipe: Recipe, long: bool = False) -> Any:
    marks = [pytest.mark.long] if recipe.long or long else []
    return pytest.param(recipe.name, marks=marks, id=recipe.name.split(".")[1])


class Stage:
    """A runner of cases, which runs each recipe without a fault once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._crews: dict[int, Crew] = {}
        self._clean: dict[tuple[str, float], Run] = {}

    def clean(self, recipe: Recipe, dropout: float = 0.1) -> Run:
        """Return the run without a fault."""
        key = recipe.name, dropout
        if key not in self._clean:
            self._clean[key] = self.run(recipe, f"clean-{dropout}", (), dropout)
        return self._clean[key]

    def faulty(self, recipe: Recipe, kind: str, again: int = 0) -> tuple[Run, Run, str]:
        """Return a run with a fault, the run without one, and a text for a failure."""
        faults = _both(recipe) if kind == BOTH else (_drawn(recipe, kind, again),)
        dropout = 0.0 if kind == "kill" else 0.1
        run = self.run(recipe, f"{kind}-{again}", faults, dropout, kind == "kill")
        words = f"RECIPES_SEED={SEED}: {faults}"
        if kind != "kill":
            _assert_injected(run, faults, words)
        return run, self.clean(recipe, dropout), words

    def close(self) -> None:
        """End all processes."""
        for crew in self._crews.values():
            crew.close()

    def _crew(self, ranks: int) -> Crew:
        if ranks not in self._crews:
            folder = self._folder / f"2x{ranks}"
            folder.mkdir()
            self._crews[ranks] = Crew(folder, 2, ranks)
        return self._crews[ranks]

    def run(
        self,
        recipe: Recipe,
        name: str,
        faults: tuple[dict[str, Any], ...] = (),
        dropout: float = 0.1,
        kills: bool = False,
    ) -> Run:
        """Run a recipe once. Raises CaseFailed."""
        name = f"{recipe.name}-{name}"
        case = Case(recipe.name, name, recipe.steps, dropout, recipe.parts, faults, kills)
        try:
            return self._crew(recipe.ranks).run(case)
        except AssertionError as error:
            error.add_note(f"RECIPES_SEED={SEED}")
            raise


def _drawn(recipe: Recipe, kind: str, again: int = 0) -> dict[str, Any]:
    draw = random.Random(f"{SEED}/{recipe.name}/{kind}/{again}")
    fault: dict[str, Any] = {
        "name": "f",
        "kind": kind,
        "step": draw.randrange(kind == "kill", recipe.steps - 1),
        "group": draw.randrange(2),
    }
    if kind == "network_cut":
        fault["phase"] = "during_allreduce"
    elif kind != "one_sided":
        fault["phase"] = draw.choice(recipe.phases)
    if kind != "kill":
        fault["rank"] = draw.randrange(recipe.ranks)
    return fault


def _both(recipe: Recipe) -> tuple[dict[str, Any], ...]:
    """Return an exception and a one-sided failure in different steps."""
    one, other = _drawn(recipe, "exception"), _drawn(recipe, "one_sided")
    if one["step"] == other["step"]:
        other["step"] = (one["step"] + 1) % (recipe.steps - 1)
    return one, {**other, "name": "one-sided"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("recipes"))
    yield made
    made.close()


def _assert_same(run: Run, clean: Run, what: tuple[str, ...], words: str) -> None:
    """Compare bit for bit, by the name of each tensor."""
    for place, expected in clean.results[-1].items():
        found = run.results[-1][place]["bits"]
        for part in what:
            odd = {
                key: (found[part].get(key), value)
                for key, value in expected["bits"][part].items()
                if found[part].get(key) != value
            }
            assert not odd, (
                f"{words}\n{part} of {place}: {len(odd)} differ: {list(odd.items())[:3]}"
            )


def _lines(run: Run) -> list[dict[str, Any]]:
    return [line for part in range(len(run.results)) for line in read_lines(run.traces(part))]


def _assert_audited(run: Run, words: str) -> None:
    for part in range(len(run.results)):
        report = audit_dir(run.traces(part))
        assert report.ok, f"{words}\n{report.render()}"


def _assert_injected(run: Run, faults: Sequence[dict[str, Any]], words: str) -> None:
    came = {line["data"]["name"] for line in _lines(run) if line.get("note") == "inject"}
    assert came == {fault["name"] for fault in faults}, words


def _fetches(run: Run) -> list[tuple[str, int]]:
    return [
        (line["group"], line["event"]["bytes"])
        for line in _lines(run)
        if (line.get("event") or {}).get("type") == "healed" and line["event"]["bytes"] > 0
    ]


def _aborts(run: Run) -> list[str]:
    """Return the causes of rollbacks, without those after a group has left after the last step."""
    seen = {}
    for part in range(len(run.results)):
        for line in read_lines(run.traces(part)):
            if record := (line.get("event") or {}).get("record"):
                seen[part, record["n"]] = record
    last = {part: n for (part, n), record in sorted(seen.items()) if record["kind"] == "commit"}
    return [r["cause"] for (part, n), r in seen.items() if r["kind"] == "abort" and n < last[part]]


def _slices(run: Run, first_part_until: int = 10**9) -> dict[int, list[int]]:
    """Return the slices of the data by committed step of all groups; only some of the first
    part."""
    found: dict[int, list[int]] = {}
    for part in range(len(run.results)):
        for line in read_lines(run.traces(part)):
            if line.get("note") != "consumed":
                continue
            if part or line["data"]["step"] < first_part_until:
                found.setdefault(line["data"]["step"], []).append(line["data"]["slice"])
    return {step: sorted(slices) for step, slices in found.items()}


def _parts(run: Run, *without: str) -> tuple[str, ...]:
    return tuple(part for part in run.results[-1][(0, 0)]["bits"] if part not in without)


def _assert_groups_agree(run: Run) -> None:
    """Compare the shared state bit for bit; buffers and generators belong to a rank."""
    for (_, rank), result in run.results[-1].items():
        for part in _parts(run, "buffers", "rng"):
            assert result["bits"][part] == run.results[-1][0, rank]["bits"][part], part


@pytest.mark.one_in(5)
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [_marks(recipe) for recipe in RECIPES])
def test_recipe_learns_and_groups_agree(stage: Stage, name: str) -> None:
    recipe = BY_NAME[name]
    run = stage.clean(recipe)
    _assert_audited(run, name)
    assert _aborts(run) == []
    _assert_groups_agree(run)
    for result in run.results[-1].values():
        losses = result["losses"]
        assert len(losses) == recipe.steps
        assert sum(losses[:2]) - sum(losses[-2:]) > 2 * recipe.falls_by, losses


@pytest.mark.one_in(8)
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "again"),
    [
        (BOTH, 0),
        pytest.param("exception", 0, marks=pytest.mark.long),
        pytest.param("exception", 1, marks=pytest.mark.long),
        pytest.param("one_sided", 0, marks=pytest.mark.long),
        pytest.param("network_cut", 0, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", [_marks(recipe) for recipe in RECIPES])
def test_a_transient_fault_leaves_no_bit_changed(
    stage: Stage, name: str, kind: str, again: int
) -> None:
    recipe = BY_NAME[name]
    if kind == "network_cut" and recipe.meets_between:
        pytest.skip("what fails between two txns is not repeated")
    run, clean, words = stage.faulty(recipe, kind, again)
    _assert_audited(run, words)
    assert _fetches(run) == [], words
    if not recipe.replays:
        for result in run.results[-1].values():
            assert result["bits"]["parameters"] == result["facts"]["expected"], words
        return
    _assert_same(run, clean, _parts(clean), words)
    for place, expected in clean.results[-1].items():
        for what in ("consumed", "losses", "gradients", "facts"):
            assert run.results[-1][place][what] == expected[what], f"{words}\n{what} of {place}"


@pytest.mark.one_in(3)
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [_marks(recipe, long=not recipe.kill) for recipe in RECIPES])
def test_a_kill_leaves_no_bit_of_the_state_changed(stage: Stage, name: str) -> None:
    """Module buffers and generators belong to a rank, and are excepted: a heal brings a peer's."""
    recipe = BY_NAME[name]
    run, clean, words = stage.faulty(recipe, "kill")
    assert run.killed, words
    _assert_audited(run, words)
    fetched = [group for group, _ in _fetches(run)]
    if not (recipe.saves and fetched == []):  # its own checkpoint may be the newest state
        assert fetched == [str(g) for g, _ in run.killed], words
    if not recipe.is_exact_after_kill:
        _assert_groups_agree(run)
        return
    _assert_same(run, clean, _parts(clean, "buffers", "rng"), words)
    found, expected = (
        Counter((step, each) for step, slices in _slices(one).items() for each in slices)
        for one in (run, clean)
    )
    missing = {each for _, each in expected - found}
    assert not found - expected, words
    # a process that was killed after its vote has traced no commit
    assert len(missing) <= (1 if "after_vote" in words else 0), words


# --- what only one recipe shows -------------------------------------------------------------------


@pytest.mark.multiprocess
def test_recipes_exercise_the_features_in_their_names(stage: Stage) -> None:
    facts = {
        name: [r["facts"] for r in stage.clean(BY_NAME[name]).results[-1].values()]
        for name in (
            "language.clipping_accumulation_ema",
            "scenes.tied_shared_unused",
            "torchft_loops.local_sgd",
            "torchft_loops.ddp_with_scaler",
            "language.mixed_precision",
        )
    }
    assert all(f["clipped"] for f in facts["language.clipping_accumulation_ema"])
    branches = set(zip(*(f["odd"] for f in facts["scenes.tied_shared_unused"]), strict=True))
    assert branches & {(True, False), (False, True)}, "each branch was used everywhere or nowhere"
    assert all(f["skips"] > 1 for f in facts["torchft_loops.ddp_with_scaler"])
    for f in facts["language.mixed_precision"]:
        scales = [2.0**20, *f["scales"]]
        fell = sum(b < a for a, b in pairwise(scales))
        assert fell > 1 and len(scales) == 1 + fell + 8, scales
        assert any(b > a for a, b in pairwise(scales)), scales
    assert all(all(f["synced"]) for f in facts["torchft_loops.local_sgd"])


@pytest.mark.multiprocess
def test_peer_killed_in_metric_averaging_costs_only_its_own_state(
    stage: Stage,
) -> None:
    clean = stage.clean(BY_NAME["torchft_loops.metrics_after_the_step"])
    run = stage.run(Recipe("torchft_loops.killed_in_the_metrics"), "itself", kills=True)
    assert run.killed == [(1, 0)]
    _assert_audited(run, "")
    assert [group for group, _ in _fetches(run)] == ["1"]
    _assert_same(run, clean, _parts(clean, "rng"), "")


@pytest.mark.multiprocess
def test_error_after_the_decision_does_not_affect_the_next_reductions(
    stage: Stage,
) -> None:
    """Otherwise this rank would skip the averaging of its loss, and the next one would meet a wrong
    size."""
    clean = stage.clean(BY_NAME["torchft_loops.metrics_after_the_step"])
    run = stage.run(Recipe("torchft_loops.error_after_the_decision"), "itself")
    assert any("came late" in str(line.get("data")) for line in _lines(run))
    assert _aborts(run) == []
    _assert_same(run, clean, _parts(clean), "")
    _assert_audited(run, "")


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", [None, "exception", pytest.param("kill", marks=pytest.mark.long)])
def test_resumed_job_ends_with_the_same_bits(stage: Stage, kind: str | None) -> None:
    whole = BY_NAME["language.checkpoint_and_resume"]
    dropout = 0.0 if kind == "kill" else 0.1
    clean = stage.clean(whole, dropout)
    faults = () if kind is None else (_drawn(whole, kind),)
    words = f"RECIPES_SEED={SEED}: {faults}"
    run = stage.run(replace(whole, parts=2), f"two-parts-{kind}", faults, dropout, kind == "kill")
    own = ("buffers", "rng") if kind == "kill" else ()
    _assert_same(run, clean, _parts(clean, *own), words)
    _assert_audited(run, words)
    saved = 3
    assert _slices(run, first_part_until=saved) == _slices(clean), words
    if kind == "kill":
        return  # a killed process has reported only its results since the restart
    for place, expected in clean.results[-1].items():
        before, after = (part[place]["consumed"] for part in run.results)
        assert before[:saved] + after == expected["consumed"], words
        samples = [index for step in before[:saved] + after for index in step]
        assert len(set(samples)) == len(samples), "a sample was trained twice"


@pytest.mark.long  # torch alone sometimes hangs at its end, when it destroys its process groups
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name",
    [
        "language.clipping_accumulation_ema",
        "language.accumulation_without_no_sync",
        "scenes.tied_shared_unused",
    ],
)
def test_gradients_and_weights_are_those_of_torchs_ddp(stage: Stage, name: str) -> None:
    clean = stage.clean(BY_NAME[name])
    run = stage.run(Recipe(f"torch_ddp.{name.split('.')[1]}"), "ddp")
    for place, expected in clean.results[-1].items():
        for what in ("consumed", "losses", "gradients"):
            assert run.results[-1][place][what] == expected[what], f"{what} of {place}"
        assert len(expected["gradients"]) == BY_NAME[name].steps
    _assert_same(run, clean, _parts(clean), "torch's DDP")
