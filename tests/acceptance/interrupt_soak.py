"""A long test with step functions interrupted at random points: 2 groups x 2 FSDP2 ranks.

``python tests/acceptance/interrupt_soak.py [interruptions]`` (default 10,000, summed over the
ranks) trains twice, without a fault and with three interruptions of every step, in Python and in
gloo. It prints how the step functions ended, the time from an error to the last rank's restored
state and to the next commit, and whether both runs ended with the same bits and a clean audit.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fft.trace.audit import audit_dir
from fft.trace.report import RunReport

WORKER = Path(__file__).resolve().parent.parent / "e2e" / "interrupt_worker.py"
RANKS = 4
VAIN = 3
LONGEST_S = 0.02
PER_STEP = 3
"""Approximate number of interruptions of a step with ``VAIN``."""


def run(directory: Path, steps: int, vain: int) -> list[dict[str, Any]]:
    """Return the final state of each rank."""
    directory.mkdir()
    fft = str(Path(sys.executable).parent / "fft")
    command = [fft, "run", "--groups", "2", "--ranks", "2", "--no-progress"]
    command += ["--trace-dir", str(directory / "t"), str(WORKER)]
    command += [str(steps), str(vain), str(LONGEST_S), str(directory)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(path.read_text()) for path in sorted(directory.glob("result-*.json"))]


def main() -> None:
    """Run, compare, print."""
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    steps = max(4, round(wanted / RANKS / PER_STEP))
    with tempfile.TemporaryDirectory() as temporary:
        calm = run(Path(temporary, "calm"), steps, 0)
        began = time.monotonic()
        torn = run(Path(temporary, "torn"), steps, VAIN)
        took = time.monotonic() - began
        report = audit_dir(Path(temporary, "torn", "t"))
        costs = RunReport(Path(temporary, "torn", "t")).incidents
    ended: Counter[str] = Counter()
    for rank in torn:
        ended.update(rank["ended"])
    back = [cost.rolled_back_ms for cost in costs if cost.rolled_back_ms is not None]
    following = [cost.next_commit_ms for cost in costs if cost.next_commit_ms is not None]
    print(f"{steps} steps, {sum(r['interruptions'] for r in torn)} interruptions, {took:.0f} s")
    print(f"bodies ended by {dict(ended)}")
    for what, ms in (("rolled back", back), ("next commit", following)):
        print(f"{what} after a median of {statistics.median(ms):.0f} ms, at most {max(ms):.0f} ms")
    same = [r["digest"] for r in calm] == [r["digest"] for r in torn]
    print(f"same bits as without: {same}; audit clean: {report.ok}")
    if not (same and report.ok):
        print(report.render())
        raise SystemExit(1)


if __name__ == "__main__":
    main()
