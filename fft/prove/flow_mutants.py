"""Planted bugs in how the scopes of stages keep to the flow of the data. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from fft.messages.effects import Effect
from fft.messages.protocol import Event, Record, Seen
from fft.protocol.effects import EFFECTS
from fft.protocol.flow import next_version
from fft.protocol.participant import Participant
from fft.protocol.state import Config, Local
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
    """``in_flow``, wrong by ``more`` steps for whoever follows another scope, or leads one."""

    def in_flow(s: Local, c: Config, event: Event) -> bool:
        return all(
            next_version(s) <= e.version + e.ahead + (more if follows == (e.ahead == 0) else 0)
            for e in s.elsewhere
        )

    return in_flow


def _one_more(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """What another scope has begun counts as committed."""
    EFFECTS["note_scope"](s, c, event)
    s.elsewhere = tuple(replace(e, version=e.version + 1) for e in s.elsewhere)
    return ()


def _nothing(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    return ()


def _votes(**wrong: Callable[[Local, Config], object]) -> Callable[..., Iterable[Effect]]:
    """``note_vote``, with other values in the vote."""

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
        "A stage computes a step that is one further ahead than its bound.",
        small(commits=2, stage=0),
        planted({"in_flow": _within(1, follows=False)}),
    ),
    _flowing(
        "passes_the_stage_before",
        "A stage computes a step that the one which it follows has not committed.",
        small(stage=1, formed=False),
        planted({"in_flow": _within(1, follows=True)}),
    ),
    _flowing(
        "counts_what_is_not_committed",
        "What another scope has not committed yet counts.",
        small(commits=2, stage=0),
        planted(actions={"note_scope": _one_more}),
    ),
    _flowing(
        "vote_says_more_than_it_saw",
        "A vote names the version that it needs, whatever it has seen.",
        small(stage=1),
        planted(
            actions={
                "note_vote": _votes(
                    seen=lambda s, c: tuple(Seen(e.scope, 9, e.ahead) for e in s.elsewhere)
                )
            }
        ),
    ),
    _flowing(
        "commit_names_no_versions",
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
