"""Tests that all loops share one attempt: one enter and one exit of a transaction."""

from __future__ import annotations

import pytest

import fft
from fft.train.paradigms.nested import SharedInnerTransaction
from fft.train.paradigms.periodic.loop import InnerTransaction, JobsPart
from fft.train.step.attempt import AttemptContext
from fft.train.step.live import LiveBlock


@pytest.mark.parametrize(
    "kind", [fft.Transaction, InnerTransaction, SharedInnerTransaction, JobsPart, LiveBlock]
)
def test_exit_of_every_loop_is_that_of_the_attempt(kind: type[AttemptContext]) -> None:
    assert kind.__exit__ is AttemptContext.__exit__
