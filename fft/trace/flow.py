"""Guarantee 6 between scopes: the order of the data, from the registers of all of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fft.messages.protocol import Record, Seen
from fft.protocol.invariants import Finding
from fft.protocol.invariants.facts import Numbers
from fft.trace.inputs import Given


class Flow:
    """What one scope has committed, and what it says of the others; takes its records as they come.

    Args:
        bounds: other scope → how many steps this one may have committed more than that one.
    """

    def __init__(self, scope: str, bounds: Mapping[str, int]) -> None:
        self.scope = scope
        self.bounds = bounds
        self.is_whole = True
        """Nothing is missing that a trace could have had."""
        self.given = Given()
        """Entries, which one scope gives to the next."""
        self.furthest = 0
        """Committed steps."""
        self.seen: dict[str, Record] = {}
        """Other scope → the record that names the furthest version of it."""
        self.unnamed: dict[str, Record] = {}
        """Other scope → a record that does not say what was seen of it."""
        self._commits = Numbers()

    def take(self, record: Record) -> None:
        """A record of the scope; of all of one number the first counts."""
        if record.kind != "commit":
            return
        self.furthest = max(self.furthest, record.step)
        for other, ahead in self.bounds.items():
            if _of(record, other, ahead) is None:
                self.unnamed.setdefault(other, record)
            elif other not in self.seen or _version(record, other) > _version(
                self.seen[other], other
            ):
                self.seen[other] = record
        self._commits.add(record.n)

    @property
    def commits(self) -> int:
        """How many it has."""
        return len(self._commits)


def judge_flow(flows: Iterable[Flow]) -> Finding:
    """6: each scope has kept to what the others had committed.

    That a commit keeps to the versions that it names is judged scope by scope (``data_flow``).
    Here: of two that are bound to each other both say so, by the flow in their headers; each names
    all that it is bound to, and versions that were committed.
    """
    found = Finding("flow_order")
    by_name = {flow.scope: flow for flow in flows}
    for flow in by_name.values():
        text = f"the headers of scope {flow.scope} bind it to no other one of the job"
        found.expect(bool(flow.bounds) or len(by_name) == 1, text, f"scope {flow.scope}")
        for name, ahead in flow.bounds.items():
            _judge(found, flow, name, ahead, by_name.get(name))
    return found


def _judge(found: Finding, flow: Flow, name: str, ahead: int, other: Flow | None) -> None:
    found.checks += flow.commits
    if other is not None:
        place = f"scope {other.scope}"
        back = other.bounds.get(flow.scope)
        text = f"its headers name {back} steps for {flow.scope}, whose headers name {ahead} for it"
        found.expect(back is not None and bool(back) != bool(ahead), text, place)
    if (record := flow.unnamed.get(name)) is not None:
        place = f"record {record.n} of scope {flow.scope}"
        text = f"{place} does not say what it has seen of {name}, with {ahead} ahead"
        found.expect(False, text, place)
    if (record := flow.seen.get(name)) is None or (other is not None and not other.is_whole):
        return
    place, version = f"record {record.n} of scope {flow.scope}", _version(record, name)
    reached = 0 if other is None else other.furthest
    text = f"{place} has seen version {version} of {name}, which came to {reached}"
    found.expect(version <= reached, text, place)


def judge_entries(flows: Iterable[Flow]) -> Finding:
    """6: what a scope has computed on, the one before has given, with these weights and no others.

    An entry is of a txn that the stage before began in the same group, with the weights of that
    step; or it was made anew there, with those of that time.
    """
    found = Finding("entries")
    by_name = {flow.scope: flow for flow in flows}
    for flow in by_name.values():
        for name in (name for name, ahead in flow.bounds.items() if not ahead):
            other = by_name.get(name)
            if flow.is_whole and other is not None and other.is_whole:
                _judge_entries(found, flow, other)
    return found


def _judge_entries(found: Finding, flow: Flow, other: Flow) -> None:
    for (group, trace), taken in flow.given.taken.items():
        there = other.given.offered.get(group, ())
        for version, number in taken:
            text = (
                f"{flow.scope!r} computed on an entry of slice {number} with version {version}; "
                f"group {group} of {other.scope!r} has neither computed that slice at that step, "
                "nor made the entry anew"
            )
            found.expect(any((version, number) in runs for runs in there), text, trace)


def _of(record: Record, other: str, ahead: int) -> Seen | None:
    return next((s for s in record.seen if (s.scope, s.ahead) == (other, ahead)), None)


def _version(record: Record, other: str) -> int:
    return next(s.version for s in record.seen if s.scope == other)
