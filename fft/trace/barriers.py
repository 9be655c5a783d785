"""Barriers of the epochs of a run, as an execution of which `fft.trace.live_sets` judges. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fft.messages.effects import Broadcast, CastVote, Decide, Tell
from fft.messages.protocol import Ack, Ballot, Begin, Decision, Join, Leave, Peer, Ready, Record
from fft.protocol.invariants import Finding, History, Move
from fft.protocol.state import member_peers
from fft.trace.live_sets import (
    Cut,
    Event,
    Execution,
    ExecutionError,
    Mark,
    Sources,
    judged,
    vectors,
)

_Key = tuple[object, ...]


@dataclass(slots=True)
class _Turn:
    """What one move is to this page: its events, and what it says and hears, by the hash of it.

    A message, or a record, takes far more memory than its hash, of 64 bits.
    """

    events: tuple[Event, ...]
    says: tuple[int, ...]
    hears: tuple[int, ...]
    place: str = ""


def execution_of(history: History) -> Execution:
    """The execution of the epochs' barriers that a history tells of.

    A participant **starts** when it takes the record of an epoch (before, nobody waits for it),
    **enters** the epoch's barrier with ``Healed`` or ``Connected`` (it says ready), **leaves** from
    healing to training with the members of its record, and has **failed** when it takes another
    epoch's record or its moves end, whatever the cause: killed, rolled back, left out, drained, or
    simply the end of the history, after which it may have failed. As failures move, it does not
    matter when exactly. A participant that ended between ready and leaving may therefore be held
    for alive: the others leave with it in their set, which is valid, and find out later. What it
    may not be is a member without having entered.

    The order between participants is that of communication: a message is heard after it was first
    said, a register record is seen after its author proposed it, votes are seen after they are
    cast. Clocks are not compared. Members without any moves here (their trace is missing) are
    taken at their word: they entered where somebody heard their ready.

    Raises:
        ExecutionError: somebody left a barrier without entering it, or heard what was said later.
    """
    return _told(history).execution()


def judge_live_sets(history: History) -> Finding:
    """Guarantee 8 on a whole history: see `Barriers.finding`."""
    return _told(history).finding(is_whole=not history.cut)


def _told(history: History) -> Barriers:
    barriers = Barriers(history.moves.keys())
    for move in history.all():
        barriers.take(move)
    return barriers


class Barriers:
    """What the moves of a run, as they come in, tell of barriers.

    What is kept of them grows with the number of epochs, not with that of the steps. Of votes and
    commits within an epoch it is the first of each participant: they say that it has left the
    barrier, and nothing happens to it that concerns barriers until what ends the epoch.
    """

    def __init__(self, traced: Collection[Peer]) -> None:
        """``traced``: whose moves will come in."""
        self._turns: dict[Peer, list[_Turn]] = {peer: [] for peer in traced}
        self._alive: set[Peer] = set()
        self._listed: dict[Peer, set[int]] = defaultdict(set)
        """Members of whom no moves come in: in which epochs."""
        self._ready: set[Ready] = set()
        """What others heard of these."""
        self._first: dict[Peer, set[_Key]] = defaultdict(set)
        """What each has said and heard within its epoch, of what counts once in it."""

    def take(self, move: Move) -> None:
        """One move; those of one participant come in their order."""
        events = _events(move)
        if move.peer in self._alive and any(e.kind == "start" for e in events):
            events.insert(0, Event("fail"))
        if events:
            self._alive.add(move.peer)
        if any(e.kind == "start" for e in events):
            self._first[move.peer].clear()
        says, hears = (
            tuple(hash(key) for key in told if self._counts(move.peer, key, how))
            for how, told in (("says", _says(move)), ("hears", _hears(move)))
        )
        turn = _Turn(tuple(events), says, hears, move.place)
        if turn.events or turn.says or turn.hears:
            self._turns[move.peer].append(turn)
        if events or isinstance(move.event, (Ready, Begin)):
            self._note_untraced(move)

    def _counts(self, peer: Peer, key: _Key, how: str) -> bool:
        if key[0] != "within":
            return True
        first, mine = (how, *key), self._first[peer]
        is_new = first not in mine
        mine.add(first)
        return is_new

    def _note_untraced(self, move: Move) -> None:
        for peer in member_peers(move.after):
            if peer not in self._turns and move.after.epoch is not None:
                self._listed[peer].add(move.after.epoch.epoch)
        # who lets the others begin is there itself
        if isinstance(move.event, (Ready, Begin)) and move.event.peer not in self._turns:
            self._ready.add(Ready(move.event.peer, move.event.epoch))

    def execution(self) -> Execution:
        """See `execution_of`. Raises ExecutionError."""
        turns = {
            peer: [*found, _Turn((Event("fail"),), (), ())] if peer in self._alive else found
            for peer, found in self._turns.items()
        }
        for peer, epochs in self._listed.items():
            turns[peer] = [_life(Ready(peer, epoch), self._ready) for epoch in sorted(epochs)]
        peers = sorted(turns)
        heard = _hearing(peers, turns)
        clocks = vectors([len(turns[p]) for p in peers], heard)
        for peer, clock in zip(peers, clocks, strict=True):
            if len(clock) < len(turns[peer]):
                place = turns[peer][len(clock)].place
                raise ExecutionError(f"{peer} heard at {place} what was said only later")
        return _project(peers, turns, clocks)

    def finding(self, is_whole: bool) -> Finding:
        """One check per barrier left.

        Violated if the execution is not valid, and also if it is valid by luck (``unheard``). Of a
        history of which parts are missing neither can be told.
        """
        finding = Finding("barriers")
        if not is_whole:
            return finding
        try:
            execution = self.execution()
            verdict, by_luck = judged(execution)
        except ExecutionError as error:
            finding.expect(False, str(error), "")
            return finding
        finding.checks = verdict.answers
        finding.violation = verdict.reason or by_luck
        if finding.violation is not None:
            places = (e.place for line in execution.lines.values() for e in line)
            finding.place = next((x for x in places if x and f"({x})" in finding.violation), "")
        return finding


def _events(move: Move) -> list[Event]:
    """What the move is in the document's words."""
    events: list[Event] = []
    old, new = move.before.epoch, move.after.epoch
    if new is not None and (old is None or old.n != new.n):
        events.append(Event("start", place=move.place))
    if move.came_ready:
        events.append(Event("enter", f"epoch {move.after.token.epoch}", place=move.place))
    if ("healing", "training") in move.roles:
        members = frozenset(map(str, member_peers(move.after)))
        events.append(Event("leave", members=members, place=move.place))
    return events


_ABOUT_BARRIERS = (Join, Ack, Ready, Begin, Leave)


def _ends_an_epoch(record: Record) -> bool:
    """Whether it begins an epoch, or no txn of its epoch comes after it."""
    return record.kind != "commit" or record.change


def _says(move: Move) -> Iterator[_Key]:
    """What others may hear of after this move: what only this participant can say."""
    for effect in move.out.effects:
        match effect:
            case Broadcast(message=message) | Tell(message=message):
                if isinstance(message, _ABOUT_BARRIERS):
                    yield ("message", message)
            case Decide(proposal=proposal) if _ends_an_epoch(proposal):
                yield ("record", proposal)
            case Decide(proposal=proposal):
                yield ("within", proposal.epoch, "commit", move.peer)
            case CastVote(token=token):
                yield ("within", token.epoch, "vote", move.peer)


def _hears(move: Move) -> Iterator[_Key]:
    """What somebody must have said before this move."""
    match move.event:
        case Decision(record=record):
            if record is not None and _ends_an_epoch(record):
                yield ("record", record)
            elif record is not None:
                yield ("within", record.epoch, "commit", record.by)
        case Ballot(token=token, votes=votes):
            for vote in votes:
                yield ("within", token.epoch, "vote", vote.peer)
        case Join() | Ack() | Ready() | Begin() | Leave() as message:
            yield ("message", message)


def _life(word: Ready, ready: Container[Ready]) -> _Turn:
    """An epoch of a participant of which only the ready is known, if that."""
    place = f"{word.peer} without a trace, in epoch {word.epoch}"
    if word not in ready:
        return _Turn((Event("start", place=place), Event("fail")), (), ())
    enter = Event("enter", f"epoch {word.epoch}", place=place)
    said = hash(("message", word))
    return _Turn((Event("start", place=place), enter, Event("fail")), (said,), ())


def _hearing(peers: Sequence[Peer], turns: Mapping[Peer, list[_Turn]]) -> Sources:
    """For each turn those in which what it hears was first said."""
    said: dict[int, tuple[int, int]] = {}
    for p, peer in enumerate(peers):
        for i, turn in enumerate(turns[peer]):
            for key in turn.says:
                said.setdefault(key, (p, i))
    return {
        (p, i): [said[key] for key in turn.hears if key in said]
        for p, peer in enumerate(peers)
        for i, turn in enumerate(turns[peer])
        if turn.hears
    }


def _project(
    peers: Sequence[Peer], turns: Mapping[Peer, list[_Turn]], clocks: list[list[Cut]]
) -> Execution:
    """The order of all moves, cut down to that of the events. Failures have no part in it."""
    lines: dict[str, tuple[Event, ...]] = {}
    fixed: list[list[tuple[int, int]]] = []  # by participant: (turn, index of the event)
    for peer in peers:
        found = [(i, event) for i, turn in enumerate(turns[peer]) for event in turn.events]
        lines[str(peer)] = tuple(event for _, event in found)
        fixed.append([(i, n) for n, (i, event) in enumerate(found) if event.kind != "fail"])
    before: set[tuple[Mark, Mark]] = set()
    for p, marks in enumerate(fixed):
        known = [0] * len(peers)  # what holds of an event holds of all later ones of its line
        for i, n in marks:
            for q, bound in enumerate(clocks[p][i]):
                at = bisect_left(fixed[q], (bound, 0))
                if q != p and at > known[q]:
                    known[q] = at
                    before.add(((str(peers[q]), fixed[q][at - 1][1]), (str(peers[p]), n)))
    return Execution(lines, frozenset(before))
