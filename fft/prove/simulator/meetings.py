"""Meetings, which all members of an epoch must enter before any goes on: reductions and rebuilds.

A collective cannot complete before every member has entered it. If a member dies or drops its
connections, the waiting members fail: some at once, because they were its neighbours, others only
when their own timeout expires, as with gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fft.messages.protocol import Peer

if TYPE_CHECKING:
    from fft.prove.simulator.job import World
    from fft.prove.simulator.process import Process


class Meeting:
    """The reductions of one txn, or the rendezvous of one epoch."""

    def __init__(self, world: World, peers: tuple[Peer, ...]) -> None:
        self.peers = peers
        self._world = world
        self._came: dict[Peer, tuple[Process, int]] = {}
        self._missing = next((p for p in peers if not world.is_alive(p)), None)
        """A member that will never come."""
        self._complete = False

    def join(self, process: Process, serial: int, limit: float) -> None:
        """Let ``process`` wait for ``main.met`` or ``main.missed``, within ``limit`` seconds."""
        world = self._world
        self._came[process.peer] = (process, serial)
        if self._missing is not None:
            self._disappoint(process, serial, limit)
        elif len(self._came) == len(self.peers):
            self._complete = True
            for member, waits in self._came.values():
                member.later(world.latency.hop(), member.main.met, waits)
        else:
            world.clock.after(limit, process, process.main.missed, serial, "timed out")

    def lose(self, peer: Peer) -> None:
        """Handle that ``peer`` is gone, or has dropped its connections."""
        if self._complete:
            # The meeting was complete, but some waiting members may lack the last part of it.
            for member, serial in self._came.values():
                if self._world.rng.random() < 0.3:
                    cause = f"connection closed by {peer}"
                    self._world.clock.after(0.0, member, member.main.missed, serial, cause)
            return
        first, self._missing = self._missing is None, self._missing or peer
        if first:
            for member, serial in self._came.values():
                if member.peer != peer:
                    self._disappoint(member, serial, None)

    def _disappoint(self, member: Process, serial: int, limit: float | None) -> None:
        """Fail a member at once, or by its own timeout only (``None``: that is planned already)."""
        world, cause = self._world, f"connection closed by {self._missing}"
        if world.rng.random() < 0.6:
            world.clock.after(world.latency.notice(), member, member.main.missed, serial, cause)
        elif limit is not None:
            world.clock.after(limit, member, member.main.missed, serial, cause)
