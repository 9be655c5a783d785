"""Tests that guarantee 13 can fail: the life of an asynchronous job, and modified records of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import Job

from fft.messages.effects import Decide
from fft.messages.protocol import Applied, Decision, Lease, Record, Synchronise
from fft.protocol.apart import is_brought
from fft.protocol.invariants import History, Move, judge
from fft.protocol.load import load_spec

Doctor = Callable[[Record], Record]


def life() -> History:
    """Return a life of five groups; two of them miss a synchronization, and a sixth one joins."""
    spec = load_spec("async")
    job = Job(5, spec=spec, leases=True, bound=2).until_running()
    job.step()
    job.start_group("5")
    for asking in ("012", "0123", "01234"):
        for group in asking:
            job.post(job.node(group), Synchronise())
        job.settle()
        job.fire("join_window")
        job.settle()
        job.step()
    assert job.head is not None and job.head.step == 3
    job.record.consumed.clear()
    return job.record


def doctored(kind: str, step: int, doctor: Doctor) -> History:
    """Modify the record of a kind after ``step`` committed steps, in all moves that carry it."""
    history = life()

    def of(move: Move) -> Move:
        record = move.record
        if record is not None and (record.kind, record.step) == (kind, step):
            move = replace(move, event=Decision(doctor(record)))
        effects = [
            replace(e, proposal=doctor(e.proposal))
            if isinstance(e, Decide) and (e.proposal.kind, e.proposal.step) == (kind, step)
            else e
            for e in move.out.effects
        ]
        return replace(move, out=replace(move.out, effects=effects))

    return History({peer: [of(m) for m in moves] for peer, moves in history.moves.items()})


def found(history: History) -> list[str]:
    (finding,) = judge(history, ["bounded"])
    assert finding.checks
    return [finding.violation or ""]


def _fewer(record: Record) -> Record:
    return replace(record, members=record.members[:2])


def _tighter(record: Record) -> Record:
    return replace(record, bound=1)


def _moved(record: Record) -> Record:
    at = record.standing[-1]
    return replace(record, standing=(*record.standing[:-1], at._replace(base=at.base + 1)))


def _without(record: Record) -> Record:
    return replace(record, standing=record.standing[:-1])


def _weighted(record: Record) -> Record:
    new = next(g for g in record.members if g.group == "5")
    return replace(record, leases=(*record.leases, Lease(record.cursor, new.group, new.store)))


@pytest.mark.parametrize(
    ("kind", "step", "doctor", "expected"),
    [
        ("epoch", 1, _fewer, "is formed by no majority of the job"),
        ("epoch", 1, _tighter, "leaves a group more than 1 steps behind"),
        ("epoch", 1, _moved, "changes the standing of a group"),
        ("epoch", 1, _without, "leaves 4 out of the job, and nothing is said against its life"),
        ("epoch", 1, _weighted, "counts what is no contribution of the lease"),
        ("commit", 2, _moved, "does not go on with the job's groups before it"),
    ],
)
def test_doctored_record_is_found_and_reported(
    kind: str, step: int, doctor: Doctor, expected: str
) -> None:
    (reported,) = found(doctored(kind, step, doctor))
    assert expected in reported


def test_the_life_that_is_doctored_is_clean() -> None:
    assert [f.violation for f in judge(life()) if f.violation] == []


@pytest.mark.parametrize("off", [-1, 0])
def test_contribution_from_an_older_base_than_the_epochs_is_a_violation(off: int) -> None:
    """This is as if a slice that was returned and granted again were not recomputed."""
    history = life()
    for peer, moves in history.moves.items():
        for move in moves:
            epoch = move.before.epoch
            if isinstance(move.event, Applied) and epoch is not None:
                bases = {each.entry.group: each.base for each in epoch.standing}
                if peer.group in bases:
                    at = (peer, move.before.token, bases[peer.group] + off, move.place)
                    history.contributed.append(at)
    assert len(history.contributed) > 5
    (text,) = found(history)
    assert ("and the epoch counts another" in text) == (off < 0), text


@cache
def running() -> Job:
    """Return three groups in the first epoch of a job; not to be changed."""
    return Job(3, spec=load_spec("async"), leases=True, bound=2).until_running()


@settings(deadline=None)
@given(st.integers(0, 3), st.none() | st.integers(0, 3), st.none() | st.integers(0, 3))
def test_contribution_is_brought_only_with_its_lease_and_base(
    base: int, held: int | None, granted: int | None
) -> None:
    node = running().node("1")
    epoch, config = node.local.epoch, node.participant.config
    assert epoch is not None
    for at in range(4):
        moved = tuple(each._replace(base=at) for each in epoch.standing)
        is_same = held == granted and at == base
        brought = is_brought(replace(epoch, standing=moved), config, (held, base), granted)
        assert brought == is_same
    assert not is_brought(replace(epoch, standing=()), config, (held, base), held)
