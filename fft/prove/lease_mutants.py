"""Planted bugs in how leases on the data are granted, kept, returned and consumed. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from fft.messages.effects import Effect
from fft.messages.protocol import Event, Lease, Record
from fft.protocol.effects import EFFECTS, Action
from fft.protocol.participant import Participant
from fft.protocol.state import Config, Local
from fft.prove.bounds import Bounds
from fft.prove.mutant import Mutant
from fft.prove.planting import begins, planted, proposing, small


def _leased(name: str, what: str, bounds: Bounds, participant: type[Participant]) -> Mutant:
    return Mutant(
        name, what, "samples_once", bounds, participant=participant, base="diloco", sound="diloco"
    )


def _epochs(other: Callable[[Local, Record], Record]) -> dict[str, Action]:
    """Return the actions that propose an epoch, with a changed record."""
    return proposing("propose_epoch", other) | proposing("propose_learners", other)


def _twice(s: Local, record: Record) -> Record:
    """Give all groups a lease on the first slice."""
    first = min(record.leases)
    return replace(record, leases=tuple(Lease(first.slice, *own[1:]) for own in record.leases))


def _exchanged(s: Local, record: Record) -> Record:
    """Pass each kept lease on to the next group in the list."""
    slices = [lease.slice for lease in record.leases]
    turned = [*slices[1:], *slices[:1]]
    moved = zip(turned, record.leases, strict=True)
    return replace(record, leases=tuple(sorted(Lease(n, *own[1:]) for n, own in moved)))


def _to_all(s: Local, record: Record) -> Record:
    """Grant learners a lease too, for the txn that they do not contribute to."""
    held = {lease.group for lease in record.leases}
    late = [g for g in record.members if g.group not in held]
    new = [Lease(record.cursor + i, g.group, g.store) for i, g in enumerate(late)]
    leases = tuple(sorted((*record.leases, *new)))
    return replace(record, leases=leases, cursor=record.cursor + len(new))


def _kept_by_all(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Let a rank keep its leases through a commit."""
    leases = s.leases
    effects = list(EFFECTS["note_applied"](s, c, event))
    s.leases = leases
    return effects


LEASES: tuple[Mutant, ...] = (
    _leased(
        "lease_granted_twice",
        "A commit grants all groups the same slice.",
        small(),
        planted(actions=proposing("propose_commit", _twice)),
    ),
    _leased(
        "lease_lost_with_its_group",
        "What a lost group held is given back to nobody.",
        small(crash=1),
        planted(actions=_epochs(lambda s, r: replace(r, returned=()))),
    ),
    _leased(
        "lease_kept_by_the_dead",
        "An epoch leaves a lease with a group that is not in it.",
        small(crash=1),
        planted(
            actions=_epochs(
                lambda s, r: replace(r, leases=s.head.leases, returned=()) if s.head else r
            )
        ),
    ),
    _leased(
        "returned_lease_left_out",
        "What was given back is forgotten with the next commit.",
        small(crash=1),
        planted(
            actions=proposing(
                "propose_commit",
                lambda s, r: replace(r, returned=(), cursor=r.cursor + len(s.returned)),
            )
        ),
    ),
    _leased(
        "leases_exchanged_by_an_epoch",
        "After a rollback the groups hold each other's leases.",
        small(no=1),
        planted(actions=_epochs(_exchanged)),
    ),
    _leased(
        "leases_renewed_on_abort",
        "An ABORT grants new leases, as if the slices were consumed.",
        small(no=1),
        planted(
            actions=proposing(
                "propose_abort",
                lambda s, r: replace(
                    r,
                    leases=tuple(Lease(n.slice + 2, *n[1:]) for n in r.leases),
                    cursor=r.cursor + 2,
                ),
            )
        ),
    ),
    _leased(
        "lease_consumed_twice",
        "A commit leaves the leases that it consumes with their holders.",
        small(),
        planted(actions=proposing("propose_commit", lambda s, r: replace(r, leases=s.leases))),
    ),
    _leased(
        "lease_not_renewed_here",
        "A rank goes on with the lease that its own commit has consumed.",
        small(commits=2),
        planted(actions={"note_applied": _kept_by_all}),
    ),
    _leased(
        "learner_holds_a_lease",
        "A group that learns is granted a lease on data that its first txn does not consume.",
        small(crash=1, restart=1),
        planted(actions=_epochs(_to_all)),
    ),
    _leased(
        "anothers_lease_taken",
        "A group computes on the slice that another one holds.",
        small(formed=False, commits=0),
        planted(actions=begins(lease=lambda start: 0)),
    ),
)
