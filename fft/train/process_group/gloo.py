"""Create gloo's group as torchft and torch do, but on devices that FFT creates and knows."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fft.errors import FftError
from fft.train.process_group.gloo_waits import time_left
from fft.train.process_group.rendezvous import ConfigureCall, RendezvousStore

VARIABLE = "GLOO_SOCKET_IFNAME"


def device_makers(address: str | None) -> list[Callable[[], Any]]:
    """Return one function per gloo device, which creates the device.

    The devices are those of the interfaces in GLOO_SOCKET_IFNAME. Without these there is one device
    on ``address``, or, if that is None, on the address that torch finds by the host's name.
    """
    gloo = dist.ProcessGroupGloo
    names = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    if not names and address is not None:
        return [lambda: gloo.create_device(hostname=address)]
    if not names:
        return [gloo.create_default_device]
    return [lambda name=name: gloo.create_device(interface=name) for name in names]  # type: ignore[misc]


def check_interfaces(environ: Mapping[str, str] = os.environ) -> None:
    """Raise FftError if GLOO_SOCKET_IFNAME names an interface that gloo cannot listen on.

    Without this check every epoch would fail while it builds its process groups, and be retried.
    """
    value = environ.get(VARIABLE, "")
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, value.split(",")):
        trouble = f"this host has no network interface {name!r}"
        if name in there:
            try:
                dist.ProcessGroupGloo.create_device(interface=name)
                continue
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                trouble = f"interface {name!r} has no address, or is down (gloo: {reason})"
        raise FftError(
            f"{VARIABLE}={value}: {trouble}. gloo takes exact names, separated by commas, without "
            f"the ^ and = of NCCL_SOCKET_IFNAME; this host has {', '.join(there)}. Unset "
            f"{VARIABLE} to use the interface that leads to the bus"
        )


def gloo_group(
    store: RendezvousStore,
    devices: list[Any],
    call: ConfigureCall,
    timeout: timedelta,
    deadline: float,
) -> dist.ProcessGroup:
    """Build what torchft's ProcessGroupGloo._create_pg builds, on ``devices``."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = devices
    options._threads = 2 * len(devices)
    # for connecting, where gloo waits up to five times as long; ops use the group's timeout below
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
