"""Guards of an asynchronous job: which groups ask to synchronize, and which are waited for."""

from __future__ import annotations

from fft.messages.protocol import Event, Here, Join
from fft.protocol import apart
from fft.protocol.guards.base import guard
from fft.protocol.state import Config, Local


@guard
def between_epochs(s: Local, c: Config, event: Event) -> bool:
    """The last decision ended an epoch, so no group is in one."""
    return s.head is not None and s.head.kind != "epoch"


@guard
def epoch_is_open(s: Local, c: Config, event: Event) -> bool:
    """The last decision forms an epoch, so its members are synchronizing."""
    return s.head is not None and s.head.kind == "epoch"


@guard
def all_are_ready(s: Local, c: Config, event: Event) -> bool:
    """All living groups of the job ask to synchronize."""
    return not apart.absent(s, apart.ready_groups(s, c))


@guard
def is_newest_word(s: Local, c: Config, event: Event) -> bool:
    """No later message has arrived from the sender of this `join`."""
    if not isinstance(event, Join):
        return False
    said = s.hellos.get((event.hello.peer.group, event.hello.peer.rank))
    return said is None or said.peer != event.hello.peer or said.head <= event.hello.head


@guard
def awaits_groups(s: Local, c: Config, event: Event) -> bool:
    """The next epoch needs local groups, for its sync fraction or because of the bound."""
    return bool(apart.awaited(s, c))


@guard
def i_am_first(s: Local, c: Config, event: Event) -> bool:
    """This participant comes first among those that ask to synchronize, so only it proposes."""
    return apart.first(s, c) == c.me


@guard
def i_am_awaited(s: Local, c: Config, event: Event) -> bool:
    """The groups that ask to synchronize need this participant's group."""
    return any(c.me in each.entry.peers() for each in apart.awaited(s, c))


@guard
def awaits_others(s: Local, c: Config, event: Event) -> bool:
    """The set of groups waited for differs from the one that was traced last."""
    return apart.names(apart.awaited(s, c)) != s.awaits


@guard
def from_awaited(s: Local, c: Config, event: Event) -> bool:
    """The event is a sign of life from a group that is waited for."""
    who = event.peer if isinstance(event, Here) else None
    return any(who in each.entry.peers() for each in apart.awaited(s, c))


@guard
def state_stays(s: Local, c: Config, event: Event) -> bool:
    """Another group holds the job's newest state, or no group stays that would need it."""
    return apart.state_stays(s, c)


@guard
def was_in_job(s: Local, c: Config, event: Event) -> bool:
    """The last decision lists this group among the groups of the job."""
    return apart.in_job(s, c.me)
