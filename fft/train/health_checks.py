"""Ready-made checks for `ManagerFFT.health_check`, as ``fft.health_checks``.

Each function returns a check: a function without arguments that raises ``RuntimeError`` if the
machine of this rank is not fit to take part. For example::

    manager.health_check(fft.health_checks.disk("/scratch", free_gb=20))
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from fft.util.memory import available_memory

_GB = 1e9
_INTERFACES = Path("/sys/class/net")
_SIZE = 256
"""Rows and columns of the matrices that `device` multiplies."""


def disk(path: str | Path, free_gb: float) -> Callable[[], None]:
    """Check that ``path`` is on a file system with ``free_gb`` free gigabytes (10^9 bytes)."""

    def disk_is_free() -> None:
        free = shutil.disk_usage(path).free / _GB
        if free < free_gb:
            raise RuntimeError(f"{path} has {free:.1f} GB free, expected at least {free_gb:g} GB")

    return disk_is_free


def memory(free_gb: float) -> Callable[[], None]:
    """Check that this process can allocate ``free_gb`` gigabytes (10^9 bytes) of host memory.

    The limits of its control groups (cgroup v2) count as well as the memory of the machine.
    """

    def memory_is_free() -> None:
        free = available_memory() / _GB
        if free < free_gb:
            raise RuntimeError(
                f"{free:.1f} GB of memory are free, expected at least {free_gb:g} GB"
            )

    return memory_is_free


def network_interface(name: str) -> Callable[[], None]:
    """Check that the network interface ``name``, such as ``eth0`` or ``ib0``, has a link."""

    def interface_is_up() -> None:
        place = _INTERFACES / name
        if not place.exists():
            found = ", ".join(sorted(path.name for path in _INTERFACES.iterdir()))
            raise RuntimeError(f"there is no network interface {name!r}; there are {found}")
        try:
            carrier = (place / "carrier").read_text().strip()
        except OSError:  # EINVAL while the interface is switched off
            carrier = "0"
        if carrier != "1":
            raise RuntimeError(f"the network interface {name} has no link")

    return interface_is_up


def device(name: str = "cuda") -> Callable[[], None]:
    """Check that the torch device ``name`` multiplies two matrices correctly.

    This begins to use the device, and waits for the work that is queued on it.
    """

    def device_computes() -> None:
        import torch

        ones = torch.ones(_SIZE, _SIZE, device=name)
        product = (ones @ ones).cpu()
        if not bool((product == _SIZE).all()):
            raise RuntimeError(f"the device {name} multiplies matrices incorrectly")

    return device_computes
