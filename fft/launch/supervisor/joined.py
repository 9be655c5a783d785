"""The services of a job that are served elsewhere, for a supervisor on one of several hosts.

Reads the environment that it is given; opens the bus only to find the start of the job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from fft.bus.token import JobToken
from fft.launch.services import ServiceError, settings_of
from fft.operate.entering import enter


@dataclass(frozen=True)
class Joined:
    """Bus and lighthouse that `fft serve`, or another `fft run`, has announced."""

    bus_url: str
    lighthouse_url: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """What was announced. Raises ServiceError if there is no bus among it."""
        if not (bus := environ.get("FFT_BUS")):
            raise ServiceError("--join needs FFT_BUS in the environment; `fft serve` prints it")
        return cls(bus, environ.get("TORCHFT_LIGHTHOUSE") or None)

    def entered(self, token: JobToken | None) -> Self:
        """The same at the start of the job that who comes now belongs to. Raises BusError."""
        return replace(self, bus_url=enter(self.bus_url, token).url)

    def settings(self) -> dict[str, str]:
        """What a process of the job finds them by in its environment."""
        return settings_of(self.bus_url, self.lighthouse_url)

    def restart_bus(self) -> None:
        """Raises ServiceError: it is somebody else's."""
        raise ServiceError("the bus is served elsewhere; it cannot be restarted from here")

    def restart_lighthouse(self) -> None:
        """Raises ServiceError: it is somebody else's."""
        raise ServiceError("the lighthouse is served elsewhere; it cannot be restarted from here")

    def close(self) -> None:
        """Nothing here is ours to end."""
