"""The file ``job.json`` in a trace directory: how to reach the job, and how it ended.

``fft run`` writes it, so that ``fft watch DIR`` and ``fft drain GROUP DIR`` need no address. It
holds no token, only the path of the token's file. Only its owner can read it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from fft.operate.client import OperatorError, bus_url
from fft.trace.starts import newest_run, root_of
from fft.util.files import is_disk_full
from fft.util.pidfd import is_there

NAME = "job.json"
_TOKEN = ("FFT_TOKEN", "FFT_TOKEN_FILE")


@dataclass(frozen=True)
class JobFile:
    """The contents of the file."""

    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables by which a process finds the job."""
    pid: int = 0
    """The ``fft run`` whose end is that of the job, or 0 if another process serves the bus."""
    host: str = ""
    ended: str = ""
    """How the job ended; empty while it runs."""
    owner: int = field(default_factory=os.geteuid)
    """Id of the user who owns the file."""

    @classmethod
    def of(cls, folder: Path, settings: Mapping[str, str], serves: bool = True) -> Self:
        """Return the file for a job that this process starts, with an absolute path of the token
        file. ``serves``: this process serves the bus."""
        found = dict(settings)
        if path := found.get("FFT_TOKEN_FILE"):
            found["FFT_TOKEN_FILE"] = os.path.abspath(path)
        return cls(root_of(folder), found, os.getpid() * serves, socket.gethostname())

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the contents of the file in ``folder``, or None if there is no readable one."""
        try:
            with (folder / NAME).open() as file:
                owner = os.fstat(file.fileno()).st_uid
                return cls(folder, **json.load(file), owner=owner)
        except (OSError, ValueError, TypeError):
            return None

    def write(self) -> None:
        """Write the file; a full disk is ignored, because the job must go on."""
        told = asdict(self)
        del told["folder"], told["owner"]
        new = self.folder / f".{NAME}.{os.getpid()}"
        try:
            new.unlink(missing_ok=True)
            new.touch(0o600, exist_ok=False)  # the URL of a NATS bus may hold a password
            new.write_text(json.dumps(told, indent=1) + "\n")
            new.replace(self.folder / NAME)
        except OSError as error:
            if not is_disk_full(error):
                raise

    def note_end(self, text: str) -> None:
        """Write how the job has ended."""
        replace(self, ended=text).write()

    def how_it_ended(self) -> str | None:
        """Return a sentence that says how the job ended and which commands show more, or None while
        it runs."""
        ended = self.ended
        if not ended and self.pid and self.host == socket.gethostname() and not is_there(self.pid):
            ended = f"its `fft run` (pid {self.pid}) was killed"
        if not ended:
            return None
        return f"the job of {self.folder} has ended: {ended}. {look_further(self.folder)}"

    def reread_how_it_ended(self) -> str | None:
        """Read the file again, and return `how_it_ended`."""
        return (JobFile.read(self.folder) or self).how_it_ended()


def look_further(folder: Path) -> str:
    """Return the commands that show what happened in a job."""
    return f"Look at it with: fft report {folder}; fft audit {folder}"


def find_job(
    bus: str | None, folder: Path | None, env: MutableMapping[str, str] = os.environ
) -> tuple[str, JobFile | None]:
    """Return the URL of a job's bus, and its `JobFile` if that named the bus; then also set
    ``FFT_TOKEN_FILE``.

    The first of these that is given selects the job: ``folder``, ``bus`` (a URL or a trace
    directory), ``FFT_BUS``, the newest run in the current directory.

    Raises:
        OperatorError: No job is named or found.
    """
    if folder is None and bus is not None and "://" not in bus and Path(bus).is_dir():
        folder = Path(bus)
    if folder is None and not bus and not env.get("FFT_BUS"):
        folder = newest_run(Path())
        if folder is None or JobFile.read(root_of(folder)) is None:
            return bus_url(None, env), None  # raises the error
    if folder is None:
        return bus_url(bus, env), None
    found = JobFile.read(root_of(folder)) or JobFile.read(folder / "traces")
    if found is None:
        raise OperatorError(
            f"{folder} has no {NAME} that this user may read: expected the --trace-dir of an "
            "`fft run`. Otherwise pass --bus, or set FFT_BUS; `fft serve` and `fft run` print it"
        )
    if found.owner not in (os.geteuid(), 0):
        raise OperatorError(
            f"{found.folder / NAME} belongs to the user with id {found.owner}, whose bus this "
            "command would obey. If you trust that user, pass the URL of the bus with --bus"
        )
    if (path := found.settings.get("FFT_TOKEN_FILE")) is not None:
        for name in _TOKEN:
            env.pop(name, None)
        env["FFT_TOKEN_FILE"] = path
    return found.settings["FFT_BUS"], found


def refuse_ended(job: JobFile | None) -> None:
    """Raise OperatorError if the job has ended, because no process is left to receive a request."""
    if job is not None and (how := job.how_it_ended()) is not None:
        raise OperatorError(how)


def split_folder(names: Sequence[str]) -> tuple[list[str], Path | None]:
    """Split a list of group names from the trace directory at its end, if there is one."""
    *groups, last = names
    if groups and (Path(last) / NAME).is_file():
        return groups, Path(last)
    return list(names), None
