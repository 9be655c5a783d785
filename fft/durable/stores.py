"""Where checkpoints lie: a directory of this host, or any URL that fsspec can open.

A store holds directories of files, one level deep. On a local disk each file is fsynced before it
has its name, a directory is published by a rename, and its parent is fsynced then. An object store
has no rename: there a directory is whole when its manifest is there, which is written last.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol
from urllib.parse import urlsplit

from fft.util.errors import FftError
from fft.util.file_lock import locked
from fft.util.full_disk import is_disk_full

PARTIAL = ".partial-"
"""Between the name of a checkpoint and that of the attempt at it, while it is being written."""
REMOVED = "removed-"
"""Begins, in the place of an attempt, the name of what is being removed."""
_CHUNK = 4 * 1024 * 1024
_PASSING = frozenset({errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT})
"""Errors of network file systems that do not last: a handle that another host made stale."""
_PAUSES_S = (0.05, 0.5, 2.0)
"""Between the attempts at one operation."""
_WRITERS = ".writers.lock"
"""Shared by all processes of jobs that take checkpoints."""

logger = logging.getLogger(__name__)


class StoreError(FftError):
    """Checkpoints cannot be kept at this place: names it, the reason, and the mend."""


class NoRoom(StoreError):
    """The disk is full."""


class Store(Protocol):
    """Raises OSError where a file cannot be read or written."""

    url: str

    def prepare(self) -> None:
        """Make the place, and see that files can be written there. Raises StoreError, NoRoom."""

    def hold(self) -> AbstractContextManager[None]:
        """Keep the place for one job, where that can be had. Raises StoreError: another has it."""

    def at_work(self) -> AbstractContextManager[None]:
        """This process may write files of checkpoints: `is_at_work` tells others."""

    def is_at_work(self) -> bool | None:
        """Whether some process does; None: that cannot be known here."""

    def directories(self) -> list[str]:
        """Names of all directories."""

    def files(self, directory: str) -> dict[str, int]:
        """Names of its files → bytes of each; empty where there is no such directory."""

    def read(self, path: str) -> bytes:
        """A small file."""

    def digest(self, path: str) -> str:
        """SHA-256 of a file, in hex."""

    def write(self, path: str, data: bytes) -> None:
        """A small file, which is there as a whole or not at all. Durable on return."""

    @contextmanager
    def writing(self, path: str) -> Iterator[Path]:
        """A local file to write to, which is at ``path``, and durable, when the block ends well."""

    @contextmanager
    def reading(self, path: str) -> Iterator[Path]:
        """The file as a local one."""

    def rename(self, old: str, new: str) -> None:
        """Let a directory have another name; what had that is removed. Durable on return.

        Whoever is killed in between leaves ``old`` as it is, or the whole as ``new``.
        """

    def remove(self, directory: str) -> None:
        """A directory and its files; none is no error."""


class LocalStore:
    """Checkpoints in a directory of this host, perhaps of a file system that all hosts share."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = str(root)

    def prepare(self) -> None:
        if self._root.exists() and not self._root.is_dir():
            raise StoreError(
                f"{self._root} is a file, and checkpoints are directories: name a directory for "
                "them, which may be a new one"
            )
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._root) as file:
                file.write(b"?")
                file.flush()
        except OSError as error:
            text = f"no checkpoints can be written to {self._root}: {error}"
            if is_disk_full(error):
                raise NoRoom(
                    f"{text}. What is there stays as it is: free room for one checkpoint more than "
                    "are kept, and give the same command again"
                ) from error
            raise StoreError(f"{text}; give a directory that this user may write to") from error

    @contextmanager
    def hold(self) -> Iterator[None]:
        with (self._root / ".job.lock").open("a") as file:
            try:
                locks = locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"another job keeps its checkpoints in {self._root}, and runs: end it first, "
                    "or name another place"
                ) from None
            if not locks:
                logger.warning(
                    "the file system of %s has no locks: a second job there is not refused, so see "
                    "to it that there is none",
                    self._root,
                )
            yield  # the kernel lets go of it, however this process ends

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self._writers_file() as file:
            locked(file, fcntl.LOCK_SH)  # nobody has it for longer than a look
            try:
                yield
            finally:
                with suppress(OSError):  # by name: a process that was forked meanwhile has it, too
                    fcntl.flock(file, fcntl.LOCK_UN)

    def _writers_file(self) -> IO[str]:
        try:
            return (self._root / _WRITERS).open("a")
        except FileNotFoundError:
            self._root.mkdir(parents=True, exist_ok=True)
            return (self._root / _WRITERS).open("a")

    def is_at_work(self) -> bool | None:
        try:
            with (self._root / _WRITERS).open("r+") as file:
                return False if locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB) else None
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True

    def directories(self) -> list[str]:
        if not self._root.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self._root) if entry.is_dir())

    def files(self, directory: str) -> dict[str, int]:
        try:
            entries = list(os.scandir(self._root / directory))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found: dict[str, int] = {}
        for entry in entries:
            with suppress(FileNotFoundError):  # it was being written, or removed
                if entry.is_file() and not entry.name.startswith("."):
                    found[entry.name] = entry.stat().st_size
        return found

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def digest(self, path: str) -> str:
        with (self._root / path).open("rb") as file:
            return digest_of(file)

    def write(self, path: str, data: bytes) -> None:
        with self.writing(path) as target:
            target.write_bytes(data)

    @contextmanager
    def writing(self, path: str) -> Iterator[Path]:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.new")
        try:
            yield new
            _sync(new)
            _rename(new, target)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)

    @contextmanager
    def reading(self, path: str) -> Iterator[Path]:
        yield self._root / path

    def rename(self, old: str, new: str) -> None:
        target = self._root / new
        aside = self._aside(new) if target.exists() else None
        try:
            _rename(self._root / old, target)
        except BaseException:
            if aside is not None:
                _rename(aside, target)
            raise
        _sync_folder(self._root)
        if aside is not None:
            try:
                shutil.rmtree(aside)
            except OSError as error:
                logger.warning("%s cannot be removed, which %s replaces: %s", aside, new, error)

    def _aside(self, directory: str) -> Path:
        """Let a directory have a name by which it is not found; half of it must not pass for it."""
        step, _, attempt = directory.partition(PARTIAL)
        name = f"{step}{PARTIAL}{REMOVED}{os.getpid()}"
        gone = self._root / (f"{name}-{attempt}" if attempt else name)
        shutil.rmtree(gone, ignore_errors=True)
        _rename(self._root / directory, gone)
        _sync_folder(self._root)
        return gone

    def remove(self, directory: str) -> None:
        place = self._root / directory
        if not place.exists():
            return
        # readers must not take an attempt that has its manifest for whole while its files go
        is_aside = directory.partition(PARTIAL)[2].startswith(REMOVED)
        shutil.rmtree(place if is_aside else self._aside(directory))


class UrlStore:
    """Checkpoints behind a URL of fsspec, such as ``s3://bucket/path``."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise StoreError(
                f"checkpoints cannot be kept at {url}: {error}. For s3:// install fft-torch[s3]"
            ) from error
        self._root = str(root).rstrip("/")

    def prepare(self) -> None:
        probe = f"{self._root}/.fft-probe"
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(probe, b"?")
            self._fs.rm_file(probe)
        except Exception as error:  # each file system raises errors of its own
            raise StoreError(
                f"no checkpoints can be written to {self.url}: {type(error).__name__}: {error}"
            ) from error

    @contextmanager
    def hold(self) -> Iterator[None]:
        yield  # an object store has no lock that ends with its owner

    @contextmanager
    def at_work(self) -> Iterator[None]:
        yield

    def is_at_work(self) -> bool | None:
        return None

    def directories(self) -> list[str]:
        return sorted(name for name, entry in self._ls("") if entry["type"] == "directory")

    def files(self, directory: str) -> dict[str, int]:
        found = self._ls(directory)
        return {name: int(entry["size"]) for name, entry in found if entry["type"] == "file"}

    def _ls(self, path: str) -> list[tuple[str, dict[str, Any]]]:
        with as_os_error(self.url):
            try:
                self._fs.invalidate_cache()
                entries = self._fs.ls(f"{self._root}/{path}".rstrip("/"), detail=True)
            except FileNotFoundError:
                return []
        return [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries]

    def read(self, path: str) -> bytes:
        with as_os_error(self.url):
            return bytes(self._fs.cat_file(f"{self._root}/{path}"))

    def digest(self, path: str) -> str:
        with as_os_error(self.url), self._fs.open(f"{self._root}/{path}", "rb") as file:
            return digest_of(file)

    def write(self, path: str, data: bytes) -> None:
        with as_os_error(self.url):
            self._fs.makedirs(f"{self._root}/{path}".rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(f"{self._root}/{path}", data)

    @contextmanager
    def writing(self, path: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="fft-checkpoint-") as folder:
            local = Path(folder, path.rpartition("/")[2])
            yield local
            with as_os_error(self.url):
                self._fs.makedirs(f"{self._root}/{path}".rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(local), f"{self._root}/{path}")

    @contextmanager
    def reading(self, path: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="fft-checkpoint-") as folder:
            local = Path(folder, path.rpartition("/")[2])
            with as_os_error(self.url):
                self._fs.get_file(f"{self._root}/{path}", str(local))
            yield local

    def rename(self, old: str, new: str) -> None:
        """Copied, the manifest last."""
        self.remove(new)
        with as_os_error(self.url):
            self._fs.makedirs(f"{self._root}/{new}", exist_ok=True)
            for file in sorted(self.files(old), key=lambda file: file == MANIFEST):
                self._fs.cp_file(f"{self._root}/{old}/{file}", f"{self._root}/{new}/{file}")
        self.remove(old)

    def remove(self, directory: str) -> None:
        with as_os_error(self.url):
            for file in sorted(self.files(directory), key=lambda file: file != MANIFEST):
                self._fs.rm_file(f"{self._root}/{directory}/{file}")
            if self._fs.exists(f"{self._root}/{directory}"):  # where directories are real
                self._fs.rm(f"{self._root}/{directory}", recursive=True)


MANIFEST = "manifest.json"
"""A checkpoint without it is none."""


@contextmanager
def as_os_error(url: str) -> Iterator[None]:
    """Raise whatever a remote file system raises as OSError: each has errors of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


def open_store(place: str) -> Store:
    """The store at a path, or at a URL of fsspec's. Touches nothing yet. Raises StoreError."""
    scheme = urlsplit(place).scheme if "://" in place else ""
    if scheme in ("", "file"):
        path = place.removeprefix("file://")
        if not path:
            raise StoreError("no place for checkpoints: give a directory, or a URL")
        return LocalStore(Path(path).absolute())
    return UrlStore(place)


def digest_of(file: BinaryIO) -> str:
    """SHA-256 of what is left to read, in hex."""
    hasher = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        hasher.update(chunk)
    return hasher.hexdigest()


def _rename(old: Path, new: Path) -> None:
    """Rename ``old`` to ``new``, which is not there, or is a file that ``old`` replaces.

    After an error that may pass it is tried again. A network file system may have renamed it all
    the same, which shows by ``old`` being gone.
    """
    is_again = False

    def rename() -> None:
        nonlocal is_again
        try:
            old.rename(new)
        except FileNotFoundError:
            if not (is_again and new.exists()):
                raise
        except OSError:
            is_again = True
            raise

    _tried_again(rename)


def _sync_folder(path: Path) -> None:
    """Make the names in a directory durable; an error that may pass is tried again.

    This must not be done for the data of a file: after an error the kernel may have dropped them.
    """
    _tried_again(lambda: _sync(path))


def _tried_again(work: Callable[[], None]) -> None:
    """Carry out ``work``, and again after an error that passes on network file systems."""
    for pause_s in _PAUSES_S:
        try:
            work()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            logger.warning("%s; it is tried again in %g s", error, pause_s)
            time.sleep(pause_s)
        else:
            return
    work()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
