"""States of the random generators of this process: torch, devices, NumPy and Python."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fft.errors import FftError
from fft.train.guard import accelerator


def capture_random(generators: Sequence[torch.Generator] | None) -> list[Callable[[], None]]:
    """Return one function per random generator that restores its present state."""
    if generators is not None:
        return [_bind(g.set_state, g.get_state()) for g in generators]
    found = [
        _bind(torch.set_rng_state, torch.get_rng_state()),
        _bind(random.setstate, random.getstate()),
    ]
    found += [_bind(put, state) for put, state in accelerator.rng_states()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append(_bind(numpy.random.set_state, numpy.random.get_state()))
    return found


def export_random(generators: Sequence[torch.Generator] | None) -> dict[str, Any]:
    """Return the states of the generators as plain values and tensors.

    Args:
        generators: The generators, or None for those of the process, as in a rollback.
    """
    if generators is not None:
        return {"generators": [generator.get_state() for generator in generators]}
    version, words, gauss = random.getstate()
    with torch.device("cpu"):
        python = torch.frombuffer(array("q", words), dtype=torch.int64)
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, python, gauss],
    }
    if (module := accelerator.in_use()) is not None:
        found["devices"] = module.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        words = torch.from_numpy(keys.astype(numpy.int64))
        found["numpy"] = [str(name), words, *(_plain(each) for each in rest)]
    return found


def load_random(generators: Sequence[torch.Generator] | None, state: Mapping[str, Any]) -> None:
    """Load the states that `export_random` returned on another rank.

    Raises:
        FftError: ``state`` was exported with a different number of ``generators``.
    """
    given = state.get("generators")
    if (given is None) != (generators is None) or len(given or ()) != len(generators or ()):
        raise FftError(
            f"the received state has RNG states of {len(given or ())} generators, but "
            f"{len(generators or ())} are registered: pass the same ones to register(…, "
            "generators=)"
        )
    for generator, value in zip(generators or (), given or (), strict=True):
        generator.set_state(value)
    if generators is not None:
        return
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    module = next((each for each in (torch.cuda, torch.xpu) if each.is_available()), None)
    if "devices" in state and module is not None:
        module.set_rng_state_all(state["devices"][: module.device_count()])
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), *rest))


def _plain(value: Any) -> int | float:
    return float(value) if isinstance(value, float) else int(value)


def _bind(put: Callable[[Any], object], value: object) -> Callable[[], None]:
    def restore() -> None:
        put(value)

    return restore
