"""The bounds that ``fft check`` searches: chosen so that together they take every row of the table.

Data only. Costs grow by a factor of ten to thirty with each fault, each participant and each
process start, so that no single scope can have everything; each of these has some of it.
"""

from __future__ import annotations

from fft.sim.model import Scope


def budget(*kinds: str, **more: int) -> tuple[tuple[str, int], ...]:
    """One fault of each kind, or as many as said."""
    return (*((kind, 1) for kind in kinds), *more.items())


DEFAULT = (
    Scope(
        "processes",
        commits=1,
        faults=2,
        budget=budget("no", "skip", "torn", "heal", "silent", "restart", "drain", fault=2, crash=2),
    ),
    Scope(
        "messages",
        commits=1,
        faults=2,
        budget=budget("fault", "lose", "twice", "swap", "quit"),
    ),
    Scope("bus", commits=1, faults=2, budget=budget("fault", "lapse", "outage", "forget")),
    Scope(
        "mixed",
        commits=1,
        faults=2,
        budget=budget("torn", "drain", "silent", "lose", "lapse", "early"),
    ),
    Scope("missed", commits=1, faults=3, budget=budget("torn", "lose", "fault")),
    Scope("retry", commits=0, faults=3, budget=budget("fault", "early", "lapse")),
    Scope("storm", commits=1, faults=4, budget=budget(no=4)),
    Scope(
        "start", commits=1, faults=1, formed=False, budget=budget("torn", "crash", "lose", "lapse")
    ),
    Scope("start, bus", commits=1, faults=1, formed=False, budget=budget("outage", "forget")),
    Scope(
        "unlike",
        commits=1,
        faults=1,
        formed=False,
        alike=False,
        budget=budget("heal", "torn", "silent"),
    ),
    Scope("lost", commits=0, faults=2, formed=False, budget=budget("crash", "lapse")),
    Scope(
        "three groups",
        groups=3,
        commits=1,
        faults=1,
        budget=budget("crash", "silent", "torn", "drain", "lapse", "lose"),
    ),
    Scope(
        "shards", ranks=2, commits=1, faults=1, budget=budget("silent", "lapse", "lose", "twice")
    ),
    Scope("twin", commits=1, faults=1, budget=budget("twin")),
)
"""Takes about three minutes on one core."""

DEEP = (
    *DEFAULT,
    Scope(
        "processes, 2 commits",
        commits=2,
        faults=2,
        budget=budget("no", "skip", "heal", "silent", "restart", "drain", fault=2, torn=2, crash=2),
    ),
    Scope(
        "everything, 2 commits",
        commits=2,
        faults=2,
        budget=budget("fault", "torn", "crash", "drain", "early", "lose", "lapse"),
    ),
    Scope(
        "start, all kinds",
        commits=1,
        faults=1,
        formed=False,
        budget=budget("fault", "torn", "heal", "crash", "silent", "lose", "twice", "swap", "lapse"),
    ),
    Scope(
        "three groups, more",
        groups=3,
        commits=1,
        faults=1,
        budget=budget("fault", "no", "skip", "early", "outage"),
    ),
    Scope("shards, crash", ranks=2, commits=1, faults=1, budget=budget("crash", "restart")),
    Scope("shards, fault", ranks=2, commits=1, faults=1, budget=budget("fault")),
)
"""Ten million states and more."""
