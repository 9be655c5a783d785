"""The folder in which the processes of a job cache the code that torch's inductor compiles.

A process that replaces a lost one finds the code that the lost one compiled. This module creates
the folder, identifies the processor, and removes a folder that no later start can use.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fft.launch.supervisor import RunConfig
from fft.launch.supervisor.config import SupervisorError
from fft.util.remove_after_death import vanishing

SETTING = "TORCHINDUCTOR_CACHE_DIR"
"""torch's variable for the cache directory; a value that the user has set is kept."""
FOLDER = ".compiled"
"""Folder beside the checkpoints of a job on one host, so that running the same command again
reuses the compiled code."""


@contextmanager
def compile_cache(
    config: RunConfig, joins: bool, environ: Mapping[str, str] = os.environ
) -> Iterator[Path | None]:
    """Provide the folder for the time of the job.

    Args:
        joins: Other hosts take part in the job.

    Yields:
        The folder, or None if the user has set one, which the processes inherit.

    Raises:
        SupervisorError: The folder cannot be created.
    """
    if environ.get(SETTING):
        yield None
    elif (kept := _beside_checkpoints(config, joins)) is not None:
        _make(kept)
        yield kept
    else:
        with _temporary() as folder, vanishing(folder):
            yield folder


@contextmanager
def _temporary() -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(prefix="fft-compiled-", ignore_cleanup_errors=True)
    except OSError as error:
        raise _not_made("the folder for temporary files (TMPDIR)", error) from error
    with made as name:
        yield Path(name)


def _beside_checkpoints(config: RunConfig, joins: bool) -> Path | None:
    """Return the folder beside the checkpoints.

    None if there are no checkpoints, or if other hosts may use their place.
    """
    place = "" if config.checkpoint is None else str(config.checkpoint.place)
    if not place or "://" in place or joins:
        return None
    return Path(place).absolute() / FOLDER / _processor()


def _processor() -> str:
    """Return a name for the kind of processor.

    Code compiled for one kind may be wrong for another, and the disk may move between hosts.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    words = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    told = "\n".join([platform.machine(), *sorted(words)])
    return f"{platform.machine()}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def _make(folder: Path) -> None:
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)  # holds pickles: only this user may write
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_made(str(folder), error) from error


def _not_made(place: str, error: OSError) -> SupervisorError:
    return SupervisorError(
        f"nothing compiled can be kept in {place}: {error.strerror}; make room there, or name "
        f"another folder in {SETTING}"
    )
