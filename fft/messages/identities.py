"""Who is who: identities, and what lists of members say of each. Pure data."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

CONFIG = ConfigDict(strict=True, extra="forbid")
"""Of everything that crosses the bus: exactly in its form, or refused."""
Text = Annotated[str, Field(max_length=2000)]
Name = Annotated[str, Field(min_length=1, max_length=64)]
Count = Annotated[int, Field(ge=0)]


class Peer(NamedTuple):
    """A participant: one training process."""

    group: Name
    rank: Count
    inc: Count

    def __str__(self) -> str:
        return _name_of(self)


@lru_cache(maxsize=4096)
def _name_of(peer: Peer) -> str:
    """The audit asks for it ten times for each line of a trace."""
    return f"{peer.group}/{peer.rank}#{peer.inc}"


class Token(NamedTuple):
    """Where a participant stands in the decision order: (epoch, txn). Older is fenced."""

    epoch: int
    txn: int

    def __str__(self) -> str:
        return _text_of(self)


@lru_cache(maxsize=64)
def _text_of(token: Token) -> str:
    return f"Token(epoch={token.epoch}, txn={token.txn})"


class Lease(NamedTuple):
    """A slice of the data that an instance of a group holds until a COMMIT with it consumes it."""

    slice: Count
    group: Name
    store: str
    """Of that instance; see ``Hello``."""


@dataclass(frozen=True, config=CONFIG)
class RankEntry:
    """A member rank as an epoch record lists it. ``current``: it holds the head's state."""

    rank: int
    inc: int
    current: bool
    transport: str
    pid: int
    host: str


@dataclass(frozen=True, config=CONFIG)
class GroupEntry:
    """A member group as an epoch record lists it."""

    group: Name
    store: str
    ranks: tuple[RankEntry, ...]

    def peers(self) -> tuple[Peer, ...]:
        """The group's participants in rank order."""
        return tuple(Peer(self.group, r.rank, r.inc) for r in self.ranks)

    def entry(self, rank: int) -> RankEntry:
        """That of the rank with this number."""
        return next(r for r in self.ranks if r.rank == rank)


class Standing(NamedTuple):
    """A group of a job whose groups synchronise without waiting for all; see ``Record``."""

    entry: GroupEntry
    """As the record that it was last a member of lists it."""
    base: Count
    """Committed steps of the state that it was last given: its contribution is against that."""
    since: Count
    """Number of the record that it was last a member by, or that ended that with a COMMIT: what it
    has said before that is void."""


class Seen(NamedTuple):
    """What a voter knows of another scope, and how far its own may be ahead of that."""

    scope: Name
    cursor: Count
    """The slices of the data before it are taken there, by steps or skips that are committed."""
    ahead: Count
    """My scope may begin so many of that one's txns ahead of it; 0: it follows that one."""
    takers: Count
    """Groups that take a slice each in a txn there; 0: it has ended, all have left it for good."""

    @property
    def reach(self) -> int:
        """A txn of a scope that leads may begin at slices before this one."""
        return self.cursor + self.ahead * self.takers

    def allows(self, first: int, after: int) -> bool:
        """Whether my scope may have a txn of the slices from ``first`` to before ``after``."""
        if not self.ahead:
            return after <= self.cursor
        return not self.takers or first < self.reach
