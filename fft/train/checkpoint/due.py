"""When a checkpoint is due: all ranks that have the commit must say the same, without a word.

Where all groups are in every txn, its record tells: every so many steps, and the first commit of an
epoch from which the group is gone that was to write the one before. By time, the first rank of the
group that writes names a step to come in a register of the job's bus.

Of groups that stand apart no two know the same commits: who was to write the last checkpoint, or
when that was, is in no record. There the first rank of the txn's first member decides before its
vote, and names the txn itself. A commit has that vote, so who has the commit finds the word; and
who is not in the txn has nothing to do with it.

Main thread.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from fft.bus import BusError
from fft.durable.plan import Checkpointing
from fft.messages.effects import StartTxn
from fft.messages.protocol import Peer, Record, Token
from fft.protocol.apart import living
from fft.train.participation import Participation

AT = "checkpoint/at"
"""Register of the job's bus: the newest checkpoint that was named."""
_AHEAD = 2
"""Steps from the word to the checkpoint: nobody can be so far ahead of who says it."""
_EARLY = 0.1
"""Of the interval: so long before its end ranks begin to look whether a step was named."""

logger = logging.getLogger(__name__)


class DueByRecord:
    """Of groups that are in every txn of the job."""

    def __init__(self, plan: Checkpointing, job: Participation) -> None:
        self._plan, self._job = plan, job
        self._last: tuple[Record, Record] | None = None
        """Commit and epoch of the newest attempt."""
        self._epoch = 0
        """Of the last commit here."""
        self._since: float | None = None

    def before_vote(self, plan: StartTxn) -> None:
        """Nothing is to be said."""

    def is_due(self, record: Record, epoch: Record) -> bool:
        """Whether one is to be taken of this commit, whose members ``epoch`` names."""
        if record.skip and not (record.last and self._is_behind(record)):
            return False  # no step, and more are to come
        is_new, self._epoch = record.epoch != self._epoch, record.epoch
        if not (record.last or (is_new and self._is_writer_lost(epoch))):
            steps = self._plan.steps
            is_named = self._is_named(record, epoch) if steps is None else record.step % steps == 0
            if not is_named:
                return False
        self._last, self._since = (record, epoch), time.monotonic()
        return True

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """Any thread: groups of ``epoch`` that are not in the job's newest epoch, or whose
        processes are others. Who leaves with a commit still delivers."""
        local = self._job.local
        now = local.epoch if local is not None else None
        if local is None or now is None or local.role == "terminal" or now.epoch <= epoch.epoch:
            return frozenset()
        stays = {entry.group for entry in now.members if set(entry.peers()) <= epoch.peer_set}
        return frozenset(entry.group for entry in epoch.members) - stays

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
            is_mine = _is_first(self._job.peer, epoch)
            if is_mine and named < record.step and (passed is None or passed >= seconds):
                self._job.bus.write(AT, str(record.step + _AHEAD).encode())
        except (BusError, ValueError) as error:
            logger.warning("cannot see when the next checkpoint is due: %s", error)
            return False
        return named == record.step


class Word(NamedTuple):
    """What names a checkpoint where groups stand apart."""

    token: Token
    """Of the txn with whose commit it is taken; of another one, or a skip, there is none."""
    step: int
    """After that."""
    writer: frozenset[Peer]
    """The processes that write what all groups have in common."""

    def encode(self) -> bytes:
        """For the register."""
        return json.dumps([self.token, self.step, sorted(self.writer)]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Word:
        """What `encode` has made. Raises ValueError."""
        try:
            token, step, writer = json.loads(data)
            return cls(Token(*token), int(step), frozenset(Peer(*peer) for peer in writer))
        except TypeError as error:
            raise ValueError(f"the register {AT} holds no word of a checkpoint") from error


class DueByWord:
    """Of groups that stand apart between their synchronisations.

    ``is_busy``: whether this rank still writes the one before.
    """

    def __init__(
        self, plan: Checkpointing, job: Participation, is_busy: Callable[[], bool]
    ) -> None:
        self._plan, self._job, self._is_busy = plan, job, is_busy
        self._word: Word | None = None
        """The newest that was seen, and when that was."""
        self._since = 0.0

    def before_vote(self, plan: StartTxn) -> None:
        """If the checkpoint is mine to name, and due: name this txn."""
        local, step = self._job.local, plan.step + 1
        epoch = local.epoch if local is not None else None
        if epoch is None or epoch.epoch != plan.token.epoch or not _is_first(self._job.peer, epoch):
            return
        try:
            self._look()
            if not self._is_wanted(step, epoch):
                return
            if self._is_busy():
                self._give_up(step, "the last one of this group is being written")
                return
            self._say(Word(plan.token, step, frozenset(epoch.members[0].peers())))
        except (BusError, ValueError) as error:
            self._give_up(step, f"it could not be named: {error}")

    def is_due(self, record: Record, epoch: Record) -> bool:
        """Whether one is to be taken of this commit, whose members ``epoch`` names."""
        if record.skip:
            return False
        try:
            self._look()
        except (BusError, ValueError) as error:
            if not record.last:
                self._give_up(record.step, f"whether it was named cannot be seen: {error}")
        return record.last or (self._word is not None and self._word.token == record.token)

    def left(self, record: Record, epoch: Record) -> frozenset[str]:
        """Any thread: groups of ``epoch`` that are not in the job any more, or are lost. Who stands
        apart is in it; who leaves with this commit still delivers."""
        local = self._job.local
        if local is None or local.head is None or local.head.n < record.n or record.last:
            return frozenset()
        stays = {e.entry.group for e in living(local) if set(e.entry.peers()) <= epoch.peer_set}
        return frozenset(e.group for e in epoch.members) - stays - frozenset(record.leavers)

    def _look(self) -> None:
        """Read the newest word. Raises BusError, ValueError."""
        held = self._job.bus.read(AT)
        word = None if held is None else Word.decode(held)
        if word != self._word:
            self._word, self._since = word, time.monotonic()

    def _say(self, word: Word) -> None:
        self._job.bus.write(AT, word.encode())
        self._word, self._since = word, time.monotonic()

    def _is_wanted(self, step: int, epoch: Record) -> bool:
        """Whether the txn of ``epoch`` is to be one with a checkpoint, if it leads to ``step``."""
        word, steps, seconds = self._word, self._plan.steps, self._plan.seconds
        if word is not None:
            job = {p for at in epoch.standing for p in at.entry.peers()} | epoch.peer_set
            if word.step >= step or not word.writer <= job:
                return True  # the txn that it named came to nothing; or its writer is lost
        if steps is not None:
            return step % steps == 0
        assert seconds is not None
        return word is None or time.monotonic() - self._since >= seconds

    def _give_up(self, step: int, why: str) -> None:
        logger.warning("no checkpoint of step %d: %s", step, why)
        self._job.note("checkpoint_skipped", {"step": step, "reason": why})


def _is_first(peer: Peer, epoch: Record) -> bool:
    """Whether it is the first rank of the group that writes."""
    return (peer.group, peer.rank) == (epoch.members[0].group, 0)
