"""What bounds a search, and how bus and main threads behave in it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KINDS = (
    "fault",  # the body raises, before or after its vote
    "no",  # the body ends with a NO
    "misfit",  # the body took part in no reduction, or in others than its peers, and says YES
    "skip",  # the user skips the step, after its reductions or before
    "corrupt",  # a state changes that nobody was to change
    "bare",  # a vote without a digest, where others have one
    "torn",  # the optimizer step fails half way
    "heal",  # rebuilding groups or fetching state fails, though everybody lives
    "crash",  # a process ends; a monitor tells
    "silent",  # a process ends; nobody tells
    "restart",  # an ended group comes back as new incarnations
    "loss",  # a process ends; who tells it says, too, that its group gets another one
    "replace",  # a process comes in the place of one that ended, while others of its group live;
    # it takes so long to start that nothing else is under way then
    "twin",  # group A is started a second time while the first one lives
    "drain",  # a group is asked to leave
    "hang",  # a monitor says of a process, rightly or not, that its main thread does not move
    "early",  # a timer fires before its time: false suspicion
    "late",  # a wait for groups ends (join_window) before all have asked, but not before those
    # who have are heard
    "over",  # the wait for a lost rank's successor (reform_window) ends before its time
    "lose",  # a message never reaches one listener
    "twice",  # a message reaches one listener twice
    "swap",  # two messages reach one listener in the other order
    "lapse",  # one operation on the bus fails; whether it took effect is unknown
    "outage",  # the bus is out of reach for a while
    "deaf",  # a listener loses its place in the message order, and hears nothing for all any more
    "overrun",  # a listener falls behind: what it was to hear is lost, then it hears again
    "quit",  # the user shuts a manager down
    "forget",  # the bus ends and comes back empty
)
"""Faults, each with a budget of its own in a search."""
UNQUIET = ("early", "lose", "twice", "swap", "lapse", "outage", "deaf", "overrun", "forget")
"""Those that tell an order of messages from another."""
GIVES_UP = "bus_limit"
"""The timer that fires by itself only for whom the bus is gone: outages are shorter."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of one search: who takes part, how far it goes, which faults and how many."""

    name: str
    groups: int = 2
    ranks: int = 1
    commits: int = 2
    """Main threads begin no body at this committed step."""
    faults: int = 1
    """Faults in all."""
    budget: tuple[tuple[str, int], ...] = ()
    """Kind of fault: how many at most. Kinds that are not named do not happen."""
    formed: bool = True
    """Begin where the first epoch is running; else where the processes start."""
    lost: Literal["", "replaced", "waiting"] = ""
    """Begin where the last rank of group A was lost, and all others wait for its successor, which
    starts, or does not."""
    alike: bool = True
    """All groups begin with the same weights; else the first epoch copies one group's."""
    least: int = 1
    """Groups without which nothing goes on."""
    digests: bool = False
    """Votes bring digests of the states."""
    heals: bool = False
    """Whose state differs from most fetches it anew; else the job ends where states differ."""
    stage: int | None = None
    """Search the scope of that stage, and let those that the flow binds it to commit at any time
    that their own bounds allow. None: no other scope holds anybody."""
    ends: bool = False
    """Those scopes may end with any of their commits, and lose a group; else they are only left."""
    behind: int = 0
    """Of an asynchronous job: steps that a contribution may be behind; 0: as the spec says."""

    def describe(self) -> str:
        """One line for people."""
        what = ", ".join(f"{kind} ≤ {n}" for kind, n in self.budget)
        begin = "from the first txn" if self.formed else "from process start"
        begin += {"": "", "replaced": ", a rank replaced", "waiting": ", a rank lost"}[self.lost]
        least = f", {self.least} at least" if self.least > 1 else ""
        least += ", states compared" if self.digests else ""
        least += " and healed" if self.heals else ""
        least += f", stage {self.stage}" if self.stage is not None else ""
        least += ", beside one that may end" if self.ends else ""
        least += f", {self.behind} behind at most" if self.behind else ""
        return (
            f"{self.groups} groups x {self.ranks} ranks{least}, {begin}, {self.commits} commits, "
            f"{self.faults} faults of: {what or 'none'}"
        )


@dataclass(frozen=True)
class World:
    """How bus and main threads behave; anything but the default is a planted bug of theirs.

    What a main thread does when, is in its table.
    """

    write_once: bool = True
    """``compare_set`` compares."""
    generations: bool = True
    """A bus that lost its memory is recognised and never used again."""
    attempts: bool = True
    """Every attempt at a step has a ballot of its own."""
    restores: bool = True
    """A main thread that unwinds puts back the start of the step."""


REAL = World()
