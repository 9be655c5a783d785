"""Helpers to plant bugs: small bounds, and changed rows, guards and effects. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fft.messages.effects import Decide, Effect, StartTxn
from fft.messages.protocol import Ballot, Event, Manifest, Record, Vote
from fft.protocol.effects import EFFECTS, Action
from fft.protocol.guards import GUARDS, Guard
from fft.protocol.participant import Participant
from fft.protocol.roles import Role
from fft.protocol.state import Config, Local
from fft.prove.bounds import Bounds

Raw = dict[str, Any]
"""A spec as plain data."""
Change = Callable[[Raw], None]


def small(
    *,
    groups: int = 2,
    commits: int = 1,
    formed: bool = True,
    alike: bool = True,
    digests: bool = False,
    heals: bool = False,
    stage: int | None = None,
    ends: bool = False,
    slices: int = 0,
    rules: tuple[tuple[str, int], ...] = (),
    **budget: int,
) -> Bounds:
    """Return bounds with these faults, all of which may happen in one run."""
    faults = sum(budget.values())
    kinds = tuple(sorted(budget.items()))
    return Bounds(
        "mutant",
        groups,
        commits=commits,
        faults=faults,
        budget=kinds,
        formed=formed,
        alike=alike,
        digests=digests,
        heals=heals,
        stage=stage,
        ends=ends,
        slices=slices,
        rules=rules,
    )


def planted(
    guards: Mapping[str, Guard] | None = None, actions: Mapping[str, Action] | None = None
) -> type[Participant]:
    """Return the core with other guards or actions under these names."""
    new_guards, new_actions = {**GUARDS, **(guards or {})}, {**EFFECTS, **(actions or {})}

    class Planted(Participant):
        guards = new_guards
        actions = new_actions

    return Planted


def blind(other: Callable[[Vote], Vote]) -> type[Participant]:
    """Return the core that takes the verdict from other votes; a COMMIT counts the real ones."""

    def tallied(event: Event) -> Event:
        if not isinstance(event, Ballot):
            return event
        return replace(event, votes=tuple(map(other, event.votes)))

    def ask(name: str) -> Guard:
        return lambda s, c, event: GUARDS[name](s, c, tallied(event))

    def refuse(s: Local, c: Config, event: Event) -> Iterable[Effect]:
        return EFFECTS["propose_refusal"](s, c, tallied(event))

    guards = {name: ask(name) for name in ("tally_commits", "tally_aborts")}
    return planted(guards, {"propose_refusal": refuse})


def without_fields(*names: str) -> type[Participant]:
    """Return the core in which the tally does not see these fields of the manifests."""
    fields: dict[str, Any] = {name: getattr(Manifest(), name) for name in names}
    return blind(lambda vote: replace(vote, manifest=replace(vote.manifest, **fields)))


def state_of(raw: Raw, role: Role) -> Raw:
    """Return the first state that has a role, itself or in a phase."""
    states: Iterable[Raw] = raw["states"].values()
    return next(s for s in states if any(role == p["role"] for p in (s, *s["phases"].values())))


def way_to(raw: Raw, role: Role) -> str:
    """Return the destination of a row that enters this state: its first sub-state if it has any."""
    state = state_of(raw, role)
    name = next(name for name, other in raw["states"].items() if other is state)
    return ".".join([name, *list(state["states"])[:1]])


def on(raw: Raw, role: Role, event: str) -> list[Raw]:
    """Return the rows of an event in the state of a role."""
    rows: list[Raw] = state_of(raw, role)["on"].setdefault(event, [])
    return rows


def owners(raw: Raw) -> Iterator[Raw]:
    """Yield every part of the spec that has rows."""
    yield raw["common"]
    for state in raw["states"].values():
        yield from (state, *state["states"].values())


def instead(role: Role, event: str, to: Role | None = None, **row: Any) -> Change:
    """Replace the state's reaction to the event by one row."""

    def change(raw: Raw) -> None:
        state = state_of(raw, role)
        state["ignore"].pop(event, None)
        state["defer"].pop(event, None)
        on(raw, role, event)[:] = [{"to": to and way_to(raw, to), **row}]

    return change


def without(*effects: str, events: tuple[str, ...] = ()) -> Change:
    """Remove these effects from all rows, or only from rows of ``events`` if any are given."""

    def change(raw: Raw) -> None:
        for there in owners(raw):
            for event, rows in (*there["on"].items(), ("exit", there.get("exit", []))):
                for row in rows if not events or event in events else ():
                    row["effects"] = [name for name in row["effects"] if name not in effects]
        for name, parts in ({} if events else raw["sequences"]).items():
            raw["sequences"][name] = [part for part in parts if part not in effects]
            for part in (part for part in parts if isinstance(part, dict)):
                part["effects"] = [effect for effect in part["effects"] if effect not in effects]

    return change


def proposing(name: str, other: Callable[[Local, Record], Record]) -> dict[str, Action]:
    """Return the action with that name, proposing another record."""

    def act(s: Local, c: Config, event: Event) -> Iterable[Effect]:
        for effect in EFFECTS[name](s, c, event):
            assert isinstance(effect, Decide)
            yield Decide(effect.after, other(s, effect.proposal))

    return {name: act}


def begins(**wrong: Callable[[StartTxn], object]) -> dict[str, Action]:
    """Return the actions that begin a txn, with other values."""

    def begin(name: str) -> Action:
        def act(s: Local, c: Config, event: Event) -> Iterable[Effect]:
            (effect,) = EFFECTS[name](s, c, event)
            assert isinstance(effect, StartTxn)
            values: dict[str, Any] = {field: value(effect) for field, value in wrong.items()}
            yield replace(effect, **values)

        return act

    return {name: begin(name) for name in ("start_txn", "start_first_txn")}
