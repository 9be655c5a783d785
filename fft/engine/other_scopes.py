"""Other scopes that this one is bound to: their records, received and read on their own buses."""

from __future__ import annotations

from collections.abc import Callable

from fft.bus.base import ErrorBus, Subscription
from fft.bus.resubscribing import ResubscribingListener
from fft.engine.calls import SCOPE, Buses
from fft.engine.core import Heard, ScopeReader
from fft.messages.protocol import ScopeRecord, UnreadableMessage
from fft.messages.wire import Packed, decode


class OtherScope:
    """Another scope on its real bus, which the caller owns.

    Args:
        name: The scope.
        bus: Its bus.
        most: Maximum number of groups whose data count, if others are spares.
    """

    def __init__(self, name: str, bus: ErrorBus, most: int | None = None) -> None:
        self.name = name
        self.bus = bus
        self._reader = ScopeReader(name, most, SCOPE)
        self.most = most

    def listen(self, put: Callable[[Heard], None], who: str) -> Subscription:
        """Receive the records of the scope from now on. Raises ``BusError``."""

        def hear(payload: bytes) -> None:
            try:
                message = decode(payload)
            except UnreadableMessage:
                return  # the scope's own ranks report it
            if isinstance(message, Packed) and message.record.kind != "abort":
                put(Heard(self.name, message))

        # a txn that waits for the scope reads the records that were missed
        return ResubscribingListener(self.bus, "protocol", hear, f"{who}, of scope {self.name},")

    def read(self) -> ScopeRecord | None:
        """Return the position that the newest record gives; see ``ScopeReader.read``.

        Raises:
            BusError, UnreadableMessage: The bus does not answer, or has no record of FFT.
        """
        return Buses(self.bus).run(self._reader.read())
