"""The trace directory: one job holds it, and each start of that job has a folder in it.

A file lock, which the kernel releases when the process ends, keeps other jobs out. Hosts that join
one job may share a directory: they hold the lock together, and the lock file names their job.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fft.launch.supervisor import SupervisorError
from fft.trace.starts import folder_of, start_folder
from fft.util.files import is_disk_full, locked

_LOCK = ".job.lock"
_SETTLE_S = 2.0
"""How long another process may hold the lock exclusively while it writes its job into the file, in
seconds."""
_AGAIN_S = 0.02

_LAUNCHERS = (
    ("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"),
    ("srun", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)
"""Launchers with three environment variables each: one that identifies the launcher, the number of
processes, and the number of this process."""

logger = logging.getLogger(__name__)


def refuse_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raise SupervisorError if another launcher starts several copies of this `fft run`.

    Each copy would be a separate job.
    """
    for name, sign, count, number in _LAUNCHERS:
        if environ.get(sign) and (found := environ.get(count, "1")) != "1":
            raise SupervisorError(
                f"{name} starts {found} copies of `fft run` (this is number "
                f"{environ.get(number, '?')}), and each would be a separate job: start `fft run` "
                f"once, without {name}; it starts the ranks itself. For several hosts, start "
                "`fft serve` once and `fft run --join` on each host"
            )


@contextmanager
def held_traces(root: Path, job: str | None) -> Iterator[None]:
    """Hold ``root`` for one job while the block runs.

    Args:
        root: The directory for the traces of all starts; created if absent.
        job: Name of the job on its bus, for a process that joins it and shares ``root`` with its
            other hosts; None for a job of this process alone.

    Raises:
        SupervisorError: Another job holds ``root``, or it cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / _LOCK).open("a+")
    except OSError as error:
        raise SupervisorError(
            f"--trace-dir {root} cannot be written: {error.strerror}; name another, or free room "
            "there"
        ) from error
    with file:
        if not _hold(file, root, job):
            logger.warning(
                "the file system of %s has no locks: a second job with this --trace-dir is not "
                "refused, so do not start one",
                root,
            )
        yield


def folder_for(root: Path, start: str | None) -> Path:
    """Return the folder in ``root`` for the traces of the start that begins now.

    Args:
        start: Name of the start on the bus that this process joins; None if this process starts the
            job.
    """
    if start is not None:
        return folder_of(root, start)
    folder = start_folder(root)
    if folder != root:
        logger.warning(
            "%s holds the traces of an earlier start; this one writes to %s", root, folder
        )
    return folder


def _hold(file: IO[str], root: Path, job: str | None) -> bool:
    """Lock ``file``; return False if its file system has no locks.

    Raises:
        SupervisorError: Another job holds the lock.
    """
    deadline = time.monotonic() + _SETTLE_S
    while True:
        try:
            if not locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
                return False
            _write(file, job)
            if job is None:
                return True
            # not atomic: another process may take the lock in between; `_read` then shows its job
            locked(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if job is None or not _shares(file):
                if time.monotonic() > deadline or job is None:
                    raise SupervisorError(_in_use(root, _read(file))) from None
                time.sleep(_AGAIN_S)
                continue
        if (found := _read(file)).get("job") == job:
            return True
        raise SupervisorError(_in_use(root, found))


def _shares(file: IO[str]) -> bool:
    """Take the lock together with its present holders; return whether that succeeded."""
    try:
        return locked(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False


def _write(file: IO[str], job: str | None) -> None:
    text = json.dumps({"job": job, "pid": os.getpid(), "host": socket.gethostname()})
    try:
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), text.encode())
    except OSError as error:  # on a full disk only the name of the holder is missing
        if not is_disk_full(error):
            raise


def _read(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        found = json.loads(file.read())
    except ValueError:  # its holder is writing it
        return {}
    return found if isinstance(found, dict) else {}


def _in_use(root: Path, holder: Mapping[str, Any]) -> str:
    name = holder.get("job")
    job = "" if name is None else f", for job {name}"
    where = f"pid {holder.get('pid', '?')} on {holder.get('host', '?')}"
    return (
        f"--trace-dir {root} is in use by the `fft run` with {where}{job}: end it, or name "
        "another --trace-dir. One directory holds the traces of one job"
    )
