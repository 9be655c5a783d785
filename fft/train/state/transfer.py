"""Transfer of state between ranks for a heal, authenticated by the job token, without code.

Replaces torchft's `HTTPTransport`, which unpickles any response of a URL. Opens one listening
socket, a thread that accepts connections, and at most `WORKERS` threads that answer; `shutdown`
ends them. A connection without an authentic request holds no worker for longer than `Waiting`
and a deadline allow.

A request has the form of HTTP: ``GET /<server>/<what>/<nonce>/<tag> HTTP/1.0``. ``server`` names
this transfer object. ``what`` is a digest of the step and of the state's epoch and lineage.
``nonce`` is chosen by the receiver and valid for one answer. ``tag`` is a keyed hash of the three.

An answer is a head followed by frames. A frame has a length (4 bytes), that many bytes, and a keyed
hash of the request and of everything up to there. The first frame contains the total number of
bytes. The receiver therefore stores only bytes from the job, and can distinguish the end from a
lost connection. It has verified every byte before torch's safe unpickler (``weights_only``) reads
the first.

The hash is HMAC-SHA256, which is twice as fast as BLAKE2b on processors with instructions for it.
Without a token it is only a checksum, and any process may send a request.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed._serialization import _streaming_load, _streaming_save
from torch.utils._pytree import tree_map
from torchft.checkpointing import CheckpointTransport

from fft.bus.addresses import HOW_TO_REACH, joined
from fft.bus.token import JobToken, derive, mac
from fft.errors import StateError
from fft.util.listening import MAX_WAITING, Waiting, listening_on
from fft.util.log_sampler import LogSampler

WORKERS = 16 + MAX_WAITING
"""Number of connections read or answered at the same time; further ones wait for a worker. At most
`MAX_WAITING` of them have sent no authentic request."""
FRAME_BYTES = 1024 * 1024
MAX_BYTES = 256 * 2**30
"""Maximum size of a received state, in bytes."""
_HEAD_BYTES = 4096
_HEAD_S = 5.0  # time limit for a request's head, so that an outsider cannot hold a worker for long
_CONNECT_S = 3.0  # time per connection attempt; the end of the epoch is checked in between
_REACH_S = 8.0
"""Time limit for a connection, in seconds, in which the kernel sends the first packet 4 times."""
_CUT_S = 5.0  # time for a worker to end after its connection was cut
_LENGTH, _TOTAL = struct.Struct("!I"), struct.Struct("!Q")
_LONG, _ALIGN = 4096, 64  # writes of at least _LONG bytes begin at a multiple of _ALIGN
_TAG_BYTES = 32

logger = logging.getLogger(__name__)


class TransferError(StateError):
    """State could not be fetched or sent; the message names the peer and the problem."""


class PeerUnreachable(TransferError):
    """The peer's address cannot be connected to."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(reason)
        self.where = where
        """The peer's metadata, which is unique to its process."""


class _NoRequest(TransferError):
    """The connection ended without a request: a joiner tested whether this rank is reachable."""


class UnloadableState(TransferError):
    """A complete state holds an object that cannot be loaded without running code."""


class _RequestRejected(Exception):
    """The request is refused; the message is an HTTP status and the reason."""


@dataclass
class _Offer:
    what: str
    state: Any
    until: float
    used: set[str] = field(default_factory=set)
    """Nonces of answered requests."""


class StateTransfer(CheckpointTransport[Any]):  # type: ignore[misc]
    """torchft's checkpoint transport between ranks of one job.

    Args:
        token: The job's token; None leaves only a checksum as protection.
        address: IP address at which the other ranks reach this host; the socket listens there.
        timeout: Time that a request waits for its state to be offered.
        max_bytes: Maximum size of a received state, in bytes.
    """

    def __init__(
        self,
        token: JobToken | None,
        timeout: timedelta,
        max_bytes: int = MAX_BYTES,
        *,
        address: str,
    ) -> None:
        self.state_id = ""
        """Epoch and lineage of the state; set it before sending or receiving. Both ends must have
        the same value."""
        self.on_progress: Callable[[int, int], None] = lambda _got, _total: None
        """Called while receiving, with the bytes so far and the total number of bytes."""
        self._key = token.key("fft1", "transfer") if token else derive(b"", "fft1", "transfer")
        self._timeout = timeout.total_seconds()
        self._max_bytes = max_bytes
        self._address = address
        self._server = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._busy: set[socket.socket] = set()
        """Connections that a worker answers or will answer."""
        self._sending: set[socket.socket] = set()
        """Connections in ``_busy`` whose workers read the offered state."""
        self._fetching: set[socket.socket] = set()
        self._ended = 0
        """Number of calls of `interrupt`, each of which ends the transfers of an epoch."""
        self._closed = False
        self._refused = LogSampler()
        self._waiting = Waiting()
        self._listening = listening_on(address)
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="fft-transfer")
        self._thread = threading.Thread(target=self._accept, name="fft-transfer", daemon=True)
        self._thread.start()

    # --- torchft's transport: sending ---

    def metadata(self) -> str:
        """Return the URL at which this rank's state can be fetched."""
        port = self._listening.getsockname()[1]
        return f"http://{joined(self._address, port)}/{self._server}"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        """Offer ``state_dict``, which must not change, until `disallow_checkpoint`."""
        state = tree_map(_on_cpu, state_dict)
        with self._changed:
            until = time.monotonic() + timeout.total_seconds()
            self._offer = _Offer(_what(step, self.state_id), state, until)
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """End the offer, and return when no worker still reads the state.

        A transfer in progress may finish within the offer's timeout; after that it is cut off.
        """
        with self._changed:
            offer, self._offer = self._offer, None
            if offer is None:
                return
            left = offer.until - time.monotonic()
            if not self._changed.wait_for(lambda: not self._sending, max(0.0, left)):
                self._cut(self._sending)
                self._changed.wait_for(lambda: not self._sending, _CUT_S)

    def interrupt(self) -> None:
        """Cut all transfers, which are useless because the epoch has ended. Safe on any thread.

        Otherwise a transfer with a peer whose host has vanished would last until the timeout.
        """
        with self._changed:
            self._ended += 1
            self._cut(self._sending)
            self._cut(self._fetching)

    def shutdown(self, wait: bool = True) -> None:
        """End all threads and connections. Idempotent."""
        with self._changed:
            self._closed, self._offer = True, None
            self._changed.notify_all()
            self._cut({self._listening})  # wakes the thread that accepts
            self._cut(self._busy)
        if wait:
            self._thread.join(_CUT_S)
        self._listening.close()
        self._pool.shutdown(wait=wait, cancel_futures=True)
        for connection in list(self._busy):  # requests that no worker has taken
            connection.close()

    @staticmethod
    def _cut(connections: set[socket.socket]) -> None:
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the connection has ended by itself

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, client = self._listening.accept()
            except OSError as error:
                if not self._closed:
                    logger.error("this rank can no longer serve its state: %s", error)
                return
            with self._changed:
                if self._closed:
                    connection.close()
                    return
                self._busy.add(connection)
                self._waiting.enter(connection, client[0])
                self._pool.submit(self._answer, connection)

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._serve(connection)
        except OSError as error:
            if (count := self._refused.add("lost")) is not None:
                logger.warning("a peer that fetched state was lost: %s (%d by now)", error, count)
        except Exception:  # a worker must not end silently
            logger.exception("sending state failed")
        finally:
            self._waiting.leave(connection)
            with self._changed:
                self._busy.discard(connection)
                self._sending.discard(connection)
                self._changed.notify_all()

    def _serve(self, connection: socket.socket) -> None:
        try:
            head = _read_head(connection, time.monotonic() + _HEAD_S)
            what, nonce = self._authentic(head)
            self._waiting.leave(connection)
            offer = self._wait_for(what, nonce, connection)
        except _NoRequest:
            return
        except (_RequestRejected, TransferError) as refused:
            if (count := self._refused.add("refused")) is not None:
                logger.warning("a request for state was refused: %s (%d by now)", refused, count)
            connection.sendall(f"HTTP/1.0 {refused}\r\n\r\n".encode())
            return
        connection.settimeout(max(0.001, offer.until - time.monotonic()))
        connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Type: application/octet-stream\r\n\r\n")
        sink = _Sink()
        _streaming_save(offer.state, sink)  # type: ignore[arg-type]
        hashed = self._answer_mac(self._server, what, nonce)
        out = _FrameWriter(connection, hashed, sink.total, offer.until)
        _streaming_save(offer.state, out)  # type: ignore[arg-type]
        out.end()

    def _authentic(self, head: bytes) -> tuple[str, str]:
        """Verify a request; return ``what`` and ``nonce``. Raises `_RequestRejected`."""
        words = head.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" ")
        parts = words[1].split("/") if len(words) == 3 and words[0] == "GET" else []
        if len(parts) != 5 or parts[1] != self._server:
            raise _RequestRejected("400 expected a request for this rank's state")
        _, server, what, nonce, tag = parts
        expected = self._request_tag(server, what, nonce).encode()
        if not hmac.compare_digest(expected, tag.encode()):
            raise _RequestRejected("403 the request is not authenticated by this job's token")
        return what, nonce

    def _wait_for(self, what: str, nonce: str, connection: socket.socket) -> _Offer:
        """Wait for the requested state, and mark the connection as sending.

        Raises `_RequestRejected`.
        """
        with self._changed:
            offered: Callable[[], bool] = lambda: self._closed or self._offer is not None  # noqa: E731
            self._changed.wait_for(offered, self._timeout)
            offer = self._offer
            if offer is None:
                raise _RequestRejected("503 no state is offered here")
            if offer.what != what:
                raise _RequestRejected(
                    "409 this rank offers the state of another step, epoch or lineage"
                )
            if nonce in offer.used:
                raise _RequestRejected("403 the request was answered before")
            offer.used.add(nonce)
            self._sending.add(connection)
            return offer

    # --- torchft's transport: receiving ---

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetch the state of ``step`` that a peer offers at ``metadata``, within ``timeout``.

        Raises:
            TransferError: The state is not offered, is incomplete, late or too long, is not from
                this job, or cannot be loaded without running code.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            data = self._fetch(metadata, _what(step, self.state_id), deadline)
        except OSError as error:  # includes TimeoutError
            raise TransferError(f"state of step {step} from {metadata}: {error}") from error
        except PeerUnreachable as error:
            text = f"state of step {step} from {metadata}: {error}"
            raise PeerUnreachable(metadata, text) from error.__cause__
        except TransferError as error:
            raise TransferError(f"state of step {step} from {metadata}: {error}") from None
        try:
            return _streaming_load(_Reader(data), weights_only=True)  # type: ignore[arg-type]
        except Exception as error:
            raise UnloadableState(
                f"state of step {step} from {metadata} cannot be loaded without running code: "
                f"{str(error)[:500]}. Keep tensors, containers and plain values in state_dict, or "
                "allow the type by torch.serialization.add_safe_globals"
            ) from error

    def _fetch(self, metadata: str, what: str, deadline: float) -> bytearray:
        url = urlsplit(metadata)
        server, nonce = url.path.strip("/"), secrets.token_hex(16)
        if url.scheme != "http" or not url.hostname or not url.port:
            raise TransferError(
                "not an address of FFT's state transfer; check that all ranks use the same "
                "checkpoint_transport"
            )
        path = "/".join(("", server, what, nonce, self._request_tag(server, what, nonce)))
        with self._connected((url.hostname, url.port), deadline) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            head, rest = _split_head(connection, deadline)
            status = head.split(b"\r\n", 1)[0].decode("ascii", "replace").partition(" ")[2]
            if not status.startswith("200 "):
                raise TransferError(f"the peer replied: {status[:200]}")
            hashed = self._answer_mac(server, what, nonce)
            frames = _FrameReader(connection, rest, hashed, deadline)
            return frames.all(self._max_bytes, self.on_progress)

    @contextmanager
    def _connected(self, address: tuple[str, int], deadline: float) -> Iterator[socket.socket]:
        """Open a connection that `interrupt` can cut.

        The attempts are short, because `interrupt` cannot cut a connection that is not open yet.
        """
        began, connection = self._ended, None
        until = min(deadline, time.monotonic() + _REACH_S)
        while connection is None:
            left = max(0.001, until - time.monotonic())
            try:
                connection = socket.create_connection(address, timeout=min(left, _CONNECT_S))
            except OSError as error:
                if self._ended != began:
                    raise TransferError("the epoch has ended meanwhile") from error
                if not isinstance(error, TimeoutError) or time.monotonic() >= until:
                    where = joined(*address)
                    text = f"{where} cannot be reached from this host: {error}; {HOW_TO_REACH}"
                    raise PeerUnreachable(where, text) from error
        with connection:
            with self._changed:
                self._fetching.add(connection)
                if self._ended != began:
                    self._cut({connection})
            try:
                yield connection
            finally:
                with self._changed:
                    self._fetching.discard(connection)

    # --- keys ---

    def _request_tag(self, server: str, what: str, nonce: str) -> str:
        return mac(derive(self._key, "request", server, what, nonce), b"").hex()

    def _answer_mac(self, server: str, what: str, nonce: str) -> hmac.HMAC:
        return hmac.new(derive(self._key, "answer", server, what, nonce), digestmod="sha256")


def _what(step: int, about: str) -> str:
    return hashlib.sha256(f"{step} {about}".encode()).hexdigest()[:32]


def _on_cpu(value: Any) -> Any:
    is_away = isinstance(value, torch.Tensor) and value.device.type != "cpu"
    return value.cpu() if is_away else value


# --- bytes on the connection ------------------------------------------------------------------


class _Sink(io.RawIOBase):
    """Counts the bytes written. Long writes begin at multiples of `_ALIGN`, as tensors must."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= _LONG:
            self._put(memoryview(bytes(-self.total % _ALIGN)))
        self._put(view)
        return len(view)

    def _put(self, view: memoryview) -> None:
        self.total += len(view)


class _FrameWriter(_Sink):
    """Writes frames: length, bytes, and the keyed hash so far. The first holds the total size."""

    def __init__(
        self, connection: socket.socket, hashed: hmac.HMAC, total: int, deadline: float
    ) -> None:
        super().__init__()
        self._connection = connection
        self._hashed = hashed
        self._deadline = deadline
        self._small = bytearray()
        """Bytes that wait for a full frame, because most writes are short."""
        self._frame(memoryview(_TOTAL.pack(total)))

    def _put(self, view: memoryview) -> None:
        super()._put(view)
        if len(self._small) + len(view) < FRAME_BYTES:
            self._small += view
            return
        self._flush_small()
        for start in range(0, len(view), FRAME_BYTES):
            self._frame(view[start : start + FRAME_BYTES])

    def end(self) -> None:
        """Send the remaining bytes."""
        self._flush_small()

    def _flush_small(self) -> None:
        if self._small:
            self._frame(memoryview(bytes(self._small)))
            self._small.clear()

    def _frame(self, data: memoryview) -> None:
        self._connection.settimeout(_left(self._deadline))
        length = _LENGTH.pack(len(data))
        self._hashed.update(length)
        self._hashed.update(data)
        self._connection.sendall(length)
        self._connection.sendall(data)
        self._connection.sendall(self._hashed.copy().digest())


class _Reader(io.RawIOBase):
    """Reads the data that a `_Sink` wrote. Tensors use the long parts without a copy."""

    def __init__(self, data: bytearray) -> None:
        super().__init__()
        self._view = memoryview(data)
        self._at = 0

    def read(self, size: int = -1) -> Any:
        if size >= _LONG:
            self._at += -self._at % _ALIGN
        end = len(self._view) if size < 0 else min(len(self._view), self._at + size)
        part = self._view[self._at : end]
        self._at = end
        return part if len(part) >= _LONG else bytearray(part)  # tensors need writable memory

    def readline(self, size: int | None = -1) -> Any:
        line = bytearray()
        while not line.endswith(b"\n") and (more := self.read(1)):
            line += more
        return bytes(line)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("not within the timeout")
    return left


def _split_head(connection: socket.socket, deadline: float) -> tuple[bytes, bytes]:
    """Read the head of a request or an answer; return it and the bytes after it."""
    data = b""
    while b"\r\n\r\n" not in data:
        connection.settimeout(_left(deadline))
        more = connection.recv(_HEAD_BYTES)
        if not more:
            kind = TransferError if data else _NoRequest
            raise kind("400 the connection ended within its head")
        data += more
        if len(data) > _HEAD_BYTES and b"\r\n\r\n" not in data:
            raise TransferError("400 the head is too long")
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _read_head(connection: socket.socket, deadline: float) -> bytes:
    return _split_head(connection, deadline)[0]


class _FrameReader:
    """Reads frames and verifies each before it reads the next."""

    def __init__(
        self, connection: socket.socket, early: bytes, hashed: hmac.HMAC, deadline: float
    ) -> None:
        """Prepare to read; ``early`` are bytes already read from the connection."""
        self._connection = connection
        self._early = early
        self._hashed = hashed
        self._deadline = deadline

    def all(self, limit: int, on_progress: Callable[[int, int], None]) -> bytearray:
        """Return the bytes of all frames. Raises `TransferError`."""
        first = bytearray(_TOTAL.size)
        self._frame(memoryview(first))
        (total,) = _TOTAL.unpack(first)
        if total > limit:
            raise TransferError(f"it has {total} bytes; the limit here is {limit}")
        data, at = bytearray(total), 0
        with memoryview(data) as view:
            while at < total:
                at += self._frame(view[at:])
                on_progress(at, total)
        return data

    def _frame(self, target: memoryview) -> int:
        """Read one frame into the beginning of ``target``; return its length."""
        head, tag = bytearray(_LENGTH.size), bytearray(_TAG_BYTES)
        self._fill(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if not 0 < length <= min(FRAME_BYTES, len(target)):
            raise TransferError(
                "authentication failed: the data was modified in transit, or is not from this job"
            )
        self._fill(target[:length])
        self._fill(memoryview(tag))
        self._hashed.update(head)
        self._hashed.update(target[:length])
        if not hmac.compare_digest(self._hashed.copy().digest(), tag):
            raise TransferError(
                "authentication failed: the data was modified in transit, or is not from this job"
            )
        return int(length)

    def _fill(self, target: memoryview) -> None:
        got = min(len(self._early), len(target))
        target[:got], self._early = self._early[:got], self._early[got:]
        while got < len(target):
            self._connection.settimeout(_left(self._deadline))
            more = self._connection.recv_into(target[got:])
            if not more:
                raise TransferError("the peer ended before all was sent")
            got += more
