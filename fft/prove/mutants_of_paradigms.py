"""Planted bugs in which groups synchronize, with which leases, and who is left out. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from fft.messages.effects import Decide, Effect, Heal
from fft.messages.protocol import Event, Lease, Record, ScopeRecord
from fft.protocol.effects import EFFECTS, Action
from fft.protocol.flow import slices_due, step_due
from fft.protocol.guards import GUARDS
from fft.protocol.participant import Participant
from fft.protocol.state import Config, Local, members, my_place, participants
from fft.prove.bounds import Bounds
from fft.prove.mutant import Mutant
from fft.prove.planting import begins, planted, proposing, small

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


def _flowing(
    name: str,
    what: str,
    bounds: Bounds,
    participant: type[Participant],
    expected: str = "data_flow",
) -> Mutant:
    spec = "pipeline_ahead"
    return Mutant(name, what, expected, bounds, participant=participant, base=spec, sound=spec)


def _within(more: int, follows: bool) -> Callable[[Local, Config, Event], bool]:
    """Return an ``in_flow`` that is wrong by ``more`` slices, for followers or for leaders."""

    def in_flow(s: Local, c: Config, event: Event) -> bool:
        first, after = slices_due(s, c)
        wrong = [more if follows == (e.ahead == 0) else 0 for e in s.others]
        return all(e.allows(first - by, after - by) for e, by in zip(s.others, wrong, strict=True))

    return in_flow


def _by_steps(s: Local, c: Config, event: Event) -> bool:
    """Act as an ``in_flow`` that assumes that a skipped step has taken nothing."""
    groups = participants(s, c)
    first = step_due(s) * groups
    return all(e.allows(first, first + groups) for e in s.others)


def _never_ends(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Treat a scope that all groups have left as one that goes on."""
    assert isinstance(event, ScopeRecord)
    return EFFECTS["note_scope"](s, c, event) if event.groups else ()


def _records_only(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Ignore the message that all groups have left since the newest record of a scope."""
    assert isinstance(event, ScopeRecord)
    is_new = any(e.scope == event.scope and event.n > e.n for e in s.others)
    return EFFECTS["note_scope"](s, c, event) if is_new else ()


def _one_more(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Count slices that another scope has begun as taken."""
    EFFECTS["note_scope"](s, c, event)
    s.others = tuple(replace(e, cursor=e.cursor + 1) for e in s.others)
    return ()


def _newest(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Forget what an older record with more groups has allowed."""
    assert isinstance(event, ScopeRecord)
    s.others = tuple(
        replace(e, n=event.n, cursor=event.cursor, takers=len(event.groups), groups=event.groups)
        if e.scope == event.scope
        else e
        for e in s.others
    )
    return ()


def _nothing(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    return ()


def _leaves_at_once(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Vote to leave without waiting for the scopes that this one follows."""
    EFFECTS["note_vote"](s, c, event)
    assert s.vote is not None
    s.vote = replace(s.vote, leaving=c.me in s.leaving)
    return ()


FLOW: tuple[Mutant, ...] = (
    _flowing(
        "ahead_by_one_more",
        "A stage computes slices that are one txn further ahead than its bound.",
        small(commits=2, stage=0),
        planted({"in_flow": _within(2, follows=False)}),
    ),
    _flowing(
        "passes_the_stage_before",
        "A stage computes a slice that the one which it follows has not committed.",
        small(stage=1, formed=False),
        planted({"in_flow": _within(2, follows=True)}),
    ),
    _flowing(
        "counts_what_is_not_committed",
        "What another scope has not taken yet counts.",
        small(commits=2, stage=0),
        planted(actions={"note_scope": _one_more}),
    ),
    _flowing(
        "counts_steps",
        "The flow goes by committed steps: a skipped one has taken nothing.",
        small(commits=2, stage=0, skip=1),
        planted({"in_flow": _by_steps}),
    ),
    _flowing(
        "follows_by_steps",
        "The same, of the stage that follows: it computes what the one before has not committed.",
        small(commits=2, stage=1, skip=1),
        planted({"in_flow": _by_steps}),
    ),
    _flowing(
        "held_by_an_ended_stage",
        "A stage is held at its bound by the next one, which has ended.",
        small(groups=1, commits=3, stage=0, ends=True),
        planted(actions={"note_scope": _never_ends}),
        expected="eventually",
    ),
    _flowing(
        "held_by_who_has_left",
        "A stage is held by one that all have left at once, without a record.",
        small(groups=1, commits=3, stage=0, ends=True),
        planted(actions={"note_scope": _records_only}),
        expected="eventually",
    ),
    _flowing(
        "forgets_what_was_allowed",
        "The next stage loses a group, and what it has allowed before holds no more.",
        small(stage=0, ends=True),
        planted(actions={"note_scope": _newest}),
    ),
    _flowing(
        "held_for_ever",
        "Who is held does not read the register of the other scope, and its record was lost.",
        small(groups=1, commits=2, stage=1, lose=1),
        planted(actions={"read_scopes": _nothing}),
        expected="eventually",
    ),
    _flowing(
        "leaves_before_the_stage_before",
        "A group leaves a scope while it is in one that this scope follows.",
        small(stage=1, drain=1),
        planted(actions={"note_vote": _leaves_at_once}),
    ),
)


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


_WHOLE = Bounds("mutant", ranks=2, commits=0, faults=0, lost="replaced")


def _all_current(s: Local, record: Record) -> Record:
    groups = tuple(
        replace(g, ranks=tuple(replace(r, current=True) for r in g.ranks)) for g in record.members
    )
    return replace(record, members=groups)


def _from_nobody(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    (effect,) = EFFECTS["heal"](s, c, event)
    assert isinstance(effect, Heal)
    yield replace(effect, fetch_from=None)


def _as_a_group(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Let every rank of a group with a stale rank fetch, as after a common start."""
    (effect,) = EFFECTS["heal"](s, c, event)
    assert isinstance(effect, Heal)
    mine, others = my_place(s, c), range(len(members(s)))
    if effect.fetch_from is None and not all(r.current for r in members(s)[mine].ranks):
        effect = replace(effect, fetch_from=next(i for i in others if i != mine))
    yield effect


REFORM: tuple[Mutant, ...] = (
    Mutant(
        "successor_taken_for_current",
        "The epoch counts on the state of a process that has just come.",
        "replicas_equal",
        _WHOLE,
        participant=planted(actions=proposing("propose_epoch", _all_current)),
    ),
    Mutant(
        "successor_fetches_nothing",
        "The process that comes for a lost one goes on with the weights that it was built with.",
        "replicas_equal",
        _WHOLE,
        participant=planted(actions={"heal": _from_nobody}),
    ),
    Mutant(
        "mates_fetch_too",
        "Of a group that re-forms every rank fetches state, those that hold it as well.",
        "reform",
        _WHOLE,
        participant=planted(actions={"heal": _as_a_group}),
    ),
)


OF_PARADIGMS: tuple[Mutant, ...] = (*LEASES, *FLOW, *APART, *REFORM)
