"""Services of a job that another process serves, for a supervisor on one of several hosts.

This module only reads the given environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from fft.launch.services import ServiceError, settings_of


@dataclass(frozen=True)
class Joined:
    """Bus and lighthouse that `fft serve` or another `fft run` has announced."""

    bus_url: str
    lighthouse_url: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the announced addresses from the environment.

        Raises:
            ServiceError: The environment names no bus.
        """
        if not (bus := environ.get("FFT_BUS")):
            raise ServiceError("--join needs FFT_BUS in the environment; `fft serve` prints it")
        return cls(bus, environ.get("TORCHFT_LIGHTHOUSE") or None)

    def settings(self) -> dict[str, str]:
        """Return the environment variables by which a process of the job finds the services."""
        return settings_of(self.bus_url, self.lighthouse_url)

    def restart_bus(self) -> None:
        """Raise ServiceError, because another process serves the bus."""
        raise ServiceError("the bus is served elsewhere; it cannot be restarted from here")

    def restart_lighthouse(self) -> None:
        """Raise ServiceError, because another process serves the lighthouse."""
        raise ServiceError("the lighthouse is served elsewhere; it cannot be restarted from here")

    def close(self) -> None:
        """Do nothing: the services belong to another process."""
