"""A device that fails for good: the process that uses it leaves, and the job goes on.

The error is CUDA's own, raised in the body; without an accelerator nothing else can be asked.
"""

from __future__ import annotations

from pathlib import Path

import torch
from stage import Member, job, notes

import fft
from fft.util.errors import DeviceLost

STEPS = 6


def test_a_lost_device_ends_its_group_at_once_and_no_other(tmp_path: Path) -> None:
    def fail(member: Member, txn: fft.Transaction) -> None:
        if member.group == "1" and txn.step == 2:
            error = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
            error.error_code = 214
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
