"""Whether the job is over: all have left it with one commit. Reads the bus, and nothing else."""

from __future__ import annotations

from fft.bus.base import HEAD, ErrorBus
from fft.messages.protocol import Record
from fft.messages.wire import EPOCH, Wire, decode_packed


def last_epoch(bus: ErrorBus) -> Record | None:
    """The epoch whose groups have all left with the newest commit; None: somebody may go on.

    Raises BusError, UnreadableMessage.
    """
    held = bus.read(HEAD)
    head = None if held is None else decode_packed(held).record
    if head is None or head.kind != "commit" or not head.leavers:
        return None
    listed = bus.read(EPOCH)  # it may be late by a moment
    epoch = None if listed is None else Wire().found(decode_packed(listed), bus.read)
    if epoch is None or epoch.epoch != head.epoch:
        return None
    return epoch if {entry.group for entry in epoch.members} <= set(head.leavers) else None
