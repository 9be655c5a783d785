"""A client of torch's TCPStore server with batched requests, timeouts and cancellation.

It uses one socket, and short-lived threads to resolve host names. It does not import torch, so a
process can be on the bus without torch's 200 MiB and seconds of start time. The bus needs features
that torch's own client lacks: several requests in one round trip, a timeout for an answer, a way to
release a thread that waits for one, no name lookup after the connection is made, and no output to
stderr.

The wire format is that of torch 2.13 (torch/csrc/distributed/c10d/TCPStore*.cpp). A request is one
byte for the operation, then its arguments: bytes and texts as 64-bit length and content, numbers as
64 bits, lists as length and content, all in the machine's byte order. Every key begins with "/". A
server with another format does not answer the greeting, and `StoreClient` refuses it.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from fft.util.hedged import hedged
from fft.util.kernel_limit import keep_alive, limit_in_kernel

_U32: Final = struct.Struct("=I")
_I64: Final = struct.Struct("=q")
_MAGIC: Final = 0x3C85F7CE
_CHUNK: Final = 65536
_READY: Final = 0

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
    """A request frame and the function that reads its answer, or None if it has no answer."""

    frame: bytes
    answer: Callable[[StoreClient], Any] | None


def _bytes(value: bytes) -> bytes:
    return _I64.pack(len(value)) + value


def _key(key: str) -> bytes:
    return _bytes(b"/" + key.encode())


def put(key: str, value: bytes) -> Request:
    """Set the key's value. No answer."""
    return Request(_SET + _key(key) + _bytes(value), None)


def append(key: str, value: bytes) -> Request:
    """Append to the key's value. No answer."""
    return Request(_APPEND + _key(key) + _bytes(value), None)


def compare_set(key: str, expected: bytes, desired: bytes) -> Request:
    """Replace the value if it equals ``expected``; b"" also matches a key without a value.

    The answer is the value held afterwards. If the key has no value but ``expected`` is not empty,
    the answer is ``expected``.
    """
    frame = _COMPARE_SET + _key(key) + _bytes(expected) + _bytes(desired)
    return Request(frame, StoreClient.take_bytes)


def add(key: str, amount: int) -> Request:
    """Add ``amount`` to a counter. The answer is the sum, signed 64-bit."""
    return Request(_ADD + _key(key) + _I64.pack(amount), StoreClient.take_number)


def check(key: str) -> Request:
    """Check a key. The answer is whether it has a value."""
    frame = _CHECK + _I64.pack(1) + _key(key)
    return Request(frame, lambda client: client.take(1)[0] == _READY)


def wait(keys: Sequence[str]) -> Request:
    """Wait until all keys have values. The answer is True.

    The client cannot be used for other requests until then.
    """
    frame = _WAIT + _I64.pack(len(keys)) + b"".join(map(_key, keys))
    return Request(frame, lambda client: client.take(1)[0] == _READY)


def get_all(keys: Sequence[str]) -> Request:
    """Read the values of keys after `wait`. A key that was deleted since has the value b""."""
    frame = _MULTI_GET + _I64.pack(len(keys)) + b"".join(map(_key, keys))
    return Request(frame, lambda client: [client.take_bytes() for _ in keys])


def delete(key: str) -> Request:
    """Delete a key. The answer is whether it existed."""
    return Request(_DELETE + _key(key), lambda client: client.take_number() > 0)


def push(queue: str, value: bytes) -> Request:
    """Append a value to a queue. No answer."""
    return Request(_PUSH + _key(queue) + _bytes(value), None)


def pop(queue: str) -> Request:
    """Take the first value of a queue. The answer is None if the queue is empty."""
    return Request(
        _POP + _key(queue), lambda client: client.take_bytes() if client.take_number() else None
    )


def length(queue: str) -> Request:
    """Count the values in a queue."""
    return Request(_LENGTH + _key(queue), StoreClient.take_number)


def list_keys() -> Request:
    """List all keys. Queues are not listed."""
    return Request(
        _LIST,
        lambda client: [
            client.take_bytes().decode().removeprefix("/") for _ in range(client.take_number())
        ],
    )


class NotSent(ConnectionError):
    """The connection was lost before the requests were sent, so they had no effect."""


class StoreClient:
    """One connection to a TCPStore server.

    After the first failure, including a timeout, the client cannot be used again: a late answer
    would be taken for the answer to the next request. The kernel notices within 25 s if the
    server's host disappears, or if the network has forgotten the connection (`keep_alive`). It
    never notices a server process that is only stopped.

    Args:
        timeout: Limit in seconds for connecting.
        limit: Limit in seconds for each later read and write; None waits forever.

    Raises:
        OSError: The connection failed, with the reason.
    """

    def __init__(self, host: str, port: int, timeout: float, limit: float | None = None) -> None:
        self._socket = _connected(host, port, timeout)
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._limit = limit
        self.silent = False
        """A request timed out; the server may be alive but slow."""
        self.has_failed = False
        """A request timed out, or the connection was lost."""
        limit_in_kernel(self._socket, limit)  # a Python timeout costs a second system call per read
        keep_alive(self._socket)

    def ask(self, *requests: Request) -> list[Any]:
        """Send all requests at once and return the answers of those that have one. Thread-safe.

        Raises:
            NotSent: The requests have not taken effect.
            OSError: The requests may or may not have taken effect.
        """
        with self._lock:
            try:
                if self.silent:  # another thread's request timed out while this one waited
                    raise BlockingIOError
                if self._is_down():
                    raise NotSent("the connection was closed")
                self._socket.sendall(b"".join(request.frame for request in requests))
                return [r.answer(self) for r in requests if r.answer is not None]
            except BlockingIOError:
                self.silent = self.has_failed = True
                self.cut()
                raise TimeoutError(f"no answer within {self._limit:g} s") from None
            except BaseException:
                self.has_failed = True
                self.cut()
                raise

    def _is_down(self) -> bool:
        """Return whether the connection is known to have ended."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def wait_without_limit(self) -> None:
        """Let later requests wait forever for their answers."""
        self._limit = None
        limit_in_kernel(self._socket, None)

    def cut(self) -> None:
        """Release every thread that waits for this connection and make it unusable. Thread-safe."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the connection is already down
            return

    def close(self) -> None:
        """Cut the connection and close its descriptor."""
        self.cut()
        with self._lock:  # wait until no thread uses the descriptor
            self._socket.close()

    # --- for the requests ---

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes of the answer."""
        while len(self._buffer) < count:
            found = self._socket.recv(max(_CHUNK, count - len(self._buffer)))
            if not found:
                raise ConnectionError("the connection was closed")
            self._buffer += found
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def take_number(self) -> int:
        """Return the next 64-bit number of the answer."""
        return int(_I64.unpack(self.take(_I64.size))[0])

    def take_bytes(self) -> bytes:
        """Return the next length-prefixed bytes of the answer."""
        return self.take(self.take_number())


def _connected(host: str, port: int, timeout: float) -> socket.socket:
    """Connect to the first address at which a TCPStore answers the greeting."""
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
    except socket.gaierror:  # a host name, whose lookup may hang
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
