"""A program with live blocks that fail, and that are used wrongly, in a job of two processes."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import fft
from fft.errors import LiveBlockMisuse


def total(live: fft.LiveSet) -> float:
    number = torch.ones(1)
    dist.all_reduce(number, group=live.group)
    return number.item()


def fails_in_turn(live: fft.LiveSet) -> None:
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
        except fft.LiveBlockFailed as error:
            (failed,) = error.failed
            assert str(failed) == f"{failing}/0#1" and "out of luck" in str(error), error
            assert len(error.members) == 2 and str(failed) in str(error)
            assert isinstance(error.__cause__, ValueError) == (mine == failing)
            print("failed as expected", flush=True)
    with live() as members:
        assert total(live) == len(members) == 2


def is_refused(live: fft.LiveSet) -> None:
    """Nested blocks and blocks in different orders are refused, with the fix."""
    try:
        with live(), live():
            raise AssertionError("entered a nested block")
    except fft.LiveBlockFailed as error:
        assert isinstance(error.__cause__, LiveBlockMisuse)
        assert "cannot be nested" in str(error.__cause__)
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


if __name__ == "__main__":
    live = fft.live_set(min_members=2)
    fails_in_turn(live)
    is_refused(live)
    with live() as members:
        print("done", len(members), flush=True)
    live.close()
    sys.exit(0)
