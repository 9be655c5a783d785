"""Describe ends of a job that violate nothing and are still not good, with their remedy. Pure.

The input is the moves of a history; the texts are for ``fft audit`` and ``fft run``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fft.messages.effects import Finish
from fft.messages.protocol import Ballot, Healed, Peer, Record, Token
from fft.protocol.equality import differing, digests_text, minority
from fft.protocol.invariants import Move
from fft.protocol.invariants.facts import Numbers
from fft.trace.format import RUNS
from fft.trace.lines import Line, Transition, record_of

_NAMED = 8
"""Maximum number of participants that a text names."""


@dataclass(frozen=True)
class Taint:
    """Committed steps that may be wrong, because the states of replicas differed after them.

    Attributes:
        sound: The last step after which a comparison found equal states; 0 if there was none.
        bad: The step after which the states differed. It equals ``sound`` if a state changed
            between two comparisons of the same step.
    """

    sound: int
    bad: int

    def __str__(self) -> str:
        if self.bad <= self.sound:
            return f"the states changed after step {self.bad}"
        first = self.sound + 1
        steps = f"step {first} is" if first == self.bad else f"steps {first} to {self.bad} are"
        return f"{steps} tainted"


class Comparisons:
    """The results of all comparisons of states in the ballots of a job."""

    def __init__(self) -> None:
        self._sound = 0
        self._bad: int | None = None

    def voted(self, step: int, digests: Iterable[tuple[int, str | None]]) -> None:
        """Take the votes of a complete ballot, as (number of the rank, digest of its state).

        The step is sound if each vote has a digest, each rank has a replica, and all replicas are
        equal. Other ballots change nothing.
        """
        found = list(digests)
        numbers = Counter(rank for rank, _ in found)
        is_whole = all(digest is not None for _, digest in found)
        has_replicas = min(numbers.values(), default=0) > 1
        if is_whole and has_replicas and len(set(found)) == len(numbers):
            self._sound = max(self._sound, step)

    def ended(self, step: int) -> None:
        """Take the end of the job, because the states after ``step`` differed."""
        self._bad = step

    def take(self, line: Line) -> None:
        """Take a line of a trace."""
        if isinstance(line, Transition) and isinstance(line.event, Ballot):
            self.voted(line.step, ((vote.peer.rank, vote.digest) for vote in line.event.votes))
        elif (record := record_of(line)) is not None and record.diverged:
            self.ended(record.step)

    @property
    def taint(self) -> Taint | None:
        """The tainted steps, or None if the job did not end for different states."""
        return None if self._bad is None else Taint(self._sound, self._bad)


class Ends:
    """The course and end of a job, collected from its moves as they come in."""

    def __init__(self) -> None:
        self._apart: dict[int, Record] = {}
        """Records that report divergent states."""
        self._ballots: dict[Token, tuple[dict[int, dict[Peer, str]], tuple[Peer, ...]]] = {}
        """Token of each ballot with divergent states → the differing digests, the divergent
        ranks."""
        self._commits, self._epochs = Numbers(RUNS), Numbers(RUNS)
        self._last_commit = 0
        self._without_state: list[tuple[Peer, Record | None]] = []
        """Participants that stopped with ``NoState``, and the newest record that each had."""
        self._comparisons = Comparisons()
        self.bytes_healed = 0
        self.has_final_record = False
        """At least one trace shows that its participant ended."""

    def take(self, move: Move) -> None:
        """Take one move."""
        if (record := move.record) is not None:
            if record.kind == "commit":
                self._commits.add(record.n)
                self._last_commit = max(self._last_commit, record.n)
            elif record.kind == "epoch":
                self._epochs.add(record.n)
            if record.diverged:
                self._comparisons.ended(record.step)
            if record.odd or record.diverged:
                self._apart.setdefault(record.n, record)
        votes = move.event.votes if isinstance(move.event, Ballot) else ()
        self._comparisons.voted(move.before.step, [(v.peer.rank, v.digest) for v in votes])
        if votes and (apart := differing(votes)):
            self._ballots.setdefault(move.before.token, (apart, minority(votes)))
        if isinstance(move.event, Healed):
            self.bytes_healed += move.event.bytes
        self.has_final_record |= move.entered("terminal")
        for effect in move.out.effects:
            if isinstance(effect, Finish) and effect.error == "NoState":
                self._without_state.append((move.peer, move.after.head))

    @property
    def commits(self) -> int:
        """Number of committed txns."""
        return len(self._commits)

    @property
    def epochs(self) -> int:
        """Number of epochs."""
        return len(self._epochs)

    @property
    def tainted(self) -> tuple[int, int] | None:
        """First and last of the tainted steps, if the job ended because its replicas differ."""
        taint = self._comparisons.taint
        return None if taint is None else (taint.sound + 1, taint.bad)

    def divergences(self) -> list[str]:
        """Describe each divergence of replicas: the step, and the digest of each rank."""
        return [self._divergence(record) for _, record in sorted(self._apart.items())]

    def _divergence(self, record: Record) -> str:
        what = record.cause.removeprefix(f"{record.by}: ")
        odd = record.odd
        if record.token in self._ballots:
            apart, odd_by_vote = self._ballots[record.token]
            what = f"replicas differ after step {record.step}: {digests_text(apart)}"
            odd = odd or odd_by_vote
        names = ", ".join(map(str, odd))
        if not record.diverged:
            given_up = f"the state of {names} was given up for that of most"
            return f"{what}; the job went on, and {given_up}"
        whose = f"most agree, and {names} differ" if odd else "no state has a majority"
        return f"{what}; {whose}, and the job ended with Diverged; {self._comparisons.taint}"

    def without_state(self) -> str | None:
        """Describe an end with ``NoState`` (no process had the state), or return None."""
        ended: list[Peer] = []
        step = 0
        for peer, reached in self._without_state:
            if reached is None or reached.n >= self._last_commit:
                ended.append(peer)
                step = reached.step if reached is not None else 0
        if not ended:
            return None
        more = f" and {len(ended) - _NAMED} more" if len(ended) > _NAMED else ""
        names = ", ".join(map(str, sorted(ended)[:_NAMED])) + more
        found = about_no_state(step if self._last_commit else None)
        return f"{names} ended with NoState: {found}"


def about_no_state(step: int | None) -> str:
    """Explain ``NoState`` and its remedy.

    Args:
        step: The last committed step, or None if no step was committed.
    """
    if step is None:
        return (
            "all processes that had the weights which the job began with were gone before a step "
            "was committed, and other processes have other weights. No work is lost: start the "
            "job again as it was started (from the same checkpoint, if from one); with "
            "init_sync=False, if all groups build equal weights by themselves, new processes can "
            "go on without that. Look first for why the processes were gone"
        )
    return (
        f"all processes that had the state of step {step}, the last that was committed, are gone; "
        "start the job again, and go on from a checkpoint; the same job name may be used again"
    )
