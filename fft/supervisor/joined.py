"""The services of a job that are served elsewhere, for a supervisor on one of several hosts.

Reads the environment that it is given; opens nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from fft.serve import ServiceError


@dataclass(frozen=True)
class Joined:
    """Bus and lighthouse that `fft serve`, or another `fft run`, has announced."""

    bus_url: str
    lighthouse_url: str

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """What was announced. Raises ServiceError if it is not all there."""
        names = ("FFT_BUS", "TORCHFT_LIGHTHOUSE")
        if missing := [name for name in names if not environ.get(name)]:
            raise ServiceError(
                f"--join needs {' and '.join(missing)} in the environment; `fft serve` prints it"
            )
        return cls(*(environ[name] for name in names))

    def restart_bus(self) -> None:
        """Raises ServiceError: it is somebody else's."""
        raise ServiceError("the bus is served elsewhere; it cannot be restarted from here")

    def restart_lighthouse(self) -> None:
        """Raises ServiceError: it is somebody else's."""
        raise ServiceError("the lighthouse is served elsewhere; it cannot be restarted from here")

    def close(self) -> None:
        """Nothing here is ours to end."""
