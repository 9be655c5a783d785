"""Guarantees 4, 5, 7 and 12: unity of shards, equal replicas, fencing and skips. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from fft.messages.causes import CauseCode
from fft.messages.protocol import (
    Ack,
    Applied,
    ApplyFailed,
    Ballot,
    Begin,
    Connected,
    Event,
    Fault,
    Healed,
    Peer,
    Prepared,
    Ready,
)
from fft.protocol.invariants.claims import Claim, Given, Holds, Move, Same, Yes, voted
from fft.protocol.state import member_peers, unproven


def shard_unity(move: Move) -> Iterator[Claim]:
    """4: all ranks of a group begin a txn at the same step and with the same lineage.

    A joiner that is still fetching begins at the state of its epoch, which arrives before it votes.
    """
    has_come = isinstance(move.event, Healed) and move.out.verdict == "row"
    if move.entered("training") or (has_come and move.after.role == "training"):
        start = move.after if move.after.healed else move.after.epoch
        assert start is not None, "a txn begins in an epoch"
        at = (start.step, start.lineage)
        text = f"{move.peer} began txn {move.after.token} at {at}, another rank at {{was}}"
        yield Same(("begin", move.after.token, move.peer.group), at, text)


def replicas_equal(move: Move) -> Iterator[Claim]:
    """5: after a commit all replicas have equal lineage, and equal digests where taken."""
    event, after = move.event, move.after
    if not isinstance(event, (Applied, Healed)) or move.out.verdict != "row":
        return
    if isinstance(event, Applied):
        token = move.before.token
        text = f"after txn {token} {move.peer} has lineage {after.lineage}, another has {{was}}"
        yield Same(("lineage", token), after.lineage, text)
    if after.leases:  # another epoch of the same lineage may grant them to other groups
        leases = (after.cursor, after.leases, after.returned)
        text = f"{move.peer} has (cursor, leases, returned) {leases}, another of its epoch {{was}}"
        yield Same(("leases", after.lineage, move.before.token.epoch), leases, text)
    else:
        held = (after.step, after.cursor, after.batches)
        text = f"{move.peer} has (step, cursor, batches) {held}, another of its lineage {{was}}"
        yield Same(("held", after.lineage), held, text)
    if event.digest is not None:
        text = (
            f"at step {after.step} the state of {move.peer} (digest {event.digest}) differs from "
            "another's ({was}) although their lineage is equal"
        )
        # Between update and epoch a script may change the state, equally on all groups.
        moment = "update" if isinstance(event, Applied) else "epoch"
        yield Same(("digest", moment, after.lineage, move.peer.rank), event.digest, text)


def divergence(move: Move) -> Iterator[Claim]:
    """5: no txn is committed if its voters' states or reduced gradients differ.

    Only joiners that alone differ from the others, or else a minority, lose their state. Only a
    minority is accused of its gradients or, without a majority, a rank that did not repeat its own
    if another of its number did.

    This holds as far as votes contain digests.
    """
    yield from voted(move)
    token, members, outcome = move.before.token, member_peers(move.before), move.obeyed
    head, votes = move.after.head, tuple(("yes", token, peer) for peer in members)
    if outcome == "commit":
        text = f"txn {token} was committed though the states of replicas differ"
        yield Given(votes, text, lambda *yes: _are_alike(members, _states(yes)), needed=False)
        text = f"txn {token} was committed though the reduced gradients of replicas differ"
        yield Given(votes, text, lambda *yes: _are_alike(members, _gradients(yes)), needed=False)
    elif outcome == "abort" and head is not None and head.code == CauseCode.GRADIENTS_DIFFER:
        odd, named = head.accused, ", ".join(map(str, head.accused))
        text = f"record {head.n} accuses {named}, which is no minority and has repeated its result"
        if odd:
            wrong = partial(_are_wrong, odd, members)
            yield Given(votes, text, lambda *yes: wrong(yes), needed=False)
    elif outcome == "abort" and head is not None and (head.odd or head.diverged):
        odd, at, late = head.odd, head.n, unproven(move.before)
        text = f"record {at} ends the job, though no replicas differ, or joiners alone do"
        if head.diverged:
            ends = partial(_ends_job, late, members)
            yield Given(votes, text, lambda *yes: ends(_states(yes)), needed=False)
        text = f"record {at} gives up {', '.join(map(str, odd))}: no joiners, and no minority"
        if odd:
            lost = partial(_may_lose, odd, late, members)
            yield Given(votes, text, lambda *yes: lost(_states(yes)), needed=False)
        if move.peer in odd:
            text = f"{move.peer} keeps a state that record {at} gives up"
            yield Holds(move.after.lineage == "", text)


_Digests = Sequence[str | None]
"""The digests in the votes of an epoch's members, in the order of the members."""


def _states(yes: Sequence[Yes]) -> _Digests:
    return [vote.digest for vote in yes]


def _gradients(yes: Sequence[Yes]) -> _Digests:
    return [vote.manifest.fingerprint for vote in yes]


def _apart(members: Sequence[Peer], digests: _Digests) -> set[int]:
    """Numbers of the ranks whose known digests differ."""
    held: dict[int, set[str]] = {}
    for peer, digest in zip(members, digests, strict=True):
        if digest is not None:
            held.setdefault(peer.rank, set()).add(digest)
    return {rank for rank, found in held.items() if len(found) > 1}


def _are_alike(members: Sequence[Peer], digests: _Digests) -> bool | None:
    """Whether no digests differ; None if no two digests belong to one rank number."""
    ranks = [p.rank for p, digest in zip(members, digests, strict=True) if digest is not None]
    return None if len(ranks) == len(set(ranks)) else not _apart(members, digests)


def _are_few(odd: Collection[Peer], members: Sequence[Peer], digests: _Digests) -> bool:
    """Whether the other ranks of each divergent rank's number agree and are more than half."""
    for rank in {peer.rank for peer in odd}:
        taken = {p: d for p, d in zip(members, digests, strict=True) if p.rank == rank}
        held = {peer: digest for peer, digest in taken.items() if digest is not None}
        rest = [digest for peer, digest in held.items() if peer not in odd]
        if len(set(rest)) != 1 or 2 * len(rest) <= len(held):
            return False
    return True


def _joiners_alone(late: Collection[Peer], members: Sequence[Peer], digests: _Digests) -> set[Peer]:
    """Return the joiners that differ from the others of their number, if the others are alike."""
    odd: set[Peer] = set()
    for rank in _apart(members, digests):
        taken = [(p, d) for p, d in zip(members, digests, strict=True) if p.rank == rank and d]
        right = {digest for peer, digest in taken if peer not in late}
        if len(right) != 1:
            return set()
        odd |= {peer for peer, digest in taken if digest not in right}
    return odd


def _may_lose(
    odd: Collection[Peer], late: Collection[Peer], members: Sequence[Peer], digests: _Digests
) -> bool:
    """Whether these ranks may lose their state: the joiners that differ, else a minority."""
    if alone := _joiners_alone(late, members, digests):
        return alone == set(odd)
    return _are_few(odd, members, digests)


def _ends_job(late: Collection[Peer], members: Sequence[Peer], digests: _Digests) -> bool:
    """Whether states differ in another way than that joiners differ from all others."""
    apart = _apart(members, digests)
    return bool(apart) and not _joiners_alone(late, members, digests)


def _are_wrong(odd: Collection[Peer], members: Sequence[Peer], yes: Sequence[Yes]) -> bool:
    """Whether the gradients of these ranks are a minority, or were not repeated."""
    repeats = {p: vote.manifest.repeats for p, vote in zip(members, yes, strict=True)}
    apart = _apart(members, _gradients(yes))
    return _are_few(odd, members, _gradients(yes)) or all(
        repeats[peer] is False
        and peer.rank in apart
        and any(held for other, held in repeats.items() if other.rank == peer.rank)
        for peer in odd
    )


def skip(move: Move) -> Iterator[Claim]:
    """12: a step that one user skips is skipped by all, and counts neither as step nor as
    failure."""
    yield from voted(move)
    before, after, token = move.before, move.after, move.before.token
    if move.obeyed == "commit":
        members = member_peers(before)
        said = "a skip" if after.skip else "a step"
        yield Given(
            tuple(("yes", token, peer) for peer in members),
            f"{move.peer} takes txn {token} for {said}, against the votes",
            lambda *yes: any(vote.skip for vote in yes) == after.skip,
            needed=False,
        )
        yield Same(("skip", token), after.skip, f"{move.peer} takes txn {token} for {said}")
    took = after.head is not None and after.head != before.head and after.head.kind == "abort"
    if took and after.head is not None and after.head.skip:
        text = f"{move.peer} counts txn {token} as a failure, though its user skipped it"
        waits = after.paused and not before.paused
        yield Holds(after.rollbacks <= before.rollbacks and not waits, text)


def fencing(move: Move) -> Iterator[Claim]:
    """7: nothing from an older epoch, txn or incarnation changes state."""
    if move.out.verdict != "row":
        return
    here, event, peer = move.before.token, move.event, move.peer
    if isinstance(event, (Prepared, Ballot, Applied, ApplyFailed, Fault)):
        yield Holds(event.token == here, f"{peer} at {here} took {event.type} of {event.token}")
    if isinstance(event, Ack):
        yield Holds(
            event.token.epoch >= here.epoch, f"{peer} at {here} took an ack of an old epoch"
        )
    if isinstance(event, (Ready, Begin)):
        text = f"{peer} took {event.type} for epoch {event.epoch}"
        yield Holds(event.epoch >= here.epoch, text)
    if isinstance(event, (Connected, Healed)):
        text = f"{peer} took {event.type} for epoch {event.epoch}"
        yield Holds(event.epoch == here.epoch, text)
    if isinstance(event, Ballot):
        strangers = sorted({v.peer for v in event.votes} - set(member_peers(move.before)))
        yield Holds(not strangers, f"{peer} counted votes of {strangers}")
    speaker = _speaker(event)
    if speaker is not None:
        known = move.before.hellos.get((speaker.group, speaker.rank))
        newer = known is not None and known.peer.inc > speaker.inc
        changed = replace(move.after, bus_down=move.before.bus_down) != move.before
        text = f"{peer} listened to {speaker}, which had been replaced"
        yield Holds(not newer or not changed, text)


def _speaker(event: Event) -> Peer | None:
    """The participant that reports about itself in the event, or None."""
    hello = getattr(event, "hello", None)
    found = hello.peer if hello is not None else getattr(event, "peer", None)
    return found if isinstance(found, Peer) else None
