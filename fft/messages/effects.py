"""Effects that the participant emits and the engine carries out, as data. None crosses the bus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fft.messages.causes import Cause
from fft.messages.protocol import BusMessage, Peer, Record, Token, Vote

FinishError = Literal[
    "Diverged",
    "Fenced",
    "UpstreamTimeout",
    "InDoubt",
    "JobEnded",
    "NoEpoch",
    "NoState",
    "NotEnoughGroups",
]


@dataclass(frozen=True)
class Broadcast:
    """Send ``message`` to all participants."""

    message: BusMessage


@dataclass(frozen=True)
class Tell:
    """Send ``message`` to ``to`` only."""

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
    """Log and trace that the txn waits until another scope has taken ``needed`` slices."""

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
    """Add this rank's YES to the ballot of ``token``; answered by ``Ballot`` once it has
    ``voters``."""

    token: Token
    vote: Vote
    voters: int


@dataclass(frozen=True)
class DropBallot:
    """Delete the keys of the ballot of ``token``, which is decided."""

    token: Token


@dataclass(frozen=True)
class SetTimer:
    """Fire ``Timer(name, serial)`` in ``seconds``."""

    name: str
    seconds: float
    serial: int


@dataclass(frozen=True)
class ClearTimers:
    """Cancel these timers."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class CancelFutures:
    """Complete every pending future of the txn with its default; the step fails with ``cause``."""

    cause: str


@dataclass(frozen=True)
class AbortGroups:
    """Abort the replicate and the shard process group."""

    cause: str


@dataclass(frozen=True)
class Restore:
    """Main thread: unwind, drop gradients, restore the start of the step; then post
    ``Restored``."""

    token: Token
    cause: Cause


@dataclass(frozen=True)
class Heal:
    """Main thread: rebuild groups for ``record``, send or fetch state; then post ``Healed``.

    A joiner that computes while it fetches posts ``Connected`` when the fetch has begun, and
    ``Healed`` before its vote.
    """

    record: Record
    index: int
    """Index of this group in ``record.members``."""
    fetch_from: int | None
    """Index of the group whose rank of the same number serves the state, or None for no fetch."""
    send_to: tuple[int, ...]
    """Indexes of the groups whose rank of the same number fetches from this one."""


@dataclass(frozen=True)
class StartTxn:
    """Main thread: the txn may begin."""

    token: Token
    step: int
    lineage: str
    cursor: int
    index: int | None
    """Index of this group among those whose gradients count; None for a spare or a joiner."""
    participants: int
    members: tuple[str, ...]
    commits: int
    """Commits since the epoch began."""
    lease: int | None = None
    """The leased slice that the txn consumes; None without a lease or in a paradigm without
    leases."""
    next_cursor: int = 0
    """The cursor once the txn is committed."""
    contributors: tuple[str, ...] = ()
    """Groups whose gradients count, in the order of their slices."""
    fixed_slices: int = 0
    """Number of slices that the txn takes, if the job fixes it; 0: one for each participant."""

    @property
    def slice(self) -> int | None:
        """First data slice that this group takes, or None if its computation does not count."""
        if self.index is None:
            return None
        return self.cursor + self.index if self.lease is None else self.lease

    @property
    def slices(self) -> range:
        """Data slices that this group takes; empty if its computation does not count."""
        if (first := self.slice) is None:
            return range(0)
        return range(first, first + 1) if self.lease is not None else self.dealt_to(self.index or 0)

    def dealt_to(self, index: int) -> range:
        """Return the slices of the participant with this index, in a txn without leases.

        Fixed slices are dealt in turn: participant i of k takes slices i, i + k, i + 2k and so on.
        """
        first = self.cursor + index
        if not self.fixed_slices:
            return range(first, first + 1)
        return range(first, self.cursor + self.fixed_slices, self.participants)


@dataclass(frozen=True)
class Apply:
    """Main thread: the txn is committed; run the optimizer step; then ``Applied``.

    ``skip``: it is committed as a skip; update the scaler and leave the optimizer alone. ``record``
    may be later than the txn's own record, if that one was missed.
    """

    record: Record
    skip: bool = False


@dataclass(frozen=True)
class Finish:
    """The participant has left; ``error`` names the class of ``fft.errors`` to raise, if
    any."""

    reason: str
    error: FinishError | None = None


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
