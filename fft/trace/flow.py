"""Guarantee 6 between scopes: the order of the data, from the registers of all of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fft.messages.effects import Finish
from fft.messages.protocol import Peer, Record, Seen
from fft.protocol.invariants import Finding, Move
from fft.protocol.invariants.facts import Numbers
from fft.trace.format import RUNS
from fft.trace.inputs import Given


class Flow:
    """What one scope has taken, and what it says of the others; takes its records as they come.

    Args:
        bounds: other scope → how many of its txns this one may begin ahead of it.
    """

    def __init__(self, scope: str, bounds: Mapping[str, int]) -> None:
        self.scope = scope
        self.bounds = bounds
        self.is_whole = True
        """Nothing is missing that a trace could have had."""
        self.given = Given()
        """Entries, which one scope gives to the next."""
        self.furthest = {1: 0}
        """Groups that take a slice each → the slices before which all were taken, at the most. A
        scope that has not begun will have one at least."""
        self.seen: dict[str, Record] = {}
        """Other scope → the record that names the most of it."""
        self.unnamed: dict[str, Record] = {}
        """Other scope → a record that does not say what was seen of it."""
        self._commits = Numbers(RUNS)
        self._members: dict[int, int] = {}
        """Groups of the newest epochs."""
        self._newest: tuple[int, frozenset[Peer]] = 0, frozenset()
        """The newest epoch, and who is in it."""
        self._left: set[Peer] = set()
        """Who has left in good order."""

    def move(self, move: Move) -> None:
        """What somebody has done in it."""
        if move.record is not None:
            self.take(move.record)
        finish = next((e for e in move.out.effects if isinstance(e, Finish)), None)
        if finish is not None and finish.error is None:
            self._left.add(move.peer)

    def take(self, record: Record) -> None:
        """A record of the scope; of all of one number the first counts."""
        if record.kind == "epoch" and record.epoch > self._newest[0]:
            self._newest = record.epoch, record.peer_set
        if record.kind == "epoch":
            self._members = {
                **dict([*self._members.items()][-1:]),
                record.epoch: len(record.members),
            }
        if (members := self._members.get(record.epoch)) is not None:
            groups = members - len(record.leavers)
            self.furthest[groups] = max(self.furthest.get(groups, 0), record.cursor)
        if record.kind != "commit":
            return
        for other, ahead in self.bounds.items():
            if (seen := _of(record, other, ahead)) is None:
                self.unnamed.setdefault(other, record)
            elif other not in self.seen or _more(seen, _of(self.seen[other], other, ahead)):
                self.seen[other] = record
        self._commits.add(record.n)

    @property
    def commits(self) -> int:
        """How many it has."""
        return len(self._commits)

    def has_come_to(self, seen: Seen) -> bool:
        """Whether a record of it allows what another scope has gone by."""
        if not seen.takers:
            return 0 in self.furthest or self._newest[1] <= self._left
        return any(
            seen.cursor <= cursor and seen.reach <= cursor + seen.ahead * groups
            for groups, cursor in self.furthest.items()
        )


def judge_flow(flows: Iterable[Flow]) -> Finding:
    """6: each scope has kept to what the others had taken.

    That a commit keeps to what it names is judged scope by scope (``data_flow``). Here: of two that
    are bound to each other both say so, by the flow in their headers; each names all that it is
    bound to, and what had come to pass there.
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
    seen = _of(record, name, ahead)
    assert seen is not None, "it is kept for that"
    place = f"record {record.n} of scope {flow.scope}"
    reached = "nothing" if other is None else max(other.furthest.values())
    text = (
        f"{place} has seen {name} at slice {seen.cursor}, of {seen.takers} groups; it came to "
        f"{reached}"
    )
    found.expect(other is not None and other.has_come_to(seen), text, place)


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


def _more(seen: Seen, than: Seen | None) -> bool:
    """Whether one says more of the other scope."""
    return than is None or (not seen.takers, seen.reach) > (not than.takers, than.reach)
