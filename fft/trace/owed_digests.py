"""Check the digests that a trace owes: its header states that each commit and each heal has one.
Pure.

Without this check a group whose digests are all missing would pass: `replicas_equal` compares only
the digests that exist. Traces written before the header had ``owes`` owe none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fft.messages.protocol import Applied, Healed
from fft.protocol.invariants import Finding, Move
from fft.trace.format import DIGESTS

_NAMED = 8
"""Maximum number of participants that a text names."""


class OwedDigests:
    """Count the digests that one trace owes, and those that it lacks.

    Args:
        head: The header of the trace; empty if it has none.
        file: Name of the trace, for places.
    """

    def __init__(self, head: Mapping[str, Any], file: str) -> None:
        self.file = file
        owes = head.get("owes", {}) if head else {}
        self.are_owed = bool(owes.get(DIGESTS, False))
        self.states_it = DIGESTS in owes
        self.name = f"group {head['group']} rank {head['rank']}" if head else ""
        self.owed = 0
        self.missing = 0
        self.place = ""
        """Place of the first missing digest."""

    def move(self, move: Move) -> None:
        """Take one move of the trace."""
        event = move.event
        if not (self.are_owed and isinstance(event, Applied | Healed)):
            return
        if move.out.verdict != "row":
            return
        self.owed += 1
        if event.digest is None:
            self.missing += 1
            self.place = self.place or move.place


def judge_digests(traces: Sequence[OwedDigests]) -> Finding:
    """Check guarantee 1: every commit and heal has the digest that its trace's header states."""
    finding = Finding("digests")
    is_owed = any(trace.are_owed for trace in traces)
    for trace in traces:
        if is_owed and trace.states_it and not trace.are_owed:
            text = f"{trace.name} states that it owes no digests, and others state that they do"
            finding.expect(False, f"{text}: give all groups the same digest=", f"{trace.file}:1")
    for trace in traces:
        for _ in range(trace.owed - trace.missing):
            finding.expect(True, "", "")
    lacking = [trace for trace in traces if trace.missing]
    names = [f"{t.name} lacks {t.missing} of {t.owed} digests" for t in lacking]
    more = f"; and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    text = "; ".join(names[:_NAMED]) + more
    text += ', though the header states one for each commit and heal (digest="commit")'
    for trace in lacking:
        for _ in range(trace.missing):
            finding.expect(False, text, trace.place)
    return finding
