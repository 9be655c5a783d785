"""Find the ranks that the rollbacks since the last commit accuse. Pure: it only reads records.

A cause is evidence against a rank if its own step function failed, or if others saw it end, hang or
stay away. A cause that reports only a failed collective or an expired wait accuses no rank: its
author was only the first to notice. `CauseCode` documents which causes accuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from fft.messages.causes import CauseCode
from fft.messages.identities import Peer

Place = tuple[str, int]
"""(group, rank): a place in the job, independent of the process that holds it."""

_KEPT = 64


@dataclass(frozen=True)
class Rollback:
    """One ABORT.

    Attributes:
        named: Ranks that its cause is evidence against; it may be empty.
        is_open: Gradients of replicas differed without a majority, so that only later attempts can
            show which replica is wrong.
    """

    n: int
    step: int
    by: str
    cause: str
    named: frozenset[Place]
    is_open: bool = False


def place_text(place: Place) -> str:
    """Return the place in display form: ``GROUP/RANK``."""
    return f"{place[0]}/{place[1]}"


@dataclass
class History:
    """The rollbacks since the last commit; records may arrive in any order and more than once."""

    _committed: int = -1
    _rollbacks: dict[int, Rollback] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> None:
        """Take one record of the head register, in trace form; anything else is ignored.

        An ABORT that the user requested by skipping the step is also ignored, because nothing
        failed.
        """
        n, kind, step = record.get("n"), record.get("kind"), record.get("step")
        if not isinstance(n, int) or not isinstance(step, int) or n <= self._committed:
            return
        if kind == "commit":
            self._committed = n
            self._rollbacks = {at: old for at, old in self._rollbacks.items() if at > n}
        elif kind == "abort" and not record.get("skip") and n not in self._rollbacks:
            by = record.get("by")
            who = str(Peer(*by)) if _is_peer(by) else "?/0#0"
            accused = record.get("accused")
            peers = accused if isinstance(accused, list | tuple) else ()
            named = frozenset((peer[0], peer[1]) for peer in peers if _is_peer(peer))
            is_open = not named and record.get("code") == CauseCode.GRADIENTS_DIFFER
            cause = str(record.get("cause", ""))
            self._rollbacks[n] = Rollback(n, step, who, cause, named, is_open)
            while len(self._rollbacks) > _KEPT:
                del self._rollbacks[min(self._rollbacks)]

    @property
    def run(self) -> list[Rollback]:
        """The rollbacks since the last commit, in order; all are attempts at the same step."""
        return [self._rollbacks[n] for n in sorted(self._rollbacks)]


def named_by_all(rollbacks: Iterable[Rollback], at_least: int) -> Place | None:
    """Return the one rank that all rollbacks name, if there are at least ``at_least``.

    Open rollbacks name no rank and are ignored. A run of two or more rollbacks needs at least two
    that are not open.
    """
    run = list(rollbacks)
    closed = [each.named for each in run if not each.is_open]
    if len(run) < max(1, at_least) or len(closed) < min(2, len(run)):
        return None
    everywhere = frozenset.intersection(*closed)
    return next(iter(everywhere)) if len(everywhere) == 1 else None


def _is_peer(value: Any) -> TypeGuard[tuple[str, int, int]]:
    """Whether the value has the form of a `Peer`: group, rank and incarnation."""
    is_long = isinstance(value, list | tuple) and len(value) == 3
    return is_long and isinstance(value[0], str) and isinstance(value[1], int)
