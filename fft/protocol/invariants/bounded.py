"""Guarantee 13, for asynchronous jobs: which groups synchronize, with what, and the bound. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fft.messages.effects import Broadcast, Decide, Finish
from fft.messages.protocol import (
    Applied,
    ApplyFailed,
    Ballot,
    GroupEntry,
    Join,
    Leave,
    Peer,
    Record,
    Standing,
    Stop,
    Timer,
    Token,
)
from fft.protocol.invariants.claims import Claim, Given, Holds, Know, Move, leavers_of
from fft.protocol.leases import lease_of
from fft.protocol.state import Local

Key = tuple[str, str]


def bounded(move: Move) -> Iterator[Claim]:
    """13: each synchronization has a majority of the job, and leaves no group beyond the bound.

    A contribution is at most ``bound`` steps behind, belongs to the lease that the group was
    granted with its base, and is in one committed record. A group outside a synchronization keeps
    its base and its lease. A group is left out of the job only if it is lost or leaves.
    """
    for effect in move.out.effects:
        if isinstance(effect, Decide) and effect.after is not None and effect.proposal.bound:
            yield from _leaves_out(move, effect.after, effect.proposal)
            yield from _asked_since(move, effect.after, effect.proposal)
            yield from _leaves_somebody(move, effect.after, effect.proposal)
    yield from _of_own_lease(move)
    yield from _of_awaited(move)
    yield from _takes_no_state_along(move)
    record = move.record
    if record is None or not record.bound:
        return
    yield Know(("record", record.n), record)
    if record.kind == "epoch":
        bases = tuple((each.entry.group, each.base) for each in record.standing)
        yield Know(("bases", record.epoch), (record.step, bases))
    last = (("record", record.n - 1),)
    if record.kind == "epoch":
        for text, test in (
            ("is formed by no majority of the job", _is_majority),
            (f"leaves a group more than {record.bound} steps behind", _keeps_the_bound),
            ("changes the standing of a group", _keeps_standings),
            ("counts what is no contribution of the lease", _counts_what_it_may),
        ):
            told = f"record {record.n} (epoch {record.epoch}) {text}"
            yield Given(last, told, lambda was, test=test: test(was, record), needed=False)
    else:
        told = f"record {record.n} ({record.kind}) does not go on with the job's groups before it"
        yield Given(last, told, lambda was: _goes_on(was, record), needed=False)


def _leaves_out(move: Move, after: Record, proposal: Record) -> Iterator[Claim]:
    """A group of the job that a proposal no longer names was lost, or has left."""
    named = _by_key(proposal.standing).keys()
    for key, each in _by_key(after.standing).items():
        lost = key in named or each.entry.group in leavers_of(proposal)
        lost = lost or _is_gone(move.after, each.entry)
        text = f"{move.peer} leaves {each.entry.group} out of the job, and nothing is said against"
        yield Holds(lost, f"{text} its life")


def contributes(peer: Peer, token: Token, base: int) -> Claim:
    """13: no contribution is older than the base that the epoch's record states for it.

    It is newer if a group with a lease had computed nothing from it before it joined the epoch.

    Args:
        base: Step of the job's state that the group's own steps started from, as the process traced
            it when the txn was committed.
    """
    text = f"{peer} contributed to txn {token} from base {base}, and the epoch counts another"

    def is_counted(epoch: tuple[int, tuple[tuple[str, int], ...]]) -> bool:
        step, bases = epoch
        return any(group == peer.group and at <= base <= step for group, at in bases)

    return Given((("bases", token.epoch),), text, is_counted)


def _asked_since(move: Move, after: Record, proposal: Record) -> Iterator[Claim]:
    """The members of a proposal have asked to join after their last synchronization."""
    if proposal.kind != "epoch":
        return
    since, said = _by_key(after.standing), move.after.hellos
    for group in proposal.members:
        at = since.get((group.group, group.store))
        for peer in group.peers() if at is not None else ():
            word = said.get((peer.group, peer.rank))
            asked = word is not None and word.peer == peer and at is not None
            text = f"{move.peer} proposes epoch {proposal.epoch} with {peer}, whose newest message "
            yield Holds(
                asked and word is not None and at is not None and word.head >= at.since,
                f"{text}is older than its last synchronisation",
            )


def _leaves_somebody(move: Move, after: Record, proposal: Record) -> Iterator[Claim]:
    """A COMMIT with which all members leave ends the job, or no group outside needs the state."""
    if proposal.kind != "commit" or not isinstance(move.event, Ballot) or move.after.epoch is None:
        return
    ends = not proposal.skip and all(vote.last for vote in move.event.votes)
    inside = _inside(move.after.epoch)
    outside = [
        each.entry.group
        for key, each in _by_key(after.standing).items()
        if key not in inside and not _is_gone(move.after, each.entry)
    ]
    text = f"{move.peer} lets all members of epoch {proposal.epoch} leave, and {outside} need their"
    stays = {group for group, _ in inside} - set(proposal.leavers)
    yield Holds(ends or bool(stays) or not outside, f"{text} state")


def _is_gone(s: Local, entry: GroupEntry) -> bool:
    """Whether a rank of this instance has ended, is suspected, or was replaced, according to
    ``s``."""
    for peer in entry.peers():
        word = s.hellos.get((peer.group, peer.rank))
        if peer in s.dead | s.suspected or (word is not None and word.peer.inc > peer.inc):
            return True
    return False


def _asks(s: Local, each: Standing) -> bool:
    """Whether all ranks of a group ask to join, by messages after its last synchronization."""
    words = [s.hellos.get((peer.group, peer.rank)) for peer in each.entry.peers()]
    asking = s.joining.issuperset(each.entry.peers())
    return asking and all(w is not None and w.head >= each.since and not w.unwinding for w in words)


def _of_own_lease(move: Move) -> Iterator[Claim]:
    """A group contributes from the lease that its newest applied record grants it."""
    before, after, event = move.before, move.after, move.event
    epoch = after.epoch or before.epoch or after.head
    if epoch is None or not epoch.bound:
        return
    store = next((g.store for g in epoch.members if g.group == move.peer.group), "")
    for effect in move.out.effects:
        if isinstance(effect, Broadcast) and isinstance(effect.message, Join):
            said, text = effect.message.hello.lease, f"{move.peer} asks to come in with lease"
            yield Holds(said == after.lease, f"{text} {said}, and has {after.lease}")
    if after.epoch is not None and after.epoch is not before.epoch:
        held = lease_of(epoch.leases, move.peer.group, store)
        text = f"{move.peer} is in epoch {epoch.epoch} with lease {after.lease}, and not {held}"
        yield Holds(after.lease == held, text)
    if isinstance(event, Applied) and move.out.verdict == "row":
        held = lease_of(after.leases, move.peer.group, store)
        text = f"{move.peer} applied txn {event.token} and has lease {after.lease}, and not {held}"
        yield Holds(after.lease == held, text)
    if isinstance(event, ApplyFailed) and move.out.verdict == "row":
        text = f"{move.peer} has lost its state, and keeps lease {after.lease} on a contribution"
        yield Holds(after.lease is None, text)


def _of_awaited(move: Move) -> Iterator[Claim]:
    """No lost group is waited for, and a silent group is suspected only if the others need it."""
    before, after, head = move.before, move.after, move.after.head
    if head is None or not head.bound:
        return
    if after.awaits != before.awaits:
        gone = [
            each.entry.group
            for each in head.standing
            if each.entry.group in after.awaits and _is_gone(after, each.entry)
        ]
        yield Holds(not gone, f"{move.peer} waits for {gone}, which it knows to be lost")
    event = move.event
    if isinstance(event, Timer) and event.name == "apart_window" and move.out.verdict == "row":
        new = after.suspected - before.suspected
        living = [each for each in head.standing if not _is_gone(before, each.entry)]
        ready = [each for each in living if _asks(before, each)]
        enough = 2 * len(ready) > len(living)
        for each in living:
            at_bound = head.step + 1 - each.base >= head.bound
            text = f"{move.peer} suspects {each.entry.group}, which stands apart within the bound"
            hit = new & set(each.entry.peers())
            yield Holds(not hit or at_bound or not enough, text)


def _takes_no_state_along(move: Move) -> Iterator[Claim]:
    """A group that leaves between synchronizations leaves the newest state with another group."""
    s, head = move.after, move.after.head
    left = any(isinstance(e, Finish) and e.error is None for e in move.out.effects)
    if not left or head is None or not head.bound or isinstance(move.event, Stop | Leave):
        return
    if not move.entered("terminal") or move.before.role not in ("apart", "joining"):
        return
    if head.last:
        return
    newest = max((each.base for each in head.standing), default=0)
    others = [
        each
        for each in head.standing
        if each.entry.group != move.peer.group and not _is_gone(s, each.entry)
    ]
    stay = [each for each in others if not s.leaving & set(each.entry.peers())]
    text = f"{move.peer} leaves with the state of step {newest}, which no group that stays has"
    yield Holds(not stay or any(each.base == newest for each in stay), text)


def _is_majority(was: Record, now: Record) -> bool:
    """Whether the members are a majority of the groups that stay in the job, without lost ones."""
    job = was.standing and [key for key in _by_key(now.standing) if key in _by_key(was.standing)]
    return not job or 2 * len(_inside(now) & set(job)) > len(job)


def _keeps_the_bound(was: Record, now: Record) -> bool:
    inside = _inside(now)
    return all(
        now.step + 1 - each.base < now.bound
        for key, each in _by_key(now.standing).items()
        if key not in inside
    )


def _keeps_standings(was: Record, now: Record) -> bool:
    """Whether the standings of an epoch record follow from the record before it.

    Groups outside the epoch are unchanged. Members have their old base, or the state of the epoch.
    """
    before, inside = _by_key(was.standing), _inside(now)
    return all(
        each.since == now.n and (each.base == now.step or before[key].base == each.base)
        if key in inside
        else before.get(key) == each
        for key, each in _by_key(now.standing).items()
    )


def _counts_what_it_may(was: Record, now: Record) -> bool:
    """Whether all contributions belong to leases that were held before.

    Without such a lease, all members start from the state of the epoch, possibly on a slice that
    one of them held before.
    """
    inside, standing = _inside(now), _by_key(now.standing)
    own = [lease for lease in now.leases if lease[1:] in inside]
    old = [lease for lease in own if lease in was.leases]
    known = all(
        lease[1:] in standing and now.step + 1 - standing[lease[1:]].base <= now.bound
        for lease in now.leases
    )
    anew = all(lease[1:] in standing and standing[lease[1:]].base == now.step for lease in own)
    return known and (len(old) == len(own) or (anew and len(own) == len(inside)))


def _goes_on(was: Record, now: Record) -> bool:
    """A COMMIT makes its state the base of its members; an ABORT changes nothing."""
    if now.kind == "abort":
        return now.standing == was.standing
    inside = {g.group: (g.group, g.store) for g in was.members}
    away = {key: at for key, at in _by_key(was.standing).items() if key not in inside.values()}
    here = {
        key: Standing(entry, now.step, now.n)
        for entry in was.members
        if (key := (entry.group, entry.store)) and entry.group not in now.leavers
    }
    return now.change and _by_key(now.standing) == {**away, **here}


def _by_key(standing: tuple[Standing, ...]) -> dict[Key, Standing]:
    return {(each.entry.group, each.entry.store): each for each in standing}


def _inside(record: Record) -> set[Key]:
    return {(g.group, g.store) for g in record.members}
