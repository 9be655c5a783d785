"""Every example that trains, under its fault plan, and one table of the results.

Run ``python -m benchmarks.examples [--dir DIR] [NAME …]`` (``make examples``). It exits with 1 if a
run failed, if a planned fault did not fire, or if an audit had a finding.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.slices import slices
from fft.trace.audit import audit_dir, read_lines
from fft.trace.format import scope_folders
from fft.trace.report import RunReport

ROOT = Path(__file__).parents[1]
LIMIT_S = 200


@dataclass(frozen=True)
class Example:
    """A script, its layout and its faults; ``spec`` names a paradigm, or another trainer."""

    spec: str
    ranks: int
    script: str
    plan: str
    groups: int = 2
    arguments: tuple[str, ...] = ()
    """Further arguments of the script; ``{folder}`` is that of the run."""
    needs: str | None = None
    """Package without which the example is left out, because `make setup` does not install it."""


EXAMPLES = (
    Example("hsdp", 2, "hsdp_char_lm.py", "hsdp_demo_faults.yaml"),
    Example("ddp", 1, "ddp_char_lm.py", "ddp_faults.yaml"),
    Example("pipeline", 2, "pipeline_char_lm.py", "pipeline_faults.yaml"),
    Example("pipeline_ahead", 2, "pipeline_ahead_char_lm.py", "pipeline_ahead_faults.yaml"),
    Example("local_sgd", 1, "local_sgd_char_lm.py", "local_sgd_faults.yaml"),
    Example("diloco", 1, "diloco_char_lm.py", "diloco_faults.yaml"),
    Example("hsdp_diloco", 2, "hsdp_diloco_char_lm.py", "hsdp_diloco_faults.yaml"),
    Example("async", 1, "async_char_lm.py", "async_faults.yaml", groups=3),
    Example("lightning", 1, "lightning_trainer.py", "lightning_faults.yaml"),
    Example(
        "huggingface",
        1,
        "hf_trainer.py",
        "hf_faults.yaml",
        arguments=("--output", "{folder}/model", "--steps", "100000"),
    ),
    Example(
        "torchtitan",
        2,
        "torchtitan_debug.py",
        "torchtitan_faults.yaml",
        arguments=("--dump-folder", "{folder}/files", "--training.steps", "100000"),
        needs="torchtitan",
    ),
)
COLUMNS = (
    "committed steps",
    "faults",
    "rollbacks",
    "slices once / twice / never",
    "bytes healed",
    "ms to the next commit (median, max)",
    "audit",
)


def run(example: Example, folder: Path) -> bool:
    """Train it to the end of its plan and return whether it ended well.

    Its output goes to ``job.log``.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "fft.cli", "run", "--groups", f"{example.groups}"]
    command += ["--ranks", str(example.ranks)]
    command += ["--faults", f"examples/{example.plan}", "--trace-dir", f"{folder}/traces"]
    command += ["--stop-after-plan", "10", "--min-steps", "60", "--timeout", f"{LIMIT_S}"]
    command += ["--no-progress", f"examples/{example.script}"]
    command += [each.format(folder=folder) for each in example.arguments]
    with (folder / "job.log").open("w") as log:
        done = subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S + 60
        )
    return done.returncode == 0


def row(example: Example, traces: Path) -> tuple[list[str], bool]:
    """Return the columns of one run, and whether all requirements are met."""
    report, run = audit_dir(traces), RunReport(traces)
    found = run.incidents
    asked, missing = run.requested_faults()
    all_fired = bool(asked) and not missing
    scopes = {folder: slices(read_lines(folder)) for folder in scope_folders(traces)}
    delays = sorted(i.next_commit_ms for i in found if i.next_commit_ms is not None)
    middle = f"{delays[len(delays) // 2]:.0f}, {delays[-1]:.0f}" if delays else "-"
    good = report.ok and all_fired and all(data.exact for data in scopes.values())
    inner = len(read_lines(traces, lambda line: line.get("note") == "inner_commit"))
    committed = [f"{report.commits} (job), {inner} (groups)" if inner else f"{report.commits}"]
    committed += [f"{scope.commits} ({scope.directory.name})" for scope in report.stages]
    cells = [
        ", ".join(committed),
        f"{len(found)}" + ("" if all_fired else " (not all fired)"),
        f"{sum(i.attempts_lost for i in found)}",
        "; ".join(map(str, scopes.values())),
        f"{report.bytes_healed}",
        middle,
        "ok" if report.ok else "VIOLATION",
    ]
    return cells, good


def main() -> int:
    """Run the examples, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="specs or trainers; all if absent")
    parser.add_argument("--dir", type=Path, required=True, help="for traces and logs; must be new")
    args = parser.parse_args()
    known = {example.spec: example for example in EXAMPLES}
    if unknown := set(args.names) - known.keys():
        parser.error(f"no example of {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    folder = args.dir.resolve()
    table = Table("paradigm", *COLUMNS, title="examples under their fault plans")
    failed = False
    for example in EXAMPLES:
        if args.names and example.spec not in args.names:
            continue
        if example.needs is not None and importlib.util.find_spec(example.needs) is None:
            print(f"{example.spec}: left out, because {example.needs} is not installed", flush=True)
            continue
        place = folder / example.spec
        if not run(example, place):
            failed = True
            print(f"{example.spec}: the run failed; see {place / 'job.log'}", flush=True)
        cells, good = row(example, place / "traces")
        failed = failed or not good
        table.add_row(example.spec, *cells)
    Console(width=140).print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
