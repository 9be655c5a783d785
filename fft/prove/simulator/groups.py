"""Replica groups of a simulated job: their launchers start processes, see them end, and restart
them.

A supervised group is one under ``fft run``: a death is reported on the bus within milliseconds, the
rest of the group is ended with it, and the group restarts after a growing pause. Any other group
has a launcher that reports nothing: it notices late, or never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fft.messages.protocol import Death, Drain

if TYPE_CHECKING:
    from fft.prove.simulator.job import World
    from fft.prove.simulator.process import Process

_PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Seconds before the restarts of a supervised group, the last one for all later ones."""


class Group:
    """One replica group; ``instance`` counts its starts."""

    def __init__(self, world: World, name: str, supervised: bool) -> None:
        self.name = name
        self.supervised = supervised
        self.instance = 0
        self.processes: list[Process] = []
        """Processes of this instance that have started."""
        self.coming = False
        """A start is planned or in progress."""
        self.away = False
        """It has left regularly."""
        self.leaving = False
        """This instance was asked to leave."""
        self._world = world
        self._restarts = 0

    @property
    def live(self) -> list[Process]:
        """Processes of this instance that have not ended."""
        return [p for p in self.processes if p.alive]

    @property
    def whole(self) -> bool:
        """Whether every rank of this instance lives."""
        return len(self.live) == self._world.ranks

    # --- starting ---

    def _may_reform(self) -> bool:
        """Whether its live ranks wait for a process that replaces one that has ended."""
        world = self._world
        if world.name or not (self.live and len(self.processes) == world.ranks > 1):
            return False
        return not (self.leaving or world.is_ending) and world.strikes("reformed")

    def _reform(self, lost: Process) -> None:
        """Replace ``lost`` by one process, which was ready or has to start first."""
        world = self._world
        is_ready = world.rng.random() < 0.5
        self._tell(lost, replaced=world.rng.random() < 0.8)
        self.processes.remove(lost)
        self.coming = True
        delay = world.latency.handling if is_ready else world.latency.boot()
        world.clock.after(delay, None, self._spawn, lost.peer.rank, self.instance, True)

    def start_in(self, delay: float) -> None:
        """Start a new instance after ``delay`` seconds, unless that is planned already."""
        if not self.coming:
            self.coming = True
            self._world.clock.after(delay, None, self.start)

    def start(self) -> None:
        """Start a new instance now; its ranks come up one by one."""
        world = self._world
        self.instance += 1
        self.processes, self.coming = [], True
        self.away = self.leaving = False
        for rank in range(world.ranks):
            world.clock.after(world.latency.boot(), None, self._spawn, rank, self.instance)

    def _spawn(self, rank: int, instance: int, replaces: bool = False) -> None:
        world = self._world
        if instance != self.instance:
            return
        if not world.data_notes.may_start(self.name):
            if world.data_notes.has_left(self.name):
                self.coming, self.away = False, True
                return
            delay = world.latency.boot()
            world.clock.after(delay, None, self._spawn, rank, instance, replaces)
            return
        if world.outage_until > world.clock.now:  # it cannot get its incarnation from the bus
            delay = world.outage_until - world.clock.now + world.latency.boot()
            world.clock.after(delay, None, self._spawn, rank, instance, replaces)
            return
        self.processes.append(world.spawn(self, rank, instance, replaces))
        self.coming = len(self.processes) < world.ranks

    # --- ending ---

    def ended(self, process: Process) -> None:
        """Handle the end of a process, by itself or by a fault; ``process.code`` is set."""
        world = self._world
        if process.instance != self.instance:
            self._old_one_ended(process)
        elif process.code == 0:
            self._left()
        elif world.hopeless:
            return
        elif self.supervised or world.is_calm:
            world.clock.after(world.latency.notice(), None, self._notice, process)
        elif world.rng.random() < 0.75:
            delay = world.rng.uniform(0.5, 5.0)
            world.clock.after(delay, None, self.replace, self.instance)

    def _old_one_ended(self, process: Process) -> None:
        """Report the end of a process of an older instance, which is not restarted."""
        if process.code and self.supervised:
            self._world.clock.after(self._world.latency.notice(), None, self._tell, process)

    def _left(self) -> None:
        """Handle the regular end of a rank. If all ended so, the group is away; else it is
        broken."""
        if self.live or self.coming:
            return
        world = self._world
        if all(p.code == 0 for p in self.processes):
            self.away = True
            if not world.is_ending and world.rng.random() < 0.7:
                world.count("return")
                self.start_in(world.rng.uniform(0.1, 2.0))
        elif self.supervised:
            self._restart()

    def _notice(self, process: Process) -> None:
        if process.instance != self.instance:
            return
        if self._may_reform():
            self._reform(process)
            return
        self._tell(process)
        for mate in self.live:
            self._world.kill(mate)
            self._tell(mate)
        self._restart()

    def _tell(self, process: Process, replaced: bool = False) -> None:
        c = process.participant.config
        cause = "SIGKILL" if (process.code or 0) < 0 else f"exit status {process.code}"
        self._world.announce(
            Death(
                group=c.me.group,
                rank=c.me.rank,
                pid=c.pid,
                host=c.host,
                by="supervisor",
                cause=cause,
                replaced=replaced,
            )
        )

    def _restart(self) -> None:
        pause = _PAUSES[min(self._restarts, len(_PAUSES) - 1)]
        self._restarts += 1
        self._come_again(pause)

    def replace(self, instance: int) -> None:
        """Let a silent launcher end the rest of the instance and start the next one."""
        if instance != self.instance:
            return
        for mate in self.live:
            self._world.kill(mate)
        self._come_again(0.0)

    def _come_again(self, pause: float) -> None:
        self.instance += 1  # ranks of the old instance that are still starting do not come up
        self.coming = False
        if not self._world.is_ending:
            self.start_in(pause)
            return
        # the group does not restart, and it ends in all scopes
        for stage in self._world.beside.values():
            for mate in stage.groups[self.name].live:
                stage.kill(mate)

    def drain(self, by_signal: bool) -> None:
        """Ask the group to leave after a commit."""
        world, self.leaving = self._world, True
        if not by_signal:
            world.announce(Drain(groups=(self.name,), by="supervisor"))
            return
        for process in self.live:
            asked = Drain(groups=(self.name,), by=str(process.peer), local=True)
            world.clock.after(world.latency.notice(), process, process.post, asked)
