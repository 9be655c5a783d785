"""A process whose file systems have no locks: ``without_locks.py ERRNO DIRECTORY``.

The store of DIRECTORY is held and looked at; each lock is answered with ERRNO.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from refused_calls import refuse

from fft.durable.stores import LocalStore


def main() -> None:
    """Hold the directory, and ask whether somebody is at work in it."""
    refuse("flock", int(sys.argv[1]))
    store = LocalStore(Path(sys.argv[2]))
    with store.hold(), store.at_work():
        os.write(1, f"held; at work: {store.is_at_work()}\n".encode())


if __name__ == "__main__":
    main()
