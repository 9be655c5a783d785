"""The scope of the stage that this process is, where each stage of a pipeline has one of its own.

Owns the buses of the scopes; the first stage's is the job's, which others own.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from fft.bus import ErrorBus, open_job_bus
from fft.bus.token import JobToken
from fft.engine.other_scopes import OtherScope
from fft.protocol.spec import FsmSpec
from fft.protocol.state import Elsewhere
from fft.trace.format import scope_folder
from fft.util.errors import FftError


class StageScope:
    """One instance of the protocol over one rank of all replica groups."""

    def __init__(self, spec: FsmSpec, rank: int, job_bus: ErrorBus, stack: ExitStack) -> None:
        self.rank = rank
        self.name = spec.stages[rank]
        self.spec = spec.stage(rank)
        self.flow: tuple[Elsewhere, ...] = spec.bound_to(self.name)
        self.bus = job_bus
        self.others: list[OtherScope] = []
        self._job_bus = job_bus
        self._stack = stack

    def traces(self, directory: Path | None) -> Path | None:
        """Where those of this scope go: the first stage's where the job's do."""
        return directory and scope_folder(directory, self.name if self.rank else "")

    def close(self) -> None:
        """Close the buses that were opened for it. Idempotent."""
        self._stack.close()


def scope_of_stage(
    spec: FsmSpec,
    rank: int,
    ranks: int,
    url: str,
    job_bus: ErrorBus,
    token: JobToken | None,
    operation_s: float,
) -> StageScope | None:
    """The scope of the stage that this rank is; None: the stages of ``spec`` have none.

    Args:
        url: of ``job_bus``.
        operation_s: seconds for an operation on a bus.

    Raises:
        FftError: replica groups have not as many ranks as there are stages.
        BusError: a bus cannot be reached.
    """
    if not spec.stages:
        return None
    if ranks != len(spec.stages):
        raise FftError(
            f"spec {spec.name!r} has {len(spec.stages)} stages, a rank of a replica group each; "
            f"this group has {ranks}: start it with --ranks {len(spec.stages)}"
        )
    with ExitStack() as stack:

        def bus_of(name: str) -> ErrorBus:
            if name == spec.stages[0]:
                return job_bus
            bus = open_job_bus(f"{url}.{name}", token, operation_s)
            stack.callback(bus.close)
            return bus

        scope = StageScope(spec, rank, job_bus, stack)
        scope.bus = bus_of(scope.name)
        scope.others = [OtherScope(bound.scope, bus_of(bound.scope)) for bound in scope.flow]
        scope._stack = stack.pop_all()
        return scope
