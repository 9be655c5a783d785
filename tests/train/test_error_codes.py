"""Tests that an error of a rank gets the code by which it accuses this rank, or none."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fft.errors import BusError, NoLighthouseQuorum
from fft.messages.causes import CauseCode
from fft.train.guard.injector import InjectedFault
from fft.train.process_groups.op_errors import CollectiveFailed, GroupAborted
from fft.train.session.error_reports import code_of
from fft.train.state.transfer import TransferError

INJECTED = InjectedFault("x", "exception", "forward", group="0", rank=0, step=1)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("connection closed by peer"), CauseCode.STEP_FAILED),
        (FileNotFoundError("socket"), CauseCode.STEP_FAILED),
        (INJECTED, CauseCode.STEP_FAILED),
        (CollectiveFailed("all_reduce", "boom"), CauseCode.COLLECTIVE_FAILED),
        (GroupAborted("boom"), CauseCode.COLLECTIVE_FAILED),
        (dist.DistNetworkError("boom"), CauseCode.COLLECTIVE_FAILED),
        (BrokenPipeError("boom"), CauseCode.COLLECTIVE_FAILED),
        (TransferError("boom"), CauseCode.COLLECTIVE_FAILED),
        (BusError("boom"), CauseCode.COLLECTIVE_FAILED),
        (NoLighthouseQuorum("boom"), CauseCode.NO_LIGHTHOUSE_QUORUM),
    ],
    ids=lambda value: type(value).__name__,
)
def test_code_depends_on_the_class_of_the_error(error: Exception, code: CauseCode) -> None:
    assert code_of(error) == code


def test_plain_error_from_within_torch_distributed_accuses_no_rank() -> None:
    with pytest.raises(TypeError) as raised:
        dist.all_reduce(None)
    error = RuntimeError("boom").with_traceback(raised.value.__traceback__)
    own = RuntimeError("boom")
    assert code_of(own, own=CauseCode.EPOCH_FAILED) == CauseCode.EPOCH_FAILED
    assert code_of(error) == CauseCode.COLLECTIVE_FAILED
