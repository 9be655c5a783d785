"""Build an execution for `fft.trace.live_sets` from the barriers of the epochs of a run. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fft.messages.effects import Broadcast, CastVote, Decide, Tell
from fft.messages.protocol import (
    Ack,
    Ballot,
    Begin,
    Decision,
    Join,
    Leave,
    Peer,
    Prepared,
    Ready,
    Record,
    Token,
)
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
_Place = tuple[Peer, int]


@dataclass(slots=True)
class _Turn:
    """The relevant part of one move: its events, and hashes of the messages it sends and receives.

    A message or a record takes far more memory than its 64-bit hash.
    """

    events: tuple[Event, ...]
    says: tuple[int, ...]
    hears: tuple[tuple[int, Peer], ...]
    """Each hash with the participant that sent the message."""
    repeatable: tuple[int, ...] = ()
    """The subset of ``says`` that may be sent again many epochs later."""
    place: str = ""
    starts: int = -1
    """The epoch whose record this move takes; negative if it takes none."""


def execution_of(history: History) -> Execution:
    """Return the execution of the epochs' barriers that a history contains.

    A participant **starts** when it takes the record of an epoch; before that no participant waits
    for it. It **enters** the epoch's barrier with ``Healed`` or ``Connected``, when it sends ready.
    It **leaves** when it goes from healing to training with the members of its record. It has
    **failed** when it takes another epoch's record or its moves end, whatever the cause: killed,
    rolled back, left out, drained, or simply the end of the history, after which it may have
    failed. The exact time of a failure does not matter, because failures can be moved. A
    participant that ended between ready and leaving may therefore be counted as alive: the others
    leave with it in their set, which is valid, and detect its failure later. It must not be a
    member without having entered.

    The entry of a live block is a separate barrier within the epoch: a participant enters it with
    its vote, and leaves it with the members of the epoch when it obeys the COMMIT.

    The order between participants is that of communication: a message is received after it was
    first sent, a register record is seen after its author proposed it, and votes are seen after
    they are cast. Clocks are not compared. For members without any moves here (their trace is
    missing), the messages that others received count: such a member entered if another participant
    received its ready.

    Raises:
        ExecutionError: A participant left a barrier without entering it, or received a message
            before it was sent.
    """
    return _told(history).execution()


def judge_live_sets(history: History) -> Finding:
    """Judge guarantee 8 on a whole history: see `Barriers.finding`."""
    return _told(history).finding(is_whole=not history.cut)


def _told(history: History) -> Barriers:
    barriers = Barriers(history.moves.keys())
    for move in history.all():
        barriers.take(move)
    return barriers


class Barriers:
    """The barrier events of a run, collected from its moves as they come in.

    A long history is judged in **parts**, so that only some epochs are kept in memory. A life of a
    participant (from its start to its failure) belongs to one epoch, and epochs rise from life to
    life. A part holds the lives of all epochs up to one that every participant has passed, and
    nothing in the part receives a message that is sent after it. The whole is valid if and only if
    each part is valid. Chains of instants for the parts give one chain for the whole, because all
    failures of a part can come before the next part begins. Conversely, a chain for the whole, cut
    down to a part, is a chain for that part: members of its barriers are in the part, and all other
    processes are dead at its ends.

    Of the votes and commits within an epoch, besides those of live blocks, only the first of each
    participant is kept. It proves
    that the participant has left the barrier, and nothing else that concerns barriers happens to it
    until the epoch ends.
    """

    SOME = 256
    """Minimum number of lives to keep before looking for a part, which reads all of them."""

    def __init__(self, traced: Collection[Peer]) -> None:
        """Initialize for the moves of the participants in ``traced``."""
        self._turns: dict[Peer, list[_Turn]] = {peer: [] for peer in traced}
        self._latest: dict[Peer, int] = {}
        """The epoch that each participant, unless it has ended, has started last."""
        self._listed: dict[Peer, set[int]] = defaultdict(set)
        """Members without moves, and the epochs in which they are listed."""
        self._ready: set[Ready] = set()
        """The ready messages that others received from these members."""
        self._first: dict[Peer, set[_Key]] = defaultdict(set)
        """Keys that each participant has already sent or received in its current epoch, among those
        that count only once per epoch."""
        self._votes_of: dict[int, tuple[tuple[int, Peer], ...]] = {}
        """The votes that the commit of a live block's entry proves, by the hash of the commit. They
        count where the decider's trace has lost the move in which it received them."""
        self._ended: set[Peer] = set()
        self._said: set[int] = set()
        """Hashes of the messages of the previous part."""
        self._repeatable: dict[Peer, set[int]] = defaultdict(set)
        """Hashes of the messages of any earlier part, from participants that may send them
        again."""
        self._lives, self._enough = 0, self.SOME
        """Number of lives kept, and the number at which to look for a part."""
        self._finding = Finding("barriers")
        """The finding on all parts so far."""

    def take(self, move: Move) -> None:
        """Take one move; the moves of one participant come in their order."""
        if self._finding.violation is not None:
            return
        events = _events(move)
        starts = move.after.token.epoch if any(e.kind == "start" for e in events) else -1
        if self._lives >= self._enough:
            self._judge_a_part()
            self._lives = sum(turn.starts >= 0 for found in self._turns.values() for turn in found)
            self._enough = 2 * self._lives + self.SOME
        if starts >= 0:
            self._lives += 1
            if move.peer in self._latest:
                events.insert(0, Event("fail"))
            self._first[move.peer].clear()
            self._latest[move.peer] = starts
        says = [x for x in _says(move) if self._counts(move.peer, x, "says")]
        turn = _Turn(
            tuple(events),
            says=tuple(map(hash, says)),
            hears=tuple(
                (hash(x), by) for x, by in _hears(move) if self._counts(move.peer, x, "hears")
            ),
            repeatable=tuple(hash(x) for x in says if isinstance(x[-1], (Join, Leave))),
            place=move.place,
            starts=starts,
        )
        if turn.events or turn.says or turn.hears:
            self._turns[move.peer].append(turn)
        if events or isinstance(move.event, (Ready, Begin)):
            self._note_untraced(move)
        if isinstance(move.event, Decision) and move.event.record is not None:
            self._note_votes(move.event.record, member_peers(move.before))

    def ended(self, peer: Peer) -> None:
        """Record that no more moves of ``peer`` come in."""
        self._ended.add(peer)
        self._latest.pop(peer, None)

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
        # The sender of begin is in the barrier itself, so begin counts as its ready.
        if isinstance(move.event, (Ready, Begin)) and move.event.peer not in self._turns:
            self._ready.add(Ready(move.event.peer, move.event.epoch))

    def _note_votes(self, record: Record, voters: Collection[Peer]) -> None:
        if record.live:
            within = ("block", record.token, "commit", record.by)
            commit: _Key = ("record", record) if _ends_an_epoch(record) else within
            self._votes_of[hash(commit)] = tuple(
                (hash(("block", record.token, "vote", peer)), peer) for peer in voters
            )

    def execution(self) -> Execution:
        """Return the execution since the last part; see `execution_of`. Raises ExecutionError."""
        return self._execution({peer: len(found) for peer, found in self._turns.items()})

    def _execution(self, ends: Mapping[Peer, int], last: float = math.inf) -> Execution:
        """Build the execution from the first ``ends[peer]`` turns of each participant; for members
        without a trace, from their epochs up to ``last``."""
        turns = {peer: self._turns[peer][:end] for peer, end in ends.items()}
        for found in turns.values():
            if any(turn.events for turn in found):
                found.append(_Turn((Event("fail"),), (), ()))
        for peer, epochs in self._listed.items():
            past = sorted(n for n in epochs if n <= last)
            turns[peer] = [_life(Ready(peer, epoch), self._ready) for epoch in past]
        peers = sorted(turns)
        heard = _hearing(peers, turns, self._votes_of, self._is_past)
        clocks = vectors([len(turns[p]) for p in peers], heard)
        for peer, clock in zip(peers, clocks, strict=True):
            if len(clock) < len(turns[peer]):
                place = turns[peer][len(clock)].place
                raise ExecutionError(
                    f"{peer} received at {place} a message that was sent only later"
                )
        return _project(peers, turns, clocks)

    def finding(self, is_whole: bool) -> Finding:
        """Return the finding with one check per leave.

        It is violated if the execution is not valid, and also if it is valid only by luck
        (``unheard``). If parts of the history are missing, neither can be decided, and the finding
        is empty.
        """
        if not is_whole:
            return Finding("barriers")
        if self._finding.violation is None:
            self._judge({peer: len(found) for peer, found in self._turns.items()})
        return self._finding

    def _judge(self, ends: Mapping[Peer, int], last: float = math.inf) -> None:
        finding = self._finding
        try:
            execution = self._execution(ends, last)
            verdict, by_luck = judged(execution)
        except ExecutionError as error:
            finding.expect(False, str(error), "")
            return
        finding.checks += verdict.answers
        finding.violation = verdict.reason or by_luck
        if finding.violation is not None:
            places = (e.place for line in execution.lines.values() for e in line)
            finding.place = next((x for x in places if x and f"({x})" in finding.violation), "")

    # --- parts of a long history ------------------------------------------------------------------

    def _judge_a_part(self) -> None:
        """Judge the lives of the epochs that every participant has passed, and drop them."""
        if (part := self._part()) is None:
            return
        last, ends = part
        self._judge(ends, last)
        self._said.clear()
        for peer, end in ends.items():
            turns = self._turns[peer]
            self._said.update(x for turn in turns[:end] for x in turn.says)
            self._repeatable[peer].update(x for turn in turns[:end] for x in turn.repeatable)
            del turns[:end]
            if peer in self._ended and not turns:
                self._repeatable.pop(peer)
        for peer, epochs in self._listed.items():
            self._listed[peer] = {n for n in epochs if n > last}
        self._ready = {word for word in self._ready if word.epoch > last}
        left = {x for turns in self._turns.values() for turn in turns for x, _ in turn.hears}
        self._votes_of = {x: votes for x, votes in self._votes_of.items() if x in left}

    def _is_past(self, x: int, by: Peer) -> bool:
        """Whether ``x`` was sent in a part that is already judged."""
        return x in self._said or x in self._repeatable.get(by, ())

    def _part(self) -> tuple[int, dict[Peer, int]] | None:
        """Return the last epoch of the next part and the number of its turns by participant."""
        said: dict[int, _Place] = {}
        for peer, found in self._turns.items():
            for i, turn in enumerate(found):
                for x in turn.says:
                    said.setdefault(x, (peer, i))
        last = min(self._latest.values(), default=0) - 1
        while True:
            ends = {
                peer: next((i for i, turn in enumerate(found) if turn.starts > last), len(found))
                for peer, found in self._turns.items()
            }
            if not any(turn.events for p, end in ends.items() for turn in self._turns[p][:end]):
                return None
            if (earlier := self._close(last, ends, said)) is None:
                return last, ends
            last = earlier

    def _close(self, last: int, ends: dict[Peer, int], said: Mapping[int, _Place]) -> int | None:
        """Remove from a part, up to epoch ``last``, the turns that receive a message sent after the
        part.

        Returns None, or the earlier epoch to end the part with if lives would have to be removed.
        """
        untraced = {hash(("message", word)) for word in self._ready if word.epoch > last}

        def is_behind(x: int, by: Peer) -> bool:
            if x in untraced:
                return True
            if self._is_past(x, by):
                return False
            if x in said:
                peer, i = said[x]
                return i >= ends[peer]
            return by in self._turns and by not in self._ended

        todo = set(ends)
        while todo:
            peer = todo.pop()
            found, end = self._turns[peer], ends[peer]
            early = (i for i in range(end) if any(is_behind(*x) for x in found[i].hears))
            if (i := next(early, None)) is None:
                continue
            if (event := next((k for k in range(i, end) if found[k].events), None)) is not None:
                return max(turn.starts for turn in found[: event + 1]) - 1
            ends[peer] = i
            todo |= set(ends)
        return None


def _events(move: Move) -> list[Event]:
    """Return the events of the move, in the terms of the live-set definition."""
    events: list[Event] = []
    old, new = move.before.epoch, move.after.epoch
    if new is not None and (old is None or old.n != new.n):
        events.append(Event("start", place=move.place))
    if move.came_ready:
        events.append(Event("enter", f"epoch {move.after.token.epoch}", place=move.place))
    if ("healing", "training") in move.roles:
        members = frozenset(map(str, member_peers(move.after)))
        events.append(Event("leave", members=members, place=move.place))
    vote, token = move.before.vote, move.before.token
    if move.entered("voting") and isinstance(move.event, Prepared):
        if move.event.manifest.part == "entry":
            events.append(Event("enter", _block(token), place=move.place))
    elif move.obeyed == "commit" and vote is not None and vote.manifest.part == "entry":
        members = frozenset(map(str, member_peers(move.before)))
        events.append(Event("leave", members=members, place=move.place))
    return events


def _block(token: Token) -> str:
    return f"block {token.epoch}.{token.txn}"


_ABOUT_BARRIERS = (Join, Ack, Ready, Begin, Leave)


def _ends_an_epoch(record: Record) -> bool:
    """Whether ``record`` begins an epoch, or no txn of its epoch comes after it."""
    return record.kind != "commit" or record.change


def _says(move: Move) -> Iterator[_Key]:
    """Yield the messages of this move that only this participant can send."""
    for effect in move.out.effects:
        match effect:
            case Broadcast(message=message) | Tell(message=message):
                if isinstance(message, _ABOUT_BARRIERS):
                    yield ("message", message)
            case Decide(proposal=proposal) if _ends_an_epoch(proposal):
                yield ("record", proposal)
            case Decide(proposal=proposal):
                yield ("within", proposal.epoch, "commit", move.peer)
                if proposal.live:
                    yield ("block", proposal.token, "commit", move.peer)
            case CastVote(token=token, vote=vote):
                yield ("within", token.epoch, "vote", move.peer)
                if vote.manifest.block:
                    yield ("block", token, "vote", move.peer)


def _hears(move: Move) -> Iterator[tuple[_Key, Peer]]:
    """Yield what must have been sent before this move, and its sender."""
    match move.event:
        case Decision(record=record):
            if record is not None and _ends_an_epoch(record):
                yield ("record", record), record.by
            elif record is not None:
                yield ("within", record.epoch, "commit", record.by), record.by
                if record.live:
                    yield ("block", record.token, "commit", record.by), record.by
        case Ballot(token=token, votes=votes):
            for vote in votes:
                yield ("within", token.epoch, "vote", vote.peer), vote.peer
                if vote.manifest.block:
                    yield ("block", token, "vote", vote.peer), vote.peer
        case Join() | Ack() as message:
            yield ("message", message), message.hello.peer
        case Ready() | Begin() | Leave() as message:
            yield ("message", message), message.peer


def _life(word: Ready, ready: Container[Ready]) -> _Turn:
    """Return one epoch of a participant without a trace, as far as its ready message shows it."""
    place = f"{word.peer} without a trace, in epoch {word.epoch}"
    if word not in ready:
        return _Turn((Event("start", place=place), Event("fail")), (), ())
    enter = Event("enter", f"epoch {word.epoch}", place=place)
    said = hash(("message", word))
    return _Turn((Event("start", place=place), enter, Event("fail")), (said,), ())


def _hearing(
    peers: Sequence[Peer],
    turns: Mapping[Peer, list[_Turn]],
    votes_of: Mapping[int, Sequence[tuple[int, Peer]]],
    is_past: Callable[[int, Peer], bool],
) -> Sources:
    """Return, for each turn, the turns that first sent what it receives, without past ones.

    A commit that no turn has sent stands for the votes that it proves.
    """
    said: dict[int, tuple[int, int]] = {}
    for p, peer in enumerate(peers):
        for i, turn in enumerate(turns[peer]):
            for key in turn.says:
                said.setdefault(key, (p, i))

    def sources(key: int, by: Peer) -> list[tuple[int, int]]:
        if is_past(key, by):
            return []
        if key in said:
            return [said[key]]
        votes = votes_of.get(key, ())
        return [said[x] for x, peer in votes if x in said and not is_past(x, peer)]

    return {
        (p, i): [source for heard in turn.hears for source in sources(*heard)]
        for p, peer in enumerate(peers)
        for i, turn in enumerate(turns[peer])
        if turn.hears
    }


def _project(
    peers: Sequence[Peer], turns: Mapping[Peer, list[_Turn]], clocks: list[list[Cut]]
) -> Execution:
    """Reduce the order of all moves to that of the events. Failures are not ordered."""
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
