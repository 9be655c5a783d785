"""Real processes for the rollback tests: starts them, returns their results, and ends them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from forked import CONTEXT
from torch.distributed import TCPStore

LIMIT = 240.0  # seconds that one set of processes may take
NOISE_S = 15.0
"""Time that a busy machine may add to a wait; a test that bounds one rules out a group's 60 s."""


def store_server() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def client(port: int) -> TCPStore:
    return TCPStore(
        "localhost", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def run(ranks: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``body(rank, ranks, port, *args)`` in `ranks` processes; return what each returned."""
    server = store_server()
    started: list[tuple[Any, Connection]] = []
    try:
        for rank in range(ranks):
            here, there = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_main, args=(there, body, rank, ranks, server.port, args), daemon=True
            )
            process.start()
            there.close()
            started.append((process, here))
        return [_result(here, rank) for rank, (_, here) in enumerate(started)]
    finally:
        for process, here in started:
            here.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _result(here: Connection, rank: int) -> Any:
    if not here.poll(LIMIT):
        raise TimeoutError(f"rank {rank} gave no result in {LIMIT:g} s")
    good, value = here.recv()
    if not good:
        raise AssertionError(f"rank {rank} failed:\n{value}")
    return value


def _main(
    there: Connection, body: Callable[..., Any], rank: int, ranks: int, port: int, args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        answer = (True, body(rank, ranks, port, *args))
    except BaseException:  # noqa: BLE001 - carried to the parent
        answer = (False, traceback.format_exc())
    there.send(answer)
    there.close()
