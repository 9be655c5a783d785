"""Identities of participants, and the entries of member lists. Pure data."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

CONFIG = ConfigDict(strict=True, extra="forbid")
"""Configuration of every type that crosses the bus: unknown or mistyped fields are refused."""
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
    """Cached, because the audit needs it ten times per trace line."""
    return f"{peer.group}/{peer.rank}#{peer.inc}"


class Token(NamedTuple):
    """Position in the decision order, (epoch, txn); messages with an older token are fenced."""

    epoch: int
    txn: int

    def __str__(self) -> str:
        return _text_of(self)


@lru_cache(maxsize=64)
def _text_of(token: Token) -> str:
    return f"Token(epoch={token.epoch}, txn={token.txn})"


class Lease(NamedTuple):
    """A data slice that one instance of a group holds until a COMMIT of the group consumes it."""

    slice: Count
    group: Name
    store: str
    """Store address of that instance; see ``Hello``."""


@dataclass(frozen=True, config=CONFIG)
class RankEntry:
    """A member rank in an epoch record. ``current``: it holds the state of the head."""

    rank: int
    inc: int
    current: bool
    transport: str
    pid: int
    host: str


@dataclass(frozen=True, config=CONFIG)
class GroupEntry:
    """A member group in an epoch record."""

    group: Name
    store: str
    ranks: tuple[RankEntry, ...]
    place: str = ""
    """The node or rack of the group; see ``Hello``."""
    home: str = ""
    """Where the group meets in this epoch: the ``home`` of its first rank."""

    @property
    def meets_at(self) -> str:
        """``host:port`` of the store where the ranks of the group meet in this epoch."""
        return self.home or self.store

    def peers(self) -> tuple[Peer, ...]:
        """The group's participants in rank order."""
        return self._peers

    @cached_property
    def _peers(self) -> tuple[Peer, ...]:
        return tuple(Peer(self.group, r.rank, r.inc) for r in self.ranks)

    def entry(self, rank: int) -> RankEntry:
        """Return the entry of the rank with this number."""
        return next(r for r in self.ranks if r.rank == rank)


class Rule(NamedTuple):
    """A rule that keeps some of a list of groups; see `fft.protocol.active`."""

    kind: Name
    number: Count

    def __str__(self) -> str:
        return f"{self.kind}({self.number})"


class Standing(NamedTuple):
    """A group of an asynchronous job; see ``Record``."""

    entry: GroupEntry
    """Its entry in the record that it was last a member of."""
    base: Count
    """Committed steps of the state that it received last, against which its contribution is
    computed."""
    since: Count
    """Number of the record that made it a member last, or that ended its membership with a COMMIT;
    messages that it sent before that record are void."""
