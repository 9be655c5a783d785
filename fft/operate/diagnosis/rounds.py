"""Request checks from a job's ranks, round by round, until the rank at fault is known.

Sends commands on the bus and waits, up to a limit, for each answer.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fft.messages.commands import MOST_CHECKED, Answer, Check, CheckTask, fresh_id
from fft.messages.protocol import Record
from fft.messages.wire import Packed
from fft.operate.client import FIRST_ANSWER_S, Ear, JobClient, OperatorError
from fft.operate.diagnosis.plan import (
    Diagnosis,
    Findings,
    Meeting,
    Outcome,
    Pair,
    judge,
    next_pairs,
)
from fft.operate.drain import evict
from fft.trace.course import Place, Rollback, place_text
from fft.trace.history import History
from fft.trace.tail import TraceTail

LIMIT_S = 20.0
"""Limit for one check of one rank: about a hundred times its usual duration."""
MOST_ROUNDS = 16
_LATER_S = 2.0
"""Time beyond the limit for the answer itself."""
_DRAIN_S = 0.05
"""Time to drain the queue of received messages, which are already there."""

Answers = Callable[[float], Iterator[Answer]]


@dataclass
class Report:
    """A diagnosis: the verdict and the results it is based on."""

    step: int
    epoch: int
    ranks: list[Place]
    findings: Findings
    rollbacks: list[Rollback]
    verdict: Diagnosis
    actions: list[str] = field(default_factory=list)
    """Actions taken because of the verdict."""

    def lines(self) -> list[str]:
        """Return the verdict as text: one line for each culprit and each note."""
        told = [
            f"group {c.rank[0]} rank {c.rank[1]} is at fault ({c.how}, confidence {c.confidence}): "
            + "; ".join(c.evidence)
            for c in self.verdict.culprits
        ]
        told = told or ["nobody was found at fault"]
        return [*told, *self.verdict.notes, *self.actions]

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as plain data."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "ranks": [
                {
                    "group": rank[0],
                    "rank": rank[1],
                    "checks": {k: asdict(o) for k, o in self.findings.alone.get(rank, {}).items()},
                    "silent": self.findings.silent.get(rank),
                }
                for rank in self.ranks
            ],
            "meetings": [
                {**asdict(m), "pair": [place_text(rank) for rank in m.pair]}
                for m in self.findings.meetings
            ],
            "rollbacks": [
                {**asdict(r), "named": sorted(place_text(rank) for rank in r.named)}
                for r in self.rollbacks
            ],
            "culprits": [
                {**asdict(c), "rank": c.rank[1], "group": c.rank[0]} for c in self.verdict.culprits
            ],
            "notes": list(self.verdict.notes),
            "actions": list(self.actions),
        }


def diagnose(desk: JobClient, rollbacks: Sequence[Rollback] = (), limit: float = LIMIT_S) -> Report:
    """Check all ranks of the job's epoch, alone and in pairs, and judge.

    Args:
        desk: Client of the job.
        rollbacks: Known rollbacks since the last commit; decisions received meanwhile are added.
        limit: Time limit for each check, in seconds.

    Raises:
        OperatorError: There is no epoch to check, it has too many ranks, or another check is
            running.
        BusError: The bus is lost.
    """
    with desk.hearing() as ear:
        job = desk.job()
        if job.head is None or job.epoch is None:
            raise OperatorError(
                f"no epoch of a job could be read on the bus at {desk.bus.url}; is it the job's "
                "FFT_BUS, its name included? Look with `fft watch --once`"
            )
        ranks = sorted((p.group, p.rank) for p in job.epoch.peers)
        if len(ranks) > MOST_CHECKED:
            raise OperatorError(
                f"the job has {len(ranks)} ranks; at most {MOST_CHECKED} are checked"
            )
        findings = Findings()
        _check_alone(desk, ranks, findings, limit)
        for number in range(1, MOST_ROUNDS + 1):
            pairs = next_pairs(ranks, findings)
            if not pairs:
                break
            _check_pairs(desk, number, pairs, findings, limit)
        run = _heard(ear, job.head, rollbacks)
    _excuse_who_left(desk, job.epoch, findings)
    step = run[-1].step if run else job.head.step
    return Report(step, job.head.epoch, ranks, findings, run, judge(ranks, findings, run))


# --- each rank alone -----------------------------------------------------------------------------


def _check_alone(desk: JobClient, ranks: list[Place], findings: Findings, limit: float) -> None:
    waiting = ranks
    for _ in range(2):  # a second time for ranks that were only late
        answered = _ask_alone(desk, waiting, findings, limit)
        waiting = [rank for rank in waiting if rank not in answered]
        if not waiting or not answered:
            break
    for rank in waiting:
        findings.silent[rank] = "does not answer"


def _ask_alone(
    desk: JobClient, ranks: Sequence[Place], findings: Findings, limit: float
) -> set[Place]:
    """Check ``ranks`` and return those that answered; silent ranks are given up early."""
    tasks = tuple(CheckTask(group, rank, "alone") for group, rank in ranks)
    command = Check(fresh_id(), tasks, desk.me, limit=limit)
    with desk.asking(command) as answers:
        said, done = _gather(answers, ranks, limit)
    _none_refused(said)
    for rank in said:
        results = done.get(rank)
        if results is None:
            findings.silent[rank] = "began its checks, and never reported a result"
        else:
            findings.alone[rank] = {k: _outcome(results.get(k)) for k in ("compute", "memory")}
    return set(said)


def _gather(
    answers: Answers,
    ranks: Sequence[Place],
    limit: float,
    heard: Mapping[Place, Answer] | None = None,
) -> tuple[dict[Place, Answer], dict[Place, dict[str, Any]]]:
    """Return the first answer of each rank, and the results.

    Args:
        answers: Returns the answers until a deadline.
        ranks: The ranks to wait for; a rank that sends nothing in `FIRST_ANSWER_S` is given up.
        limit: Time limit for the checks, in seconds.
        heard: First answers that were received before.
    """
    by_name = {f"group {group} rank {rank}": (group, rank) for group, rank in ranks}
    said = {rank: word for rank, word in (heard or {}).items() if rank in by_name.values()}
    done: dict[Place, dict[str, Any]] = {}
    began = time.monotonic()
    first, last = began + FIRST_ANSWER_S, began + limit + _LATER_S
    while True:
        now = time.monotonic()
        awaited = by_name.values() if now < first else said
        if all(rank in done for rank in awaited):
            return said, done
        answer = next(answers(last if now >= first or len(said) == len(by_name) else first), None)
        if answer is None:
            if time.monotonic() >= last:
                return said, done
        elif (rank := by_name.get(answer.by)) is not None:
            said.setdefault(rank, answer)
            if answer.verdict != "accepted":
                done[rank] = _data(answer)


def _none_refused(said: Mapping[Place, Answer]) -> None:
    """Raise ``OperatorError`` if another diagnosis of this job is running."""
    for rank, answer in said.items():
        if answer.verdict == "refused":
            raise OperatorError(
                f"group {rank[0]} rank {rank[1]} is busy with another check: wait for its end"
            )


# --- in pairs ----------------------------------------------------------------------------------


def _check_pairs(
    desk: JobClient, number: int, pairs: Sequence[Pair], findings: Findings, limit: float
) -> None:
    keys = {pair: secrets.token_hex(16) for pair in pairs}
    listen = tuple(CheckTask(*pair[0], "listen", key=keys[pair]) for pair in pairs)
    with desk.asking(Check(fresh_id(), listen, desk.me, number, limit)) as heard:
        words = _first_words(heard, [pair[0] for pair in pairs])
        addresses = {
            pair: str(_data(words[pair[0]]).get("address", ""))
            for pair in pairs
            if pair[0] in words
        }
        open_pairs = [pair for pair, address in addresses.items() if address]
        connect = tuple(
            CheckTask(*pair[1], "connect", addresses[pair], keys[pair]) for pair in open_pairs
        )
        second = [Check(fresh_id(), connect, desk.me, number, limit)] if connect else []
        with desk.asking(*second) as other_heard:
            said, there = _gather(other_heard, [pair[1] for pair in open_pairs], limit)
        # Also wait for a rank whose partner is silent: until it gives up it refuses other checks.
        _, here = _gather(heard, [pair[0] for pair in open_pairs], limit, words)
    _none_refused({**words, **said})
    for pair in pairs:
        if pair not in addresses:
            findings.silent[pair[0]] = f"answered before, and no more in round {number}"
        elif pair in open_pairs and pair[1] not in said:
            findings.silent[pair[1]] = f"answered before, and no more in round {number}"
        else:
            sides = [here.get(pair[0]), there.get(pair[1])]
            if pair not in open_pairs:
                sides = [_data(words[pair[0]]), {"network": {"ok": True}}]
            findings.meetings.append(_meeting(number, pair, sides))


def _first_words(answers: Answers, ranks: Sequence[Place]) -> dict[Place, Answer]:
    """Return the first answer of each rank; ranks without an answer in time are missing."""
    by_name = {f"group {group} rank {rank}": (group, rank) for group, rank in ranks}
    said: dict[Place, Answer] = {}
    for answer in answers(time.monotonic() + FIRST_ANSWER_S):
        if (rank := by_name.get(answer.by)) is not None:
            said.setdefault(rank, answer)
        if len(said) == len(by_name):
            break
    return said


def _meeting(number: int, pair: Pair, sides: Sequence[dict[str, Any] | None]) -> Meeting:
    """Return the meeting: good if both sides report success, else with the failing sides' texts."""
    outcomes = [_outcome((results or {}).get("network")) for results in sides]
    ok = all(outcome.ok for outcome in outcomes)
    told = [
        f"{place_text(rank)} says: {outcome.text}"
        for rank, outcome in zip(pair, outcomes, strict=True)
        if ok or not outcome.ok
    ]
    return Meeting(number, pair, ok, max(o.seconds for o in outcomes), "; ".join(told))


# --- answers -----------------------------------------------------------------------------------


def _data(answer: Answer) -> dict[str, Any]:
    try:
        data = json.loads(answer.text)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _outcome(data: object) -> Outcome:
    """Parse one result of a rank; a malformed one counts neither for nor against the rank."""
    if not isinstance(data, dict):
        return Outcome(None, 0.0, "no result")
    ok, seconds = data.get("ok"), data.get("seconds")
    good = ok if isinstance(ok, bool) else None
    known = float(seconds) if isinstance(seconds, int | float) else 0.0
    return Outcome(good, known, str(data.get("text", ""))[:300])


def _heard(ear: Ear, head: Record, before: Sequence[Rollback]) -> list[Rollback]:
    """Return the rollbacks at one step: known before, in the head, or received meanwhile."""
    history = History()
    words = ear.words(time.monotonic() + _DRAIN_S)
    for record in (head, *(word.record for word in words if isinstance(word, Packed))):
        history.take_record(record, 0.0)
    found = history.course.run
    if not before:
        return found
    run = {one.n: one for one in (*before, *found) if one.step == before[0].step}
    return [run[n] for n in sorted(run)]


def _excuse_who_left(desk: JobClient, epoch: Record, findings: Findings) -> None:
    """Mark ranks that left the job meanwhile, which need neither answer nor keep a connection."""
    now = desk.job().epoch
    for peer in set(epoch.peers) - set(() if now is None else now.peers):
        findings.left.add((peer.group, peer.rank))


# --- show ---
# Show a diagnosis as a table, and optionally evict the ranks at fault.
#
# Reads traces on request; sends messages on the bus only to evict.

_GRACE_S = 10.0


def table(report: Report) -> Table:
    """Return a table with one row for each rank."""
    title = f"step {report.step}, epoch {report.epoch}, {len(report.rollbacks)} rollbacks heard of"
    shown = Table(title=title, title_justify="left")
    for name in ("rank", "compute", "memory"):
        shown.add_column(name, no_wrap=True)
    shown.add_column("network", overflow="fold", ratio=1)
    shown.add_column("verdict", no_wrap=True)
    culprits = {culprit.rank: culprit for culprit in report.verdict.culprits}
    for rank in report.ranks:
        alone = report.findings.alone.get(rank, {})
        verdict = culprits[rank].how if rank in culprits else _innocent(report, rank)
        shown.add_row(
            Text(place_text(rank)),
            _cell(alone, "compute"),
            _cell(alone, "memory"),
            Text(_network(report, rank)),
            Text(verdict, style="bold red" if rank in culprits else ""),
        )
    return shown


def _cell(checks: Mapping[str, Outcome], kind: str) -> Text:
    outcome = checks.get(kind)
    if outcome is None or outcome.ok is None:
        return Text("-")
    word = "ok" if outcome.ok else "FAILED"
    return Text(f"{word} {outcome.seconds:.2f} s", style="" if outcome.ok else "red")


def _network(report: Report, rank: Place) -> str:
    met = [
        f"{'ok' if m.ok else 'FAILED'} with {place_text(m.other(rank))} {m.seconds:.2f} s"
        for m in report.findings.meetings
        if rank in m.pair
    ]
    return ", ".join(met) or "-"


def _innocent(report: Report, rank: Place) -> str:
    if rank in report.findings.left:
        return "has left"
    return "no answer" if rank in report.findings.silent else "nothing found"


def traced_rollbacks(directory: Path) -> list[Rollback]:
    """Return the rollbacks since the last commit, from the traces of a job."""
    with closing(TraceTail(directory)) as tail:
        return tail.poll().course.run


def evict_culprits(desk: JobClient, report: Report) -> None:
    """Evict the groups of the culprits and have their processes ended; noted in the report.

    If no group would be left, nothing is evicted, because the job could not continue.
    """
    groups = {rank[0] for rank in report.ranks}
    guilty = list(dict.fromkeys(culprit.rank[0] for culprit in report.verdict.culprits))
    if guilty and groups <= set(guilty):
        report.actions.append("nobody was evicted: no group would be left")
        return
    for group in guilty:
        report.actions.append(evict_group(desk, group))


def evict_group(desk: JobClient, group: str) -> str:
    """Evict the group and return a description of the result."""
    try:
        done = evict(desk, group, restart=False, grace=_GRACE_S, on_accepted=lambda _: None)
    except OperatorError as error:
        return f"group {group} could not be evicted completely: {error}"
    return f"evicted: {done.done}"
