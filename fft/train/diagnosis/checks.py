"""The checks of one rank: correct computation, reliable memory, and a connection to a partner.

A check uses at most `MEMORY_BYTES` of memory on the accelerator (or on the processor, if torch has
none), one core, and one TCP connection. It closes everything that it opens, and needs no process
group. torch is imported when a check runs.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fft.bus.addresses import family_of, joined
from fft.operate.diagnosis.plan import Outcome

COMPUTE_REPEATS = 3


@dataclass(frozen=True)
class Chain:
    """A chain of matrix products, and the digest of the correct result.

    The numbers are small integers, so all sums are exact in every order and on every device. A rank
    with another digest computes incorrectly.
    """

    size: int
    products: int
    digest: str


ON_PROCESSOR = Chain(16, 2048, "141a4cd826a19a95f6ffca3cef2e34b5")
"""Small enough for torch to use one thread, because its threads belong to the trainer, and would
wait for each other on a busy machine."""
ON_ACCELERATOR = Chain(1024, 64, "75eb33a7ca8c8c7c7674af53b8c972f1")

MEMORY_BYTES = 64 * 1024 * 1024
_PART = 16 * 1024
"""Number of words filled and compared at a time; torch would use several threads for more."""
_MEMORY_PATTERNS = (0x5555555555555555, -0x5555555555555556)

ROUND_TRIPS = 20
BULK_BLOCKS = 8
BULK_BLOCK = 1024 * 1024
_HELLO = b"fft-check"
_MESSAGE_BYTES = 64
_ACCEPTS = 64
_GOOD, _BAD = b"+", b"-"


class CheckError(Exception):
    """A check failed; the message has the reason."""


# --- compute ---------------------------------------------------------------------------------


def compute() -> Outcome:
    """Compute a fixed chain of matrix products several times and compare the digests."""
    import torch

    device = _device(torch)
    chain = ON_PROCESSOR if device == "cpu" else ON_ACCELERATOR
    began = time.monotonic()
    try:
        digests = [_product(torch, device, chain) for _ in range(COMPUTE_REPEATS)]
    except torch.OutOfMemoryError as error:
        return Outcome(None, 0.0, f"out of memory on {device}: {error}"[:200])
    except RuntimeError as error:
        return Outcome(False, 0.0, f"the product failed on {device}: {error}"[:200])
    wrong = sum(digest != chain.digest for digest in digests)
    if wrong:
        text = f"{wrong} of {COMPUTE_REPEATS} products on {device} had a wrong result"
        return Outcome(False, time.monotonic() - began, text)
    return Outcome(True, time.monotonic() - began, f"correct result on {device}")


def _product(torch: Any, device: str, chain: Chain) -> str:
    """Return the digest of the products, each of which is reduced to small integers."""
    numbers = torch.arange(chain.size * chain.size, dtype=torch.int64)
    shape = (chain.size, chain.size)
    factor = ((numbers * 7919 % 1009) % 17 - 8).reshape(shape).to(torch.float32).to(device)
    value = ((numbers * 104729 % 2003) % 17 - 8).reshape(shape).to(torch.float32).to(device)
    with torch.no_grad():
        for _ in range(chain.products):
            value = torch.remainder(factor @ value, 17.0) - 8.0
    whole = value.to("cpu").to(torch.int8).numpy().tobytes()
    return _digest(whole)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# --- memory ----------------------------------------------------------------------------------


def memory() -> Outcome:
    """Fill memory with a pattern and its inverse, different at every place, and read it back."""
    import torch

    device = _device(torch)
    began = time.monotonic()
    try:
        places = torch.arange(_PART, dtype=torch.int64, device=device)
        held = torch.empty(MEMORY_BYTES // 8, dtype=torch.int64, device=device)
        wrong = sum(_changed(held, places, pattern) for pattern in _MEMORY_PATTERNS)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Outcome(None, 0.0, f"out of memory on {device}: {error}"[:200])
    except RuntimeError as error:
        return Outcome(False, 0.0, f"the memory of {device} failed: {error}"[:200])
    seconds = time.monotonic() - began
    if wrong:
        return Outcome(
            False, seconds, f"{wrong} words on {device} were read back with other values"
        )
    return Outcome(True, seconds, f"{held.nbytes >> 20} MiB on {device} verified")


def _changed(held: Any, places: Any, pattern: int) -> int:
    """Write to ``held`` and return the number of words that read back differently."""
    for start in range(0, len(held), _PART):
        held[start : start + _PART] = (places + start) ^ pattern
    return sum(
        int((held[start : start + _PART] != ((places + start) ^ pattern)).sum())
        for start in range(0, len(held), _PART)
    )


def _device(torch: Any) -> str:
    """Return the accelerator that the process uses, or the processor."""
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    return "cpu"


# --- network ---------------------------------------------------------------------------------


class CheckSockets:
    """The sockets of one connection test, which another thread can cut."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._cut = False
        self._lock = threading.Lock()

    def add(self, end: socket.socket) -> None:
        """Add a socket of the test."""
        with self._lock:
            self._sockets.append(end)
            cut = self._cut
        if cut:
            self.cut()

    def cut(self) -> None:
        """Shut down the sockets, so that every wait on them fails."""
        with self._lock:
            self._cut = True
            sockets = list(self._sockets)
        for end in sockets:
            with suppress(OSError):  # closed, or never connected
                end.shutdown(socket.SHUT_RDWR)


class Listening:
    """The listening side of a connection test. Raises ``OSError`` if it cannot listen."""

    def __init__(self, host: str, key: str, line: CheckSockets) -> None:
        self._key = key
        self._line = line
        self._server = socket.socket(family_of(host), socket.SOCK_STREAM)
        try:
            self._server.bind((host, 0))
            self._server.listen(4)
        except OSError:
            self._server.close()
            raise
        line.add(self._server)
        self.address = joined(*self._server.getsockname()[:2])

    def run(self, deadline: float) -> Outcome:
        """Wait for the partner and check the connection, until ``deadline`` (monotonic, s)."""
        try:
            with self._partner(deadline) as partner:
                return _exchange(partner, self._key, deadline, first=False)
        except (CheckError, OSError) as error:
            return Outcome(False, 0.0, _describe(error))

    def _partner(self, deadline: float) -> socket.socket:
        for _ in range(_ACCEPTS):
            self._server.settimeout(_left(deadline, "no peer connected"))
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                raise CheckError("no peer connected in time") from None
            self._line.add(connection)
            try:
                hello = _receive(connection, len(_HELLO) + 32, deadline)
                if hmac.compare_digest(hello, _HELLO + self._key.encode()):
                    return connection
            except (CheckError, OSError):
                pass  # not the partner, which may still come
            connection.close()
        raise CheckError("only unauthenticated peers connected")

    def close(self) -> None:
        """Stop waiting."""
        self._server.close()


def connect(address: str, key: str, deadline: float, line: CheckSockets) -> Outcome:
    """Connect to the partner at ``address`` and test, until ``deadline`` (monotonic, s)."""
    host, _, port = address.rpartition(":")
    try:
        left = _left(deadline, "no time to connect")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as partner:
            line.add(partner)
            partner.sendall(_HELLO + key.encode())
            return _exchange(partner, key, deadline, first=True)
    except (CheckError, OSError, ValueError) as error:
        return Outcome(False, 0.0, _describe(error))


def _exchange(partner: socket.socket, key: str, deadline: float, *, first: bool) -> Outcome:
    """Exchange round trips, then bulk data in both directions, and verify all bytes."""
    partner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    began = time.monotonic()
    for number in range(ROUND_TRIPS):
        word = _bytes(key, f"trip {number}", _MESSAGE_BYTES)
        if first:
            _send(partner, word, deadline)
        if _receive(partner, _MESSAGE_BYTES, deadline) != word:
            raise CheckError(f"the reply to round trip {number} was corrupted")
        if not first:
            _send(partner, word, deadline)
    trips = time.monotonic() - began
    if first:
        _send_bulk(partner, key, "there", deadline)
        _take_bulk(partner, key, "back", deadline)
    else:
        _take_bulk(partner, key, "there", deadline)
        _send_bulk(partner, key, "back", deadline)
    seconds = time.monotonic() - began
    rate = 2 * BULK_BLOCKS * BULK_BLOCK / max(seconds - trips, 1e-9) / 1e6
    text = f"round trip {1e3 * trips / ROUND_TRIPS:.2f} ms, {rate:.0f} MB/s"
    return Outcome(True, seconds, text)


def _send_bulk(partner: socket.socket, key: str, way: str, deadline: float) -> None:
    for number in range(BULK_BLOCKS):
        _send(partner, _bytes(key, f"{way} {number}", BULK_BLOCK), deadline)
    if _receive(partner, 1, deadline) != _GOOD:
        raise CheckError("the peer has received corrupted data")


def _take_bulk(partner: socket.socket, key: str, way: str, deadline: float) -> None:
    changed = sum(
        _receive(partner, BULK_BLOCK, deadline) != _bytes(key, f"{way} {number}", BULK_BLOCK)
        for number in range(BULK_BLOCKS)
    )
    _send(partner, _BAD if changed else _GOOD, deadline)
    if changed:
        raise CheckError(f"{changed} of {BULK_BLOCKS} blocks arrived corrupted")


def _bytes(key: str, what: str, size: int) -> bytes:
    """Return bytes that both sides can compute and that no fault produces by chance."""
    return hashlib.shake_128(f"{key} {what}".encode()).digest(size)


def _send(partner: socket.socket, data: bytes, deadline: float) -> None:
    partner.settimeout(_left(deadline, "the peer did not read the data"))
    partner.sendall(data)


def _receive(partner: socket.socket, size: int, deadline: float) -> bytes:
    got = bytearray()
    while len(got) < size:
        partner.settimeout(_left(deadline, "the peer sent too little"))
        try:
            part = partner.recv(min(size - len(got), 1 << 20))
        except TimeoutError:
            raise CheckError("the peer sent too little in time") from None
        if not part:
            raise CheckError("the peer closed the connection")
        got += part
    return bytes(got)


def _left(deadline: float, what: str) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise CheckError(f"{what} in time")
    return left


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckError) else f"{type(error).__name__}: {error}"[:200]
