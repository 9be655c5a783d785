"""When a checkpoint is due if each stage has its own scope: a cut through all stages.

No commit describes the state of all stages. A checkpoint has the state of each stage after one of
that stage's commits, all at the same position in the data, so that no entry is in flight from one
stage to the next. Before its vote, the first stage announces the txn with which it reaches that
position, in the register of its scope. The next stage reads it there, since its own txns follow
those of the first stage, and announces its own txn in turn.

Stages whose groups differed for a while may not reach the same position. Then a stage uses its last
commit before the position of the stage before it, and the checkpoint includes the entries in
flight. The same holds if the job ends by a drain, which each stage leaves where it is. A later
stage that has ended for good delivers its last state to the checkpoints of the remaining stages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from fft.bus import ErrorBus
from fft.checkpoints.files import attempt_name
from fft.checkpoints.plan import Checkpointing
from fft.engine.other_scopes import OtherScope
from fft.errors import BusError, CheckpointError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Record, Token
from fft.protocol.spec import FsmSpec
from fft.protocol.state import Elsewhere
from fft.train.paradigms.stages.scope import StageScope
from fft.train.session.checkpoint_schedule import (
    AT,
    NAMED,
    AnnouncedSchedule,
    Announcement,
    CheckpointSchedule,
    Named,
    announcements_on,
    departed_groups,
    encode_announcements,
    epoch_to_name_in,
    is_first,
)
from fft.train.session.participation import Participation

_POLL_S = 0.2
"""Seconds between two reads of the registers by a stage that has ended and receives no messages."""
_REPEAT_S = 60.0
"""Seconds for the stages in between to repeat the last entry of the first stage after its end."""

logger = logging.getLogger(__name__)


def schedule_of_stage(
    stage: StageScope,
    plan: Checkpointing,
    job: Participation,
    is_busy: Callable[[], bool],
    limit_s: float,
) -> CheckpointSchedule:
    """Return the rule for the stage of this rank.

    Args:
        limit_s: See `LaterStageSchedule`.
    """
    pairs = zip(stage.others, stage.flow, strict=True)
    before = next((other.bus for other, bound in pairs if not bound.ahead), None)
    if before is None:
        return FirstStageSchedule(plan, job, stage.bus, is_busy)
    return LaterStageSchedule(job, stage.bus, before, stage.first(), limit_s)


def refuse_forks(spec: FsmSpec) -> None:
    """Raise CheckpointError unless the stages of ``spec`` follow each other in rank order, which
    the cut requires."""
    for earlier, later in zip(spec.stages, spec.stages[1:], strict=False):
        before = [other.scope for other in spec.bound_to(later) if not other.ahead]
        if before != [earlier]:
            raise CheckpointError(
                f"checkpoint= with spec={spec.name!r}: stage {later!r} follows "
                f"{before or 'no other'} in the flow, and checkpoints need it to follow "
                f"{earlier!r} alone, the stage of the rank before: order the scopes so, or take "
                "checkpoints by manager.state_dict()"
            )


class FirstStageSchedule(AnnouncedSchedule):
    """The rule for the first stage, which decides."""

    def _unnamed_last(self, record: Record, epoch: Record) -> Named | None:
        """Return None, since the other stages read announcements only in the register."""
        is_named = any(word.token == record.token for word in self._words)
        why = "it is a skip" if is_named else "all groups have left with it"
        why += ", which was not known when it was voted for"
        self._give_up(record.step, why)
        return None

    def ended(self, record: Record, epoch: Record) -> Named | None:
        """Return the checkpoint of a stage that ended at ``record`` without a last commit.

        Groups reach this place one by one and may be in different epochs then.
        """
        name = attempt_name(self._job.bus.generation, f"end|{record.lineage}|{record.cursor}")
        writer = frozenset(epoch.members[0].peers())
        word = Announcement(Token(epoch.epoch, 0), record.step, writer, name, record.cursor, True)
        try:
            self._look()
            said = next((w for w in self._words if w.name == name), None)
            if said is None and is_first(self._job.peer, epoch):
                self._say(word, record.step)
        except (BusError, ValueError) as error:
            self._give_up(record.step, f"the checkpoint could not be announced: {error}")
            return None
        return (said or word).named

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """See `CheckpointSchedule.left`."""
        return departed_groups(self._job, epoch)

    def is_awaited(self, record: Record) -> bool:
        """Whether the next stage has not reached this position, as far as this rank knows. Any
        thread."""
        after = self._next
        return after is not None and not after.has_ended and after.cursor < record.cursor

    @property
    def _next(self) -> Elsewhere | None:
        local = self._job.local
        return None if local is None else next((e for e in local.elsewhere if e.ahead), None)

    def _may_end(self, last: bool, epoch: Record) -> bool:
        """Whether to announce the txn as possibly the last: also once a drain is requested."""
        local = self._job.local  # it also has those that have left
        return last or (local is not None and bool(local.leaving & epoch.peer_set))


class LaterStageSchedule(CheckpointSchedule):
    """The rule for a stage that follows another one.

    Args:
        bus: Bus of this stage's scope.
        before: Bus of the scope of the stage before.
        first: Scope of the first stage.
        limit_s: Seconds without a record of the first stage after which it counts as lost.
    """

    outlives = True

    def __init__(
        self, job: Participation, bus: ErrorBus, before: ErrorBus, first: OtherScope, limit_s: float
    ) -> None:
        self._job, self._bus, self._before = job, bus, before
        self._first, self._limit_s = first, limit_s
        self._taken = set[str]()
        """Names of the checkpoint attempts that this rank has taken part in or given up."""
        self._at: Record | None = None
        """The last commit of this stage."""
        self._is_first = False
        """Whether this rank is the first one of the members."""

    def before_vote(self, plan: StartTxn, last: bool, skip: bool) -> None:
        """See `CheckpointSchedule.before_vote`: announce this txn if it ends at the cut of the
        stage before."""
        if epoch_to_name_in(self._job, plan) is None:
            return
        end, groups = plan.next_cursor, plan.next_cursor - plan.cursor
        try:
            for word in announcements_on(self._before):
                if end <= word.cursor < end + groups:
                    self._say(word, plan.token, end)
        except (BusError, ValueError) as error:
            logger.warning(
                "a checkpoint may lack this stage, whose txn could not be announced: %s", error
            )

    def _say(self, word: Announcement, token: Token, cursor: int) -> None:
        """Announce this stage's txn for the checkpoint ``word``, unless an earlier one is.

        Raises BusError, ValueError.
        """
        mine = announcements_on(self._bus)
        if any(w.name == word.name and w.cursor < cursor for w in mine):
            return
        others = [w for w in mine if w.name != word.name]
        own = word._replace(token=token, cursor=cursor)
        self._bus.write(AT, encode_announcements([*others, own][-NAMED:]))

    def due(self, record: Record, epoch: Record) -> Named | None:
        """See `CheckpointSchedule.due`; a skip has a position in the data like any other txn."""
        since = record.cursor if self._at is None else self._at.cursor
        self.stands_at(record, epoch)
        try:
            mine, before = announcements_on(self._bus), announcements_on(self._before)
            first = announcements_on(self._job.bus) if record.last else ()
        except (BusError, ValueError) as error:
            logger.warning("cannot determine whether this stage must take a checkpoint: %s", error)
            return None
        named = [word.named for word in reversed(mine) if word.token == record.token]
        named += [word.named for word in first[-1:] if word.is_last]
        passed = [w.named for w in before if since <= w.cursor < record.cursor]
        named += [each._replace(is_missed=True) for each in passed]
        found = next((each for each in named if each.name not in self._taken), None)
        if found is not None:
            self._taken.add(found.name)
        return found

    def ended(self, record: Record, epoch: Record) -> Named | None:
        """See `CheckpointSchedule.ended`: the remaining stages include this state in their
        checkpoints."""
        self.stands_at(record, epoch)
        return None

    def stands_at(self, record: Record, epoch: Record) -> None:
        """Set the state of this stage to ``record``."""
        self._at, self._is_first = record, is_first(self._job.peer, epoch)

    def absent(self, named: Named, epoch: Record) -> frozenset[str]:
        """Return the groups that are waited for but, not being in ``epoch``, take no part in
        ``named`` here. The first rank declines for them; other ranks get an empty set.
        Thread-safe."""
        local = self._job.local
        if local is None or not is_first(self._job.peer, epoch):
            return frozenset()
        before = (e.groups for e in local.elsewhere if not e.ahead)
        return frozenset().union((named.writer,), *before) - {e.group for e in epoch.members}

    def after_end(self, stops: threading.Event) -> Iterator[Named]:
        """Yield the checkpoints that the remaining stages announce after this stage has ended.

        It runs on a separate thread until those stages have ended or ``stops`` is set. This stage
        had reached the position of each checkpoint when it ended, or before, and does not move.

        Raises:
            BusError, UnreadableMessage, ValueError: The registers cannot be read.
        """
        assert self._at is not None, "it has ended with a commit"
        seen, since = None, time.monotonic()
        while not stops.is_set():
            # read this before the register, whose last entry is written before the stage ends
            at = self._first.read()
            for word in announcements_on(self._before):
                if word.cursor >= self._at.cursor and word.name not in self._taken:
                    self._taken.add(word.name)
                    if self._is_first:
                        self._say(word, self._at.token, self._at.cursor)
                    yield word.named
            if at != seen:
                seen, since = at, time.monotonic()
            has_ended = at is not None and not at.takers
            last = [w for w in announcements_on(self._job.bus)[-1:] if w.is_last]
            if has_ended and all(w.name in self._taken for w in last):
                return
            if time.monotonic() - since > (_REPEAT_S if has_ended else self._limit_s):
                return
            stops.wait(_POLL_S)

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """See `CheckpointSchedule.left`."""
        return departed_groups(self._job, epoch)

    def is_awaited(self, record: Record) -> bool:
        """See `CheckpointSchedule.is_awaited`: the first stage publishes, and no other stage
        waits."""
        return False
