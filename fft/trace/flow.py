"""Guarantee 6 between scopes: the order of the data, from the registers of all of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fft.messages.protocol import Record
from fft.protocol.invariants import Finding


@dataclass(frozen=True)
class Register:
    """The records of one scope, as far as they are known."""

    scope: str
    bounds: Mapping[str, int]
    """Other scope → how many steps this one may have committed more than that one."""
    records: Sequence[Record]
    is_whole: bool = True
    """No record is missing that a trace could have had."""

    @property
    def commits(self) -> list[Record]:
        """Of its records."""
        return [record for record in self.records if record.kind == "commit"]


def judge_flow(registers: Iterable[Register]) -> Finding:
    """6: each scope has kept to what the others had committed.

    That a commit keeps to the versions that it names is judged scope by scope (``data_flow``).
    Here: each names all that it is bound to, and versions that were committed.
    """
    found = Finding("flow_order")
    by_name = {register.scope: register for register in registers}
    for register in by_name.values():
        for other, ahead in register.bounds.items():
            _judge(found, register, other, ahead, by_name.get(other))
    return found


def _judge(
    found: Finding, register: Register, name: str, ahead: int, other: Register | None
) -> None:
    reached = max((r.step for r in other.commits), default=0) if other is not None else 0
    for record in register.commits:
        place = f"record {record.n} of scope {register.scope}"
        seen = next((s for s in record.seen if s.scope == name), None)
        text = f"{place} does not say what it has seen of {name}, with {ahead} ahead"
        found.expect(seen is not None and seen.ahead == ahead, text, place)
        if seen is not None and (other is None or other.is_whole):
            text = f"{place} has seen version {seen.version} of {name}, which came to {reached}"
            found.expect(seen.version <= reached, text, place)
