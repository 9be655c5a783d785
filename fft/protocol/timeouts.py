"""All timeouts as one table: what each limits, its source, and its lower bound. Pure.

A spec declares its timers with their meaning and rules. This module adds the times that no spec
declares. Values that the user gave are kept. A default that violates a rule is adjusted. Two given
values that contradict each other are refused, with the reason and a set that would work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fft.errors import ConfigError

if TYPE_CHECKING:  # spares pydantic to trainers' monitors, which import this module
    from fft.protocol.spec import FsmSpec

TORCHFT_DEFAULT_S = 60.0
"""Default of torchft's three timeouts, in seconds."""
LONGEST_BUS_OPERATION_S = 10.0
"""Maximum wait for one operation on the bus, whatever ``connect_timeout`` is. NATS has its own."""
NATS_FAILOVER_S = 10.0
"""Duration of a change of leader in a NATS cluster, in seconds.

A follower waits for a random time of 4 to 9 s before it stands for election, which cannot be
configured (nats-server: server/raft.go, ``minElectionTimeoutDefault``). The rest is the election
and the reconnection of clients.
"""

ARGUMENTS = {
    "timeout": "fetching state from a peer; what an abort leaves behind in a process group",
    "quorum_timeout": "building process groups after the epoch is formed; with "
    "membership=lighthouse, a txn's quorum too",
    "connect_timeout": "reaching torchft's store and the bus at the start",
}
"""The manager's arguments that torchft has as well, and what they limit besides timers."""

_BOUNDS = {
    "bus_operation": "one operation on the bus; follows connect_timeout, "
    f"{LONGEST_BUS_OPERATION_S:g} s at most, {2 * NATS_FAILOVER_S:g} s on nats://",
    "bus_failover": "a change of leader among NATS servers; they wait 4 to 9 s before they elect",
}
_DERIVED = ("bus_operation", "bus_failover")
"""Rows that a user cannot set, because they follow from others or from the bus."""
OUTSIDE_TIMES = frozenset({*ARGUMENTS, *_DERIVED})
"""Times that a timer's rule may name besides other timers."""

_HANGS = {
    "hang_limit": (
        600.0,
        "no progress of a main thread; 5 x the median step (1 s at least) where that is shorter",
    ),
    "hang_grace": (30.0, "the rollback of a txn that hangs; then the monitor ends its process"),
}
"""Times of the monitor: seconds, and what they limit."""
_DRAINS = {
    "drain_margin": (
        5.0,
        "what a leaver's deadline keeps for its end; without a commit by then it leaves without "
        "(half of the deadline, where that is shorter)",
    ),
}
HOST_LIMIT_S = 5.0
_HOSTS = {
    "host_limit": (
        HOST_LIMIT_S,
        "the silence of a host before others go on without it; 3 x the longest gap between its "
        "heartbeats (0.4 x this at least) where that is shorter",
    ),
}
_LIGHTHOUSE = {
    "lighthouse_window": (
        1.0,
        "the wait for a member that the lighthouse's quorum does not name, before it is suspected; "
        "with membership=lighthouse",
    ),
}
_OURS = {**_HANGS, **_DRAINS, **_HOSTS, **_LIGHTHOUSE}


@dataclass(frozen=True)
class Given:
    """A value in seconds that the user chose, and where: ``timeout=``, ``--set`` …"""

    seconds: float
    by: str


@dataclass(frozen=True)
class Timeout:
    """One row of the table: the value in seconds, and where it comes from."""

    name: str
    seconds: float
    origin: str
    bounds: str
    fixed: bool = False
    """The user chose the value."""
    fitted: int = 0
    """1 or -1 if the value was raised or lowered to satisfy a rule; it then moves only that way."""


@dataclass(frozen=True)
class Rule:
    """``larger`` must be at least ``factor`` times ``smaller``."""

    larger: str
    factor: float
    smaller: str
    why: str

    def least(self, table: Mapping[str, Timeout]) -> float:
        """Return the lower bound of ``larger``, in seconds."""
        return self.factor * table[self.smaller].seconds

    def holds(self, table: Mapping[str, Timeout]) -> bool:
        """Return whether the table satisfies this rule; a rule on a missing timer is satisfied."""
        if not {self.larger, self.smaller} <= set(table):
            return True
        least = self.least(table)
        return table[self.larger].seconds >= least or math.isclose(
            table[self.larger].seconds, least
        )


_RULES = (
    Rule(
        "quorum_timeout",
        2,
        "lighthouse_window",
        "who is not named must be suspected before the quorum is given up",
    ),
)


def rules_of(spec: FsmSpec) -> tuple[Rule, ...]:
    """Return all rules: the spec's, and those of times that no spec declares."""
    said = [
        Rule(name, rule.times, rule.of, rule.why)
        for name, timer in spec.timers.items()
        for rule in timer.at_least
    ]
    return (*said, *_RULES)


def bus_operation(url: str) -> float:
    """Return the seconds after which an operation on the bus at ``url`` is given up, at most."""
    return 2 * NATS_FAILOVER_S if _is_nats(url) else LONGEST_BUS_OPERATION_S


def _is_nats(url: str) -> bool:
    return url.partition("://")[0] in ("nats", "tls")


def resolve(spec: FsmSpec, given: Mapping[str, Given], bus: str = "") -> dict[str, Timeout]:
    """Return the timeouts by name: the spec's timers, torchft's arguments, and those of the bus.

    Args:
        given: Values that the user chose, by name.
        bus: URL of the bus; an empty one counts as ``tcp://``.

    Raises:
        ConfigError: A name is unknown, a value is not a positive number, or given values
            contradict each other.
    """
    _check(spec, given)
    table, rules = _unfitted(spec, given, bus), rules_of(spec)
    problems = _fit(table, rules)
    if problems:
        advice = _advice(table, rules)
        raise ConfigError("\n".join(["the timeouts do not fit:", *problems, advice]))
    return table


def from_env(environ: Mapping[str, str]) -> dict[str, Given]:
    """Return the values of torchft's environment variables, such as ``TORCHFT_TIMEOUT_SEC``."""
    found = {}
    for name in ARGUMENTS:
        if text := environ.get(variable := f"TORCHFT_{name.upper()}_SEC"):
            found[name] = Given(_seconds(name, text), variable)
    return found


def from_pairs(pairs: Iterable[str]) -> dict[str, Given]:
    """Parse ``NAME=SECONDS`` pairs. Raises ``ConfigError`` for any other text."""
    found = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        found[name] = Given(_seconds(name, text), "--set")
    return found


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"timeouts: {name}={text!r}; write NAME=SECONDS, as {name}=5") from None


def timers(spec: FsmSpec, table: Mapping[str, Timeout]) -> dict[str, float]:
    """Return the seconds by timer name, as the core expects them."""
    return {name: table[name].seconds for name in spec.timers}


def _check(spec: FsmSpec, given: Mapping[str, Given]) -> None:
    known = {*spec.timers, *ARGUMENTS, *_OURS}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"timeouts: unknown name {name!r}; known: {', '.join(sorted(known))}")
        if not (value.seconds > 0 and math.isfinite(value.seconds)):
            raise ConfigError(
                f"timeouts: {name} is {value.seconds:g} s ({value.by}); give a positive number"
            )


def _unfitted(spec: FsmSpec, given: Mapping[str, Given], bus: str) -> dict[str, Timeout]:
    table: dict[str, Timeout] = {}

    def put(name: str, bounds: str, seconds: float, origin: str, fixed: bool = False) -> None:
        if chosen := given.get(name):
            seconds, origin, fixed = chosen.seconds, chosen.by, True
        table[name] = Timeout(name, seconds, origin, bounds, fixed)

    for name, bounds in ARGUMENTS.items():
        put(name, bounds, TORCHFT_DEFAULT_S, "torchft's default")
    connect = table["connect_timeout"]
    operation, by = min((bus_operation(bus), "the bus"), (connect.seconds, connect.origin))
    put("bus_operation", _BOUNDS["bus_operation"], operation, by, by != "the bus" and connect.fixed)
    if _is_nats(bus):
        put("bus_failover", _BOUNDS["bus_failover"], NATS_FAILOVER_S, "a fact of NATS", True)
    for name, timer in spec.timers.items():
        if timer.follows is None:
            put(name, timer.doc, timer.default, f"spec {spec.name}")
        else:
            source = table[timer.follows]
            put(name, timer.doc, source.seconds, source.origin, source.fixed and not timer.grows)
    for name, (seconds, bounds) in _OURS.items():
        put(name, bounds, seconds, "FFT's default")
    return table


def _fit(table: dict[str, Timeout], rules: Sequence[Rule]) -> list[str]:
    """Adjust values that the user did not choose; return a line for each rule that still fails."""
    while broken := [rule for rule in rules if not rule.holds(table)]:
        if not any(_suggest_replacement(table, rule) for rule in broken):
            return list(_told(table, broken))
    return []


def _suggest_replacement(table: dict[str, Timeout], rule: Rule) -> bool:
    """Raise the larger value or lower the smaller one; return False if neither may be moved."""
    larger, smaller = table[rule.larger], table[rule.smaller]
    if not larger.fixed and larger.fitted >= 0:
        table[larger.name] = _moved(larger, rule.least(table), 1, smaller)
    elif not smaller.fixed and smaller.fitted <= 0:
        table[smaller.name] = _moved(smaller, larger.seconds / rule.factor, -1, larger)
    else:
        return False
    return True


def _moved(timeout: Timeout, seconds: float, way: int, other: Timeout) -> Timeout:
    verb = "raised" if way > 0 else "lowered"
    origin = timeout.origin if timeout.fitted else f"{timeout.origin}, {verb} to fit {other.name}"
    return replace(timeout, seconds=seconds, origin=origin, fitted=way)


def _told(table: Mapping[str, Timeout], broken: list[Rule]) -> Iterator[str]:
    for rule in broken:
        larger, smaller = table[rule.larger], table[rule.smaller]
        times = "" if rule.factor == 1 else f"{rule.factor:g} x "
        yield (
            f"  {larger.name} = {larger.seconds:g} s ({larger.origin}) must be at least {times}"
            f"{smaller.name} = {smaller.seconds:g} s ({smaller.origin}): {rule.why}"
        )


def _advice(table: Mapping[str, Timeout], rules: Sequence[Rule]) -> str:
    """A set of values that would work, obtained by raising those that are too small."""
    works = dict(table)
    while broken := [rule for rule in rules if not rule.holds(works)]:  # ends: rules have no cycle
        for rule in broken:
            works[rule.larger] = replace(works[rule.larger], seconds=rule.least(works))
    changed = [
        t
        for t in works.values()
        if (t.fixed or t.seconds != table[t.name].seconds) and t.name not in _DERIVED
    ]
    return "these would work: " + ", ".join(f"{t.name}={t.seconds:.12g}" for t in changed)
