"""A restartable function in a job of two processes: an error, a death, and the end of the job."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import fft
from fft.train.api.restartable import Call

ORDER: list[str] = []


def add_hooks(manager: fft.ManagerFFT) -> None:
    for kind in ("on_join", "on_abort", "on_unwound", "health_check", "on_complete", "on_leave"):
        getattr(manager, kind)(lambda kind=kind: ORDER.append(kind))


@fft.restartable(min_members=2, max_restarts=2, stop_on=KeyError, hooks=add_hooks)
def add(call: Call, number: float) -> float:
    assert call.world_size == len(call.members) == 2
    me = call.members[call.rank]
    print(f"iteration {call.iteration} of {me}", flush=True)
    total = torch.tensor([number])
    dist.all_reduce(total, group=call.group)
    if me.group == "1" and call.iteration < 2:
        if call.iteration == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("out of luck")
    if call.iteration == 2 and me.group == "0" and sys.argv[1] != "ends":
        raise KeyError("for ever") if sys.argv[1] == "stops" else ValueError("too often")
    while call.iteration < 2 or sys.argv[1] != "ends":
        time.sleep(0.01)  # the failure of the other one interrupts this loop
    with call.atomic():
        call.ping()
    return total.item()


try:
    print("sum", add(3.0), flush=True)
except fft.FftError as error:
    print(type(error).__name__, error, flush=True)
print("order", *ORDER, flush=True)
