"""Guarantee 6 between scopes: the order of the data, from the registers of all of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fft.messages.protocol import Record
from fft.protocol.invariants import Finding
from fft.protocol.scopes import Edge


def judge_flow(registers: Mapping[str, Sequence[Record]], flow: Sequence[Edge]) -> Finding:
    """Whether each scope has kept to what the others had committed.

    That a commit keeps to the versions that it names is judged scope by scope (``data_flow``). Here:
    the versions were committed, and in an order that can be: a step was not committed before one
    that was committed after it.

    Args:
        registers: scope → its records, in order, as far as they are known.
        flow: the spec's.
    """
    found = Finding("flow_order")
    commits = {
        name: [r for r in records if r.kind == "commit"] for name, records in registers.items()
    }
    furthest = {name: max((r.step for r in rs), default=0) for name, rs in commits.items()}
    bounds = {(e.to, e.source): 0 for e in flow} | {(e.source, e.to): e.ahead for e in flow}
    for name, records in commits.items():
        for record in records:
            place = f"record {record.n} of scope {name}"
            named = {seen.scope: seen for seen in record.seen}
            for (mine, other), ahead in bounds.items():
                if mine != name:
                    continue
                seen = named.get(other)
                text = f"{place} does not say what it has seen of {other}, with {ahead} ahead"
                found.expect(seen is not None and seen.ahead == ahead, text, place)
                if seen is not None:
                    text = f"{place} has seen version {seen.version} of {other}, which came to"
                    reached = furthest.get(other, 0)
                    found.expect(seen.version <= reached, f"{text} {reached} only", place)
    return found
