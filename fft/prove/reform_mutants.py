"""Planted bugs in how a group that lost one rank re-forms around its successor. Pure data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fft.messages.effects import Effect, Heal
from fft.messages.protocol import Event, Record
from fft.protocol.effects import EFFECTS
from fft.protocol.state import Config, Local, members, my_place
from fft.prove.bounds import Bounds
from fft.prove.mutant import Mutant
from fft.prove.planting import Raw, planted, proposing

_WHOLE = Bounds("mutant", ranks=2, commits=0, faults=0, lost="replaced")
_ALONE = Bounds("mutant", ranks=2, commits=0, faults=0, lost="waiting")


def _always(s: Local, c: Config, event: Event) -> bool:
    return True


def _never_over(raw: Raw) -> None:
    raw["common"]["on"]["timer.reform_window"] = [{"effects": ["rearm"]}]


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
        "lost_rank_not_waited_for",
        "The next epoch is formed without the group that gets another process.",
        "reform",
        _WHOLE,
        participant=planted(guards={"nobody_reforms": _always}),
    ),
    Mutant(
        "waits_for_ever",
        "The wait for a lost rank's successor begins anew when it is over.",
        "reform",
        _ALONE,
        change=_never_over,
    ),
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
