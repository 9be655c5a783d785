"""The bounds that ``fft dev check`` searches: together they take every row of the table.

Data only. The cost grows by a factor of ten to thirty with each fault, each participant and each
process start, so no single set of bounds can contain everything; each contains a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fft.protocol.spec import FsmSpec
from fft.prove.bounds import Bounds


def budget(*kinds: str, **more: int) -> tuple[tuple[str, int], ...]:
    """Return one fault of each kind in ``kinds``, and the given numbers of those in ``more``."""
    return (*((kind, 1) for kind in kinds), *more.items())


DEFAULT = (
    Bounds(
        "processes",
        commits=2,
        faults=2,
        budget=budget(
            "no", "misfit", "torn", "heal", "silent", "restart", "drain", fault=2, crash=2
        ),
    ),
    Bounds("learner", commits=2, faults=3, budget=budget("crash", "restart", "heal")),
    Bounds(
        "messages",
        commits=1,
        faults=3,
        budget=budget("fault", "lose", "twice", "swap", "quit"),
    ),
    Bounds("bus", commits=1, faults=2, budget=budget("fault", "lapse", "outage", "forget")),
    Bounds(
        "mixed",
        commits=1,
        faults=2,
        budget=budget("torn", "drain", "silent", "lose", "lapse", "early"),
    ),
    Bounds("missed", commits=1, faults=3, budget=budget("torn", "lose", "fault")),
    Bounds(
        "retry",
        commits=0,
        faults=3,
        budget=budget("fault", "early", "lapse", "crash", "silent"),
    ),
    Bounds("storm", commits=1, faults=4, budget=budget(no=4)),
    Bounds(
        "start", commits=1, faults=2, formed=False, budget=budget("torn", "crash", "lose", "lapse")
    ),
    Bounds("start, bus", commits=1, faults=1, formed=False, budget=budget("outage", "forget")),
    Bounds(
        "unlike",
        commits=1,
        faults=2,
        formed=False,
        alike=False,
        budget=budget("heal", "torn", "silent"),
    ),
    Bounds("lost", commits=0, faults=2, formed=False, budget=budget("crash", "lapse")),
    Bounds(
        "three groups",
        groups=3,
        commits=1,
        faults=1,
        budget=budget("crash", "silent", "torn", "drain", "lapse", "lose"),
    ),
    Bounds("three, leaving", groups=3, commits=1, faults=2, budget=budget("torn", "drain")),
    Bounds(
        "shards", ranks=2, commits=1, faults=1, budget=budget("silent", "lapse", "lose", "twice")
    ),
    Bounds(
        "mates", groups=1, ranks=2, commits=1, faults=1, formed=False, budget=budget("quit", "lose")
    ),
    Bounds(
        "three slices", commits=2, faults=2, slices=3, budget=budget("crash", "restart", "skip")
    ),
    Bounds("one slice", groups=3, commits=1, faults=1, slices=1, budget=budget("crash", "drain")),
    Bounds(
        "max_active",
        commits=1,
        faults=2,
        rules=(("max_active", 1),),
        budget=budget("crash", "restart"),
    ),
    Bounds(
        "divisible_by",
        groups=3,
        commits=1,
        faults=1,
        rules=(("divisible_by", 2),),
        budget=budget("crash", "drain"),
    ),
    Bounds("hang", commits=1, faults=2, budget=budget("hang", "crash")),
    Bounds("hang, mates", groups=1, ranks=2, commits=0, faults=3, budget=budget("lapse", hang=2)),
    Bounds("too few", commits=1, faults=3, least=2, budget=budget("crash", drain=2)),
    Bounds("too few, at start", groups=1, commits=0, faults=0, formed=False, least=2),
    Bounds("skips", commits=1, faults=3, budget=budget("lose", "crash", "lapse", skip=2)),
    Bounds("skips, joining", commits=1, faults=3, budget=budget("skip", "crash", "restart")),
    Bounds("live blocks", commits=1, faults=3, budget=budget("lose", "crash", "skip", block=2)),
    Bounds("live blocks, joining", commits=0, faults=3, budget=budget("block", "crash", "restart")),
    Bounds("final live block", commits=1, faults=3, budget=budget("lose", "crash", final=2)),
    Bounds("skips, unlike", commits=1, faults=2, budget=budget("skip", "misfit")),
    Bounds(
        "compared, missed",
        commits=1,
        faults=3,
        budget=budget("no", "lose", "lapse"),
        digests=True,
    ),
    Bounds(
        "diverged",
        commits=1,
        faults=3,
        budget=budget("corrupt", "bare", "lose", "silent", "restart"),
        digests=True,
    ),
    Bounds(
        "flipped",
        commits=1,
        faults=3,
        budget=budget("bare", "lose", "skip", flip=2),
        digests=True,
    ),
    Bounds("flipped, three", groups=3, commits=1, faults=2, budget=budget("flip"), digests=True),
    Bounds(
        "healed",
        groups=3,
        commits=1,
        faults=2,
        budget=budget("corrupt", "bare"),
        digests=True,
        heals=True,
    ),
    Bounds(
        "shards, restart",
        groups=1,
        ranks=2,
        commits=1,
        faults=3,
        budget=budget("crash", "restart", "lose"),
    ),
    Bounds("re-forming", ranks=2, commits=1, faults=0, lost="replaced"),
    Bounds(
        "re-forming, faults",
        ranks=2,
        commits=0,
        faults=1,
        lost="replaced",
        least=2,
        budget=budget("over", "heal", "lapse", "torn"),
    ),
    Bounds("re-forming, too late", ranks=2, commits=0, faults=0, lost="waiting"),
    Bounds("ended", commits=1, faults=3, budget=budget("restart", drain=2)),
    Bounds("deaf", commits=1, faults=1, budget=budget("deaf")),
    Bounds("overrun", commits=1, faults=2, budget=budget("overrun", "fault")),
    Bounds("twin", commits=1, faults=1, budget=budget("twin")),
)
"""These take about six minutes on one core."""


FLOW = (
    Bounds(
        "processes",
        commits=2,
        faults=1,
        budget=budget("fault", "crash", "restart", "torn"),
    ),
    Bounds(
        "leaving",
        commits=1,
        faults=2,
        budget=budget("drain", "crash"),
    ),
    Bounds(
        "messages",
        commits=2,
        faults=1,
        budget=budget("lose", "early", "overrun", "lapse"),
    ),
    Bounds(
        "skips",
        commits=1,
        faults=2,
        budget=budget("fault", skip=2),
    ),
    Bounds(
        "ending",
        commits=1,
        faults=1,
        budget=budget("skip", "crash", "lose"),
        ends=True,
    ),
    Bounds(
        "start",
        commits=1,
        faults=1,
        formed=False,
        budget=budget("crash", "lapse", "skip"),
    ),
    Bounds(
        "bodies",
        commits=1,
        faults=1,
        budget=budget("no", "misfit", "heal", "silent", "quit"),
    ),
    Bounds(
        "bus",
        commits=1,
        faults=1,
        budget=budget("twice", "swap", "outage", "forget", "deaf"),
    ),
    Bounds(
        "states",
        commits=1,
        faults=1,
        budget=budget("corrupt", "bare"),
        digests=True,
    ),
    Bounds("hang", commits=1, faults=1, budget=budget("hang")),
)
"""Bounds for each stage of a spec whose stages have scopes of their own.

Each stage is a rank of its group, so that no rank has mates in its scope. If no other scope holds a
group back, its state machine is hsdp's, so the sets above are not searched again.
"""


def flow(stages: int) -> tuple[Bounds, ...]:
    """Return the sets in ``FLOW`` for each of the stages."""
    return tuple(
        replace(bounds, name=f"stage {stage}, {bounds.name}", stage=stage)
        for stage in range(stages)
        for bounds in FLOW
    )


ASYNC = (
    Bounds(
        "processes",
        commits=1,
        faults=2,
        budget=budget("no", "misfit", "torn", "heal", "silent", "drain", fault=2, crash=2),
    ),
    Bounds("steps", commits=2, faults=1, budget=budget("torn", "no", "drain", "crash", "skip")),
    Bounds("restart", commits=1, faults=2, budget=budget("crash", "restart")),
    Bounds("messages", commits=1, faults=3, budget=budget("fault", "lose", "twice", "quit")),
    Bounds("apart", commits=2, faults=1, budget=budget("lose", "twice", "swap", "quit", "early")),
    Bounds("unheard", commits=1, faults=3, budget=budget("fault", lose=2), digests=True),
    Bounds("overrun", commits=0, faults=2, budget=budget("overrun", "hang")),
    Bounds("bus", commits=1, faults=2, budget=budget("fault", "lapse", "outage", "forget")),
    Bounds("mixed", commits=1, faults=2, budget=budget("torn", "drain", "lose", "lapse", "early")),
    Bounds("missed", commits=1, faults=3, budget=budget("torn", "lose", "fault")),
    Bounds("storm", commits=1, faults=4, budget=budget(no=4)),
    Bounds("start", commits=1, faults=1, formed=False, budget=budget("torn", "crash", "lose")),
    Bounds(
        "unlike", commits=1, faults=2, formed=False, alike=False, budget=budget("heal", "fault")
    ),
    Bounds("left behind", groups=3, commits=2, faults=1, budget=budget("late"), behind=2),
    Bounds("held", groups=3, commits=2, faults=1, budget=budget("late"), behind=1),
    Bounds("held, lost", groups=3, commits=1, faults=2, budget=budget("late", "crash"), behind=1),
    Bounds("shards", groups=1, ranks=2, commits=2, faults=1, budget=budget("silent", "torn")),
    Bounds(
        "mates", groups=1, ranks=2, commits=1, faults=1, formed=False, budget=budget("quit", "lose")
    ),
    Bounds("hang", commits=1, faults=1, budget=budget("hang")),
    Bounds("hang, mates", groups=1, ranks=2, commits=0, faults=3, budget=budget("lapse", hang=2)),
    Bounds("too few", commits=1, faults=2, least=2, budget=budget("crash", drain=2)),
    Bounds("skips", commits=1, faults=2, budget=budget("lose", "crash", "misfit", skip=2)),
    Bounds("flipped", commits=1, faults=1, budget=budget("flip"), digests=True),
    Bounds("compared, missed", commits=1, faults=3, budget=budget("no", lose=2), digests=True),
    Bounds(
        "diverged",
        commits=1,
        faults=3,
        budget=budget("corrupt", "bare", "silent", "restart"),
        digests=True,
    ),
    Bounds(
        "healed", groups=3, commits=1, faults=1, budget=budget("corrupt"), digests=True, heals=True
    ),
    Bounds("lost for good", commits=0, faults=1, budget=budget("loss")),
    Bounds("ended", commits=1, faults=3, budget=budget("restart", drain=2)),
    Bounds("deaf", commits=1, faults=1, budget=budget("deaf", "overrun")),
    Bounds("twin", commits=1, faults=1, budget=budget("twin")),
)
"""Bounds for a spec whose scope is bounded. Between two synchronizations any number of groups ask
to be in the next one, in any order, so that each fault costs more than in ``DEFAULT``."""

DEEP = (
    *DEFAULT,
    Bounds(
        "mixed, 3 faults",
        commits=1,
        faults=3,
        budget=budget("torn", "drain", "silent", "lose", "lapse", "early"),
    ),
    Bounds(
        "processes, 3 faults",
        commits=2,
        faults=3,
        budget=budget(
            "no", "misfit", "torn", "heal", "silent", "restart", "drain", fault=2, crash=2
        ),
    ),
    Bounds(
        "everything, 3 faults",
        commits=1,
        faults=3,
        budget=budget("fault", "torn", "crash", "drain", "early", "lose", "lapse"),
    ),
    Bounds(
        "start, all kinds",
        commits=1,
        faults=2,
        formed=False,
        budget=budget("fault", "torn", "heal", "crash", "silent", "lose", "twice", "swap", "lapse"),
    ),
    Bounds(
        "three groups, 2 faults",
        groups=3,
        commits=1,
        faults=2,
        budget=budget("crash", "silent", "torn", "drain", "lapse", "lose"),
    ),
    Bounds(
        "three groups, more kinds",
        groups=3,
        commits=1,
        faults=1,
        budget=budget("fault", "no", "misfit", "early", "outage"),
    ),
    Bounds(
        "healed, unheard",
        groups=3,
        commits=1,
        faults=2,
        budget=budget("corrupt", "lose"),
        digests=True,
        heals=True,
    ),
    Bounds("hang, 3 faults", commits=0, faults=3, budget=budget("fault", "lapse", "hang")),
    Bounds("too few, shards", ranks=2, commits=1, faults=1, least=2, budget=budget("drain")),
    Bounds(
        "re-forming, over", ranks=2, commits=1, faults=1, lost="replaced", budget=budget("over")
    ),
    Bounds(
        "re-forming, donor",
        ranks=2,
        commits=0,
        faults=1,
        lost="replaced",
        least=2,
        budget=budget("crash", "fault"),
    ),
    Bounds("shards, crash", ranks=2, commits=1, faults=1, budget=budget("crash")),
    Bounds("shards, fault", ranks=2, commits=1, faults=1, budget=budget("fault")),
)
"""Ten million states and more."""


_LONGEST = (
    "processes, 3 faults",
    "everything, 3 faults",
    "start, all kinds",
    "shards",
    "processes",
    "learner",
    "bus",
    "skips, joining",
    "skips",
    "start",
    "three, leaving",
)


def longest_first(sets: Sequence[Bounds]) -> list[int]:
    """Return the indexes of the sets in starting order, so that parallel runs end together."""
    at = {name: i for i, name in enumerate(_LONGEST)}
    return sorted(range(len(sets)), key=lambda i: (at.get(sets[i].name, len(at)), i))


def sets_for(spec: FsmSpec, deep: bool = False) -> tuple[Bounds, ...]:
    """Return the bounds that ``fft dev check`` searches for a spec."""
    if spec.bound:
        return ASYNC
    if spec.stages:
        return flow(len(spec.stages))
    found = DEEP if deep else DEFAULT
    if not spec.is_periodic:
        return found
    # a group with local steps leases one slice, and is never left out by a rule
    return tuple(b for b in found if not b.slices and not b.rules)
