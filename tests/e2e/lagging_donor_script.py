"""The job of kill_script.py with slow state transfers, in which rank 1's first fetch fails,
once."""

from __future__ import annotations

import os
import time
from typing import Any

from ranks import sharded_rank

from fft.train.step.healing import StateExchange

send, fetch = StateExchange.send, StateExchange.fetch
failed: list[int] = []


def slow(self: StateExchange, command: Any) -> None:
    time.sleep(0.3)
    send(self, command)


def failing(self: StateExchange, command: Any) -> tuple[dict[str, Any], int]:
    if os.environ["RANK"] == "1" and not failed:
        failed.append(1)
        raise OSError("a network error that passes")
    return fetch(self, command)


StateExchange.send, StateExchange.fetch = slow, failing  # type: ignore[method-assign]
sharded_rank(1, {}).train()
