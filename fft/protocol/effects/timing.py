"""Effects: timers, pauses, and being without the bus."""

from __future__ import annotations

from collections.abc import Iterable

from fft.messages.effects import ClearTimers, Effect, SetTimer
from fft.messages.protocol import BusDown, Event, Timer
from fft.protocol.effects.base import action
from fft.protocol.state import FREE_ROLLBACKS, Config, Local

_LONGEST_PAUSE = 64.0
"""In units of the ``pause`` timeout."""
_LONGER = 1.5
"""Times a window, for those who shall not be the first to give up."""


def arm(s: Local, c: Config, name: str, factor: float = 1.0) -> SetTimer:
    """Arm (or re-arm) one timer for ``factor`` times its configured seconds."""
    s.timer_serial += 1
    s.timers = {**s.timers, name: s.timer_serial}
    return SetTimer(name, c.timeouts[name] * factor, s.timer_serial)


@action
def count_rollback(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """One more rollback without a commit between."""
    s.rollbacks += 1
    return ()


@action
def pause(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Wait before the next epoch: 1, 2, 4 … the longer the more rollbacks came in a row."""
    s.paused = True
    yield arm(s, c, "pause", min(2.0 ** (s.rollbacks - FREE_ROLLBACKS - 1), _LONGEST_PAUSE))


@action
def end_pause(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The pause is over."""
    s.paused = False
    return ()


@action
def rearm(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Arm again the timer that fired."""
    assert isinstance(event, Timer)
    yield arm(s, c, event.name)


@action
def rearm_join_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """A member gave a sign of life: wait for it to let me in."""
    yield arm(s, c, "join_window")


@action
def rearm_quorum(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """It may take as long as its step takes."""
    yield arm(s, c, "quorum")


@action
def rearm_ack_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The others tell somebody else: they have the window once more."""
    yield arm(s, c, "ack_window")


@action
def rearm_coordinator_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The coordinator lives: it has the window once more."""
    yield arm(s, c, "coordinator_window")


@action
def arm_ready_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The epoch is formed: from now on its members have the window to come in."""
    yield arm(s, c, "ready_window")


@action
def arm_longer_ready_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The same; but its coordinator knows who is absent, so it is the first to give up."""
    yield arm(s, c, "ready_window", _LONGER)


@action
def arm_reform_window(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """So long the next epoch waits for a group that lost a process."""
    yield arm(s, c, "reform_window")


@action
def end_reforming(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The window is over: the next epoch is formed with the groups that are whole."""
    s.reforming = frozenset()
    return ()


@action
def note_bus_down(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The bus is out of reach."""
    assert isinstance(event, BusDown)
    s.deaf |= event.for_good
    s.bus_down = True
    return ()


@action
def arm_bus_retry(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Try again soon."""
    yield arm(s, c, "bus_retry")


@action
def arm_bus_limit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """Give the bus the limit to come back."""
    yield arm(s, c, "bus_limit")


@action
def arm_bus_quiet(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The trouble goes on: it is over when nothing fails for so long."""
    yield arm(s, c, "bus_quiet")


@action
def forget_bus_limit(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """The trouble is over."""
    s.timers = {name: serial for name, serial in s.timers.items() if name != "bus_limit"}
    yield ClearTimers(("bus_limit",))


@action
def give_up_proposal(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    """What I proposed may be lost with the bus: I may propose again.

    Not before the retry timer: a proposal that is repeated at once, and fails at once, would leave
    no time for any timer, that of giving up included.
    """
    s.proposed = False
    return ()
