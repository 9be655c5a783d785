"""How a rank's vote comes to the job's ballot: by way of the ballot of its own group.

The ranks of a group vote on a bus of their own first; who completes the group's votes carries all
of them on. The engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from fft.bus.base import BusError, ErrorBus
from fft.messages.effects import CastVote
from fft.messages.protocol import Ballot, Peer, Token, Vote
from fft.messages.wire import decode_votes, encode_votes

logger = logging.getLogger(__name__)

_SLOTS = 8
"""Ballots live in so many reused slots, so that a vote that comes too late leaves no key behind."""


class Ballots:
    """Of one participant. ``group_bus``: of its replica group alone; None: it votes for itself."""

    def __init__(
        self,
        bus: ErrorBus,
        group_bus: ErrorBus | None,
        world: int,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """``later``: takes what tidies up, and nobody waits for."""
        self._bus, self._group_bus, self._world, self._later = bus, group_bus, world, later

    def cast(self, effect: CastVote) -> Ballot | None:
        """Vote in my group; who completes its votes carries them to the job's ballot.

        Returns the ballot, if it is complete. Raises BusError, UnreadableMessage.
        """
        votes = self._group_votes(effect)
        if not votes:
            return None
        word = encode_votes(votes)
        slot, tag = _slot(effect.token), _tag(effect.token)
        words = self._bus.ballot(slot, tag, word, effect.voters, weight=len(votes))
        by_peer = _by_peer(words or [])
        if len(by_peer) < effect.voters:  # a vote counted twice; who votes last gets all
            return None
        return Ballot(effect.token, tuple(by_peer.values()))

    def drop(self, token: Token) -> None:
        """The txn is decided. Raises BusError."""
        self._bus.delete(_old_slot(token))

    def _group_votes(self, effect: CastVote) -> list[Vote]:
        """The votes that I must carry to the job's ballot: my group's, mine alone, or none.

        In the first txn of an epoch everyone votes for himself. So a group in which one rank has
        lost the group's bus, and the others wait for its vote there, commits all the same.
        """
        bus, world = self._group_bus, self._world
        if bus is None or effect.token.txn <= 1:
            return [effect.vote]
        try:
            slot, tag = _slot(effect.token), _tag(effect.token)
            cast = bus.ballot(slot, tag, encode_votes([effect.vote]), world) or []
        except BusError as error:
            self._lose_group_bus(error)
            return [effect.vote]
        if effect.vote.peer.rank == 0:
            self._later(lambda: self._drop_group_ballot(effect.token))
        by_peer = _by_peer(cast)
        return list(by_peer.values()) if len(by_peer) >= world else []

    def _drop_group_ballot(self, token: Token) -> None:
        try:
            if self._group_bus is not None:
                self._group_bus.delete(_old_slot(token))
        except BusError as error:
            self._lose_group_bus(error)

    def _lose_group_bus(self, error: BusError) -> None:
        logger.warning("votes of the group go to the job's bus from now on: %s", error)
        self._group_bus = None


def _by_peer(words: list[bytes]) -> dict[Peer, Vote]:
    return {vote.peer: vote for word in words for vote in decode_votes(word)}


def _slot(token: Token) -> str:
    return f"ballot{(token.epoch + token.txn) % _SLOTS}"


def _old_slot(token: Token) -> str:
    """Not this txn's: a voter of it may still be adding to that one."""
    return _slot(Token(token.epoch, token.txn + _SLOTS // 2))


def _tag(token: Token) -> str:
    return f"{token.epoch}.{token.txn}"
