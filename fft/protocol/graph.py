"""Diagrams of a spec, drawn from the spec alone: Mermaid and Graphviz DOT. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fft.protocol.spec import FsmSpec
from fft.protocol.table import EXIT_ROWS


def edges(spec: FsmSpec) -> Iterator[tuple[str, str, str]]:
    """(from, to, label) for every row that changes the state.

    Rows of ``common`` hold in every state and would hide the picture; they are drawn once, from
    the pseudo state ``*``.
    """
    for event, rows in spec.common.on.items():
        for row in rows:
            if row.to is not None:
                yield "*", row.to, _label(event, row.guard)
    for name, state in spec.states.items():
        for event, rows in [*state.on.items(), (EXIT_ROWS, state.exit)]:
            for row in rows:
                if row.to is not None:
                    yield name, row.to, _label("" if event == EXIT_ROWS else event, row.guard)


def _label(event: str, guards: list[str]) -> str:
    condition = f"[{' & '.join(guards)}]" if guards else ""
    return f"{event} {condition}".strip()


def _merged(spec: FsmSpec) -> dict[tuple[str, str], list[str]]:
    merged: dict[tuple[str, str], list[str]] = {}
    for source, target, label in edges(spec):
        labels = merged.setdefault((source, target), [])
        if label not in labels:
            labels.append(label)
    return merged


def to_mermaid(spec: FsmSpec) -> str:
    """A Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {spec.initial}"]
    for (source, target), labels in _merged(spec).items():
        start = "any" if source == "*" else source
        lines.append(f"    {start} --> {target}: {'<br/>'.join(labels)}")
    lines += [f"    {name} --> [*]" for name, state in spec.states.items() if state.terminal]
    lines.append("    any: any state")
    return "\n".join(lines) + "\n"


def to_dot(spec: FsmSpec) -> str:
    """A Graphviz digraph."""
    lines = [f'digraph "{spec.name}" {{', "  rankdir=TB; node [shape=box, style=rounded];"]
    for name, state in spec.states.items():
        shape = ", peripheries=2" if state.terminal else ""
        lines.append(f'  "{name}" [label="{name}"{shape}];')
    lines.append('  "*" [label="any state", style=dashed];')
    for (source, target), labels in _merged(spec).items():
        text = "\\n".join(labels).replace('"', '\\"')
        lines.append(f'  "{source}" -> "{target}" [label="{text}"];')
    lines.append("}")
    return "\n".join(lines) + "\n"
