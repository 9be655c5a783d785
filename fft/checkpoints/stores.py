"""Stores of checkpoints: a directory of this host, or any URL that fsspec can open.

A store contains directories of files, one level deep. On a local disk each file is fsynced before
its rename. A directory is published by a rename and an fsync of its parent. An object store has no
rename; its directories are complete once their manifest exists, which is written last.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, TypeVar
from urllib.parse import urlsplit

from fft.errors import CheckpointError
from fft.util.files import is_disk_full, locked
from fft.util.remove_after_death import LOCK

PARTIAL = ".partial-"
"""Separator of checkpoint and attempt in the name of an unfinished directory."""
REMOVED = "removed-"
"""Prefix that replaces the attempt in the name of a directory during its removal."""
_CHUNK = 4 * 1024 * 1024
_PASSING = frozenset({errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT})
"""Transient errors of network file systems, such as a handle that another host made stale.

This list is narrower than `fft.util.error_places.may_pass`: after EIO, for example, written data
may be lost, so the attempt at the checkpoint fails instead.
"""
_PAUSES_S = (0.05, 0.5, 2.0)
"""Pauses between the attempts at one operation."""
_REFUSED = re.compile(r"auth|credential|token|expired|denied|forbidden|\b40[013]\b", re.IGNORECASE)
"""Text of an error of a remote file system that other credentials may mend."""
_WRITERS = ".writers.lock"
"""Lock file shared by all processes that write checkpoints."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class StoreError(CheckpointError):
    """A store is not usable; the message gives its location, the reason and the fix."""


class NoRoom(StoreError):
    """The disk is full."""


class Store(Protocol):
    """A location of checkpoints. Methods raise OSError if a file cannot be read or written."""

    url: str

    def prepare(self) -> None:
        """Create the location and check that it is writable. Raises StoreError, NoRoom."""

    def hold(self) -> AbstractContextManager[None]:
        """Lock the location for one job, if supported. Raises StoreError if another job has it."""

    def at_work(self) -> AbstractContextManager[None]:
        """Mark this process as a writer of checkpoints, which `is_at_work` reports to others."""

    def is_at_work(self) -> bool | None:
        """Return whether a process is inside `at_work`, or None if the store cannot detect it."""

    def directories(self) -> list[str]:
        """Return the names of all directories, and of all links."""

    def files(self, directory: str) -> dict[str, int]:
        """Return the size in bytes of each file by name; empty without such a directory."""

    def read(self, path: str) -> bytes:
        """Read a small file."""

    def digest(self, path: str) -> str:
        """Return the SHA-256 of a file in hex."""

    def write(self, path: str, data: bytes) -> None:
        """Write a small file atomically; it is durable on return."""

    @contextmanager
    def writing(self, path: str) -> Iterator[Path]:
        """Yield a local file to write to; it is durable at ``path`` if the block does not raise."""

    @contextmanager
    def reading(self, path: str) -> Iterator[Path]:
        """Yield the file as a local one."""

    def rename(self, old: str, new: str) -> None:
        """Rename a directory and remove the previous ``new``, if any; durable on return.

        A kill in between leaves ``old`` unchanged, or a complete ``new``.
        """

    def remove(self, directory: str) -> None:
        """Remove a directory and its files; a missing directory is not an error.

        If it is a link, only the link is removed: the files that it names are not the store's.
        """


class LocalStore:
    """Checkpoints in a directory, which may be on a file system that all hosts share."""

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
        with (self._root / LOCK).open("a") as file:
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
            yield  # the kernel releases the lock however this process ends

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self._writers_file() as file:
            locked(file, fcntl.LOCK_SH)  # `is_at_work` holds the exclusive lock only briefly
            try:
                yield
            finally:
                with suppress(OSError):  # explicit, because a forked child shares the lock
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
        entries = os.scandir(self._root)
        # not following links, because a link to a disk that is away must not hide the others
        return sorted(e.name for e in entries if e.is_symlink() or e.is_dir(follow_symlinks=False))

    def files(self, directory: str) -> dict[str, int]:
        try:
            entries = list(os.scandir(self._root / directory))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        found: dict[str, int] = {}
        for entry in entries:
            with suppress(FileNotFoundError):  # another process has renamed or removed it
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
        aside = self._aside(new) if os.path.lexists(target) else None
        try:
            _rename(self._root / old, target)
        except BaseException:
            if aside is not None:
                _rename(aside, target)
            raise
        _sync_folder(self._root)
        if aside is not None:
            try:
                _discard(aside)
            except OSError as error:
                logger.warning("%s cannot be removed, which %s replaces: %s", aside, new, error)

    def _aside(self, directory: str) -> Path:
        """Rename a directory before its removal, so readers never find it partly removed."""
        step, _, attempt = directory.partition(PARTIAL)
        if (place := self._root / directory).is_symlink():
            logger.warning("%s is a link: it is removed, %s stays", place, os.readlink(place))
        name = f"{step}{PARTIAL}{REMOVED}{os.getpid()}"
        gone = self._root / (f"{name}-{attempt}" if attempt else name)
        with suppress(OSError):
            _discard(gone)
        _rename(place, gone)
        _sync_folder(self._root)
        return gone

    def remove(self, directory: str) -> None:
        place = self._root / directory
        if not os.path.lexists(place):
            return
        # Readers must not treat an attempt with a manifest as complete during its removal.
        is_aside = directory.partition(PARTIAL)[2].startswith(REMOVED)
        _discard(place if is_aside else self._aside(directory))


class UrlStore:
    """Checkpoints at a URL of fsspec, such as ``s3://bucket/path``."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, self._root = self._opened()
        except (ImportError, ValueError) as error:
            raise StoreError(
                f"checkpoints cannot be kept at {url}: {error}. For s3:// install fft-torch[s3]"
            ) from error

    def _opened(self) -> tuple[Any, str]:
        """Return a new file system, which reads the credentials, and the path of this store."""
        import fsspec

        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        files, root = fsspec.core.url_to_fs(self.url, **options)
        return files, str(root).rstrip("/")

    def _do(self, work: Callable[[Any], T]) -> T:
        """Return ``work(file system)``; after refused credentials, do it with new ones.

        A file system reads a file of credentials only once, and short-lived ones are renewed there.
        """
        with as_os_error(self.url):
            try:
                return work(self._fs)
            except Exception as error:
                if not _may_have_expired(error):
                    raise
                refused = error
            self._fs, _ = self._opened()
            try:
                return work(self._fs)
            except Exception as error:
                raise error from refused

    def prepare(self) -> None:
        probe = f"{self._root}/.fft-probe"

        def work(files: Any) -> None:
            files.makedirs(self._root, exist_ok=True)
            files.pipe_file(probe, b"?")
            files.rm_file(probe)

        try:
            self._do(work)
        except OSError as error:
            raise StoreError(
                f"no checkpoints can be written to {self.url}: {type(error).__name__}: {error}"
            ) from error

    @contextmanager
    def hold(self) -> Iterator[None]:
        yield  # an object store has no lock that is released when its owner dies

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
        def work(files: Any) -> list[dict[str, Any]]:
            files.invalidate_cache()
            return list(files.ls(f"{self._root}/{path}".rstrip("/"), detail=True))

        try:
            entries = self._do(work)
        except FileNotFoundError:
            return []
        return [(entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries]

    def read(self, path: str) -> bytes:
        return bytes(self._do(lambda files: files.cat_file(f"{self._root}/{path}")))

    def digest(self, path: str) -> str:
        def work(files: Any) -> str:
            with files.open(f"{self._root}/{path}", "rb") as file:
                return digest_of(file)

        return self._do(work)

    def write(self, path: str, data: bytes) -> None:
        def work(files: Any) -> None:
            files.makedirs(f"{self._root}/{path}".rpartition("/")[0], exist_ok=True)
            files.pipe_file(f"{self._root}/{path}", data)

        self._do(work)

    @contextmanager
    def writing(self, path: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="fft-checkpoint-") as folder:
            local = Path(folder, path.rpartition("/")[2])
            yield local

            def work(files: Any) -> None:
                files.makedirs(f"{self._root}/{path}".rpartition("/")[0], exist_ok=True)
                files.put_file(str(local), f"{self._root}/{path}")

            self._do(work)

    @contextmanager
    def reading(self, path: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="fft-checkpoint-") as folder:
            local = Path(folder, path.rpartition("/")[2])
            self._do(lambda files: files.get_file(f"{self._root}/{path}", str(local)))
            yield local

    def rename(self, old: str, new: str) -> None:
        """Copy the files, the manifest last, and remove the old directory."""
        self.remove(new)
        self._do(lambda files: files.makedirs(f"{self._root}/{new}", exist_ok=True))
        for file in sorted(self.files(old), key=lambda file: file == MANIFEST):
            places = f"{self._root}/{old}/{file}", f"{self._root}/{new}/{file}"
            self._do(methodcaller("cp_file", *places))
        self.remove(old)

    def remove(self, directory: str) -> None:
        place = f"{self._root}/{directory}"
        for file in sorted(self.files(directory), key=lambda file: file != MANIFEST):
            self._do(methodcaller("rm_file", f"{place}/{file}"))
        if self._do(lambda files: files.exists(place)):  # some file systems have directories
            self._do(lambda files: files.rm(place, recursive=True))


def _may_have_expired(error: Exception) -> bool:
    """Return whether other credentials may help; file systems use many classes for that.

    S3 answers an expired token with "400 Bad Request" where an answer has no body, which s3fs makes
    EINVAL.
    """
    if isinstance(error, OSError):
        refusals = (errno.EACCES, errno.EPERM, errno.EINVAL)
        return isinstance(error, PermissionError) or error.errno in refusals
    return _REFUSED.search(f"{type(error).__name__}: {error}") is not None


MANIFEST = "manifest.json"
"""Name of the manifest file, without which a directory is not a checkpoint."""


@contextmanager
def as_os_error(url: str) -> Iterator[None]:
    """Convert every exception of a remote file system to OSError; each has its own classes."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


def open_store(place: str) -> Store:
    """Return the store at a path or fsspec URL, without accessing it yet. Raises StoreError."""
    scheme = urlsplit(place).scheme if "://" in place else ""
    if scheme in ("", "file"):
        path = place.removeprefix("file://")
        if not path:
            raise StoreError("no place for checkpoints: give a directory, or a URL")
        return LocalStore(Path(path).absolute())
    return UrlStore(place)


def digest_of(file: BinaryIO) -> str:
    """Return the SHA-256 of the rest of ``file`` in hex."""
    hasher = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        hasher.update(chunk)
    return hasher.hexdigest()


def _discard(path: Path) -> None:
    """Remove a directory with its files, or a link without the files that it names."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _rename(old: Path, new: Path) -> None:
    """Rename ``old`` to ``new``, which does not exist or is a file to replace.

    A transient error is retried. A network file system may have renamed ``old`` despite the error;
    the retry then finds that ``old`` is gone.
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
    """Fsync a directory, which makes the names in it durable; retry transient errors.

    The fsync of a file must not be retried, because the kernel may drop data after an error.
    """
    _tried_again(lambda: _sync(path))


def _tried_again(work: Callable[[], None]) -> None:
    """Call ``work``, and retry after transient errors of network file systems."""
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
