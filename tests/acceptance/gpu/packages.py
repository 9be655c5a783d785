"""A download of the packages that FFT needs besides torch, for a machine without a network.

Run ``python -m tests.acceptance.gpu.packages 3.12`` where FFT is installed and there is a network,
with the Python version of the other machine. Then copy gpu-packages/ into the source tree there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.side_by_side.machine import commit
from tests.acceptance.gpu.machine import NOTED

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "gpu-packages"
"""A folder with a subfolder for each Python version, such as ``3.12``."""
COMMIT = ROOT / NOTED
_NOT = ("torch", "numpy")
"""Packages that a machine with a GPU has, built for it, with all their dependencies."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def needed(python: str) -> list[str]:
    """Return FFT's dependencies and theirs as ``name==version``, as installed here, without
    torch's."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    roots = [Requirement(text) for text in declared["project"]["dependencies"]]
    there = _closure([r for r in roots if r.name in _NOT], python)
    found = _closure(roots, python) - there
    return [f"{name}=={version(name)}" for name in sorted(found)]


def _closure(wanted: Iterable[Requirement], python: str) -> set[str]:
    found: set[str] = set()
    waiting = list(wanted)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if name in found and not requirement.extras:
            continue
        found.add(name)
        try:
            texts = requires(name) or []
        except PackageNotFoundError:  # of another platform, such as torch's NVIDIA packages
            continue
        for text in texts:
            each = Requirement(text)
            where = [{"python_version": python, "extra": extra} for extra in extras]
            if each.marker is None or any(each.marker.evaluate(w) for w in where):
                waiting.append(each)
    return found


def main() -> int:
    """Download the packages; return pip's exit code."""
    parser = argparse.ArgumentParser("tests.acceptance.gpu.packages", description=__doc__)
    parser.add_argument("python", help="version of the other machine's Python, such as 3.12")
    args = parser.parse_args()
    target = FOLDER / args.python
    pip = [sys.executable, "-m", "pip", "install", "--target", str(target), "--no-deps"]
    pip += ["--only-binary=:all:", "--python-version", args.python, "--upgrade", "--quiet"]
    for platform in _PLATFORMS:
        pip += ["--platform", platform]
    code = subprocess.run([*pip, *needed(args.python)]).returncode
    if code == 0:  # the source tree is copied without its history
        COMMIT.write_text(commit(), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
