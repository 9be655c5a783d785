"""The commands of `make chaos` and `make chaos-long`: ``python -m tests.acceptance.chaos``.

The exit code is 1 if any job violates a requirement: a finding of the audit that is not by design,
a job that does not recover, or growth in a random run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.acceptance.chaos import matrix, page, soak
from tests.acceptance.chaos.cases import FITTING, LAYOUTS, Case, Layout, suites


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or ``words`` in its place."""
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.chaos", description=__doc__)
    parser.add_argument("what", choices=("matrix", "random", "list"))
    parser.add_argument(
        "--layout", choices=LAYOUTS, action="append", help="if absent, all that fit"
    )
    parser.add_argument(
        "--case", action="append", help="only cases whose name (see list) holds this; several times"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of a random run")
    parser.add_argument("--seed", type=int, default=1, help="of a random run")
    parser.add_argument(
        "--trainer",
        choices=FITTING,
        help="of a random run: a real loop",
    )
    parser.add_argument("--traces", type=Path, help="keep them there; else a folder in /tmp")
    parser.add_argument("--json", type=Path, help="rows and problems of a matrix, to this file")
    parser.add_argument("--write", action="store_true", help="put the results into docs/chaos.md")
    args = parser.parse_args(words)
    fit = FITTING[args.trainer] if args.trainer else tuple(LAYOUTS)
    args.layout = args.layout or list(fit)
    if unfit := [name for name in args.layout if name not in fit]:
        mend = f"--layout {' or '.join(fit)}"
        parser.error(f"--trainer {args.trainer} does not train in {', '.join(unfit)}: give {mend}")
    return args


def run_matrix(layout: Layout, args: argparse.Namespace, traces: Path, console: Console) -> bool:
    """Run the matrix of one layout; return whether there were no problems."""

    def wanted(case: Case) -> bool:
        return args.case is None or any(word in case.name for word in args.case)

    load = os.getloadavg()[0]
    result = matrix.run(
        layout,
        traces,
        wanted,
        lambda text: console.print(text, style="dim", markup=False),
    )
    console.print(page.matrix_table(result))
    for problem in result.problems:
        console.print(problem, style="red", markup=False)
    if args.json:
        rows = [row.plain() for row in result.rows]
        args.json.write_text(json.dumps({"rows": rows, "problems": result.problems}, indent=1))
    if args.write:
        page.write_matrix(result, load)
    return not result.problems


def run_random(layout: Layout, args: argparse.Namespace, traces: Path, console: Console) -> bool:
    """Run random faults in one layout; return whether there were no problems."""
    load = os.getloadavg()[0]
    found = soak.run(
        layout,
        traces,
        args.seconds,
        args.seed,
        lambda text: console.print(text, style="dim", markup=False),
        args.trainer,
    )
    table = Table(*page.SAMPLED, title=f"{layout.title}: what was held")
    for row in page.soak_table(found):
        table.add_row(*row)
    console.print(table)
    for line in page.soak_lines(found):
        console.print(line, markup=False)
    if args.write:
        page.write_soak(found, load)
    return found.ok


def main() -> None:
    """Run the benchmarks and print the results."""
    args, console = arguments(), Console()
    if not console.is_terminal:  # a pipe has no width
        console.width = 150
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit ends the running job, too
    root = args.traces or Path(tempfile.mkdtemp(prefix="fft-chaos-"))
    good = True
    for name in args.layout:
        layout = LAYOUTS[name]
        if args.what == "list":
            for case in (case for suite in suites(layout) for case in suite.cases):
                console.print(f"{name} {case.name}", highlight=False)
            continue
        run = run_matrix if args.what == "matrix" else run_random
        good = run(layout, args, root / f"{args.what}-{name}", console) and good
    if args.what != "list":
        console.print(f"traces: {root}" + (f"; report: {page.PAGE}" if args.write else ""))
    sys.exit(not good)


if __name__ == "__main__":
    main()
