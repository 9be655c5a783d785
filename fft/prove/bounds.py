"""The bounds that ``fft check`` searches: chosen so that together they take every row of the table.

Data only. Costs grow by a factor of ten to thirty with each fault, each participant and each
process start, so that no single scope can have everything; each of these has some of it.
"""

from __future__ import annotations

from fft.prove.scope import Scope


def budget(*kinds: str, **more: int) -> tuple[tuple[str, int], ...]:
    """One fault of each kind, or as many as said."""
    return (*((kind, 1) for kind in kinds), *more.items())


DEFAULT = (
    Scope(
        "processes",
        commits=2,
        faults=2,
        budget=budget(
            "no", "misfit", "torn", "heal", "silent", "restart", "drain", fault=2, crash=2
        ),
    ),
    Scope("learner", commits=2, faults=3, budget=budget("crash", "restart", "heal")),
    Scope(
        "messages",
        commits=1,
        faults=3,
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
    Scope(
        "retry",
        commits=0,
        faults=3,
        budget=budget("fault", "early", "lapse", "crash", "silent"),
    ),
    Scope("storm", commits=1, faults=4, budget=budget(no=4)),
    Scope(
        "start", commits=1, faults=2, formed=False, budget=budget("torn", "crash", "lose", "lapse")
    ),
    Scope("start, bus", commits=1, faults=1, formed=False, budget=budget("outage", "forget")),
    Scope(
        "unlike",
        commits=1,
        faults=2,
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
    Scope("three, leaving", groups=3, commits=1, faults=2, budget=budget("torn", "drain")),
    Scope(
        "shards", ranks=2, commits=1, faults=1, budget=budget("silent", "lapse", "lose", "twice")
    ),
    Scope(
        "mates", groups=1, ranks=2, commits=1, faults=1, formed=False, budget=budget("quit", "lose")
    ),
    Scope("hang", commits=1, faults=2, budget=budget("hang", "crash")),
    Scope("hang, mates", groups=1, ranks=2, commits=0, faults=3, budget=budget("lapse", hang=2)),
    Scope("too few", commits=1, faults=2, least=2, budget=budget("crash", drain=2)),
    Scope("too few, at start", groups=1, commits=0, faults=0, formed=False, least=2),
    Scope("skips", commits=1, faults=3, budget=budget("lose", "crash", "lapse", skip=2)),
    Scope("skips, joining", commits=1, faults=3, budget=budget("skip", "crash", "restart")),
    Scope("skips, unlike", commits=1, faults=2, budget=budget("skip", "misfit")),
    Scope(
        "compared, missed",
        commits=1,
        faults=3,
        budget=budget("no", "lose", "lapse"),
        digests=True,
    ),
    Scope(
        "diverged",
        commits=1,
        faults=3,
        budget=budget("corrupt", "bare", "lose", "silent", "restart"),
        digests=True,
    ),
    Scope(
        "healed",
        groups=3,
        commits=1,
        faults=2,
        budget=budget("corrupt", "bare"),
        digests=True,
        heals=True,
    ),
    Scope(
        "shards, restart",
        groups=1,
        ranks=2,
        commits=1,
        faults=3,
        budget=budget("crash", "restart", "lose"),
    ),
    Scope("ended", commits=1, faults=3, budget=budget("restart", drain=2)),
    Scope("deaf", commits=1, faults=1, budget=budget("deaf")),
    Scope("overrun", commits=1, faults=2, budget=budget("overrun", "fault")),
    Scope("twin", commits=1, faults=1, budget=budget("twin")),
)
"""Takes some five minutes on one core."""

DEEP = (
    *DEFAULT,
    Scope(
        "mixed, 3 faults",
        commits=1,
        faults=3,
        budget=budget("torn", "drain", "silent", "lose", "lapse", "early"),
    ),
    Scope(
        "processes, 3 faults",
        commits=2,
        faults=3,
        budget=budget(
            "no", "misfit", "torn", "heal", "silent", "restart", "drain", fault=2, crash=2
        ),
    ),
    Scope(
        "everything, 3 faults",
        commits=1,
        faults=3,
        budget=budget("fault", "torn", "crash", "drain", "early", "lose", "lapse"),
    ),
    Scope(
        "start, all kinds",
        commits=1,
        faults=2,
        formed=False,
        budget=budget("fault", "torn", "heal", "crash", "silent", "lose", "twice", "swap", "lapse"),
    ),
    Scope(
        "three groups, 2 faults",
        groups=3,
        commits=1,
        faults=2,
        budget=budget("crash", "silent", "torn", "drain", "lapse", "lose"),
    ),
    Scope(
        "three groups, more kinds",
        groups=3,
        commits=1,
        faults=1,
        budget=budget("fault", "no", "misfit", "early", "outage"),
    ),
    Scope(
        "healed, unheard",
        groups=3,
        commits=1,
        faults=2,
        budget=budget("corrupt", "lose"),
        digests=True,
        heals=True,
    ),
    Scope("hang, 3 faults", commits=0, faults=3, budget=budget("fault", "lapse", "hang")),
    Scope("too few, shards", ranks=2, commits=1, faults=1, least=2, budget=budget("drain")),
    Scope("shards, crash", ranks=2, commits=1, faults=1, budget=budget("crash")),
    Scope("shards, fault", ranks=2, commits=1, faults=1, budget=budget("fault")),
)
"""Ten million states and more."""
