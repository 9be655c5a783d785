"""Diagrams of a spec's machine or scopes, as Mermaid or Graphviz DOT, and one state as text. Pure.

The diagram of the scopes shows which scope commits which parameters, and what flows between them.
"""

from __future__ import annotations

from collections.abc import Iterator

from fft.errors import FftError
from fft.protocol.spec import FsmSpec, MachineSpec, Part, StateSpec, SubState
from fft.util.names import unknown


def edges(spec: MachineSpec) -> Iterator[tuple[str, str, str]]:
    """Yield (from, to, label) for every row that changes the state.

    Rows of ``common`` apply in every state and would clutter the diagram, so they are drawn once,
    from the pseudo state ``*``. Rows that a state has for all its sub-states start at the state.
    """
    for place, owner in spec.row_owners():
        source = ".".join(place[1::2]) or "*"
        last = owner.exit if isinstance(owner, SubState) else []
        for event, rows in [*owner.on.items(), ("", last)]:
            for row in rows:
                if row.to is not None:
                    yield source, row.to, _label(event, row.guard)


def _label(event: str, guards: list[str]) -> str:
    condition = f"[{' & '.join(guards)}]" if guards else ""
    return f"{event} {condition}".strip()


def _merged(spec: MachineSpec) -> dict[tuple[str, str], list[str]]:
    merged: dict[tuple[str, str], list[str]] = {}
    for source, target, label in edges(spec):
        labels = merged.setdefault((source, target), [])
        if label not in labels:
            labels.append(label)
    return merged


def in_mermaid(name: str) -> str:
    """Return a state's name for a Mermaid diagram, whose names have no dots."""
    return "any" if name == "*" else name.replace(".", "_")


def _titles(name: str, state: StateSpec) -> list[str]:
    """Return the names of a state: its own, and those of its phases with their guards."""
    return [name, *(_label(phase, known.guard) for phase, known in state.phases.items())]


def to_mermaid(spec: MachineSpec) -> str:
    """Return a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {in_mermaid(spec.initial)}"]
    for name, state in spec.states.items():
        titles = "<br/>".join(_titles(name, state))
        if state.states:
            inner = [
                f'        state "{sub}" as {in_mermaid(f"{name}.{sub}")}' for sub in state.states
            ]
            lines += [f'    state "{titles}" as {name} {{', *inner, "    }"]
        elif state.phases:
            lines.append(f'    state "{titles}" as {name}')
    for (source, target), labels in _merged(spec).items():
        ends = f"{in_mermaid(source)} --> {in_mermaid(target)}"
        lines.append(f"    {ends}: {'<br/>'.join(labels)}")
    lines += [f"    {name} --> [*]" for name, state in spec.states.items() if state.terminal]
    lines.append("    any: any state")
    return "\n".join(lines) + "\n"


def to_dot(spec: MachineSpec) -> str:
    """Return a Graphviz digraph of the machine."""
    lines = [f'digraph "{spec.name}" {{', "  rankdir=TB; node [shape=box, style=rounded];"]
    for name, state in spec.states.items():
        shape = ", peripheries=2" if state.terminal else ""
        titles = "\\n".join(_titles(name, state))
        lines.append(f'  "{name}" [label="{titles}"{shape}];')
        lines += [f'  "{name}.{sub}" [label="{name}\\n{sub}"];' for sub in state.states]
    lines.append('  "*" [label="any state", style=dashed];')
    for (source, target), labels in _merged(spec).items():
        text = "\\n".join(labels).replace('"', '\\"')
        lines.append(f'  "{source}" -> "{target}" [label="{text}"];')
    lines.append("}")
    return "\n".join(lines) + "\n"


def reactions(spec: MachineSpec, name: str) -> Iterator[str]:
    """Yield all that applies to a state, as lines: timers, rows with those of its outer state and
    of ``common``, and the events that it ignores or defers. Sequences are written out.

    Raises:
        FftError: There is no such state.
    """
    if name not in spec.names:
        raise FftError(unknown("state", name, spec.names))
    leaf = spec.names[name]
    yield f"{leaf.name} ({leaf.state.role})"
    for title, phase in leaf.state.phases.items():
        yield f"  {_label(leaf.called(title), phase.guard)} ({phase.role})"
    if leaf.timers:
        yield f"  timers: {', '.join(leaf.timers)}"
    for event, rows in [*leaf.on.items(), ("after every event", leaf.exit)]:
        if rows:
            yield f"  {event}"
        for row in rows:
            where, why = f" → {row.to}" if row.to else "", f" ({row.why})" if row.why else ""
            yield f"    {_label('', row.guard) or 'else'}{where}{why}"
            for part in (p for effect in row.effects for p in spec.sequences.get(effect, [effect])):
                known = part if isinstance(part, Part) else Part(effects=[part])
                for each in known.effects:
                    yield "      " + " ".join(filter(None, [_label("", known.guard), each]))
    for verb, events in (("ignores", leaf.ignore), ("defers", leaf.defer)):
        for event, why in events.items():
            yield f"  {verb} {event}: {why}"


def _scopes(spec: FsmSpec) -> Iterator[tuple[str, list[str]]]:
    """Each scope, and the lines that describe it."""
    who = {"job": "all ranks", "group": "each group alone", "stage": "one rank of all groups"}
    for name, scope in spec.scopes.items():
        sync = scope.sync.replace("_", " ")
        yield name, [name, f"{who[scope.members]}, {sync}", f"commits {', '.join(scope.commits)}"]


def _flows(spec: FsmSpec) -> Iterator[tuple[str, str, str]]:
    """Yield (from, to, label) for each dependency between two scopes."""
    for edge in spec.flow:
        yield edge.source, edge.to, f"at most {edge.ahead} ahead"
    inner = next((name for name, scope in spec.scopes.items() if scope.members == "group"), None)
    for name, scope in spec.scopes.items():
        if inner is not None and scope.members == "job":
            yield inner, name, "after some commits"


def scopes_to_mermaid(spec: FsmSpec) -> str:
    """Return a Mermaid flow chart of the scopes."""
    lines = ["flowchart LR"]
    lines += [f'    {name}["{"<br/>".join(told)}"]' for name, told in _scopes(spec)]
    lines += [f'    {first} -->|"{label}"| {then}' for first, then, label in _flows(spec)]
    return "\n".join(lines) + "\n"


def scopes_to_dot(spec: FsmSpec) -> str:
    """Return a Graphviz digraph of the scopes."""
    lines = [f'digraph "{spec.name}" {{', "  rankdir=LR; node [shape=box];"]
    for name, told in _scopes(spec):
        text = "\\n".join(told)
        lines.append(f'  "{name}" [label="{text}"];')
    lines += [f'  "{first}" -> "{then}" [label="{label}"];' for first, then, label in _flows(spec)]
    return "\n".join([*lines, "}"]) + "\n"
