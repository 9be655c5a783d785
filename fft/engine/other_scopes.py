"""Other scopes that this one is bound to: their records, heard and read on their own buses.

Touches buses; owns its subscriptions, not the buses. What is heard comes on a listener's thread and
is put into the engine's queue; the rest is the engine thread's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from fft.bus.base import HEAD, BusError, ErrorBus, Subscription
from fft.bus.resubscribing import ResubscribingListener
from fft.messages.effects import TellHeld
from fft.messages.progress import HeldReport, encode_report
from fft.messages.protocol import Peer, Record, ScopeRecord, UnreadableMessage
from fft.messages.wire import EPOCH, Packed, Wire, decode, decode_packed, left_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Heard:
    """A record of another scope, as it was announced there."""

    scope: OtherScope
    packed: Packed


class OtherScope:
    """One of them."""

    def __init__(self, name: str, bus: ErrorBus, most: int | None = None) -> None:
        """``most``: groups whose data count, if others are spares."""
        self.name = name
        self._most = most
        self.bus = bus
        self._wire = Wire()
        self._epoch: Record | None = None
        """The newest one that was seen."""

    def listen(self, put: Callable[[Heard], None], who: str) -> Subscription:
        """Hear its records from now on. Raises BusError."""

        def hear(payload: bytes) -> None:
            try:
                word = decode(payload)
            except UnreadableMessage:
                return  # its own ranks tell of it
            if isinstance(word, Packed) and word.record.kind != "abort":
                put(Heard(self, word))

        # what is missed is read by whoever is held
        return ResubscribingListener(self.bus, "protocol", hear, f"{who}, of scope {self.name},")

    def take(self, packed: Packed) -> ScopeRecord | None:
        """What a record says to this scope; None: its scope has moved on. Raises BusError."""
        record = self._wire.found(packed, self.bus.read)
        if record is None:
            return None
        if record.kind == "epoch":
            self._epoch = record
        elif self._epoch is None or self._epoch.epoch != record.epoch:
            held = self.bus.read(EPOCH)
            found = None if held is None else self._wire.found(decode_packed(held), self.bus.read)
            if found is None or found.epoch != record.epoch:
                return None  # it is being written
            self._epoch = found
        groups = tuple(g.group for g in self._epoch.members if g.group not in record.leavers)
        takers = len(groups) if self._most is None else min(len(groups), self._most)
        return ScopeRecord(self.name, record.n, record.cursor, groups, takers)

    def read(self) -> ScopeRecord | None:
        """What its newest record says; None: there is none, or it is being written.

        Raises BusError, UnreadableMessage.
        """
        held = self.bus.read(HEAD)
        found = None if held is None else self.take(decode_packed(held))
        if found is None or not all(map(self._has_left, found.groups)):
            return found
        return replace(found, groups=(), takers=0)

    def _has_left(self, group: str) -> bool:
        """Whether a member group has left without a record, as all may at once. Raises BusError."""
        assert self._epoch is not None, "its groups are known"
        ranks = next(g.ranks for g in self._epoch.members if g.group == group)
        return all(self.bus.read(left_name(group, r.rank)) == b"%d" % r.inc for r in ranks)


def tell_left(me: Peer, bus: ErrorBus) -> None:
    """Say on the bus of the scope of ``me`` that it has left, for who is held by that scope.

    No record says so where the last groups leave without a commit.
    """
    try:
        bus.write(left_name(me.group, me.rank), b"%d" % me.inc)
    except BusError as error:
        logger.warning("stages that wait for this one may not hear that it has left: %s", error)


def tell_held(held: TellHeld, me: Peer, bus: ErrorBus) -> None:
    """Say in the log, and to who watches, that ``me`` waits for another scope."""
    logger.warning(
        "step %d waits until scope %s has taken %d slices of the data; it has taken %d",
        held.step,
        held.scope,
        held.needed,
        held.cursor,
    )
    step, cursor = held.step, held.cursor
    report = HeldReport(me.group, me.rank, me.inc, step, held.scope, cursor, held.needed)
    with suppress(BusError):  # for who watches; it is in the trace
        bus.broadcast(encode_report(report), "progress")
