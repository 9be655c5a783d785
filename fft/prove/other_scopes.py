"""Scopes that a searched scope is bound to, reduced to what it observes: their data use. Pure.

Each scope is an instance of the protocol. As seen from the searched scope, another one can only do
the following: commit at any time, within its own bounds, a step or a skip, which look alike from
here; lose a group; and end. A search that models the other scope checks that it keeps its bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

from fft.messages.protocol import Record, ScopeRecord
from fft.protocol.spec import FsmSpec
from fft.protocol.state import ScopePosition
from fft.prove.bounds import Bounds

_AHEAD = 1
"""The bound that is searched: the smallest, so that a search of few commits reaches it."""
_GROUPS = "ABCDEFGH"


class OtherScopes:
    """The scopes that the flow of a spec binds one stage to; none if the bounds name no stage."""

    def __init__(self, spec: FsmSpec, bounds: Bounds) -> None:
        bound_to: tuple[ScopePosition, ...] = ()
        if bounds.stage is not None:
            bound_to = spec.bound_to(spec.stages[bounds.stage])
        self.bounds = tuple(replace(e, ahead=min(e.ahead, _AHEAD)) for e in bound_to)
        """The bounds that a participant begins with."""
        groups = tuple(_GROUPS[: bounds.groups])
        self.first = tuple(ScopeRecord(e.scope, 1, 0, groups) for e in self.bounds)
        self.groups, self.ends = bounds.groups, bounds.ends

    def moves(
        self, head: Record | None, at: tuple[ScopeRecord, ...], asked: Set[str], inside: Set[str]
    ) -> Iterator[tuple[str, ScopeRecord, bool]]:
        """Yield the possible next moves: a description, the record, and whether it is announced.

        Args:
            head: Head record of the searched scope.
            at: Newest records of the other scopes.
            asked: Groups that are asked to leave.
            inside: Groups in the searched scope.
        """
        cursor = head.cursor if head is not None else 0
        for bound, record in zip(self.bounds, at, strict=True):
            if record.groups:
                yield from self._commits(bound, record, cursor, asked, inside)
                yield from self._is_left(bound, record) if self.ends else ()

    def _commits(
        self,
        bound: ScopePosition,
        record: ScopeRecord,
        cursor: int,
        asked: Set[str],
        inside: Set[str],
    ) -> Iterator[tuple[str, ScopeRecord, bool]]:
        after = record.cursor + len(record.groups)
        # It follows this scope, or leads it by as much as its bound allows.
        reach = cursor + _AHEAD * (len(inside) or self.groups)
        if after > cursor if bound.ahead else record.cursor >= reach:
            return
        newer = replace(record, n=record.n + 1, cursor=after)
        yield f"{record.scope} commits", newer, True
        if self.ends:
            yield f"{record.scope} commits and ends", replace(newer, groups=()), True
        # a group leaves the scopes in the order of the flow
        gone = {group for group in asked if not bound.ahead or group not in inside}
        stay = tuple(group for group in record.groups if group not in gone)
        if stay != record.groups:
            left = replace(newer, groups=stay)
            yield f"{record.scope} commits and is left", left, True

    def _is_left(
        self, bound: ScopePosition, record: ScopeRecord
    ) -> Iterator[tuple[str, ScopeRecord, bool]]:
        """Yield departures without a commit: of a lost group, or of all groups (without a
        record)."""
        # The number of its groups matters only to a scope that leads it.
        for group in record.groups if len(record.groups) > 1 and bound.ahead else ():
            stay = tuple(other for other in record.groups if other != group)
            lost = replace(record, n=record.n + 1, groups=stay)
            yield f"{record.scope} loses {group}", lost, True
        yield f"{record.scope} is left", replace(record, groups=()), False
