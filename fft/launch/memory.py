"""The folder in shared memory in which the ranks of this host keep copies of their state.

`fft run` makes, locks and removes it. Its name follows from the command, so that the same command
finds the copies of a start whose `fft run` was killed. The folder then stays for `KEPT_S` seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fft.checkpoints.plan import COPIES, MemoryPlan, memory_interval
from fft.checkpoints.stores import LocalStore, StoreError
from fft.launch.supervisor import RunConfig
from fft.launch.supervisor.config import SupervisorError
from fft.util.files import why_not_private
from fft.util.remove_after_death import vanishing

ROOT = Path("/dev/shm")
KEPT_S = 600.0
"""How long the copies stay after `fft run` was killed, or has ended without finishing the job."""
_SHARE = 0.5
"""Part of the free memory of the host that the copies may take."""
_CGROUP = Path("/sys/fs/cgroup")

logger = logging.getLogger(__name__)


@contextmanager
def copies_folder(
    config: RunConfig, joins: bool
) -> Iterator[tuple[MemoryPlan | None, Callable[[], None]]]:
    """Hold a folder for copies in memory while the block runs, and remove it then.

    Args:
        joins: The job may have other hosts, whose copies this one cannot read: then there are none.

    Yields:
        The settings of the copies, or None if there are none; and a function that lets the folder
        stay for `KEPT_S` after the block.
    """
    with ExitStack() as undo:
        keep: Callable[[], None] = lambda: None  # noqa: E731
        plan = None
        if config.memory != "off" and not joins:
            every, ranks = memory_interval(config.memory), config.ranks * (config.groups or 1)
            try:
                _sweep()
                limit = int(free_memory() * _SHARE)
                folder = _held(config, undo)
                keep = undo.enter_context(vanishing(folder, KEPT_S))
                plan = MemoryPlan(folder, every, limit // ranks)
            except (OSError, SupervisorError) as error:
                logger.warning("no copies of the state in memory: %s", error)
        yield plan, keep


def _sweep() -> None:
    """Remove folders of this user that no process uses, and whose remover was killed as well."""
    for folder in ROOT.glob(f"fft-{os.geteuid()}-*"):
        with suppress(OSError, StoreError):
            if time.time() - folder.stat().st_mtime > 2 * KEPT_S:
                with LocalStore(folder).hold():
                    shutil.rmtree(folder)


def _held(config: RunConfig, undo: ExitStack) -> Path:
    """Return the folder of this command, or a new one if another `fft run` uses that."""
    folder = ROOT / f"fft-{os.geteuid()}-{_key(config)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        if (wrong := why_not_private(folder)) is not None:
            raise StoreError(f"{folder} {wrong}")
        undo.enter_context(LocalStore(folder).hold())
    except StoreError:  # the same command runs twice, or another user has made it
        folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=ROOT))
        undo.enter_context(LocalStore(folder).hold())
    return folder


def _key(config: RunConfig) -> str:
    """Return a name for the command: its script, arguments, folder, and shape of the job."""
    place = "" if config.checkpoint is None else str(config.checkpoint.place)
    shape = config.groups, config.ranks, config.first_group, config.all_groups
    told = json.dumps([os.getcwd(), list(config.script), shape, place])
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def about_memory() -> str:
    """Describe in a line how much memory copies of the state may take on this host."""
    try:
        free = free_memory()
    except OSError as error:
        return f"copies in memory (fft run --memory): none, as {error}"
    most, state = (f"{free * share / 1e9:.3g} GB" for share in (_SHARE, _SHARE / COPIES))
    return (
        f"copies in memory (fft run --memory): all ranks of this host take at most {most} in "
        f"{ROOT} and beside it, half of what is free now, so their states may have {state} together"
    )


def free_memory() -> int:
    """Return the bytes that shared memory can still take on this host, at most its free memory."""
    disk = os.statvfs(ROOT)
    found = [disk.f_bavail * disk.f_frsize]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    try:
        most, used = ((_CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        found.append(int(most) - int(used))
    except (OSError, ValueError):  # no limit, or another version of cgroups
        pass
    return max(0, min(found))
