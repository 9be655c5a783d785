"""Replica groups that are far from each other: all traffic between them goes through slow links."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import slow_link
from recipe_job import Job
from torch.distributed import PrefixStore

from fft.train.process_groups import abortable
from fft.train.process_groups.rendezvous import RendezvousStore, store_client
from fft.train.state.transfer import StateTransfer


class Islands:
    """Slow links between this process and the other groups, until `close`.

    They carry the job's bus and its register (on group 0's host), the stores at which groups meet,
    the connections of their collectives, and fetched states. Traffic within a group does not use
    them.
    """

    def __init__(self, job: Job, latency_s: float, bytes_per_s: float) -> None:
        # not here: torch requests all keys from a store while it holds the interpreter lock
        slow = str(latency_s), str(bytes_per_s)
        self._links = subprocess.Popen(
            [sys.executable, slow_link.__file__, *slow],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._own_store, self._far = job.store_port, job.group > 0
        self._ports: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        self._undo: list[Callable[[], None]] = []
        self.carried: dict[str, int] = {}
        """Bytes that were carried, by kind; known at the end."""
        if self._far:
            bus = urlsplit(job.bus)
            port = self._port(bus.hostname or "", bus.port or 0, "bus")
            job.bus = bus._replace(netloc=f"{bus.hostname}:{port}").geturl()
        self._replace(abortable, "store_client", self._store_client)
        self._replace(abortable, "PrefixStore", _Prefixed)
        self._replace(abortable, "RendezvousStore", partial(_Rendezvous, self))
        self._replace(StateTransfer, "metadata", self._metadata(StateTransfer.metadata))

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append(partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _port(self, host: str, port: int, kind: str, near: tuple[int, ...] = (0,)) -> int:
        """Return the port of the link to a server, creating the link at its first use."""
        with self._lock:
            if (host, port) not in self._ports:
                asked, answers = self._links.stdin, self._links.stdout
                assert asked is not None and answers is not None
                asked.write(json.dumps([kind, host, port, near]) + "\n")
                asked.flush()
                found = int(answers.readline())
                assert found, f"no port of {near} is free"
                self._ports[host, port] = found
            return self._ports[host, port]

    def _store_client(self, host: str, port: int, timeout: float) -> Any:
        if self._far and port != self._own_store:
            port = self._port(host, port, "store")
        return store_client(host, port, timeout)

    def listener(self, host: str, port: int) -> int:
        """Return the port at which the others reach one of gloo's listeners.

        Of two ends the one with the higher port connects, so the link's port must be next to the
        real one.
        """
        return self._port(host, port, "gloo", (port + 1, port - 1))

    def _metadata(self, real: Callable[[StateTransfer], str]) -> Callable[[StateTransfer], str]:
        def metadata(transfer: StateTransfer) -> str:
            url = urlsplit(real(transfer))
            port = self._port(url.hostname or "", url.port or 0, "state")
            return url._replace(netloc=f"{url.hostname}:{port}").geturl()

        return metadata

    def close(self) -> None:
        """Restore the direct connections."""
        while self._undo:
            self._undo.pop()()
        said, _ = self._links.communicate(timeout=30)
        self.carried |= json.loads(said)


class _Prefixed(PrefixStore):
    """A store that exposes its prefix."""

    def __init__(self, prefix: str, inner: Any) -> None:
        super().__init__(prefix, inner)
        self.prefix = prefix


class _Rendezvous(RendezvousStore):
    """A store that gives the other groups the links' ports in the place of gloo's own."""

    def __init__(self, islands: Islands, inner: _Prefixed, timeout: timedelta) -> None:
        super().__init__(inner, timeout)
        self._islands, self._within = islands, inner.prefix.startswith("fft/shard/")
        self._moved: dict[bytes, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        if not self._within and isinstance(value, str) and '"listeners"' in value:
            word = json.loads(value)
            for at in word["listeners"]:
                host, port = at
                at[1] = self._islands.listener(host, port)
                self._moved[_socket_address(host, port)] = _socket_address(host, at[1])
            value = json.dumps(word)
        elif not self._within:
            was = bytes(value)
            for real, ours in self._moved.items():
                value = was = was.replace(real, ours)
        super().set(key, value)


def _socket_address(host: str, port: int) -> bytes:
    """Return the address as gloo writes it, a sockaddr_in."""
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
