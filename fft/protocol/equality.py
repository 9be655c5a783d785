"""Whether replicas hold equal bits, as the digests in the votes of one txn tell. Pure.

Compared is what is there: a rank whose vote has no digest says nothing. Only ranks of one number
hold the same shard, so only they are compared, each with its like in the other groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fft.messages.protocol import Peer, Vote

UNEQUAL_DATA = "the ranks have drawn different data"
"""Begin of the cause of a rollback."""
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


def drawn(votes: Iterable[Vote]) -> dict[str, dict[Peer, str]]:
    """Digests of the drawn data by shard, and by the rank that has drawn them."""
    found: dict[str, dict[Peer, str]] = {}
    for vote in votes:
        if vote.manifest.data is not None:
            found.setdefault(vote.manifest.shard, {})[vote.peer] = vote.manifest.data
    return found


def unequal_data(votes: Iterable[Vote]) -> str:
    """A text that names the ranks with different data; empty if all data fit together."""
    by_shard = drawn(votes)
    if "" in by_shard and len(by_shard) > 1:
        whole = _names(sorted(by_shard.pop("")))
        parts = _names(sorted(peer for held in by_shard.values() for peer in held))
        return f"the whole data on {whole}; a shard on {parts}"
    texts = []
    for shard, held in sorted(by_shard.items()):
        by_digest: dict[str, list[Peer]] = {}
        for peer, digest in sorted(held.items()):
            by_digest.setdefault(digest, []).append(peer)
        if len(by_digest) > 1:
            parts = "; ".join(f"{digest} on {_names(p)}" for digest, p in by_digest.items())
            texts.append(f"shard {shard}: {parts}" if shard else parts)
    return ", ".join(texts)


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
