"""A description of the machine and its packages. Reads /proc and the installed packages."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "torchft", "fft-torch")


def described() -> dict[str, Any]:
    """Describe this machine now."""
    return {
        "when": f"{datetime.now():%Y-%m-%d %H:%M}",
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "commit": commit(),
        **{name: version_of(name) for name in _PACKAGES},
    }


def in_words(machine: dict[str, Any]) -> str:
    """Return the description in one line."""
    packages = ", ".join(f"{name} {machine[name]}" for name in _PACKAGES)
    return (
        f"{machine['when']}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']:g} GiB, Linux {machine['kernel']}, Python {machine['python']}, "
        f"{packages} (commit {machine['commit']}); load average before {machine['load']:g}"
    )


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Return the commit of the measured code, with a + if the working tree differs from it."""
    if shutil.which("git") is None:
        return "unknown"
    here = Path(__file__).parent
    told = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(told, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() or "unknown"
