"""A program with live blocks that fail, and that are used wrongly, in a job of two processes."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import fft
from fft.errors import LiveBlockMisuse
from fft.train.api.live_set import LiveSet


def total(live: LiveSet) -> float:
    number = torch.ones(1)
    dist.all_reduce(number, group=live.group)
    return number.item()


def fails_in_turn(live: LiveSet) -> None:
    """Both processes see the failure of one of them, whatever they are doing, and go on."""
    mine = int(live.me.group)
    for failing in (0, 1):
        try:
            with live() as members:
                assert total(live) == len(members) == 2
                if mine == failing:
                    raise ValueError("out of luck")
                while True:  # a rollback interrupts code that is in no collective
                    time.sleep(0.01)
        except fft.errors.LiveBlockFailed as error:
            (failed,) = error.failed
            assert str(failed) == f"{failing}/0#1" and "out of luck" in str(error), error
            assert len(error.members) == 2 and str(failed) in str(error)
            assert isinstance(error.__cause__, ValueError) == (mine == failing)
            print("failed as expected", flush=True)
    with live() as members:
        assert total(live) == len(members) == 2


def is_refused(live: LiveSet) -> None:
    """Nested blocks and blocks in different orders are refused, with the fix."""
    try:
        with live(), live():
            raise AssertionError("entered a nested block")
    except fft.errors.LiveBlockFailed as error:
        # no cause: the other process has failed before this one had entered the outer block
        assert error.__cause__ is None or isinstance(error.__cause__, LiveBlockMisuse)
        assert "cannot be nested" in str(error)
    try:
        if live.me.group == "0":
            with live():
                raise AssertionError("entered a block alone")
        else:
            with live():
                raise AssertionError("entered a block alone")
    except LiveBlockMisuse as error:
        assert "in the same order" in str(error) and "entry of live_script.py:" in str(error)
    with live():
        print("misuse refused", flush=True)


def is_awaited(live: LiveSet) -> None:
    """A process that does not enter a block, although it lives, is missed after the window."""
    with live():
        pass
    if live.me.group == "0":
        try:
            with live():
                raise AssertionError("entered a block alone")
        except LiveBlockMisuse as error:
            assert "not all members (0/0#1, 1/0#1) have entered it" in str(error)
            print("missed a member", flush=True)
    else:
        time.sleep(3 * WINDOW_S)  # code of the program that does not come to a block


WINDOW_S = 4.0

if __name__ == "__main__":
    is_late = sys.argv[1:] == ["late"]
    live = fft.live_set(min_members=2, timeouts={"vote_window": WINDOW_S} if is_late else None)
    if is_late:
        is_awaited(live)
    else:
        fails_in_turn(live)
        is_refused(live)
    with live() as members:
        print("done", len(members), flush=True)
    live.close()
    sys.exit(0)
