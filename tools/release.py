"""Build the wheel and the source distribution, and run README's script with each as a user would.

python -m tools.release    # dist/ then has both; needs the package ``build``

Each is installed into an empty environment outside of the clone, so that a file missing from it is
noticed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
LIMIT_S = 300
"""Limit for a run of README's script, which takes seconds."""


def _run(*command: str | Path, folder: Path, within: float | None = None) -> None:
    """Run a command without the variables of Python, and echo it. Raises on a failure."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    sys.stdout.write(f"$ {' '.join(map(str, command))}\n")
    sys.stdout.flush()
    subprocess.run(command, cwd=folder, env=env, check=True, timeout=within)


def build() -> list[Path]:
    """Build both files into an empty ``dist/``."""
    for old in DIST.glob("*"):
        old.unlink()
    _run(sys.executable, "-m", "build", "--outdir", DIST, folder=ROOT)
    return sorted(DIST.iterdir())


def try_out(package: Path) -> None:
    """Install ``package`` into an empty environment, and run and audit README's script there."""
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    with tempfile.TemporaryDirectory(prefix="fft-release-") as name:
        folder = Path(name)
        programs = folder / "venv" / "bin"
        _run(sys.executable, "-m", "venv", programs.parent, folder=folder)
        _run(programs / "python", "-m", "pip", "install", "--quiet", package, folder=folder)
        (folder / "train.py").write_text(snippet, encoding="utf-8")
        run = (programs / "fft", "run", "--groups", "2", "--max-restarts", "0")
        _run(*run, "--trace-dir", "traces", "train.py", folder=folder, within=LIMIT_S)
        _run(programs / "fft", "audit", "traces", folder=folder, within=LIMIT_S)


def main() -> None:
    """Build, and try out what was built."""
    built = build()
    for package in built:
        try_out(package)
    sys.stdout.write(f"release: {', '.join(each.name for each in built)}\n")


if __name__ == "__main__":
    main()
