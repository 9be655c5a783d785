"""Compare replicas by the digests in the votes of one txn. Pure.

A vote may have two digests: of the state, and of the gradients that the commit would apply. A
digest may have named parts, which are lines of the form ``name=digest``. A rank whose vote has no
digest is not compared. Only ranks of one number hold the same shard, so each rank is compared only
with the ranks of its number in the other groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from fft.messages.protocol import Peer, Vote

LONGEST = 1900
"""Maximum number of characters of a text."""
_NAMED = 32
"""Maximum number of ranks that a text names."""


Digest = Callable[[Vote], str | None]
"""Returns one of the digests in a vote, or None if it was not taken."""


def state_digest(vote: Vote) -> str | None:
    """Return the digest of the state."""
    return vote.digest


def gradient_digest(vote: Vote) -> str | None:
    """Return the digest of the reduced gradients."""
    return vote.manifest.fingerprint


def differing(votes: Iterable[Vote], digest: Digest = state_digest) -> dict[int, dict[Peer, str]]:
    """Return the digests by rank number and participant, where those of one number differ."""
    found: dict[int, dict[Peer, str]] = {}
    for vote in votes:
        if (taken := digest(vote)) is not None:
            found.setdefault(vote.peer.rank, {})[vote.peer] = taken
    return {rank: held for rank, held in found.items() if len(set(held.values())) > 1}


def drawn(votes: Iterable[Vote]) -> dict[str, dict[Peer, str]]:
    """Return the digests of the drawn data by shard and participant."""
    found: dict[str, dict[Peer, str]] = {}
    for vote in votes:
        if vote.manifest.data is not None:
            found.setdefault(vote.manifest.shard, {})[vote.peer] = vote.manifest.data
    return found


def unequal_data(votes: Iterable[Vote]) -> str:
    """Return a text that names the ranks with different data; empty if all data match."""
    by_shard = drawn(votes)
    if "" in by_shard and len(by_shard) > 1:
        whole = _names(sorted(by_shard.pop("")))
        parts = _names(sorted(peer for held in by_shard.values() for peer in held))
        return (
            f"all data (no sharded=) are read by {whole}, and a shard by {parts}; pass the same "
            "sharded= on all ranks"
        )
    texts = []
    for shard, held in sorted(by_shard.items()):
        by_digest: dict[str, list[Peer]] = {}
        for peer, digest in sorted(held.items()):
            by_digest.setdefault(digest, []).append(peer)
        if len(by_digest) > 1:
            parts = "; ".join(f"{digest} on {_names(p)}" for digest, p in by_digest.items())
            texts.append(f"shard {shard}: {parts}" if shard else parts)
    return ", ".join(texts)


def divergent_ranks(
    votes: Iterable[Vote], digest: Digest = state_digest
) -> tuple[Peer, ...] | None:
    """Return the divergent ranks: those that differ from a strict majority of their rank number.

    Returns:
        None if the digests of some rank number have no majority.
    """
    odd: list[Peer] = []
    for held in differing(votes, digest).values():
        most, count = Counter(held.values()).most_common(1)[0]
        if 2 * count <= len(held):
            return None
        odd += [peer for peer, other in held.items() if other != most]
    return tuple(sorted(odd))


def divergent_joiners(
    votes: Iterable[Vote], joiners: Collection[Peer], digest: Digest = state_digest
) -> tuple[Peer, ...]:
    """Return the joiners whose digest differs from that of the ranks that had the state.

    Returns:
        Empty if there is no such joiner, or if the others of some rank number differ as well.
    """
    odd: list[Peer] = []
    for held in differing(votes, digest).values():
        right = {taken for peer, taken in held.items() if peer not in joiners}
        if len(right) != 1:
            return ()
        odd += [peer for peer, taken in held.items() if taken not in right]
    return tuple(sorted(odd))


def minority(votes: Iterable[Vote], digest: Digest = state_digest) -> tuple[Peer, ...]:
    """Return the divergent ranks; empty if the digests of some rank number have no majority."""
    return divergent_ranks(votes, digest) or ()


def wrong_gradients(votes: Iterable[Vote]) -> tuple[str, tuple[Peer, ...]]:
    """Return a text about reduced gradients that differ, and the ranks to accuse.

    These are the divergent ranks. If no digest has a majority, they are the ranks that could not
    repeat their result while their replicas could.
    """
    votes = tuple(votes)
    digests = digests_text(differing(votes, gradient_digest))
    text = f"the reduced gradients of replicas differ ({digests}"
    few, changed = minority(votes, gradient_digest), not_repeating(votes)
    if few or not changed:
        return f"{text})"[:LONGEST], few
    names = ", ".join(map(str, changed))
    return f"{text}; {names} could not repeat its own, unlike its replicas)"[:LONGEST], changed


def not_repeating(votes: Iterable[Vote]) -> tuple[Peer, ...]:
    """Return the ranks whose gradients differ from their replicas and from their previous attempt.

    If one of two differing replicas has repeated its result, all inputs of the reduction were the
    same again. So if the other replica has another result, it is at fault.

    Returns:
        Empty if no replica of some rank number has repeated its result: the step may not be
        reproducible.
    """
    found, held = [], {vote.peer: vote.manifest.repeats for vote in votes}
    for peers in differing(votes, gradient_digest).values():
        if not any(held[peer] for peer in peers):
            return ()
        found += [peer for peer in peers if held[peer] is False]
    return tuple(sorted(found))


def digests_text(found: Mapping[int, Mapping[Peer, str]]) -> str:
    """Return a text that lists the participants by digest, for each rank number and each part."""
    lines = []
    for rank, held in sorted(found.items()):
        parts = {peer: _parts(digest) for peer, digest in sorted(held.items())}
        for name in sorted({name for those in parts.values() for name in those}):
            by_digest: dict[str, list[Peer]] = {}
            for peer, those in parts.items():
                by_digest.setdefault(those.get(name, "nothing"), []).append(peer)
            if len(by_digest) > 1:
                texts = [f"{digest} on {_names(peers)}" for digest, peers in by_digest.items()]
                lines.append(f"rank {rank}: {name}{': ' if name else ''}{'; '.join(texts)}")
    return ", ".join(lines)


def _parts(digest: str) -> dict[str, str]:
    """Return the parts of a digest by name; a digest without parts is one without a name."""
    lines = (line.rpartition("=") for line in digest.splitlines())
    return {name: value for name, _, value in lines}


def _names(peers: list[Peer]) -> str:
    more = f" and {len(peers) - _NAMED} more" if len(peers) > _NAMED else ""
    return " ".join(map(str, peers[:_NAMED])) + more
