"""The local supervisor: starts a job's groups, notices deaths at once, restarts, drains.

`Supervisor` is the one to use; nothing is started by importing this package.
"""

from __future__ import annotations

from fft.launch.supervisor.config import RunConfig, SupervisorError
from fft.launch.supervisor.joined import Joined
from fft.launch.supervisor.judgement import JobOutcome
from fft.launch.supervisor.loop import Supervisor

__all__ = ["JobOutcome", "Joined", "RunConfig", "Supervisor", "SupervisorError"]
