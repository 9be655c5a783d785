"""The local supervisor: starts a job's groups, detects deaths, restarts and drains groups.

`Supervisor` is the entry point; importing this package starts nothing.
"""

from __future__ import annotations

from fft.launch.supervisor.config import RunConfig, SupervisorError
from fft.launch.supervisor.joined import Joined
from fft.launch.supervisor.judgement import JobOutcome
from fft.launch.supervisor.loop import Supervisor
from fft.launch.supervisor.script import Script

__all__ = ["JobOutcome", "Joined", "RunConfig", "Script", "Supervisor", "SupervisorError"]
