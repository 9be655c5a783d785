"""The weather of a simulated job: the faults that occur, and how often. Pure data.

A **rate** is for faults that occur at random times: the number per virtual second. A **chance** is
for faults of an action: a step function, an optimizer step, a transfer. ``DEFAULT`` is the mix of
``fft dev simulate``. Each seed takes some of its kinds, at some strength (``drawn``), so that kinds
are combined in many ways and some seeds are dominated by one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

RATES: Mapping[str, str] = {
    "kill_rank": "SIGKILL of one rank, at any instant, between two effects of one event too",
    "kill_group": "SIGKILL of all ranks of a group",
    "slow": "one process takes 3 to 50 times as long for everything, for a while",
    "stop_short": "SIGSTOP for less than the acknowledgement window, then SIGCONT",
    "stop_long": "SIGSTOP for longer than the acknowledgement window: a false suspicion",
    "drain": "a group is asked to leave, by a signal to its ranks or over the bus",
    "join": "a new group comes late",
    "duplicate": "a second instance of a live group is started by mistake",
    "partition": "some processes cannot reach the bus for a while; others can",
    "outage": "nobody can reach the bus for a while",
    "lag": "one listener hears everything up to 2 s late, for a while",
    "burst": "for a while faults come five times as often, and half of all bodies fail",
    "hang": "a monitor says that a main thread does not move; half of them are stopped, too",
}
"""Kinds of faults that occur at random times."""

CHANCES: Mapping[str, str] = {
    "exception": "the body raises",
    "late_exception": "the body raises after its reductions completed",
    "one_sided": "the last reduction fails on this rank, after it completed elsewhere",
    "skipped": "one rank skips some of its reductions and votes YES",
    "skipped_by_all": "one rank number of every group skips a reduction and votes YES",
    "after_vote": "a fault is reported after the vote",
    "quit": "the user's code gives up and shuts the manager down",
    "apply_failed": "the optimizer step raises after COMMIT",
    "noticed_late": "a rank finds, after it has reported its optimizer step, that it was not whole",
    "heal_failed": "rebuilding the groups or the transfer fails",
    "heal_torn": "the transfer fails half way: the state is torn, and the process gives up",
    "repeated": "a message is delivered twice",
    "lost": "a message never reaches one of its listeners",
    "deaf": "a listener ends, and hears nothing more",
    "overrun": "a listener falls behind the ring of the bus, and misses what comes for a while",
    "group_store": "a vote in the group's own store fails; its votes go to the job's bus",
    "user_skips": "the user skips the step on one rank, after its reductions",
    "user_skips_early": "the user skips the step on one rank, before its reductions",
    "all_skip": "the user skips the step on all ranks",
    "corrupted": "a state changes that nobody was to change",
    "flipped": "a gradient changes in the memory of one rank, after its reduction",
    "reformed": "a supervised group that lost a rank keeps the others, and gets another process",
}
"""Kinds of faults that affect an action."""


@dataclass(frozen=True, slots=True)
class Weather:
    """Rates per virtual second and chances per occasion, by kind; kinds that are not named are 0.

    Raises:
        ValueError: A kind does not exist, or a number is not a rate or chance.
    """

    rates: Mapping[str, float]
    chances: Mapping[str, float]
    shapes: tuple[tuple[int, int], ...] = ()
    """Numbers of groups and ranks to draw from; empty: those of `World`."""
    intervals: tuple[float, ...] = ()
    """Seconds between two requests to join, to draw from; empty: the spec's."""

    def __post_init__(self) -> None:
        for given, known in ((self.rates, RATES), (self.chances, CHANCES)):
            for kind, value in given.items():
                if kind not in known:
                    raise ValueError(f"no fault kind {kind!r}; there are: {', '.join(known)}")
                if value < 0 or (known is CHANCES and value > 1):
                    raise ValueError(
                        f"{kind}: {value} is no {'chance' if known is CHANCES else 'rate'}"
                    )

    def drawn(self, rng: random.Random) -> Weather:
        """Draw the weather of a seed: each kind with probability 2/3, at a strength of 0.3 to 3."""
        strength = 0.3 * 10.0 ** rng.random()

        def some(given: Mapping[str, float], most: float) -> dict[str, float]:
            return {
                kind: min(most, value * strength)
                for kind, value in given.items()
                if rng.random() < 2 / 3
            }

        rates, chances = some(self.rates, 10.0), some(self.chances, 0.5)
        return Weather(rates, chances, self.shapes, self.intervals)


DEFAULT = Weather(
    rates={
        "kill_rank": 0.12,
        "kill_group": 0.12,
        "slow": 0.12,
        "stop_short": 0.12,
        "stop_long": 0.10,
        "drain": 0.12,
        "join": 0.08,
        "duplicate": 0.03,
        "partition": 0.10,
        "outage": 0.06,
        "lag": 0.12,
        "burst": 0.05,
        "hang": 0.10,
    },
    chances={
        "exception": 0.03,
        "late_exception": 0.015,
        "one_sided": 0.02,
        "skipped": 0.01,
        "skipped_by_all": 0.01,
        "after_vote": 0.01,
        "quit": 0.004,
        "apply_failed": 0.02,
        "heal_failed": 0.03,
        "heal_torn": 0.02,
        "repeated": 0.002,
        "lost": 0.001,
        "deaf": 0.0003,
        "overrun": 0.0005,
        "group_store": 0.002,
        "user_skips": 0.02,
        "user_skips_early": 0.01,
        "all_skip": 0.03,
        "corrupted": 0.01,
        "reformed": 0.4,
    },
)
"""The default mix."""

APART = Weather(
    rates={**DEFAULT.rates, "lag": 0.5, "slow": 0.2, "hang": 0.05, "outage": 0.04},
    chances={
        **DEFAULT.chances,
        "apply_failed": 0.05,
        "heal_torn": 0.04,
        "repeated": 0.01,
        "lost": 0.003,
    },
    shapes=((3, 1), (3, 1), (4, 1), (4, 1), (5, 1), (2, 1), (3, 2)),
    intervals=(0.1, 0.3, 1.0),
)
"""The mix for asynchronous jobs. With fewer than three groups no group synchronizes without
another. The rules of these jobs are mainly about late messages and lost states."""

CALM = Weather({}, {})
"""A weather without faults."""


def weather_of(is_bounded: bool) -> Weather:
    """Return the mix for a spec; ``is_bounded``: its job is asynchronous."""
    return APART if is_bounded else DEFAULT
