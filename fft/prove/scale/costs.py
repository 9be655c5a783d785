"""What things cost, and which design carries votes and member lists. Pure data.

Seconds everywhere. The figures come from `benchmarks/scale.py --calibrate`, which measures them on
the real store and the real core; nothing here is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ENTRY_BYTES = 24
"""A departed member in a list of changes: its name, rank and incarnation."""


@dataclass(frozen=True, slots=True)
class Design:
    """How what the core asks for is carried, beneath the core.

    The core's own pattern (who is told of an acknowledgement, who proposes an epoch) is that of
    the core that is imported.
    """

    name: str
    votes: Literal["rank", "group"]
    """Who casts a vote at the job's store: every rank, or the last rank of a group for all its
    ranks, which vote in their group's own store."""
    ballot: Literal["whole", "counted"]
    """Every voter reads the ballot back and sees whether it is full; or a counter says who is the
    last, and only the last reads."""
    members: Literal["inline", "digest", "delta"]
    """An epoch record holds its member list; or a digest, the list being a register of its own
    that is read by those who do not hold it; or the digest and what has changed in the list."""
    hearing: Literal["rank", "group"] = "rank"
    """Who listens to broadcasts at the job's store: every rank; or one rank of each group, which
    passes them on in its group's own store."""


BEFORE = Design("before", votes="rank", ballot="whole", members="inline")
AFTER = Design("after", votes="group", ballot="counted", members="digest")
NEXT = Design("next", votes="group", ballot="counted", members="delta", hearing="group")
"""Not built: what would help most after that."""
DESIGNS = {design.name: design for design in (BEFORE, AFTER, NEXT)}


@dataclass(frozen=True, slots=True)
class Prices:
    """What the store's only thread spends, and how long a way over the network is."""

    operation: Mapping[str, float]
    """Per operation, beside its bytes: append, add, compare_set, delete, set, push, pop.

    ``hear``: a listener reads one broadcast; ``wait_pop``: one reads its inbox, having waited."""
    byte_in: float
    byte_out: float
    hop: float
    """One way between a participant and the store, without the store's own time."""

    def of(self, kind: str, size_in: int = 0, size_out: int = 0) -> float:
        """Seconds of the store's thread for one operation."""
        return self.operation[kind] + size_in * self.byte_in + size_out * self.byte_out


@dataclass(frozen=True, slots=True)
class Handling:
    """What one event costs a participant: the core, the trace, reading the message.

    ``kinds``: by event, (seconds, seconds per participant of the job), a line through what was
    measured in jobs of several sizes.
    """

    kinds: Mapping[str, tuple[float, float]]

    def of(self, kind: str, participants: int) -> float:
        """Seconds of the participant's engine thread for one event of that kind."""
        base, each = self.kinds.get(kind) or self.kinds["other"]
        return base + each * participants


@dataclass(frozen=True, slots=True)
class Costs:
    """All that a run takes from measurement."""

    prices: Prices
    handling: Handling
    body: float = 0.045
    """A forward and backward pass."""


def prices_from(data: Mapping[str, object]) -> Prices:
    """Prices as `calibration.json` holds them, in microseconds.

    Raises:
        ValueError: a figure is missing or is no number; says which.
    """
    operation = data.get("operation_us")
    if not isinstance(operation, Mapping):
        raise ValueError("calibration: no operation_us; run benchmarks/scale.py --calibrate")
    return Prices(
        operation={str(kind): _number(operation, kind) * 1e-6 for kind in operation},
        byte_in=_number(data, "byte_in_us") * 1e-6,
        byte_out=_number(data, "byte_out_us") * 1e-6,
        hop=_number(data, "hop_us") * 1e-6,
    )


def handling_from(data: Mapping[str, object]) -> Handling:
    """Handling times as a result file holds them: kind → [microseconds, per participant].

    Raises:
        ValueError: an entry has another form; says which.
    """
    kinds = {}
    for kind, line in data.items():
        if not isinstance(line, (list, tuple)) or len(line) != 2:
            raise ValueError(f"handling of {kind!r}: write [microseconds, microseconds per head]")
        kinds[kind] = (float(line[0]) * 1e-6, float(line[1]) * 1e-6)
    return Handling(kinds)


def _number(data: Mapping[str, object], key: str) -> float:
    value = data.get(key)
    if not isinstance(value, (int, float)) or value < 0:
        raise ValueError(f"calibration: {key} is {value!r}, not a time in microseconds")
    return float(value)
