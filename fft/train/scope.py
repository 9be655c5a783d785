"""The instance of the protocol that a rank takes part in, and the bus of that instance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fft.bus import ErrorBus
from fft.engine.other_scopes import OtherScope
from fft.protocol.elsewhere import Elsewhere
from fft.protocol.spec import FsmSpec


class RankScope:
    """The scope of the whole job: all ranks of all replica groups decide together.

    Attributes:
        spec: The machine of this scope.
        bus: The bus of this scope; another object owns the job's.
        name: The name of this scope in checkpoints.
        by_rank: The scopes of all ranks of a group, if they differ; else empty.
        first_rank: The lowest rank of a group that is in this scope.
        flow: The scopes that this one is bound to.
        others: The same with their buses, for the engine.
    """

    name = "job"
    by_rank: Sequence[str] = ()
    first_rank = 0
    flow: tuple[Elsewhere, ...] = ()
    others: Sequence[OtherScope] = ()

    def __init__(self, spec: FsmSpec, bus: ErrorBus) -> None:
        self.spec, self.bus = spec, bus

    def ranks_of(self, world: int) -> int:
        """Return how many of the ``world`` ranks of a group are in this scope."""
        return world

    def traces(self, directory: Path | None) -> Path | None:
        """Return the folder for the traces of this scope, below that of the job."""
        return directory

    def close(self) -> None:
        """Close the buses that were opened for this scope. Idempotent."""
