"""When a checkpoint is due: all ranks that have the commit must say the same, without a word.

Where all groups are in every txn, its record tells: every so many steps, and the first commit of an
epoch from which the group is gone that was to write the one before. By time, the first rank of the
group that writes names a step to come in a register of the job's bus.

Of groups that stand apart no two know the same commits: who was to write the last checkpoint, or
when that was, is in no record. There the first rank of the txn's first member decides before its
vote, and names the txn itself. A commit has that vote, so who has the commit finds the word; and
who is not in the txn has nothing to do with it. (Of stages that step by themselves:
`fft.train.checkpoint.due_in_stages`.)

Main thread, unless it says otherwise.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from fft.bus import BusError, ErrorBus
from fft.durable.manifest import attempt_name
from fft.durable.plan import Checkpointing
from fft.messages.effects import StartTxn
from fft.messages.protocol import Peer, Record, Token
from fft.protocol.apart import living
from fft.trace.checkpoint_notes import TOO_OFTEN
from fft.train.participation import Participation

AT = "checkpoint/at"
"""Register of a scope's bus: the newest checkpoints that were named."""
NAMED = 2
"""So many of them: one may be under way when the last one of the job is named."""
_AHEAD = 2
"""Steps from the word to the checkpoint: nobody can be so far ahead of who says it."""
_EARLY = 0.1
"""Of the interval: so long before its end ranks begin to look whether a step was named."""

logger = logging.getLogger(__name__)

Note = Callable[[str, dict[str, Any]], None]
"""Puts something into the trace."""


class Named(NamedTuple):
    """An attempt at a checkpoint, as all ranks call it."""

    name: str
    """Equal on all ranks, and of no other attempt."""
    step: int
    """Of the checkpoint."""
    writer: str
    """The group whose ranks write what all groups have in common."""
    is_missed: bool = False
    """This rank's stage had no commit where it could be taken: it delivers nothing."""


class Due(Protocol):
    """When a checkpoint is due to a rank, and who is waited for."""

    def before_vote(self, plan: StartTxn, last: bool, skip: bool) -> None:
        """This rank is about to say YES; ``last``: and that no txn comes after this one, unless it
        is skipped; ``skip``: it is, as far as this rank knows."""

    def due(self, record: Record, epoch: Record) -> Named | None:
        """The checkpoint that is to be taken of this commit, whose members ``epoch`` names."""

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """Any thread: groups of ``epoch`` that are not in the job any more, or whose processes are
        others. Who leaves with the commit ``record`` still delivers."""

    def is_awaited(self, record: Record) -> bool:
        """Any thread: whether others can have come to the place of ``record`` only later."""


class DueByRecord:
    """Of groups that are in every txn of the job."""

    def __init__(self, plan: Checkpointing, job: Participation) -> None:
        self._plan, self._job = plan, job
        self._last: tuple[Record, Record] | None = None
        """Commit and epoch of the newest attempt."""
        self._epoch = 0
        """Of the last commit here."""
        self._ends: Token | None = None
        """The txn of the last vote, if none was to come after it."""
        self._since: float | None = None

    def before_vote(self, plan: StartTxn, last: bool, skip: bool) -> None:
        """Nothing is to be said."""
        self._ends = plan.token if last else None

    def due(self, record: Record, epoch: Record) -> Named | None:
        """As `Due.due`."""
        return named_after(self._job, record, epoch) if self._is_due(record, epoch) else None

    def _is_due(self, record: Record, epoch: Record) -> bool:
        is_last = record.last or (record.skip and self._ends == record.token)
        if record.skip and not (is_last and self._is_behind(record)):
            return False  # no step, and more are to come
        is_new, self._epoch = record.epoch != self._epoch, record.epoch
        if not (is_last or (is_new and self._is_writer_lost(epoch))):
            steps = self._plan.steps
            is_named = self._is_named(record, epoch) if steps is None else record.step % steps == 0
            if not is_named:
                return False
        self._last, self._since = (record, epoch), time.monotonic()
        return True

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """As `Due.left`: who is not in the job's newest epoch."""
        return gone_since(self._job, epoch)

    def is_awaited(self, record: Record) -> bool:
        """As `Due.is_awaited`: a rank delivers when its script asks for the next txn."""
        local = self._job.local
        return local is not None and local.lineage == record.lineage

    def _is_behind(self, record: Record) -> bool:
        """Whether the steps before ``record`` are in no checkpoint of this job."""
        return self._last is None or self._last[0].step < record.step

    def _is_writer_lost(self, epoch: Record) -> bool:
        """Whether the group that was to write the last one has other processes now, or none."""
        if self._last is None:
            return False
        _, then = self._last
        return not set(then.members[0].peers()) <= epoch.peer_set

    def _is_named(self, record: Record, epoch: Record) -> bool:
        """By time: whether this is the step that the writer's first rank has named."""
        seconds = self._plan.seconds
        assert seconds is not None
        passed = None if self._since is None else time.monotonic() - self._since
        if passed is not None and passed < (1 - _EARLY) * seconds:
            return False
        try:
            held = self._job.bus.read(AT)
            named = int(held) if held is not None else 0
            is_mine = is_first(self._job.peer, epoch)
            if is_mine and named < record.step and (passed is None or passed >= seconds):
                self._job.bus.write(AT, str(record.step + _AHEAD).encode())
        except (BusError, ValueError) as error:
            logger.warning("cannot see when the next checkpoint is due: %s", error)
            return False
        return named == record.step


class Word(NamedTuple):
    """What names a checkpoint by a txn."""

    token: Token
    """Of the txn with whose commit it is taken; of another one, or a skip, there is none."""
    step: int
    """After that."""
    writer: frozenset[Peer]
    """The processes that write what all groups have in common."""
    name: str
    """Of the attempt."""
    cursor: int
    """Where the txn ends in the data."""
    is_last: bool
    """Its commit may be the last one of the job."""

    @property
    def named(self) -> Named:
        """What it names."""
        return Named(self.name, self.step, min(self.writer).group)


def encode_words(words: Sequence[Word]) -> bytes:
    """For the register."""
    return json.dumps([[*word[:2], sorted(word.writer), *word[3:]] for word in words]).encode()


def decode_words(data: bytes) -> tuple[Word, ...]:
    """What `encode_words` has made. Raises ValueError."""
    try:
        return tuple(
            Word(Token(*token), int(step), frozenset(Peer(*peer) for peer in writer), *rest)
            for token, step, writer, *rest in json.loads(data)
        )
    except TypeError as error:
        raise ValueError(f"the register {AT} holds no words of checkpoints") from error


class DueByWord:
    """Of groups that stand apart between their synchronisations.

    Args:
        bus: of the scope whose txns are named.
        is_busy: whether this rank still writes the one before.
    """

    def __init__(
        self,
        plan: Checkpointing,
        job: Participation,
        bus: ErrorBus,
        is_busy: Callable[[], bool],
    ) -> None:
        self._plan, self._job, self._bus, self._is_busy = plan, job, bus, is_busy
        self._words: tuple[Word, ...] = ()
        """The newest that were seen, and when that was."""
        self._since = 0.0

    def before_vote(self, plan: StartTxn, last: bool, skip: bool) -> None:
        """As `Due.before_vote`: if the checkpoint is mine to name, and due, name this txn."""
        epoch, step = epoch_to_name_in(self._job, plan), plan.step + (not skip)
        if epoch is None:
            return
        may_end = self._may_end(last and not skip, epoch)
        if skip and not may_end:
            return  # no step, and more are to come
        try:
            self._look()
            if not (self._is_wanted(step, epoch) or may_end):
                return
            if self._is_busy() and not may_end:
                why = "the last one of this group is being written"
                self._give_up(step, why, too_often=True)
                return
            writer = frozenset(epoch.members[0].peers())
            name = attempt_name(self._job.bus.generation, f"{plan.token}")
            self._say(Word(plan.token, step, writer, name, plan.next_cursor, may_end), plan.step)
        except (BusError, ValueError) as error:
            self._give_up(step, f"it could not be named: {error}")

    def due(self, record: Record, epoch: Record) -> Named | None:
        """As `Due.due`; also with the last commit of the job, whose name is its own."""
        if record.skip and not record.last:
            return None
        try:
            self._look()
        except (BusError, ValueError) as error:
            if not record.last:
                self._give_up(record.step, f"whether it was named cannot be seen: {error}")
        words = (w for w in self._words if (w.token, w.step) == (record.token, record.step))
        named = next((word.named for word in words), None)
        return self._unnamed_last(record, epoch) if named is None and record.last else named

    def _unnamed_last(self, record: Record, epoch: Record) -> Named | None:
        """The checkpoint of the job's last commit, which nobody has named."""
        return named_after(self._job, record, epoch)

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """As `Due.left`: who stands apart is in the job."""
        local = self._job.local
        if local is None or local.head is None or local.head.n < record.n or record.last:
            return frozenset()
        stays = {e.entry.group for e in living(local) if set(e.entry.peers()) <= epoch.peer_set}
        return frozenset(e.group for e in epoch.members) - stays - frozenset(record.leavers)

    def is_awaited(self, record: Record) -> bool:
        """All members come there at once."""
        return False

    def _may_end(self, last: bool, epoch: Record) -> bool:
        """Whether the txn is named as what may be the last one; here that needs no word."""
        return False

    def _look(self) -> None:
        """Read the newest words. Raises BusError, ValueError."""
        words = words_on(self._bus)
        if words != self._words:
            self._words, self._since = words, time.monotonic()

    def _say(self, word: Word, done: int) -> None:
        others = [w for w in self._words if w.step <= done]  # else it came to nothing
        words = (*others, word)[-NAMED:]
        self._bus.write(AT, encode_words(words))
        self._words, self._since = words, time.monotonic()

    def _is_wanted(self, step: int, epoch: Record) -> bool:
        """Whether the txn of ``epoch`` is to be one with a checkpoint, if it leads to ``step``."""
        steps, seconds = self._plan.steps, self._plan.seconds
        if self._words:
            word = self._words[-1]
            job = {p for at in epoch.standing for p in at.entry.peers()} | epoch.peer_set
            if word.step >= step or not word.writer <= job:
                return True  # the txn that it named came to nothing; or its writer is lost
        if steps is not None:
            return step % steps == 0
        assert seconds is not None
        return not self._words or time.monotonic() - self._since >= seconds

    def _give_up(self, step: int, why: str, too_often: bool = False) -> None:
        tell_left_out(self._job.tell, step, why, too_often)


def tell_left_out(note: Note, step: int, why: str, too_often: bool = False) -> None:
    """Have log and trace say that there is no checkpoint of ``step``, though nothing has failed.

    ``too_often``: because the one before is still being written. Any thread.
    """
    logger.warning("no checkpoint of step %d: %s", step, why)
    told = {"step": step, "reason": why}
    note("checkpoint_skipped", told | ({TOO_OFTEN: True} if too_often else {}))


def words_on(bus: ErrorBus) -> tuple[Word, ...]:
    """The newest that were said in a scope. Raises BusError, ValueError."""
    held = bus.read(AT)
    return () if held is None else decode_words(held)


def named_after(job: Participation, record: Record, epoch: Record) -> Named:
    """A checkpoint that nobody has named, by its record; the first member writes it."""
    name = attempt_name(job.bus.generation, f"{record.n}|{record.lineage}")
    return Named(name, record.step, epoch.members[0].group)


def epoch_to_name_in(job: Participation, plan: StartTxn) -> Record | None:
    """The epoch of that txn, if checkpoints of its scope are this rank's to name."""
    epoch = None if job.local is None else job.local.epoch
    if epoch is None or epoch.epoch != plan.token.epoch or not is_first(job.peer, epoch):
        return None
    return epoch


def gone_since(job: Participation, epoch: Record) -> frozenset[str]:
    """Any thread: groups of ``epoch`` that are not in the newest one, or whose processes are
    others."""
    local = job.local
    now = local.epoch if local is not None else None
    if local is None or now is None or local.role == "terminal" or now.epoch <= epoch.epoch:
        return frozenset()
    stays = {entry.group for entry in now.members if set(entry.peers()) <= epoch.peer_set}
    return frozenset(entry.group for entry in epoch.members) - stays


def is_first(peer: Peer, epoch: Record) -> bool:
    """Whether it is the first rank of the first member of an epoch."""
    first = epoch.members[0]
    return (peer.group, peer.rank) == (first.group, min(rank.rank for rank in first.ranks))
