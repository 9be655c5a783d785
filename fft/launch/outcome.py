"""The outcome of a whole job, judged from its bus after, or while, its supervisors end.

Each `fft run` writes its exit status to the bus when it releases its groups. A scheduler does not
know it: `srun`, for example, also returns 0 when a node was lost. Accesses only the bus.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fft.bus import BusUnreachable, ErrorBus
from fft.errors import FftError
from fft.launch.exit_status import DONE, IN_A_WORD, RELEASE_S, ExitStatus
from fft.launch.supervisor.ending import Outage, head_of, last_epoch
from fft.launch.verdict import WHOLE, GroupEnd, Statuses, first, in_words
from fft.messages.commands import Holder, decode_holder, holder_register
from fft.messages.exits import Exit, decode_exit, exit_register
from fft.messages.protocol import UnreadableMessage

_LOOK_S = 1.0
"""Interval between two reads of the registers, in seconds; nothing announces a release."""
_OUTAGE_S = 30.0
"""Maximum time without an answer of the bus, in seconds. A server that was only silent has kept its
contents, and the servers of a cluster elect a leader after the loss of another."""


@dataclass(frozen=True)
class Outcome:
    """The end of a job, or its present state while supervisors of groups run."""

    holders: Mapping[str, Holder | None]
    """The last supervisor of each group; None if there was none."""
    step: int
    is_over: bool
    """All groups of the newest epoch have left."""
    exits: Mapping[str, tuple[Exit, ...]] = field(default_factory=dict)
    """How the ranks of each group have ended."""

    @classmethod
    def read(cls, bus: ErrorBus, groups: int) -> Outcome:
        """Read the outcome of a job of so many groups.

        Raises:
            FftError: The bus cannot be reached, or a register cannot be read without the token.
        """
        try:
            head, is_over = head_of(bus), last_epoch(bus) is not None
            held = {str(n): bus.read(holder_register(str(n))) for n in range(groups)}
            holders = {g: None if v is None else decode_holder(v) for g, v in held.items()}
            exits = {group: _exits(bus, group) for group in held}
        except UnreadableMessage as error:
            raise FftError(
                f"the job on {bus.url} cannot be read without its token: set FFT_TOKEN_FILE "
                f"({error})"
            ) from error
        return cls(holders, 0 if head is None else head.step, is_over, exits)

    @property
    def has_ended(self) -> bool:
        """Whether each group had a supervisor, and all supervisors have ended in good order."""
        return not self.lost

    @property
    def lost(self) -> list[str]:
        """The groups whose supervisor has not ended in good order, or that were never started."""
        return [g for g, h in self.holders.items() if h is None or h.status is None]

    @property
    def status(self) -> ExitStatus:
        """The exit status of the whole job, by the table `WHOLE`."""
        begun = min((h.begun for h in self.holders.values() if h is not None), default=0)
        held = [None if h is None else h.status for h in self.holders.values()]
        statuses = [None if status is None else ExitStatus(status) for status in held]
        return first(WHOLE, Statuses(statuses, self.step > begun)).then

    def __str__(self) -> str:
        return f"{IN_A_WORD[self.status]}, {self.so_far}"

    @property
    def so_far(self) -> str:
        """The step and the supervisor of each group, without a verdict."""
        ends = ", ".join(f"group {g}: {self._in_words(g, h)}" for g, h in self.holders.items())
        return f"at step {self.step} ({ends})"

    def _in_words(self, group: str, holder: Holder | None) -> str:
        if holder is None:
            return "never started"
        if holder.status is None:
            return f"not ended by its `fft run` (pid {holder.pid} on {holder.host})"
        failed = GroupEnd(group, self.exits.get(group, ())).failed
        is_good = failed is None or holder.status in (*DONE, ExitStatus.DRAINED)
        why = "" if is_good or failed is None else f", {in_words(failed)}"
        return f"{IN_A_WORD[ExitStatus(holder.status)]}{why}"


def _exits(bus: ErrorBus, group: str) -> tuple[Exit, ...]:
    """Return the exits of the group's ranks, up to the first one that has not ended."""
    found = list[Exit]()
    while (held := bus.read(exit_register(group, len(found)))) is not None:
        found.append(decode_exit(held))
    return tuple(found)


def until_ended(bus: ErrorBus, groups: int, is_over: Callable[[], bool] = lambda: False) -> Outcome:
    """Wait until the job has ended, and return its outcome.

    A job has ended if all supervisors have ended in good order, or if all groups have left and the
    remaining supervisors have not ended for 20 s, because they were lost with their hosts.

    Args:
        is_over: Whether the caller knows that all supervisors have ended.

    Raises:
        FftError: See `Outcome.read`. A bus may be silent for 30 s.
    """
    over_since: float | None = None
    outage = Outage()
    while True:
        is_known = is_over()
        try:
            found, now = Outcome.read(bus, groups), time.monotonic()
        except BusUnreachable:
            if outage.exceeds(_OUTAGE_S):
                raise
            time.sleep(_LOOK_S)
            continue
        outage.answered()
        over_since = (over_since or now) if found.is_over else None
        if is_known or found.has_ended or (over_since is not None and now > over_since + RELEASE_S):
            return found
        time.sleep(_LOOK_S)
