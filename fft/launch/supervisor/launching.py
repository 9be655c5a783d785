"""How processes of a job are started: with the environment that they all have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fft.bus.token import JobToken
from fft.launch.services import Services
from fft.launch.supervisor.children import Child
from fft.launch.supervisor.config import RunConfig
from fft.launch.supervisor.groups import Group, base_env
from fft.launch.supervisor.joined import Joined

TakeSpare = Callable[[Mapping[str, str], Path], Child | None]
"""A process that waited for a role, and runs the script now as whom the environment says."""


class Launcher:
    """Starts processes of one job. ``hangs_fd``: where they say that they hang."""

    def __init__(
        self, config: RunConfig, services: Services | Joined, token: JobToken | None, hangs_fd: int
    ) -> None:
        self._config = config
        self._services = services
        self._token = token
        self._hangs_fd = hangs_fd
        self.logs = config.trace_dir / "logs"

    def _env(self) -> dict[str, str]:
        settings = {
            **self._services.settings(),
            **self._config.settings(),
            "FFT_SUPERVISOR_FD": str(self._hangs_fd),
        }
        if self._token is not None:
            settings["FFT_TOKEN"] = self._token.text()
        return base_env(settings)

    def start_group(self, group: Group, address: str, spare: TakeSpare) -> list[Child]:
        """Start all ranks of a group, whose store listens at ``address``.

        ``spare``: may give a process for a rank. Raises OSError, BusError: one cannot be started;
        then none is left.
        """

        def make(rank: int, log: Path) -> Child:
            env = group.place(rank)
            return spare(env, log) or self.start_one(group.name, rank, group.starts, env, log)

        return group.start(make, self.logs, self._config.groups_in_all, address)

    def start_one(
        self,
        group: str,
        rank: int,
        start: int,
        env: Mapping[str, str],
        log: Path,
        inherits: tuple[int, ...] = (),
    ) -> Child:
        """Start one process, ``env`` being what it has besides. Raises OSError."""
        own, inherits = {**self._env(), **env}, (self._hangs_fd, *inherits)
        return Child(group, rank, start, self._config.script, own, log, inherits)
