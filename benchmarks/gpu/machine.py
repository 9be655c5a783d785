"""What is on this machine: device, driver, torch, NCCL, packages.

``python -m benchmarks.gpu.machine`` prints one JSON object. Run in a process of its own: any of it
may fail to load.
"""

from __future__ import annotations

import importlib
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.machine import commit, version_of

_PACKAGES = ("torch", "torchft", "pydantic", "transitions", "PyYAML", "typer", "rich", "numpy")
_ROOMS = (
    "fft.train.state.step_state",
    "fft.train.nccl_library",
    "fft.train.manager",
    "fft.cli.run",
)
"""What parts need of FFT, from what needs least to what needs most."""


def described() -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "commit": commit(),
        "driver": _driver(),
        "device": None,
        "nccl": None,
        "cuda": None,
        "fails": {},
    }
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of CUDA that is not there
        found["fails"]["torch"] = str(error)
        return found
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(0)
        found["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(str(number) for number in torch.cuda.nccl.version())
    for room in _ROOMS:
        try:
            importlib.import_module(room)
        except Exception as error:  # noqa: BLE001 - of an older torch: anything
            found["fails"][room] = f"{type(error).__name__}: {error}"
    return found


def missing(machine: dict[str, Any]) -> str:
    """Why no GPU can be used, in a few words; empty: one can."""
    if "torch" in machine["fails"]:
        return f"torch cannot be loaded ({machine['fails']['torch']})"
    if machine["device"] is not None:
        return ""
    if machine["cuda"] is None:
        return f"torch {machine['packages']['torch']} was built without CUDA"
    return f"torch {machine['packages']['torch']} finds no GPU" + (
        "" if machine["driver"] else ", and there is no NVIDIA driver (nvidia-smi)"
    )


def ask() -> dict[str, Any]:
    """`described`, by a process of its own. Raises RuntimeError if that fails."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.machine"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).resolve().parents[2],
    )
    if done.returncode != 0:
        raise RuntimeError(f"this machine cannot be described: {done.stderr[-1500:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def in_words(machine: dict[str, Any]) -> list[str]:
    """Lines for people."""
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    memory = f", {machine['memory_gib']} GiB" if "memory_gib" in machine else ""
    lacks = [name for name, number in machine["packages"].items() if number == "not installed"]
    mend = "bring them along, as docs/gpu.md says (make gpu-packages)"
    return [
        f"device: {machine['device'] or 'none'}{memory}; driver {machine['driver'] or 'none'}; "
        f"CUDA {machine['cuda'] or 'none'}; NCCL {machine['nccl'] or 'none'}",
        f"Python {machine['python']}, Linux {machine['kernel']}; {packages}; "
        f"FFT at commit {machine['commit']}",
        *([f"not installed: {', '.join(lacks)}; {mend}"] if lacks else []),
        *(f"cannot be loaded: {name}: {why}" for name, why in machine["fails"].items()),
    ]


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return "unknown (nvidia-smi does not answer)"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


if __name__ == "__main__":
    print(json.dumps(described()))
