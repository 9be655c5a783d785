"""Fault plans: faults that are injected on purpose at exact places of a training run.

A plan is a YAML or JSON file with a list ``faults:``; ``load_plan`` reads and validates it. ``fft
dev inject`` sends the same data. Pure except for reading the file, and free of torch.
``fft.train.guard.injector`` injects the faults of participants, the supervisor those of its
services.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fft.errors import ConfigError

Phase = Literal[
    "forward",
    "backward",
    "before_allreduce",
    "during_allreduce",
    "after_allreduce",
    "vote",
    "after_vote",
    "apply",
]
PHASES: tuple[str, ...] = get_args(Phase)
MODEL_PHASES = frozenset({"forward", "backward"})
Place = Literal[Phase, "next"]
"""``next``: the phase that comes first, except ``apply``, which loses the state and must be
named."""

LONGEST_S = 3600.0
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]


# --- the plan --------------------------------------------------------------------------


def _group_name(value: object) -> object:
    """Convert a bare number to the name of a group, which is a string."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else value


class Entry(BaseModel):
    """Fields of all faults. A step is the number of the step being attempted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    step: int = Field(ge=0, description="fires in the first txn whose step is at least this")


class Fault(Entry):
    """A fault of one group, or of one rank of it."""

    group: Annotated[str, BeforeValidator(_group_name)]
    with_groups: int | None = Field(
        default=None, ge=1, description="only while the epoch has at least this many groups"
    )
    settled_steps: int | None = Field(
        default=None, ge=0, description="and at least this many commits since the epoch began"
    )

    def due(self, step: int, groups: int, commits_in_epoch: int) -> bool:
        """Whether the conditions hold for the txn that attempts ``step``."""
        return (
            step >= self.step
            and groups >= (self.with_groups or 0)
            and commits_in_epoch >= (self.settled_steps or 0)
        )


class ExceptionFault(Fault):
    """Raise `InjectedFault` at one phase of the txn on one rank."""

    kind: Literal["exception"]
    rank: int = Field(ge=0)
    phase: Place


class OneSidedFault(Fault):
    """Report the last reduction of the txn as failed here, after it completed elsewhere.

    Without ``rank`` the first rank of the group to get there reports it.
    """

    kind: Literal["one_sided"]
    rank: int | None = Field(default=None, ge=0)


class KillFault(Fault):
    """A rank sends SIGKILL to itself; without ``rank``, every rank of the group does."""

    kind: Literal["kill"]
    rank: int | None = Field(default=None, ge=0)
    phase: Place


class DrainFault(Fault):
    """Every rank of the group gets SIGTERM; the supervisor may start the group again later."""

    kind: Literal["drain"]
    return_after_steps: int | None = Field(
        default=None, ge=1, description="start again after this many further steps of the job"
    )


class HangFault(Fault):
    """The main thread waits for ``seconds`` outside of any collective.

    With ``holding_gil``, no Python code of the process runs meanwhile, the engine included.
    """

    kind: Literal["hang"]
    rank: int = Field(ge=0)
    phase: Place
    seconds: Seconds
    holding_gil: bool = False


class StopFault(Fault):
    """A rank stops with all its threads (SIGSTOP) and continues after ``seconds``."""

    kind: Literal["stop"]
    rank: int = Field(ge=0)
    phase: Place
    seconds: Seconds


class SlowFault(Fault):
    """A straggler: ``steps`` attempts are delayed by ``seconds`` before their first reduction."""

    kind: Literal["slow"]
    rank: int = Field(ge=0)
    seconds: Seconds
    steps: int = Field(ge=1)


class NetworkCutFault(Fault):
    """The connections of this rank's process groups are closed; they can be rebuilt."""

    kind: Literal["network_cut"]
    rank: int = Field(ge=0)
    phase: Place


class NanGradientFault(Fault):
    """One value of a gradient becomes NaN on this rank: before its reduction, or after the last."""

    kind: Literal["nan_gradient"]
    rank: int = Field(ge=0)
    where: Literal["before", "after"]


class BusLossFault(Fault):
    """This process loses its connections to the bus permanently."""

    kind: Literal["bus_loss"]
    rank: int = Field(ge=0)
    phase: Place


class ServiceFault(Entry):
    """A fault of a service that the supervisor hosts; it happens soon after its step has begun."""


class BusRestartFault(ServiceFault):
    """The server of the bus is replaced by a new, empty one."""

    kind: Literal["bus_restart"]


class LighthouseRestartFault(ServiceFault):
    """torchft's lighthouse is restarted at the same address."""

    kind: Literal["lighthouse_restart"]


RankFault = (
    ExceptionFault
    | OneSidedFault
    | KillFault
    | DrainFault
    | HangFault
    | StopFault
    | SlowFault
    | NetworkCutFault
    | NanGradientFault
    | BusLossFault
)
AnyServiceFault = BusRestartFault | LighthouseRestartFault
AnyFault = Annotated[RankFault | AnyServiceFault, Field(discriminator="kind")]
MODELS: dict[str, type[Entry]] = {
    get_args(model.model_fields["kind"].annotation)[0]: model
    for model in (*get_args(RankFault), BusRestartFault, LighthouseRestartFault)
}
"""Fault models by kind."""


def in_words(fault: AnyFault) -> str:
    """Describe a fault by name, kind, step and place."""
    parts = [fault.kind, f"step {fault.step}"]
    if (phase := getattr(fault, "phase", None)) is not None:
        parts.append(f"phase {phase}")
    if isinstance(fault, Fault):
        rank = getattr(fault, "rank", None)
        parts.append(f"group {fault.group}" + ("" if rank is None else f" rank {rank}"))
    return f"{fault.name} ({', '.join(parts)})"


class FaultPlan(BaseModel):
    """A validated fault plan. An empty list of faults is a plan."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    faults: list[AnyFault]


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses duplicate keys, of which PyYAML would silently keep only the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_plan(
    path: str | os.PathLike[str], groups: int | None = None, ranks: int | None = None
) -> FaultPlan:
    """Read and validate the plan at ``path`` (YAML or JSON).

    Args:
        groups: Number of groups of the job, against which the plan is checked.
        ranks: Number of ranks per group, likewise.

    Raises:
        ConfigError: The plan is invalid; names the file, the place and the fix.
    """
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot read the fault plan: {error}") from error
    try:
        # a SafeLoader subclass: builds plain values only
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {_yaml_problem(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source}: a fault plan is a mapping with one key; begin it with `faults:`"
        )
    try:
        plan = FaultPlan.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_problem(error)}") from error
    _check_places(source, plan, groups, ranks)
    return plan


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{place}not readable as YAML: {problem}"


def first_problem(error: ValidationError) -> str:
    """Return the first problem as ``place: problem; fix``."""
    problems = error.errors(include_url=False)
    problem = problems[0]
    parts: list[str] = []
    for at, item in enumerate(problem["loc"]):
        is_tag = item in MODELS and at == 2  # pydantic puts the union's tag into the place
        if isinstance(item, int):
            parts[-1] += f"[{item}]"
        elif not is_tag:
            parts.append(str(item))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    what, got = problem["type"], problem.get("input")
    if what == "missing":
        text = f"is missing; add `{parts[-1]}:`"
    elif what == "extra_forbidden":
        text = "is not a key of this entry; remove it or correct its spelling"
    elif what in {"union_tag_invalid", "union_tag_not_found"}:
        text = f"needs a `kind`, one of {', '.join(MODELS)}"
    else:
        text = f"{problem['msg']} (found {got!r}); correct the value"
    return f"{'.'.join(parts)}: {text}{more}"


def _check_places(source: str, plan: FaultPlan, groups: int | None, ranks: int | None) -> None:
    """Check unique names, and that the groups and ranks exist."""
    seen: dict[str, int] = {}

    def refuse(index: int, key: str, text: str) -> NoReturn:
        raise ConfigError(f"{source}: faults[{index}].{key}: {text}")

    for index, fault in enumerate(plan.faults):
        if fault.name in seen:
            first = seen[fault.name]
            refuse(index, "name", f"{fault.name!r} is faults[{first}]'s; give each its own name")
        seen[fault.name] = index
        if not isinstance(fault, Fault):
            continue
        names = [str(number) for number in range(groups or 0)]
        if groups is not None and fault.group not in names:
            refuse(
                index, "group", f"no group {fault.group!r} here; the groups are {', '.join(names)}"
            )
        if groups is not None and (fault.with_groups or 0) > groups:
            refuse(index, "with_groups", f"the job has {groups} group(s); use at most {groups}")
        rank = getattr(fault, "rank", None)
        if ranks is not None and rank is not None and rank >= ranks:
            refuse(index, "rank", f"{rank} is no rank of a group of {ranks}; use 0 to {ranks - 1}")
