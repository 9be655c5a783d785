"""A description of this machine: device, driver, torch, NCCL, packages.

``python -m tests.acceptance.gpu.machine`` prints one JSON object. It runs in its own process,
because any of the imports may fail. Failures are listed under ``fails`` beside the rest.
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

ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = ("torch", "torchft", "pydantic", "transitions", "PyYAML", "typer", "rich", "numpy")
_ROOMS = (
    "fft.train.state.step_state",
    "fft.train.process_groups.nccl_library",
    "fft.train.process_groups.nccl",
    "fft.train.api.manager",
    "fft.cli.run",
)
"""FFT's packages that the parts need, from the one with the fewest requirements to the most."""
NOTED = Path("gpu-packages", "commit.txt")
"""Path in the repository of the commit of FFT for which the packages were downloaded."""
_KEYS = ("python", "kernel", "commit", "driver", "device", "nccl", "cuda", "when")
_PROC = Path("/proc/driver/nvidia/gpus")
_ASK_S = 120.0
_SLOW_LOOKUP_MS = 500


def described() -> dict[str, Any]:
    """Return the whole description."""
    found = _nothing()

    def note(key: str, ask: Callable[[], Any]) -> None:
        try:
            found[key] = ask()
        except Exception as error:  # noqa: BLE001 - the rest must be reported after any error
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
        note("count", torch.cuda.device_count)
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
    """Return briefly why no GPU can be used; empty if one can, or if that is unknown."""
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
    """Return what to install if torch cannot use an existing GPU; empty if there is none."""
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
"""The entry of ``fails`` for a machine that could not be described at all."""


def ask() -> dict[str, Any]:
    """Return `described` from a separate process, or the reason of its failure under ``fails``."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.acceptance.gpu.machine"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_S,
            cwd=ROOT,
        )
        if done.returncode == 0:
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            # Libraries may print more lines, also at exit
            answer: dict[str, Any] = json.loads(lines[-1])
            return {**_nothing(), **answer}
        why = f"exit code {done.returncode}: {done.stderr[-1500:]}"
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        why = f"{type(error).__name__}: {error}"
    return {**_nothing(), "fails": {ASK: why}, "when": time.strftime("%Y-%m-%d %H:%M")}


def in_words(machine: dict[str, Any]) -> list[str]:
    """Return the description as lines of text."""
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
    """Return torch's reason for which it can use no GPU; empty if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error has the same text
        if torch.cuda.is_available():
            return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "torch.cuda.is_available() says no"


def _commit() -> str:
    """Return FFT's commit from git, or as `packages` has recorded it for a tree without history."""
    if (found := commit()) != "unknown":
        return found
    noted = ROOT / NOTED
    return noted.read_text(encoding="utf-8").strip() if noted.exists() else found


def _smi(question: str) -> list[str]:
    """Return the answer's lines; none without nvidia-smi or without a GPU that it knows."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", f"--query-gpu={question}", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=30)
    if done.returncode != 0:  # "No devices were found", or it does not fit the driver
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _gpus() -> list[str]:
    """Return the names of the GPUs according to the driver, whether or not torch can use them."""
    return _smi("name") or (
        [each.name for each in sorted(_PROC.iterdir())] if _PROC.is_dir() else []
    )


def _driver() -> str | None:
    return next(iter(_smi("driver_version")), None)


def _lookup_ms() -> int:
    """Return how long the lookup of an unknown name takes, with torch's query (`runner`)."""
    began = time.monotonic()
    with suppress(OSError):
        socket.getnameinfo(("192.0.2.1", 80), socket.NI_NAMEREQD)  # RFC 5737: a reserved address
    return round(1e3 * (time.monotonic() - began))


if __name__ == "__main__":
    print(json.dumps(described()))
