"""Tests of the rollback with a simulated device; they need no accelerator.

`Device` replaces ``torch.cuda``: streams in pools that are handed out in turn, events that complete
with the work before them, generators, and errors from every call once the device has failed.
``python -m tests.acceptance.gpu`` tests a real GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from rollback_harness import store_server
from torch import nn
from torchft import ProcessGroupGloo

from fft.errors import DeviceLost
from fft.train.guard import accelerator
from fft.train.process_groups import AbortableGroup
from fft.train.state.fingerprint import fingerprint
from fft.train.state.random_states import capture_random, export_random, load_random
from fft.train.state.step_state import StepState
from fft.util.error_places import place_of

SOON, NEVER = timedelta(seconds=30), timedelta(milliseconds=30)
POOL = 4


class Stream:
    """One queue with its numbers of queued and completed operations."""

    def __init__(self, device: Device, number: int) -> None:
        self.device, self.stream_id = device, number
        self.queued = self.done = 0

    def query(self) -> bool:
        self.device.answer()
        return self.done >= self.queued

    def record_event(self) -> Event:
        return Event(self, self.queued)


class Event:
    """An event that completes when its stream has reached it."""

    def __init__(self, stream: Stream, at: int) -> None:
        self.stream, self.at = stream, at

    def query(self) -> bool:
        self.stream.device.answer()
        self.stream.device.looks += 1
        self.stream.device.on_look()
        return self.stream.done >= self.at


class Device:
    """The replacement for ``torch.cuda``."""

    def __init__(self) -> None:
        self.default = Stream(self, 0)
        self.pools = {p: [Stream(self, 100 * -p + i + 1) for i in range(POOL)] for p in (0, -1)}
        self.turns = {0: 0, -1: 0}
        self.current: Any = self.default
        self.error: RuntimeError | None = None
        self.looks = 0
        self.on_look: Callable[[], None] = lambda: None
        self.rng = [torch.tensor([1]), torch.tensor([2])]
        device = self

        class Streams:
            """The replacement for ``torch.cuda.Stream``: the next stream of a pool."""

            @staticmethod
            def priority_range() -> tuple[int, int]:
                return 0, -1

            def __new__(cls, device: int, priority: int) -> Any:
                return fake.next_of(priority)

        fake = device
        self.Stream = Streams

    def next_of(self, priority: int) -> Stream:
        self.turns[priority] += 1
        return self.pools[priority][self.turns[priority] % POOL]

    def answer(self) -> None:
        if self.error is not None:
            raise self.error

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.rng)

    def current_device(self) -> int:
        return 0

    def default_stream(self, device: int) -> Stream:
        return self.default

    def current_stream(self, device: int = 0) -> Any:
        return self.current

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [state.clone() for state in self.rng]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        assert len(states) <= len(self.rng), "torch: invalid device ordinal"
        self.rng[: len(states)] = [state.clone() for state in states]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(accelerator, "in_use", lambda: made)
    yield made
    accelerator._pools.cache_clear()


def failure(text: str, code: int | None = None) -> RuntimeError:
    """Return the error that torch raises for a call that the device has refused."""
    error = torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be …")
    if code is not None:
        error.error_code = code  # type: ignore[attr-defined]
    return error


def test_without_a_device_nothing_is_asked() -> None:
    assert accelerator.wait(NEVER) == 0
    assert accelerator.rng_states() == []
    accelerator.refuse_lost(RuntimeError("a mistake"))


@pytest.mark.parametrize("where", ["default", "current", "low", "high", "last of a pool"])
def test_a_stream_that_is_busy_is_waited_for(device: Device, where: str) -> None:
    stream = {
        "default": device.default,
        "low": device.pools[0][0],
        "high": device.pools[-1][2],
        "last of a pool": device.pools[0][-1],
    }.get(where) or Stream(device, 999)
    if where == "current":  # a stream of code other than torch's, which is in no pool
        device.current = stream
    stream.queued = 1
    with pytest.raises(TimeoutError, match=r"1 of the device's streams are still busy after 0\.03"):
        accelerator.wait(NEVER)
    seen: list[int] = []

    def end_at_the_third() -> None:
        seen.append(stream.done)
        stream.done = len(seen) // 3

    device.on_look = end_at_the_third
    assert accelerator.wait(SOON) == 1
    assert seen == [0, 0, 0]


def test_work_queued_later_is_not_awaited(device: Device) -> None:
    stream = device.pools[0][1]
    stream.queued = 1

    def go_on() -> None:  # a prefetch that never ends
        stream.queued += 1
        stream.done += 1

    device.on_look = go_on
    assert accelerator.wait(SOON) == 1


def test_idle_streams_cost_no_event(device: Device) -> None:
    for stream in [device.default, *device.pools[0], *device.pools[-1]]:
        stream.queued = stream.done = 7
    assert accelerator.wait(NEVER) == 0
    assert device.looks == 0


def test_all_streams_are_found_while_others_make_some(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, made = device.next_of, []

    def disturbed(priority: int) -> Stream:
        made.append(priority)
        if len(made) in (2, 5):  # another thread has taken one of the pool's streams
            plain(priority)
        return plain(priority)

    monkeypatch.setattr(device, "next_of", disturbed)
    found = {stream.stream_id for stream in accelerator._pools(device, 0)}
    assert found == {s.stream_id for pool in device.pools.values() for s in pool}


def test_random_states_of_all_devices_are_put_back(device: Device) -> None:
    state = StepState([nn.Linear(2, 2)], [])
    state.capture()
    device.rng = [torch.tensor([7]), torch.tensor([8])]
    state.restore()
    assert [int(s) for s in device.rng] == [1, 2]


# --- process groups ------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[AbortableGroup]:
    server = store_server()
    made = AbortableGroup(ProcessGroupGloo(SOON))
    made.configure(f"localhost:{server.port}/e", "0", 0, 1, timeout=SOON)
    yield made
    made.close()


def test_a_group_is_not_quiet_before_the_streams_are(group: AbortableGroup, device: Device) -> None:
    """gloo has reduced a tensor of the device, and its copy back is queued."""
    stream = device.pools[-1][0]
    stream.queued = 1
    group.abort("rollback")
    with pytest.raises(TimeoutError, match="streams are still busy"):
        group.quiesce(NEVER)
    device.on_look = lambda: setattr(stream, "done", 1)
    group.quiesce(SOON)


def test_a_group_is_closed_without_its_device(
    group: AbortableGroup, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.error = failure("device-side assert triggered", 710)
    group.abort("rollback")
    with pytest.raises(DeviceLost):
        group.quiesce(SOON)
    group.close()
    assert "is closed without its device: a device is lost" in caplog.text


# --- a device that is lost ------------------------------------------------------------------------


def test_an_error_that_names_a_lost_device_is_one(device: Device) -> None:
    with pytest.raises(DeviceLost, match=r"uncorrectable ECC.*cudaErrorECCUncorrectable.*end"):
        accelerator.refuse_lost(failure("uncorrectable ECC error encountered", 214))


def test_behind_any_error_the_device_is_asked(device: Device) -> None:
    accelerator.refuse_lost(ValueError("of the script"))
    accelerator.refuse_lost(torch.OutOfMemoryError("CUDA out of memory"))
    accelerator.refuse_lost(failure("invalid argument", 1))
    device.error = failure("device-side assert triggered", 710)
    with pytest.raises(DeviceLost, match="device-side assert") as caught:
        accelerator.refuse_lost(ValueError("of the script"))
    assert isinstance(caught.value.__cause__, ValueError), "what the body has raised"
    device.error = failure("unspecified launch failure")  # an older torch gives no error code
    with pytest.raises(DeviceLost, match="unspecified launch failure"):
        accelerator.refuse_lost(ValueError("of the script"))


def test_an_error_that_passes_is_no_loss(device: Device) -> None:
    device.error = failure("operation not permitted when stream is capturing", 900)
    accelerator.refuse_lost(ValueError("of the script"))
    with pytest.raises(torch.AcceleratorError, match="capturing"):
        accelerator.wait(SOON)


def test_wait_on_a_lost_device_raises_device_lost(device: Device) -> None:
    device.default.queued = 1
    device.on_look = lambda: setattr(device, "error", failure("illegal memory access", 700))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        accelerator.wait(SOON)


def test_a_lost_device_is_no_mistake_of_the_script() -> None:
    assert place_of(DeviceLost("…")).may_pass


# --- fingerprints -----------------------------------------------------------------------------


def test_fingerprints_equal_their_pinned_values() -> None:
    """Sums are taken on the device by now; otherwise replicas of two versions would differ."""
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(n, generator=generator) for n in (3, 40_000, 17, 300_000)]
    assert fingerprint(tensors) == "0353b9d674b0f218"
    assert fingerprint([tensors[1].double(), tensors[0].to(torch.bfloat16)]) == "4bef83dfaac509b4"


def test_the_wait_ends_no_other_thread(device: Device) -> None:
    """It sleeps between two checks, so the thread that aborts a group can run."""
    stream, ended = device.pools[0][0], threading.Event()
    stream.queued = 1

    def abort() -> None:
        ended.wait(SOON.total_seconds())
        stream.done = 1

    thread = threading.Thread(target=abort)
    thread.start()
    device.on_look = ended.set
    assert accelerator.wait(SOON) == 1
    thread.join(SOON.total_seconds())
    assert not thread.is_alive()


# --- random states, and several devices


def test_random_states_of_devices_travel_with_the_state(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiving rank has drawn other numbers."""
    monkeypatch.setattr(torch, "cuda", device)
    there = export_random(None)
    device.rng = [torch.tensor([7]), torch.tensor([8])]
    assert [int(each) for each in there["devices"]] == [1, 2], "a copy, not what goes on"
    load_random(None, there)
    assert [int(each) for each in device.rng] == [1, 2]


def test_random_states_of_more_devices_than_there_are_here(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cuda", device)
    there = export_random(None)
    device.rng = [torch.tensor([7])]
    load_random(None, there)
    assert [int(each) for each in device.rng] == [1]


def test_a_rollback_puts_back_the_generators_of_all_devices(device: Device) -> None:
    put_back = capture_random(None)
    device.rng = [torch.tensor([7]), torch.tensor([8])]
    for each in put_back:
        each()
    assert [int(each) for each in device.rng] == [1, 2]


def test_every_device_in_use_is_waited_for_and_no_other(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process has contexts on the first and the last of three devices."""
    device.rng = [torch.tensor([0])] * 3
    streams = {number: Stream(device, 0) for number in (0, 2)}
    monkeypatch.setattr(device, "default_stream", lambda number: streams[number])
    monkeypatch.setattr(device, "current_stream", lambda number=0: streams[number])
    monkeypatch.setattr(torch, "cuda", device)
    has_context = streams.__contains__
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", has_context, raising=False)
    assert accelerator.wait(NEVER) == 0
    streams[2].queued = 1
    with pytest.raises(TimeoutError, match=r"1 of the device's streams"):
        accelerator.wait(NEVER)
