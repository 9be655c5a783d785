"""Tests of what a rank in a step function does about messages of ranks without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from fft.messages.causes import CauseCode
from fft.messages.effects import StartTxn
from fft.messages.protocol import STOP, Fault, NoStep, Peer, Token
from fft.train.session.participation import Participation
from fft.train.step.attempt import StepPresence

A, B, C = (Peer(group, 0, 1) for group in "ABC")
BLOCK = "entry of train.py:31"
TXN = StartTxn(Token(3, 2), 5, "x", 10, 0, 3, ("A", "B", "C"), 1)
BLOCKED, STOPPED = NoStep(A, TXN.token, BLOCK), NoStep(B, TXN.token, STOP)
OLDER = NoStep(B, Token(3, 1), STOP)


class Posts:
    """Collects what `StepPresence` posts to the engine."""

    def __init__(self) -> None:
        self.peer, self.events = C, list[Fault]()

    def post(self, event: Fault) -> None:
        self.events.append(event)


def presence() -> tuple[StepPresence, list[Fault]]:
    posts = Posts()
    return StepPresence(cast("Participation", cast("Any", posts))), posts.events


@pytest.mark.parametrize("messages", [(BLOCKED, STOPPED), (STOPPED, BLOCKED)])
def test_stop_wins_over_a_live_block_of_the_same_txn(messages: tuple[NoStep, NoStep]) -> None:
    step, faults = presence()
    for message in messages:
        step.receive(message)
    step.begin(TXN)
    assert [(f.token, f.code) for f in faults] == [(TXN.token, CauseCode.STOPPED)]


def test_late_message_of_an_older_txn_replaces_no_newer_one() -> None:
    step, faults = presence()
    for message in (BLOCKED, OLDER):
        step.receive(message)
    step.begin(TXN)
    assert [f.code for f in faults] == [CauseCode.BLOCK_BESIDE_STEP]


def test_running_step_reports_a_stop_after_a_live_block_once() -> None:
    step, faults = presence()
    step.begin(TXN)
    for message in (OLDER, BLOCKED, BLOCKED, STOPPED, STOPPED, BLOCKED):
        step.receive(message)
    assert [f.code for f in faults] == [CauseCode.BLOCK_BESIDE_STEP, CauseCode.STOPPED]


def test_message_from_another_place_does_not_speak_for_this_one() -> None:
    step, _ = presence()
    assert not step.has_message(TXN, STOP)
    step.receive(BLOCKED)
    assert step.has_message(TXN, BLOCK) and not step.has_message(TXN, STOP)
    assert not step.has_message(replace(TXN, token=Token(3, 3)), BLOCK)
