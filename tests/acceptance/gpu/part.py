"""A runner of one part in this process: ``python -m tests.acceptance.gpu.part NAME --folder DIR
…``."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.plan import PARTS, Device

FINDINGS = "findings.jsonl"
STACKS_S, END_S = 2.0, 4.0
"""Seconds before its limit at which a part prints its threads' stacks, and has ended by itself."""


@dataclass(frozen=True)
class Setting:
    """The device, size and folder for a part."""

    device: Device
    small: bool
    """Whether to use sizes and repetitions that only show whether the part itself works."""
    folder: Path
    """The part's own folder, for files of its jobs."""
    ends: float
    """Monotonic seconds, shortly before the part is ended; it has written its findings by then."""

    def left(self) -> float:
        """Seconds until `ends`, not below zero."""
        return max(0.0, self.ends - time.monotonic())


def main() -> None:
    """Run the part; if it is not finished shortly before its limit, print its stacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[part.name for part in PARTS])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, required=True, metavar="S", help="then it is ended")
    args = parser.parse_args()
    ends = time.monotonic() + max(0.0, args.limit - END_S)
    faulthandler.enable()
    # cuBLAS gives the same bits in each run only with this (its documentation, "Results
    # reproducibility")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    faulthandler.dump_traceback_later(max(0.5, args.limit - STACKS_S))
    pen = Pen(args.folder / FINDINGS, args.name)
    with pen.trial("the part itself"):
        module = importlib.import_module(f"tests.acceptance.gpu.parts.{args.name}")
        module.run(pen, Setting(args.device, args.small, args.folder, ends))


if __name__ == "__main__":
    main()
