"""Tests that inductor's results outlive a lost rank, in the survivors and for the replacement.

Every process counts its compilations, and its cache hits (compiled_script.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_run import fft

from fft.trace.audit import audit_dir

SCRIPT = Path(__file__).with_name("compiled_script.py")
LIMIT_S = 280
LOST_AT = 6
PLAN = f"""
faults:
  - {{name: one, kind: kill, step: {LOST_AT}, group: 1, rank: 1, phase: backward}}
  - {{name: all, kind: kill, step: 12, group: 0, phase: backward, with_groups: 2, settled_steps: 3}}
"""
Counts = dict[str, list[list[dict[str, Any]]]]
"""The counts after each commit, by group and rank, of each process in the order of first
commits."""


def job(root: Path, *options: str, plan: str = PLAN) -> tuple[Counts, str]:
    """Return the counts of each process, and the output of `fft run`."""
    root.mkdir(exist_ok=True)
    (root / "plan.yaml").write_text(plan)
    out = root / "counts"
    out.mkdir()
    arguments = ["--groups", "2", "--ranks", "2", "--trace-dir", str(root / "run"), *options]
    arguments += ["--faults", str(root / "plan.yaml"), "--stop-after-plan", "4"]
    arguments += ["--timeout", str(LIMIT_S - 20), str(SCRIPT), str(out)]
    env = {"TORCHINDUCTOR_CACHE_DIR": None}
    done = fft("run", *arguments, folder=root, within=LIMIT_S, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    report = audit_dir(root / "run")
    assert report.ok, report.render()
    found: Counts = {}
    for path in out.iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found.setdefault(path.name.partition("-")[0], []).append(lines)
    for counts in found.values():
        counts.sort(key=lambda lines: int(lines[0]["step"]))
    return found, done.stderr


def folders(counts: Counts) -> set[str]:
    return {line["cache"] for starts in counts.values() for lines in starts for line in lines}


def assert_found(lines: Sequence[dict[str, Any]]) -> None:
    """Check that the process compiled nothing, because another had done so before."""
    assert lines[-1]["graphs"] >= 1 and lines[-1]["hits"] >= 1, lines[-1]
    assert lines[-1]["misses"] == 0, lines[-1]


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(2 * LIMIT_S)
def test_survivor_does_not_recompile_and_joiner_finds_the_cache(
    tmp_path: Path,
) -> None:
    counts, output = job(tmp_path, "--spares", "1", "--reform-window", "60")
    assert "group 1 lost rank 1" in output and "its other ranks run on: 0" in output
    assert {place: len(starts) for place, starts in counts.items()} == {
        "g0r0": 2, "g0r1": 2, "g1r0": 1, "g1r1": 2,
    }  # fmt: skip
    (survivor,) = counts["g1r0"]
    before = [line for line in survivor if line["step"] <= LOST_AT - 1][-1]
    assert before["graphs"] >= 1
    assert survivor[-1]["step"] > 12
    for what in ("graphs", "hits", "misses"):
        assert survivor[-1][what] == before[what], "compiled again, after a mate was lost"
    firsts = [starts[0][-1] for starts in counts.values()]
    assert sum(line["misses"] for line in firsts) >= 1, "somebody has compiled it: a fresh folder"
    for place in ("g1r1", "g0r0", "g0r1"):  # a spare, and a group that was restarted
        assert_found(counts[place][1])
    (folder,) = folders(counts)
    assert not Path(folder).exists(), "it goes with the job"
    print("\n", {place: [lines[-1] for lines in starts] for place, starts in counts.items()})


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(2 * LIMIT_S)
def test_compile_cache_beside_the_checkpoints_is_found_on_resuming(tmp_path: Path) -> None:
    plan = "faults:\n  - {name: end, kind: exception, step: 3, group: 0, rank: 0, phase: forward}\n"
    options = ["--checkpoint", str(tmp_path / "kept"), "--every", "2", "--resume"]
    first, _ = job(tmp_path / "first", *options, plan=plan)
    later = plan.replace("step: 3", "step: 12")
    second, output = job(tmp_path / "second", *options, plan=later)
    assert "resuming from step" in output
    (folder,) = folders(first) | folders(second)
    assert Path(folder).parent == tmp_path / "kept" / ".compiled"
    for (lines,) in second.values():
        assert_found(lines)
