"""Ranks for the tests of diagnoses: they answer checks, and misbehave as their file MODE requests.

``peer.py URL MODE...``: one process for each rank, forked so that torch is loaded once; they end
with the standard input. Modes: sound, flip (changes a byte that it sends), slow (sends late), mute
(sends nothing), wrong (computes wrong), silent (never answers), shy (answers only checks that need
no partner).
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fft.bus import open_bus
from fft.messages.commands import Check, decode_command
from fft.train.step import operator_commands as checks
from fft.train.step.operator_commands import CheckRunner

LATE_S = 0.75
MUTE_S = 60.0


def answer(url: str, group: str, mode_file: Path, end: int) -> None:
    """Act as one rank until the pipe ``end`` is closed."""
    right, send = checks.ON_PROCESSOR, checks._send

    def mode() -> str:
        return mode_file.read_text()

    def misbehaving_send(partner: Any, data: bytes, deadline: float) -> None:
        if mode() == "mute":
            threading.Event().wait(min(MUTE_S, deadline - time.monotonic()))
        if len(data) == checks.BULK_BLOCK and mode() == "slow":
            time.sleep(LATE_S)  # the injected fault
        if len(data) == checks.BULK_BLOCK and mode() == "flip":
            data = data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]
        send(partner, data, deadline)

    checks._send = misbehaving_send
    bus = open_bus(url)
    station = CheckRunner((group, 0), bus, lambda *_: None)

    def hear(payload: bytes) -> None:
        word = decode_command(payload)
        if not isinstance(word, Check) or mode() == "silent":
            return
        if mode() != "shy" or word.tasks[0].part == "alone":
            wrong = replace(right, products=right.products - 1)
            checks.ON_PROCESSOR = wrong if mode() == "wrong" else right
            station.start(word)

    bus.subscribe(hear, lambda error: None, "commands")
    os.write(sys.stdout.fileno(), b"ready\n")  # one write, because the ranks share the pipe
    os.read(end, 1)
    station.close()
    bus.close()


def main() -> None:
    """Fork the ranks, and end them with the standard input."""
    importlib.import_module("torch")
    url, *modes = sys.argv[1:]
    children = []
    read_end, write_end = os.pipe()
    for group, mode_file in enumerate(modes):
        child = os.fork()
        if child == 0:
            os.close(write_end)
            answer(url, str(group), Path(mode_file), read_end)
            os._exit(0)
        children.append(child)
    sys.stdin.read()
    os.close(write_end)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
