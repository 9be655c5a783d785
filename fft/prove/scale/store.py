"""The store: one server that handles requests one after another, and the bus operations on it.

Requests are served in the order in which they were sent, because all have the same network delay.
So the effect of an operation on the store's content happens when it is sent, and only its answer is
planned. Each bus operation is a generator: it yields the seconds until the answer to each of its
requests and returns the event that answers the operation. Pure; in virtual time.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fft.engine.core import SLOTS
from fft.messages.effects import CastVote, Decide
from fft.messages.protocol import (
    Ballot,
    BusMessage,
    Decision,
    Event,
    Record,
    Token,
    Vote,
    encode,
    encode_record,
    encode_vote,
)
from fft.prove.clock import Clock
from fft.prove.scale.costs import ENTRY_BYTES, Design, Prices

if TYPE_CHECKING:
    from fft.prove.scale.job import Node

Operation = Generator[float, None, Event | None]

_FRAME = 16
"""Bytes that the bus adds to a vote in a ballot: two lengths and the txn's tag."""
_DIGEST = 50
"""Additional bytes of a record that names its member list by digest."""
_ANOTHER = 16
"""Bytes that each further vote adds to a group's message, which contains equal manifests once."""
_WAKE = 1 / 3
"""The share of waking the listener in the store's cost of one message to a waiting listener. The
rest is the answer to its read and its next wait."""


class Server:
    """One thread that serves requests in turn, with counts of the requests."""

    def __init__(self, clock: Clock, prices: Prices) -> None:
        self._clock = clock
        self._prices = prices
        self._free = 0.0
        self.busy = 0.0
        self.operations: Counter[str] = Counter()
        self.bytes = 0

    def serve(
        self, kind: str, size_in: int = 0, size_out: int = 0, part: float = 1.0, price: str = ""
    ) -> float:
        """Take one request that is sent now; return the seconds until its answer arrives."""
        prices = self._prices
        took = prices.of(price or kind, size_in, size_out)
        if part != 1.0:
            took -= prices.operation[price or kind] * (1.0 - part)
        self._free = max(self._free, self._clock.now + prices.hop) + took
        self.busy += took
        self.operations[kind] += 1
        self.bytes += size_in + size_out
        return self._free + prices.hop - self._clock.now

    def wake(self, price: str) -> float:
        """Wake a waiting listener after the last request; return the seconds until it notices."""
        took = self._prices.operation[price] * _WAKE
        self._free += took
        self.busy += took
        return self._free + self._prices.hop - self._clock.now


class Mail:
    """Unread messages of one listener: its position in the broadcasts, or its own inbox.

    ``kind`` is the kind that a read is counted as. ``waited`` is the price of a read for which the
    listener had to be woken, ``at_once`` that of a read that finds another message. ``mates``
    receive at their group's own ``server`` what this listener passes on.
    """

    __slots__ = ("at_once", "kind", "mates", "node", "server", "unread", "waited", "waiting")

    def __init__(self, node: Node, kind: str, waited: str, at_once: str) -> None:
        self.node = node
        self.kind = kind
        self.waited = waited
        self.at_once = at_once
        self.server: Server | None = None
        """Server of the messages; None means the job's."""
        self.mates: tuple[Mail, ...] = ()
        self.unread: deque[tuple[BusMessage, int]] = deque()
        self.waiting = True


@dataclass(slots=True)
class Slot:
    """The contents of a ballot at one server: votes of the newest txn, and older ones."""

    token: Token = Token(0, 0)  # noqa: RUF009  (a tuple: safe to share)
    votes: list[Vote] = field(default_factory=list)
    bytes: int = 0
    counted: int = 0

    def add(self, token: Token, vote: Vote, size: int) -> None:
        """Add a vote of ``size`` bytes; the slot may also hold votes of older txns."""
        if token != self.token:
            self.token, self.votes, self.counted = token, [], 0
        self.votes.append(vote)
        self.bytes += size


class Store:
    """The job's store, and each group's own store, if votes go there first."""

    def __init__(self, clock: Clock, prices: Prices, design: Design, ranks: int) -> None:
        self._clock = clock
        self._design = design
        self._ranks = ranks
        self._prices = prices
        self.job = Server(clock, prices)
        self.groups: dict[str, Server] = {}
        self.head: Record | None = None
        self.most_behind = 0
        """Maximum number of messages that a listener had not read when one was published."""
        self.reads = 0
        """Number of messages read by listeners."""
        self.formed = 0.0
        """Time at which the newest epoch record was written."""
        self._slots: dict[tuple[str, int], Slot] = {}
        self._sizes: dict[tuple[int, str], int] = {}
        self._lists: dict[int, tuple[int, int]] = {}
        self._listed: Record | None = None
        self._ballot: tuple[Token, Ballot] | None = None
        self._cast: tuple[Token, list[Vote]] | None = None
        """All votes of the newest txn, if the job's ballot holds one for each group."""

    def group_store(self, group: str) -> Server:
        """Return the group's own store."""
        if group not in self.groups:
            self.groups[group] = Server(self._clock, self._prices)
        return self.groups[group]

    # --- sizes ---

    def list_of(self, record: Record) -> tuple[int, int]:
        """Return (name of the member list, its bytes); equal for all proposers of the record."""
        known = self._lists.get(record.n)
        if known is None:
            whole, rest = encode_record(record), encode_record(replace(record, members=()))
            size = len(whole) - len(rest)
            if self._design.members != "inline":
                size = len(zlib.compress(whole)) - len(zlib.compress(rest))
            known = self._lists[record.n] = (hash(record.members), size)
        return known

    def _size(self, record: Record | None) -> int:
        if record is None:
            return 0
        key = (record.n, record.kind)
        if key not in self._sizes:
            size = len(encode_record(replace(record, members=())))
            if record.kind == "epoch" and self._design.members == "inline":
                size += self.list_of(record)[1]
            elif self._design.members != "inline":
                size += _DIGEST + self._changes(record)
            self._sizes[key] = size
        return self._sizes[key]

    def _changes(self, record: Record) -> int:
        """Return the bytes of the changes in the member list since the epoch before."""
        if self._design.members != "delta" or record.kind != "epoch" or self._listed is None:
            return 0
        before, now = set(self._listed.members), set(record.members)
        each = self.list_of(record)[1] // max(1, len(now))
        return len(before - now) * ENTRY_BYTES * self._ranks + len(now - before) * each

    def begin_with(self, record: Record) -> None:
        """Begin with this epoch record, whose list all participants hold."""
        self.head = self._listed = record

    def must_fetch(self, node: Node, record: Record) -> bool:
        """Whether the node lacks the member list of an epoch record; from now on it holds it."""
        if record.kind != "epoch":
            return False
        name = self.list_of(record)[0]
        lacks, node.holds = node.holds != name, name
        return lacks and self._design.members == "digest"

    def fetch(self, record: Record) -> float:
        """Read the member list; return the seconds until it arrives."""
        return self.job.serve("read_list", size_out=self.list_of(record)[1], price="compare_set")

    # --- messages ---

    def broadcast(self, message: BusMessage, listeners: Iterable[Node]) -> Operation:
        """Broadcast a message: number, slot, removal of the oldest slot, read of the number."""
        yield self.job.serve("add")
        size = self._message_size(message)
        delay = self.job.serve("compare_set", size_in=size, size_out=size)
        for node in listeners:
            if node.broadcasts.server is None:
                self._put(node.broadcasts, message, size)
        yield delay
        yield self.job.serve("delete")
        yield self.job.serve("add")
        return None

    def tell(self, message: BusMessage, node: Node | None) -> None:
        """Push a message into one participant's inbox, without waiting for an answer."""
        size = self._message_size(message)
        self.job.serve("push", size_in=size)
        if node is not None and node.alive:
            self._put(node.told, message, size)

    def _message_size(self, message: BusMessage) -> int:
        if isinstance(message, Decision) and message.record is not None:
            return 60 + self._size(message.record)
        return len(encode(message))

    def _put(self, mail: Mail, message: BusMessage, size: int) -> None:
        mail.unread.append((message, size))
        self.most_behind = max(self.most_behind, len(mail.unread))
        if mail.waiting:
            mail.waiting = False
            delay = (mail.server or self.job).wake(mail.waited)
            self._clock.after(delay, mail.node, self._read, mail, mail.waited, 1.0 - _WAKE)

    def _read(self, mail: Mail, price: str, part: float) -> None:
        message, size = mail.unread[0]
        self.reads += mail.server is None
        server = mail.server or self.job
        delay = server.serve(mail.kind, size_out=size, price=price, part=part)
        self._clock.after(delay, mail.node, self._has_read, mail, message)

    def _has_read(self, mail: Mail, message: BusMessage) -> None:
        record = message.record if isinstance(message, Decision) else None
        if record is not None and self.must_fetch(mail.node, record):
            self._clock.after(self.fetch(record), mail.node, self._deliver, mail, message)
        else:
            self._deliver(mail, message)

    def _deliver(self, mail: Mail, message: BusMessage) -> None:
        _, size = mail.unread.popleft()
        if mail.mates:
            self.group_store(mail.node.peer.group).serve("compare_set", size_in=size)
        for mate in mail.mates:
            self._put(mate, message, size)
        mail.node.post(message)
        if mail.unread:
            self._read(mail, mail.at_once, 1.0)
        else:
            mail.waiting = True

    # --- the register ---

    def read_head(self, node: Node) -> Operation:
        """Read the newest record, and its member list if the node lacks it."""
        record = self.head
        yield self.job.serve("read", size_out=self._size(record), price="compare_set")
        if record is not None and self.must_fetch(node, record):
            yield self.fetch(record)
        return Decision(record)

    def decide(self, node: Node, effect: Decide) -> Operation:
        """Propose the successor of a record."""
        after, proposal = effect.after, effect.proposal
        listed = proposal.kind == "epoch" and self._design.members != "inline"
        if listed:  # The list is written before the proposal, one way: a set has no awaited answer.
            node.holds, size = self.list_of(proposal)
            self.job.serve("write_list", size_in=size, price="set")
        size_in = self._size(after) + self._size(proposal)
        if self._is_head(after):
            self.head = proposal
            if proposal.kind == "epoch":
                self.formed = self._clock.now
                self._listed = proposal
        held = self.head
        assert held is not None, "the register holds a record once one is proposed"
        yield self.job.serve("compare_set", size_in=size_in, size_out=self._size(held))
        # Remove the old list, or its own that lost; it is looked up among ballots first.
        if listed:
            yield self.job.serve("read", price="compare_set")
            yield self.job.serve("delete")
        if held is not proposal and self.must_fetch(node, held):
            yield self.fetch(held)
        return Decision(held, won=held is proposal)

    def _is_head(self, record: Record | None) -> bool:
        if record is None or self.head is None:
            return record is self.head
        return (record.n, record.by) == (self.head.n, self.head.by)

    # --- ballots ---

    def cast(self, effect: CastVote) -> Operation:
        """Add a vote; the voter that completes the ballot receives all votes."""
        vote, ranks = effect.vote, self._ranks
        size, group = len(encode_vote(vote)), vote.peer.group
        # In the first txn of an epoch every rank votes separately, as in the engine.
        if self._design.votes == "rank" or ranks == 1 or effect.token.txn <= 1:
            full = yield from self._add_vote(self.job, "", effect, size, effect.voters)
            return self._whole(effect.token) if full else None
        if self._cast is None or self._cast[0] != effect.token:
            self._cast = (effect.token, [])
        self._cast[1].append(vote)
        server = self.group_store(group)
        full = yield from self._add_vote(server, group, effect, size, ranks)
        if vote.peer.rank == 0:
            yield server.serve("read", price="compare_set")
            yield server.serve("delete")
            yield server.serve("delete")
        if full:
            size += _ANOTHER * (ranks - 1)
            voters = effect.voters // ranks
            full = yield from self._add_vote(self.job, "", effect, size, voters)
        return self._whole(effect.token) if full else None

    def _add_vote(
        self, server: Server, place: str, effect: CastVote, size: int, voters: int
    ) -> Generator[float, None, bool]:
        slot = self._slot(place, effect.token)
        slot.add(effect.token, effect.vote, _FRAME + size)
        server.serve("append", size_in=_FRAME + size)  # one way: the answer is not awaited
        if self._design.ballot == "counted":
            slot.counted += 1
            last = slot.counted == voters
            yield server.serve("add")
            if not last:
                return False
        full = len(slot.votes) >= voters
        yield server.serve("read", size_out=slot.bytes, price="compare_set")
        if place:
            del self._slots[place, effect.token.epoch + effect.token.txn]
        return full

    def _whole(self, token: Token) -> Ballot:
        if self._ballot is None or self._ballot[0] != token:
            by_group = self._cast is not None and self._cast[0] == token
            votes = self._cast[1] if by_group and self._cast else self._slot("", token).votes
            self._ballot = (token, Ballot(token, tuple(votes)))
        return self._ballot[1]

    def _slot(self, place: str, token: Token) -> Slot:
        number = token.epoch + token.txn
        return self._slots.setdefault((place, number if place else number % SLOTS), Slot())

    def drop(self, token: Token) -> Operation:
        """Remove a decided ballot, the one opposite in the ring of slots."""
        number = (token.epoch + token.txn + SLOTS // 2) % SLOTS
        slot = self._slots.pop(("", number), None)
        if self._design.ballot == "counted":  # its votes name the counters that belong to it
            yield self.job.serve("read", size_out=slot.bytes if slot else 0, price="compare_set")
            yield self.job.serve("delete")
        yield self.job.serve("delete")
        return None
