"""Run FFT with each supported release of torch, Python and torchft, and write docs/versions.md.

A cell is a combination of releases, which gets a virtual environment. A part is a command that is
run in it. Interpreters are found on PATH (python3.12) or in pyenv. Results are appended to
docs/versions/results.jsonl; the page shows the last result of each part in each cell.

python -m tools.versions                          # all parts in all cells
python -m tools.versions --torch 2.15.0           # only cells with that torch
python -m tools.versions --part demo --keep DIR   # one part; keep the environments in DIR
python -m tools.versions --missing                # only parts without a result
python -m tools.versions --size DIR               # measure packages and imports of a source tree
python -m tools.versions --page                   # only write the page
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, dataclass
from importlib.metadata import distribution
from pathlib import Path
from statistics import median
from typing import Any

from tools.pages import markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
RESULTS = ROOT / "docs" / "versions" / "results.jsonl"
NIGHTLY = "nightly 2026.10.26"


@dataclass(frozen=True)
class Cell:
    """The releases of one environment, which is a row of the page."""

    torch: str
    python: str
    torchft: str = "0.2.0"

    @property
    def folder(self) -> str:
        return "-".join([self.torch, self.python, *self.torchft.split()])


CELLS = (
    Cell("2.11.0", "3.11"),
    Cell("2.12.1", "3.11"),
    Cell("2.13.0", "3.11"),
    Cell("2.14.1", "3.11"),
    Cell("2.15.0", "3.11"),
    Cell("2.11.0", "3.12"),
    Cell("2.14.1", "3.13"),
    Cell("2.15.0", "3.14"),
    Cell("2.15.0", "3.11", NIGHTLY),
)
PARTS = {
    "import": "{python} -c 'import fft; fft.ManagerFFT'",
    "demo": "make -o {env}/.installed demo VENV={env} TRACES={traces}",
    "compat": "make -o {env}/.installed compat VENV={env}",
    "train a-d": "{python} {pytest} tests/train/test_[a-d]*.py",
    "train e-l": "{python} {pytest} tests/train/test_[e-l]*.py",
    "train m-r": "{python} {pytest} tests/train/test_[m-r]*.py",
    "train s-z": "{python} {pytest} tests/train/test_[s-z]*.py",
    "engine": "{python} {pytest} tests/engine",
    "bus": "{python} {pytest} tests/bus",
}
_PYTEST = "-m pytest -q -m 'not long' -n 2 --dist loadfile"
_WITHOUT_TORCHFT = ("engine", "bus")
"""The parts that can run with a Python for which torchft has no wheel."""
_LIMIT_S = 1800


def interpreter_of(python: str) -> str | None:
    """Return the path of an interpreter of this release, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (f"python{python}", *map(str, pyenv.glob(f"{python}.*/bin/python"))):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([path, "-c", ""], check=True, capture_output=True)
            return path
    return None


def build(cell: Cell, env: Path) -> str | None:
    """Create the environment of a cell; return why that is not possible, or None.

    FFT is installed without torchft if torchft has no wheel for this Python.
    """
    interpreter = interpreter_of(cell.python)
    if interpreter is None:
        return f"this machine has no python{cell.python}"
    subprocess.run([interpreter, "-m", "venv", env], check=True)
    # a nightly replaces a release, which brings the requirements
    torchft = "torchft==0.2.0" if cell.torchft == NIGHTLY else f"torchft=={cell.torchft}"
    pip = [str(env / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "-q", "--no-compile", "--only-binary", "torchft"]
    steps = [
        [*install, f"torch=={cell.torch}", "-e", f"{ROOT}[test]"],
        [*install, torchft],
    ]
    if cell.torchft == NIGHTLY:
        steps.append([*pip, "uninstall", "-q", "-y", "torchft"])
        steps.append([*install, "--no-deps", f"torchft-nightly=={NIGHTLY.split()[1]}"])
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode and step[-1] == torchft and "from versions: none" in done.stderr:
            (env / ".no-torchft").touch()
        elif done.returncode:
            return next(
                (x for x in done.stderr.splitlines() if x.startswith("ERROR")), done.stderr[-200:]
            )
    (env / ".installed").touch()
    return None


def not_possible(reason: str) -> dict[str, object]:
    """Return the result of a part that cannot be run on this machine or with this release."""
    return {"code": None, "seconds": 0, "failed": [], "result": f"no: {reason}"}


def run(cell: Cell, part: str, env: Path) -> dict[str, object]:
    """Run a part in the environment of a cell, and return its result."""
    if (env / ".no-torchft").exists() and part not in _WITHOUT_TORCHFT:
        return not_possible(f"torchft has no wheel for Python {cell.python}")
    with tempfile.TemporaryDirectory() as traces:
        command = PARTS[part].format(
            python=env / "bin/python", pytest=_PYTEST, env=env, traces=traces
        )
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, shell=True, cwd=ROOT, text=True, capture_output=True, timeout=_LIMIT_S
            )
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            code, text = 124, f"not finished after {_LIMIT_S} s"
    sys.stdout.write(f"{cell} {part}: exit code {code}\n{text[-4000:] if code else ''}")
    counts = re.findall(r"\d+ (?:passed|failed|errors?|xfailed|skipped)", text)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    result = ", ".join(dict.fromkeys(counts[-4:])) or (f"exit code {code}" if code else "passed")
    seconds = round(time.monotonic() - began)
    return {"code": code, "seconds": seconds, "failed": failed, "result": result}


def commit_of(root: Path) -> str:
    """Return the commit of a tree, with "-dirty" if files outside of the docs have changed."""
    git = ["git", "-C", str(root)]
    found = subprocess.check_output([*git, "describe", "--always", "--exclude=*"], text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!docs"]).returncode
    return found.strip() + ("-dirty" if changed else "")


def record(about: dict[str, object], root: Path = ROOT) -> None:
    """Append a result, with the commit and the day."""
    line = {**about, "commit": commit_of(root), "when": time.strftime("%Y-%m-%d")}
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def recorded() -> list[dict[str, Any]]:
    """Return all results, the oldest first."""
    return [json.loads(x) for x in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def requirements(root: Path) -> tuple[list[str], list[str]]:
    """Return the packages that FFT requires, and the same with their own requirements.

    The second list lacks torch and the packages that only torch requires.
    """
    from packaging.requirements import Requirement  # environments of the matrix may lack it

    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    direct = [Requirement(text).name for text in wanted]
    found: dict[str, None] = {}
    while wanted:
        one = Requirement(wanted.pop())
        if one.name == "torch" or one.name in found:
            continue
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            found[one.name] = None
            wanted += distribution(one.name).requires or []
    return direct, sorted(found)


def size(root: Path) -> dict[str, object]:
    """Measure, in this environment, the packages that FFT requires and the time of its import."""
    direct, names = requirements(root)
    files = [
        distribution(name).locate_file(f) for name in names for f in distribution(name).files or ()
    ]
    kept = [Path(str(f)) for f in files if not str(f).endswith(".pyc") and Path(str(f)).is_file()]
    seconds = {}
    for what in ("import torch, torchft", "import fft", "import fft; fft.ManagerFFT"):
        took = []
        for _ in range(10):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", what], check=True, cwd=root)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        seconds[what] = round(median(took), 2)
    mb = round(sum(f.stat().st_size for f in kept) / 1e6)
    return {"part": "size", "required": len(direct), "all": len(names), "mb": mb, "cpu_s": seconds}


def latest_results() -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the last result by torch, Python, torchft and part."""
    key = ("torch", "python", "torchft", "part")
    return {tuple(r[name] for name in key): r for r in recorded() if r["part"] != "size"}


def page() -> str:
    """Return docs/versions.md."""
    latest = latest_results()
    rows = list[list[str]]()
    notes = []
    for cell in CELLS:
        key = (cell.torch, cell.python, cell.torchft)
        row = [*key]
        for part in PARTS:
            found = latest.get((*key, part)) or latest.get((*key, "environment"))
            row.append("not run" if found is None else str(found["result"]))
            if found is not None and found["code"] is not None:
                about = f"{found['when']}, commit {found['commit']}, {found['seconds']} s"
                notes.append(f"- {' / '.join(key)}, {part}: {about}")
                notes += [f"    - failed: `{name}`" for name in dict.fromkeys(found["failed"])]
        rows.append(row)
    parts = [
        f"- *{name}*: `{command.replace('{pytest}', _PYTEST)}`" for name, command in PARTS.items()
    ]
    return "\n".join(
        [
            "# Versions",
            "",
            "The tests that were run with each combination of releases, and their last results.",
            "`python -m tools.versions`, which `.ci/scheduled` runs, builds an environment for",
            "each row, on a machine without a GPU, and writes this page. *no* means that a part",
            "cannot be run there. [Upgrading](guides/upgrade.md) describes other releases.",
            "",
            *markdown(["torch", "Python", "torchft", *PARTS], rows),
            "",
            "The columns:",
            "",
            *parts,
            "",
            "The day, commit and duration of each result:",
            "",
            *notes,
            "",
            "## Size and imports",
            "",
            "`python -m tools.versions --size .` measures the number of packages that FFT",
            "requires, their number with their own requirements except torch, the size of these on",
            "disk without byte code, and the CPU time of an import in seconds (the median of 10).",
            "A training script imports torch and torchft anyway.",
            "[Dependencies](decisions/packages.md) lists the purpose of each package.",
            "",
            *sizes(),
            "",
        ]
    )


def sizes() -> list[str]:
    """Return the table of the sizes and imports at each commit that was measured."""
    measured = {r["commit"]: r for r in recorded() if r["part"] == "size"}
    if not measured:
        return ["Not measured yet."]
    texts = list(dict.fromkeys(text for r in measured.values() for text in r["cpu_s"]))
    head = ["commit", "day", "required", "with theirs", "MB", *(f"`{text}`" for text in texts)]
    rows = [
        [r["commit"], r["when"], r["required"], r["all"], r["mb"], *r["cpu_s"].values()]
        for r in measured.values()
    ]
    return markdown(head, [[str(value) for value in row] for row in rows])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--torch")
    parser.add_argument("--python")
    parser.add_argument("--torchft", help="such as 0.2.0, or nightly")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--keep", type=Path, help="folder to keep the environments in")
    parser.add_argument("--missing", action="store_true", help="only parts without a result")
    parser.add_argument("--size", type=Path, metavar="DIR", help="measure a source tree")
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    failed = 0
    if args.size is not None:
        record(size(args.size.resolve()), args.size)
    for cell in () if args.page or args.size else CELLS:
        asked = (args.torch, cell.torch), (args.python, cell.python)
        if any(value not in (None, own) for value, own in asked):
            continue
        if args.torchft is not None and not cell.torchft.startswith(args.torchft):
            continue
        key = (cell.torch, cell.python, cell.torchft)
        done = latest_results() if args.missing else {}
        parts = [part for part in args.part or PARTS if (*key, part) not in done]
        if not parts:
            continue
        with contextlib.ExitStack() as stack:
            home = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            env = home.resolve() / cell.folder
            if not (env / ".installed").exists():
                shutil.rmtree(env, ignore_errors=True)
                if (reason := build(cell, env)) is not None:
                    record(asdict(cell) | {"part": "environment"} | not_possible(reason))
                    continue
            for part in parts:
                result = run(cell, part, env)
                record(asdict(cell) | {"part": part} | result)
                failed += result["code"] not in (0, None)
    PAGE.write_text(page())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
