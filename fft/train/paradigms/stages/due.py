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

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fft.bus import ErrorBus
from fft.checkpoints.files import attempt_name
from fft.checkpoints.plan import Checkpointing
from fft.engine.other_scopes import OtherScope
from fft.errors import BusError, CheckpointError
from fft.messages.effects import StartTxn
from fft.messages.protocol import Record, Token
from fft.protocol.spec import FsmSpec
from fft.train.paradigms.stages.scope import StageScope
from fft.train.session.checkpoint_schedule import (
    CheckpointSchedule,
    Named,
    is_first,
    report_skipped,
)
from fft.train.session.participation import Participation

_POLL_S = 0.2
"""Seconds between two reads of the registers by a stage that has ended and receives no messages."""
_REPEAT_S = 60.0
"""Seconds for the stages in between to repeat the last entry of the first stage after its end."""

AT = "checkpoint/at"
"""Register of a scope's bus that holds the newest announcements of checkpoints."""
NAMED = 2
"""Maximum number of announcements in the register.

One checkpoint may be in progress when the last one of the job is announced.
"""

logger = logging.getLogger(__name__)


class Announcement(NamedTuple):
    """An entry of the register, which announces a checkpoint at a txn of its scope."""

    token: Token
    """The txn at whose commit the checkpoint is taken; without a commit there is no checkpoint."""
    step: int
    """Step of the checkpoint."""
    writer: str
    """The group whose ranks write the shared state of all groups."""
    name: str
    """Name of the attempt."""
    cursor: int
    """Data position at the end of the txn."""
    is_last: bool
    """Whether the commit of the txn may be the last one of the job."""

    @property
    def named(self) -> Named:
        """The checkpoint that this entry announces."""
        return Named(self.name, self.step, self.writer)


def announcements_on(bus: ErrorBus) -> tuple[Announcement, ...]:
    """Read the announcements on the bus of a scope. Raises BusError, ValueError."""
    if (held := bus.read(AT)) is None:
        return ()
    try:
        return tuple(Announcement(Token(*token), *rest) for token, *rest in json.loads(held))
    except TypeError as error:
        raise ValueError(f"the register {AT} holds no announcements of checkpoints") from error


def announce(bus: ErrorBus, others: Sequence[Announcement], word: Announcement) -> None:
    """Write an announcement behind those of ``others`` that fit. Raises BusError."""
    bus.write(AT, json.dumps([*others, word][-NAMED:]).encode())


def epoch_to_name_in(job: Participation, plan: StartTxn) -> Record | None:
    """Return the epoch of the txn if this rank announces checkpoints of its scope, else None."""
    epoch = None if job.local is None else job.local.epoch
    if epoch is None or epoch.epoch != plan.token.epoch or not is_first(job.peer, epoch):
        return None
    return epoch


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
    return LaterStageSchedule(plan, job, (stage.bus, before), stage.first(), limit_s)


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


class FirstStageSchedule(CheckpointSchedule):
    """The rule for the first stage, whose first rank decides and informs the next stage.

    Args:
        bus: Bus of this stage's scope.
    """

    def __init__(
        self, plan: Checkpointing, job: Participation, bus: ErrorBus, is_busy: Callable[[], bool]
    ) -> None:
        super().__init__(plan, job, is_busy)
        self._bus = bus

    def asks(self, plan: StartTxn, last: bool, skip: bool) -> bool:
        """See `CheckpointSchedule.asks`; the announcement precedes the vote."""
        epoch = epoch_to_name_in(self._job, plan)
        local = self._job.local  # it also has the groups that have left
        is_drained = epoch is not None and local is not None and local.leaving & epoch.peer_set
        may_end = (last and not skip) or bool(is_drained)
        is_due = super().asks(plan, may_end and not skip, skip)
        if epoch is None or not (may_end or is_due):
            return False
        step, name = plan.step + (not skip), attempt_name(self._job.bus.generation, f"{plan.token}")
        writer = epoch.members[0].group
        word = Announcement(plan.token, step, writer, name, plan.next_cursor, may_end)
        return self._announce(word, plan.step) is not None

    def due(self, record: Record, epoch: Record) -> Named | None:
        """See `CheckpointSchedule.due`.

        A checkpoint that was not announced is not taken, since the other stages lack it.
        """
        if super().due(record, epoch) is None:
            return None
        why = "it is a skip" if record.skip else "all groups have left with it"
        why += ", which was not known when it was voted for"
        try:
            for word in announcements_on(self._bus):
                if (word.token, word.step) == (record.token, record.step):
                    return word.named
        except (BusError, ValueError) as error:
            why = f"its announcement cannot be read: {error}"
        report_skipped(self._job.report_checkpoint, record.step, why)
        return None

    def ended(self, record: Record, epoch: Record) -> Named | None:
        """Return the checkpoint of a stage that ended at ``record`` without a last commit.

        Groups reach this place one by one and may be in different epochs then.
        """
        name = attempt_name(self._job.bus.generation, f"end|{record.lineage}|{record.cursor}")
        writer, token = epoch.members[0].group, Token(epoch.epoch, 0)
        word = Announcement(token, record.step, writer, name, record.cursor, True)
        return self._announce(word, record.step, is_first(self._job.peer, epoch))

    def is_awaited(self, record: Record) -> bool:
        """Whether the next stage has not reached this position, as far as this rank knows. Any
        thread."""
        local = self._job.local
        after = None if local is None else next((e for e in local.others if e.ahead), None)
        return after is not None and not after.has_ended and after.cursor < record.cursor

    def _announce(self, word: Announcement, done: int, writes: bool = True) -> Named | None:
        """Announce a checkpoint, unless another group has announced it.

        Args:
            word: The announcement.
            done: The last committed step. An entry for a later one belongs to a txn that did not
                commit.
            writes: Whether this rank announces checkpoints.

        Returns:
            The announced checkpoint, or None if the register cannot be read or written.
        """
        try:
            words = announcements_on(self._bus)
            if (said := next((w for w in words if w.name == word.name), None)) is not None:
                return said.named
            if writes:
                announce(self._bus, [w for w in words if w.step <= done], word)
        except (BusError, ValueError) as error:
            why = f"it could not be announced: {error}"
            report_skipped(self._job.report_checkpoint, word.step, why)
            return None
        return word.named


class LaterStageSchedule(CheckpointSchedule):
    """The rule for a stage that follows another one.

    Args:
        buses: Buses of this stage's scope and of the stage before.
        first: Scope of the first stage.
        limit_s: Seconds without a record of the first stage after which it counts as lost.
    """

    outlives = True

    def __init__(
        self,
        plan: Checkpointing,
        job: Participation,
        buses: tuple[ErrorBus, ErrorBus],
        first: OtherScope,
        limit_s: float,
    ) -> None:
        super().__init__(plan, job, lambda: False)
        self._bus, self._before = buses
        self._first, self._limit_s = first, limit_s
        self._taken = set[str]()
        """Names of the checkpoint attempts that this rank has taken part in or given up."""
        self._at: Record | None = None
        """The last commit of this stage."""
        self._is_first = False
        """Whether this rank is the first one of the members."""

    def asks(self, plan: StartTxn, last: bool, skip: bool) -> bool:
        """See `CheckpointSchedule.asks`: announce this txn if it ends at the cut of the stage
        before."""
        if epoch_to_name_in(self._job, plan) is None:
            return False
        end, groups = plan.next_cursor, plan.next_cursor - plan.cursor
        try:
            for word in announcements_on(self._before):
                if end <= word.cursor < end + groups:
                    self._say(word, plan.token, end)
        except (BusError, ValueError) as error:
            logger.warning(
                "a checkpoint may lack this stage, whose txn could not be announced: %s", error
            )
        return False

    def _say(self, word: Announcement, token: Token, cursor: int) -> None:
        """Announce this stage's txn for the checkpoint ``word``, unless an earlier one is.

        Raises BusError, ValueError.
        """
        mine = announcements_on(self._bus)
        if any(w.name == word.name and w.cursor < cursor for w in mine):
            return
        others = [w for w in mine if w.name != word.name]
        announce(self._bus, others, word._replace(token=token, cursor=cursor))

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
        before = (e.groups for e in local.others if not e.ahead)
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
            has_ended = at is not None and not at.groups
            last = [w for w in announcements_on(self._job.bus)[-1:] if w.is_last]
            if has_ended and all(w.name in self._taken for w in last):
                return
            if time.monotonic() - since > (_REPEAT_S if has_ended else self._limit_s):
                return
            stops.wait(_POLL_S)

    def is_awaited(self, record: Record) -> bool:
        """See `CheckpointSchedule.is_awaited`: the first stage publishes, and no other stage
        waits."""
        return False
