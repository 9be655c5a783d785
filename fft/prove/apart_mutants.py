"""Planted bugs in which groups synchronize, with which leases, and who is left out. Pure data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fft.messages.effects import Decide, Effect
from fft.messages.protocol import Event, Lease, Record
from fft.protocol.effects import EFFECTS
from fft.protocol.guards import GUARDS
from fft.protocol.participant import Participant
from fft.protocol.state import Config, Local
from fft.prove.bounds import Bounds
from fft.prove.mutant import Mutant
from fft.prove.planting import planted, proposing, small

_HELD = replace(small(groups=3, commits=2, late=1), behind=1)
_AWAY = replace(small(groups=3, commits=2, late=1), behind=2)


def _apart(
    name: str, what: str, bounds: Bounds, participant: type[Participant], expected: str = "bounded"
) -> Mutant:
    return Mutant(
        name, what, expected, bounds, participant=participant, base="async", sound="async"
    )


def _forms(**other: float) -> type[Participant]:
    """Form epochs as if the policies differed from those in the record."""

    def asks(s: Local, c: Config, event: Event) -> bool:
        return GUARDS["epoch_possible"](s, replace(c, **other), event)  # type: ignore[arg-type]

    def proposes(s: Local, c: Config, event: Event) -> Iterable[Effect]:
        for effect in EFFECTS["propose_epoch"](s, replace(c, **other), event):  # type: ignore[arg-type]
            assert isinstance(effect, Decide)
            yield replace(effect, proposal=replace(effect.proposal, bound=c.bound))

    return planted({"epoch_possible": asks}, {"propose_epoch": proposes})


def _leases_of_newcomers(s: Local, record: Record) -> Record:
    """Grant leases to new members without one, for data that they have not computed."""
    held = {lease[1:] for lease in record.leases}
    new = [g for g in record.members if (g.group, g.store) not in held]
    leases = [Lease(record.cursor + i, g.group, g.store) for i, g in enumerate(new)]
    all_ = tuple(sorted((*record.leases, *leases)))
    return replace(record, leases=all_, cursor=record.cursor + len(new))


def _only_of_members(s: Local, record: Record) -> Record:
    inside = {g.group for g in s.epoch.members} if s.epoch else set()
    return replace(record, leases=tuple(x for x in record.leases if x.group in inside))


def _kept(s: Local, record: Record) -> Record:
    """Let contributors keep the leases that the commit has consumed."""
    return replace(record, leases=s.leases)


def _bases_of_all(s: Local, record: Record) -> Record:
    moved = tuple(each._replace(base=record.step) for each in record.standing)
    return replace(record, standing=moved)


def _without_absent(s: Local, record: Record) -> Record:
    """Drop groups that are not ready from the job, and return their leases."""
    inside = {g.group for g in record.members}
    gone = [lease.slice for lease in record.leases if lease.group not in inside]
    return replace(
        record,
        leases=tuple(x for x in record.leases if x.group in inside),
        returned=tuple(sorted((*record.returned, *gone))),
        standing=tuple(x for x in record.standing if x.entry.group in inside),
    )


def _none_standing(s: Local, record: Record) -> Record:
    return replace(record, standing=())


APART: tuple[Mutant, ...] = (
    _apart(
        "bound_off_by_one",
        "A synchronisation leaves a group behind that will be one step more than the bound behind.",
        _HELD,
        _forms(bound=2),
    ),
    _apart(
        "quorum_of_those_ready",
        "Whoever is ready synchronises, be it a minority of the job.",
        small(commits=2, late=1),
        _forms(quorum=-1.0),
    ),
    _apart(
        "joiner_weighted_at_once",
        "A group that comes new counts in its first synchronisation, before it has computed.",
        small(crash=1, restart=1),
        planted(actions=proposing("propose_epoch", _leases_of_newcomers)),
    ),
    _apart(
        "contribution_counted_twice",
        "A commit leaves the leases that it consumes with their holders, who bring the same again.",
        small(commits=1),
        planted(actions=proposing("propose_commit", _kept)),
        "samples_once",
    ),
    _apart(
        "lease_lost_while_apart",
        "A commit drops the leases of the groups that are not in it.",
        _AWAY,
        planted(actions=proposing("propose_commit", _only_of_members)),
        "samples_once",
    ),
    _apart(
        "base_of_who_was_not_there",
        "A commit counts as the base of all groups, those that were not in it, too.",
        _AWAY,
        planted(actions=proposing("propose_commit", _bases_of_all)),
    ),
    _apart(
        "left_out_though_alive",
        "Who is not ready is left out of the job, as if it were lost.",
        _AWAY,
        planted(actions=proposing("propose_epoch", _without_absent)),
    ),
    _apart(
        "job_forgotten_by_abort",
        "A rollback forgets which groups the job has.",
        small(no=1),
        planted(actions=proposing("propose_abort", _none_standing)),
    ),
)
