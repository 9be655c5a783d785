"""The state of a job as seen on its bus alone: the model behind ``fft watch``. Pure.

It receives everything that is broadcast, and the registers at the beginning. It cannot see what is
not broadcast (votes, acknowledgements). Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fft.health.detectors.straggler import Stragglers
from fft.messages.commands import COMMANDS, Command, Holder, command_to_json
from fft.messages.progress import (
    CheckpointReport,
    FetchReport,
    HeldReport,
    IdleReport,
    Report,
    SpeedReport,
    TraceReport,
)
from fft.messages.protocol import (
    BusMessage,
    Death,
    Drain,
    Join,
    Leave,
    Peer,
    Record,
    Suspect,
)
from fft.trace.checkpoint_notes import ABOUT_TOO_OFTEN
from fft.trace.format import progress_in_words
from fft.trace.history import History

_COMMANDS = 8
_POINTS = 1000
"""Maximum number of points of a loss curve."""

IN_EPOCH, JOINING, LEFT, DEAD = "in epoch", "joining", "left", "dead"
LEFT_OUT, SUSPECTED, APART = "left out", "suspected", "apart"
ABSENT = "not in the job"


@dataclass
class RankSeen:
    """The newest known process of one rank. ``why``: the reported cause if it has gone."""

    inc: int
    pid: int
    host: str
    state: str
    why: str = ""


@dataclass(frozen=True)
class GroupRow:
    """One group on the screen."""

    group: str
    ranks: Mapping[int, RankSeen]
    draining: bool
    supervisor: Holder | None = None
    """The `fft run` that started it; None if there is none."""

    def state(self) -> str:
        """Return its state as text; ranks whose states differ are listed one by one."""
        if not self.ranks:
            return ABSENT
        states = {rank.state for rank in self.ranks.values()}
        if len(states) != 1:
            return ", ".join(f"rank {n} {self.ranks[n].state}" for n in sorted(self.ranks))
        state = states.pop()
        return f"{state}, asked to leave" if self.draining and state == IN_EPOCH else state

    @property
    def is_present(self) -> bool:
        """Whether one of its ranks takes part in the job."""
        return any(rank.state in (IN_EPOCH, APART) for rank in self.ranks.values())

    def why(self) -> str:
        """Return the reported cause for one of its ranks that has gone, or an empty string."""
        return next((rank.why for rank in self.ranks.values() if rank.why), "")


@dataclass
class LossCurve:
    """Losses by step. When there are too many, every second point is removed."""

    points: list[tuple[int, float]] = field(default_factory=list)
    _stride: int = 1
    """Number of steps between two points."""

    def add(self, step: int, loss: float) -> None:
        """Take a loss; one that is too close to the point before it is ignored."""
        if self.points and step < self.points[-1][0] + self._stride:
            return
        self.points.append((step, loss))
        if len(self.points) > _POINTS:
            self.points = self.points[::2]
            self._stride = max(2 * self._stride, self.points[1][0] - self.points[0][0])


@dataclass
class JobModel(History):
    """The view of a job that ``fft watch`` shows."""

    head: Record | None = None
    lost: str = ""
    """Why the bus connection is lost; empty while it works."""
    how: str = ""
    """How the job ended; empty while it runs."""
    attached: float = 0.0
    """When watching began, or began again."""
    is_older: bool = True
    """The newest commit, if any, was read from a register and may precede `attached`."""
    supervisors: Mapping[str, Holder] = field(default_factory=dict)
    """Group → the `fft run` that started it."""
    losses: dict[str, float] = field(default_factory=dict)
    """Group → the newest loss that one of its ranks has reported."""
    curves: dict[str, LossCurve] = field(default_factory=dict)
    """Group → the losses that its ranks have reported since watching began."""
    commands: deque[Command] = field(default_factory=lambda: deque(maxlen=_COMMANDS))
    stragglers: Stragglers = field(default_factory=Stragglers)
    scopes: dict[str, int] = field(default_factory=dict)
    """Scope → committed steps, if stages have scopes of their own."""
    _held: dict[tuple[str, int], HeldReport] = field(default_factory=dict)
    _groups: dict[str, dict[int, RankSeen]] = field(default_factory=dict)
    _leaving: set[str] = field(default_factory=set)

    def begin(
        self,
        head: Record | None,
        epoch: Record | None,
        reports: Iterable[Report] = (),
        now: float = 0.0,
        supervisors: Mapping[str, Holder] | None = None,
    ) -> None:
        """Take the registers where watching begins, or begins again after the bus was lost."""
        self.supervisors, self.attached = supervisors or {}, now
        for report in reports:
            self.hear(report, now)
        self.lost = ""
        for record in filter(None, (epoch, head)):
            self.take_record(record, now)
        if epoch is not None:
            self._enter(epoch)
        if head is not None and (self.head is None or head.n >= self.head.n):
            is_new = self.head is None or head.n > self.head.n
            self.is_older |= is_new and head.kind == "commit"
            self.head = head

    def see(self, word: BusMessage | Record | Command | Report, now: float) -> list[dict[str, Any]]:
        """Take one broadcast message; return lines for ``--json`` on what it changes.

        A record must be complete. `event_of` returns the line for the message itself.
        """
        match word:
            case HeldReport():
                self._held[(word.group, word.rank)] = word
            case CheckpointReport() | TraceReport() | FetchReport() | IdleReport():
                self.hear(word, now)
            case SpeedReport():
                self.hear(word, now)
                self._held.pop((word.group, word.rank), None)
                if word.loss is not None:
                    self.losses[word.group] = word.loss
                    self.curves.setdefault(word.group, LossCurve()).add(word.step, word.loss)
                if word.scope is not None:
                    self.scopes[word.scope] = max(word.step, self.scopes.get(word.scope, 0))
                rank = f"{word.group}/{word.rank}"
                changes = self.stragglers.hear(rank, word.inc, word.compute)
                return [{"event": "straggler", **asdict(change)} for change in changes]
            case Record():
                self._decided(word, now)
            case Join(hello=hello):
                self._join(hello.peer, hello.pid, hello.host)
            case Leave(peer=peer, cause=cause):
                self._gone(peer.group, peer.rank, LEFT, cause, inc=peer.inc)
            case Death() | Suspect():
                cause = f"{word.cause} (seen by {word.by})"
                state = DEAD if isinstance(word, Death) else SUSPECTED
                self._gone(word.group, word.rank, state, cause, pid=word.pid)
            case Drain(groups=groups):
                self._leaving |= set(groups)
            case _ if isinstance(word, COMMANDS):
                self.commands.append(word)
        return []

    def pace(self, group: str) -> str:
        """List the slow ranks of ``group``, each with its time as a multiple of the median."""
        places = ((rank.rpartition("/"), factor) for rank, factor in self.stragglers.slow.items())
        return ", ".join(f"rank {rank}: {by:.1f} ×" for (of, _, rank), by in places if of == group)

    def held(self) -> list[str]:
        """List the ranks that wait for another scope, and for which position."""
        return [
            f"group {group} rank {rank} is held: step {word.step} waits until scope "
            f"{word.scope} has taken {word.needed} slices of the data; it has taken {word.cursor}"
            for (group, rank), word in sorted(self._held.items())
        ]

    def fetches(self) -> list[str]:
        """List the ranks whose fetch of the state takes long, with their progress."""
        return [
            f"group {group} rank {rank} is fetching the state: "
            f"{progress_in_words(word.got, word.total, word.left)}"
            for (group, rank), word in sorted(self.fetching.items())
            if word.got < word.total
        ]

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint published in this start, or None."""
        return max(self.checkpoints.taken, default=None)

    def troubles(self) -> list[str]:
        """List the newest failed checkpoint, unless a later one succeeded, and traces with gaps."""
        failed, newest = self.checkpoints.last_failure, self.newest_checkpoint()
        found = []
        if failed is not None and failed[0] > (newest or 0):
            found.append(f"no checkpoint of step {failed[0]} from {failed[1]}")
        if max(self.checkpoints.too_often, default=0) > (newest or 0):
            found.append(ABOUT_TOO_OFTEN)
        gaps = (word for _, word in sorted(self.gaps.items()))
        texts = (f"the trace of rank {w.group}/{w.rank} has a gap: {w.why}" for w in gaps)
        return [*found, *texts]

    def has_ended(self) -> bool:
        """Whether the newest record ended the job: all groups left with it."""
        head = self.head
        if head is None or head.kind == "abort":
            return False
        members = self.course.members
        return head.last or (bool(members) and members <= set(head.leavers))

    def how_it_ended(self) -> str:
        """Describe the end of the job by its last record; the verdict of `fft run` has more."""
        assert self.head is not None
        reason = "its work is done" if self.head.last else "all groups have left as asked: drained"
        return f"the job has ended with step {self.head.step}: {reason}"

    def rows(self) -> list[GroupRow]:
        """Return the groups by name; shorter names first, so that numbers are in numeric order."""
        names = sorted({*self._groups, *self.supervisors}, key=lambda name: (len(name), name))
        return [
            GroupRow(
                *(name, self._groups.get(name, {}), name in self._leaving),
                self.supervisors.get(name),
            )
            for name in names
        ]

    def losses_by_presence(self) -> dict[str, list[list[tuple[int, float]]]]:
        """Return the losses of each group, in one list for each time that it was in the job."""
        found: dict[str, list[list[tuple[int, float]]]] = {}
        for group, curve in self.curves.items():
            left = [each.step for each in self.course.absences if each.group == group]
            parts: dict[int, list[tuple[int, float]]] = {}
            for point in curve.points:
                parts.setdefault(sum(point[0] > step for step in left), []).append(point)
            found[group] = list(parts.values())
        return found

    def _decided(self, record: Record, now: float) -> None:
        if self.head is not None and record.n <= self.head.n:
            return
        self.head = record
        self.take_record(record, now)
        if record.kind == "epoch":
            self._enter(record)
            self._let_apart(record)
        elif record.kind == "commit":
            self.is_older = False
            self._let_apart(record)
            for group in record.leavers:
                self._leaving.discard(group)
                for rank in self._groups.get(group, {}).values():
                    rank.state, rank.why = LEFT, f"drained at step {record.step}"

    def _enter(self, epoch: Record) -> None:
        """Mark all members of the epoch as in it, and former members as left out."""
        named = {entry.group for entry in epoch.members}
        for entry in epoch.members:
            self._groups[entry.group] = {
                r.rank: RankSeen(r.inc, r.pid, r.host, IN_EPOCH) for r in entry.ranks
            }
        for group, ranks in self._groups.items():
            for rank in ranks.values():
                if group not in named and rank.state == IN_EPOCH:
                    rank.state = LEFT_OUT
        self._leaving &= named

    def _let_apart(self, record: Record) -> None:
        """Mark groups of an asynchronous job that are not in a synchronization as local."""
        inside = {entry.group for entry in record.members}
        for entry in (each.entry for each in record.standing if each.entry.group not in inside):
            ranks = self._groups.setdefault(entry.group, {})
            for r in entry.ranks:
                known = ranks.get(r.rank)
                if known is None or known.state in (IN_EPOCH, LEFT_OUT):
                    ranks[r.rank] = RankSeen(r.inc, r.pid, r.host, APART)

    def _join(self, peer: Peer, pid: int, host: str) -> None:
        ranks = self._groups.setdefault(peer.group, {})
        known = ranks.get(peer.rank)
        if known is None or known.inc < peer.inc or known.state != IN_EPOCH:
            ranks[peer.rank] = RankSeen(peer.inc, pid, host, JOINING)

    def _gone(
        self, group: str, rank: int, state: str, why: str, inc: int | None = None, pid: int = 0
    ) -> None:
        known = self._groups.get(group, {}).get(rank)
        if known is None or (known.inc != inc and known.pid != pid):
            return
        if known.state != LEFT:  # a drained process also sends a leave; its state is already set
            known.state, known.why = state, why


def event_of(word: BusMessage | Record | Command | Report) -> dict[str, Any] | None:
    """Return one line for ``--json``, or None for a message that is not of interest to a person."""
    match word:
        case Record():
            line: dict[str, Any] = {
                "event": word.kind,
                "n": word.n,
                "epoch": word.epoch,
                "txn": word.txn,
                "step": word.step,
                "by": str(word.by),
            }
            if word.kind == "epoch":
                line["members"] = [str(peer) for peer in word.peers]
            if word.leavers:
                line["leavers"] = list(word.leavers)
            return {**line, "cause": word.cause} if word.cause else line
        case Join(hello=hello):
            return {"event": "join", "peer": str(hello.peer), "pid": hello.pid, "host": hello.host}
        case Leave(peer=peer, cause=cause):
            return {"event": "leave", "peer": str(peer), "cause": cause}
        case Death() | Suspect():
            where = {"group": word.group, "rank": word.rank, "pid": word.pid, "host": word.host}
            return {"event": word.type, **where, "by": word.by, "cause": word.cause}
        case HeldReport() | CheckpointReport() | TraceReport() | FetchReport() | IdleReport():
            return {"event": word.type, **asdict(word)}
        case Drain():
            return {"event": "drain", "groups": list(word.groups), "by": word.by}
        case _ if isinstance(word, COMMANDS):
            return {"event": "command", **command_to_json(word)}
    return None
