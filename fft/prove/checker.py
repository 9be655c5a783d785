"""``fft dev check``: explore every reachable state of a model within its bounds, breadth first.

Pure. There are three kinds of properties:

- *Always*: the invariants hold at every step, and no event is refused.
- *Sometimes*: every row of the table is taken, and the outcomes that users wait for happen.
- *Eventually*: from every state, once faults have stopped, every participant decides and the job
  goes on. This is decided on the whole graph: a state from which no sequence of free steps leads to
  a settled state is a violation.

A counterexample is as short as possible.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fft.protocol.flow import slices_due
from fft.protocol.invariants import INVARIANTS, Know
from fft.protocol.main_thread import ThreadTable
from fft.protocol.participant import Participant
from fft.protocol.spec import FsmSpec, Part, SubState
from fft.protocol.state import Local
from fft.prove.bounds import REAL, Bounds, World
from fft.prove.intern import thaw
from fft.prove.model import Model, State, Step
from fft.prove.narrate import narrate as narrate

Progress = Callable[[int, int, int], None]
"""(states found, states expanded, depth)"""


@dataclass(slots=True)
class Violation:
    """A property that does not hold, and the shortest run that shows it."""

    name: str
    text: str
    path: list[tuple[int, str]]
    """(index of the process or -1, action) of each step from the first state."""


@dataclass(slots=True)
class Result:
    """Result of one search."""

    bounds: Bounds
    states: int = 0
    steps: int = 0
    depth: int = 0
    seconds: float = 0.0
    complete: bool = False
    """Every state within the bounds was expanded."""
    checks: Counter[str] = field(default_factory=Counter)
    """Invariant → number of claims checked."""
    rows: set[str] = field(default_factory=set)
    """Places of the rows that were taken."""
    happened: Counter[str] = field(default_factory=Counter)
    """Name of a step → number of times that it was taken."""
    settled: int = 0
    violation: Violation | None = None


class Search:
    """One breadth-first search.

    Args:
        model: The transition system.
        limit: Maximum number of states; a search that reaches it is not complete.
    """

    def __init__(self, model: Model, limit: int | None = None) -> None:
        self.model, self.limit = model, limit
        self.result = Result(model.bounds)
        self._index: dict[State, int] = {}
        self._order: list[State] = []
        self._parent = array("q")
        self._free_from, self._free_to = array("q"), array("q")
        self._settled = bytearray()
        self._weighed: Counter[tuple[int, ...]] = Counter()
        self._kinds: Counter[str] = Counter()
        self._sound: dict[tuple[Any, ...], bool] = {}

    def run(self, progress: Progress | None = None) -> Result:
        """Search until all states are expanded, a property is broken, or the limit is reached."""
        began, result = time.perf_counter(), self.result
        try:
            self._find(self.model.initial(), -1)
            broken = self._expand_all(progress)
            only = self.model.only
            if broken is None and result.complete and (not only or "eventually" in only):
                broken = self._stuck()
            result.violation = broken
        finally:
            result.states = len(self._order)
            result.seconds = time.perf_counter() - began
            taken = self.model.rows
            result.rows = {place for place, row in all_rows(self.model.spec) if id(row) in taken}
            result.settled = sum(self._settled)
            result.happened = self._kinds
            self._count_checks()
        return result

    def _find(self, state: State, parent: int) -> int:
        found = self._index.get(state)
        if found is None:
            found = self._index[state] = len(self._order)
            self._order.append(state)
            self._parent.append(parent)
            self._settled.append(self._is_settled(state))
        return found

    def _expand_all(self, progress: Progress | None) -> Violation | None:
        at, level_ends, depth = 0, 1, 0
        while at < len(self._order):
            if at == level_ends:
                level_ends, depth = len(self._order), depth + 1
            if progress and at % 20_000 == 0:
                progress(len(self._order), at, depth)
            if self.limit is not None and len(self._order) >= self.limit:
                self.result.depth = depth
                return None
            if (broken := self._expand(at)) is not None:
                self.result.depth = depth + 1
                return broken
            at += 1
        self.result.depth, self.result.complete = depth, True
        return None

    def _expand(self, at: int) -> Violation | None:
        canonical = self.model.canonical
        for step in self.model.steps(self._order[at]):
            self.result.steps += 1
            self._kinds[step.what] += 1
            if step.checks:
                self._weighed[step.checks] += 1
            if step.broken is not None and not self.model.is_excused(step):
                return self._violation(at, step.what, step.broken[0])
            to = self._find(canonical(step.state), at)
            if step.free and not self._gives_up(self._order[at], step):
                self._free_from.append(at)
                self._free_to.append(to)
        return None

    def _violation(self, at: int, what: str, name: str) -> Violation:
        """Return the violation of a step, with the names that the run has at that state."""
        path = list(self._path(at))
        state = self.model.initial()
        for who, done in path:
            steps = self.model.steps(state, every=True)
            state = next(s.state for s in steps if (s.who, s.what) == (who, done))
        for step in self.model.steps(state, every=True):
            if step.what == what and step.broken is not None and step.broken[0] == name:
                return Violation(name, step.broken[1], [*path, (step.who, what)])
        raise AssertionError("the step that breaks a property cannot be taken again")

    # --- settled states ---

    def _is_settled(self, state: State) -> bool:
        """Whether every participant has decided, and the job is at its bounds or cannot go on."""
        model = self.model
        nodes = [model.nodes[i] for i in state[: model.size]]
        if any(n.pending or n.inbox or n.mail or n.done >= 0 for n in nodes):
            return False
        key = (state[model.size], *(n.local for n in nodes))
        found = self._sound.get(key)
        if found is None:
            shared = model.shared[state[model.size]]
            found = self._sound[key] = _settled(model.bounds, shared, self._views(state))
        return found

    def _views(self, state: State) -> list[tuple[int, Local]]:
        """Return (index, local state) of the processes that live."""
        model = self.model
        nodes = [model.nodes[i] for i in state[: model.size]]
        return [(i, thaw(model.locals[n.local])) for i, n in enumerate(nodes) if n.local >= 0]

    def _gives_up(self, state: State, step: Step) -> bool:
        """Whether the step ends a process although the job could go on.

        Ending because there is no epoch is not a way out while the live processes could form one.
        Ending because of another scope is not a way out if that scope's register has enough
        commits.
        """
        if step.what not in ("timer quorum", "timer flow_limit"):
            return False
        shared = self.model.shared[state[self.model.size]]
        if step.what == "timer flow_limit":
            node = self.model.node(state, step.who)
            held, at = thaw(self.model.locals[node.local]), {r.scope: r for r in shared.scopes}
            config = self.model.participant(step.who, node.inc).config
            due = slices_due(held, config)
            known = [
                e if e.n > at[e.scope].n else e.after(at[e.scope], config) for e in held.others
            ]
            return all(e.allows(*due) for e in known)
        return shared.bus == "up" and _can_go_on(self.model.bounds, shared, self._views(state))

    def _stuck(self) -> Violation | None:
        """Return the first state from which no free steps lead to a settled one."""
        reach = np.frombuffer(bytes(self._settled), dtype=np.uint8).astype(bool)
        if reach.all():
            return None
        source = np.frombuffer(self._free_from, dtype=np.int64)
        target = np.frombuffer(self._free_to, dtype=np.int64)
        order = np.argsort(target, kind="stable")
        source, starts = source[order], np.searchsorted(target[order], np.arange(len(reach) + 1))
        front = np.flatnonzero(reach)
        while front.size:
            spans = [source[starts[i] : starts[i + 1]] for i in front]
            before = np.unique(np.concatenate(spans)) if spans else front[:0]
            front = before[~reach[before]]
            reach[front] = True
        bad = np.flatnonzero(~reach)
        if not bad.size:
            return None
        first = int(bad[0])
        text = "from here on, without any further fault, the job never settles: " + self.describe(
            self._order[first]
        )
        return Violation("eventually", text, list(self._path(first)))

    def describe(self, state: State) -> str:
        """Describe the state of every participant."""
        model, parts = self.model, []
        for who in range(model.size):
            node = model.node(state, who)
            name = model.peer(who, node.inc)
            if node.local < 0:
                parts.append(f"{name} out")
                continue
            local = thaw(model.locals[node.local])
            parts.append(f"{name} {local.state} at {tuple(local.token)}")
        return ", ".join(parts)

    # --- counterexamples ---

    def _path(self, at: int) -> Iterator[tuple[int, str]]:
        """Yield the steps from the first state to one equal to ``at`` except for group names."""
        chain = [at]
        while self._parent[chain[-1]] >= 0:
            chain.append(self._parent[chain[-1]])
        chain.reverse()
        state = self._order[chain[0]]
        for number in chain[1:]:
            wanted = self._order[number]
            # The names determine which of several quiet steps comes first, so search all of them.
            for step in self.model.steps(state, every=True):
                if not step.broken and self.model.canonical(step.state) == wanted:
                    yield step.who, step.what
                    state = step.state
                    break
            else:
                raise AssertionError("a step of the search cannot be taken again")

    def _count_checks(self) -> None:
        for numbers, times in self._weighed.items():
            for number in numbers:
                for name, claim in self.model.claims[number]:
                    if not isinstance(claim, Know):
                        self.result.checks[name] += times
        for name in INVARIANTS:
            self.result.checks.setdefault(name, 0)


def _settled(bounds: Bounds, shared: Any, views: list[tuple[int, Local]]) -> bool:
    done = all(_at_bound(bounds, s) or _has_done(bounds, s) for _, s in views)
    if shared.bus != "up":  # gone, or no participant needs the bus any more
        return shared.bus == "gone" and done
    inside = [s for _, s in views if s.epoch is not None]
    if any(s.role == "apart" for _, s in views) and not inside:
        return _settled_apart(bounds, shared, views)
    # A participant at its bound would receive a newer record only at its next decision, so the
    # others cannot be required to go on without it.
    unaware = [s for s in inside if _at_bound(bounds, s) and s.head != shared.head]
    if unaware:
        return all(s.vote is None or s in unaware for _, s in views)
    if any(s.role != "training" for s in inside) or not inside:
        return not _can_go_on(bounds, shared, views) and _waits(views)
    return all(s.step >= bounds.commits for s in inside)


def _settled_apart(bounds: Bounds, shared: Any, views: list[tuple[int, Local]]) -> bool:
    """Whether an asynchronous job without a participant in an epoch is settled.

    A group in its local phase has done everything within the bounds; groups that ask to synchronize
    may have to wait for it.
    """
    done = all(s.role == "joining" or _has_done(bounds, s) for _, s in views)
    return done and shared.head is not None and shared.head.step >= bounds.commits


def _has_done(bounds: Bounds, s: Local) -> bool:
    return s.role == "apart" and s.step >= bounds.commits


def _at_bound(bounds: Bounds, s: Local) -> bool:
    return s.role == "training" and s.step >= bounds.commits


def _waits(views: list[tuple[int, Local]]) -> bool:
    """Whether all decisions are known, and all participants wait for groups that may still come."""
    return all(s.vote is None and s.role in ("joining", "healing") for _, s in views)


def _can_go_on(bounds: Bounds, shared: Any, views: list[tuple[int, Local]]) -> bool:
    """Whether enough whole groups live and hold, together, the state of the head."""
    head = shared.head
    by_group: dict[int, list[Local]] = {}
    for i, s in views:
        by_group.setdefault(i // bounds.ranks, []).append(s)
    whole = [ranks for ranks in by_group.values() if len(ranks) == bounds.ranks]
    if head is None:
        return len(whole) >= bounds.least
    return len(whole) >= bounds.least and all(
        any(ranks[r].lineage == head.lineage for ranks in whole) for r in range(bounds.ranks)
    )


def all_rows(spec: FsmSpec) -> Iterator[tuple[str, Part]]:
    """Yield (place, row) for every row of a spec, and every guarded part of a sequence."""
    for place, owner in spec.row_owners():
        at = ".".join(place)
        for event, rows in owner.on.items():
            for i, row in enumerate(rows):
                yield f"{at}.on.{event}.{i}", row
        for i, row in enumerate(owner.exit if isinstance(owner, SubState) else ()):
            yield f"{at}.exit.{i}", row
    for name, parts in spec.sequences.items():
        for i, part in enumerate(parts):
            if isinstance(part, Part):
                yield f"sequences.{name}.{i}", part


def search(
    spec: FsmSpec,
    bounds: Bounds,
    participant: type[Participant] = Participant,
    world: World = REAL,
    limit: int | None = None,
    progress: Progress | None = None,
    only: Collection[str] = (),
    thread: ThreadTable | None = None,
) -> tuple[Search, Result]:
    """Check a spec within bounds.

    Args:
        spec: The table.
        bounds: Bounds of the search.
        participant: The class that runs the core.
        world: Behaviour of bus and main threads.
        limit: Maximum number of states.
        progress: Called from time to time with the progress.
        only: Names of the properties to evaluate; () for all.
        thread: The main threads' table, if not the shipped one.
    """
    made = Search(Model(spec, bounds, participant, world, only, thread), limit)
    return made, made.run(progress)
