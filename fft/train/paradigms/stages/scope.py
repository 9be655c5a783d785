"""The scope of one stage of an asynchronous pipeline, in which each stage has its own.

It owns the buses that it opens; the first stage uses the job's, which it does not own.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchft.manager import Manager

from fft.bus import ErrorBus, open_job_bus
from fft.bus.token import JobToken
from fft.engine.other_scopes import OtherScope
from fft.errors import FftError
from fft.messages.wire import SCOPES
from fft.protocol.spec import FsmSpec
from fft.trace.format import scope_folder
from fft.train.session.scope import RankScope
from fft.train.session.settings import Settings


class StageScope(RankScope):
    """One instance of the protocol over one rank of all replica groups."""

    def __init__(self, spec: FsmSpec, rank: int, job_bus: ErrorBus) -> None:
        super().__init__(spec.stage(rank), job_bus)
        self._rank = rank
        self.by_rank = spec.stages
        self.name = self.reported_as = spec.stages[rank]
        self.flow = spec.bound_to(self.name)
        self._job_bus = job_bus
        self._opened = ExitStack()

    def terms(self, ranks: int) -> dict[str, Any]:
        """See `RankScope.terms`: each rank of a group is in the scope of its own stage."""
        return {**super().terms(1), "first_rank": self._rank, "flow": self.flow}

    def open(self, url: str, token: JobToken | None, operation_s: float) -> None:
        """Open the buses of this scope and of its linked scopes. Raises BusError."""

        def bus_of(name: str) -> ErrorBus:
            if name == self.by_rank[0]:
                return self._job_bus
            bus = open_job_bus(f"{url}.{name}", token, operation_s)
            self._opened.callback(bus.close)
            return bus

        self._job_bus.write(SCOPES, json.dumps(self.by_rank[1:]).encode())  # for operators
        self.bus = bus_of(self.name)
        self.others = [OtherScope(bound.scope, bus_of(bound.scope)) for bound in self.flow]

    def first(self) -> OtherScope:
        """Return the scope of the first stage, for readers other than the engine."""
        return OtherScope(self.by_rank[0], self._job_bus)

    def traces(self, directory: Path | None) -> Path | None:
        """Return the folder for the traces; those of the first stage are in that of the job."""
        return directory and scope_folder(directory, self.name if self._rank else "")

    def close(self) -> None:
        """Close the buses that were opened for this scope. Idempotent."""
        self._opened.close()


def scope_of_stage(
    settings: Settings, manager: Manager, job_bus: ErrorBus, operation_s: float, undo: ExitStack
) -> StageScope:
    """Open the scope of the stage that this rank holds.

    Args:
        operation_s: seconds for an operation on a bus.
        undo: receives a callback that closes the buses, in case a later step fails.

    Raises:
        FftError: the number of ranks of a replica group is not the number of stages.
        BusError: a bus cannot be reached.
    """
    spec, rank, ranks = (
        settings.spec,
        manager._torchft.group_rank,
        manager._torchft.group_world_size,
    )
    if ranks != len(spec.stages):
        raise FftError(
            f"spec {spec.name!r} has {len(spec.stages)} stages, a rank of a replica group each; "
            f"this group has {ranks}: start it with --ranks {len(spec.stages)}"
        )
    scope = StageScope(spec, rank, job_bus)
    undo.callback(scope.close)
    scope.open(settings.bus_url, settings.token, operation_s)
    return scope
