"""Parameter groups and scopes: what is trained, and which participants decide together. Pure.

A **parameter group** is a named set of parameters with their optimizer state. A **scope** is a set
of participants that decide together, the parameter groups that their transactions commit, and a
sync policy. Each parameter group is committed by one scope.

One scope is the job's: its transactions are those of the protocol. There may be another scope
inside each replica group. The group commits its transactions alone, on its own copy of the
parameters. The job's scope is then ``periodic``: each of its transactions follows a number of the
group's transactions. A rollback of the job does not undo what the group has committed meanwhile. If
a group has several ranks, they commit each of its steps together: their scope is another instance
of the protocol, a job of one group.

Alternatively, each rank number of the groups is a **stage** with a scope of its own: an instance of
the protocol over that rank of all groups. The **flow** of the data binds two stages: the later one
never passes the earlier one, which may be a limited number of steps ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fft.util.names import unknown

Ranks = Literal["one", "shards", "stages"]
"""How the ranks of a replica group hold a parameter group."""
Samples = Literal["per_rank", "per_group"]
"""Whether each rank of a replica group computes on its own samples, or all on the same ones."""
_HELD = {
    "one": "a replica group is one rank, which holds all of it",
    "shards": "each rank of a replica group holds a shard of it",
    "stages": "each rank of a replica group holds a stage of it",
}
_TAKE = {
    "per_rank": "each rank takes samples of its own",
    "per_group": "all ranks of a group take the same samples",
}
Place = tuple[str | int, ...]
"""The keys and list indices that lead to a place in the file."""
Problem = tuple[Place, str]
"""A place, and a sentence that names the problem and the fix."""
_MEMBERS = {
    "job": "all ranks of all replica groups",
    "group": "the ranks of each replica group",
    "stage": "one rank of all replica groups",
}
_SYNC = {
    "every_step": "in every step",
    "periodic": "after as many commits of each group's own scope as the training script says",
    "bounded": "after as many commits of its own scope as the training script says, and without "
    "those who are not ready",
}


class Strict(BaseModel):
    """A part of a spec: it refuses unknown keys and other types, and is immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ParameterGroup(Strict):
    """Parameters with their optimizer state that are committed together."""

    ranks: Ranks = Field(
        description="how the ranks of a replica group hold it: one rank all of it, each rank a "
        "shard, or each rank a stage of a pipeline"
    )
    samples: Samples = Field(
        "per_rank",
        description="whether each rank of a group computes on samples of its own, or all on the "
        "same ones, as stages of a pipeline and tensor-parallel ranks do",
    )


class Scope(Strict):
    """A set of participants that decide together, what their transactions commit, and when."""

    members: Literal["job", "group", "stage"] = Field(
        description="who votes: all ranks of all replica groups, those of each group alone, or one "
        "rank of all groups: that of the first such scope is rank 0, and so on"
    )
    commits: Annotated[list[str], Field(min_length=1)] = Field(description="parameter groups")
    sync: Literal["every_step", "periodic", "bounded"] = Field(
        description="when they vote: in every step; after some commits of the group's own scope; "
        "or the same, and whoever is not ready within a bound is in a later one"
    )


class Edge(Strict):
    """A data flow between two scopes: what one commits is the input of the other."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, validate_by_name=True)

    source: str = Field(alias="from", description="the scope whose steps come first")
    to: str = Field(description="the scope that takes in what they give, and never passes it")
    ahead: Annotated[int, Field(ge=1)] = Field(
        description="how many steps `from` may have committed more than `to`"
    )


Flow = list[Edge]
ParameterGroups = Annotated[dict[str, ParameterGroup], Field(min_length=1)]
Scopes = Annotated[dict[str, Scope], Field(min_length=1)]


def scope_problems(
    groups: Mapping[str, ParameterGroup], scopes: Mapping[str, Scope], flow: Sequence[Edge]
) -> Iterator[Problem]:
    """Yield the problems of the parameter groups, the scopes and the flow.

    They make it unclear which scope commits a parameter group or how its ranks hold it, or cannot
    be satisfied.
    """
    by: dict[str, str] = {}
    for name, scope in scopes.items():
        for i, group in enumerate(scope.commits):
            place: Place = ("scopes", name, "commits", i)
            if group not in groups:
                yield place, unknown("parameter group", group, groups)
            elif group in by:
                yield place, f"{group!r} is committed by {by[group]!r} already; take one away"
            by.setdefault(group, name)
    for group in groups.keys() - by.keys():
        text = "no scope commits it, so it would never be stepped; name it in one, or remove it"
        yield ("parameter_groups", group), text
    if any(scope.members == "stage" for scope in scopes.values()):
        yield from _unfit_stages(groups, scopes)
    else:
        yield from _unfit_scopes(groups, scopes)
    yield from _unfit_flow(scopes, flow)
    for what, kinds in (
        ("hold", {group.ranks for group in groups.values()}),
        ("take samples for", {group.samples for group in groups.values()}),
    ):
        if len(kinds) > 1:
            text = f"the ranks of a replica group {what} all of them alike, not {sorted(kinds)}"
            yield ("parameter_groups",), text
    for name, held in groups.items():
        if held.ranks == "stages" and held.samples == "per_rank":
            text = "the last stage needs the targets of what the first has taken: say per_group"
            yield ("parameter_groups", name, "samples"), text


def _unfit_scopes(
    groups: Mapping[str, ParameterGroup], scopes: Mapping[str, Scope]
) -> Iterator[Problem]:
    """Problems that make it unclear which scope waits for which, or that FFT cannot run."""
    inner = [name for name, scope in scopes.items() if scope.members == "group"]
    outer = [name for name, scope in scopes.items() if scope.members == "job"]
    if len(outer) != 1:
        yield ("scopes",), f"one scope has the members `job`, not {outer or 'none'}"
    for name in inner[1:]:
        yield ("scopes", name), f"{inner[0]!r} is the scope of the group already; join the two"
    for name in outer:
        sync: Place = ("scopes", name, "sync")
        if scopes[name].sync != "every_step" and not inner:
            text = f"{scopes[name].sync} counts the commits of a scope with members `group`"
            yield sync, f"{text}, and there is none: add one, or say every_step"
        if scopes[name].sync == "every_step" and inner:
            yield sync, f"say periodic: it follows the commits of {inner[0]!r}; or bounded"
    for name in inner:
        if scopes[name].sync != "every_step":
            text = "a group commits its own steps one by one: say every_step"
            yield ("scopes", name, "sync"), text
        for i, group in enumerate(scopes[name].commits):
            if group in groups and groups[group].ranks == "stages":
                text = (
                    "what stages keep of a step is put back by the job's scope alone so far: say "
                    "ranks: one, or ranks: shards"
                )
                yield ("scopes", name, "commits", i), f"{group!r}: {text}"


def _unfit_stages(
    groups: Mapping[str, ParameterGroup], scopes: Mapping[str, Scope]
) -> Iterator[Problem]:
    """Settings that are incompatible with stages that have their own scopes."""
    for name, scope in scopes.items():
        if scope.members != "stage":
            text = "other scopes are those of stages: so must this one be, or be taken away"
            yield ("scopes", name, "members"), text
        if scope.sync != "every_step":
            yield ("scopes", name, "sync"), "a stage commits its steps one by one: say every_step"
        for i, group in enumerate(scope.commits):
            if group in groups and groups[group].ranks != "stages":
                text = f"{group!r}: a stage's parameters have `ranks: stages`"
                yield ("scopes", name, "commits", i), text


def _unfit_flow(scopes: Mapping[str, Scope], flow: Sequence[Edge]) -> Iterator[Problem]:
    """Edges that cannot be satisfied or have no effect."""
    stages = [name for name, scope in scopes.items() if scope.members == "stage"]
    after: dict[str, list[str]] = {}
    for i, edge in enumerate(flow):
        place: Place = ("flow", i)
        ends = {"from": edge.source, "to": edge.to}
        for which, name in ends.items():
            if name not in scopes:
                yield (*place, which), unknown("scope", name, scopes)
            elif name not in stages:
                yield (*place, which), f"{name!r} is no scope of a stage: only those flow"
        if edge.to in after.get(edge.source, ()):
            yield place, f"{edge.source!r} → {edge.to!r} stands here already: keep one"
        after.setdefault(edge.source, []).append(edge.to)
    for i, edge in enumerate(flow):
        if (circle := _longest(after, edge.to, edge.source)) is not None:
            text = f"{edge.source!r} would wait for itself: {' → '.join([edge.source, *circle])}"
            yield ("flow", i), f"{text}; take one of these edges away"
            return
    for i, edge in enumerate(flow):
        way = _longest(after, edge.source, edge.to)
        if way is not None and edge.ahead < (depth := len(way) - 1):
            text = (
                f"{' → '.join(way)} is {depth} steps deep, and {edge.source!r} may be {edge.ahead} "
                f"ahead: its stages could never work at one time; say ahead: {depth} or more"
            )
            yield ("flow", i, "ahead"), text
    for name in stages if len(stages) > 1 else ():
        if not any(name in (edge.source, edge.to) for edge in flow):
            text = "no edge of the flow leads to this stage or from it; add one"
            yield ("scopes", name), text


def _longest(after: Mapping[str, Sequence[str]], first: str, last: str) -> list[str] | None:
    """The longest path between two scopes, both included, or None if all paths have cycles."""

    def ways(at: str, passed: tuple[str, ...]) -> Iterator[list[str]]:
        if at == last:
            yield [*passed, at]
            return
        for name in after.get(at, ()):
            if name not in passed:
                yield from ways(name, (*passed, at))

    return max(ways(first, ()), key=len, default=None)


def flow_in_words(flow: Sequence[Edge]) -> Iterator[str]:
    """Yield a line for each edge."""
    for edge in flow:
        yield (
            f"flow {edge.source} → {edge.to}: {edge.to} never passes {edge.source}, which may be "
            f"{edge.ahead} steps ahead; who must wait is held back before it computes"
        )


def in_words(
    groups: Mapping[str, ParameterGroup],
    scopes: Mapping[str, Scope],
    bound: int = 0,
    quorum: float = 0.5,
) -> Iterator[str]:
    """Yield a line for each parameter group, and one or more for each scope.

    Args:
        bound: ``FsmSpec.bound``, in steps of the job.
        quorum: ``Policies.quorum``, a fraction of the groups.
    """
    for name, group in groups.items():
        yield f"parameter group {name}: {_HELD[group.ranks]}; {_TAKE[group.samples]}"
    for name, scope in scopes.items():
        what = ", ".join(scope.commits)
        yield (
            f"scope {name}: {_MEMBERS[scope.members]} vote {_SYNC[scope.sync]}; a COMMIT steps "
            f"{what} on all of them, an ABORT on none"
        )
        if scope.sync != "every_step":
            yield (
                f"scope {name}: a group holds a lease on the data of its next steps, until a "
                "COMMIT has consumed them; the lease of a group that is lost is given to another"
            )
        if scope.sync == "bounded":
            yield (
                f"scope {name}: a synchronisation takes those who are ready when all are, or when "
                f"the join_window ends with more than {quorum:g} of the job's groups; the others "
                "compute on, and are in a later one"
            )
            yield (
                f"scope {name}: held back is whoever is ready while a living group would be more "
                f"than {bound} behind otherwise; what that group brings is then at most {bound} "
                "behind"
            )
