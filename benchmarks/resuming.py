"""The cost of the loss of the bus: ``python -m benchmarks.resuming --write``.

`examples/hsdp_char_lm.py` runs on 2 x 2 ranks with durable checkpoints, under `fft run`, whose bus
is ended and comes back empty. No process can continue, and the job restarts by itself from the
newest checkpoint. The figures come from the traces of both starts: the time between the last commit
before and the first one after, the number of committed steps that are lost, and the time until the
job has passed its previous step. The step is the median before the loss.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from fft.trace.audit import read_lines
from fft.trace.starts import start_folders
from tools.pages import fill, markdown, spread

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
SCRIPT = ROOT / "examples" / "hsdp_char_lm.py"
EVERY = (10, 100)
"""Steps between two checkpoints."""
LOST_AT = 155
STEPS = 220
PLAN = f"faults:\n  - {{name: forget, kind: bus_restart, step: {LOST_AT}}}\n"
LIMIT_S = 180


class Cost(NamedTuple):
    """The costs of one loss, in ms; ``lost`` in steps."""

    gap: float
    lost: float
    back: float
    step: float


def run(every: int, folder: Path) -> Cost:
    """Run one job and return the costs of its loss. Raises CalledProcessError."""
    (folder / "plan.yaml").write_text(PLAN)
    traces = folder / "run"
    command = [sys.executable, "-m", "fft.cli", "run", "--no-progress", "--groups", "2"]
    command += ["--ranks", "2", "--trace-dir", str(traces), "--faults", str(folder / "plan.yaml")]
    command += ["--checkpoint", str(folder / "kept"), "--every", str(every), "--resume"]
    command += ["--memory", "off"]
    command += ["--timeout", str(LIMIT_S), str(SCRIPT), "--steps", str(STEPS)]
    for words in (command, [sys.executable, "-m", "fft.cli", "audit", str(traces)]):
        subprocess.run(words, check=True, capture_output=True, text=True)
    return cost_of(traces)


def cost_of(traces: Path) -> Cost:
    """Return the costs from the traces of both starts. Raises ValueError if there are not two."""
    before, after = (commits(f) for f in start_folders(traces) if any(f.glob("*.jsonl")))
    last, first = max(before), min(after)
    gap, back = after[first] - before[last], after[last + 1] - before[last]
    step = statistics.median(b - a for a, b in itertools.pairwise(sorted(before.values())))
    return Cost(gap * 1e3, last - (first - 1), back * 1e3, step * 1e3)


def commits(folder: Path) -> dict[int, float]:
    """Return when the last rank had committed each step of a start: the wall clock in s."""
    found: dict[int, float] = {}
    for line in read_lines(folder):
        if line.get("note") == "consumed":
            step = line["data"]["step"]
            found[step] = max(found.get(step, 0.0), line["wall"])
    return found


def main() -> None:
    """Measure, print, and with ``--write`` put the table into docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found: dict[int, list[Cost]] = {every: [] for every in EVERY}
    for _, every in itertools.product(range(args.reps), EVERY):
        with tempfile.TemporaryDirectory() as folder:
            found[every].append(run(every, Path(folder)))
            print(every, found[every][-1], flush=True)
    rows = []
    for every, costs in found.items():
        spreads = (spread(list(column)) for column in zip(*costs, strict=True))
        rows.append((f"{every} steps", str(len(costs)), *spreads))
    figures = "commit to commit", "steps lost", "back where it was", "step"
    table = markdown(("checkpoint every", "losses", *figures), rows)
    print("\n".join(table))
    if args.write:
        fill(PAGE, "resuming", table)


if __name__ == "__main__":
    main()
