"""Detect a death before the kernel has torn the process down, with a robust mutex in shared memory.

pidfd and connections report the end of a killed process only when its memory is freed: tens of
milliseconds for a process with torch in it. The kernel releases the locks that its threads hold
*first*: a thread that waits for a robust mutex in shared memory wakes at once and receives the
error that the owner died (pthread_mutexattr_setrobust(3); Linux,
Documentation/locking/robust-futexes).

The trainer's main thread holds the mutex for as long as it trains (`Hold`), and releases it when it
leaves or the interpreter ends. A thread of its supervisor, or of its monitor if it has no
supervisor, waits for it (`DeathMutex`). Uses the C library's mutexes through ctypes; touches one
page of shared memory and one thread per child.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress

_PAGE = mmap.PAGESIZE
_HELD_AT = 256
"""Offset of the byte that marks the mutex as held; the mutex (about 40 bytes) is before it."""
_ROBUST = _SHARED = 1  # PTHREAD_MUTEX_ROBUST, PTHREAD_PROCESS_SHARED
_LOOK_S = 0.1
"""Polling interval until a child that has just started holds its mutex; no event signals it."""


def supported() -> bool:
    """Whether this system has robust mutexes and memory files."""
    names = ("pthread_mutexattr_setrobust", "pthread_mutexattr_setpshared")
    return hasattr(os, "memfd_create") and all(hasattr(_libc(), name) for name in names)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class _Page:
    """The shared page. It stays mapped for as long as anything may use the mutex in it."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _PAGE)
        self._bytes = (ctypes.c_char * _PAGE).from_buffer(self._map)
        self.mutex = ctypes.byref(self._bytes)

    @property
    def held(self) -> bool:
        """Whether the other process has marked the mutex as held."""
        return self._map[_HELD_AT] != 0

    def note(self, held: bool) -> None:
        """Mark the mutex as held, or as released."""
        self._map[_HELD_AT] = held


class DeathMutex:
    """The waiting side of the mutex. Another process inherits ``fd``.

    Args:
        fd: An inherited descriptor of such a mutex, owned by this object from now on; None: create
            a new mutex.

    Raises:
        OSError, ValueError: The mutex cannot be created, or ``fd`` is not a page of memory.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("fft-death-mutex") if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, _PAGE)
            self._page = _Page(self.fd)
            if fd is None:
                _make(self._page.mutex)
        except BaseException:
            os.close(self.fd)
            raise
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call ``on_death``, on a thread of this object, if the child dies holding the mutex."""
        self._thread = threading.Thread(
            target=self._run, args=(on_death,), name="fft-death-mutex", daemon=True
        )
        self._thread.start()

    def _run(self, on_death: Callable[[], None]) -> None:
        libc = _libc()
        while not self._closed.is_set():
            if not self._page.held:
                self._closed.wait(_LOOK_S)
            elif libc.pthread_mutex_lock(self._page.mutex) == errno.EOWNERDEAD:
                on_death()
                return
            else:  # released; the process may acquire it again
                libc.pthread_mutex_unlock(self._page.mutex)

    def close(self) -> None:
        """Release the resources. The child must have ended, so that the mutex is free."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_S * 10)
        os.close(self.fd)


class Hold:
    """The trainer's side: the mutex is held from construction until ``release`` or death.

    Main thread only. Raises OSError or ValueError if ``fd`` is not such a mutex or it is already
    held.
    """

    def __init__(self, fd: int) -> None:
        self._page = _Page(fd)
        self._owner = os.getpid(), threading.get_ident()
        if (code := _libc().pthread_mutex_trylock(self._page.mutex)) != 0:
            raise OSError(code, os.strerror(code))
        self._page.note(held=True)
        self._held = True
        atexit.register(self.release)  # An orderly end is reported by the exit code.

    def release(self) -> None:
        """Release the mutex, so that the end of the process is not taken for a death. Idempotent.

        It has no effect on another thread, or in a forked child, which does not hold the mutex.
        """
        if self._held and (os.getpid(), threading.get_ident()) == self._owner:
            self._held = False
            self._page.note(held=False)
            _libc().pthread_mutex_unlock(self._page.mutex)
            atexit.unregister(self.release)


def hold(setting: str | None) -> Hold | None:
    """Hold the mutex that ``FFT_DEATH_MUTEX_FD`` names, if this process has inherited it."""
    if setting is None or not setting.isdecimal():
        return None
    with suppress(OSError, ValueError):  # A process between us and the supervisor has closed it.
        if os.readlink(f"/proc/self/fd/{setting}").startswith("/memfd:fft-death-mutex"):
            return Hold(int(setting))
    return None


def _make(mutex: object) -> None:
    libc, attributes = _libc(), (ctypes.c_char * 64)()
    for code in (
        libc.pthread_mutexattr_init(attributes),
        libc.pthread_mutexattr_setpshared(attributes, _SHARED),
        libc.pthread_mutexattr_setrobust(attributes, _ROBUST),
        libc.pthread_mutex_init(mutex, attributes),
    ):
        if code != 0:
            raise OSError(code, os.strerror(code))
