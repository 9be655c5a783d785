"""gloo's own group and devices, made as torchft and torch make them, of devices that FFT knows."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fft.train.process_group.freeing import time_left
from fft.train.process_group.rendezvous import RendezvousStore

if TYPE_CHECKING:
    from fft.train.process_group.abortable import _Call


def device_makers() -> list[Callable[[], Any]]:
    """One maker for each gloo device, chosen as torch chooses them (GLOO_SOCKET_IFNAME)."""
    gloo = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [gloo.create_default_device]
    return [lambda name=name: gloo.create_device(interface=name) for name in names]  # type: ignore[misc]


def gloo_group(
    store: RendezvousStore, devices: list[Any], call: _Call, timeout: timedelta, deadline: float
) -> dist.ProcessGroup:
    """What torchft's ProcessGroupGloo._create_pg builds, on devices of our own."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = devices
    options._threads = 2 * len(devices)
    # for connecting, where gloo waits up to five times as long; ops get the group's own below
    options._timeout = time_left(deadline) / 5
    backend: Any = dist.ProcessGroupGloo(store, call.rank, call.world_size, options)
    backend._set_default_timeout(timeout)
    backend._set_sequence_number_for_group()
    if call.global_ranks:
        backend.options.global_ranks_in_group = call.global_ranks
    if call.group_rank is not None and call.group_world_size:
        slot = call.group_rank % call.group_world_size
        backend.options.group_name = f"torchft_quorum_{call.quorum_id}_rank_{slot}"
    pg = dist.ProcessGroup(store, call.rank, call.world_size)
    pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    kinds = ["cpu"]
    kinds += ["cuda"] if torch.cuda.is_available() else []
    kinds += ["xpu"] if torch.xpu.is_available() else []
    for kind in kinds:
        pg._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
    return pg
