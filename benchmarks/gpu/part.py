"""Runs one part in this process: ``python -m benchmarks.gpu.part NAME --folder DIR …``."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.findings import Pen
from benchmarks.gpu.plan import PARTS, Device

FINDINGS = "findings.jsonl"


@dataclass(frozen=True)
class Setting:
    """Where and how large a part is tried."""

    device: Device
    small: bool
    """Sizes and repetitions that only show whether the part itself works."""
    folder: Path
    """Its own, for files of its jobs."""


def main() -> None:
    """Run it; if it is not through shortly before its limit, say where it stands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[part.name for part in PARTS])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--stacks-after", type=float, metavar="S")
    args = parser.parse_args()
    faulthandler.enable()
    # cuBLAS gives the same bits in each run only so (its documentation, "Results reproducibility")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if args.stacks_after is not None:
        faulthandler.dump_traceback_later(args.stacks_after)
    pen = Pen(args.folder / FINDINGS, args.name)
    with pen.trial("the part itself"):
        module = importlib.import_module(f"benchmarks.gpu.parts.{args.name}")
        module.run(pen, Setting(args.device, args.small, args.folder))


if __name__ == "__main__":
    main()
