"""Tests of the checks that one rank runs, in this process: they pass on sound parts and fail on
others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fft.operate.diagnosis.plan import Outcome
from fft.train.step import operator_commands as checks
from fft.train.step.operator_commands import CheckSockets, Listening, connect

KEY = "0123456789abcdef" * 2
LIMIT_S = 30.0


def in_time() -> float:
    return time.monotonic() + LIMIT_S


@pytest.mark.parametrize(
    "chain", [checks.ON_PROCESSOR, pytest.param(checks.ON_ACCELERATOR, marks=pytest.mark.long)]
)
def test_the_digests_are_those_of_exact_arithmetic(chain: checks.Chain) -> None:
    numbers = np.arange(chain.size**2, dtype=np.int64)
    factor = ((numbers * 7919 % 1009) % 17 - 8).reshape(chain.size, chain.size).astype(np.float64)
    value = ((numbers * 104729 % 2003) % 17 - 8).reshape(chain.size, chain.size).astype(np.float64)
    for _ in range(chain.products):
        value = np.mod(factor @ value, 17) - 8
    assert checks._digest(value.astype(np.int8).tobytes()) == chain.digest
    if chain is checks.ON_PROCESSOR:  # the other chain would keep a busy machine busy for long
        assert checks._product(torch, "cpu", chain) == chain.digest


def test_a_sound_rank_passes() -> None:
    assert checks.compute().ok and checks.memory().ok


class Leaky:
    """Memory in which one bit of one word does not hold its value."""

    def __init__(self, words: int) -> None:
        self._words = torch.empty(words, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._words)

    def __setitem__(self, where: slice, value: torch.Tensor) -> None:
        self._words[where] = value
        self._words[40_000] |= 1 << 21

    def __getitem__(self, where: slice) -> torch.Tensor:
        return self._words[where]


def test_one_bit_that_does_not_hold_is_found() -> None:
    """One of the two patterns finds it, whatever its value is."""
    places = torch.arange(checks._PART)
    found = [checks._changed(Leaky(4 * checks._PART), places, p) for p in checks._MEMORY_PATTERNS]
    assert sorted(found) == [0, 1]


@pytest.fixture
def listening() -> Iterator[Listening]:
    made = Listening("127.0.0.1", KEY, CheckSockets())
    yield made
    made.close()


def meeting(listening: Listening, other: Any, within: float = LIMIT_S) -> Outcome:
    """Return the listening side's result of a meeting with ``other``, which runs in a thread."""
    thread = threading.Thread(target=other)
    thread.start()
    outcome = listening.run(time.monotonic() + within)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    return outcome


def test_both_sides_of_a_successful_check_report_success(listening: Listening) -> None:
    there: list[Outcome] = []
    meet = lambda: there.append(connect(listening.address, KEY, in_time(), CheckSockets()))  # noqa: E731
    assert meeting(listening, meet).ok and there[0].ok
    assert "MB/s" in there[0].text


def test_a_stranger_is_turned_away_and_the_partner_still_waited_for(listening: Listening) -> None:
    there: list[Outcome] = []

    def first_a_stranger() -> None:
        there.append(connect(listening.address, "f" * 32, in_time(), CheckSockets()))
        there.append(connect(listening.address, KEY, in_time(), CheckSockets()))

    assert meeting(listening, first_a_stranger).ok
    assert [outcome.ok for outcome in there] == [False, True]


def test_listener_without_a_peer_times_out(listening: Listening) -> None:
    outcome = listening.run(time.monotonic() + 0.2)
    assert outcome.ok is False and outcome.text == "no peer connected in time"


def test_connect_without_a_listener_is_refused(listening: Listening) -> None:
    listening.close()
    outcome = connect(listening.address, KEY, in_time(), CheckSockets())
    assert outcome.ok is False and "refused" in outcome.text


def test_departure_during_a_check_is_reported(listening: Listening) -> None:
    def leave() -> None:
        host, _, port = listening.address.rpartition(":")
        with socket.create_connection((host, int(port)), LIMIT_S) as end:
            end.sendall(checks._HELLO + KEY.encode() + b"x")

    outcome = meeting(listening, leave)
    assert outcome.ok is False
    assert "closed" in outcome.text or "reset" in outcome.text


def test_a_meeting_is_cut_short_from_another_thread() -> None:
    line = CheckSockets()
    listening = Listening("127.0.0.1", KEY, line)
    outcome = meeting(listening, line.cut, within=10 * LIMIT_S)
    listening.close()
    assert outcome.ok is False
