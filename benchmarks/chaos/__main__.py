"""``python -m benchmarks.chaos``: the command of `make chaos`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.chaos import matrix
from benchmarks.chaos.cases import LAYOUTS, suites


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    for name in args.layout or LAYOUTS:
        layout = LAYOUTS[name]
        if args.list:
            for s in suites(layout):
                for c in s.cases: print(name, s.name, c.name)
            continue
        d = Path(tempfile.mkdtemp(prefix="chaos-"))
        print(d)
        r = matrix.run(layout, d, lambda c: not args.case or any(w in c.name for w in args.case), print)
        for row in r.rows: print(row)
        print(r.problems, r.steps_ms, r.took_s)


main()
