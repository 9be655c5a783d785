"""Records of linked scopes (upstream and downstream stages), received on their own buses."""

from __future__ import annotations

from collections.abc import Callable

from fft.bus.base import ErrorBus, Subscription
from fft.bus.resubscribing import ResubscribingListener
from fft.engine.calls import SCOPE, Buses
from fft.engine.core import ScopeAnnouncement, ScopeReader
from fft.messages.protocol import ScopeRecord, UnreadableMessage
from fft.messages.wire import Packed, decode


class OtherScope:
    """A linked scope on its real bus, which the caller owns.

    Args:
        name: The scope.
        bus: The bus of the scope.
    """

    def __init__(self, name: str, bus: ErrorBus) -> None:
        self.name = name
        self.bus = bus
        self._reader = ScopeReader(name, SCOPE)

    def listen(self, put: Callable[[ScopeAnnouncement], None], who: str) -> Subscription:
        """Subscribe to the records of the scope. Raises ``BusError``."""

        def hear(payload: bytes) -> None:
            try:
                message = decode(payload)
            except UnreadableMessage:
                return  # the ranks of that scope report the unreadable message
            if isinstance(message, Packed) and message.record.kind != "abort":
                put(ScopeAnnouncement(self.name, message))

        # missed records need no handler: a txn that waits for the scope reads the head register
        return ResubscribingListener(self.bus, "protocol", hear, f"{who}, of scope {self.name},")

    def read(self) -> ScopeRecord | None:
        """Return the position according to the newest record; see ``ScopeReader.read``.

        Raises:
            BusError: The bus operation failed.
            UnreadableMessage: The register does not hold a record of FFT.
        """
        return Buses(self.bus).run(self._reader.read())
