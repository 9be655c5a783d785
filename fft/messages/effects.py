"""What the core asks of the engine, as pure data. Nothing of it crosses the bus."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from fft.messages.protocol import BusMessage, Peer, Record, Token, Vote


@dataclass(frozen=True)
class Broadcast:
    """Put ``message`` on the bus, for everyone."""

    message: BusMessage


@dataclass(frozen=True)
class Tell:
    """Put ``message`` on the bus, for ``to`` alone."""

    to: Peer
    message: BusMessage


@dataclass(frozen=True)
class ReadHead:
    """Read the head register; answered by ``Decision``."""


@dataclass(frozen=True)
class ReadScope:
    """Read the newest record of another scope; answered by ``ScopeRecord``."""

    scope: str


@dataclass(frozen=True)
class TellHeld:
    """Say in log and trace that the txn waits until another scope has ``needed`` slices."""

    token: Token
    step: int
    scope: str
    cursor: int
    needed: int


@dataclass(frozen=True)
class Decide:
    """Propose ``proposal`` as the successor of ``after``; answered by ``Decision``."""

    after: Record | None
    proposal: Record


@dataclass(frozen=True)
class CastVote:
    """Add my YES to the ballot of ``token``; answered by ``Ballot`` when ``voters`` are in it."""

    token: Token
    vote: Vote
    voters: int


@dataclass(frozen=True)
class DropBallot:
    """The ballot of ``token`` is decided; its keys can go."""

    token: Token


@dataclass(frozen=True)
class SetTimer:
    """Fire ``Timer(name, serial)`` in ``seconds``."""

    name: str
    seconds: float
    serial: int


@dataclass(frozen=True)
class ClearTimers:
    """Forget these timers."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class CancelFutures:
    """Fail every pending future of the txn with ``cause``."""

    cause: str


@dataclass(frozen=True)
class AbortGroups:
    """Abort the replicate and the shard process group."""

    cause: str


@dataclass(frozen=True)
class Restore:
    """Main thread: unwind, drop gradients, put back the start of the step; then ``Restored``."""

    token: Token
    cause: str


@dataclass(frozen=True)
class Heal:
    """Main thread: rebuild groups for ``record``, send or fetch state; then ``Healed``.

    Of a learner: rebuild groups, begin to fetch, then ``Connected``; before its vote ``Healed``.
    """

    record: Record
    index: int
    """Index of this group in ``record.members``."""
    fetch_from: int | None
    """Index of the group whose rank of my number to fetch from; None: nothing is fetched."""
    send_to: tuple[int, ...]
    """Indexes of the groups whose rank of my number fetches from this one."""


@dataclass(frozen=True)
class StartTxn:
    """Main thread: the txn may begin."""

    token: Token
    step: int
    lineage: str
    cursor: int
    index: int | None
    """Index of this group among those whose gradients count; None: a spare, or a learner."""
    participants: int
    members: tuple[str, ...]
    commits: int
    """Commits since the epoch began."""
    lease: int | None = None
    """The slice that this group holds a lease on, and that the txn consumes; None: none, or a
    paradigm without leases."""
    next_cursor: int = 0
    """The cursor once the txn is committed."""

    @property
    def slice(self) -> int | None:
        """Of the data, which this group takes; None: what it computes does not count."""
        if self.index is None:
            return None
        return self.cursor + self.index if self.lease is None else self.lease


@dataclass(frozen=True)
class Apply:
    """Main thread: the txn is committed; run the optimizer step; then ``Applied``.

    ``skip``: it is committed as a skip; run what belongs to one (the scaler), no optimizer step.
    ``record`` may be a later one than the txn's own, which was missed.
    """

    record: Record
    skip: bool = False


@dataclass(frozen=True)
class Finish:
    """The participant is out; ``error`` names the class of ``fft.util.errors`` to raise, if any."""

    reason: str
    error: str | None = None


Effect = (
    Broadcast
    | Tell
    | ReadHead
    | ReadScope
    | TellHeld
    | Decide
    | CastVote
    | DropBallot
    | SetTimer
    | ClearTimers
    | CancelFutures
    | AbortGroups
    | Restore
    | Heal
    | StartTxn
    | Apply
    | Finish
)
