"""Fault plans: faults injected on purpose, at exact places of a training run.

A plan is a YAML or JSON file with a list ``faults:``. `load_plan` reads and validates it
(pure; needs no torch) and `Injector` carries it out inside one participant: it raises, kills
its own process or sends itself a SIGTERM, and touches nothing else. Each entry happens once
per job, however often a process starts again: the caller's ``claim`` decides that.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Protocol, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fft.errors import FftError

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

Claim = Callable[[str], bool]


class FaultPlanError(FftError):
    """A fault plan that cannot be used: names the file, the place and the mend."""


class InjectedFault(RuntimeError):
    """What an injected exception raises; also the description handed to ``on_inject``."""

    def __init__(
        self, name: str, kind: str, phase: str, *, group: str, rank: int, step: int
    ) -> None:
        super().__init__(f"injected fault {name!r} ({kind} at {phase}, step {step})")
        self.name = name
        self.kind = kind
        self.phase = phase
        self.group = group
        self.rank = rank
        self.step = step


# --- the plan --------------------------------------------------------------------------


def _group_name(value: object) -> object:
    """Groups are named "0", "1" …; a plan may write the bare number."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number else value


class Fault(BaseModel):
    """What all kinds of faults share. Steps are numbers of steps being attempted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    step: int = Field(ge=0, description="fires in the first txn whose step is at least this")
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
    phase: Phase


class OneSidedFault(Fault):
    """Report the last reduction of the txn as failed here, after it completed elsewhere.

    Without ``rank`` the first rank of the group to get there reports it.
    """

    kind: Literal["one_sided"]
    rank: int | None = Field(default=None, ge=0)


class KillFault(Fault):
    """SIGKILL to oneself; without ``rank`` every rank of the group does it."""

    kind: Literal["kill"]
    rank: int | None = Field(default=None, ge=0)
    phase: Phase


class DrainFault(Fault):
    """SIGTERM to every rank of the group; the supervisor may start the group again later."""

    kind: Literal["drain"]
    return_after_steps: int | None = Field(
        default=None, ge=1, description="start again after this many further steps of the job"
    )


AnyFault = Annotated[
    ExceptionFault | OneSidedFault | KillFault | DrainFault, Field(discriminator="kind")
]


class FaultPlan(BaseModel):
    """A validated fault plan. An empty list of faults is a plan."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    faults: list[AnyFault]


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys in silence; a plan must not lose one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_plan(
    path: str | os.PathLike[str], groups: int | None = None, ranks: int | None = None
) -> FaultPlan:
    """Read and validate the plan at ``path`` (YAML; JSON is a part of it).

    With ``groups`` and ``ranks`` (ranks per group) it is also checked against the size of
    the job. Raises FaultPlanError naming the file, the place and the mend.
    """
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FaultPlanError(f"{source}: cannot read the fault plan: {error}") from error
    try:
        # a SafeLoader subclass: builds plain values only
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise FaultPlanError(f"{source}: {_yaml_problem(error)}") from error
    if not isinstance(data, dict):
        raise FaultPlanError(
            f"{source}: a fault plan is a mapping with one key; begin it with `faults:`"
        )
    try:
        plan = FaultPlan.model_validate(data)
    except ValidationError as error:
        raise FaultPlanError(f"{source}: {_first_problem(error)}") from error
    _check_places(source, plan, groups, ranks)
    return plan


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{place}not readable as YAML: {problem}"


def _first_problem(error: ValidationError) -> str:
    """The first problem as ``place: what is wrong; the mend``."""
    problems = error.errors(include_url=False)
    problem = problems[0]
    kinds = ("exception", "one_sided", "kill", "drain")
    parts: list[str] = []
    for at, item in enumerate(problem["loc"]):
        is_tag = item in kinds and at == 2  # pydantic puts the union's tag into the place
        if isinstance(item, int):
            parts[-1] += f"[{item}]"
        elif not is_tag:
            parts.append(str(item))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    what, got = problem["type"], problem.get("input")
    if what == "missing":
        text = f"is missing; add `{parts[-1]}:`"
    elif what == "extra_forbidden":
        text = "is not a key of this entry; take it out or correct its spelling"
    elif what in {"union_tag_invalid", "union_tag_not_found"}:
        text = f"needs a `kind`, one of {', '.join(kinds)}"
    else:
        text = f"{problem['msg']} (found {got!r}); correct the value"
    return f"{'.'.join(parts)}: {text}{more}"


def _check_places(source: str, plan: FaultPlan, groups: int | None, ranks: int | None) -> None:
    """What one entry cannot see for itself: unique names, and groups and ranks that exist."""
    seen: dict[str, int] = {}

    def refuse(index: int, key: str, text: str) -> NoReturn:
        raise FaultPlanError(f"{source}: faults[{index}].{key}: {text}")

    for index, fault in enumerate(plan.faults):
        if fault.name in seen:
            first = seen[fault.name]
            refuse(index, "name", f"{fault.name!r} is faults[{first}]'s; give each its own name")
        seen[fault.name] = index
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


# --- the injector ----------------------------------------------------------------------


class _Removable(Protocol):
    def remove(self) -> None: ...


class Injector:
    """Carries a plan out inside one participant.

    ``claim(key)`` returns True to exactly the first caller ever in the job, restarts
    included. ``on_inject`` is called before the fault happens, so that it can be traced.
    ``drain`` is what a drain does here; by default the process sends itself a SIGTERM.

    Call it from the training thread only. All conditions are equal on all ranks of a group,
    so a fault for the whole group is armed on all of them in the same txn.
    """

    def __init__(
        self,
        plan: FaultPlan,
        group: str,
        rank: int,
        ranks: int,
        claim: Claim,
        on_inject: Callable[[InjectedFault], None],
        drain: Callable[[], None] | None = None,
    ) -> None:
        self._mine: list[Fault] = [
            f for f in plan.faults if f.group == group and _concerns(f, rank)
        ]
        self._group = group
        self._rank = rank
        self._ranks = ranks
        self._claim = claim
        self._on_inject = on_inject
        self._drain = drain or _terminate_oneself
        self._armed: list[Fault] = []
        self._held: set[str] = set()
        self._step = 0
        self._hooks: list[_Removable] = []

    @classmethod
    def from_env(
        cls,
        claim: Claim,
        on_inject: Callable[[InjectedFault], None],
        drain: Callable[[], None] | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> Injector | None:
        """The injector of the participant that the environment names, None without a plan.

        Reads FFT_FAULTS, REPLICA_GROUP_ID, RANK, WORLD_SIZE and NUM_REPLICA_GROUPS. Raises
        FaultPlanError.
        """
        path = env.get("FFT_FAULTS")
        if not path:
            return None
        ranks = int(env.get("WORLD_SIZE", "1"))
        groups = int(env["NUM_REPLICA_GROUPS"]) if "NUM_REPLICA_GROUPS" in env else None
        plan = load_plan(path, groups, ranks)
        group, rank = env.get("REPLICA_GROUP_ID", "0"), int(env.get("RANK", "0"))
        return cls(plan, group, rank, ranks, claim, on_inject, drain)

    def begin(self, step: int, groups: int, commits_in_epoch: int) -> None:
        """A txn begins that attempts ``step`` in an epoch of ``groups`` groups."""
        self._step = step
        self._armed = []
        for fault in list(self._mine):
            if fault.name in self._held:
                self._armed.append(fault)
            elif fault.due(step, groups, commits_in_epoch):
                # A whole group's fault is claimed when armed, not when it fires: a mate that
                # fires first ends this process too, which then must not do it again.
                if _whole_group(fault):
                    if not self._claim(self._key(fault)):
                        self._mine.remove(fault)
                        continue
                    self._held.add(fault.name)
                self._armed.append(fault)

    def at(self, phase: str) -> None:
        """The txn reached ``phase``: do what is planned there, if anything.

        Raises InjectedFault (an exception), does not return (a kill), or returns after
        asking for the drain.
        """
        for fault in list(self._armed):
            place = "vote" if isinstance(fault, DrainFault) else getattr(fault, "phase", None)
            if place != phase or not self._take(fault):
                continue
            injected = self._announce(fault, phase)
            if isinstance(fault, KillFault):
                os.kill(os.getpid(), signal.SIGKILL)
            elif isinstance(fault, DrainFault):
                self._drain()
            else:
                raise injected

    def fails_after_allreduce(self) -> bool:
        """Whether to report the last reduction of the txn as failed.

        To be asked once all reductions of the txn were waited for and have succeeded.
        """
        for fault in list(self._armed):
            if isinstance(fault, OneSidedFault) and self._take(fault):
                self._announce(fault, "after_allreduce")
                return True
        return False

    def attach(self, model: Any) -> None:
        """Hook a middle submodule of a torch ``model`` (FSDP2 too) for forward and backward.

        Does nothing unless the plan has such a fault for this participant. `detach` undoes it.
        """
        phases = {getattr(fault, "phase", None) for fault in self._mine}
        target = _middle_module(model)
        if "forward" in phases:
            hook = target.register_forward_pre_hook(lambda _module, _args: self.at("forward"))
            self._hooks.append(hook)
        if "backward" in phases:
            hook = target.register_forward_hook(lambda _module, _args, out: self._watch(out))
            self._hooks.append(hook)

    def detach(self) -> None:
        """Take all hooks off the models."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _watch(self, output: Any) -> None:
        """Fire when the gradient of a middle output is there: halfway through backward."""
        if not any(getattr(fault, "phase", None) == "backward" for fault in self._armed):
            return
        tensor = next(_tensors(output), None)
        if tensor is not None:
            tensor.register_hook(lambda _grad: self.at("backward"))

    def _key(self, fault: Fault, rank: int | None = None) -> str:
        return f"faults/{fault.name}/{fault.group}/{self._rank if rank is None else rank}"

    def _take(self, fault: Fault) -> bool:
        """Whether it is for us to fire now; either way we are done with it afterwards."""
        self._armed.remove(fault)
        self._mine.remove(fault)
        if _whole_group(fault):
            self._held.discard(fault.name)
            for mate in range(self._ranks):  # one that has not begun this txn shall not fire
                if mate != self._rank:
                    self._claim(self._key(fault, mate))
            return True
        anyone = getattr(fault, "rank", None) is None
        return self._claim(f"faults/{fault.name}/{fault.group}" if anyone else self._key(fault))

    def _announce(self, fault: Any, phase: str) -> InjectedFault:
        injected = InjectedFault(
            fault.name, fault.kind, phase, group=self._group, rank=self._rank, step=self._step
        )
        self._on_inject(injected)
        return injected


def _whole_group(fault: Fault) -> bool:
    is_group_kill = isinstance(fault, KillFault) and fault.rank is None
    return is_group_kill or isinstance(fault, DrainFault)


def _concerns(fault: Fault, rank: int) -> bool:
    return getattr(fault, "rank", None) in (None, rank)


def _terminate_oneself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _middle_module(model: Any) -> Any:
    """The middle of the longest stack of blocks, else of the children, else the model itself.

    Known by class name, so that this module needs no torch; ``fully_shard`` prefixes the name.
    A ModuleList comes first: it is never called itself, but its members are.
    """
    for container in ("ModuleList", "Sequential"):
        stacks = [m for m in model.modules() if type(m).__name__.endswith(container) and len(m)]
        if stacks:
            blocks = list(max(stacks, key=len).children())
            return blocks[len(blocks) // 2]
    children = list(model.children())
    return children[len(children) // 2] if children else model


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors of a (nested) module output that take part in the backward pass."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif getattr(value, "requires_grad", False):
        yield value
