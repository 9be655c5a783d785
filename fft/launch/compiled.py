"""Where the processes of a job keep what torch's inductor has compiled.

A process that comes for a lost one finds there what that one has compiled. Makes the folder, reads
which processor this is, and removes a folder that nobody will ask for again.
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
"""torch's own; a user's is left as it is."""
FOLDER = ".compiled"
"""Beside the checkpoints of a job on one host: the same command goes on with it, too."""


@contextmanager
def compile_cache(
    config: RunConfig, joins: bool, environ: Mapping[str, str] = os.environ
) -> Iterator[Path | None]:
    """A folder for the time of the job; None: the user has named one, which is inherited.

    ``joins``: other hosts take part. Raises SupervisorError: the folder cannot be made.
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
    """None: there are none, or they are not on a disk of this host alone."""
    place = "" if config.checkpoint is None else str(config.checkpoint.place)
    if not place or "://" in place or joins:
        return None
    return Path(place).absolute() / FOLDER / _processor()


def _processor() -> str:
    """What was compiled for one kind may be wrong for another, to which the disk has moved."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    words = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    told = "\n".join([platform.machine(), *sorted(words)])
    return f"{platform.machine()}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def _make(folder: Path) -> None:
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)  # pickles lie there: nobody else may write
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
