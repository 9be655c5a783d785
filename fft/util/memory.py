"""The host memory that is available to this process, by the machine and by its control groups."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def available_memory(root: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int:
    """Return the bytes of host memory that are available to this process.

    Args:
        root: Where the hierarchy of control groups (cgroup v2) is mounted.
        membership: The file that names the control group of this process.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    names = [line for line in membership.read_text().splitlines() if line.startswith("0::")]
    place = Path(names[0].removeprefix("0::/")) if names else Path()
    for folder in (root / place, *(root / parent for parent in place.parents)):
        limit = folder / "memory.max"
        if limit.exists() and (most := limit.read_text().strip()) != "max":
            free = min(free, int(most) - _used_memory(folder))
    return free


def _used_memory(folder: Path) -> int:
    """Return the bytes that a control group uses, without caches that the kernel can drop."""
    lines = (folder / "memory.stat").read_text().splitlines()
    held = {name: int(value) for name, value in (line.split() for line in lines)}
    droppable = sum(held.get(name, 0) for name in ("inactive_file", "slab_reclaimable"))
    return int((folder / "memory.current").read_text()) - droppable
