"""A part of `make bench`: ``python -m benchmarks.diloco``.

It trains each system's DiLoCo to its end, under faults and without, prints the costs of the faults,
and with ``--write`` puts table and picture into docs/. It continues in the folder it is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.diloco import figures, plot
from benchmarks.diloco.plan import EVERY, FAULT_EVERY, GROUPS, OUTER, SYSTEMS, Schedule
from benchmarks.side_by_side.events import Event
from benchmarks.side_by_side.machine import described, in_words
from benchmarks.slices import slices
from fft.trace.audit import audit_dir, read_lines
from tools.pages import fill, markdown

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "benchmarks.md"
KEPT = DOCS / "benchmarks" / "diloco.json"
PLOT = DOCS / "benchmarks" / "diloco.svg"
LIMIT_S = 240.0
HEADINGS = (
    "fault", "system", "faults", "inner steps lost", "samples twice", "samples never", "transfers",
    "bytes transferred", "splits", "groups unequal",
)  # fmt: skip


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or ``words`` in its place."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diloco", description=__doc__)
    parser.add_argument("--dir", type=Path, help="of the run; else a folder in /tmp")
    parser.add_argument("--outer", type=int, default=OUTER, help="synchronisations")
    parser.add_argument(
        "--every", type=int, default=FAULT_EVERY, help="of them, from fault to fault"
    )
    parser.add_argument("--write", action="store_true", help="put the results into docs/")
    args = parser.parse_args(words)
    if args.outer <= args.every or args.every < 1:
        parser.error("--outer is to be more than --every, which is 1 at least")
    return args


def measured(job: str, schedule: Schedule, directory: Path) -> dict[str, Any]:
    """Run one job; return its figures for JSON."""
    from benchmarks.diloco.launch import run  # loads torch

    here = described()
    system, began = job.removesuffix("-clean"), time.monotonic()
    events = run(system, schedule, directory, LIMIT_S)  # type: ignore[arg-type]
    traces, audit = directory / "traces", ""
    heals: list[tuple[float, int]] = []
    if system == "fft":
        lines = read_lines(traces)
        events_of = [(line["wall"], e) for line in lines if (e := line.get("event"))]
        healed = [(wall, e["bytes"]) for wall, e in events_of if e["type"] == "healed"]
        heals = [(wall, size) for wall, size in healed if size]  # otherwise it had the state
        report, data = audit_dir(traces), slices(lines)
        verdict = "no violation" if report.ok else "VIOLATION"
        audit = f"{verdict}; slices once / twice / never by the register: {data}"
    return {
        "machine": here,
        "took_s": round(time.monotonic() - began, 1),
        "costs": [cost.plain() for cost in figures.costs(events, heals)],
        "curve": figures.curve(events),
        "faults": _faults(events),
        "audit": audit,
    }


def kept(job: str, schedule: Schedule, root: Path) -> dict[str, Any]:
    """Return the result of a job in ``root`` if it ran to its end there; otherwise run it."""
    file = root / f"{job}-{schedule.outer}-{schedule.every}.json"
    if not file.exists():
        shutil.rmtree(root / job, ignore_errors=True)  # an interrupted run
        file.write_text(json.dumps(measured(job, schedule, root / job)))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _faults(events: Sequence[Event]) -> list[tuple[int, str]]:
    return [(e["step"], e["kind"]) for e in events if e["e"] == "fault"]


def rows(jobs: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: each kind of fault, FFT beside torchft."""
    found = [
        (cost["kind"].replace("_", "-"), SYSTEMS[system], cost)
        for system in SYSTEMS
        for cost in jobs[system]["costs"]
    ]
    order = list(dict.fromkeys(kind for kind, _, _ in found))
    found.sort(key=lambda one: order.index(one[0]))
    names = ("faults", "lost_steps", "twice", "never", "transfers", "transfer_bytes", "splits",
             "unequal")  # fmt: skip
    return [(kind, title, *(f"{cost[name]:,}" for name in names)) for kind, title, cost in found]


def write(result: dict[str, Any]) -> None:
    """Write the results, picture and page."""
    jobs = result["jobs"]
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(json.dumps(result) + "\n")
    curves = {job: [tuple(point) for point in found["curve"]] for job, found in jobs.items()}
    faults = {str(system): [tuple(fault) for fault in jobs[system]["faults"]] for system in SYSTEMS}
    PLOT.write_text(plot.svg(curves, faults, result["outer"]))
    took = sum(found["took_s"] for found in jobs.values())
    ends = ", ".join(
        f"{plot.title(job)} {found['curve'][-1][1]:.2f}" for job, found in jobs.items()
    )
    fill(
        PAGE,
        "diloco",
        [
            *(f"- {SYSTEMS[s]}: measured on {in_words(jobs[s]['machine'])}." for s in SYSTEMS),
            f"- {result['outer']} synchronisations of {GROUPS} groups, each after {EVERY} inner "
            f"steps; a fault every {result['every']}, or when both groups are back; all four jobs "
            f"took {took:.0f} s. Audit of FFT's traces: "
            f"{jobs['fft']['audit']}.",
            f"- Loss at the end: {ends}.",
            "",
            *markdown(HEADINGS, rows(jobs)),
            "",
            f"![Loss under faults, FFT and torchft](benchmarks/{PLOT.name})",
        ],
    )


def main() -> None:
    """Run the jobs, show and write the results."""
    args, console = arguments(), Console()
    if not console.is_terminal:  # a pipe has no width
        console.width = 160
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit ends the running job, too
    os.environ.setdefault("RUST_LOG", "error")
    root = (args.dir or Path(tempfile.mkdtemp(prefix="fft-diloco-"))).resolve()
    root.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, Any] = {}
    result = {"outer": args.outer, "every": args.every, "jobs": jobs}
    for system in SYSTEMS:
        for job, every in ((system, args.every), (f"{system}-clean", args.outer)):
            jobs[job] = kept(job, Schedule(args.outer, every), root)
            console.print(f"{job}: {jobs[job]['took_s']} s {jobs[job]['audit']}", highlight=False)
    table = Table(*HEADINGS, title="what faults cost")
    for row in rows(jobs):
        table.add_row(*row)
    console.print(table)
    console.print(f"logs and traces: {root}")
    if args.write:
        write(result)
        console.print(f"page: {PAGE}")


if __name__ == "__main__":
    main()
