"""Tests of meshes of several dimensions inside of a replica group.

Each group trains a tiny transformer, spread by mesh_script.py. Its bits are compared with those of
torch's own mesh, and of runs without a fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_run import fft

from fft.trace.audit import audit_dir
from fft.trace.report import RunReport

SCRIPT = Path(__file__).with_name("mesh_script.py")
PHASES = (
    "forward",
    "backward",
    "before_allreduce",
    "during_allreduce",
    "after_allreduce",
    "vote",
    "after_vote",
)


def run(
    root: Path,
    form: str,
    steps: int,
    groups: int = 1,
    ranks: int = 4,
    faults: Sequence[dict[str, Any]] = (),
    inside: Sequence[dict[str, Any]] = (),
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the final state of each rank of a job.

    Args:
        faults: The fault plan.
        inside: Faults in the middle of a forward, of the script itself.
        options: Options of `fft run`, then ``--`` and arguments of the script.
    """
    (root / "out").mkdir(parents=True)
    (root / "plan.yaml").write_text(yaml.safe_dump({"faults": list(faults)}))
    at = list(options).index("--") if "--" in options else len(options)
    flags = ["--no-lighthouse", "--no-progress", "--groups", str(groups), "--ranks", str(ranks)]
    flags += ["--trace-dir", str(root / "traces"), "--timeout", "200", *options[:at]]
    flags += ["--faults", str(root / "plan.yaml")] if faults else []
    script = str(SCRIPT), form, str(steps), str(root / "out"), *options[at + 1 :]
    env = {"MESH_FAULTS": json.dumps(list(inside))}
    done = fft("run", *flags, *script, folder=root, within=240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    report = audit_dir(root / "traces")
    assert report.ok, report.render()
    found = {p.stem: json.loads(p.read_text()) for p in sorted((root / "out").glob("final-*"))}
    assert len(found) == groups * ranks
    return found


@pytest.mark.multiprocess
def test_faults_on_one_side_leave_the_bits_of_torchs_own_mesh(tmp_path: Path) -> None:
    """An exception before a TP collective, a connection cut in one, and another one in the sum of
    FFT's norm; torch clips the norm."""
    inside = [
        {"step": 1, "rank": 1, "kind": "raise"},
        {"step": 2, "rank": 2, "kind": "cut"},
        {"step": 3, "rank": 3, "kind": "cut at the end"},
    ]
    found = run(tmp_path, "sequence", 5, inside=inside, options=("--", "plain"))
    for rank in found.values():
        assert (rank["bits"], rank["norms"]) == (rank["plain"]["bits"], rank["plain"]["norms"])
        clipped = [min(norm, 0.5) for norm in rank["norms"]]
        assert all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-5), rank["seen"], clipped))
    assert len({rank["bits"] for rank in found.values()}) == 4
    assert [each.attempts_lost for each in RunReport(tmp_path / "traces").incidents][:3] == [1] * 3


@pytest.mark.multiprocess
def test_ranks_along_tp_read_the_same_share_of_the_data(tmp_path: Path) -> None:
    """Each rank passes a loader of its share; a fault repeats a step with the same batches."""
    inside = [{"step": 1, "rank": 3, "kind": "raise"}]
    found = run(tmp_path, "sequence", 3, inside=inside, options=("--", "plain", "shares"))
    assert [rank["bits"] for rank in found.values()] == [
        rank["plain"]["bits"] for rank in found.values()
    ]


@pytest.mark.multiprocess
def test_ranks_along_tp_with_unequal_shares_end_before_a_step(tmp_path: Path) -> None:
    command = ["run", "--no-lighthouse", "--no-progress", "--groups", "1", "--ranks", "4"]
    command += ["--trace-dir", str(tmp_path / "traces"), str(SCRIPT), "sequence", "3"]
    done = fft(*command, str(tmp_path), "shares", "unequal", folder=tmp_path, within=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "UnequalData: step 0 was not committed" in done.stderr


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("form", ["tensor", "context", "experts"])
def test_other_forms_have_the_bits_of_torchs_own_mesh(tmp_path: Path, form: str) -> None:
    inside = [{"step": 1, "rank": 0, "kind": "cut"}, {"step": 2, "rank": 3, "kind": "raise"}]
    plan = [{"name": phase, "kind": "exception", "phase": phase} for phase in PHASES]
    faults = [{**each, "step": 3 + n, "group": 0, "rank": n % 4} for n, each in enumerate(plan)]
    found = run(tmp_path, form, 11, faults=faults, inside=inside, options=("--", "plain"))
    for rank in found.values():
        assert rank["bits"] == rank["plain"]["bits"]
    lost = [each for each in RunReport(tmp_path / "traces").incidents if each.attempts_lost]
    assert len(lost) >= len(inside) + len(PHASES) - 1, "an abort after the vote may lose none"


@pytest.mark.long
@pytest.mark.multiprocess
def test_norm_counts_parameters_outside_of_the_tensor_parallel_plan_once(tmp_path: Path) -> None:
    """In both forms the model is the same; in one all parameters are on both dimensions."""
    mixed, both = (run(tmp_path / form, form, 1) for form in ("tensor", "sequence"))
    (norm,) = both["final-0-0"]["norms"]
    (seen,) = mixed["final-0-0"]["seen"]
    assert math.isclose(seen, norm, rel_tol=1e-5)


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("form", ["tensor", "experts"])
def test_two_groups_of_four_keep_their_bits_through_faults_and_a_kill(
    tmp_path: Path, form: str
) -> None:
    quiet = run(tmp_path / "quiet", form, 12, groups=2)
    plan = [{"name": phase, "kind": "exception", "phase": phase} for phase in PHASES]
    plan.append({"name": "one-sided", "kind": "one_sided"})
    plan.append({"name": "kill", "kind": "kill", "phase": "backward"})
    faults = [{**each, "step": 2 + n, "group": n % 2, "rank": n % 4} for n, each in enumerate(plan)]
    inside = [{"step": 1, "rank": 2, "kind": "raise"}]
    found = run(
        tmp_path / "faulty",
        form,
        12,
        groups=2,
        faults=faults,
        inside=inside,
        options=("--max-restarts", "3"),
    )
    assert {k: v["bits"] for k, v in found.items()} == {k: v["bits"] for k, v in quiet.items()}
    names = " ".join(each.fault for each in RunReport(tmp_path / "faulty" / "traces").incidents)
    assert not [each["name"] for each in plan if each["name"] not in names], names


@pytest.mark.long
@pytest.mark.multiprocess
def test_resumed_mesh_has_the_bits_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """It is resumed as it was, and after an export to torch's format and back."""
    whole = run(tmp_path / "whole", "tensor", 6)
    store, back = tmp_path / "checkpoints", tmp_path / "back"
    kept = ["--checkpoint", str(store)]
    run(tmp_path / "first", "tensor", 3, options=kept)
    for arguments in (
        ("export", str(store), "3", str(tmp_path / "dcp")),
        ("import", str(back), str(tmp_path / "dcp")),
    ):
        done = fft("checkpoint", *arguments, folder=tmp_path, within=60)
        assert done.returncode == 0, done.stdout + done.stderr
    for place in (store, back):
        options = ["--checkpoint", str(place), "--resume"]
        found = run(tmp_path / f"resumed-{place.name}", "tensor", 6, options=options)
        assert {k: v["bits"] for k, v in found.items()} == {
            k: v["bits"] for k, v in whole.items()
        }, place


@pytest.mark.long
@pytest.mark.multiprocess
def test_lost_rank_of_a_mesh_is_replaced_alone(tmp_path: Path) -> None:
    quiet = run(tmp_path / "quiet", "tensor", 8, groups=2)
    faults = [
        {"name": "kill", "kind": "kill", "phase": "backward", "step": 3, "group": 1, "rank": 2}
    ]
    found = run(tmp_path / "faulty", "tensor", 8, groups=2, faults=faults)
    assert {k: v["bits"] for k, v in found.items()} == {k: v["bits"] for k, v in quiet.items()}
