"""NVIDIA's in-process restart, if it is installed in its own virtual environment.

Its package pins its dependencies, so it is never installed beside FFT. ``make bench`` tries to
create the environment; ``BENCH_NVRX`` names the Python of another one.
"""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "nvidia-resiliency-ext"
_LOOK_S = 120.0
_IMPORT = "import nvidia_resiliency_ext.inprocess, torch.distributed"


def python() -> Path:
    """Return the interpreter that has it, or would have it."""
    return Path(os.environ.get("BENCH_NVRX") or ROOT / ".venv-nvrx" / "bin" / "python")


def why_not() -> str | None:
    """Return the reason why it cannot be measured here, or None."""
    if not python().exists():
        return f"{PACKAGE} is not installed (make bench tries to)"
    done = subprocess.run(
        [str(python()), "-c", _IMPORT], capture_output=True, text=True, timeout=_LOOK_S
    )
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return f"{PACKAGE} cannot be imported: {last[:200]}"


def free_ports() -> int:
    """Return the first of three consecutive free ports, which its launchers count from
    MASTER_PORT."""
    for _ in range(100):
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                for further in (port + 1, port + 2):
                    with socket.socket() as other:
                        other.bind(("127.0.0.1", further))
            except (OSError, OverflowError):
                continue
            return port
    raise OSError("no three free ports in a row on 127.0.0.1")
