"""Tests of groups that train locally: bits as by torch alone under faults, and data used once, by
leases."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone import EVERY
from corpus import GPT, Text, Vectors, perceptron
from crew import Run
from recipe_job import bits
from test_recipes import (
    BOTH,
    PHASES,
    Recipe,
    Stage,
    _aborts,
    _assert_audited,
    _assert_same,
    _fetches,
    _lines,
    _parts,
)
from torch import nn

import fft
from fft.trace.audit import audit_dir

RECIPES = {
    name: Recipe(f"alone.{name}", phases=PHASES) for name in ("local_sgd", "diloco", "streaming")
}
RECIPES["hsdp_diloco"] = Recipe("alone.hsdp_diloco", phases=PHASES, ranks=2)
NAMES = [pytest.param(n, marks=[pytest.mark.long] if n == "hsdp_diloco" else []) for n in RECIPES]
INNER = ("forward", "backward")
"""Phases of an inner step."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("alone"))
    yield made
    made.close()


def _assert_shared(run: Run, words: str) -> None:
    """Check that equal ranks of the groups agree, apart from the number of their own steps."""
    first: dict[int, dict[str, str]] = {}
    for (_, rank), result in run.results[-1].items():
        shared = result["bits"]["shared"].items()
        of_rank = {k: v for k, v in shared if not k.startswith("progress")}
        assert first.setdefault(rank, of_rank) == of_rank, words


def _notes(run: Run, name: str) -> list[dict[str, Any]]:
    return [line for line in _lines(run) if line.get("note") == name]


def _assert_samples_once(run: Run) -> None:
    """Check that each granted slice was consumed in one txn, step by step, or is held at the
    end."""
    records = {
        record["n"]: record
        for line in _lines(run)
        if (record := (line.get("event") or {}).get("record"))
    }
    last, consumed = records[max(records)], []
    for number in sorted(records)[1:]:
        if records[number]["kind"] == "commit":
            consumed += [lease[0] for lease in records[number - 1]["leases"]]
    held = [lease[0] for lease in last["leases"]] + last["returned"]
    assert sorted(consumed + held) == list(range(last["cursor"]))
    taken: dict[int, list[int]] = {rank: [] for _, rank in run.results[-1]}
    for line in _notes(run, "consumed"):
        if (number := line["data"]["slice"]) is not None:
            taken[line["rank"]].append(number)
    for numbers in taken.values():
        # a rank that is killed after its vote does not live to trace the COMMIT
        lacking = set(consumed) - set(numbers)
        assert len(numbers) + len(lacking) == len(consumed)
        assert len(lacking) <= len(run.restarts)


# --- without a fault ------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", NAMES)
def test_recipe_learns_and_groups_agree_on_shared_state(stage: Stage, name: str) -> None:
    recipe = RECIPES[name]
    run = stage.clean(recipe)
    _assert_audited(run, name)
    assert _aborts(run) == []
    _assert_shared(run, name)
    for result in run.results[-1].values():
        losses = result["losses"]
        assert len(losses) == recipe.steps * EVERY
        assert sum(losses[:2]) - sum(losses[-2:]) > 0.1, losses
    _assert_samples_once(run)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread as the recipes do, since the number of threads may change bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _alone(model: nn.Module, index: int, loader: fft.CursorLoader, number: int) -> torch.Tensor:
    """Run an inner step by torch: forward and backward."""
    x, y, which = loader[number]
    if isinstance(model, GPT):
        loss = model(x, y)
    else:
        used = 4 + int(which[0]) % 5
        loss = F.mse_loss(model(x[:used]), y[:used])
    loss.backward()
    return loss


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_the_bits_are_those_of_the_algorithm_in_torch_alone(
    stage: Stage, name: str, one_thread: None
) -> None:
    recipe = RECIPES[name]
    run = stage.clean(recipe, dropout=0.0)
    torch.manual_seed(3)
    models = [perceptron() if name == "local_sgd" else GPT()]
    torch.manual_seed(3)
    models.append(perceptron() if name == "local_sgd" else GPT())
    torch.manual_seed(3)
    job = perceptron() if name == "local_sgd" else GPT()
    if name == "local_sgd":
        inner: list[Any] = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
        loader = fft.CursorLoader(Vectors(), batch_size=8, seed=30)
        schedules = []
    else:
        inner = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR
        schedules = [cosine(o, recipe.steps * EVERY) for o in inner]
        outer = torch.optim.SGD(job.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        loader = fft.CursorLoader(Text(), batch_size=4, seed=31)
    for sync in range(recipe.steps):
        weights = [0, 0]
        for i, model in enumerate(models):
            for position in range(EVERY):
                number = (2 * sync + i) * EVERY + position
                _alone(model, i, loader, number)
                weights[i] += 4 + int(loader[number][-1][0]) % 5
                if schedules:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                inner[i].step()
                if schedules:
                    schedules[i].step()
                inner[i].zero_grad()
        with torch.no_grad():
            for ours, *theirs in zip(
                job.parameters(), *(m.parameters() for m in models), strict=True
            ):
                if name == "local_sgd":
                    mean = sum(p * float(w) for p, w in zip(theirs, weights, strict=True)) / 2
                    ours.copy_(mean / (torch.tensor(float(sum(weights))) / 2))
                else:
                    ours.grad = sum(ours - p for p in theirs) / 2
            if name == "diloco":
                outer.step()
            for model in models:
                for mine, theirs in zip(model.parameters(), job.parameters(), strict=True):
                    mine.copy_(theirs)
    expected = bits(dict(job.named_parameters()))
    for result in run.results[-1].values():
        assert result["bits"]["parameters"] == expected


def _halves(model: GPT) -> list[nn.ModuleList]:
    return [
        nn.ModuleList([model.wte, model.wpe, model.h[0]]),
        nn.ModuleList([model.h[1], model.ln_f, model.lm_head]),
    ]


class _AloneInStreams:
    """A group of the recipe by torch: its model, and its contributions to the reduction."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = GPT()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=8)
        self.brought: list[torch.Tensor] = []

    def step(self, batch: Any) -> None:
        """Run an inner step."""
        x, y, _ = batch
        with torch.autocast("cpu", torch.float16):
            loss = self.model(x, y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.inner)
        self.scaler.update()
        self.inner.zero_grad()


@pytest.mark.multiprocess
def test_fragments_reduced_beside_a_step_have_the_bits_of_plain_torch(
    stage: Stage, one_thread: None
) -> None:
    run = stage.clean(RECIPES["streaming"], dropout=0.0)
    groups = [_AloneInStreams(), _AloneInStreams()]
    torch.manual_seed(3)
    job = GPT()
    outer = [torch.optim.SGD(h.parameters(), lr=0.5, momentum=0.5) for h in _halves(job)]
    loader = fft.CursorLoader(Text(), batch_size=4, seed=32)
    for sync in range(RECIPES["streaming"].steps):
        turn, ours = sync % 2, list(_halves(job)[sync % 2].parameters())
        for i, group in enumerate(groups):
            own = list(_halves(group.model)[turn].parameters())
            for position in range(EVERY):
                if position == EVERY - 1:
                    group.brought = [
                        (p - q).detach().clone() for p, q in zip(ours, own, strict=True)
                    ]
                group.step(loader[(2 * sync + i) * EVERY + position])
        for parameter, *parts in zip(ours, *(g.brought for g in groups), strict=True):
            parameter.grad = sum(parts) / 2
        outer[turn].step()
        with torch.no_grad():
            for group in groups:
                own = list(_halves(group.model)[turn].parameters())
                for mine, theirs in zip(own, ours, strict=True):
                    mine.copy_(theirs.clone().lerp_(mine, 0.25))
    for (index, _), result in run.results[-1].items():
        model = groups[index].model
        assert result["bits"]["parameters"] == bits(dict(model.named_parameters()))


# --- with faults ----------------------------------------------------------------------------------


@pytest.mark.one_in(3)
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
@pytest.mark.parametrize("name", NAMES)
def test_a_transient_fault_leaves_no_bit_changed(
    stage: Stage, name: str, kind: str, again: int
) -> None:
    run, clean, words = stage.faulty(RECIPES[name], kind, again)
    _assert_audited(run, words)
    assert _fetches(run) == [], words
    _assert_same(run, clean, _parts(clean), words)
    for place, expected in clean.results[-1].items():
        for what in ("consumed", "losses"):
            assert run.results[-1][place][what] == expected[what], f"{words}\n{what} of {place}"


@pytest.mark.one_in(2)
@pytest.mark.multiprocess
@pytest.mark.parametrize("phase", INNER)
def test_fault_in_an_inner_step_affects_only_its_group(stage: Stage, phase: str) -> None:
    recipe = RECIPES["diloco"]
    fault = {"name": "f", "kind": "exception", "step": 3, "group": 1, "rank": 0, "phase": phase}
    run, clean = stage.run(recipe, f"inner-{phase}", (fault,)), stage.clean(recipe)
    assert len(_notes(run, "inner_abort")) == 1
    assert _aborts(run) == []
    _assert_same(run, clean, _parts(clean), str(fault))


@pytest.mark.one_in(4)
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.long] if n in ("diloco", "hsdp_diloco") else [])
        for n in RECIPES
    ],
)
def test_after_a_kill_groups_agree_and_no_slice_is_lost(stage: Stage, name: str) -> None:
    run, _, words = stage.faulty(RECIPES[name], "kill")
    assert run.killed, words
    _assert_audited(run, words)
    assert [group for group, _ in _fetches(run)] == [str(g) for g, _ in run.killed], words
    _assert_shared(run, words)
    _assert_samples_once(run)


# --- groups of several ranks ----------------------------------------------------------------------

ISLANDS = RECIPES["hsdp_diloco"]


def _of_group(run: Run, name: str, group: int) -> list[dict[str, Any]]:
    return [line for line in _notes(run, name) if line["group"] == str(group)]


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "phase", [INNER[0], *(pytest.param(p, marks=pytest.mark.long) for p in INNER[1:])]
)
def test_failed_inner_step_is_repeated_by_its_group_alone(stage: Stage, phase: str) -> None:
    fault = {"name": "f", "kind": "exception", "step": 3, "group": 1, "rank": 0, "phase": phase}
    run, clean = stage.run(ISLANDS, f"inner-{phase}", (fault,)), stage.clean(ISLANDS)
    _assert_audited(run, phase)
    assert _aborts(run) == []
    steps = [line["data"]["inner_step"] for line in _of_group(run, "inner_abort", 1)]
    assert len(steps) == 2, "of both ranks"
    assert steps[0] == steps[1]
    assert _of_group(run, "inner_abort", 0) == []
    _assert_same(run, clean, _parts(clean), str(fault))
    epochs = {s.directory.name[:2]: s.epochs for s in audit_dir(run.traces()).inner}
    assert epochs == {"g0": 1, "g1": 2}


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "where",
    [
        "held_in_body",
        pytest.param("held_before_vote", marks=pytest.mark.long),
        pytest.param("held_for_mate", marks=pytest.mark.long),
        "decided",
    ],
)
def test_a_rollback_of_the_job_undoes_one_inner_step_at_most(stage: Stage, where: str) -> None:
    """Group 0 fails as it begins to reduce, while group 1 is ``where`` in an inner step."""
    fault = {"name": "f", "kind": "exception", "step": 2, "group": 0, "rank": 0,
             "phase": "before_allreduce"}  # fmt: skip
    recipe = replace(ISLANDS, name=f"alone.{where}")
    run, clean = stage.run(recipe, "cut", (fault,)), stage.clean(ISLANDS)
    _assert_audited(run, where)
    assert len(_aborts(run)) == 1
    _assert_same(run, clean, _parts(clean), where)
    for place, expected in clean.results[-1].items():
        for what in ("consumed", "losses"):
            assert run.results[-1][place][what] == expected[what], f"{what} of {place}"
    done = [(line["data"]["slice"], line["data"]["inner_step"]) for line in
            _of_group(run, "inner_commit", 1)]  # fmt: skip
    assert sorted(done) == sorted(2 * sorted(set(done))), "each once, on both ranks"
    again = sorted((line["rank"], line["data"]["inner_step"]) for line in
                   _of_group(run, "inner_abort", 1))  # fmt: skip
    allowed = {
        "decided": [[], [(0, 2)]],  # the mate may have begun the next one
        "held_for_mate": [[], [(1, 1)]],  # it may vote before it is interrupted
    }
    assert again in allowed.get(where, [[(0, 1), (1, 1)], [(1, 1)]])
    assert _notes(run, "inner_void") == []


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("where", ["torn", "torn_last"])
def test_an_update_that_fails_on_one_rank_has_its_group_begin_anew(
    stage: Stage, where: str
) -> None:
    run = stage.run(replace(ISLANDS, name=f"alone.{where}"), "once")
    _assert_audited(run, where)
    reported = {(line["group"], line["rank"]) for line in _notes(run, "inner_torn")}
    assert reported == {("1", 0), ("1", 1)}
    _assert_shared(run, where)
    _assert_samples_once(run)


@pytest.mark.long
@pytest.mark.multiprocess
def test_inner_steps_commit_while_the_link_to_the_job_is_blocked(stage: Stage) -> None:
    """If they needed the job's bus, the step that releases the link would never begin."""
    run, clean = stage.run(replace(ISLANDS, name="alone.slow_link"), "held"), stage.clean(ISLANDS)
    _assert_audited(run, "held")
    assert _aborts(run) == []
    for rank in range(ISLANDS.ranks):
        assert run.results[-1][1, rank]["facts"] == {"steps_without_bus": EVERY - 1}
    _assert_same(run, clean, _parts(clean), "held")


@pytest.mark.long
@pytest.mark.multiprocess
def test_islands_that_are_far_from_each_other_end_with_the_same_bits(stage: Stage) -> None:
    """Bus, stores, collectives and states use slow links, and two faults occur."""
    recipe = replace(ISLANDS, name="alone.far_islands")
    run, _, words = stage.faulty(recipe, BOTH)
    clean = stage.clean(ISLANDS)
    _assert_audited(run, words)
    assert _fetches(run) == [], words
    _assert_carried(run, {"bus", "store", "gloo"})
    _assert_same(run, clean, _parts(clean), words)
    for place, expected in clean.results[-1].items():
        for what in ("consumed", "losses"):
            assert run.results[-1][place][what] == expected[what], f"{words}\n{what} of {place}"


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("group", [0, 1])
def test_killed_island_returns_over_a_slow_link_with_the_same_bits(
    stage: Stage, group: int
) -> None:
    """The result is that of a fast link and a kill at the same place."""
    fault = {"name": "f", "kind": "kill", "step": 2, "group": group, "rank": 1,
             "phase": "before_allreduce"}  # fmt: skip
    runs = []
    for name in ("alone.far_islands", "alone.hsdp_diloco"):
        run = stage.run(replace(ISLANDS, name=name), f"killed-{group}", (fault,), 0.0, True)
        assert run.killed == [(group, 0), (group, 1)]
        _assert_audited(run, name)
        assert [by for by, _ in _fetches(run)] == 2 * [str(group)]
        _assert_shared(run, name)
        _assert_samples_once(run)
        runs.append(run)
    far, near = runs
    _assert_carried(far, {"bus", "store", "gloo", "state"})
    _assert_same(far, near, _parts(near), f"group {group} is killed")


def _assert_carried(run: Run, kinds: set[str]) -> None:
    """Check that links of exactly these kinds have carried bytes."""
    carried = [result["facts"]["carried"] for result in run.results[-1].values()]
    assert {kind for of_rank in carried for kind, count in of_rank.items() if count} == kinds


@pytest.mark.long
@pytest.mark.multiprocess
def test_audit_of_a_job_reports_a_missing_group_scope_and_judges_each(
    stage: Stage, tmp_path: Path
) -> None:
    shutil.copytree(stage.clean(ISLANDS).traces(), tmp_path / "traces")
    found = audit_dir(tmp_path / "traces")
    assert found.ok
    assert [scope.directory.name[:2] for scope in found.inner] == ["g0", "g1"]
    assert [scope.commits for scope in found.inner] == 2 * [ISLANDS.steps * EVERY]
    odd, lost = (scope.directory for scope in found.inner)
    trace = min(odd.glob("*.jsonl"))
    trace.write_bytes(trace.read_bytes().replace(b'"lineage":"genesis"', b'"lineage":"genesys"', 1))
    shutil.rmtree(lost)
    report = audit_dir(tmp_path / "traces")
    assert not report.inner[0].ok
    assert [f.name for f in report.findings if f.violation] == ["inner_scopes"]
    assert not report.ok
    assert f"inside of group {odd.name}" in report.render()
    assert f"0 commits in inner/{lost.name}" in report.render()


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_audit_misses_one_commit_in_the_scope_of_a_group(stage: Stage, tmp_path: Path) -> None:
    """The ranks' traces state that they have made the step of that commit."""
    shutil.copytree(stage.clean(ISLANDS).traces(), tmp_path / "traces")
    scope = audit_dir(tmp_path / "traces").inner[0]
    traces = {path: path.read_text().splitlines(True) for path in scope.directory.glob("*.jsonl")}
    last = max(n for lines in traces.values() for n in map(_commit_of, lines))
    for path, lines in traces.items():
        path.write_text("".join(itertools.takewhile(lambda line: _commit_of(line) < last, lines)))
    report = audit_dir(tmp_path / "traces")
    expected = (
        f"{scope.commits} inner steps of this rank, and {scope.commits - 1} commits in inner/"
    )
    assert expected in report.render()


def _commit_of(line: str) -> int:
    """Return the number of the commit in a line of a trace, or 0."""
    record = (json.loads(line).get("event") or {}).get("record") or {}
    return record["n"] if record.get("kind") == "commit" else 0
