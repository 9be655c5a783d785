"""Step functions whose first compilation is interrupted, with a report of what is left half done.

``interrupt_compile.py BACKEND BODIES`` runs in its own process, in which Dynamo was never loaded.
It prints as JSON: the errors of step functions, and of code compiled in them; how often an
interruption was requested while one compiled; and which functions of FFT Dynamo has looked at.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time

import torch

from fft.train.guard.interrupt import Interrupted, Interrupter
from fft.train.guard.unsafe_places import guarded

WIDTH = 4
LONG_S = 5.0


class Body:
    """The use of an interrupter in ``with txn:``."""

    def __init__(self, interrupter: Interrupter) -> None:
        self.interrupter = interrupter

    @guarded
    def __enter__(self) -> None:
        self.interrupter.enter()

    @guarded
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.interrupter.leave()
        return kind is Interrupted


def gradients(step: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of all parameters and drop them from these."""
    step.zero_grad()
    step(x).square().mean().backward()
    return [p.grad.clone() for p in step.parameters() if p.grad is not None]


class Step(torch.nn.Module):
    """A step whose compiled form has two graphs, with Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        time.sleep(0.001)
        return self.last(x)


def main() -> None:
    """Compile in each step function until it is unwound."""
    backend, bodies = sys.argv[1], int(sys.argv[2])
    dice = random.Random(3)
    interrupter = Interrupter()
    errors: list[str] = []
    ours: set[str] = set()
    asked_in_vain = 0
    took = LONG_S
    for _ in range(bodies):
        model = Step()
        x = torch.randn(2, WIDTH)
        compiled = torch.compile(model, backend=backend)
        begun = time.monotonic()
        compiling = [True]

        def ask(compiling: list[bool] = compiling) -> None:
            nonlocal asked_in_vain
            asked_in_vain += bool(compiling)
            interrupter.request("asked")

        asker = threading.Timer(dice.random() * took, ask)
        try:
            with Body(interrupter):
                asker.start()
                gradients(compiled, x)
                compiling.clear()
                took = time.monotonic() - begun
                while True:
                    gradients(compiled, x)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(f"in the body: {error!r}"[:300])
        asker.join()
        try:
            torch.manual_seed(0)
            assert all(map(torch.equal, gradients(compiled, x), gradients(model, x)))
            assert torch.is_grad_enabled()
            assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(f"after it: {error!r}"[:300])
        for made in torch._dynamo.convert_frame.input_codes.seen:
            if (code := made()) is not None and "/fft/" in code.co_filename:
                ours.add(f"{code.co_filename}: {code.co_name}")
        torch._dynamo.reset()
    interrupter.close()
    print(json.dumps({"errors": errors, "asked_in_vain": asked_in_vain, "ours": sorted(ours)}))


if __name__ == "__main__":
    main()
