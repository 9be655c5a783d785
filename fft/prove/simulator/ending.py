"""The calm part of a simulated run, and its end: the job gets well, and leaves in good order."""

from __future__ import annotations

import math

from fft.messages.protocol import Drain, Timer
from fft.protocol.roles import AT_WORK
from fft.prove.simulator.job import Process, World

_LAST_EVENT = 20_000
"""Maximum number of events of a run; a job that never stops sending messages violates liveness."""
_LOOK = 0.25
"""Virtual seconds between two checks whether a calm job is well."""
_ASKED_AGAIN_S = 2.0
"""Virtual seconds between two drain requests to the whole job."""


def _pass(world: World, seconds: float) -> None:
    """Let virtual time pass."""
    until, passed = world.clock.now + seconds, [False]
    world.clock.after(seconds, None, passed.__setitem__, 0, True)
    while not passed[0] and world.clock.now <= until:
        world.clock.turn()
        if world.log.events > _LAST_EVENT:
            world.log.violated("liveness", f"more than {_LAST_EVENT} events: {_where(world)}")


def _bound(world: World) -> float:
    """Return the virtual seconds within which a calm job must be well again."""
    t = world.setting.timeouts
    windows = ("vote_window", "ready_window", "bus_limit", "join_window")
    waits = sum(t.get(name, 0.0) for name in windows)
    return 2 * waits + 64 * t.get("pause", 0.1) + 20 * t.get("ack_window", 1.0) + 30.0


def settle(world: World) -> float | None:
    """Check that the calm job gets well. Returns the time it took; None if it must be lost."""
    begun, deadline = world.clock.now, world.clock.now + _bound(world)
    _pass(world, 1.0)  # messages in transit arrive
    can = world.holds_state()
    world.hopeless = not can
    step = world.step
    while world.clock.now < deadline:
        if can and _state_left(world, begun):
            can = False
            world.hopeless = True
        if any(_is_lost(other, begun) for other in world.beside.values()):
            return None  # participants that wait for them wait forever
        if can:
            for each in (world, *world.beside.values()):
                _mend_groups(each)
            if world.step >= step + 2 and _is_well(world):
                return world.clock.now - begun
        elif not _in_doubt(world):
            return None
        _pass(world, _LOOK)
    what = "no progress" if can else "in doubt"
    world.log.violated(
        "liveness",
        f"{what} {world.clock.now - begun:.0f} s after the last fault: {_where(world)}",
    )
    return None


def _is_lost(world: World, begun: float) -> bool:
    """Whether the scope cannot go on, and must not."""
    world.hopeless |= not world.holds_state()
    return world.hopeless or _state_left(world, begun)


def _state_left(world: World, begun: float) -> bool:
    """Whether the state is gone because its holders left regularly, or because states differ.

    The holders were asked to leave; or they had waited for others since before the calm began,
    at ``begun``, and the ``quorum`` timer ended the wait.
    """
    head = world.bus.head
    if head is None or world.holds_state():
        return False
    if head.diverged:
        return True
    held = [p for p in world.processes.values() if p.local.lineage == head.lineage]
    return any(p.code == 0 or _gave_up(world, p, begun) for p in held)


def _gave_up(world: World, process: Process, begun: float) -> bool:
    moves = world.log.history.moves[process.peer]
    last = next((move for move in moves if move.after.role == "terminal"), None)
    if last is None or not isinstance(last.event, Timer):
        return False
    return last.event.name == "quorum" and last.before.since < begun


def _mend_groups(world: World) -> None:
    """Let the operator replace every group that is not whole by now."""
    for group in world.groups.values():
        ended = [p for p in group.processes if not p.alive]
        leaves = bool(group.live) and all(p.code == 0 for p in ended)
        if group.coming or group.whole or leaves or (group.away and _enough(world)):
            continue
        group.replace(group.instance)


def _enough(world: World) -> bool:
    return sum(g.whole for g in world.groups.values()) >= world.setting.min_groups


def _is_well(world: World) -> bool:
    """Whether every live process is a member of the newest epoch, in its txns."""
    head = world.bus.head
    if head is None or any(g.coming for g in world.groups.values()):
        return False
    if world.setting.behind:
        inside = {p for each in head.standing for p in each.entry.peers()}
        return all(p.peer in inside for p in world.live())
    return all(
        p.local.epoch is not None and p.local.token.epoch == head.epoch and p.local.role in AT_WORK
        for p in world.live()
    )


def _in_doubt(world: World) -> bool:
    return any(p.local.vote is not None and p.local.role != "terminal" for p in world.live())


def ask_all_to_leave(world: World) -> None:
    """Ask all groups to leave."""
    world.phase = "ending"
    _lose_needed_groups(world)
    for process in world.live():
        process.is_asked = True
    world.announce(Drain(groups=tuple(world.groups), by="supervisor"))
    if world.rng.random() < 0.5:  # it also passes a SIGTERM on
        for group in world.groups.values():
            group.drain(by_signal=True)


def _lose_needed_groups(world: World) -> None:
    """If one group is too few, kill groups until one is left, just before all are asked to
    leave."""
    setting = world.setting
    if setting.min_groups < 2 or setting.behind or world.beside or not setting.weather.rates:
        return
    for group in list(world.groups.values())[1:]:
        if group.live and world.holds_state(without=group):
            world.count("kill_group")
            for process in group.live:
                world.strike_down(process)


def see_all_leave(world: World) -> None:
    """Check that all processes end regularly; the request is repeated, as by ``fft drain``."""
    deadline, again = world.clock.now + _bound(world), world.clock.now + _ASKED_AGAIN_S
    while world.live():
        if world.clock.now > deadline:
            world.log.violated("liveness", f"asked to drain, but still there: {_where(world)}")
        if world.clock.now > again:
            again += _ASKED_AGAIN_S
            world.announce(Drain(groups=tuple(world.groups), by="supervisor"))
        _pass(world, _LOOK)
    if world.bus.head is not None and world.bus.head.diverged:
        return  # noticed only now; it ends all processes
    # A process that has lost its place in the message order can only be ended, with its group.
    everyone = (p for each in (world, *world.beside.values()) for p in _asked(each))
    deaf = {p.peer.group for p in everyone if p.local.deaf}
    badly = [p for p in _asked(world) if p.code != 0 and p.peer.group not in deaf]
    if bad := [f"{p.peer} ({p.code})" for p in badly]:
        world.log.violated("liveness", f"drained, but not in good order: {', '.join(bad)}")
    if late := [f"{p.peer}" for p in _asked(world) if _gave_up(world, p, math.inf)]:
        text = "drained, but waited for groups that do not come back"
        world.log.violated("liveness", f"{text}: {', '.join(late)}")


def _asked(world: World) -> list[Process]:
    return [p for p in world.processes.values() if p.is_asked]


def _where(world: World) -> str:
    head = world.bus.head
    at = f"head {head.kind} {head.epoch}.{head.txn} step {head.step}" if head else "no head"
    states = ", ".join(f"{p.peer} {p.local.state} {p.local.token}" for p in world.live())
    return f"{at}; {states or 'nobody is there'}"
