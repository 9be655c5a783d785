"""Choose the pairs of ranks for the next round of checks, and judge the results. Pure.

The method follows DLRover's node check: ranks are checked in pairs; a rank of a pair that failed is
paired again with a rank that has proved sound; a rank that fails again is at fault. Here a rank is
named only if it has failed with two different sound ranks, which distinguishes a broken link
between two ranks from a broken rank. A pair that is slow, compared with the median of all, is
treated as one that failed, but its verdict is different: slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal

from fft.trace.course import Place, Rollback, named_by_all, place_text

How = Literal["failed", "silent", "slow", "rollbacks"]
Confidence = Literal["high", "medium"]
Pair = tuple[Place, Place]
_GRAVEST: tuple[How, ...] = ("failed", "rollbacks", "silent", "slow")

SLOW_FACTOR = 3.0
"""A time is slow from this multiple of the median of all times."""
SLOW_EXCESS_S = 0.25
"""Minimum excess over the median for a slow time; smaller differences are noise of the machine."""
FEWEST_TO_COMPARE = 3
"""Minimum number of times to compare; of two different times, either could be the normal one."""
FEW = 4
"""Up to this many ranks, every rank meets every other rank."""
FEWEST_ROLLBACKS = 3
"""Minimum number of rollbacks that name the same rank; fewer may be chance."""


@dataclass(frozen=True)
class Outcome:
    """One check of one rank. ``ok`` is None if it could not be made, through no fault of the
    rank."""

    ok: bool | None
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Meeting:
    """One network check. ``ok`` is true if both sides reported success."""

    round: int
    pair: Pair
    ok: bool
    seconds: float = 0.0
    text: str = ""

    def other(self, rank: Place) -> Place:
        """Return the other rank of the pair."""
        return self.pair[1] if self.pair[0] == rank else self.pair[0]


@dataclass
class Findings:
    """All results so far."""

    alone: dict[Place, dict[str, Outcome]] = field(default_factory=dict)
    """Rank → check → outcome, for the checks that a rank makes alone."""
    meetings: list[Meeting] = field(default_factory=list)
    silent: dict[Place, str] = field(default_factory=dict)
    """Ranks that did not answer, with a description."""
    left: set[Place] = field(default_factory=set)
    """Ranks that were no longer in the job when the checks were finished."""

    def broken(self, rank: Place) -> list[str]:
        """Return the failures of the rank's own checks, without checks that failed on every
        rank."""
        checks, common = self.alone.get(rank, {}), self.failed_by_all()
        return [
            f"{kind}: {one.text}"
            for kind, one in checks.items()
            if one.ok is False and kind not in common
        ]

    def failed_by_all(self) -> set[str]:
        """Return the checks that failed on every one of several ranks, which is no rank's fault."""
        failed = [{k for k, one in c.items() if one.ok is False} for c in self.alone.values()]
        return set.intersection(*failed) if len(failed) > 1 else set()


@dataclass(frozen=True)
class Culprit:
    """A rank at fault. ``how`` is its gravest fault, and ``evidence`` describes all of them."""

    rank: Place
    how: How
    confidence: Confidence
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The ranks at fault, the gravest first, and notes for a person."""

    culprits: tuple[Culprit, ...]
    notes: tuple[str, ...] = ()


# --- the rounds ------------------------------------------------------------------------------


def next_pairs(ranks: Sequence[Place], findings: Findings) -> list[Pair]:
    """Return the pairs of ranks for the next round; empty if another round would add nothing.

    Each rank is in at most one pair. In the first round neighbours meet. Later only ranks that are
    suspected or have not met another rank are paired, each with one sound rank. If there are only
    few ranks, every rank meets every other: one of three meetings would not show which rank is
    slow.
    """
    usable = [r for r in ranks if r not in findings.silent and not findings.broken(r)]
    if not findings.meetings:
        return list(zip(usable[::2], usable[1::2], strict=False))
    sound = _sound(findings)
    met = {frozenset(meeting.pair) for meeting in findings.meetings}
    open_cases = [r for r in usable if r not in sound and len(_failed_with(r, findings)) < 2]
    partners = [r for r in usable if r in sound] or open_cases
    if len(usable) <= FEW:
        open_cases = partners = usable
    pairs: list[Pair] = []
    taken: set[Place] = set()
    for rank in open_cases:
        free = (p for p in partners if p != rank and p not in taken)
        partner = next((p for p in free if frozenset((rank, p)) not in met), None)
        if rank not in taken and partner is not None:
            taken |= {rank, partner}
            pairs.append((rank, partner))
    return pairs


def _sound(findings: Findings) -> set[Place]:
    """Return the ranks that were in a meeting that neither failed nor was slow."""
    limit = _slow_limit(_best_times(findings).values())
    return {rank for m in findings.meetings if m.ok and m.seconds <= limit for rank in m.pair}


def _failed_with(rank: Place, findings: Findings) -> dict[Place, Meeting]:
    """Return the sound ranks with which ``rank`` had a meeting that failed or was slow."""
    sound = _sound(findings)
    limit = _slow_limit(_best_times(findings).values())
    return {
        m.other(rank): m
        for m in findings.meetings
        if rank in m.pair
        and m.other(rank) in sound - findings.left
        and not (m.ok and m.seconds <= limit)
    }


def _best_times(findings: Findings) -> dict[Place, float]:
    """Return the shortest meeting of each rank; a slow rank has no short one."""
    best: dict[Place, float] = {}
    for meeting in findings.meetings:
        for rank in meeting.pair if meeting.ok else ():
            best[rank] = min(meeting.seconds, best.get(rank, meeting.seconds))
    return best


def _slow_limit(times: Iterable[float]) -> float:
    """Return the seconds beyond which a time is slow; infinite if there are too few times."""
    known = sorted(times)
    if len(known) < FEWEST_TO_COMPARE:
        return float("inf")
    middle = median_low(known)
    return max(SLOW_FACTOR * middle, middle + SLOW_EXCESS_S)


# --- the verdict -----------------------------------------------------------------------------


def judge(
    ranks: Sequence[Place], findings: Findings, rollbacks: Sequence[Rollback] = ()
) -> Diagnosis:
    """Judge which ranks are at fault, by the checks and by the last rollbacks."""
    notes: list[str] = []
    against: dict[Place, list[tuple[How, str]]] = {}
    for rank in ranks:
        against[rank] = [
            *(("failed", text) for text in findings.broken(rank)),
            *(_by_network(rank, findings) if rank not in findings.left else ()),
            *_by_time(rank, findings),
        ]
        # otherwise a missing answer is not evidence against the rank
        answers = findings.alone and rank not in findings.left
        if rank in findings.silent and answers:
            against[rank].append(("silent", findings.silent[rank]))
    one = named_by_all(rollbacks, FEWEST_ROLLBACKS)
    if one is not None and one in against:
        against[one].append(("rollbacks", _by_rollbacks(one, rollbacks)))
    if not findings.alone:
        notes.append("no rank answers: does this job run, and is it of this version of FFT?")
    notes += [f"the check of {kind} failed on every rank" for kind in findings.failed_by_all()]
    notes += [f"{place_text(rank)} left the job meanwhile" for rank in sorted(findings.left)]
    notes += _open_questions(ranks, findings)
    notes += _partly_named(rollbacks) if one is None else []
    if not any(against.values()) and not notes:
        notes.append("every check of every rank was passed")
    found = [_culprit(rank, list(words)) for rank, words in against.items() if words]
    found.sort(key=lambda culprit: _GRAVEST.index(culprit.how))
    return Diagnosis(tuple(found), tuple(notes))


def _culprit(rank: Place, words: Sequence[tuple[How, str]]) -> Culprit:
    ways = [how for how, _ in words]
    how = min(ways, key=_GRAVEST.index)
    high = how == "failed" or len(set(ways)) > 1
    return Culprit(rank, how, "high" if high else "medium", tuple(text for _, text in words))


def _by_network(rank: Place, findings: Findings) -> list[tuple[How, str]]:
    if rank in _sound(findings):
        return []
    bad = _failed_with(rank, findings)
    if len(bad) < 2:
        return []
    how: How = "failed" if any(not m.ok for m in bad.values()) else "slow"
    return [(how, _told(rank, meeting)) for meeting in bad.values()]


def _told(rank: Place, meeting: Meeting) -> str:
    other = place_text(meeting.other(rank))
    where = f"network, round {meeting.round}, with {other}, which is sound with others"
    return f"{where}: {_what(meeting)}"


def _what(meeting: Meeting) -> str:
    return f"slow, {meeting.seconds:.2f} s" if meeting.ok else meeting.text


def _by_time(rank: Place, findings: Findings) -> list[tuple[How, str]]:
    """Return evidence of checks that the rank passed, but slowly."""
    found: list[tuple[How, str]] = []
    for kind, outcome in findings.alone.get(rank, {}).items():
        times = [
            checks[kind].seconds
            for checks in findings.alone.values()
            if kind in checks and checks[kind].ok
        ]
        if outcome.ok and outcome.seconds > _slow_limit(times):
            middle = median_low(times)
            text = f"{kind}: slow, {outcome.seconds:.2f} s; the median is {middle:.2f} s"
            found.append(("slow", text))
    return found


def _by_rollbacks(rank: Place, rollbacks: Sequence[Rollback]) -> str:
    named = [each for each in rollbacks if not each.is_open]
    last = named[-1]
    return (
        f"rollbacks: all {len(named)} at step {last.step} name {place_text(rank)}, the last: "
        f"{last.cause[:300]} (each was a new attempt with the same batch: it may be the data)"
    )


def _partly_named(rollbacks: Sequence[Rollback]) -> list[str]:
    if not rollbacks:
        return []
    counts: dict[str, int] = {}
    for one in rollbacks:
        for place in one.named:
            counts[place_text(place)] = counts.get(place_text(place), 0) + 1
    told = ", ".join(f"{place} in {count}" for place, count in sorted(counts.items()))
    return [
        f"the {len(rollbacks)} rollbacks at step {rollbacks[-1].step} "
        f"name {told or 'nobody'}; the last: {rollbacks[-1].cause[:300]}"
    ]


def _open_questions(ranks: Sequence[Place], findings: Findings) -> list[str]:
    """Describe failed meetings that are not evidence against a particular rank."""
    sound = _sound(findings)
    named = {rank for rank in ranks if _by_network(rank, findings)}
    limit = _slow_limit(_best_times(findings).values())
    notes = []
    for meeting in findings.meetings:
        if (meeting.ok and meeting.seconds <= limit) or named & set(meeting.pair):
            continue
        one, other = map(place_text, meeting.pair)
        if set(meeting.pair) <= sound:
            why = "both are sound with others, so the connection between these two is at fault"
        else:
            why = "there were not enough sound ranks to tell which side is at fault"
        notes.append(f"network, round {meeting.round}, {one} with {other}: {_what(meeting)}; {why}")
    return notes
