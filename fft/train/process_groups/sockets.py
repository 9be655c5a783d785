"""Find TCP sockets of this process by their addresses, and shut them down one by one.

gloo exposes no handles of its connections, and shutting them down is the only way to free a thread
that waits in a gloo collective. So they are looked up in ``/proc/self/fd`` by an address that only
they can have. Only matching sockets are shut down; a listening socket never matches.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import socket
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar
from urllib.parse import urlsplit

from fft.util.kernel_limit import keep_alive

Address = tuple[str, int]
T = TypeVar("T")

_FD_DIR = "/proc/self/fd"
_TASK_DIR = "/proc/self/task"
_PR_SET_NAME, _PR_GET_NAME = 15, 16
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_UNTOUCHED = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
"""Socket type with which Python does not change the descriptor's flags.

Otherwise it would apply ``socket.setdefaulttimeout()``, while the owner may be connecting on
another thread.
"""
_MAPPED_V4 = "::ffff:"
# Two threads that each search for "the one new listener" must not do so at the same time.
_create_lock = threading.Lock()


def supported() -> bool:
    """Return whether this process can list its own file descriptors (Linux)."""
    return os.path.isdir(_FD_DIR)


def _plain(address: object) -> Address | None:
    """Return host and port of a socket address; an IPv4 address mapped into IPv6 becomes IPv4."""
    if not isinstance(address, tuple) or len(address) < 2:
        return None
    host = str(address[0]).removeprefix(_MAPPED_V4).partition("%")[0]
    return host, int(address[1])


def _tcp_sockets() -> Iterator[tuple[str, socket.socket]]:
    """Yield each TCP socket of this process as a duplicate, with its ``socket:[inode]`` link.

    A duplicate stays the same socket even if the original number is closed and reused meanwhile.
    """
    for name in os.listdir(_FD_DIR):
        with ExitStack() as held, suppress(OSError):  # closed since the listing
            link = os.readlink(f"{_FD_DIR}/{name}")
            if not link.startswith("socket:"):
                continue
            copy = os.dup(int(name))
            held.callback(os.close, copy)
            if os.readlink(f"{_FD_DIR}/{copy}") != link:
                continue
            sock = socket.socket(type=_UNTOUCHED, fileno=copy)
            held.callback(sock.detach)
            if sock.family in _FAMILIES:
                yield link, sock


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _listeners() -> dict[str, Address]:
    """Return the listening TCP sockets of this process, by link."""
    found: dict[str, Address] = {}
    for link, sock in _tcp_sockets():
        if _listens(sock) and (address := _plain(sock.getsockname())) is not None:
            found[link] = address
    return found


def listener_of(create: Callable[[], T], attempts: int = 10) -> tuple[T, Address]:
    """Call `create`, which opens one listening socket, and return its result and the address.

    `create` must be local and quick, because a lock is held meanwhile, so that two groups of one
    process do not take each other's listener. If code outside FFT opens a listener in the same
    instant, the result is dropped and `create` is called again.

    Raises:
        RuntimeError: No call of `attempts` showed exactly one new listener.
    """
    seen = 0
    for _ in range(attempts):
        with _create_lock:
            before = _listeners().keys()
            made = create()
            new = [a for link, a in _listeners().items() if link not in before]
        if len(new) == 1:
            return made, new[0]
        seen = len(new)
        del made
    raise RuntimeError(
        f"could not identify gloo's new listening socket: expected 1, got {seen} new ones in "
        f"{attempts} attempts; open no listening sockets in this process while its process group "
        "is being configured"
    )


def shut_down(own: frozenset[Address], peers: frozenset[Address], writing: bool) -> dict[str, int]:
    """Shut down each connection accepted at an `own` listener or made to a `peers` one.

    Args:
        own: Addresses of listeners of this process.
        peers: Addresses of listeners of other processes.
        writing: Shut down writing as well as reading.

    Returns:
        The number of unread bytes of each matching open connection, by link. gloo closes a
        connection once it has read its end.
    """
    if not own and not peers:
        return {}
    how = socket.SHUT_RDWR if writing else socket.SHUT_RD
    found: dict[str, int] = {}
    for link, sock in _tcp_sockets():
        if _matches(sock, own, peers):
            found[link] = _unread(sock)
            with suppress(OSError):  # the peer has closed it already
                sock.shutdown(how)
    return found


def keep_connections_alive(
    own: frozenset[Address] = frozenset(), peers: frozenset[Address] = frozenset(), port: int = 0
) -> None:
    """Have the kernel end connections (those of `shut_down`, or to a ``port``) on a broken link."""
    for _, sock in _tcp_sockets():
        with suppress(OSError):  # not connected
            if _matches(sock, own, peers) or sock.getpeername()[1] == port:
                keep_alive(sock)


def _unread(sock: socket.socket) -> int:
    held = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), termios.FIONREAD, held)
    except OSError:
        return 0
    return held[0]


def lose_connections(url: str) -> int:
    """Shut down every connection of this process to the server at ``url``, to inject a fault.

    Returns:
        The number of connections.

    Raises:
        ValueError: The URL has no host and port.
    """
    parts = urlsplit(url)
    if not parts.hostname or not parts.port:
        raise ValueError(
            f"{url}: expected a URL with host and port, whose connections can be closed"
        )
    found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    peers = frozenset(plain for *_, address in found if (plain := _plain(address)) is not None)
    return len(shut_down(frozenset(), peers, writing=True))


@contextmanager
def thread_name(name: str) -> Iterator[None]:
    """Give this thread the kernel's name `name`, which the threads that it starts inherit."""
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(16)
    libc.prctl(_PR_GET_NAME, before)
    libc.prctl(_PR_SET_NAME, name.encode())
    try:
        yield
    finally:
        libc.prctl(_PR_SET_NAME, before)


def _threads(name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield number and kernel status of each thread of this process called `name`."""
    for task in os.listdir(_TASK_DIR):
        try:
            with open(f"{_TASK_DIR}/{task}/status", encoding="ascii", errors="replace") as file:
                fields = dict(line.split(":", 1) for line in file if ":" in line)
        except OSError:  # ended since the listing
            continue
        if fields.get("Name", "").strip() == name:
            yield task, fields


def _sleeps(fields: dict[str, str]) -> bool:
    return fields["State"].split()[0] == "S"


def parked_threads(name: str) -> dict[str, str] | None:
    """Return the context switches of each thread called `name`, or None if one of them runs.

    Two equal results show that all of these threads have slept in between.
    """
    found: dict[str, str] = {}
    for task, fields in _threads(name):
        if not _sleeps(fields):
            return None
        switches = (fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"])
        found[task] = "/".join(s.strip() for s in switches)
    return found


def run_times(name: str) -> dict[str, int]:
    """Return the run time, in ns, of each thread called `name` that does not sleep."""
    found: dict[str, int] = {}
    for task, fields in _threads(name):
        if _sleeps(fields):
            continue
        with suppress(OSError), open(f"{_TASK_DIR}/{task}/schedstat", encoding="ascii") as file:
            found[task] = int(file.read().split()[0])
    return found


def _matches(sock: socket.socket, own: frozenset[Address], peers: frozenset[Address]) -> bool:
    if _listens(sock):  # gloo ends the process when its listener is shut down
        return False
    if _plain(sock.getsockname()) in own:
        return True
    try:
        return _plain(sock.getpeername()) in peers
    except OSError:  # not connected
        return False
