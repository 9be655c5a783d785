"""Support for accelerators: waits for queued work, RNG states, and detection of lost devices.

A kernel or a copy that an aborted attempt has queued writes when its turn comes, whatever the
process does meanwhile. So before a vote, and before state is restored, FFT waits for each stream
with queued work, by one event for each: such a wait has a limit, which a wait for the whole device
has not. PyTorch's streams are found in its pools. A stream made by other code (``ExternalStream``)
is seen only while it is the current one; otherwise the step function has to wait for it.

This module touches only devices that this process uses already, and never begins to use one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from fft.errors import DeviceLost

_FIRST_PAUSE = 0.00002
_LONGEST_PAUSE = 0.0005
"""Seconds between two queries of the events, so the end of a stream is seen at most that late."""
_FATAL = {
    214: "cudaErrorECCUncorrectable",
    220: "cudaErrorNvlinkUncorrectable",
    700: "cudaErrorIllegalAddress",
    702: "cudaErrorLaunchTimeout",
    710: "cudaErrorAssert",
    714: "cudaErrorHardwareStackError",
    715: "cudaErrorIllegalInstruction",
    716: "cudaErrorMisalignedAddress",
    717: "cudaErrorInvalidAddressSpace",
    718: "cudaErrorInvalidPc",
    719: "cudaErrorLaunchFailure",
}
"""The CUDA errors after which "the process must be terminated and relaunched" (CUDA Runtime API,
cudaError_t)."""


def in_use() -> Any | None:
    """Return torch's module of the accelerator that this process uses, such as ``torch.cuda``, if
    any."""
    for module in (torch.cuda, torch.xpu):
        if module.is_initialized():
            return module
    return None


def rng_states() -> list[tuple[Callable[[Any], object], Any]]:
    """Return the random states of all devices, each with the function that restores it."""
    module = in_use()
    return [] if module is None else [(module.set_rng_state_all, module.get_rng_state_all())]


def wait(limit: timedelta) -> int:
    """Wait for all work that is queued now on this process's devices; return the number of busy
    streams.

    Raises:
        TimeoutError: Some work is still running after ``limit``.
        DeviceLost: The device has failed.
    """
    module = in_use()
    if module is None:
        return 0
    deadline = time.monotonic() + limit.total_seconds()
    try:
        events = [s.record_event() for s in _streams(module) if not s.query()]
        busy, pause = len(events), _FIRST_PAUSE
        while events := [event for event in events if not event.query()]:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{len(events)} of the device's streams are still busy after "
                    f"{limit.total_seconds():g} s; a kernel or a copy of the step may hang"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
    except RuntimeError as error:
        refuse_lost(error)
        raise
    return busy


def refuse_lost(error: Exception) -> None:
    """Raise DeviceLost if this process can no longer use its device after ``error``.

    Some errors are recognized by their number. For others the device is queried, since every call
    fails after a fatal error. Nothing is queried if no device is in use.
    """
    if _code(error) in _FATAL:
        raise _lost(error) from error
    module = in_use()
    if module is None:
        return
    try:
        module.current_stream().query()
    except RuntimeError as answer:
        if _code(answer) in _FATAL or _code(answer) is None:
            raise _lost(answer) from error


def _streams(module: Any) -> Iterator[Any]:
    """Yield the streams of every device that this process has a context on, in pools and others."""
    for device in _devices(module):
        known: dict[int, Any] = {s.stream_id: s for s in _pools(module, device)}
        for stream in (module.default_stream(device), module.current_stream(device)):
            known[stream.stream_id] = stream
        yield from known.values()


def _devices(module: Any) -> list[int]:
    # there is no public function for this; asking for a stream of a device would make the context
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if module is not torch.cuda or has_context is None:
        return [module.current_device()]
    return [device for device in range(module.device_count()) if has_context(device)]


@cache
def _pools(module: Any, device: int) -> list[Any]:
    """Return every stream of PyTorch's pools on ``device``.

    A new ``Stream`` is the next one of its pool, in turn.
    """
    least, greatest = getattr(module.Stream, "priority_range", lambda: (0, -1))()
    found: dict[int, Any] = {}
    for priority in range(greatest, least + 1):
        seen, again = len(found), 0
        # two rounds, since other threads may take streams in between
        while again <= 2 * (len(found) - seen):
            stream = module.Stream(device=device, priority=priority)
            again = again + 1 if stream.stream_id in found else 0
            found[stream.stream_id] = stream
    return list(found.values())


def _code(error: BaseException) -> int | None:
    """Return the device's own number of ``error``, a ``torch.AcceleratorError``; else None."""
    return getattr(error, "error_code", None)


def _lost(error: BaseException) -> DeviceLost:
    text = (str(error).splitlines() or [""])[0]
    name = _FATAL.get(_code(error) or 0)
    return DeviceLost(
        f"a device is lost to this process: {text}{f' ({name})' if name else ''}. The process must "
        "end and start again (`fft run` does that); if the same device fails again, take its "
        "machine out"
    )
