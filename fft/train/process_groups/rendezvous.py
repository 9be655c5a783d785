"""A cancellable store for the rendezvous of a process group, which deletes its keys.

torch's own store client waits until its timeout for a member that never comes, and does not delete
the keys of a rendezvous. `RendezvousStore` polls for a key instead, so that it can be cancelled,
and records its keys, so that they can be deleted. The store accesses only the keys of its
rendezvous.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from fft.train.process_groups.sockets import keep_connections_alive
from fft.util.hedged import hedged

# Pauses between two checks of a key, in seconds. A check costs about 25 us. The store's own wait
# cannot be cancelled, and logs two warnings when it times out.
_FIRST_PAUSE = 0.0002
_LONGEST_PAUSE = 0.002

_READ_LIMIT = timedelta(seconds=1)
"""Time limit for reading values that existed a moment ago; the store waits for a missing one."""

_ABSENT = "fft: no such key"
"""A value that no member writes."""

_TCPStore: Any = dist.TCPStore


@dataclass(frozen=True)
class ConfigureCall:
    """The arguments of torchft's ``configure()``."""

    store_addr: str
    replica_id: str
    rank: int
    world_size: int
    quorum_id: int | None
    group_rank: int | None
    group_world_size: int | None
    global_ranks: list[int] | None

    def apply_to(self, pg: Any) -> None:
        """Set the attributes of `pg` that torchft's own configure() sets."""
        pg._replica_id = self.replica_id
        pg._rank = self.rank
        pg._quorum_id = self.quorum_id
        pg._group_rank = self.group_rank
        pg._group_world_size = self.group_world_size
        pg._global_ranks = self.global_ranks

    def as_args(self) -> tuple[Any, ...]:
        """Return the arguments by position."""
        return (
            self.store_addr,
            self.replica_id,
            self.rank,
            self.world_size,
            self.quorum_id,
            self.group_rank,
            self.group_world_size,
            self.global_ranks,
        )


class RendezvousCancelled(RuntimeError):
    """The rendezvous was cancelled while a member waited in it."""


class RendezvousStore(Store):
    """A `torch.distributed.Store` for one rendezvous, in front of another store.

    Args:
        inner: The real store, with a prefix that no other rendezvous uses.
        timeout: Time limit of a wait for a key.

    Raises (from every operation):
        RendezvousCancelled: The rendezvous was cancelled.
        TimeoutError: A key did not appear in time; the text names it.
    """

    def __init__(self, inner: Store, timeout: timedelta) -> None:
        super().__init__()
        self._inner = inner
        inner.set_timeout(_READ_LIMIT)
        self._timeout = timeout
        self._cause: str | None = None
        self._cancelled = threading.Event()
        self._written: set[str] = set()
        self._missing: tuple[str, ...] = ()

    def cancel(self, cause: str) -> None:
        """Make every operation raise, also a waiting one. Safe on any thread; never blocks."""
        self._cause = cause
        self._cancelled.set()

    @property
    def missing(self) -> tuple[str, ...]:
        """Keys that a wait is missing now; empty without a wait."""
        return self._missing

    def reclaim(self, everyone: bool) -> bool:
        """Delete the keys of the rendezvous; this also works after `cancel`.

        Args:
            everyone: Delete the keys of all members, including those that died, rather than only
                the keys of this member. All members must be past this rendezvous.

        Returns:
            False if the store is gone.
        """
        try:
            keys = stored_keys(self._inner) if everyone else sorted(self._written)
            for key in keys:
                self._inner.delete_key(key)
        except (DistNetworkError, DistStoreError):
            return False
        finally:
            self._written = set()
        return True

    def _check(self) -> None:
        if self._cause is not None:
            raise RendezvousCancelled(self._cause)

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        pause = _FIRST_PAUSE
        self._missing = tuple(keys)
        while not self._inner.check(list(keys)):
            self._cancelled.wait(pause)
            self._check()
            self._missing = tuple(key for key in self._missing if not self._inner.check([key]))
            if time.monotonic() >= deadline:
                absent, waited = ", ".join(self._missing), timeout.total_seconds()
                raise TimeoutError(f"no {absent} in the rendezvous store after {waited:g} s")
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        self._missing = ()
        self._check()

    def _held(self, key: str) -> bytes:
        """Return the value of a key that was read as empty.

        A TCPStore also returns an empty value if the key is deleted between its wait and its read,
        and gloo ends the process if an address is empty.

        Raises:
            DistStoreError: The key was deleted.
        """
        held = self._inner.compare_set(key, _ABSENT, _ABSENT)  # changes nothing
        if held == _ABSENT.encode():
            raise DistStoreError(f"{key} was deleted while it was read")
        return held

    # The names, argument orders and meanings below are those of torch.distributed.Store.

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, self._timeout if timeout is None else timeout)

    def get(self, key: str) -> bytes:
        (value,) = self.multi_get([key])
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            self._wait(keys, timedelta(seconds=deadline - time.monotonic()))
            try:
                values = self._inner.multi_get(keys)
                return [value or self._held(k) for k, value in zip(keys, values, strict=True)]
            except DistStoreError:  # a writer has deleted its key meanwhile, or the store is slow
                if time.monotonic() >= deadline:
                    raise

    def set(self, key: str, value: Any) -> None:
        self._write(key)
        self._inner.set(key, value)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key: str, value: Any) -> None:
        self._write(key)
        self._inner.append(key, value)  # type: ignore[attr-defined]

    def add(self, key: str, value: int) -> int:
        self._write(key)
        return self._inner.add(key, value)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        self._write(key)
        return self._inner.compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        self._check()
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        self._check()
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        self._check()
        return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        return False

    def _write(self, key: str) -> None:
        self._check()
        self._written.add(key)


def store_client(host: str, port: int, timeout: float) -> Any:
    """Connect a new torch store client within `timeout` seconds.

    A plain connection is tried first, because torch logs and retries if no server listens. torch's
    own connecting has two unbounded waits: for the name service (one lost packet costs 5 s) and for
    the server's answer. So attempts are hedged; an abandoned one ends with its lookup or its
    connection.

    Raises:
        OSError: The store cannot be reached; the message has the reason.
    """
    socket.create_connection((host, port), timeout).close()
    limit = timedelta(seconds=timeout)

    def connect() -> Any:
        try:
            return _TCPStore(host, port, None, False, limit, wait_for_workers=False)
        except RuntimeError as error:
            raise ConnectionError(str(error).splitlines()[0]) from error

    made = hedged(connect, timeout, "fft-store-connect")
    keep_connections_alive(port=port)  # torch has no option for it
    return made


def stored_keys(store: Any) -> list[str]:
    """Return all keys of a TCPStore, or those below the prefix of a PrefixStore.

    torch's ``list_keys`` holds the interpreter's lock until the store answers, which is forever if
    its host has vanished. So ``num_keys`` is called first, which waits without that lock.
    """
    store.num_keys()
    return list(store.list_keys())
