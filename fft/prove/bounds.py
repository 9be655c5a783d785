"""Bounds of a search, and the behaviour of bus and main threads in it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KINDS = (
    "fault",  # the step function raises, before or after its vote
    "no",  # the step function ends with a NO
    "misfit",  # votes YES without a reduction, or with others than its peers
    "flip",  # gradients are wrong after their reduction, and the vote follows the protocol
    "skip",  # the user skips the step, before or after its reductions
    "block",  # a rank enters or ends a live block, in the place of a step
    "final",  # a rank ends a live block after which its program ends
    "corrupt",  # a state changes wrongly
    "bare",  # a vote without a digest, where others have one
    "torn",  # the optimizer step fails half way
    "heal",  # rebuilding groups or fetching state fails, though all processes live
    "crash",  # a process ends, and a monitor reports it
    "silent",  # a process ends without a report
    "restart",  # an ended group comes back as new incarnations
    "loss",  # a process ends, and the report adds that its group gets another one
    "replace",  # a process replaces one that ended, while others of its group live;
    # it takes so long to start that nothing else is in progress then
    "twin",  # group A is started a second time while the first instance lives
    "drain",  # a group is asked to leave
    "hang",  # a monitor reports, rightly or not, that a main thread does not move
    "early",  # a timer fires early: false suspicion
    "late",  # a wait for groups ends (join_window) before all have asked, but only after those
    # that have asked were received
    "over",  # the wait for a lost rank's successor (reform_window) ends early
    "lose",  # a message never reaches one listener
    "twice",  # a message reaches one listener twice
    "swap",  # two messages reach one listener in the other order
    "lapse",  # one operation on the bus fails; whether it took effect is unknown
    "outage",  # the bus is out of reach for a while
    "deaf",  # a listener loses its place in the message order, and receives no more broadcasts
    "overrun",  # a listener falls behind: it loses its pending messages, then continues
    "quit",  # the user shuts a manager down
    "forget",  # the bus ends and comes back empty
)
"""Kinds of faults, each with its own budget in a search."""
UNQUIET = ("early", "lose", "twice", "swap", "lapse", "outage", "deaf", "overrun", "forget")
"""Kinds of faults for which the order of messages matters."""
GIVES_UP = "bus_limit"
"""The timer that fires by itself only for a participant whose bus is gone; outages are shorter."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of one search: participants, length, and the number of faults of each kind."""

    name: str
    groups: int = 2
    ranks: int = 1
    commits: int = 2
    """Main threads begin no step function at this committed step."""
    faults: int = 1
    """Total number of faults."""
    budget: tuple[tuple[str, int], ...] = ()
    """(kind of fault, maximum number). Kinds that are not listed do not happen."""
    formed: bool = True
    """Begin with the first epoch running; otherwise with the start of the processes."""
    lost: Literal["", "replaced", "waiting"] = ""
    """Begin after the loss of the last rank of group A, while all others wait for its successor.
    The successor starts (``replaced``) or does not (``waiting``)."""
    alike: bool = True
    """All groups begin with the same weights; otherwise the first epoch copies one group's."""
    least: int = 1
    """Minimum number of groups for progress."""
    digests: bool = False
    """Votes contain digests of the states."""
    heals: bool = False
    """A rank whose state differs from the majority's fetches it again; otherwise the job ends if
    states differ."""
    stage: int | None = None
    """Search the scope of that stage, while the scopes that the flow binds it to may commit at any
    time within their own bounds. None: no other scope holds a group back."""
    ends: bool = False
    """Those scopes may end with any of their commits, and lose a group; otherwise they are only
    left."""
    behind: int = 0
    """Number of steps that a contribution of an asynchronous job may be behind; 0: as in the
    spec."""
    slices: int = 0
    """Number of slices of the data that each txn takes; 0: one for each group that contributes."""

    rules: tuple[tuple[str, int], ...] = ()
    """Rules that choose the groups of an epoch that contribute."""

    def describe(self) -> str:
        """Return a one-line description."""
        what = ", ".join(f"{kind} ≤ {n}" for kind, n in self.budget)
        begin = "from the first txn" if self.formed else "from process start"
        begin += {"": "", "replaced": ", a rank replaced", "waiting": ", a rank lost"}[self.lost]
        least = f", {self.least} at least" if self.least > 1 else ""
        least += ", states compared" if self.digests else ""
        least += " and healed" if self.heals else ""
        least += f", stage {self.stage}" if self.stage is not None else ""
        least += ", beside one that may end" if self.ends else ""
        least += f", {self.behind} behind at most" if self.behind else ""
        least += f", {self.slices} slices a step" if self.slices else ""
        least += "".join(f", {kind}({number})" for kind, number in self.rules)
        return (
            f"{self.groups} groups x {self.ranks} ranks{least}, {begin}, {self.commits} commits, "
            f"{self.faults} faults of: {what or 'none'}"
        )


@dataclass(frozen=True)
class World:
    """The behaviour of bus and main threads; any value but the default is a planted bug.

    The order of a main thread's actions is in its table.
    """

    write_once: bool = True
    """``compare_set`` compares."""
    generations: bool = True
    """A bus that lost its memory is recognized and never used again."""
    attempts: bool = True
    """Every attempt at a step has its own ballot."""
    restores: bool = True
    """A main thread that unwinds restores the start of the step."""


REAL = World()
