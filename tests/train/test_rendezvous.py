"""Tests of a rendezvous whose store is on a vanished host: withdrawing keys blocks no other
rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist
from forked import Forked
from torch.distributed import PrefixStore
from torchft import ProcessGroupGloo

from fft.bus.tcpserver import host_store
from fft.train.process_groups import AbortableGroup
from fft.train.process_groups.rendezvous import RendezvousCancelled, RendezvousStore

LIMIT = timedelta(seconds=60)
SAFETY_S = 15.0


def serve() -> None:
    """Print the port of a store, until there is no reader."""
    _store, port = host_store()
    print(port, flush=True)
    sys.stdin.read()


@pytest.fixture
def server() -> Iterator[Forked]:
    made = Forked(serve, talks=True)
    yield made
    made.close()


def woken_after(seconds: float, pid: int) -> subprocess.Popen[bytes]:
    """Return a process that resumes ``pid`` if this process cannot."""
    return subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {pid}"])


def test_silent_store_blocks_only_its_cleaner(
    server: Forked,
) -> None:
    port = int(server.stdout.readline())
    client = dist.TCPStore("127.0.0.1", port, None, False, LIMIT, wait_for_workers=False)
    store = RendezvousStore(PrefixStore("epoch", client), LIMIT)
    store.set("a", "1")
    safety = woken_after(SAFETY_S, server.pid)
    try:
        server.stop()
        thread = threading.Thread(target=store.reclaim, args=(True,))
        thread.start()
        time.sleep(0.2)  # gives the other the chance to keep the lock
        assert thread.is_alive(), "this thread did not run until the store answered"
    finally:
        os.kill(server.pid, signal.SIGCONT)
        with suppress(ProcessLookupError):
            safety.kill()
        safety.wait()
    thread.join(60)
    assert not thread.is_alive() and not client.check(["epoch/a"])


def test_group_with_a_silent_store_closes_in_bounded_time(server: Forked) -> None:
    port = int(server.stdout.readline())
    group = AbortableGroup(ProcessGroupGloo(LIMIT))
    group.configure(f"127.0.0.1:{port}/epoch", "0", 0, 1)
    safety = woken_after(SAFETY_S + 10, server.pid)
    try:
        server.stop()
        since = time.monotonic()
        group.close()
        assert time.monotonic() < since + SAFETY_S
    finally:
        os.kill(server.pid, signal.SIGCONT)
        with suppress(ProcessLookupError):
            safety.kill()
        safety.wait()


class TakenBack(PrefixStore):
    """A store whose writer withdraws a key as soon as it was read."""

    def check(self, keys: list[str]) -> bool:
        found: bool = super().check(keys)
        for key in keys:
            super().delete_key(key)
        return found


def test_withdrawn_key_is_awaited_like_a_missing_one() -> None:
    """An aborted rank withdraws its keys; the rank that just reads one of them is aborted, too."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
    inner = TakenBack("fft", server)
    store = RendezvousStore(inner, LIMIT)
    inner.set("a", "x")
    caught: list[BaseException] = []

    def read() -> None:
        try:
            store.get("a")
        except RendezvousCancelled as error:
            caught.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    deadline = time.monotonic() + SAFETY_S
    while server.check(["fft/a"]):
        assert time.monotonic() < deadline, "nobody reads the key"
    store.cancel("a rank has died")
    reader.join(SAFETY_S)
    assert [str(error) for error in caught] == ["a rank has died"]


def test_key_withdrawn_between_wait_and_read_is_not_read_as_empty() -> None:
    """torch's store reads an empty value then, which gloo takes for an address, and the process
    ends."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
    writer, reader = (
        dist.TCPStore("127.0.0.1", server.port, None, False, LIMIT, wait_for_workers=False)
        for _ in range(2)
    )
    store, over = RendezvousStore(PrefixStore("fft", reader), LIMIT), threading.Event()

    def write() -> None:
        while not over.is_set():
            writer.set("fft/a", "x")
            writer.delete_key("fft/a")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert {store.get("a") for _ in range(100)} == {b"x"}
    finally:
        over.set()
        thread.join()


def test_existing_key_is_read_with_any_value() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
    store = RendezvousStore(PrefixStore("fft", server), LIMIT)
    for value in (b"", b"\xff\x00", b"text"):
        store.set("a", value)
        assert store.get("a") == value
        assert store.multi_get(["a", "a"]) == [value, value]
