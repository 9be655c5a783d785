"""Numbers for values, the renaming of groups in values, and the facts that may be dropped.

These make a large search affordable. Pure. Equal values get equal numbers, so that states are short
tuples of numbers, and everything computed about a value can be cached under its number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, Generic, TypeVar

from fft.messages.causes import NO_CAUSE
from fft.messages.protocol import Drain, Peer, Record, ScopeRecord
from fft.protocol.state import Local, ScopePosition

T = TypeVar("T", bound=Hashable)


class Interner(Generic[T]):
    """A bijection between values and numbers from 0."""

    def __init__(self) -> None:
        self._ids: dict[T, int] = {}
        self.values: list[T] = []

    def id(self, value: T) -> int:
        """Return the number of a value; a new value gets a new number."""
        found = self._ids.get(value)
        if found is None:
            found = self._ids[value] = len(self.values)
            self.values.append(value)
        return found

    def __getitem__(self, number: int) -> T:
        return self.values[number]

    def __len__(self) -> int:
        return len(self.values)


_LOCAL_FIELDS = tuple(f.name for f in dataclasses.fields(Local))


def freeze(local: Local) -> tuple[Hashable, ...]:
    """Return a hashable form of a participant's state; ``thaw`` is its inverse.

    It omits what no guard ever reads: texts, the clock, and the number of armed timers so far.
    """
    values = []
    for name in _LOCAL_FIELDS:
        value = getattr(local, name)
        if name == "timers":
            value = tuple(sorted(value))
        elif name == "timer_serial":
            value = 0
        elif name == "since":
            value = 0.0
        elif name == "cause":
            value = NO_CAUSE
        elif isinstance(value, Mapping):
            value = frozenset(value.items())
        values.append(value)
    return tuple(values)


def thaw(frozen: tuple[Any, ...]) -> Local:
    """Return the state that ``freeze`` was given, with timers renumbered."""
    values = dict(zip(_LOCAL_FIELDS, frozen, strict=True))
    timers = values["timers"]
    values["timers"] = {name: i for i, name in enumerate(timers, 1)}
    values["timer_serial"] = len(timers)
    for name in ("hellos", "stopped", "ready"):
        values[name] = dict(sorted(values[name]))
    return Local(**values)


@cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


class Renamer:
    """A function that returns values with other group names. Groups are named by one letter.

    It also renames texts that begin with a group's name: ``A.1`` (stores, hosts), ``A/0#1``
    (participants as text). Lists that the protocol keeps in the order of group names stay sorted.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._kept: dict[Any, Any] = {}

    def __call__(self, value: Any) -> Any:
        """Return the value under the new names; the same object if it contains no name."""
        if isinstance(value, str):
            if value[:1] in self._names and (len(value) == 1 or value[1] in "./"):
                return self._names[value[0]] + value[1:]
            return value
        if isinstance(value, Peer):
            return Peer(self._names[value.group], value.rank, value.inc)
        if isinstance(value, tuple):
            parts = map(self, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, frozenset):
            return frozenset(map(self, value))
        if dataclasses.is_dataclass(value):
            found = self._kept.get(value)
            if found is None:
                found = self._kept[value] = self._record(value)
            return found
        return value

    def _record(self, value: Any) -> Any:
        changes: dict[str, Any] = {}
        kind: type = type(value)
        for name in _fields(kind):
            old = getattr(value, name)
            if (new := self(old)) != old:
                changes[name] = new
        if isinstance(value, Record) and "members" in changes:
            changes["members"] = tuple(sorted(changes["members"], key=lambda g: g.group))
        if isinstance(value, Record) and "standing" in changes:
            changes["standing"] = tuple(sorted(changes["standing"], key=lambda g: g.entry.group))
        if isinstance(value, Record) and "leavers" in changes:
            order = sorted(zip(changes["leavers"], value.reasons, strict=True))
            changes["leavers"], changes["reasons"] = zip(*order, strict=True)
        if "groups" in changes and isinstance(value, Drain | ScopeRecord | ScopePosition):
            changes["groups"] = tuple(sorted(changes["groups"]))
        return dataclasses.replace(value, **changes) if changes else value


def can_matter(key: Any, epoch: int, record: int, cursor: int, lineages: frozenset[str]) -> bool:
    """Whether a later move can still refer to ``key``."""
    match key[0]:
        case "outcome" | "yes" | "committed" | "applied" | "begin" | "lineage" | "data of" | "skip":
            return bool(key[1].epoch >= epoch)
        case "start" | "leased" | "leases after":
            return bool(key[1].epoch >= epoch)
        case "epoch" | "in barrier" | "members":
            return bool(key[1] >= epoch)
        case "record":
            return bool(key[1] >= record)
        case "data from":
            return bool(key[1] >= cursor)
        case "heard":
            return True  # of another scope; there are few
        case "bases":
            return False  # only the notes of data loaders use it, and no model has these
        case "digest":
            return key[2] in lineages
        case "held" | "leases":
            return key[1] in lineages
    raise ValueError(f"how long does fact {key} matter?")
