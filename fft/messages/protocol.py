"""The protocol's data types: identities, records of the head register, votes and events.

Pure data. Everything that crosses the bus or is stored in a trace is one of these types. One strict
codec (``encode`` / ``decode``) reads and writes them and refuses any other form as a whole.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fft.messages.causes import Cause, CauseCode, LeaveReason
from fft.messages.codec import Codec
from fft.messages.codec import UnreadableMessage as UnreadableMessage
from fft.messages.identities import CONFIG as _CONFIG
from fft.messages.identities import Count as Count
from fft.messages.identities import GroupEntry as GroupEntry
from fft.messages.identities import Lease as Lease
from fft.messages.identities import Name as Name
from fft.messages.identities import Peer as Peer
from fft.messages.identities import RankEntry as RankEntry
from fft.messages.identities import Rule as Rule
from fft.messages.identities import Seen as Seen
from fft.messages.identities import Standing as Standing
from fft.messages.identities import Text as Text
from fft.messages.identities import Token as Token

MAX_MESSAGE = 1024 * 1024
"""Maximum size in bytes; a longer message is refused unread."""


ENTRY = "entry of "
"""Beginning of the ``block`` of a vote that enters a live block and does not end it."""
STOP = "manager.stop()"
"""``NoStep.place`` of a rank that has stopped the training."""


@dataclass(frozen=True, config=_CONFIG)
class Manifest:
    """The reductions one rank took part in during a txn.

    ``count`` reductions of ``bytes`` in total; ``shapes`` is a digest over (op, dtype, shape) of
    each in issue order.

    ``fingerprint`` is a digest of the gradients that a commit would apply on this rank, or None if
    it was not taken. It must be equal on ranks of one number, as far as it was taken. ``repeats``
    is whether this rank has repeated its own gradients of the attempt before, which was refused
    because they differed between replicas; None if there is nothing to compare.

    ``data`` is a digest of the data that the rank has drawn, or None if it cannot be compared.
    ``shard`` names the part of the data that the rank draws from; it is empty if all ranks draw
    the same. Ranks of one shard must have equal ``data``.

    ``block`` names the live block that the rank enters or ends with this txn, such as ``entry of
    train.py:31``; it is empty in a step. All ranks must have equal ``block``.
    """

    count: Count = 0
    bytes: Count = 0
    shapes: str = ""
    fingerprint: str | None = None
    repeats: bool | None = None
    data: str | None = None
    shard: str = ""
    block: str = ""

    @property
    def reduced(self) -> tuple[int, int, str, str]:
        """The part that ranks of one number have in common."""
        return self.count, self.bytes, self.shapes, self.block

    @property
    def place(self) -> str:
        """The live block that the rank is in, for messages."""
        return self.block or "a step"

    @property
    def part(self) -> Literal["", "entry", "end"]:
        """The part of a live block that the txn is; empty for a step."""
        if not self.block:
            return ""
        return "entry" if self.block.startswith(ENTRY) else "end"


@dataclass(frozen=True, config=_CONFIG)
class Vote:
    """A YES. A NO is not collected: a participant that votes NO proposes ABORT at once."""

    peer: Peer
    manifest: Manifest
    leaving: bool = False
    """The voter's group leaves with this txn's commit, because it was asked to or because the scope
    that feeds it has ended."""
    last: bool = False
    """The voter has nothing to do after this txn: it leaves with its commit, if that is a step or
    ends a live block."""
    skip: bool = False
    """The user skips the optimizer step of this txn; a commit is then a skip on all ranks."""
    digest: str | None = None
    """Digest of the voter's state, if taken: of parameters and optimizer state at the start of the
    txn, or in the first txns with a joiner, at the vote, of all that is equal on all groups."""
    seen: tuple[Seen, ...] = ()
    """Positions of the scopes that the data flow binds the voter's scope to."""
    checkpoint: bool = False
    """The voter asks for a durable checkpoint of the state after this txn."""


content_of = attrgetter("manifest", "leaving", "last", "skip", "digest", "seen", "checkpoint")
"""Returns the fields of a vote except its voter, in their order."""


@dataclass(frozen=True, config=_CONFIG)
class Hello:
    """A participant's description of itself, sent when it joins or stops for a new epoch."""

    peer: Peer
    world: int
    store: str
    """``host:port`` of its replica group's first TCPStore; equal on all ranks of one group
    instance."""
    transport: str
    """Where its state can be fetched (the checkpoint transport's metadata)."""
    pid: int
    host: str
    step: Count
    lineage: str
    """Lineage of its state; empty if the state is lost."""
    cursor: Count
    batches: Count
    head: Count = 0
    """Number of the newest register record that it knows, or 0."""
    unwinding: bool = False
    """The main thread has not returned since the previous rollback."""
    returned: tuple[Count, ...] = ()
    """Slices before the cursor that were not consumed, as loaded from a checkpoint."""
    lease: Count | None = None
    """The slice that the group's contribution is computed from, in an asynchronous job."""
    place: str = ""
    """The node or rack of the group, for the rules that choose groups; empty without them."""
    home: str = ""
    """``host:port`` of the TCPStore where the group meets, if it is no longer ``store``."""


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
    """All slices before the cursor are consumed on this lineage after this record; in a paradigm
    with leases, they are consumed, held or returned."""
    batches: Count
    by: Peer
    members: tuple[GroupEntry, ...] = ()
    """Member groups in index order; epoch records only."""
    learners: tuple[str, ...] = ()
    """Members that fetch the state while the others compute the first txn; epoch records only."""
    rules: tuple[Rule, ...] = ()
    """Rules that choose the members that contribute; epoch records only."""
    active: tuple[str, ...] = ()
    """Members that contribute by these rules, the others are spares; empty without rules."""
    change: bool = False
    """The epoch ends with this commit; commit records only."""
    leavers: tuple[str, ...] = ()
    reasons: tuple[LeaveReason, ...] = ()
    """Why each of ``leavers`` leaves, in their order; empty in traces of earlier versions."""
    last: bool = False
    """All members leave with this commit, which ends the job; commit records only."""
    skip: bool = False
    """COMMIT: the txn consumes its data without an optimizer step. ABORT: the user skipped the
    step, and no rank is to blame."""
    live: Literal["", "entry", "end"] = ""
    """The part of a live block that the txn is: a skip that consumes no data; commit records
    only."""
    fetched: tuple[Peer, ...] = ()
    """Participants that have fetched their state and committed no step since; in an epoch record
    without those that fetch it in this epoch."""
    odd: tuple[Peer, ...] = ()
    """Divergent ranks: by the votes' digests their state differs from the majority's, so it counts
    as lost; abort records only."""
    diverged: bool = False
    """Replicas differ without a majority, so the job ends; abort records only."""
    leases: tuple[Lease, ...] = ()
    """Leases held after this record, by slice; empty in a paradigm without leases."""
    returned: tuple[Count, ...] = ()
    """Slices whose holders were lost before consuming them, in order; granted first."""
    seen: tuple[Seen, ...] = ()
    """Positions that the voters know of the scopes that theirs is bound to; commit records only."""
    checkpoint: Count = 0
    """Number ``n`` of the newest commit up to this record whose votes asked for a durable
    checkpoint, or 0."""
    bound: Count = 0
    """Number of steps that a contribution may be behind in an asynchronous job, else 0."""
    standing: tuple[Standing, ...] = ()
    """Groups of an asynchronous job after this record, ordered by name. A new member of an epoch
    enters the list with its first COMMIT."""
    cause: Text = ""
    """Description of why the attempt was rolled back, for people; abort records only."""
    code: CauseCode = CauseCode.NONE
    """Kind of the cause; abort records only."""
    accused: tuple[Peer, ...] = ()
    """Participants that the cause is evidence against; abort records only."""

    @property
    def token(self) -> Token:
        """The (epoch, txn) that the record decides."""
        return Token(self.epoch, self.txn)

    @property
    def why(self) -> Cause:
        """The cause as one value."""
        return Cause(self.code, self.cause, self.accused)

    def why_left(self, group: str) -> LeaveReason | None:
        """Return why ``group`` leaves with this record, or None if it stays or that is unknown."""
        return dict(zip(self.leavers, self.reasons, strict=False)).get(group)

    @cached_property
    def peers(self) -> tuple[Peer, ...]:
        """Participants of the epoch that the record forms, in index order."""
        return tuple(p for g in self.members for p in g.peers())

    @cached_property
    def peer_set(self) -> frozenset[Peer]:
        """``peers`` as a set, for membership tests."""
        return frozenset(self.peers)

    @cached_property
    def late(self) -> frozenset[Peer]:
        """Members that fetch the state of the epoch that the record forms."""
        return frozenset(
            Peer(g.group, r.rank, r.inc) for g in self.members for r in g.ranks if not r.current
        )

    @cached_property
    def unproven(self) -> frozenset[Peer]:
        """Participants that fetch their state or have fetched it, and committed no step since."""
        return self.late.union(self.fetched)

    @cached_property
    def entries(self) -> dict[tuple[str, int], RankEntry]:
        """Member ranks by (group, rank)."""
        return {(g.group, r.rank): r for g in self.members for r in g.ranks}


def next_lineage(lineage: str, token: Token, step: int, cursor: int, skip: bool = False) -> str:
    """Return the lineage after committing ``token``, which moves the cursor to ``cursor``.

    Args:
        step: Committed steps after the commit.
        skip: The txn was committed without an optimizer step.
    """
    text = f"{lineage}|{token.epoch}.{token.txn}|{step}|{cursor}{'|skip' if skip else ''}"
    return lineage_of(text)


def lineage_of(history: str) -> str:
    """Return the lineage of a history given as text: 24 hex digits."""
    return hashlib.blake2b(history.encode(), digest_size=12).hexdigest()


# --- events: from the bus -------------------------------------------------------------------


@dataclass(frozen=True, config=_CONFIG)
class Join:
    """The sender asks to be in the next epoch."""

    hello: Hello
    type: Literal["join"] = "join"


@dataclass(frozen=True, config=_CONFIG)
class Ack:
    """The sender knows that the txn of ``token`` has ended, and starts nothing more in it."""

    hello: Hello
    token: Token
    type: Literal["ack"] = "ack"


@dataclass(frozen=True, config=_CONFIG)
class Ready:
    """The sender is in the barrier of ``epoch``: its groups are rebuilt.

    Its state is current, or it still fetches the state while the others compute.
    """

    peer: Peer
    epoch: int
    type: Literal["ready"] = "ready"


@dataclass(frozen=True, config=_CONFIG)
class Begin:
    """All members of ``epoch`` are in its barrier, so its first txn begins; the coordinator sends
    it."""

    peer: Peer
    epoch: int
    type: Literal["begin"] = "begin"


@dataclass(frozen=True, config=_CONFIG)
class Here:
    """Sign of life, sent by the coordinator of the next epoch or by the member that answers
    joiners."""

    peer: Peer
    type: Literal["here"] = "here"


@dataclass(frozen=True, config=_CONFIG)
class NoStep:
    """The sender takes part in the txn of ``token`` without a step function, at ``place``.

    A rank whose main thread is in a step function of that txn can only wait for it in vain.
    """

    peer: Peer
    token: Token
    place: Text
    """The entry of a live block, or `manager.stop`."""
    type: Literal["no_step"] = "no_step"


@dataclass(frozen=True, config=_CONFIG)
class Leave:
    """The sender leaves on its own account; peers need not wait for it."""

    peer: Peer
    cause: Text = ""
    reason: LeaveReason = LeaveReason.SHUT_DOWN
    type: Literal["leave"] = "leave"


@dataclass(frozen=True, config=_CONFIG)
class _Seen:
    """An observation of a process: its identity at start, the observer (``by``) and the cause."""

    group: Name
    rank: Count
    pid: Annotated[int, Field(ge=1)]
    host: str
    by: str
    cause: Text = ""
    v: Literal[1] = 1


@dataclass(frozen=True, config=_CONFIG)
class Death(_Seen):
    """The supervisor or a monitor saw the process end."""

    replaced: bool = False
    """Another process takes its place; the other processes of its group continue."""
    type: Literal["death"] = "death"


@dataclass(frozen=True, config=_CONFIG)
class Suspect(_Seen):
    """The process may be alive, but its monitor saw its main thread stall, or its host is
    silent."""

    type: Literal["suspect"] = "suspect"


@dataclass(frozen=True, config=_CONFIG)
class Drain:
    """Request that these groups leave after a commit. ``local``: it was made in this process."""

    groups: tuple[Name, ...]
    by: str
    local: bool = False
    v: Literal[1] = 1
    type: Literal["drain"] = "drain"


@dataclass(frozen=True, config=_CONFIG)
class Decision:
    """A value of the head register (``None`` if never written), however it was learned: read,
    proposed by this process (``won`` if its proposal won), or announced."""

    record: Record | None
    won: bool = False
    type: Literal["decision"] = "decision"


@dataclass(frozen=True, config=_CONFIG)
class ScopeRecord:
    """The newest record of another scope, received or read."""

    scope: Name
    n: Count
    cursor: Count
    """All slices before the cursor are taken in that scope."""
    groups: tuple[Name, ...] = ()
    """Groups of its epoch, without those that leave with this record; empty also if all have left
    since."""
    takers: Count = 0
    """Number of these groups that take a slice in each txn, that is, all but spares."""
    type: Literal["scope_record"] = "scope_record"


# --- events: from this process --------------------------------------------------------------


@dataclass(frozen=True, config=_CONFIG)
class Start:
    """The participant is connected and can begin."""

    type: Literal["start"] = "start"


@dataclass(frozen=True, config=_CONFIG)
class Synchronise:
    """A local group has its contribution ready and asks to be in the next epoch."""

    type: Literal["synchronise"] = "synchronise"


@dataclass(frozen=True, config=_CONFIG)
class Prepared:
    """The step function is finished.

    Attributes:
        yes: Every reduction completed, and none can still write.
        skip: The user wants no optimizer step in this txn.
        digest: See `Vote.digest`.
    """

    token: Token
    yes: bool
    manifest: Manifest = Manifest()
    cause: Text = ""
    skip: bool = False
    digest: str | None = None
    edited: bool = False
    """Step functions may change the state, so that joiners must have it before they compute."""
    last: bool = False
    """No step follows this one; repeated in each attempt."""
    code: CauseCode = CauseCode.NONE
    """Kind of ``cause``; a NO only."""
    checkpoint: bool = False
    """See `Vote.checkpoint`."""
    type: Literal["prepared"] = "prepared"


@dataclass(frozen=True, config=_CONFIG)
class Ballot:
    """All YES votes of a txn, delivered to the participant whose vote completed them."""

    token: Token
    votes: tuple[Vote, ...]
    type: Literal["ballot"] = "ballot"


@dataclass(frozen=True, config=_CONFIG)
class Applied:
    """The optimizer step is done; ``digest`` is that of the state, if requested."""

    token: Token
    digest: str | None = None
    type: Literal["applied"] = "applied"


@dataclass(frozen=True, config=_CONFIG)
class ApplyFailed:
    """The optimizer step raised, so this rank's state is lost."""

    token: Token
    cause: Text
    type: Literal["apply_failed"] = "apply_failed"


@dataclass(frozen=True, config=_CONFIG)
class Fault:
    """Something failed on this rank during ``token``.

    ``source``: class of the error, or the part of the txn that failed; for readers of the trace.
    """

    token: Token
    cause: Text
    code: CauseCode = CauseCode.NONE
    source: Text = "body"
    type: Literal["fault"] = "fault"


@dataclass(frozen=True, config=_CONFIG)
class Restored:
    """The main thread has unwound and restored the state at the start of the step.

    ``torn``: part of the state could not be restored and is lost; ``cause`` names it.
    """

    token: Token
    torn: bool = False
    cause: Text = ""
    code: CauseCode = CauseCode.NONE
    type: Literal["restored"] = "restored"


@dataclass(frozen=True, config=_CONFIG)
class Connected:
    """A joiner has rebuilt its groups and is fetching the state."""

    epoch: int
    type: Literal["connected"] = "connected"


@dataclass(frozen=True, config=_CONFIG)
class Healed:
    """The groups are rebuilt and the state is current; ``bytes`` were fetched from ``source``."""

    epoch: int
    bytes: Count = 0
    source: str = ""
    digest: str | None = None
    type: Literal["healed"] = "healed"


@dataclass(frozen=True, config=_CONFIG)
class HealFailed:
    """Rebuilding the groups or fetching the state failed. ``torn``: the state is lost."""

    epoch: int
    cause: Text
    torn: bool = False
    code: CauseCode = CauseCode.NONE
    type: Literal["heal_failed"] = "heal_failed"


@dataclass(frozen=True, config=_CONFIG)
class Stop:
    """The user shuts the manager down."""

    cause: Text = ""
    reason: LeaveReason = LeaveReason.SHUT_DOWN
    type: Literal["stop"] = "stop"


@dataclass(frozen=True, config=_CONFIG)
class BusDown:
    """An operation on the bus failed; its outcome is unknown.

    ``operation``: its name; ``listen`` if the listener has ended, ``forgot`` if the bus has lost
    its contents, ``overrun`` if the listener fell behind, missed messages and has resubscribed.
    """

    operation: Text
    cause: Text
    type: Literal["bus_down"] = "bus_down"

    @property
    def for_good(self) -> bool:
        """Whether this process cannot continue on the bus."""
        return self.operation in ("listen", "forgot")


@dataclass(frozen=True, config=_CONFIG)
class Timer:
    """A timer fired; a timer with an old ``serial`` is fenced."""

    name: str
    serial: int
    type: Literal["timer"] = "timer"


BusMessage = Join | Ack | Ready | Begin | Here | NoStep | Leave | Death | Suspect | Drain | Decision
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


_BUS = Codec[BusMessage](Annotated[BusMessage, Field(discriminator="type")], MAX_MESSAGE)
_EVENTS = Codec[Event](Annotated[Event, Field(discriminator="type")])
_RECORDS = Codec[Record](Record)
_VOTES = Codec[Vote](Vote)

encode, decode = _BUS.encode, _BUS.decode
"""Encode and decode a message of the bus."""
encode_record, decode_record = _RECORDS.encode, _RECORDS.decode
"""Encode and decode a record of the head register."""
encode_vote, decode_vote = _VOTES.encode, _VOTES.decode
"""Encode and decode a vote of a ballot."""
event_to_json = _EVENTS.plain
"""Convert an event to plain data for the trace."""


def event_from_json(data: dict[str, Any] | bytes) -> Event:
    """Convert plain data of a trace, or its bytes, to an event. Raises ``UnreadableMessage``."""
    return _EVENTS.decode(data if isinstance(data, bytes) else json.dumps(data).encode())
