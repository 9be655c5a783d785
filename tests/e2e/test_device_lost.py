"""Tests of a device that fails permanently: the process that uses it leaves, and the job continues.

The error is CUDA's own, raised in the step function; without an accelerator no other part of CUDA
is tested.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from stage import Member, aborts, job, notes

import fft
from fft.errors import DeviceLost

STEPS = 6


def test_a_lost_device_ends_its_group_at_once_and_no_other(tmp_path: Path) -> None:
    def fail(member: Member, txn: fft.Transaction) -> None:
        if member.group == "1" and txn.step == 2:
            error = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
            error.error_code = 214  # type: ignore[attr-defined]
            raise error

    with job(tmp_path, 2) as made:
        members = [made.member(str(g)) for g in range(2)]
        for member in members:
            member.start(lambda m: m.train(STEPS, body=fail))
        for member in members:
            member.end()
        made.audit()
    stays, lost = members
    assert stays.error is None
    assert stays.manager.current_step() == STEPS
    assert isinstance(lost.error, DeviceLost)
    assert "uncorrectable ECC" in str(lost.error)
    assert isinstance(lost.error.__cause__, torch.AcceleratorError)
    assert lost.manager.current_step() == 2, "no second attempt on that device"
    assert any("DeviceLost" in str(note) for note in notes(tmp_path, "fault"))


def test_step_with_unfinished_kernels_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waits for a device are replaced, as there is none. Everything else is a normal job."""
    waits = []

    def wait(limit: timedelta) -> int:
        waits.append(limit)
        if len(waits) == 3:
            raise TimeoutError("1 of the device's streams are still busy after 20 s")
        return 0

    with job(tmp_path, 1) as made:
        member = made.member("0")
        monkeypatch.setattr("fft.train.gradients.reductions.accelerator.wait", wait)
        member.start(lambda m: m.train(STEPS))
        member.end()
        made.audit()
    assert member.error is None
    assert member.manager.current_step() == STEPS
    (abort,) = aborts(tmp_path)
    assert "streams are still busy" in str(abort)
