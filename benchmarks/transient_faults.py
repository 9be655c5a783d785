"""The cost of a transient fault beyond one step, in the demo's job under a series of faults.

It runs ``fft run --groups 2 --ranks 2 examples/hsdp_char_lm.py`` with exceptions in the middle of
backward and one-sided failures in turn, each on another rank. It prints, per kind, the median and
range of the time from fault to next commit on the last rank, less the run's own median step, and
its parts. It asserts nothing. Run ``python benchmarks/transient_faults.py [faults]`` with fft
installed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from fft.protocol.roles import Role
from fft.trace.audit import audit_dir, read_lines

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "hsdp_char_lm.py"
SPACING = 6
"""Steps between faults."""


def plan(count: int) -> list[dict[str, Any]]:
    """Return faults that cycle over kinds, groups and ranks."""
    faults = []
    for i in range(count):
        place = {"group": i // 2 % 2, "rank": i // 4 % 2, "step": 10 + SPACING * i}
        if i % 2:
            faults.append({"name": f"one-sided-{i}", "kind": "one_sided", **place})
        else:
            kind = {"kind": "exception", "phase": "backward"}
            faults.append({"name": f"exception-{i}", **kind, **place})
    return faults


def run(directory: Path, count: int) -> None:
    """Run one training job under the plan."""
    (directory / "plan.yaml").write_text(yaml.safe_dump({"faults": plan(count)}))
    steps = 10 + SPACING * count + 5
    command = ["fft", "run", "--groups", "2", "--ranks", "2", "--no-progress"]
    command += ["--faults", str(directory / "plan.yaml"), "--trace-dir", str(directory / "t")]
    here = Path(sys.executable).parent / "fft"
    subprocess.run(
        [str(here), *command[1:], str(EXAMPLE), "--steps", str(steps)],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def median_step(lines: list[dict[str, Any]]) -> float:
    """Return the median ms between commits on one rank, over steps without a fault."""
    first = (lines[0]["group"], lines[0]["rank"])
    mine = [r for r in lines if r.get("on") == "applied" and (r["group"], r["rank"]) == first]
    return statistics.median(
        (b["wall"] - a["wall"]) * 1e3 for a, b in pairwise(mine) if a["epoch"] == b["epoch"]
    )


def entered(line: dict[str, Any], role: Role) -> bool:
    """Whether the line is a transition into a state of the role."""
    was, now = line.get("roles", (None, None))
    return now == role != was


Mark = Callable[[dict[str, Any]], bool]
MARKS: dict[str, Mark] = {
    "all know of the ABORT": lambda r: entered(r, "rolling_back"),
    "all rolled back": lambda r: r.get("on") == "restored",
    "all groups rebuilt": lambda r: r.get("on") == "healed",
    "all begin the replay": lambda r: r.get("roles") == ["healing", "training"],
    "all have voted": lambda r: entered(r, "voting"),
    "all have committed": lambda r: r.get("on") == "applied",
}


def costs(lines: list[dict[str, Any]], ranks: int = 4) -> Iterator[tuple[str, dict[str, float]]]:
    """Return (kind, ms from the fault to each mark on the last rank) for every fault."""
    for i, fault in enumerate(lines):
        if fault.get("note") != "inject":
            continue
        found = {}
        for name, mark in MARKS.items():
            first: dict[tuple[str, int], float] = {}
            for r in lines[i:]:
                if mark(r):
                    first.setdefault((r["group"], r["rank"]), r["wall"])
                if len(first) == ranks:
                    break
            found[name] = (max(first.values()) - fault["wall"]) * 1e3
        yield fault["data"]["kind"], found


def main() -> None:
    """Run the job and print the costs."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as name:
        run(Path(name), count)
        report = audit_dir(Path(name) / "t")
        lines = read_lines(Path(name) / "t")
    step = median_step(lines)
    print(
        f"step: median {step:.1f} ms; {report.commits} commits; {report.bytes_healed} bytes healed"
    )
    print("audit:", "no violation" if report.ok else report.render())
    every = list(costs(lines))
    for kind in ("exception", "one_sided"):
        over = sorted(c["all have committed"] - step for k, c in every if k == kind)
        print(
            f"{kind}: fault to next commit on all, beyond one step: median "
            f"{statistics.median(over):.1f} ms, {over[0]:.1f} to {over[-1]:.1f} ms, n={len(over)}"
        )
    for name in MARKS:
        print(f"  {name:<24} median {statistics.median(c[name] for _, c in every):7.1f} ms")


if __name__ == "__main__":
    main()
