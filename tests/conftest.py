"""Settings and hooks that apply to all tests."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

# torch makes a DNS query for every TCPStore connection. Where packets are lost, each query costs
# five seconds and more, which is not what is tested. The C library reads this at its first query.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Otherwise each process that a test starts would compile FFT anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Test jobs must not write to, or resume from, the checkpoints of the user who runs the tests.
for name in [n for n in os.environ if n.startswith(("FFT_CHECKPOINT", "FFT_MEMORY", "FFT_RESUME"))]:
    del os.environ[name]

# The scripts that tests start import the tests' shared modules, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)

LONG_FIRST = ("e2e", "recipes", "prove", "bus", "train", "cli", "operate", "launch", "health")
"""Directories of long tests. Short tests begin last, so that no worker runs alone at the end."""


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        room = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        return LONG_FIRST.index(room) if room in LONG_FIRST else len(LONG_FIRST)

    items.sort(key=turn)
    for item, number in zip(items, _numbers(items), strict=True):
        one_in = item.get_closest_marker("one_in")
        if one_in is not None and number % one_in.args[0]:
            item.add_marker(pytest.mark.long)


def _numbers(items: list[pytest.Item]) -> Iterator[int]:
    """Yield the position of each item among those of the same test function."""
    seen = Counter[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        yield seen[test]
        seen[test] += 1


def pytest_collection_finish() -> None:
    """Freeze the objects that are loaded by now, so that garbage collections do not visit them."""
    gc.collect()
    gc.freeze()
