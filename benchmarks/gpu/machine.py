"""What is on this machine: device, driver, torch, NCCL, packages.

``python -m benchmarks.gpu.machine`` prints one JSON object. Run in a process of its own: any of it
may fail to load. What cannot be found out is among ``fails``, and the rest is told.
"""

from __future__ import annotations

import importlib
import json
import platform
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.machine import commit, version_of

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "torchft", "pydantic", "transitions", "PyYAML", "typer", "rich", "numpy")
_ROOMS = (
    "fft.train.state.step_state",
    "fft.train.nccl_library",
    "fft.train.process_group.nccl",
    "fft.train.manager",
    "fft.cli.run",
)
"""What parts need of FFT, from what needs least to what needs most."""
NOTED = Path("gpu-packages", "commit.txt")
"""Of the repository's root: FFT's commit when the packages were got."""
_KEYS = ("python", "kernel", "commit", "driver", "device", "nccl", "cuda", "when")
_PROC = Path("/proc/driver/nvidia/gpus")
_ASK_S = 120.0
_SLOW_LOOKUP_MS = 500


def described() -> dict[str, Any]:
    """All of it."""
    found = _nothing()

    def note(key: str, ask: Callable[[], Any]) -> None:
        try:
            found[key] = ask()
        except Exception as error:  # noqa: BLE001 - the rest is to be told, whatever it was
            found["fails"][key] = f"{type(error).__name__}: {error}"

    note("when", lambda: time.strftime("%Y-%m-%d %H:%M"))
    note("python", platform.python_version)
    note("kernel", platform.release)
    note("packages", lambda: {name: version_of(name) for name in _PACKAGES})
    note("commit", _commit)
    note("gpus", _gpus)
    note("driver", _driver)
    note("lookup_ms", _lookup_ms)
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - such as a library of CUDA that is not there
        found["fails"]["torch"] = str(error)
        return found
    note("cuda", lambda: torch.version.cuda)
    note("unusable", lambda: _unusable(torch))
    if not found["unusable"]:
        note("device", lambda: torch.cuda.get_device_name(0))
        note(
            "memory_gib",
            lambda: round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        )
    if torch.distributed.is_nccl_available():
        note("nccl", lambda: ".".join(str(number) for number in torch.cuda.nccl.version()))
    for room in _ROOMS:
        try:
            importlib.import_module(room)
        except Exception as error:  # noqa: BLE001 - of an older torch: anything
            found["fails"][room] = f"{type(error).__name__}: {error}"
    return found


def missing(machine: dict[str, Any]) -> str:
    """Why no GPU can be used, in a few words; empty: one can, or that is not known."""
    if ASK in machine["fails"]:
        return ""
    if "torch" in machine["fails"]:
        return f"torch cannot be loaded ({machine['fails']['torch']})"
    if machine["device"] is not None or "device" in machine["fails"]:
        return ""
    torch = machine["packages"].get("torch")
    if machine["cuda"] is None:
        return f"torch {torch} was built without CUDA"
    return f"torch {torch} finds no GPU ({machine['unusable']})" + (
        "" if machine["driver"] else ", and there is no NVIDIA driver (nvidia-smi)"
    )


def mend(machine: dict[str, Any]) -> str:
    """What to install where there is a GPU that torch cannot use; empty: there is none."""
    if not machine["gpus"] and "gpus" not in machine["fails"]:
        return ""
    names = ", ".join(machine["gpus"]) or f"a GPU, perhaps ({machine['fails']['gpus']}),"
    has = f"{names} with driver {machine['driver'] or 'unknown'} is here"
    if "torch" in machine["fails"] or machine["cuda"] is None:
        return f"{has}: install a torch that was built for CUDA, with its nvidia-… packages"
    return (
        f"{has}: install a driver for CUDA {machine['cuda']} (580 or newer for CUDA 13, 525 or "
        "newer for CUDA 12), or a torch that was built for the CUDA that nvidia-smi shows; if both "
        "fit, see that this user, or this container, may use the device"
    )


ASK = "this machine"
"""Among ``fails``: it could not be described at all."""


def ask() -> dict[str, Any]:
    """`described`, by a process of its own; if that fails, why, among ``fails``."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.machine"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_S,
            cwd=ROOT,
        )
        if done.returncode == 0:
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            answer: dict[str, Any] = json.loads(lines[-1])  # libraries may say more, at exit too
            return {**_nothing(), **answer}
        why = f"exit code {done.returncode}: {done.stderr[-1500:]}"
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        why = f"{type(error).__name__}: {error}"
    return {**_nothing(), "fails": {ASK: why}, "when": time.strftime("%Y-%m-%d %H:%M")}


def in_words(machine: dict[str, Any]) -> list[str]:
    """Lines for people."""
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    memory = f", {machine['memory_gib']} GiB" if "memory_gib" in machine else ""
    lacks = [name for name, number in machine["packages"].items() if number == "not installed"]
    bring = "bring them along, as docs/gpu.md says (make gpu-packages)"
    lookup = machine.get("lookup_ms") or 0
    return [
        f"device: {machine['device'] or 'none'}{memory}; driver {machine['driver'] or 'none'}; "
        f"CUDA {machine['cuda'] or 'none'}; NCCL {machine['nccl'] or 'none'}",
        f"Python {machine['python']}, Linux {machine['kernel']}; {packages or 'packages unknown'}; "
        f"FFT at commit {machine['commit']}",
        *([f"not installed: {', '.join(lacks)}; {bring}"] if lacks else []),
        *([f"names are slow here: {lookup} ms for one"] if lookup > _SLOW_LOOKUP_MS else []),
        *(
            f"cannot be loaded or found out: {name}: {why}"
            for name, why in machine["fails"].items()
        ),
    ]


def _nothing() -> dict[str, Any]:
    return dict.fromkeys(_KEYS) | {
        "packages": {},
        "fails": {},
        "gpus": [],
        "unusable": "",
    }


def _unusable(torch: Any) -> str:
    """Why torch can use no GPU, in its words; empty: it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says the same by the error
        if torch.cuda.is_available():
            return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch.cuda.is_available() says no"


def _commit() -> str:
    """Of FFT: by git, or as `packages` has noted it, where the tree came without its history."""
    if (found := commit()) != "unknown":
        return found
    noted = ROOT / NOTED
    return noted.read_text(encoding="utf-8").strip() if noted.exists() else found


def _smi(question: str) -> list[str]:
    """The answer's lines; none, where there is no nvidia-smi, or it knows no GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", f"--query-gpu={question}", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=30)
    if done.returncode != 0:  # "No devices were found", or it does not fit the driver
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _gpus() -> list[str]:
    """Their names, as the driver has them, whether torch can use them or not."""
    return _smi("name") or (
        [each.name for each in sorted(_PROC.iterdir())] if _PROC.is_dir() else []
    )


def _driver() -> str | None:
    return next(iter(_smi("driver_version")), None)


def _lookup_ms() -> int:
    """How long the question for a name takes that nobody knows, as torch asks it (`runner`)."""
    began = time.monotonic()
    with suppress(OSError):
        socket.getnameinfo(("192.0.2.1", 80), socket.NI_NAMEREQD)  # RFC 5737: nobody's address
    return round(1e3 * (time.monotonic() - began))


if __name__ == "__main__":
    print(json.dumps(described()))
