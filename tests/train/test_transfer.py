"""Tests of state transfer: what arrives is what was sent, and every way in which it can fail."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import torch
from torch.utils._pytree import tree_flatten
from torchft.checkpointing.http_transport import HTTPTransport

import fft.train.state.transfer as transfer_module
from fft.bus.token import JobToken
from fft.errors import FftError
from fft.messages.effects import Heal
from fft.messages.protocol import GroupEntry, Peer, RankEntry, Record
from fft.train.state.transfer import StateTransfer, TransferError
from fft.train.step.healing import StateExchange

TOKEN = JobToken.fresh()
LIMIT = timedelta(seconds=60)
SOON = timedelta(seconds=0.3)
Make = Callable[..., StateTransfer]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[StateTransfer] = []

    def one(
        token: JobToken | None = TOKEN, timeout: timedelta = LIMIT, **more: Any
    ) -> StateTransfer:
        made.append(StateTransfer(token, timeout, address="127.0.0.1", **more))
        return made[-1]

    yield one
    for transfer in made:
        transfer.shutdown()
        transfer.shutdown()
    assert not [t for t in threading.enumerate() if t.name.startswith("fft-transfer")]


def state() -> dict[str, Any]:
    base = torch.randn(1000, 70)
    return {
        "fft": {"lineage": "ab", "cursor": 3},
        "long": torch.randn(3 * 2**20 // 4 + 5),
        "odd": torch.arange(5000, dtype=torch.int16)[1:],
        "view": [base[:, 3], base.t()],
        "half": torch.randn(33).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "bool": torch.tensor([True, False]),
        "many": {f"p{i}": torch.full((7,), i) for i in range(300)},
        "plain": (1, 2.5, "é", b"bytes" * 3000, None, True, [1, {2: 3}]),
        "ordered": OrderedDict(a=1),
    }


def same(a: Any, b: Any) -> bool:
    (ours, shape), (theirs, other) = tree_flatten(a), tree_flatten(b)
    return shape == other and all(
        torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("token", [TOKEN, None])
def test_received_state_equals_the_sent_state(make: Make, token: JobToken | None) -> None:
    sender, receiver = make(token), make(token)
    sent = state()
    for step in (3, 4):
        sender.send_checkpoint([1], step, sent, LIMIT)
        got = receiver.recv_checkpoint(0, sender.metadata(), step, LIMIT)
        assert same(got, sent)
        assert got["long"].data_ptr() % got["long"].element_size() == 0
        got["long"].add_(1)  # the tensor is writable, and shared with no other object
        assert not torch.equal(got["long"], sent["long"])
        sender.disallow_checkpoint()


def test_early_request_waits_for_the_offer(make: Make) -> None:
    sender, receiver = make(), make()
    got: list[Any] = []
    asks = threading.Thread(
        target=lambda: got.append(receiver.recv_checkpoint(0, sender.metadata(), 1, LIMIT))
    )
    asks.start()
    sender.send_checkpoint([1], 1, {"a": 1}, LIMIT)
    asks.join(60)
    assert got == [{"a": 1}]


def refused(receiver: StateTransfer, sender: StateTransfer, step: int, expected: str) -> None:
    with pytest.raises(TransferError, match=expected) as caught:
        receiver.recv_checkpoint(0, sender.metadata(), step, LIMIT)
    assert sender.metadata() in str(caught.value)


def test_each_thing_that_is_not_the_state_asked_for_is_named(make: Make) -> None:
    sender, receiver, stranger = make(timeout=SOON), make(), make(JobToken.fresh())
    refused(receiver, sender, 1, "503 no state is offered")
    sender.state_id = receiver.state_id = "epoch 4, lineage ab"
    sender.send_checkpoint([1], 1, state(), LIMIT)
    refused(receiver, sender, 2, "409 this rank offers the state of another step")
    refused(stranger, sender, 1, "403 .*token")
    receiver.state_id = "epoch 5, lineage ab"
    refused(receiver, sender, 1, "409 this rank offers the state of another step")
    with pytest.raises(TransferError, match="not an address of FFT's state transfer"):
        receiver.recv_checkpoint(0, "nccl://x", 1, LIMIT)
    small = make(max_bytes=1000)
    small.state_id = sender.state_id
    refused(small, sender, 1, "limit here is 1000")
    sender.disallow_checkpoint()
    refused(receiver, sender, 1, "503 no state is offered")


def test_a_peer_that_is_gone_is_named(make: Make) -> None:
    sender, receiver = make(), make()
    where = sender.metadata()
    sender.shutdown()
    with pytest.raises(TransferError, match=where):
        receiver.recv_checkpoint(0, where, 1, LIMIT)


class Evil:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Evil, "ran", True)


def test_code_in_a_state_is_not_run_even_from_a_peer_with_the_token(make: Make) -> None:
    sender, receiver = make(), make()
    sender.send_checkpoint([1], 1, {"a": Evil()}, LIMIT)
    refused(receiver, sender, 1, "cannot be loaded without running code")
    assert not Evil.ran


class Relay:
    """A proxy between the two that forwards the answer after ``change``, then closes."""

    def __init__(self, sender: StateTransfer, change: Callable[[bytes], bytes]) -> None:
        self._to = urlsplit(sender.metadata())
        self._change = change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(30)
        self.request = b""
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}{self._to.path}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listening.accept()
        with client:
            self.request = client.recv(4096)
            client.sendall(self._change(self.ask(self.request)))

    def ask(self, request: bytes) -> bytes:
        assert self._to.hostname and self._to.port
        with socket.create_connection((self._to.hostname, self._to.port), 30) as peer:
            peer.sendall(request)
            answer = b""
            while more := peer.recv(2**20):
                answer += more
        return answer

    def close(self) -> None:
        self._thread.join(30)
        self._listening.close()


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "one bit of the state": lambda a: a[:-5000] + bytes([a[-5000] ^ 1]) + a[-4999:],
    "one bit of the last tag": lambda a: a[:-1] + bytes([a[-1] ^ 1]),
    "the length": lambda a: a.replace(b"\r\n\r\n", b"\r\n\r\n\xff\xff\xff\xff", 1),
    "torn": lambda a: a[: len(a) // 2],
    "torn in its head": lambda a: a[:10],
    "nothing": lambda a: b"",
    "a head without an end": lambda a: b"x" * 10_000,
    "another status": lambda a: b"HTTP/1.0 302 Found\r\n\r\n",
}


@pytest.mark.parametrize("change", CHANGES)
def test_altered_transfer_is_not_loaded(
    make: Make, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("it was loaded before it was verified")

    monkeypatch.setattr(transfer_module, "_streaming_load", load)
    sender, receiver = make(), make()
    sender.send_checkpoint([1], 1, state(), LIMIT)
    relay = Relay(sender, CHANGES[change])
    with pytest.raises(TransferError):
        receiver.recv_checkpoint(0, relay.url, 1, LIMIT)
    relay.close()


def test_a_recorded_request_gets_no_second_answer(make: Make) -> None:
    sender, receiver = make(), make()
    sender.send_checkpoint([1], 1, {"a": 1}, LIMIT)
    relay = Relay(sender, lambda answer: answer)
    assert receiver.recv_checkpoint(0, relay.url, 1, LIMIT) == {"a": 1}
    relay.close()
    assert relay.ask(relay.request).startswith(b"HTTP/1.0 403 the request was answered before")


def test_a_silent_peer_is_given_up_at_the_deadline(make: Make) -> None:
    receiver = make()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        with pytest.raises(TransferError, match=r"timed out|within the timeout"):
            receiver.recv_checkpoint(0, url, 1, SOON)


def test_fetch_from_a_silent_peer_ends_with_the_epoch(make: Make) -> None:
    receiver = make()
    failures: list[TransferError] = []

    def fetch(url: str) -> None:
        try:
            receiver.recv_checkpoint(0, url, 1, LIMIT)
        except TransferError as error:
            failures.append(error)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        asks = threading.Thread(target=fetch, args=(url,))
        asks.start()
        peer, _ = silent.accept()
        with peer:
            assert peer.recv(100)
            receiver.interrupt()
            asks.join(30)
    assert len(failures) == 1 and not receiver._fetching


@pytest.mark.parametrize("ends", ["its time", "its epoch"])
def test_a_receiver_that_stops_reading_does_not_hold_up_the_sender(make: Make, ends: str) -> None:
    sender, receiver = make(), make()
    offered = SOON if ends == "its time" else timedelta(seconds=1000)
    sender.send_checkpoint([1], 1, {"a": torch.zeros(2**24)}, offered)
    path = receiver._request_tag  # a request as the receiver makes it, without reading the answer
    to, what = urlsplit(sender.metadata()), transfer_module._what(1, "")
    server = to.path.strip("/")
    request = f"GET /{server}/{what}/n/{path(server, what, 'n')} HTTP/1.0\r\n\r\n"
    assert to.hostname
    with socket.create_connection((to.hostname, to.port), 30) as lazy:
        lazy.sendall(request.encode())
        assert lazy.recv(10) == b"HTTP/1.0 2"
        began = time.monotonic()
        if ends == "its epoch":
            sender.interrupt()
        sender.disallow_checkpoint()
        assert not sender._sending
        assert time.monotonic() - began < 30
    sender.send_checkpoint([1], 2, {"a": 2}, LIMIT)
    assert receiver.recv_checkpoint(0, sender.metadata(), 2, LIMIT) == {"a": 2}


def test_silent_outside_connections_are_bounded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "_HEAD_S", 0.2)
    sender, receiver = make(), make()
    sender.send_checkpoint([1], 1, {"a": 1}, LIMIT)
    to = urlsplit(sender.metadata())
    assert to.hostname
    idle = [socket.create_connection((to.hostname, to.port), 30) for _ in range(40)]
    assert receiver.recv_checkpoint(0, sender.metadata(), 1, LIMIT) == {"a": 1}
    for one in idle:
        with suppress(ConnectionResetError):
            assert one.recv(100) == b"", "it is cut off when its time for a request is over"
        one.close()
    workers = [t for t in threading.enumerate() if t.name.startswith("fft-transfer")]
    assert len(workers) <= transfer_module.WORKERS + 2


def test_silent_connections_do_not_keep_out_a_peer(make: Make) -> None:
    """1,100 connections are opened at once, and more of them while the state is fetched."""
    silent, weights = 1100, torch.randn(4_000_000)
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(raised[0], 2 * silent + 500), raised[1]))
    sender, receiver = make(), make()
    sender.send_checkpoint([1], 1, {"a": weights}, LIMIT)
    to = urlsplit(sender.metadata())
    place, over = (to.hostname or "", to.port or 0), threading.Event()
    with ExitStack() as undo:
        for _ in range(silent):
            undo.enter_context(socket.create_connection(place, 30))

        def go_on() -> None:
            while not over.wait(0.001):
                undo.enter_context(socket.create_connection(place, 30))

        flood = threading.Thread(target=go_on)
        flood.start()
        try:
            began = time.monotonic()
            got = receiver.recv_checkpoint(0, sender.metadata(), 1, LIMIT)
            took = time.monotonic() - began
        finally:
            over.set()
            flood.join()
    resource.setrlimit(resource.RLIMIT_NOFILE, raised)
    assert torch.equal(got["a"], weights)
    assert took < transfer_module._HEAD_S, "no connection had to run into its deadline"
    workers = [t for t in threading.enumerate() if t.name.startswith("fft-transfer")]
    assert len(workers) <= 2 * (transfer_module.WORKERS + 1)


class Exported:
    """The state that a rank exports for an epoch."""

    def export(self, record: Record) -> dict[str, Any]:
        return {"fft": {"lineage": record.lineage, "cursor": 3}, "weight": torch.ones(3)}


@pytest.fixture
def torchfts() -> Iterator[Callable[[], HTTPTransport[Any]]]:
    made: list[HTTPTransport[Any]] = []

    def one() -> HTTPTransport[Any]:
        made.append(HTTPTransport(LIMIT, num_chunks=0))
        return made[-1]

    yield one
    for transport in made:
        transport.shutdown()


@pytest.mark.parametrize("offered", ["ab", "cd"])
def test_fetch_over_a_torchft_transport_refuses_another_lineage(
    offered: str, torchfts: Callable[[], HTTPTransport[Any]]
) -> None:
    """torchft's transports compare the step alone: equal steps can have different lineages."""
    sender, receiver = torchfts(), torchfts()

    def exchange(transport: HTTPTransport[Any]) -> StateExchange:
        torchft = SimpleNamespace(checkpoint_transport=transport, timeout=LIMIT, group_rank=0)
        manager = SimpleNamespace(_torchft=torchft)
        return StateExchange(cast("Any", manager), cast("Any", Exported()), None, lambda *_: None)

    rank = RankEntry(0, 1, True, sender.metadata(), 1, "host")
    members = tuple(GroupEntry(g, f"store-{g}", (rank,)) for g in ("0", "1"))
    record = Record(2, "epoch", 2, 0, 4, "ab", 3, 3, Peer("0", 0, 1), members)
    giver, taker = exchange(sender), exchange(receiver)
    giver.send(Heal(replace(record, lineage=offered), 0, None, (1,)))
    fetching = Heal(record, 1, 0, ())
    try:
        if offered == "ab":
            payload, size = taker.fetch(fetching)
            assert payload["weight"].tolist() == [1, 1, 1] and size == 12
        else:
            with pytest.raises(FftError, match="fetched lineage cd, the epoch needs ab"):
                taker.fetch(fetching)
    finally:
        giver.withdraw()
