"""Guarantee 13, of an asynchronous job: who synchronises with what, who is left behind. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fft.messages.effects import Decide
from fft.messages.protocol import Record, Standing
from fft.protocol.apart import is_lost
from fft.protocol.invariants.claims import Claim, Given, Holds, Know, Move, leavers_of

Key = tuple[str, str]


def bounded(move: Move) -> Iterator[Claim]:
    """13: each synchronisation has a majority of the job, and leaves nobody beyond the bound.

    A contribution is at most as many steps behind as the bound says, is that of the lease that the
    group was granted with its base, and is in one committed record. Who is not in a synchronisation
    keeps its base and its lease; nobody is left out of the job of whose life nothing else is said.
    """
    for effect in move.out.effects:
        if isinstance(effect, Decide) and effect.after is not None and effect.proposal.bound:
            yield from _leaves_out(move, effect.after, effect.proposal)
    record = move.record
    if record is None or not record.bound:
        return
    yield Know(("record", record.n), record)
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
    """Groups of the job that a proposal does not name any more have been lost, or have left."""
    named = _by_key(proposal.standing).keys()
    for key, each in _by_key(after.standing).items():
        lost = key in named or each.entry.group in leavers_of(proposal)
        lost = lost or is_lost(move.after, each.entry)
        text = f"{move.peer} leaves {each.entry.group} out of the job, and nothing is said against"
        yield Holds(lost, f"{text} its life")


def _is_majority(was: Record, now: Record) -> bool:
    """Of the groups that stay in the job, for those that were lost count nowhere."""
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
    """Who is no member has what it had. A member's base is that, too, or it begins in the job."""
    before, inside = _by_key(was.standing), _inside(now)
    return all(
        each.since == now.n and (each.base == now.step or before[key].base == each.base)
        if key in inside
        else before.get(key) == each
        for key, each in _by_key(now.standing).items()
    )


def _counts_what_it_may(was: Record, now: Record) -> bool:
    """Contributions are of leases held before. Where there are none, all members begin anew from
    the state of the epoch, be it on a slice that one of them had."""
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
    """A COMMIT gives its members its state for a base; an ABORT changes nothing."""
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
