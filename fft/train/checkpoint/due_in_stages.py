"""When a checkpoint is due to stages that step by themselves: a cut through all of them.

No commit is one state of all stages. A checkpoint has the state of each after a commit of its own,
all at one place in the data: then nothing is on its way from one stage to the next. The first stage
names the txn with which it comes there, before its vote, in the register of its scope; the next one
finds that word, since its own txns follow those of the first, and names its own txn in turn.

Stages whose groups were unlike for a while may not come to one place. Then a stage takes the last
one before that of the stage before it; entries that are on their way are in the checkpoint. The
same holds where the job ends by a drain, which each stage leaves where it stands. A later stage
that has ended for good delivers its last state to the checkpoints of those that go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from fft.bus import BusError, ErrorBus
from fft.durable.manifest import attempt_name
from fft.durable.plan import CheckpointError, Checkpointing
from fft.engine.other_scopes import OtherScope
from fft.messages.effects import StartTxn
from fft.messages.protocol import Record, Token
from fft.protocol.elsewhere import Elsewhere
from fft.protocol.spec import FsmSpec
from fft.train.checkpoint.due import (
    AT,
    NAMED,
    Due,
    DueByWord,
    Named,
    Word,
    encode_words,
    epoch_to_name_in,
    gone_since,
    is_first,
    words_on,
)
from fft.train.participation import Participation
from fft.train.stages.scope import StageScope

_POLL_S = 0.2
"""Between two looks at registers, by who has ended and is told of nothing."""
_REPEAT_S = 60.0
"""For the stages between to repeat the last word of the first one, once that has ended."""

logger = logging.getLogger(__name__)


def due_to(
    stage: StageScope,
    plan: Checkpointing,
    job: Participation,
    is_busy: Callable[[], bool],
    limit_s: float,
) -> Due:
    """Of the stage that this rank is; ``limit_s``: as of `DueToLater`."""
    pairs = zip(stage.others, stage.flow, strict=True)
    before = next((other.bus for other, bound in pairs if not bound.ahead), None)
    if before is None:
        return DueToFirst(plan, job, stage.bus, is_busy)
    return DueToLater(job, stage.bus, before, stage.first(), limit_s)


def refuse_forks(spec: FsmSpec) -> None:
    """Raise CheckpointError unless the stages of ``spec`` follow each other in the order of ranks:
    the cut goes from one to the next."""
    for earlier, later in zip(spec.stages, spec.stages[1:], strict=False):
        before = [other.scope for other in spec.bound_to(later) if not other.ahead]
        if before != [earlier]:
            raise CheckpointError(
                f"checkpoint= with spec={spec.name!r}: stage {later!r} follows "
                f"{before or 'no other'} in the flow, and checkpoints need it to follow "
                f"{earlier!r} alone, the stage of the rank before: order the scopes so, or take "
                "checkpoints by manager.state_dict()"
            )


class DueToFirst(DueByWord):
    """Of the stage that no other one comes before: it decides."""

    def _unnamed_last(self, record: Record, epoch: Record) -> Named | None:
        """None: the other stages know its name by the word alone."""
        is_named = any(word.token == record.token for word in self._words)
        why = "it is a skip" if is_named else "all groups have left with it"
        why += ", which was not known when it was voted for"
        self._give_up(record.step, why)
        return None

    def ended(self, record: Record, epoch: Record) -> Named | None:
        """The checkpoint of a stage that has ended where ``record`` stands, with no commit that was
        the last. Groups come to that one by one, and may be in unlike epochs then."""
        name = attempt_name(self._job.bus.generation, f"end|{record.lineage}|{record.cursor}")
        writer = frozenset(epoch.members[0].peers())
        word = Word(Token(epoch.epoch, 0), record.step, writer, name, record.cursor, True)
        try:
            self._look()
            said = next((w for w in self._words if w.name == name), None)
            if said is None and is_first(self._job.peer, epoch):
                self._say(word, record.step)
        except (BusError, ValueError) as error:
            self._give_up(record.step, f"it could not be named: {error}")
            return None
        return (said or word).named

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """As `Due.left`."""
        return gone_since(self._job, epoch)

    def is_awaited(self, record: Record) -> bool:
        """Any thread: whether the next stage has not come there, as far as it is known here."""
        after = self._next
        return after is not None and not after.has_ended and after.cursor < record.cursor

    @property
    def _next(self) -> Elsewhere | None:
        local = self._job.local
        return None if local is None else next((e for e in local.elsewhere if e.ahead), None)

    def _may_end(self, last: bool, epoch: Record) -> bool:
        """A drain is heard of before it ends the job; then each stage leaves where it stands."""
        local = self._job.local  # which knows of those who have left, too
        return last or (local is not None and bool(local.leaving & epoch.peer_set))


class DueToLater:
    """Of a stage that follows another.

    Args:
        bus, before: of its scope, and of that of the stage before.
        first: the scope of the first stage.
        limit_s: seconds without a record of it, until it is taken for gone.
    """

    def __init__(
        self,
        job: Participation,
        bus: ErrorBus,
        before: ErrorBus,
        first: OtherScope,
        limit_s: float,
    ) -> None:
        self._job, self._bus, self._before = job, bus, before
        self._first, self._limit_s = first, limit_s
        self._taken = set[str]()
        """Names of the attempts that this rank has taken part in, or given up."""
        self._at: Record | None = None
        """The last commit here."""
        self._is_first = False
        """Whether this is the first rank of its members."""

    def before_vote(self, plan: StartTxn, last: bool, skip: bool) -> None:
        """As `Due.before_vote`: name this txn, if it ends where the stage before is cut."""
        if epoch_to_name_in(self._job, plan) is None:
            return
        end, groups = plan.next_cursor, plan.next_cursor - plan.cursor
        try:
            for word in words_on(self._before):
                if end <= word.cursor < end + groups:
                    self._say(word, plan.token, end)
        except (BusError, ValueError) as error:
            logger.warning("a checkpoint may lack this stage, which cannot name it: %s", error)

    def _say(self, word: Word, token: Token, cursor: int) -> None:
        """Name my part of what ``word`` names, unless an earlier txn has come to be that.

        Raises BusError, ValueError.
        """
        mine = words_on(self._bus)
        if any(w.name == word.name and w.cursor < cursor for w in mine):
            return
        others = [w for w in mine if w.name != word.name]
        own = word._replace(token=token, cursor=cursor)
        self._bus.write(AT, encode_words([*others, own][-NAMED:]))

    def due(self, record: Record, epoch: Record) -> Named | None:
        """As `Due.due`; a skip has a place in the data as any other txn."""
        since = record.cursor if self._at is None else self._at.cursor
        self.stands_at(record, epoch)
        try:
            mine, before = words_on(self._bus), words_on(self._before)
            first = words_on(self._job.bus) if record.last else ()
        except (BusError, ValueError) as error:
            logger.warning("whether a checkpoint is due to this stage cannot be seen: %s", error)
            return None
        named = [word.named for word in reversed(mine) if word.token == record.token]
        named += [word.named for word in first[-1:] if word.is_last]
        passed = [w.named for w in before if since <= w.cursor < record.cursor]
        named += [each._replace(is_missed=True) for each in passed]
        found = next((each for each in named if each.name not in self._taken), None)
        if found is not None:
            self._taken.add(found.name)
        return found

    def stands_at(self, record: Record, epoch: Record) -> None:
        """The state of this stage is that of ``record``."""
        self._at, self._is_first = record, is_first(self._job.peer, epoch)

    def absent(self, named: Named, epoch: Record) -> frozenset[str]:
        """Any thread: groups that have no part in ``named`` here, and are waited for: they are not
        in ``epoch``. The first rank of those who are says it for them."""
        local = self._job.local
        if local is None or not is_first(self._job.peer, epoch):
            return frozenset()
        before = (e.groups for e in local.elsewhere if not e.ahead)
        return frozenset().union((named.writer,), *before) - {e.group for e in epoch.members}

    def after_end(self, stops: threading.Event) -> Iterator[Named]:
        """A thread, once this stage has ended: what those that go on name, until they have ended,
        or ``stops`` is set. It was at the place of each when it ended, or before, and is for good.

        Raises BusError, UnreadableMessage, ValueError: they cannot be heard.
        """
        assert self._at is not None, "it has ended with a commit"
        seen, since = None, time.monotonic()
        while not stops.is_set():
            at = self._first.read()  # before its words, of which the last is older than its end
            for word in words_on(self._before):
                if word.cursor >= self._at.cursor and word.name not in self._taken:
                    self._taken.add(word.name)
                    if self._is_first:
                        self._say(word, self._at.token, self._at.cursor)
                    yield word.named
            if at != seen:
                seen, since = at, time.monotonic()
            has_ended = at is not None and not at.takers
            last = [w for w in words_on(self._job.bus)[-1:] if w.is_last]
            if has_ended and all(w.name in self._taken for w in last):
                return
            if time.monotonic() - since > (_REPEAT_S if has_ended else self._limit_s):
                return
            stops.wait(_POLL_S)

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """As `Due.left`."""
        return gone_since(self._job, epoch)

    def is_awaited(self, record: Record) -> bool:
        """As `Due.is_awaited`: the first stage publishes, and nobody else waits."""
        return False
