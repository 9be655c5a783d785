"""The starts of groups whose parts run on several hosts, which their supervisors agree on.

A part is the ranks of a group on one host. The supervisor of part 0 serves the store where the
ranks of the group meet. The register ``start/GROUP`` on the job's bus has the present start of the
group, its store, and the parts that have begun in it. A supervisor changes it by `compare_set`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fft.bus import ErrorBus
from fft.launch.supervisor.config import SupervisorError
from fft.messages.codec import Codec
from fft.messages.protocol import Count, UnreadableMessage

_CONFIG = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_CONFIG)
class GroupStart:
    """One start of a group. A group that is on one host has only a number and a store."""

    number: Count
    store: str = ""
    """``host:port`` of the first store of this start, which identifies it; empty until part 0 has
    begun."""
    home: str = ""
    """``host:port`` of the store where the ranks meet now."""
    parts: tuple[Count, ...] = ()
    """The parts that have begun."""
    reforms: bool = False
    """The group has committed a step, and lost parts of it may be replaced."""
    v: Literal[1] = 1


_STARTS = Codec[GroupStart](GroupStart)


class GroupStarts:
    """The register of each group. Raises BusError, and SupervisorError for one not readable."""

    def __init__(self, bus: ErrorBus) -> None:
        self._bus = bus

    def read(self, group: str) -> GroupStart | None:
        """Return the present start of the group, or None before the first one."""
        return self._read(group)[1]

    def begin(
        self, group: str, part: int, serve: Callable[[], str], is_new: bool
    ) -> tuple[GroupStart, bool] | None:
        """Let a part begin, in the present start of its group or in a new one.

        A part that has begun before takes its lost place in the present start, if the group may be
        re-formed. Otherwise all parts start again.

        Args:
            serve: Serves a store and returns its ``host:port``; called for part 0 only.
            is_new: Begin a new start, because this part was replaced in the present one in vain.

        Returns:
            The start, and whether the part replaces a lost one; None while part 0 has not begun.
        """
        serve = cache(serve)
        while True:
            held, now = self._read(group)
            has_begun = now is not None and part in now.parts
            replaces = has_begun and now is not None and now.reforms and not is_new
            if now is None or (has_begun and not replaces):
                wanted = GroupStart(1 if now is None else now.number + 1)
            else:
                wanted = now
            if part == 0:
                home = serve()
                wanted = replace(wanted, store=wanted.store or home, home=home)
            if wanted.home and part not in wanted.parts:
                wanted = replace(wanted, parts=(*wanted.parts, part))
            if now is None and not wanted.home:
                return None
            if wanted == now or self._set(group, held, wanted):
                return (wanted, replaces) if wanted.home else None

    def note(self, group: str, number: int, reforms: bool) -> None:
        """Record whether lost parts of the group may be replaced in the start ``number``."""
        held, now = self._read(group)
        if now is not None and now.number == number and now.reforms != reforms:
            self._set(group, held, replace(now, reforms=reforms))

    def _set(self, group: str, held: bytes | None, wanted: GroupStart) -> bool:
        desired = _STARTS.encode(wanted)
        return self._bus.compare_set(_register(group), held, desired) == desired

    def _read(self, group: str) -> tuple[bytes | None, GroupStart | None]:
        held = self._bus.read(_register(group))
        try:
            return held, None if held is None else _STARTS.decode(held)
        except UnreadableMessage as error:
            raise SupervisorError(
                f"the start of group {group} cannot be read on {self._bus.url}: {error}; use one "
                "version of FFT, and the job's token (FFT_TOKEN_FILE), on all hosts"
            ) from None


def _register(group: str) -> str:
    return f"start/{group}"


def part_name(group: str, part: int) -> str:
    """Return the name under which a part of a group is claimed; that of part 0 is the group's."""
    return f"{group} part {part}" if part else group


def part_named(name: str) -> tuple[str, int]:
    """Return the group and the number of a part by its name."""
    group, _, part = name.partition(" part ")
    return group, int(part or 0)
