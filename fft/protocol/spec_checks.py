"""Static checks of a spec: names, reachable states, conflicting rows, unanswered events.

Pure. Each problem is a place in the file, and a sentence that names the problem and the fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from fft.protocol.scopes import Place, Problem, scope_problems
from fft.protocol.spec import FsmSpec, Leaf, MachineSpec, Part, Phase, Row, SubState, without_not
from fft.protocol.table import EXIT_ROWS
from fft.protocol.timeouts import ARGUMENTS, OUTSIDE_TIMES
from fft.protocol.vocabulary import ENGINE, Vocabulary
from fft.util.names import unknown


def check_spec(spec: MachineSpec, words: Vocabulary = ENGINE) -> list[Problem]:
    """Return every problem of the spec; empty if it can be run.

    Args:
        words: The names that the spec may use.
    """
    problems = list(_names(spec, words))
    if problems:
        return problems  # the other checks assume that all names are known
    return [
        *_fights(spec),
        *_silences(spec, words),
        *_unused(spec, words),
        *_reach(spec),
        *_deferrals(spec, words),
    ]


def _row_lists(spec: MachineSpec) -> Iterator[tuple[Place, str, list[Row]]]:
    """Yield (place, event, rows) for the whole file; exit rows have the event ``exit``."""
    for place, owner in spec.row_owners():
        for event, rows in owner.on.items():
            yield (*place, "on", event), event, rows
        if isinstance(owner, SubState) and owner.exit:
            yield (*place, "exit"), EXIT_ROWS, owner.exit


def _names(spec: MachineSpec, words: Vocabulary) -> Iterator[Problem]:
    events = words.events | {f"timer.{name}" for name in spec.timers}
    if spec.initial not in spec.leaves:
        yield ("initial",), unknown("state", spec.initial, spec.leaves)
    for name in (name for name in spec.states if "." in name):
        yield ("states", name), "a dot leads to a sub-state; give the state another name"
    for home, owner in spec.row_owners():
        for i, timer in enumerate(getattr(owner, "timers", ())):
            if timer not in spec.timers:
                yield (*home, "timers", i), unknown("timer", timer, spec.timers)
    for place, event, rows in _row_lists(spec):
        if event != EXIT_ROWS and event not in events:
            yield place, unknown("event", event, events)
        for i, row in enumerate(rows):
            yield from _row_names(spec, words, (*place, i), row)
    yield from _sequences(spec, words)
    for place, silent in _silent_lists(spec):
        for event in silent:
            if event not in events:
                yield (*place, event), unknown("event", event, events)
    for name, state in spec.states.items():
        if state.role not in words.roles:
            yield ("states", name, "role"), unknown("role", state.role, words.roles)
        for title, phase in state.phases.items():
            yield from _phase(spec, words, ("states", name, "phases", title), title, phase)
    yield from _timers(spec)
    if isinstance(spec, FsmSpec):
        yield from scope_problems(spec.parameter_groups, spec.scopes, spec.flow)
        yield from _bound(spec)


def _phase(
    spec: MachineSpec, known: Vocabulary, place: Place, name: str, phase: Phase
) -> Iterator[Problem]:
    owners = [state for state in spec.states.values() if name in state.phases]
    if name in spec.states or "." in name or len(owners) > 1:
        yield place, f"{name} is another state, or has a dot; give the phase a name of its own"
    if phase.role not in known.roles:
        yield (*place, "role"), unknown("role", phase.role, known.roles)
    for i, guard in enumerate(phase.guard):
        yield from _name(spec, known, (*place, "guard", i), without_not(guard)[0], known.guards)


def _bound(spec: FsmSpec) -> Iterator[Problem]:
    """A spec needs a bound if one of its scopes is bounded, and must not have one otherwise."""
    bounded = [name for name, scope in spec.scopes.items() if scope.sync == "bounded"]
    if bounded and spec.policies.bound is None:
        text = f"scope {bounded[0]!r} is bounded, and nothing says by what: give policies a bound"
        yield ("policies",), f"{text}, in steps of the job"
    if not bounded and spec.policies.bound is not None:
        yield ("policies", "bound"), "no scope has sync: bounded; remove the bound, or say so there"


def _timers(spec: MachineSpec) -> Iterator[Problem]:
    """Rules name known times and are not circular, because no times could satisfy a circle."""
    others: dict[str, set[str]] = {}
    for name, timer in spec.timers.items():
        if timer.follows is not None and timer.follows not in ARGUMENTS:
            yield ("timers", name, "follows"), unknown("argument", timer.follows, ARGUMENTS)
        for i, rule in enumerate(timer.at_least):
            known = {*spec.timers, *OUTSIDE_TIMES}
            if rule.of not in known:
                yield ("timers", name, "at_least", i, "of"), unknown("time", rule.of, known)
        others[name] = {rule.of for rule in timer.at_least}
    for name in spec.timers:
        if name in _closure(others, others[name]):
            text = f"the rules of {name} lead back to it: one of them must go"
            yield ("timers", name, "at_least"), text


def _row_names(spec: MachineSpec, words: Vocabulary, place: Place, row: Row) -> Iterator[Problem]:
    if row.to in spec.states and row.to not in spec.leaves:
        inner = ", ".join(f"{row.to}.{sub}" for sub in spec.states[row.to].states)
        yield (*place, "to"), f"{row.to} has sub-states; say which one: {inner}"
    elif row.to is not None and row.to not in spec.leaves:
        yield (*place, "to"), unknown("state", row.to, spec.leaves)
    yield from _part_names(spec, words, place, row, words.effects | spec.sequences.keys())


def _part_names(
    spec: MachineSpec, words: Vocabulary, place: Place, part: Part, effects: Set[str]
) -> Iterator[Problem]:
    for i, name in enumerate(part.guard):
        at = (*place, "guard", i)
        yield from _name(spec, words, at, without_not(name)[0], words.guards)
    for i, name in enumerate(part.effects):
        yield from _name(spec, words, (*place, "effects", i), name, effects)


def _name(
    spec: MachineSpec, words: Vocabulary, place: Place, name: str, known: Set[str]
) -> Iterator[Problem]:
    """One name, with its argument if it takes one."""
    word, _, argument = name.partition(" ")
    given, _, factor = argument.partition(" ")
    values = words.arguments.get(word, frozenset({""}))
    values = spec.timers.keys() if values is None else values
    if word not in known:
        yield place, unknown("guard" if known is words.guards else "effect", word, known)
    elif given not in values:
        yield place, unknown(f"argument of {word}", given, values)
    elif factor and (word != "arm" or not factor.replace(".", "", 1).strip("0").isdigit()):
        yield place, f"{argument!r}: {word} takes a name, and arm a factor above 0 after it"


def _sequences(spec: MachineSpec, words: Vocabulary) -> Iterator[Problem]:
    used = {n for _, _, rows in _row_lists(spec) for row in rows for n in row.effects}
    for name, parts in spec.sequences.items():
        place: Place = ("sequences", name)
        if name in words.effects:
            yield place, f"there is an effect {name!r}; give the sequence another name"
        if name not in used:
            yield place, f"no row has the sequence {name!r}; remove it"
        for i, part in enumerate(parts):
            if isinstance(part, Part):
                yield from _part_names(spec, words, (*place, i), part, words.effects)
            else:
                yield from _name(spec, words, (*place, i), part, words.effects)


def _silent_lists(spec: MachineSpec) -> Iterator[tuple[Place, dict[str, str]]]:
    for place, owner in spec.row_owners():
        yield (*place, "ignore"), owner.ignore
        if isinstance(owner, SubState):
            yield (*place, "defer"), owner.defer


def _fights(spec: MachineSpec) -> Iterator[Problem]:
    """Two rows conflict if the earlier one holds whenever the later one does."""
    for place, event, rows in _row_lists(spec):
        for j, later in enumerate(rows):
            for i, earlier in enumerate(rows[:j]):
                if set(earlier.guard) <= set(later.guard):
                    yield (
                        (*place, j),
                        f"rows {i} and {j} fight: row {i} is taken whenever row {j} could be; "
                        "put the one with more guards first, or remove one",
                    )
        if event == EXIT_ROWS:
            for i, row in enumerate(rows):
                if not row.guard:
                    yield (*place, i), "an exit row needs a guard, or the state is never left alone"
    for place, owner in spec.row_owners():
        if not isinstance(owner, SubState):
            continue
        named = [set(owner.on), set(owner.ignore), set(owner.defer)]
        for event in sorted(owner.named):
            if sum(event in group for group in named) > 1:
                yield place, f"event {event!r} stands twice among on, ignore and defer; keep one"


def _place(leaf: Leaf) -> Place:
    name, _, inner = leaf.name.partition(".")
    return ("states", name, "states", inner) if inner else ("states", name)


def _silences(spec: MachineSpec, words: Vocabulary) -> Iterator[Problem]:
    for name, leaf in spec.leaves.items():
        state = leaf.state
        if state.terminal:
            if leaf.on or leaf.exit or leaf.defer or leaf.timers or state.states:
                yield _place(leaf), "a terminal state has no rows, deferrals, timers or sub-states"
            continue
        timers = [*leaf.timers, *spec.lasting]
        expected = words.answered | {f"timer.{timer}" for timer in timers}
        for event in sorted(expected - leaf.named):
            yield (
                _place(leaf),
                f"event {event!r} has no way out of {name}: give it a row under `on`, or name it "
                "under `ignore` or `defer` with the reason",
            )


def _unused(spec: MachineSpec, words: Vocabulary) -> Iterator[Problem]:
    """Where a vocabulary serves a single spec, every name must be used by a row."""
    if not words.all_used:
        return
    lists = list(_row_lists(spec))
    rows = [row for _, _, found in lists for row in found]
    for kind, known, used in (
        ("event", words.events, {event for _, event, _ in lists}),
        ("guard", words.guards, {without_not(name)[0] for row in rows for name in row.guard}),
        ("effect", words.effects, {name for row in rows for name in row.effects}),
    ):
        for name in sorted(known - used):
            yield ("states",), f"no row has the {kind} {name!r}; give it one"


def successors(spec: MachineSpec, name: str) -> set[str]:
    """Return the states that one row leads to from ``name``."""
    leaf = spec.leaves[name]
    rows = [row for rows in leaf.on.values() for row in rows] + leaf.exit
    return {row.to for row in rows if row.to is not None}


def _closure(edges: dict[str, set[str]], start: set[str]) -> set[str]:
    seen, todo = set(start), list(start)
    while todo:
        for nxt in edges.get(todo.pop(), set()) - seen:
            seen.add(nxt)
            todo.append(nxt)
    return seen


def _reach(spec: MachineSpec) -> Iterator[Problem]:
    forward = {name: successors(spec, name) for name in spec.leaves}
    for name in spec.leaves.keys() - _closure(forward, {spec.initial}):
        yield (
            _place(spec.leaves[name]),
            f"state {name} cannot be reached from {spec.initial}: add a row that leads to it, or "
            "remove it",
        )
    backward: dict[str, set[str]] = {name: set() for name in spec.leaves}
    for source, targets in forward.items():
        for target in targets:
            backward[target].add(source)
    ends = {name for name, leaf in spec.leaves.items() if leaf.state.terminal}
    if not ends:
        yield ("states",), "there is no terminal state; mark one with `role: terminal`"
    for name in spec.leaves.keys() - _closure(backward, ends) if ends else ():
        yield (
            _place(spec.leaves[name]),
            f"no way leads out of {name} to a terminal state; add a row",
        )


def _deferrals(spec: MachineSpec, words: Vocabulary) -> Iterator[Problem]:
    """A deferred event must have a row in some later state."""
    edges = {name: successors(spec, name) for name in spec.leaves}
    for name, leaf in spec.leaves.items():
        for event in leaf.defer:
            if not words.may_defer:
                text = f"nobody tries {event!r} again; give it a row, or a reason to ignore it"
                yield (*_place(leaf), "defer", event), text
            later = _closure(edges, edges[name])
            if not any(event in spec.leaves[n].on for n in later):
                yield (
                    (*_place(leaf), "defer", event),
                    f"event {event!r} is deferred, but no state after {name} has a row for it",
                )
