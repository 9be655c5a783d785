"""The instance of the protocol that a rank takes part in, and the bus of that instance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fft.bus import ErrorBus
from fft.engine.other_scopes import OtherScope
from fft.protocol.spec import FsmSpec
from fft.protocol.state import ScopePosition


class RankScope:
    """The scope of the whole job: all ranks of all replica groups decide together.

    Attributes:
        spec: The state machine of this scope.
        bus: The bus of this scope; the job's bus is closed elsewhere.
        name: The name of this scope in checkpoints.
        by_rank: The scopes of all ranks of a group, if they differ; else empty.
        reported_as: The name of this scope in speed reports; None if they name no scope.
        flow: The upstream and downstream scopes.
        others: The same with their buses, for the engine.
    """

    name = "job"
    by_rank: Sequence[str] = ()
    reported_as: str | None = None
    flow: tuple[ScopePosition, ...] = ()
    others: Sequence[OtherScope] = ()

    def __init__(self, spec: FsmSpec, bus: ErrorBus) -> None:
        self.spec, self.bus = spec, bus

    def terms(self, ranks: int) -> dict[str, Any]:
        """Return the fields of `Config` that follow from the spec.

        Args:
            ranks: Number of ranks of a replica group.
        """
        return {**self.spec.terms, "world": ranks}

    def traces(self, directory: Path | None) -> Path | None:
        """Return the folder for the traces of this scope, below that of the job."""
        return directory

    def close(self) -> None:
        """Close the buses that were opened for this scope. Idempotent."""
