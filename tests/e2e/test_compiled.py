"""Tests that compiled, recomputed and autocast step functions end with equal bits after rollbacks.

Each group fails once in its first step while the other is in its first compilation; later steps
fail by an exception at each phase.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from stage import aborts, notes

from fft.trace.audit import audit_dir

WORKER = Path(__file__).with_name("compile_worker.py")
LIMIT_S = 280
STEPS = 10
PHASES = ["forward", "backward", "before_allreduce", "during_allreduce", "vote", "after_vote"]


def run_job(directory: Path, torn: bool, *options: str) -> list[dict[str, Any]]:
    """Return the final state of each of the two groups."""
    directory.mkdir()
    plan = directory / "plan.yaml"
    faults = [
        {
            "name": phase, "kind": "exception", "phase": phase, "group": n % 2, "rank": 0,
            "step": 2 + n if torn else 1000,  # the hooks of the injector are installed in any case
        }
        for n, phase in enumerate(PHASES)
    ]  # fmt: skip
    plan.write_text(yaml.safe_dump({"faults": faults}))
    with pytest.MonkeyPatch.context() as patch:
        # a separate cache, as otherwise the next job would find what one compiles
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory / "inductor"))
        script = str(STEPS), str(directory), str(int(torn)), *options
        traces = forked.run_job(WORKER, *script, folder=directory, within=LIMIT_S, plan=plan)
    fired = {note["data"]["name"] for note in notes(traces, "inject")}
    assert fired == (set(PHASES) if torn else set())
    report = audit_dir(traces)
    assert report.ok, report.render()
    assert report.commits == STEPS and report.bytes_healed == 0
    return [json.loads(path.read_text()) for path in sorted(directory.glob("result-*.json"))]


def check(folder: Path, *options: str) -> None:
    """Compare a run with rollbacks to a run without."""
    calm, torn = (run_job(folder / f"torn-{t}", t, *options) for t in (False, True))
    assert len(torn) == 2
    for before, after in zip(calm, torn, strict=True):
        assert before["ended"] == {}
        compiled = any("compile" in option for option in options)
        assert bool(after["compiled"]) == compiled
        # an unwound rank had finished the compilation that it had begun
        assert all(after["unwound_with"]) or not compiled, after["unwound_with"]
        for what in ("digest", "steps", "autocast", "grad", "generator"):
            assert after[what] == before[what], what
        assert after["ended"]["RuntimeError"] == 1
    # an error after the vote may come too late to stop the commit
    assert len(aborts(folder / "torn-True" / "run")) >= 2 + len(PHASES) - 1
    print(
        "\n"
        + "\n".join(
            f"{rank['ended']}, {rank['compiled']} graphs, slowest {rank['slowest']:.1f} s"
            for rank in torn
        )
    )


@pytest.mark.multiprocess
@pytest.mark.long
def test_a_body_that_is_compiled_recomputed_and_autocast(tmp_path: Path) -> None:
    check(tmp_path, "compile=aot_eager", "checkpoint=free", "autocast=1")


@pytest.mark.long
@pytest.mark.multiprocess
def test_faults_at_forward_and_backward_of_a_model_that_is_one_graph(tmp_path: Path) -> None:
    check(tmp_path, "compile=aot_eager", "whole=1")


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    "options",
    [
        ("compile=inductor",),
        ("compile=inductor", "checkpoint=free", "autocast=1"),
        ("checkpoint=reentrant", "autocast=1"),
        ("checkpoint=free", "autocast=1"),
    ],
    ids=lambda options: " ".join(options),
)
def test_bodies_of_other_kinds(tmp_path: Path, options: tuple[str, ...]) -> None:
    check(tmp_path, *options)
