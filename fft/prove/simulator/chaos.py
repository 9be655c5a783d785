"""Faults that occur at random times, and faults of step functions, in the simulated world only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fft.messages.protocol import Suspect
from fft.prove.simulator.groups import Group

if TYPE_CHECKING:
    from fft.prove.simulator.job import World
    from fft.prove.simulator.process import Process

_BODY = (
    *("exception", "late_exception", "one_sided", "skipped", "after_vote", "quit"),
    *("user_skips", "user_skips_early"),
)
_BURST = 5.0
"""Factor by which faults are more frequent in a burst."""
_MOST_GROUPS = 5


class Chaos:
    """The fault generator of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        rates = world.weather.rates
        self._kinds = [kind for kind in rates if rates[kind] > 0]
        self._weights = [rates[kind] for kind in self._kinds]
        chances = world.weather.chances
        self._fates = [(kind, chances[kind]) for kind in _BODY if chances.get(kind)]

    def begin(self) -> None:
        """Schedule the next fault at a random time."""
        if not self._kinds:
            return
        world = self._world
        often = _BURST if world.burst_until > world.clock.now else 1.0
        delay = world.rng.expovariate(sum(self._weights) * often)
        world.clock.after(delay, None, self._strike)

    def _strike(self) -> None:
        world = self._world
        if world.is_calm:
            return
        kind = world.rng.choices(self._kinds, self._weights)[0]
        if getattr(self, f"_{kind}")():
            world.count(kind)
        self.begin()

    def end(self) -> None:
        """Stop all faults and end their effects. (Killed processes stay dead.)"""
        world = self._world
        for process in world.live():
            process.slow, process.doom = 1.0, None
            process.link.lag = 0.0
            process.link.until = min(process.link.until, world.clock.now)
            if process.stopped:
                process.resume()
            world.bus.mend(process)
        world.outage_until = 0.0

    def body_fault(self) -> str | None:
        """Return the fault for a step function that begins now, or None."""
        world = self._world
        if world.burst_until > world.clock.now and world.rng.random() < 0.5:
            return world.rng.choice(["exception", "one_sided"])
        dice = world.rng.random()
        for kind, chance in self._fates:
            if dice < chance:
                return kind
            dice -= chance
        return None

    # --- victims ---

    def _some(self) -> Process | None:
        live = self._world.live()
        return self._world.rng.choice(live) if live else None

    def _spared(self, group: Group) -> bool:
        """Whether to spare the last group with the state; without it the job just ends."""
        return not self._world.holds_state(without=group) and self._world.rng.random() < 0.95

    def _live_group(self) -> Group | None:
        groups = [g for g in self._world.groups.values() if g.live]
        return self._world.rng.choice(groups) if groups else None

    def _group_in_an_epoch(self) -> Group | None:
        """Return a group that synchronizes now, which asynchronous groups do only briefly."""
        inside = [
            group
            for group in self._world.groups.values()
            if any(process.local.epoch is not None for process in group.live)
        ]
        return self._world.rng.choice(inside) if inside else None

    # --- kinds, by name; each returns whether it found a victim ---

    def _kill_rank(self) -> bool:
        process = self._some()
        if process is None or self._spared(process.group):
            return False
        if self._world.rng.random() < 0.5:
            process.doom = self._world.rng.randint(1, 12)
        else:
            self._world.strike_down(process)
        return True

    def _kill_group(self) -> bool:
        group = self._live_group()
        if group is None or self._spared(group):
            return False
        for process in group.live:
            self._world.clock.after(
                self._world.rng.random() * 0.01, process, self._world.strike_down, process
            )
        return True

    def _slow(self) -> bool:
        process = self._some()
        if process is None or process.slow != 1.0:
            return False
        process.slow = self._world.rng.choice([3.0, 10.0, 50.0])
        self._world.clock.after(self._world.rng.expovariate(1.0), None, self._quicken, process)
        return True

    def _quicken(self, process: Process) -> None:
        process.slow = 1.0

    def _stop_short(self) -> bool:
        return self._stop(0.05, 0.9)

    def _stop_long(self) -> bool:
        return self._stop(1.1, self._world.rng.choice([3.0, 8.0]))

    def _stop(self, least: float, most: float) -> bool:
        process = self._some()
        if process is None or process.stopped:
            return False
        self._hold(process, self._world.rng.uniform(least, most))
        return True

    def _hold(self, process: Process, windows: float) -> None:
        process.stopped = True
        window = process.participant.config.timeouts.get("ack_window", 1.0)
        self._world.clock.after(window * windows, None, self._continue, process)

    def _hang(self) -> bool:
        world, process = self._world, self._some()
        if process is None or process.stopped:
            return False
        # the interpreter lock held, or SIGSTOP: its engine does not run
        if world.rng.random() < 0.5:
            self._hold(process, world.rng.uniform(0.1, 5.0))
        config, me = process.participant.config, process.peer
        said = Suspect(me.group, me.rank, config.pid, config.host, by="monitor", cause="simulated")
        world.clock.after(world.rng.uniform(0.0, 0.3), None, world.announce, said)
        return True

    def _continue(self, process: Process) -> None:
        if process.alive and process.stopped:
            process.resume()

    def _drain(self) -> bool:
        group = self._live_group()
        if self._world.spec.bound and self._world.rng.random() < 0.5:
            group = self._group_in_an_epoch() or group
        # A rank that is still starting would miss the request and be left behind alone.
        if group is None or not group.whole:
            return False
        # A group of an asynchronous job stays until others no longer need its state.
        if not self._world.spec.bound and self._spared(group):
            return False
        by_signal = self._world.rng.random() < 0.5
        group.drain(by_signal)
        for world in self._world.beside.values():  # it is the same group in all scopes
            if (same := world.groups.get(group.name)) is not None and same.whole:
                same.drain(by_signal)
        return True

    def _join(self) -> bool:
        world = self._world
        if len(world.groups) >= _MOST_GROUPS:
            return False
        name = str(len(world.groups))
        supervised = world.rng.random() < 0.7
        for each in (world, *world.beside.values()):  # it is the same group in all scopes
            each.groups[name] = Group(each, name, supervised)
            each.groups[name].start()
        return True

    def _duplicate(self) -> bool:
        group = self._live_group()
        if group is None or group.coming or self._spared(group):
            return False
        group.start()
        return True

    def _partition(self) -> bool:
        live = self._world.live()
        if not live:
            return False
        victims = self._world.rng.sample(live, self._world.rng.randint(1, max(1, len(live) // 2)))
        self._cut(victims)
        return True

    def _outage(self) -> bool:
        world = self._world
        world.outage_until = world.clock.now + self._cut(world.live())
        return True

    def _cut(self, victims: list[Process]) -> float:
        rng = self._world.rng
        seconds, fails = rng.choice([0.1, 1.0, 5.0]) * (0.5 + rng.random()), rng.random() < 0.5
        for process in victims:
            self._world.bus.cut(process, seconds, fails)
        return seconds

    def _lag(self) -> bool:
        process = self._some()
        if process is None:
            return False
        process.link.lag = self._world.rng.choice([0.05, 0.5, 2.0])
        self._world.clock.after(self._world.rng.uniform(0.2, 2.0), None, self._catch_up, process)
        return True

    def _catch_up(self, process: Process) -> None:
        process.link.lag = 0.0

    def _burst(self) -> bool:
        world = self._world
        world.burst_until = world.clock.now + world.rng.uniform(0.3, 1.5)
        return True
