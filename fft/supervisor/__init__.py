"""The local supervisor: starts a job's groups, notices deaths at once, restarts, drains.

`Supervisor` is the one to use; nothing is started by importing this package.
"""

from __future__ import annotations

from fft.supervisor.joined import Joined
from fft.supervisor.loop import RunConfig, Supervisor, SupervisorError, Verdict

__all__ = ["Joined", "RunConfig", "Supervisor", "SupervisorError", "Verdict"]
