"""Costs of operations, and the designs that carry broadcasts and member lists. Pure data.

All times are in seconds. `python -m benchmarks.scale --calibrate` measures the figures on the real
store and the real engine; none of them is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ENTRY_BYTES = 24
"""Size of a departed member in a list of changes: its name, rank and incarnation."""
FEW_VOTERS = 8
"""A ballot of up to so many voters is read by each of them; see `fft.bus.tcpstore`."""


@dataclass(frozen=True, slots=True)
class Design:
    """The design of the layer beneath the engine, which carries the engine's calls.

    The calls themselves (the recipients of an acknowledgement, the proposer of an epoch, the way of
    a vote) are those of the shipped engine.
    """

    name: str
    members: Literal["digest", "delta"]
    """An epoch record holds the digest of its member list, which is read from a register of its own
    by processes that lack it (digest); or the changes of the list, too (delta)."""
    hearing: Literal["rank", "group"]
    """The listeners to broadcasts at the job's store: every rank, or one rank of each group, which
    passes them on in its group's own store."""


SHIPPED = Design("shipped", members="digest", hearing="rank")
NEXT = Design("next", members="delta", hearing="group")
"""Not built: the improvement that would help most next."""
DESIGNS = {design.name: design for design in (SHIPPED, NEXT)}


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of the store's only thread, and the time of one way over the network."""

    operation: Mapping[str, float]
    """Seconds per operation, without its bytes: append, add, compare_set, delete, set, push, pop.

    ``hear`` is the price of one broadcast that a listener reads, ``wait_pop`` that of one message
    that it waits for in its inbox.
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
    """Costs of one event for a participant: the engine, the trace, reading the message.

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
        raise ValueError("calibration: no operation_us; run python -m benchmarks.scale --calibrate")
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
