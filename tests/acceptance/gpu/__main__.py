"""Test FFT on this machine's GPU: ``make gpu``, or ``python -m tests.acceptance.gpu [PART …]``.

It takes at most 10 minutes, uses no network, installs nothing, and runs from the source tree.
Packages that the machine lacks may lie in gpu-packages/ beside it (python -m
tests.acceptance.gpu.packages). The results are results.jsonl in the run's folder, and docs/gpu.md
with
--write. To write that page on another machine, copy results.jsonl there and pass it to --page.

Exit codes: 0 if all tested requirements hold or the machine has no GPU; 1 if a requirement does not
hold, nothing was tested, or the machine cannot be described; 2 for wrong arguments; 3 if a part
crashed, hung, or was not begun for lack of time; 4 if torch cannot use an existing GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.acceptance.gpu import machine, page, runner
from tests.acceptance.gpu.plan import PARTS, TOTAL_S, chosen

UNUSABLE = 4
"""Exit code if there is a GPU that torch cannot use."""


def main() -> int:
    """Run the chosen parts; return the exit code."""
    args = _arguments()
    if args.list:
        for part in PARTS:
            where = "" if part.on_cpu else ", on a GPU only"
            print(f"{part.number} {part.name}: {part.title} (about {part.limit_s:g} s{where})")
        return 0
    if args.page:
        page.write(page.PAGE, *args.page)
        print(f"page: {page.PAGE}")
        return 0
    runner.prepare_children()
    about = machine.ask()
    if args.device == "cuda" and (why := machine.missing(about)):
        if mend := machine.mend(about):
            print(f"failed: {why}; {mend}")
            return UNUSABLE
        print(f"skipped: {why}; run it on a machine with an NVIDIA GPU, or with --device cpu.")
        return 0
    about |= {"on": args.device, "small": args.small}
    print("\n".join(machine.in_words(about)), flush=True)
    args.folder.mkdir(parents=True)
    lines = args.folder / "results.jsonl"
    _write(lines, {"machine": about, "parts": [part.name for part in args.parts]})

    def tell(result: dict[str, Any]) -> None:
        _write(lines, result)
        print(runner.in_words(result), flush=True)

    results = runner.run(
        args.parts,
        args.device,
        args.small,
        args.folder,
        args.total,
        tell,
        gpus=about.get("count", 1),
    )
    print(f"results: {lines}")
    if args.write:
        page.write(page.PAGE, about, results)
        print(f"page: {page.PAGE}")
    return runner.exit_code(results) or (runner.FAILED if machine.ASK in about["fails"] else 0)


def _arguments() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "tests.acceptance.gpu", description=__doc__, formatter_class=form
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="number or name; all, if none")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try the parts themselves"
    )
    parser.add_argument("--small", action="store_true", help="small sizes, few repetitions")
    parser.add_argument("--folder", type=Path, help="a new one, for results and logs")
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds for all parts")
    parser.add_argument("--write", action="store_true", help="write docs/gpu.md")
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FROM.jsonl",
        help="write docs/gpu.md from the results of another machine, and run nothing",
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    args = parser.parse_args()
    try:
        args.parts = chosen(args.parts)
        args.page = page.read_run(args.page) if args.page else None
    except (ValueError, OSError) as error:
        parser.error(str(error))
    folder = args.folder or Path("runs") / f"gpu-{datetime.now():%Y%m%d-%H%M%S}"
    args.folder = folder.resolve()
    if args.folder.exists():
        parser.error(f"{args.folder} is there already: name a new folder")
    return args


def _write(path: Path, line: dict[str, Any]) -> None:
    """Write a line at once, so that nothing is lost if this process is ended."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
