"""A script without a launcher: a job of one group of one rank, with services in-process.

For debugging with ``python train.py``. Owns a torch rendezvous store, which listens on loopback
while it lives; the bus is in memory.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from inspect import BoundArguments
from typing import Any

from fft.bus.tcpserver import host_store

logger = logging.getLogger(__name__)

_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables that are set if more than one process was started or is planned."""
_PLACES = ("rank", "world_size", "store_addr", "store_port")
"""Arguments of torchft's Manager by which a script defines its place itself."""


def is_alone(called: BoundArguments, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether neither a launcher nor the script defines other ranks."""
    is_launched = any(environ.get(name) for name in _LAUNCHERS)
    return not is_launched and all(called.arguments.get(name) is None for name in _PLACES)


class Alone:
    """The services of a job of one process, from construction until ``close``."""

    def __init__(self, called: BoundArguments) -> None:
        """Start the store and put the place of the one rank into ``called``, the arguments of
        torchft's Manager."""
        self.bus_url = f"memory://alone-{secrets.token_hex(4)}"
        self._store: Any
        self._store, port = host_store()
        wanted = called.arguments["min_replica_size"]
        here = {"store_addr": "127.0.0.1", "store_port": port, "rank": 0, "world_size": 1}
        called.arguments.update(here, min_replica_size=1)
        lowered = f" (min_replica_size is 1, not {wanted})" if wanted != 1 else ""
        logger.warning(
            "no launcher and no FFT_BUS: running alone, as a job of one group of one rank%s, not "
            "watched for hangs; use `fft run` for more",
            lowered,
        )

    def close(self) -> None:
        """End the store. Idempotent."""
        self._store = None
