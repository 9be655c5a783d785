"""What a worker needs of the machine: a place to meet before it begins, and how much memory it has.

Files of the repetition's directory, and /proc. Knows no torch.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

_MEET_S = 120.0
_POLL_S = 0.01


def meet(directory: Path, groups: int, ranks: int) -> None:
    """Wait until every rank has got here once: who starts again later does not wait.

    Raises TimeoutError.
    """
    (directory / f"here-{os.environ['REPLICA_GROUP_ID']}-{os.environ['RANK']}").touch()
    deadline = time.monotonic() + _MEET_S
    while sum(1 for _ in directory.glob("here-*")) < groups * ranks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {groups} x {ranks} ranks began within {_MEET_S:g} s")
        time.sleep(_POLL_S)  # files have nothing to wait on


def tell_launcher(word: str) -> None:
    """To the launcher, which waits for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(f"{word} {os.getpid()}".encode(), os.environ["BENCH_WORDS"])


def memory_kib() -> int:
    """Resident memory of this process and of all that it has started."""
    return sum(_resident(pid) for pid in family(os.getpid()))


def family(pid: int) -> list[int]:
    """``pid`` and all processes below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in task.read_text().split():
                found += family(int(child))
        except OSError:  # it has just ended
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
