"""Tests that the pulse reports Dynamo's compilation while it lasts, however it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo

from fft.health.compiling import Compilations
from fft.health.detectors.trainer import Pulse, PulseReader

Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., object]]


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    made = Pulse(time.monotonic)
    yield made
    made.close()
    torch._dynamo.reset()


def compile_once(backend: Backend) -> None:
    # Bytecode that is new, as compiled bytecode is not compiled again
    new = eval("lambda x: x * 2")
    torch.compile(new, backend=backend)(torch.ones(2))


def test_pulse_is_in_a_critical_section_while_torch_compiles(pulse: Pulse) -> None:
    reader = PulseReader(pulse.fd)
    compilations = Compilations(pulse.atomic)
    seen: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        seen.append(reader.read().atomic)
        return graph.forward

    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        seen.append(reader.read().atomic)
        raise ValueError("no compiler")

    def after(compile_it: Callable[[], None]) -> bool:
        compile_it()
        assert not reader.read().atomic
        return seen[-1]

    assert not after(lambda: compile_once(backend))
    compilations.attach()
    compilations.attach()
    assert after(lambda: compile_once(backend))

    def failing() -> None:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no compiler"):
            compile_once(broken)

    assert after(failing)

    def elsewhere() -> None:
        thread = threading.Thread(target=compile_once, args=(backend,))
        thread.start()
        thread.join()

    assert not after(elsewhere)
    torch._dynamo.reset()  # removes all listeners
    assert not after(lambda: compile_once(backend))
    compilations.attach()
    assert after(lambda: compile_once(backend))
    compilations.detach()
    compilations.detach()
    assert not after(lambda: compile_once(backend))
    reader.close()
