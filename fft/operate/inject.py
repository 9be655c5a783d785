"""Inject faults into a running job: one fault, or a plan drawn from a seed.

Sends commands on the bus and waits, up to a limit, until every addressed participant has answered.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from fft.messages.commands import Inject, fresh_id
from fft.messages.fault_plans import MODELS, PHASES, AnyFault, Fault, FaultPlan, first_problem
from fft.operate.client import FIRST_ANSWER_S, JobClient, JobState, OperatorError, listed

SURVIVED = ("exception", "one_sided", "kill", "hang", "stop", "slow", "network_cut")
"""Kinds that ``any`` draws from: a job continues after each of them."""
_PHASES = [phase for phase in PHASES if phase != "apply"]
_DEFAULTS: dict[str, Any] = {"rank": 0, "phase": "next", "where": "before", "steps": 10}
_SECONDS = {"hang": 5.0, "stop": 5.0, "slow": 0.2}


@dataclass(frozen=True)
class Said:
    """Result for one fault: whether all addressed participants accepted, and their answers."""

    ok: bool
    text: str


def single(job: JobState, kind: str, step: int | None, options: Mapping[str, Any]) -> FaultPlan:
    """Return a plan of one fault, now or at ``step``.

    Raises ``OperatorError`` if the kind, the place or an option does not exist.
    """
    _check_kind(kind)
    needs_group = issubclass(MODELS[kind], Fault)
    if needs_group and "group" not in options:
        raise OperatorError(f"a {kind} needs --group; the groups: {listed(job.groups)}")
    entry = _entry(kind, f"injected-{fresh_id()[:8]}", step or 0, options)
    return _plan(job, [entry])


def drawn(
    job: JobState,
    kind: str,
    seed: int,
    count: int,
    every: int,
    step: int | None,
    options: Mapping[str, Any],
) -> FaultPlan:
    """Return a plan of ``count`` faults, ``every`` steps apart, at places drawn from ``seed``.

    The first is due at ``step``, or at the step after the job's present one. Equal arguments on a
    job of equal groups give an equal plan. Raises ``OperatorError`` like `single`.
    """
    if kind != "any":
        _check_kind(kind)
    if not job.groups:
        raise OperatorError("the job's groups could not be read; try again")
    draw = random.Random(seed)
    first = step if step is not None else (job.head.step if job.head else 0) + 1
    entries = []
    for number in range(count):
        one = kind if kind != "any" else draw.choice(SURVIVED)
        group = draw.choice(sorted(job.groups))
        rank = draw.choice([r.rank for r in job.groups[group].ranks])
        places = {"group": group, "rank": rank, "phase": draw.choice(_PHASES)}
        fields = MODELS[one].model_fields
        chosen = {**{name: places[name] for name in places if name in fields}, **options}
        entries.append(_entry(one, f"seed-{seed}-{number}", first + number * every, chosen))
    return _plan(job, entries)


def as_yaml(plan: FaultPlan) -> str:
    """Return the plan as a file for ``fft run --faults``."""
    text: str = yaml.safe_dump(
        plan.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True
    )
    return text


def send(desk: JobClient, job: JobState, plan: FaultPlan) -> list[Said]:
    """Send every fault of the plan to the job, and collect the answers."""
    commands = [Inject(fresh_id(), fault, desk.me) for fault in plan.faults]
    waiting = {c.id: set(_meant(job, c.fault)) for c in commands}
    words: dict[str, list[str]] = {command.id: [] for command in commands}
    refused: set[str] = set()
    with desk.asking(*commands) as answers:
        for answer in answers(time.monotonic() + FIRST_ANSWER_S):
            if answer.id in words:
                waiting[answer.id].discard(answer.by)
                words[answer.id].append(f"{answer.by} {answer.verdict}: {answer.text}")
                refused |= {answer.id} if answer.verdict == "refused" else set()
            if not any(waiting.values()):
                break
    return list(_said(commands, waiting, words, refused))


def _said(
    commands: Sequence[Inject],
    waiting: Mapping[str, set[str]],
    words: Mapping[str, list[str]],
    refused: set[str],
) -> Iterator[Said]:
    for command in commands:
        silent = [f"{who} did not answer" for who in sorted(waiting[command.id])]
        text = "; ".join([*words[command.id], *silent])
        ok = command.id not in refused and not silent
        yield Said(ok, f"{command.fault.name} ({command.fault.kind}): {text}")


def _meant(job: JobState, fault: AnyFault) -> list[str]:
    """Return the names of the participants that must answer."""
    if not isinstance(fault, Fault):
        return ["the supervisor"]
    rank = getattr(fault, "rank", None)
    ranks = [r.rank for r in job.groups[fault.group].ranks]
    return [f"group {fault.group} rank {r}" for r in ranks if rank in (None, r)]


def _check_kind(kind: str) -> None:
    if kind not in MODELS:
        raise OperatorError(f"no kind {kind!r}; the kinds: {', '.join(MODELS)}, any")


def _entry(kind: str, name: str, step: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of a plan: the given options, and defaults for the other required fields."""
    fields = MODELS[kind].model_fields
    if strange := [f"--{name.replace('_', '-')}" for name in options if name not in fields]:
        raise OperatorError(f"a {kind} has no {', '.join(strange)}; leave it out")
    defaults = {**_DEFAULTS, "seconds": _SECONDS.get(kind)}
    needed = {n: v for n, v in defaults.items() if n in fields and fields[n].is_required()}
    if kind == "one_sided":  # if several ranks receive it, only one must carry it out
        needed["rank"] = 0
    return {"name": name, "kind": kind, "step": step, **needed, **options}


def _plan(job: JobState, entries: list[dict[str, Any]]) -> FaultPlan:
    try:
        plan = FaultPlan.model_validate({"faults": entries})
    except ValidationError as error:
        raise OperatorError(first_problem(error)) from None
    for fault in plan.faults:
        if not isinstance(fault, Fault):
            continue
        if fault.group not in job.groups:
            raise OperatorError(f"no group {fault.group!r}; the groups: {listed(job.groups)}")
        if not _meant(job, fault):
            raise OperatorError(f"no rank {getattr(fault, 'rank', 0)} in group {fault.group}")
    return plan
