"""A client of torch's TCPStore server: several requests in one round trip, bounded, and to be cut.

Touches one socket, and short-lived threads that connect. Loads no torch, so that a process may be
on the bus without it (200 MiB, and seconds to start). What torch's own client does not have, and
the bus needs: requests that go out together; an end to waiting for an answer; a way to free a
thread that waits for one; no lookup of names after the connection is there; silence on stderr.

The form is that of torch 2.13 (torch/csrc/distributed/c10d/TCPStore*.cpp). A request is one byte
that says which, then its arguments: bytes and texts as 64-bit length and content, numbers as 64
bits, lists as their length and content, all in the machine's byte order. Every key begins with
"/". A server of another form does not answer the greeting, and is refused by `StoreClient`.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from fft.util.hedged import hedged
from fft.util.kernel_limit import limit_in_kernel

_U32: Final = struct.Struct("=I")
_I64: Final = struct.Struct("=q")
_MAGIC: Final = 0x3C85F7CE
_CHUNK: Final = 65536
_READY: Final = 0
_KEEPALIVE: Final = (
    (socket.TCP_KEEPIDLE, 10),  # seconds without a word before the first probe
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
)
_DEAD_AFTER_S: Final = 25  # of these

(
    _VALIDATE,
    _SET,
    _COMPARE_SET,
    _GET,
    _ADD,
    _CHECK,
    _WAIT,
    _NUM_KEYS,
    _DELETE,
    _APPEND,
    _MULTI_GET,
    _MULTI_SET,
    _CANCEL_WAIT,
    _PING,
    _PUSH,
    _POP,
    _LENGTH,
    _LIST,
) = (bytes([number]) for number in range(18))


class Request(NamedTuple):
    """What goes out, and how to read what comes back; None: nothing does."""

    frame: bytes
    answer: Callable[[StoreClient], Any] | None


def _bytes(value: bytes) -> bytes:
    return _I64.pack(len(value)) + value


def _key(key: str) -> bytes:
    return _bytes(b"/" + key.encode())


def put(key: str, value: bytes) -> Request:
    """Give the key this value. No answer."""
    return Request(_SET + _key(key) + _bytes(value), None)


def append(key: str, value: bytes) -> Request:
    """Add to the end of the key's value. No answer."""
    return Request(_APPEND + _key(key) + _bytes(value), None)


def compare_set(key: str, expected: bytes, desired: bytes) -> Request:
    """Replace the value if it is the expected one; b"" also means that there is none.

    → the value held afterwards; of a key without one that was expected to have one: the expected.
    """
    frame = _COMPARE_SET + _key(key) + _bytes(expected) + _bytes(desired)
    return Request(frame, StoreClient.take_bytes)


def add(key: str, amount: int) -> Request:
    """Count. → the sum, signed 64-bit."""
    return Request(_ADD + _key(key) + _I64.pack(amount), StoreClient.take_number)


def check(key: str) -> Request:
    """→ whether the key has a value."""
    frame = _CHECK + _I64.pack(1) + _key(key)
    return Request(frame, lambda client: client.take(1)[0] == _READY)


def wait(keys: Sequence[str]) -> Request:
    """→ True, once all keys have values. Until then nothing else can be asked of this client."""
    frame = _WAIT + _I64.pack(len(keys)) + b"".join(map(_key, keys))
    return Request(frame, lambda client: client.take(1)[0] == _READY)


def get_all(keys: Sequence[str]) -> Request:
    """→ the values of keys that have been waited for; b"" for one that is gone since."""
    frame = _MULTI_GET + _I64.pack(len(keys)) + b"".join(map(_key, keys))
    return Request(frame, lambda client: [client.take_bytes() for _ in keys])


def delete(key: str) -> Request:
    """→ whether there was such a key."""
    return Request(_DELETE + _key(key), lambda client: client.take_number() > 0)


def push(queue: str, value: bytes) -> Request:
    """Put a value at the end of a queue. No answer."""
    return Request(_PUSH + _key(queue) + _bytes(value), None)


def pop(queue: str) -> Request:
    """→ the first value of a queue; None if it is empty."""
    return Request(
        _POP + _key(queue), lambda client: client.take_bytes() if client.take_number() else None
    )


def length(queue: str) -> Request:
    """→ how many values are in a queue."""
    return Request(_LENGTH + _key(queue), StoreClient.take_number)


def list_keys() -> Request:
    """→ all keys, without queues."""
    return Request(
        _LIST,
        lambda client: [
            client.take_bytes().decode().removeprefix("/") for _ in range(client.take_number())
        ],
    )


class StoreClient:
    """One connection to a TCPStore server.

    ``timeout``, in seconds, bounds the connecting. Raises `OSError` that says why there is none.
    ``limit`` bounds each answer from then on, and each sending; None: they are waited for.

    After the first failure, a timeout included, nothing more can be asked: a late answer would be
    taken for the answer to the next request. A server whose host is gone without a word is noticed
    within `_DEAD_AFTER_S` by the kernel; one that is only stopped is not, however long.
    """

    def __init__(self, host: str, port: int, timeout: float, limit: float | None = None) -> None:
        self._socket = _connected(host, port, timeout)
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._limit = limit
        self.silent = False
        """An answer was not waited for any longer; the server may be there, and be slow."""
        limit_in_kernel(self._socket, limit)  # Python's would make two system calls of each read
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            self._socket.setsockopt(socket.IPPROTO_TCP, name, value)

    def ask(self, *requests: Request) -> list[Any]:
        """Send all requests at once; the answers of those that have one. From any thread.

        Raises `OSError`; what was asked may be done, or not.
        """
        with self._lock:
            try:
                if self.silent:  # since this thread waits for its turn
                    raise BlockingIOError
                self._socket.sendall(b"".join(request.frame for request in requests))
                return [r.answer(self) for r in requests if r.answer is not None]
            except BlockingIOError:
                self.silent = True
                self.cut()
                raise TimeoutError(f"no answer within {self._limit:g} s") from None
            except BaseException:
                self.cut()
                raise

    def cut(self) -> None:
        """Release whoever waits in this connection. It is of no more use. From any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side was quicker, or we did it before
            return

    def close(self) -> None:
        """Cut it, and give the descriptor back."""
        self.cut()
        with self._lock:  # until then somebody is in it
            self._socket.close()

    # --- for the requests ---

    def take(self, count: int) -> bytes:
        """The next bytes of the answer."""
        while len(self._buffer) < count:
            found = self._socket.recv(max(_CHUNK, count - len(self._buffer)))
            if not found:
                raise ConnectionError("the connection was closed")
            self._buffer += found
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def take_number(self) -> int:
        """The next 64 bits of the answer."""
        return int(_I64.unpack(self.take(_I64.size))[0])

    def take_bytes(self) -> bytes:
        """The next bytes or text of the answer."""
        return self.take(self.take_number())


def _connected(host: str, port: int, timeout: float) -> socket.socket:
    """A connection on which a TCPStore has answered the greeting."""
    failed: OSError = OSError(f"{host} has no address")
    for family, kind, proto, _, address in _addresses(host, port, timeout):
        made = socket.socket(family, kind, proto)
        try:
            made.settimeout(timeout)
            made.connect(address)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _greet(made)
        except OSError as error:
            made.close()
            failed = error
        else:
            return made
    raise failed


def _addresses(host: str, port: int, timeout: float) -> list[Any]:
    kind = socket.SOCK_STREAM
    try:
        return socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name
        return hedged(lambda: socket.getaddrinfo(host, port, type=kind), timeout, "fft-bus-name")


def _greet(made: socket.socket) -> None:
    nonce = secrets.token_bytes(_U32.size)
    made.sendall(_VALIDATE + _U32.pack(_MAGIC) + _PING + nonce)
    found = b""
    try:
        while len(found) < len(nonce):
            more = made.recv(len(nonce) - len(found))
            if not more:
                break
            found += more
    except TimeoutError:
        found = b""
    if found != nonce:
        raise ConnectionError("something listens there but does not answer as a TCPStore")
