"""Costs of operations, and the designs that carry votes and member lists. Pure data.

All times are in seconds. The figures come from `benchmarks/scale.py --calibrate`, which measures
them on the real store and the real core; none of them is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ENTRY_BYTES = 24
"""Size of a departed member in a list of changes: its name, rank and incarnation."""


@dataclass(frozen=True, slots=True)
class Design:
    """The design of the layer beneath the core that carries the core's requests.

    The core's own pattern (the recipients of an acknowledgement, the proposer of an epoch) is that
    of the imported core.
    """

    name: str
    votes: Literal["rank", "group"]
    """The voters at the job's store: every rank, or the last rank of a group on behalf of all its
    ranks, which vote in their group's own store."""
    ballot: Literal["whole", "counted"]
    """Either every voter reads the ballot back and sees whether it is full; or a counter determines
    the last voter, and only that one reads."""
    members: Literal["inline", "digest", "delta"]
    """An epoch record holds its member list (inline); or a digest, with the list in a register of
    its own that is read only by processes that lack it; or the digest and the changes of the list
    (delta)."""
    hearing: Literal["rank", "group"] = "rank"
    """The listeners to broadcasts at the job's store: every rank, or one rank of each group, which
    passes them on in its group's own store."""


BEFORE = Design("before", votes="rank", ballot="whole", members="inline")
AFTER = Design("after", votes="group", ballot="counted", members="digest")
NEXT = Design("next", votes="group", ballot="counted", members="delta", hearing="group")
"""Not built: the improvement that would help most next."""
DESIGNS = {design.name: design for design in (BEFORE, AFTER, NEXT)}


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of the store's only thread, and the time of one way over the network."""

    operation: Mapping[str, float]
    """Seconds per operation, without its bytes: append, add, compare_set, delete, set, push, pop.

    ``hear``: a listener reads one broadcast; ``wait_pop``: one reads its inbox after waiting.
    """
    byte_in: float
    byte_out: float
    hop: float
    """Time of one way between a participant and the store, without the store's own time."""

    def of(self, kind: str, size_in: int = 0, size_out: int = 0) -> float:
        """Return the seconds of the store's thread for one operation."""
        return self.operation[kind] + size_in * self.byte_in + size_out * self.byte_out


@dataclass(frozen=True, slots=True)
class Handling:
    """Costs of one event for a participant: the core, the trace, reading the message.

    ``kinds`` maps an event to (seconds, seconds per participant of the job), a line fitted to
    measurements in jobs of several sizes.
    """

    kinds: Mapping[str, tuple[float, float]]

    def of(self, kind: str, participants: int) -> float:
        """Return the seconds of the participant's engine thread for one event of that kind."""
        base, each = self.kinds.get(kind) or self.kinds["other"]
        return base + each * participants


@dataclass(frozen=True, slots=True)
class Costs:
    """All measured values that a run uses."""

    prices: Prices
    handling: Handling
    body: float = 0.045
    """Duration of a forward and backward pass."""


def prices_from(data: Mapping[str, object]) -> Prices:
    """Return prices from `calibration.json`, which has them in microseconds.

    Raises:
        ValueError: A figure is missing or not a number; the message names it.
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
    """Return handling times from a result file: kind → [microseconds, per participant].

    Raises:
        ValueError: An entry has another form; the message names it.
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
