"""Judge guarantee 6 between scopes: the order of the data, by their registers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fft.messages.effects import Finish, StartTxn
from fft.messages.protocol import Peer, Record
from fft.protocol.invariants import Finding, Move
from fft.protocol.invariants.facts import Numbers
from fft.protocol.state import ScopePosition
from fft.trace.format import RUNS
from fft.trace.inputs import Given


class Flow:
    """The slices that one scope has taken, and the positions of other scopes that it relied on.

    Args:
        flow: The scopes that it is bound to, in their initial positions.
        takers: Number of groups → how many of them take slices; see ``Config.takers``.
    """

    def __init__(
        self, scope: str, flow: Sequence[ScopePosition], takers: Callable[[int], int] = lambda n: n
    ) -> None:
        self.scope = scope
        self.bounds = {other.scope: other.ahead for other in flow}
        """Other scope → number of txns that this scope may begin ahead of it."""
        self._takers = takers
        self.is_whole = True
        """The scope's traces are complete: no trace has a gap or is truncated."""
        self.given = Given()
        """Entries that this scope gives to the next one or takes from the one before."""
        self.furthest = {1: 0}
        """Number of groups that take one slice each → the furthest cursor: all slices before it
        were taken. A scope that has not begun has an entry too, because it will have at least one
        group."""
        self.relied: dict[str, tuple[ScopePosition, str]] = {}
        """Other scope → its furthest position that a committed txn relied on, and the place of
        that commit."""
        self._begun: dict[Peer, tuple[ScopePosition, ...]] = {}
        """The positions that participants knew as they began their txns."""
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
        self.note(move)

    def note(self, move: Move) -> None:
        """Note the positions that a txn relies on, and whether a participant leaves in good
        order."""
        for effect in move.out.effects:
            if isinstance(effect, StartTxn):
                self._begun[move.peer] = move.after.others
            elif isinstance(effect, Finish) and effect.error is None:
                self._left.add(move.peer)
        if move.obeyed == "commit":
            for other in self._begun.pop(move.peer, ()):
                if other.scope not in self.relied or _more(other, self.relied[other.scope][0]):
                    self.relied[other.scope] = other, move.place

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
            groups = self._takers(members - len(record.leavers))
            self.furthest[groups] = max(self.furthest.get(groups, 0), record.cursor)
        if record.kind == "commit":
            self._commits.add(record.n)

    @property
    def commits(self) -> int:
        """Number of commits of the scope."""
        return len(self._commits)

    def has_come_to(self, relied: ScopePosition) -> bool:
        """Whether a record of this scope allows the position that another scope has relied on."""
        if relied.has_ended:
            return 0 in self.furthest or self._newest[1] <= self._left
        return any(
            relied.cursor <= cursor and relied.reach <= cursor + relied.ahead * groups
            for groups, cursor in self.furthest.items()
        )


def judge_flow(flows: Iterable[Flow]) -> Finding:
    """Check guarantee 6: no scope exceeded the bound that the positions of the other scopes set.

    The check that a txn keeps to the positions that its ranks know is made scope by scope
    (``data_flow``). This function checks the rest: if two scopes are bound to each other, the
    headers of both state it, and each has come to the positions that the other relied on.
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
    if name not in flow.relied or (other is not None and not other.is_whole):
        return
    relied, place = flow.relied[name]
    reached = "nothing" if other is None else max(other.furthest.values())
    text = (
        f"a committed txn of scope {flow.scope} relied on {name} at slice {relied.cursor}, of "
        f"{relied.takers} groups; it came to {reached}"
    )
    found.expect(other is not None and other.has_come_to(relied), text, place)


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


def _more(other: ScopePosition, than: ScopePosition) -> bool:
    """Whether ``other`` is further than ``than``."""
    return (other.has_ended, other.reach) > (than.has_ended, than.reach)
