"""Guards of an asynchronous job: who asks to synchronise, and for whom that waits."""

from __future__ import annotations

from fft.messages.protocol import Event, Here, Join
from fft.protocol import apart
from fft.protocol.guards.base import guard
from fft.protocol.state import Config, Local


@guard
def between_epochs(s: Local, c: Config, event: Event) -> bool:
    """The last decision leaves nobody in an epoch."""
    return s.head is not None and s.head.kind != "epoch"


@guard
def epoch_is_open(s: Local, c: Config, event: Event) -> bool:
    """The last decision forms an epoch: its members synchronise."""
    return s.head is not None and s.head.kind == "epoch"


@guard
def all_are_ready(s: Local, c: Config, event: Event) -> bool:
    """All living groups of the job ask to synchronise."""
    return not apart.absent(s, apart.ready_groups(s, c))


@guard
def is_newest_word(s: Local, c: Config, event: Event) -> bool:
    """Nothing was heard from who speaks that it has said after this."""
    if not isinstance(event, Join):
        return False
    said = s.hellos.get((event.hello.peer.group, event.hello.peer.rank))
    return said is None or said.peer != event.hello.peer or said.head <= event.hello.head


@guard
def awaits_groups(s: Local, c: Config, event: Event) -> bool:
    """Groups that stand apart are needed: for the quorum, or because they are at the bound."""
    return bool(apart.awaited(s, c))


@guard
def i_am_first(s: Local, c: Config, event: Event) -> bool:
    """Of those who ask to synchronise I come first, so that not all propose the same."""
    return apart.first(s, c) == c.me


@guard
def i_am_awaited(s: Local, c: Config, event: Event) -> bool:
    """My group is needed by those who ask to synchronise: it is alive, and will come."""
    return any(c.me in each.entry.peers() for each in apart.awaited(s, c))


@guard
def awaits_others(s: Local, c: Config, event: Event) -> bool:
    """They are others than I have said last."""
    return apart.names(apart.awaited(s, c)) != s.awaits


@guard
def from_awaited(s: Local, c: Config, event: Event) -> bool:
    """It is a sign of life from a group that is needed."""
    who = event.peer if isinstance(event, Here) else None
    return any(who in each.entry.peers() for each in apart.awaited(s, c))


@guard
def state_stays(s: Local, c: Config, event: Event) -> bool:
    """I do not take the job's newest state along: another group has it, or nobody stays."""
    return apart.state_stays(s, c)


@guard
def was_in_job(s: Local, c: Config, event: Event) -> bool:
    """The last decision names my group among those of the job."""
    return apart.in_job(s, c.me)
