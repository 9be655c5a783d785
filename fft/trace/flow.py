"""Judge guarantee 6 between scopes: the order of the data, by their registers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fft.messages.effects import Finish
from fft.messages.protocol import Peer, Record, Seen
from fft.protocol.invariants import Finding, Move
from fft.protocol.invariants.facts import Numbers
from fft.trace.format import RUNS
from fft.trace.inputs import Given


class Flow:
    """The slices that one scope has taken, and what its records state about other scopes.

    Args:
        bounds: Other scope → number of txns that this scope may begin ahead of it.
    """

    def __init__(self, scope: str, bounds: Mapping[str, int]) -> None:
        self.scope = scope
        self.bounds = bounds
        self.is_whole = True
        """The scope's traces are complete: no trace has a gap or is truncated."""
        self.given = Given()
        """Entries that this scope gives to the next one or takes from the one before."""
        self.furthest = {1: 0}
        """Number of groups that take one slice each → the furthest cursor: all slices before it
        were taken. A scope that has not begun has an entry too, because it will have at least one
        group."""
        self.seen: dict[str, Record] = {}
        """Other scope → the record with the furthest position of that scope."""
        self.unnamed: dict[str, Record] = {}
        """Other scope → a record that lacks a position of that scope."""
        self._commits = Numbers(RUNS)
        self._members: dict[int, int] = {}
        """Epoch → number of member groups, for the newest two epochs."""
        self._newest: tuple[int, frozenset[Peer]] = 0, frozenset()
        """The newest epoch and its participants."""
        self._left: set[Peer] = set()
        """Participants that have finished without an error."""

    def move(self, move: Move) -> None:
        """Take one move of a participant of the scope."""
        if move.record is not None:
            self.take(move.record)
        self.end(move)

    def end(self, move: Move) -> None:
        """Note whether a participant leaves the scope in good order with this move."""
        finish = next((e for e in move.out.effects if isinstance(e, Finish)), None)
        if finish is not None and finish.error is None:
            self._left.add(move.peer)

    def take(self, record: Record) -> None:
        """Take a record of the scope; only the first record with a number counts."""
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
        """Number of commits of the scope."""
        return len(self._commits)

    def has_come_to(self, seen: Seen) -> bool:
        """Whether a record of this scope allows the position that another scope has relied on."""
        if not seen.takers:
            return 0 in self.furthest or self._newest[1] <= self._left
        return any(
            seen.cursor <= cursor and seen.reach <= cursor + seen.ahead * groups
            for groups, cursor in self.furthest.items()
        )


def judge_flow(flows: Iterable[Flow]) -> Finding:
    """Check guarantee 6: no scope exceeded the bound that the positions of the other scopes set.

    The check that a commit keeps to the positions it names is made scope by scope (``data_flow``).
    This function checks the rest. If two scopes are bound to each other, the headers of both must
    state it. Each scope must name a position of every scope that it is bound to, and that scope
    must have reached it.
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
        text = f"{place} names no position of {name}, with {ahead} ahead"
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
    """Check guarantee 6: a scope computes only on entries that the scope before it gave.

    An entry belongs to a txn that the stage before began in the same group, with the weights of
    that step; or the stage before recomputed it with the weights of that time.
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
    """Whether ``seen`` is further than ``than``."""
    return than is None or (not seen.takers, seen.reach) > (not than.takers, than.reach)
