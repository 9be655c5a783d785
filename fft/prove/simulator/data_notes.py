"""What simulated processes note of the data of their steps, as those of a real job do.

A loop of the job's own that draws by FFT is all there is; of groups that step alone each slice is
one inner step. Stages give entries by oracle: what a rank has begun to compute the next stage can
have at once; what is lost with its group is made anew by whoever of the group has the state.
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
    """Of one world."""

    def __init__(self, world: World, spec: FsmSpec) -> None:
        self._world = world
        self._takers = 1 if spec.samples == "per_group" else world.ranks
        follows = [e.scope for e in spec.bound_to(world.name) if not e.ahead] if world.name else []
        self._before = next(iter(follows), None)
        self._entries: dict[tuple[str, int], int] = {}
        """(group, slice) → the version with which its entry was computed here."""
        self._told: set[Peer] = set()
        """Who has said which loop it runs."""

    @property
    def _source(self) -> DataNotes | None:
        """Of the stage before; None: there is none."""
        return None if self._before is None else self._world.beside[self._before].data_notes

    def takes(self, process: Process, plan: StartTxn) -> bool:
        """A body begins. Whether there is what it computes on."""
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
        """The version of what the next stage is given for a slice; None: nobody can make it."""
        if (version := self._entries.get((group, number))) is not None:
            return version
        able = self._able(group)
        if not able:
            return None
        version = self._entries[(group, number)] = able[-1].local.step
        self._world.note(able[-1], MADE_ANEW, {"slice": number, "version": version})
        return version

    def _able(self, group: str) -> list[Process]:
        """Who of the group has the state, be it at the end of its work."""
        mine = [p for p in self._world.processes.values() if p.peer.group == group]
        return [p for p in mine if p.local.healed and (p.alive or p.code == 0)]

    def may_start(self, group: str) -> bool:
        """Whether a rank of the group can join: the stage before has somebody to give to it."""
        return self._source is None or bool(self._source._able(group))

    def has_left(self, group: str) -> bool:
        """Whether the group has left the stage before, in good order: it leaves all of them."""
        return self._source is not None and self._source._world.groups[group].away

    def consumed(self, process: Process, plan: StartTxn, number: int, base: int | None) -> None:
        """The txn is committed, of which the rank has computed that slice.

        Args:
            base: of an asynchronous job, the job's step that the contribution began from.
        """
        note, token, rank = self._world.note, list(plan.token), process.peer.rank
        if process.peer not in self._told:
            self._told.add(process.peer)
            note(process, LOOP, {"runs": TRANSACTIONS, "from": token})
        item = number * self._takers + (rank if self._takers > 1 else 0)
        data: dict[str, Any] = {"slice": number, "step": plan.step, "token": token}
        if not self._world.spec.is_periodic:
            data["item"] = item
        elif self._world.ranks == 1:  # those of several ranks have scopes that nobody simulates
            note(process, "inner_commit", {"slice": number, "item": item, "inner_step": 0})
            data["inner_steps"] = 1
        if base is not None:
            data["base"] = base
        note(process, CONSUMED, data)
