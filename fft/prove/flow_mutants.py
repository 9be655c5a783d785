"""Planted bugs in how the scopes of stages keep to the flow of the data. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from fft.messages.effects import Effect
from fft.messages.protocol import Event, Record, ScopeRecord, Seen
from fft.protocol.effects import EFFECTS
from fft.protocol.flow import slices_due, step_due
from fft.protocol.participant import Participant
from fft.protocol.state import Config, Local, participants
from fft.prove.bounds import Bounds
from fft.prove.mutant import Mutant
from fft.prove.planting import planted, proposing, small


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
        wrong = [more if follows == (e.ahead == 0) else 0 for e in s.elsewhere]
        return all(
            e.seen.allows(first - by, after - by) for e, by in zip(s.elsewhere, wrong, strict=True)
        )

    return in_flow


def _by_steps(s: Local, c: Config, event: Event) -> bool:
    """Act as an ``in_flow`` that assumes that a skipped step has taken nothing."""
    groups = participants(s, c)
    first = step_due(s) * groups
    return all(e.seen.allows(first, first + groups) for e in s.elsewhere)


def _never_ends(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Treat a scope that all groups have left as one that goes on."""
    assert isinstance(event, ScopeRecord)
    return EFFECTS["note_scope"](s, c, event) if event.groups else ()


def _records_only(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Ignore the message that all groups have left since the newest record of a scope."""
    assert isinstance(event, ScopeRecord)
    is_new = any(e.scope == event.scope and event.n > e.n for e in s.elsewhere)
    return EFFECTS["note_scope"](s, c, event) if is_new else ()


def _one_more(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Count slices that another scope has begun as taken."""
    EFFECTS["note_scope"](s, c, event)
    s.elsewhere = tuple(replace(e, cursor=e.cursor + 1) for e in s.elsewhere)
    return ()


def _newest(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Forget what an older record with more groups has allowed."""
    assert isinstance(event, ScopeRecord)
    s.elsewhere = tuple(
        replace(e, n=event.n, cursor=event.cursor, takers=event.takers, groups=event.groups)
        if e.scope == event.scope
        else e
        for e in s.elsewhere
    )
    return ()


def _nothing(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    return ()


def _votes(**wrong: Callable[[Local, Config], object]) -> Callable[..., Iterable[Effect]]:
    """Return a ``note_vote`` that puts other values into the vote."""

    def note_vote(s: Local, c: Config, event: Event) -> Iterable[Effect]:
        EFFECTS["note_vote"](s, c, event)
        assert s.vote is not None
        s.vote = replace(s.vote, **{name: value(s, c) for name, value in wrong.items()})  # type: ignore[arg-type]
        return ()

    return note_vote


def _unnamed(s: Local, record: Record) -> Record:
    return replace(record, seen=())


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
        "vote_says_more_than_it_saw",
        "A vote names the slices that it needs, whatever it has seen.",
        small(stage=1),
        planted(
            actions={
                "note_vote": _votes(
                    seen=lambda s, c: tuple(Seen(e.scope, 9, e.ahead, 2) for e in s.elsewhere)
                )
            }
        ),
    ),
    _flowing(
        "commit_names_no_bounds",
        "A commit does not say what its voters have seen of other scopes.",
        small(stage=1),
        planted(actions=proposing("propose_commit", _unnamed)),
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
        planted(actions={"note_vote": _votes(leaving=lambda s, c: c.me in s.leaving)}),
    ),
)
