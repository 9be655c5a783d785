"""A planted bug: its place, the search for it, and whether its property detects it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property

import yaml

from fft.errors import FftError
from fft.protocol.load import load_spec, load_thread, parse_spec, parse_thread
from fft.protocol.main_thread import ThreadTable
from fft.protocol.participant import Participant
from fft.protocol.spec import FsmSpec
from fft.prove.bounds import REAL, Bounds, World
from fft.prove.checker import Result, Search, search
from fft.prove.planting import Change


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    ``what`` describes it in a sentence; ``expected`` names the property that it breaks (an
    invariant, ``protocol`` or ``eventually``).
    """

    name: str
    what: str
    expected: str
    bounds: Bounds
    change: Change | None = None
    """The change of the table."""
    participant: type[Participant] = Participant
    """The core, in which some names have another meaning."""
    world: World = REAL
    thread: Change | None = None
    """The change of the main thread's table."""
    base: str = "hsdp"
    """The table that is changed."""
    sound: str = "hsdp"
    """The table that must be clean within the same bounds."""

    @cached_property
    def spec(self) -> FsmSpec:
        """The table with the bug in it; it passes the same checks as any other."""
        sound = load_spec(self.base)
        if self.change is None:
            return sound
        raw = sound.model_dump()
        self.change(raw)
        return parse_spec(yaml.safe_dump(raw), f"mutant {self.name}")

    @cached_property
    def thread_table(self) -> ThreadTable | None:
        """The main thread's table with the bug in it, or None if that table is unchanged."""
        if self.thread is None:
            return None
        raw = load_thread().model_dump()
        self.thread(raw)
        return ThreadTable(parse_thread(yaml.safe_dump(raw), f"mutant {self.name}"))

    @property
    def place(self) -> str:
        """Place of the bug."""
        where = [
            word
            for word, there in (
                ("table", self.change is not None or self.base != self.sound),
                ("core", self.participant is not Participant),
                ("main thread", self.thread is not None or not self.world.restores),
                ("bus", replace(self.world, restores=True) != REAL),
            )
            if there
        ]
        return ", ".join(where)


def run(mutant: Mutant, limit: int = 400_000) -> tuple[Search, Result]:
    """Search within the mutant's bounds, with the bug planted. ``limit``: maximum number of
    states."""
    return search(
        mutant.spec,
        mutant.bounds,
        mutant.participant,
        mutant.world,
        limit,
        thread=mutant.thread_table,
    )


@cache
def run_sound(bounds: Bounds, name: str = "hsdp") -> Result:
    """Search a shipped table within bounds, without a planted bug. Cached per table and bounds."""
    return search(load_spec(name), bounds)[1]


class NotCaught(FftError):
    """A mutant survived, or was detected by another property than the one it names."""


def caught(mutant: Mutant) -> tuple[Search, Result]:
    """Search within the mutant's bounds.

    Raises:
        NotCaught: The bug does not break the property that it must break.
    """
    made, result = run(mutant)
    found = result.violation.name if result.violation else "nothing"
    if found != mutant.expected:
        raise NotCaught(f"mutant {mutant.name} must break {mutant.expected}; it broke {found}")
    return made, result
