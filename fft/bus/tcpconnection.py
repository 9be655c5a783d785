"""One connection to a TCPStore server, which unlike torch's own can be bounded and cut.

Touches that connection's socket and short-lived threads that connect.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from fft.bus.base import BusError, BusUnreachable

_CONNECT_TRIES: Final = 4
_CONNECT_TRY_S: Final = 0.5

TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch's own stubs leave it out


def store_client(host: str, port: int, timeout: float) -> Any:
    """A new TCPStore client, or an `OSError` that says why not, within `timeout` seconds.

    A plain connection is tried first, because torch logs and retries when nobody listens. torch's
    own connecting has two waits that it does not bound: it asks the name service for the server's
    name (one lost packet costs 5 s), and it waits for the server's answer. So it runs on threads,
    a fresh try beside the one that hangs, and the first to succeed counts. A try that is left
    behind ends with its lookup or its connection.
    """
    deadline = time.monotonic() + timeout
    socket.create_connection((host, port), timeout).close()
    tries: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def attempt() -> None:
        try:
            limit = timedelta(seconds=timeout)
            tries.put(TCPStore(host, port, None, False, limit, wait_for_workers=False))
        except Exception as error:  # noqa: BLE001 - handed to the caller's thread below
            tries.put(error)

    for number in range(_CONNECT_TRIES):
        threading.Thread(target=attempt, name="fft-bus-connect", daemon=True).start()
        left = deadline - time.monotonic()
        if number < _CONNECT_TRIES - 1:
            left = min(left, _CONNECT_TRY_S)
        try:
            made = tries.get(timeout=max(0.0, left))
        except queue.Empty:
            continue
        if isinstance(made, Exception):
            raise ConnectionError(str(made).splitlines()[0]) from made
        return made
    raise ConnectionError("something listens there but does not answer as a TCPStore")


def _socket_of(store: Any) -> socket.socket:
    """A second handle on the connection of `store`.

    torch has no way to bound an operation's answer or to release a thread that waits in one;
    the socket has both. Only the object's text names its descriptor.
    """
    match = re.search(r"SocketImpl\(fd=(\d+)", repr(store))
    if match is None:
        raise BusError(f"this torch does not name the socket of its TCPStore: {store!r}")
    handle = socket.socket(fileno=os.dup(int(match.group(1))))
    if socket.getdefaulttimeout() is not None:
        handle.setblocking(True)  # Python then made the shared socket non-blocking
    return handle


class Connection:
    """One TCPStore client and the handle that can cut it."""

    def __init__(self, host: str, port: int, url: str, timeout: float) -> None:
        try:
            self.store = store_client(host, port, timeout)
        except OSError as error:
            raise BusUnreachable(url, str(error)) from error
        self._handle = _socket_of(self.store)
        self._lock = threading.Lock()

    def limit(self, seconds: float) -> None:
        """Let an operation fail when sending it, or its answer, takes longer than `seconds`."""
        whole = int(seconds)
        bound = struct.pack("ll", whole, max(1, int((seconds - whole) * 1e6)))
        self._handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
        self._handle.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)

    def cut(self) -> None:
        """Release whoever waits in this connection. It is of no more use."""
        with self._lock:
            try:
                self._handle.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other side was quicker, or we did it before
                return

    def drop(self) -> None:
        """Give the descriptors back; nobody may be using the connection."""
        with self._lock:
            self._handle.close()
            self.store = None
