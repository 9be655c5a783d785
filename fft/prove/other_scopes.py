"""Scopes that a searched one is bound to, as far as it can tell: versions that go up. Pure.

Each scope is an instance of the protocol. So all that another one can do is to commit at any time,
within the bounds that it keeps itself, and to lose a group that leaves. That it keeps its bounds is
searched when it is the one that is modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

from fft.messages.protocol import Record, ScopeRecord
from fft.protocol.flow import Elsewhere
from fft.protocol.spec import FsmSpec
from fft.prove.bounds import Bounds

_AHEAD = 1
"""The bound that is searched: the smallest, so that a search of few commits meets it."""
_GROUPS = "ABCDEFGH"


class OtherScopes:
    """Those that the flow of a spec binds one stage to; none, if the bounds name no stage."""

    def __init__(self, spec: FsmSpec, bounds: Bounds) -> None:
        bound_to: tuple[Elsewhere, ...] = ()
        if bounds.stage is not None:
            bound_to = spec.bound_to(spec.stages[bounds.stage])
        self.bounds = tuple(replace(e, ahead=min(e.ahead, _AHEAD)) for e in bound_to)
        """What a participant begins with."""
        groups = tuple(_GROUPS[: bounds.groups])
        self.first = tuple(ScopeRecord(e.scope, 1, 0, groups) for e in self.bounds)

    def moves(
        self, head: Record | None, at: tuple[ScopeRecord, ...], asked: Set[str], inside: Set[str]
    ) -> Iterator[tuple[str, ScopeRecord]]:
        """What they can do next: in words, and the record of it.

        Args:
            head: of the searched scope.
            at: their newest records.
            asked: groups that are asked to leave.
            inside: groups in the searched scope.
        """
        version = head.step if head is not None else 0
        for bound, record in zip(self.bounds, at, strict=True):
            # it follows this scope, or leads it by as much as it may
            furthest = version if bound.ahead else version + _AHEAD
            if record.version >= furthest or not record.groups:
                continue
            newer = replace(record, n=record.n + 1, version=record.version + 1)
            yield f"{record.scope} commits", newer
            # a group leaves the scopes in the order of the flow
            gone = {group for group in asked if not bound.ahead or group not in inside}
            stay = tuple(group for group in record.groups if group not in gone)
            if stay != record.groups:
                yield f"{record.scope} commits and is left", replace(newer, groups=stay)
