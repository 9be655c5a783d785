"""The machine as seen by a worker: a rendezvous before it begins, and its memory.

It uses files of the repetition's directory, and /proc. It does not import torch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.events import Pen

_MEET_S = 120.0
_POLL_S = 0.01


def meet(directory: Path, groups: int, ranks: int) -> None:
    """Wait until every rank has reached this once; a restarted process does not wait.

    Raises TimeoutError.
    """
    (directory / f"here-{os.environ['REPLICA_GROUP_ID']}-{os.environ['RANK']}").touch()
    deadline = time.monotonic() + _MEET_S
    while sum(1 for _ in directory.glob("here-*")) < groups * ranks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {groups} x {ranks} ranks began within {_MEET_S:g} s")
        time.sleep(_POLL_S)  # files offer no event to wait for


@contextmanager
def measured_group() -> Iterator[tuple[dict[str, Any], Path, Pen]]:
    """Begin a group of one rank together with all others, and record the error that ends it.

    Yields:
        The plan, the directory of the repetition, and the writer of events.
    """
    plan, directory = json.loads(os.environ["BENCH_PLAN"]), Path(os.environ["BENCH_DIR"])
    pen = Pen(directory, int(os.environ["REPLICA_GROUP_ID"]), 0)
    pen.say("start")
    meet(directory, plan["groups"], 1)
    try:
        yield plan, directory, pen
    except BaseException as error:
        pen.say("exit", why=f"{type(error).__name__}: {error}"[:500])
        raise


def tell_launcher(word: str) -> None:
    """Send a message to the launcher, which waits for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(f"{word} {os.getpid()}".encode(), os.environ["BENCH_WORDS"])


def memory_kib() -> int:
    """Return the resident memory of this process and all its children."""
    return sum(_resident(pid) for pid in family(os.getpid()))


def family(pid: int) -> list[int]:
    """Return ``pid`` and all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in task.read_text().split():
                found += family(int(child))
        except OSError:  # the process has just ended
            continue
    return found


def _resident(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
