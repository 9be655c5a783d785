"""Effects: timers, pauses, and the loss of the bus."""

from __future__ import annotations

from collections.abc import Iterable

from fft.messages.effects import ClearTimers, Effect, SetTimer
from fft.messages.protocol import BusDown, Event, Timer
from fft.protocol.effects.base import action
from fft.protocol.state import FREE_ROLLBACKS, Config, Local

_LONGEST_PAUSE = 64.0
"""Longest pause, in units of the ``pause`` timeout."""
_LONGER = 1.5
"""Factor of a window for participants that must not be the first to give up."""


def arm(s: Local, c: Config, name: str, factor: float = 1.0) -> SetTimer:
    """Arm (or re-arm) one timer for ``factor`` times its configured seconds."""
    s.timer_serial += 1
    s.timers = {**s.timers, name: s.timer_serial}
    return SetTimer(name, c.timeouts[name] * factor, s.timer_serial)


@action
def count_rollback(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Count one more rollback since the last commit."""
    s.rollbacks += 1
    return ()


@action
def pause(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Wait before the next epoch; each further rollback in a row doubles the pause: 1, 2, 4 …"""
    s.paused = True
    yield arm(s, c, "pause", min(2.0 ** (s.rollbacks - FREE_ROLLBACKS - 1), _LONGEST_PAUSE))


@action
def end_pause(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """End the pause."""
    s.paused = False
    return ()


@action
def rearm(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Rearm the timer that fired."""
    assert isinstance(event, Timer)
    yield arm(s, c, event.name)


@action
def rearm_join_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Restart the window after a sign of life from a member, which will admit this group."""
    yield arm(s, c, "join_window")


@action
def rearm_quorum(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Restart the limit for an epoch, because the members may take as long as their step takes."""
    yield arm(s, c, "quorum")


@action
def rearm_ack_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Restart the window, because the members acknowledge to another coordinator."""
    yield arm(s, c, "ack_window")


@action
def rearm_coordinator_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Restart the window after a sign of life from the coordinator."""
    yield arm(s, c, "coordinator_window")


@action
def arm_ready_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Start the time that the members of the new epoch have to enter its barrier."""
    yield arm(s, c, "ready_window")


@action
def arm_longer_ready_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Start a longer window, because the coordinator knows the absent members and gives up
    first."""
    yield arm(s, c, "ready_window", _LONGER)


@action
def arm_reform_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Start the time that the next epoch waits for the replacement of a lost process."""
    yield arm(s, c, "reform_window")


@action
def end_reforming(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Stop waiting for replacements; the next epoch is formed by the groups that are whole."""
    s.reforming = frozenset()
    return ()


@action
def note_bus_down(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Remember that an operation on the bus failed."""
    assert isinstance(event, BusDown)
    s.deaf |= event.for_good
    s.bus_down = True
    return ()


@action
def arm_bus_retry(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Start the time until the next retry on the bus."""
    yield arm(s, c, "bus_retry")


@action
def arm_bus_limit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Start the time within which the bus must answer again."""
    yield arm(s, c, "bus_limit")


@action
def arm_bus_quiet(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Restart the time without a failure after which the trouble with the bus is over."""
    yield arm(s, c, "bus_quiet")


@action
def forget_bus_limit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Clear the limit of the bus, because the trouble is over."""
    s.timers = {name: serial for name, serial in s.timers.items() if name != "bus_limit"}
    yield ClearTimers(("bus_limit",))


@action
def give_up_proposal(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Allow a new proposal, because the last one may have been lost with the bus.

    This happens only when the retry timer fires. A proposal that is repeated at once and fails at
    once would leave no time for other timers, including the one that limits the retries.
    """
    s.proposed = False
    return ()
