"""Notes of simulated processes on the data of their steps, like those of a real job.

Only FFT's own loop with data drawn by FFT is simulated; for groups with local steps, each slice is
one inner step. Stages pass on entries by oracle: the next stage can have at once what a rank has
begun to compute. An entry that is lost with its group is recomputed by a rank of the group that has
the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fft.messages.effects import StartTxn
from fft.protocol.spec import FsmSpec
from fft.trace.inputs import CONSUMED, ENTRY, LOOP, MADE_ANEW, TRANSACTIONS

if TYPE_CHECKING:
    from fft.messages.protocol import Peer
    from fft.prove.simulator.job import World
    from fft.prove.simulator.process import Process


class DataNotes:
    """The notes on data in one world."""

    def __init__(self, world: World, spec: FsmSpec) -> None:
        self._world = world
        self._takers = 1 if spec.samples == "per_group" else world.ranks
        follows = [e.scope for e in spec.bound_to(world.name) if not e.ahead] if world.name else []
        self._before = next(iter(follows), None)
        self._entries: dict[tuple[str, int], int] = {}
        """(group, slice) → the version with which its entry was computed here."""
        self._told: set[Peer] = set()
        """Participants that have noted the loop that they run."""

    @property
    def _source(self) -> DataNotes | None:
        """The notes of the stage before, or None if this is the first stage."""
        return None if self._before is None else self._world.beside[self._before].data_notes

    def takes(self, process: Process, plan: StartTxn) -> bool:
        """Whether a step function that begins has the entry that it computes on."""
        group, number = process.peer.group, plan.slice
        if number is None:
            return True
        self._entries[(group, number)] = plan.step
        if self._source is None:
            return True
        version = self._source.entry(group, number)
        if version is not None:
            told = {"slice": number, "version": version, "token": list(plan.token)}
            self._world.note(process, ENTRY, told)
        return version is not None

    def entry(self, group: str, number: int) -> int | None:
        """Return the version of the entry for the next stage, or None if no rank can compute it."""
        if (version := self._entries.get((group, number))) is not None:
            return version
        able = self._able(group)
        if not able:
            return None
        version = self._entries[(group, number)] = able[-1].local.step
        self._world.note(able[-1], MADE_ANEW, {"slice": number, "version": version})
        return version

    def _able(self, group: str) -> list[Process]:
        """Return the group's processes that have the state, including regularly ended ones."""
        mine = [p for p in self._world.processes.values() if p.peer.group == group]
        return [p for p in mine if p.local.healed and (p.alive or p.code == 0)]

    def may_start(self, group: str) -> bool:
        """Whether a rank of the group can join: the stage before must have a source for it."""
        return self._source is None or bool(self._source._able(group))

    def has_left(self, group: str) -> bool:
        """Whether the group has left the stage before regularly, so that it leaves all stages."""
        return self._source is not None and self._source._world.groups[group].away

    def consumed(self, process: Process, plan: StartTxn, number: int, base: int | None) -> None:
        """Note the slice of a committed txn that the rank has computed.

        Args:
            process: The process.
            plan: The txn.
            number: The slice.
            base: In an asynchronous job, the job's step that the contribution began from.
        """
        note, token, rank = self._world.note, list(plan.token), process.peer.rank
        if process.peer not in self._told:
            self._told.add(process.peer)
            note(process, LOOP, {"runs": TRANSACTIONS, "from": token})
        item = number * self._takers + (rank if self._takers > 1 else 0)
        data: dict[str, Any] = {"slice": number, "step": plan.step, "token": token}
        if not self._world.spec.is_periodic:
            data["item"] = item
        elif self._world.ranks == 1:  # scopes inside groups of several ranks are not simulated
            note(process, "inner_commit", {"slice": number, "item": item, "inner_step": 0})
            data["inner_steps"] = 1
        if base is not None:
            data["base"] = base
        note(process, CONSUMED, data)
