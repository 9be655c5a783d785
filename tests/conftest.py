"""What holds for all tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

# torch asks the name service about every TCPStore connection. Where that loses a packet, each costs
# five seconds and more; which is not what is tested. Read by the C library at the first question.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Else each of the processes that tests start would compile FFT anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Nor are jobs of tests to keep, or to begin with, checkpoints of whoever runs these.
for name in [n for n in os.environ if n.startswith(("FFT_CHECKPOINT", "FFT_RESUME"))]:
    del os.environ[name]

# What tests have in common is for the scripts that they start, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)

LONG_FIRST = ("e2e", "recipes", "prove", "bus", "train", "cli", "operate", "launch", "health")
"""Rooms of long tests. What begins last is short, so that no worker is alone at the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        room = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        return LONG_FIRST.index(room) if room in LONG_FIRST else len(LONG_FIRST)

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no collection, and no look at all objects, goes through it."""
    gc.collect()
    gc.freeze()
