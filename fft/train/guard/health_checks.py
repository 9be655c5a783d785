"""Ready-made checks for `ManagerFFT.health_check`, as ``fft.health_checks``.

Each function returns a check: a function without arguments that raises ``RuntimeError`` if the
machine of this rank is not fit to take part. For example::

    manager.health_check(fft.health_checks.disk("/scratch", free_gb=20))
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fft.errors import ConfigError
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


class GpuState(NamedTuple):
    """The health of a GPU as NVML reports it; None or empty if the GPU does not report it."""

    recovery: int | None
    """The action that the driver asks for; 0 is none."""
    uncorrected: int | None
    """Number of uncorrected memory errors since the driver was loaded."""
    remapping_failed: bool
    """A defective row of the memory could not be replaced."""
    links: frozenset[int]
    """NVLinks that are active."""

    def faults_since(self, before: GpuState) -> Iterator[str]:
        """Yield a text for each reason not to use the GPU."""
        if self.recovery:
            actions = {1: "a reset", 2: "a reboot", 3: "draining of peer traffic"}
            action = actions.get(self.recovery, "draining and a reset")
            yield f"the driver asks for {action} (recovery action {self.recovery})"
        new = (self.uncorrected or 0) - (before.uncorrected or 0)
        if new > 0:
            yield f"{new} new uncorrected memory errors"
        if self.remapping_failed:
            yield "a defective row of its memory could not be replaced"
        if lost := before.links - self.links:
            yield f"NVLink {', '.join(map(str, sorted(lost)))} is down"


def gpu(index: int = 0) -> Callable[[], None]:
    """Check with NVML (``pip install nvidia-ml-py``) that CUDA device ``index`` is healthy.

    It fails if the driver asks for a recovery action, if a defective row of the memory could not be
    replaced, and if uncorrected memory errors or lost NVLinks were added since this call. It has
    not been run on a GPU.

    Raises:
        ConfigError: nvidia-ml-py is not installed.
    """
    if find_spec("pynvml") is None:
        raise ConfigError(
            "fft.health_checks.gpu() needs NVML for Python: pip install nvidia-ml-py, or remove "
            "this check"
        )
    before = _gpu_state(index)

    def gpu_is_healthy() -> None:
        if found := "; ".join(_gpu_state(index).faults_since(before)):
            raise RuntimeError(f"GPU {index}: {found}")

    return gpu_is_healthy


def _gpu_state(index: int) -> GpuState:
    """Read the health of a CUDA device, which NVML finds by its UUID."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        device = pynvml.nvmlDeviceGetHandleByUUID(uuid)

        def read(function: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return function(device, *arguments)
            except pynvml.NVMLError:  # older GPUs and drivers do not report everything
                return None

        fields = read(pynvml.nvmlDeviceGetFieldValues, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        reports = bool(fields) and fields[0].nvmlReturn == pynvml.NVML_SUCCESS
        kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        rows = read(pynvml.nvmlDeviceGetRemappedRows)
        links = range(pynvml.NVML_NVLINK_MAX_LINKS)
        return GpuState(
            fields[0].value.uiVal if reports else None,
            read(pynvml.nvmlDeviceGetTotalEccErrors, *kind),
            bool(rows and rows[3]),
            frozenset(n for n in links if read(pynvml.nvmlDeviceGetNvLinkState, n) == 1),
        )
    finally:
        pynvml.nvmlShutdown()
