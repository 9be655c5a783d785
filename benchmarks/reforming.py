"""The cost of one lost rank: ``python -m benchmarks.reforming --write``.

`examples/hsdp_char_lm.py` runs on 2 x 2 and 3 x 2 ranks, of which one is killed. A spare replaces
it (the others wait for it), or a new process does, or the whole group is restarted. The figures
come from the traces, in ms: between the last commit before the kill and the first one after it, and
from the kill to the first commit to which all groups contribute. The step is the median of the run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from fft.trace.audit import read_lines
from tools.pages import fill, markdown, spread

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
SCRIPT = ROOT / "examples" / "hsdp_char_lm.py"
LAYOUTS = (2, 2), (3, 2)
WAYS = {
    "a spare takes the place": ("--spares", "1"),
    "a new process takes the place": (),
    "the group is started again": ("--no-reform",),
}
PLAN = """
faults:
  - {{name: kill, kind: kill, step: 150, group: 1, rank: 1, phase: backward}}
  - {{name: end, kind: exception, step: 151, group: 0, rank: 0, phase: forward,
     with_groups: {groups}, settled_steps: 10}}
"""
LIMIT_S = 120


class Cost(NamedTuple):
    """The costs of one kill, in ms."""

    gap: float
    whole: float
    step: float


def run(groups: int, ranks: int, options: tuple[str, ...], folder: Path) -> Cost:
    """Run one job and return the costs of its kill. Raises CalledProcessError."""
    (folder / "plan.yaml").write_text(PLAN.format(groups=groups))
    command = [sys.executable, "-m", "fft.cli", "run", "--no-progress", *options]
    command += ["--groups", str(groups), "--ranks", str(ranks), "--trace-dir", str(folder / "run")]
    command += ["--faults", str(folder / "plan.yaml"), "--stop-after-plan", "3"]
    command += ["--timeout", str(LIMIT_S), str(SCRIPT), "--steps", "100000"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    subprocess.run(
        [sys.executable, "-m", "fft.cli", "audit", str(folder / "run")],
        check=True,
        capture_output=True,
    )
    return cost_of(folder / "run", groups)


def cost_of(traces: Path, groups: int) -> Cost:
    """Return the costs of the only kill in the traces."""
    killed, applied = 0.0, list[tuple[float, dict[str, Any]]]()
    whole: dict[int, bool] = {}
    for line in read_lines(traces):
        event = line.get("event") or {}
        if line.get("note") == "inject" and line["data"]["name"] == "kill":
            killed = line["wall"]
        if (record := event.get("record")) and record["kind"] == "epoch":
            full = len(record["members"]) == groups
            whole[record["epoch"]] = full and not record["learners"]
            # a joiner in the first txn of an epoch contributes from the second one on
            whole[-record["epoch"]] = full
        if event.get("type") == "applied":
            applied.append((line["wall"], line))
    applied.sort(key=lambda each: each[0])
    commits: dict[tuple[int, int], float] = {}
    for wall, line in applied:
        token = (line["event"]["token"][0], line["event"]["token"][1])
        commits[token] = wall  # the last rank's time remains
    # a survivor may apply the last commit before the kill after it
    last = max(epoch for (epoch, _), wall in commits.items() if wall < killed)
    before = max(wall for (epoch, _), wall in commits.items() if epoch == last)
    after = min(wall for (epoch, _), wall in commits.items() if epoch > last)
    contributed = min(
        wall
        for (epoch, txn), wall in commits.items()
        if epoch > last and (whole[epoch] if txn == 1 else whole[-epoch])
    )
    walls = sorted(wall for wall in commits.values() if wall < killed)
    step = statistics.median(b - a for a, b in itertools.pairwise(walls))
    return Cost((after - before) * 1e3, (contributed - killed) * 1e3, step * 1e3)


def main() -> None:
    """Measure, print, and with ``--write`` put the table into docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = []
    for groups, ranks in LAYOUTS:
        found: dict[str, list[Cost]] = {way: [] for way in WAYS}
        for _ in range(args.reps):
            for way, options in WAYS.items():
                with tempfile.TemporaryDirectory() as folder:
                    found[way].append(run(groups, ranks, options, Path(folder)))
                    print(groups, ranks, way, found[way][-1], flush=True)
        for way, costs in found.items():
            columns = zip(*costs, strict=True)
            spreads = (spread(list(column)) for column in columns)
            rows.append((f"{groups} x {ranks}", way, str(len(costs)), *spreads))
    figures = "kills", "commit to commit", "all contribute", "step"
    headings = ("groups x ranks", "after the kill", *figures)
    table = markdown(headings, rows)
    print("\n".join(table))
    if args.write:
        fill(PAGE, "reforming", table)


if __name__ == "__main__":
    main()
