"""Tests of the connection between two stages: which peers may connect, and what they may send."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import torch
from numpy import zeros

from fft.errors import FftError
from fft.train.paradigms.stages import output as link
from fft.train.paradigms.stages.output import Unauthenticated, authenticate, cpu_copy, packed
from fft.util.listening import Waiting

KEY = b"k" * 32


def met(mine: bytes, theirs: bytes) -> list[object]:
    """Return the results of both ends of a connection: the message received, or the error."""
    ends, found = socket.socketpair(), [None, None]

    def meet(number: int, key: bytes) -> None:
        try:
            with authenticate(ends[number], key, first=number == 0) as connection:
                if number:
                    connection.send_bytes(packed({"value": 7}))
                else:
                    found[0] = connection.recv_bytes()  # type: ignore[call-overload]
        except Unauthenticated as error:
            found[number] = error  # type: ignore[call-overload]

    other = threading.Thread(target=meet, args=(1, theirs))
    other.start()
    meet(0, mine)
    other.join(20.0)
    assert not other.is_alive()
    return found


def test_only_peers_with_the_key_are_accepted() -> None:
    received, no_error = met(KEY, KEY)
    assert isinstance(received, bytes)
    assert no_error is None
    assert all(isinstance(error, Unauthenticated) for error in met(KEY, b"x" * 32))


def test_silent_peer_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_GREET_S", 0.2)
    mine, theirs = socket.socketpair()
    with theirs, pytest.raises(Unauthenticated):
        authenticate(mine, KEY, first=True)


def test_displaced_peer_is_not_awaited() -> None:
    """The descriptor that `Waiting` shuts down is still the peer's."""
    mine, theirs = socket.socketpair()
    waiting, found = Waiting(most=1), list[Unauthenticated]()

    def meet() -> None:
        try:
            authenticate(mine, KEY, first=True)
        except Unauthenticated as error:
            found.append(error)

    waiting.enter(mine, "a")
    thread = threading.Thread(target=meet)
    thread.start()
    with theirs:
        assert theirs.recv(1), "the challenge"
        waiting.enter(theirs, "a")
        thread.join(link._GREET_S / 2)
        assert found


@pytest.mark.parametrize("odd", [zeros(3), Path("x"), {1, 2}, torch.float32, object()])
def test_unreadable_value_is_refused_by_put(odd: object) -> None:
    with pytest.raises(FftError, match="convert it to a tensor"):
        cpu_copy(odd)


def test_an_entry_is_a_copy_without_gradients() -> None:
    given = torch.ones(3, requires_grad=True)
    kept = cpu_copy(given)
    with torch.no_grad():
        given.add_(1.0)
    assert kept.tolist() == [1.0, 1.0, 1.0]
    assert not kept.requires_grad
