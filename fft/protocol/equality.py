"""Whether replicas hold equal bits, as the digests in the votes of one txn tell. Pure.

Compared is what is there: a rank whose vote has no digest says nothing. Only ranks of one number
hold the same shard, so only they are compared, each with its like in the other groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fft.messages.protocol import Peer, Vote

_NAMED = 32
"""Ranks that a text names at most."""


def digests(votes: Iterable[Vote]) -> dict[int, dict[Peer, str]]:
    """By rank number, who brought which digest."""
    found: dict[int, dict[Peer, str]] = {}
    for vote in votes:
        if vote.digest is not None:
            found.setdefault(vote.peer.rank, {})[vote.peer] = vote.digest
    return found


def differing(votes: Iterable[Vote]) -> dict[int, dict[Peer, str]]:
    """The same, of those rank numbers whose digests differ."""
    return {rank: held for rank, held in digests(votes).items() if len(set(held.values())) > 1}


def odd_ones(votes: Iterable[Vote]) -> tuple[Peer, ...] | None:
    """Who differs from a strict majority of its like; None: for some there is no majority."""
    odd: list[Peer] = []
    for held in differing(votes).values():
        digest, count = Counter(held.values()).most_common(1)[0]
        if 2 * count <= len(held):
            return None
        odd += [peer for peer, other in held.items() if other != digest]
    return tuple(sorted(odd))


def tell(found: Mapping[int, Mapping[Peer, str]]) -> str:
    """Who has which digest, rank number by rank number."""
    lines = []
    for rank, held in sorted(found.items()):
        by_digest: dict[str, list[Peer]] = {}
        for peer, digest in sorted(held.items()):
            by_digest.setdefault(digest, []).append(peer)
        parts = [f"{digest} on {_names(peers)}" for digest, peers in by_digest.items()]
        lines.append(f"rank {rank}: {'; '.join(parts)}")
    return ", ".join(lines)


def _names(peers: list[Peer]) -> str:
    more = f" and {len(peers) - _NAMED} more" if len(peers) > _NAMED else ""
    return " ".join(map(str, peers[:_NAMED])) + more
