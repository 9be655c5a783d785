"""Words of the protocol: identities, records of the head register, votes and events.

Pure data. Everything that crosses the bus or lies in a trace is one of these, read and written
by one strict codec (``encode`` / ``decode``), so that a message in any other form is refused as a
whole.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache, cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from fft.messages.identities import CONFIG as _CONFIG
from fft.messages.identities import Count as Count
from fft.messages.identities import GroupEntry as GroupEntry
from fft.messages.identities import Lease as Lease
from fft.messages.identities import Name as Name
from fft.messages.identities import Peer as Peer
from fft.messages.identities import RankEntry as RankEntry
from fft.messages.identities import Seen as Seen
from fft.messages.identities import Standing as Standing
from fft.messages.identities import Text as Text
from fft.messages.identities import Token as Token
from fft.util.errors import FftError

MAX_MESSAGE = 1024 * 1024
"""Bytes; a longer message is refused unread."""


@dataclass(frozen=True, config=_CONFIG)
class Manifest:
    """The reductions one rank took part in during a txn.

    ``count`` reductions of ``bytes`` in total; ``shapes`` is a digest over (op, dtype, shape) of
    each in issue order; ``fingerprint`` has room for a digest of the reduced gradients.
    """

    count: Count = 0
    bytes: Count = 0
    shapes: str = ""
    fingerprint: str | None = None


@dataclass(frozen=True, config=_CONFIG)
class Vote:
    """A YES. (A NO is not collected: whoever votes NO proposes ABORT at once.)"""

    peer: Peer
    manifest: Manifest
    leaving: bool = False
    """The voter's group was asked to leave, or what gives its scope the data has ended: it leaves
    with this txn's commit."""
    last: bool = False
    """The voter has no step after this one: it leaves with this txn's commit, if that is a step."""
    skip: bool = False
    """The user applies nothing in this txn: committed, it is a skip for all."""
    digest: str | None = None
    """Of the voter's parameters and optimizer state as the txn began, where it was taken."""
    seen: tuple[Seen, ...] = ()
    """Of the scopes that the flow of the data binds the voter's to."""


@dataclass(frozen=True, config=_CONFIG)
class Hello:
    """What a participant says of itself when it joins or stops for a new epoch."""

    peer: Peer
    world: int
    store: str
    """``host:port`` of its replica group's TCPStore; equal on all ranks of one group instance."""
    transport: str
    """Where its state can be fetched (the checkpoint transport's metadata)."""
    pid: int
    host: str
    step: Count
    lineage: str
    """Of the state it holds; empty: lost or torn."""
    cursor: Count
    batches: Count
    head: Count = 0
    """Number of the newest register record it knows; 0: none."""
    unwinding: bool = False
    """Its main thread has not come back since the rollback before this one."""
    returned: tuple[Count, ...] = ()
    """Of a checkpoint: slices before its cursor that were not consumed."""
    lease: Count | None = None
    """Of an asynchronous job: the slice that its group's contribution is computed from."""


@dataclass(frozen=True, config=_CONFIG)
class Record:
    """One value of the head register: the write-once successor of the record before it."""

    n: Count
    kind: Literal["epoch", "commit", "abort"]
    epoch: Count
    txn: Count
    step: Count
    """Committed steps after this record."""
    lineage: str
    cursor: Count
    """The slices before it are consumed on this lineage after this record; with leases: consumed,
    held or returned."""
    batches: Count
    by: Peer
    members: tuple[GroupEntry, ...] = ()
    """Epoch records only, in the order that gives each member group its index."""
    learners: tuple[str, ...] = ()
    """Epoch records only: members that fetch the state while the others compute the first txn."""
    change: bool = False
    """Commit records only: the epoch ends with this commit."""
    leavers: tuple[str, ...] = ()
    last: bool = False
    """Commit records only: all members leave with it, and so the job ends."""
    skip: bool = False
    """COMMIT: the txn has its data, but no optimizer step. ABORT: the user skipped the step, and
    nobody is to blame."""
    odd: tuple[Peer, ...] = ()
    """Abort records only: whose state is not that of most, by the votes' digests; it is lost."""
    diverged: bool = False
    """Abort records only: replicas differ, and nobody can tell who is right; the job ends."""
    leases: tuple[Lease, ...] = ()
    """Held after this record, by slice; empty in a paradigm without leases."""
    returned: tuple[Count, ...] = ()
    """Slices whose holders were lost before they were consumed, in order; granted first."""
    seen: tuple[Seen, ...] = ()
    """Commit records only: what the voters have seen of the scopes that theirs is bound to."""
    bound: Count = 0
    """Of an asynchronous job: by how many steps a contribution may be behind; else 0."""
    standing: tuple[Standing, ...] = ()
    """Of an asynchronous job: its groups after this record, in order of their names. Members of an
    epoch that were not in the job before are in it with their first COMMIT."""
    cause: Text = ""

    @property
    def token(self) -> Token:
        """(epoch, txn) that the record decides."""
        return Token(self.epoch, self.txn)

    @cached_property
    def peers(self) -> tuple[Peer, ...]:
        """Participants of the epoch that the record forms, in order."""
        return tuple(p for g in self.members for p in g.peers())

    @cached_property
    def peer_set(self) -> frozenset[Peer]:
        """The same, to look somebody up."""
        return frozenset(self.peers)

    @cached_property
    def entries(self) -> dict[tuple[str, int], RankEntry]:
        """Who has which place (group, rank)."""
        return {(g.group, r.rank): r for g in self.members for r in g.ranks}


def next_lineage(lineage: str, token: Token, step: int, cursor: int, skip: bool = False) -> str:
    """Lineage after committing ``token``, the cursor moving to ``cursor``.

    ``step``: committed steps after that; ``skip``: the txn was none of them.
    """
    text = f"{lineage}|{token.epoch}.{token.txn}|{step}|{cursor}{'|skip' if skip else ''}"
    return lineage_of(text)


def lineage_of(history: str) -> str:
    """The lineage that stands for a history told in full: 24 hex digits."""
    return hashlib.blake2b(history.encode(), digest_size=12).hexdigest()


# --- events: from the bus -------------------------------------------------------------------


@dataclass(frozen=True, config=_CONFIG)
class Join:
    """Wants to be in the next epoch."""

    hello: Hello
    type: Literal["join"] = "join"


@dataclass(frozen=True, config=_CONFIG)
class Ack:
    """Has stopped at ``token``: nothing it started there can change state any more."""

    hello: Hello
    token: Token
    type: Literal["ack"] = "ack"


@dataclass(frozen=True, config=_CONFIG)
class Ready:
    """Is in the barrier of ``epoch``: groups rebuilt, state current."""

    peer: Peer
    epoch: int
    type: Literal["ready"] = "ready"


@dataclass(frozen=True, config=_CONFIG)
class Begin:
    """All members of ``epoch`` are in its barrier: its first txn begins. From the coordinator."""

    peer: Peer
    epoch: int
    type: Literal["begin"] = "begin"


@dataclass(frozen=True, config=_CONFIG)
class Here:
    """A member lives: the coordinator of the next epoch, or who answers those who ask to join."""

    peer: Peer
    type: Literal["here"] = "here"


@dataclass(frozen=True, config=_CONFIG)
class Leave:
    """Goes by its own word; do not wait for it."""

    peer: Peer
    cause: Text = ""
    type: Literal["leave"] = "leave"


@dataclass(frozen=True, config=_CONFIG)
class _Seen:
    """What somebody saw of a process: who, as it was started, who says so, and why."""

    group: Name
    rank: Count
    pid: Annotated[int, Field(ge=1)]
    host: str
    by: str
    cause: Text = ""
    v: Literal[1] = 1


@dataclass(frozen=True, config=_CONFIG)
class Death(_Seen):
    """Somebody saw the process end (supervisor, monitor)."""

    replaced: bool = False
    """Another process takes its place in its group, whose other processes go on."""
    type: Literal["death"] = "death"


@dataclass(frozen=True, config=_CONFIG)
class Suspect(_Seen):
    """It may live: its main thread does not move (its monitor saw), or its host is silent."""

    type: Literal["suspect"] = "suspect"


@dataclass(frozen=True, config=_CONFIG)
class Drain:
    """These groups shall leave after a commit. ``local``: asked in this process."""

    groups: tuple[Name, ...]
    by: str
    local: bool = False
    v: Literal[1] = 1
    type: Literal["drain"] = "drain"


@dataclass(frozen=True, config=_CONFIG)
class Decision:
    """A value of the head register: read (``None``: never written), won, lost, or announced."""

    record: Record | None
    won: bool = False
    type: Literal["decision"] = "decision"


@dataclass(frozen=True, config=_CONFIG)
class ScopeRecord:
    """The newest record of another scope: heard, or read."""

    scope: Name
    n: Count
    cursor: Count
    """The slices before it are taken there."""
    groups: tuple[Name, ...] = ()
    """Those in its epoch, but for those that leave it with this record; none, too, if all have left
    it since."""
    takers: Count = 0
    """How many of them take a slice each in a txn: all but spares."""
    type: Literal["scope_record"] = "scope_record"


# --- events: from this process --------------------------------------------------------------


@dataclass(frozen=True, config=_CONFIG)
class Start:
    """The participant is connected and can begin."""

    type: Literal["start"] = "start"


@dataclass(frozen=True, config=_CONFIG)
class Synchronise:
    """Of a group that stands apart: it has what it brings, and asks to be in the next epoch."""

    type: Literal["synchronise"] = "synchronise"


@dataclass(frozen=True, config=_CONFIG)
class Prepared:
    """The body is finished. ``yes``: every reduction completed, none can still write.

    ``skip``: the user wants no optimizer step in this txn. ``digest``: of the parameters and the
    optimizer state that the txn began with, where one was taken.
    """

    token: Token
    yes: bool
    manifest: Manifest = Manifest()
    cause: Text = ""
    skip: bool = False
    digest: str | None = None
    edited: bool = False
    """The body has changed reduced gradients, by whatever."""
    last: bool = False
    """There is no step after this one; said anew in each attempt."""
    type: Literal["prepared"] = "prepared"


@dataclass(frozen=True, config=_CONFIG)
class Ballot:
    """All YES votes of a txn, in the hands of whoever completed them."""

    token: Token
    votes: tuple[Vote, ...]
    type: Literal["ballot"] = "ballot"


@dataclass(frozen=True, config=_CONFIG)
class Applied:
    """The optimizer step is done; ``digest`` of the state, where asked for."""

    token: Token
    digest: str | None = None
    type: Literal["applied"] = "applied"


@dataclass(frozen=True, config=_CONFIG)
class ApplyFailed:
    """The optimizer step raised: this state is torn."""

    token: Token
    cause: Text
    type: Literal["apply_failed"] = "apply_failed"


@dataclass(frozen=True, config=_CONFIG)
class Fault:
    """Something failed on this rank during ``token``."""

    token: Token
    cause: Text
    source: Text = "body"
    type: Literal["fault"] = "fault"


@dataclass(frozen=True, config=_CONFIG)
class Restored:
    """The main thread has unwound and put the state back to the start of the step.

    ``torn``: but for something of which nothing was kept; ``cause`` says what.
    """

    token: Token
    torn: bool = False
    cause: Text = ""
    type: Literal["restored"] = "restored"


@dataclass(frozen=True, config=_CONFIG)
class Connected:
    """Of a learner: groups are rebuilt, and the state is on its way."""

    epoch: int
    type: Literal["connected"] = "connected"


@dataclass(frozen=True, config=_CONFIG)
class Healed:
    """Groups are rebuilt and the state is current. ``bytes`` were fetched from ``source``."""

    epoch: int
    bytes: Count = 0
    source: str = ""
    digest: str | None = None
    type: Literal["healed"] = "healed"


@dataclass(frozen=True, config=_CONFIG)
class HealFailed:
    """Rebuilding the groups or fetching the state failed. ``torn``: the state was touched."""

    epoch: int
    cause: Text
    torn: bool = False
    type: Literal["heal_failed"] = "heal_failed"


@dataclass(frozen=True, config=_CONFIG)
class Stop:
    """The user shuts the manager down."""

    cause: Text = ""
    type: Literal["stop"] = "stop"


@dataclass(frozen=True, config=_CONFIG)
class BusDown:
    """An operation on the bus failed; its outcome is unknown.

    ``operation``: its name; ``listen`` if the listener has ended, ``forgot`` if the bus has lost
    what it held, ``overrun`` if the listener fell behind, missed messages and hears again.
    """

    operation: Text
    cause: Text
    type: Literal["bus_down"] = "bus_down"

    @property
    def for_good(self) -> bool:
        """Whether only a new process can go on, on this bus or on another."""
        return self.operation in ("listen", "forgot")


@dataclass(frozen=True, config=_CONFIG)
class Timer:
    """A timer fired; an old ``serial`` is fenced."""

    name: str
    serial: int
    type: Literal["timer"] = "timer"


BusMessage = Join | Ack | Ready | Begin | Here | Leave | Death | Suspect | Drain | Decision
Event = (
    BusMessage
    | ScopeRecord
    | Start
    | Synchronise
    | Prepared
    | Ballot
    | Applied
    | ApplyFailed
    | Fault
    | Restored
    | Connected
    | Healed
    | HealFailed
    | Stop
    | BusDown
    | Timer
)

# --- codec ------------------------------------------------------------------------------------


class UnreadableMessage(FftError):
    """Bytes from the bus that are no message of FFT."""


@cache
def _bus_adapter() -> TypeAdapter[BusMessage]:
    return TypeAdapter(Annotated[BusMessage, Field(discriminator="type")])


@cache
def _event_adapter() -> TypeAdapter[Event]:
    return TypeAdapter(Annotated[Event, Field(discriminator="type")])


@cache
def _record_adapter() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


@cache
def _vote_adapter() -> TypeAdapter[Vote]:
    return TypeAdapter(Vote)


def encode(message: BusMessage) -> bytes:
    """Message → bytes for the bus."""
    return _bus_adapter().dump_json(message)


def decode(data: bytes) -> BusMessage:
    """Bytes from the bus → message.

    Raises:
        UnreadableMessage: too long, not JSON, or not exactly in the form of a message.
    """
    if len(data) > MAX_MESSAGE:
        raise UnreadableMessage(f"message of {len(data)} bytes; the limit is {MAX_MESSAGE}")
    try:
        return _bus_adapter().validate_json(data)
    except ValidationError as error:
        raise unreadable(error) from None


def encode_record(record: Record) -> bytes:
    """Canonical bytes of a record: equal records, equal bytes."""
    return _record_adapter().dump_json(record)


def decode_record(data: bytes) -> Record:
    """Bytes of the head register → record. Raises ``UnreadableMessage``."""
    try:
        return _record_adapter().validate_json(data)
    except ValidationError as error:
        raise unreadable(error) from None


def encode_vote(vote: Vote) -> bytes:
    """Vote → bytes for the ballot."""
    return _vote_adapter().dump_json(vote)


def decode_vote(data: bytes) -> Vote:
    """Bytes of a ballot → vote. Raises ``UnreadableMessage``."""
    try:
        return _vote_adapter().validate_json(data)
    except ValidationError as error:
        raise unreadable(error) from None


def event_to_json(event: Event) -> dict[str, Any]:
    """Event → plain data for the trace."""
    data: dict[str, Any] = _event_adapter().dump_python(event, mode="json", exclude_defaults=False)
    return data


def event_from_json(data: dict[str, Any] | bytes) -> Event:
    """Plain data of a trace, or its bytes → event. Raises ``UnreadableMessage``."""
    try:
        return _event_adapter().validate_json(data if isinstance(data, bytes) else json.dumps(data))
    except ValidationError as error:
        raise unreadable(error) from None


def unreadable(error: ValidationError) -> UnreadableMessage:
    """The error to raise for what a codec refuses; names the place, in at most 500 characters."""
    first = error.errors(include_url=False, include_input=False)[0]
    return UnreadableMessage(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:500])
