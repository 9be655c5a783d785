"""Start the processes of a job with the environment that they all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fft.bus.token import JobToken
from fft.launch.services import Services
from fft.launch.supervisor.children import Child
from fft.launch.supervisor.config import RunConfig
from fft.launch.supervisor.groups import Group, base_env
from fft.launch.supervisor.joined import Joined
from fft.launch.supervisor.script import Script
from fft.launch.supervisor.spanning import GroupStart
from fft.launch.supervisor.tee import Tee
from fft.util.files import claimed

SUCCESSOR = "FFT_SUCCESSOR"
"""Environment variable of a process that replaces a lost one in a living group."""
TakeSpare = Callable[[Mapping[str, str], Path], Child | None]
"""Gives a spare the role that the environment describes; returns it, or None if there is none."""


class Launcher:
    """Starts processes of one job; their monitors report hangs to descriptor ``hangs_fd``."""

    def __init__(
        self,
        config: RunConfig,
        services: Services | Joined,
        token: JobToken | None,
        hangs_fd: int,
        script: Script | None = None,
    ) -> None:
        self._config = config
        self._services = services
        self._token = token
        self._hangs_fd = hangs_fd
        self.logs = config.trace_dir / "logs"
        self.tee = Tee(config.tee, config.first_group)
        """The output of chosen ranks; its owner closes it."""
        self._is_own = script is None
        self.script = script or Script(config.script)

    def close(self) -> None:
        """End the fork server, unless later starts of the job use it."""
        if self._is_own:
            self.script.close()

    def open(self) -> None:
        """Prepare to start processes."""
        log = claimed(self.logs / "fork-server.log")
        self.script.open(self._env(), log)

    def _env(self) -> dict[str, str]:
        settings = {
            **self._services.settings(),
            **self._config.settings(),
            "FFT_SUPERVISOR_FD": str(self._hangs_fd),
        }
        if self._token is not None:
            settings["FFT_TOKEN"] = self._token.text()
        return base_env(settings)

    def place(self, group: Group, rank: int) -> dict[str, str]:
        """Return the environment variables of a rank of the group's present start."""
        return {**group.place(rank), **self.tee.env(group.name, rank)}

    def start_group(self, group: Group, begun: GroupStart, spare: TakeSpare) -> list[Child]:
        """Start all ranks of a group; if one of them cannot be started, the others are ended.

        Args:
            begun: The start of the group, with its store.
            spare: Returns a spare for a rank, or None to start a new process.

        Raises:
            OSError: A process cannot be started.
        """

        def make(rank: int, log: Path) -> Child:
            env = self.place(group, rank)
            if group.is_successor:
                env[SUCCESSOR] = "1"
            return spare(env, log) or self.start_one(group.name, rank, group.starts, env, log)

        return group.start(make, self.logs, self._config.groups_in_all, begun)

    def start_one(
        self,
        group: str,
        rank: int,
        start: int,
        env: Mapping[str, str],
        log: Path,
        inherits: tuple[int, ...] = (),
    ) -> Child:
        """Start one process; ``env`` is added to the common environment. Raises OSError."""
        own, inherits = {**self._env(), **env}, (self._hangs_fd, *inherits)
        return Child(group, rank, start, self.script, own, log, inherits)
