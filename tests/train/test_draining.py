"""Tests of the clock of a drain: its messages, actions and times, and the texts about its waits."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from fft.messages.protocol import GroupEntry, Peer, RankEntry, Record, Token
from fft.protocol.state import Config, Local
from fft.train.step.preemption import DrainTimer, Notice, time_for_a_commit, waiting_for

LIMIT_S = 30.0


class Place:
    """A participant that leaves when it is asked to, or has already left."""

    def __init__(self, why: str | None = "a long step", leaves: bool = True) -> None:
        self.why = why
        self.leaves = leaves
        self.causes: list[str] = []
        self.at = 0.0
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.noted = threading.Condition()

    def describe_wait(self) -> str | None:
        return self.why

    def leave(self, cause: str, limit_s: float) -> bool:
        self.at = time.monotonic()
        self.causes.append(cause)
        return self.leaves

    def note(self, name: str, data: dict[str, Any]) -> None:
        with self.noted:
            self.notes.append((name, data))
            self.noted.notify_all()

    def wait_for(self, name: str) -> dict[str, Any]:
        with self.noted:
            assert self.noted.wait_for(lambda: any(n == name for n, _ in self.notes), LIMIT_S)
            return next(data for n, data in self.notes if n == name)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.notes]


def ended(clock: DrainTimer) -> None:
    clock.close()
    assert not clock._thread.is_alive()


def test_a_notice_without_a_deadline_waits_for_a_commit() -> None:
    place = Place()
    clock = DrainTimer(place, 5.0)
    clock.on_notice(Notice("asked to"))
    clock.left()
    ended(clock)
    assert place.notes == [
        ("notice", {"reason": "asked to", "within": None}),
        ("drained", {"reason": "asked to", "left": None}),
    ]
    assert not place.causes


def test_stop_with_an_error_is_no_drain() -> None:
    """This happens in doubt, for example, if the bus is lost meanwhile."""
    place = Place()
    clock = DrainTimer(place, 5.0)
    clock.on_notice(Notice("asked to"))
    clock.left("InDoubt")
    clock.left()
    ended(clock)
    assert place.notes[1:] == [
        ("drain_failed", {"reason": "asked to", "left": None, "error": "InDoubt"})
    ]


def test_drain_in_time_reports_the_time_left() -> None:
    place = Place()
    clock = DrainTimer(place, 5.0)
    clock.on_notice(Notice("spot", 1000.0))
    clock.left()
    clock.left()
    ended(clock)
    assert place.names == ["notice", "drained"] and not place.causes
    assert 900 < place.notes[1][1]["left"] <= 1000


def test_a_deadline_may_be_as_far_away_as_one_likes() -> None:
    place = Place()
    clock = DrainTimer(place, 5.0)
    clock.on_notice(Notice("one day", 1e15))
    clock.on_notice(Notice("now", 0.0))
    place.wait_for("drain_late")
    ended(clock)


def test_late_drain_reports_the_cause_and_leaves() -> None:
    place = Place()
    clock = DrainTimer(place, 900.0)
    began = time.monotonic()
    clock.on_notice(Notice("spot", 2.0))
    late = place.wait_for("drain_late")
    clock.left()
    ended(clock)
    assert place.names == ["notice", "drain_late"]  # success is not reported after it
    assert late["why"] == "a long step" and late["reason"] == "spot" and late["left"] <= 1.0
    assert place.at - began >= 1.0
    (cause,) = place.causes
    assert cause.startswith("spot; not out ") and cause.endswith("the deadline: a long step")


@pytest.mark.parametrize(("within", "is_for_a_commit"), [(120, 115), (12, 7), (6, 3), (0, 0)])
def test_the_margin_is_not_more_than_half(within: float, is_for_a_commit: float) -> None:
    assert time_for_a_commit(within, 5.0) == is_for_a_commit


def test_an_earlier_deadline_counts_and_a_later_one_does_not() -> None:
    place = Place()
    clock = DrainTimer(place, 5.0)
    clock.on_notice(Notice("tomorrow", 90000.0))
    clock.on_notice(Notice("now", 0.5))
    clock.on_notice(Notice("tomorrow, after all", 90000.0))
    place.wait_for("drain_late")
    ended(clock)
    assert place.names == ["notice", "notice", "drain_late"]
    assert place.causes[0].startswith("now;")


def test_departed_rank_is_not_drained_again() -> None:
    place = Place(why=None)
    clock = DrainTimer(place, 900.0)
    clock.on_notice(Notice("spot", 0.0))
    clock.on_notice(Notice("a second source, by which the first has been dealt with"))
    clock.left()
    ended(clock)
    assert place.names == ["notice", "drained"] and not place.causes


def test_drain_without_a_bus_is_reported() -> None:
    place = Place(leaves=False)
    clock = DrainTimer(place, 5.0)
    clock.on_notice(Notice("spot", 0.0))
    place.wait_for("drain_untold")
    ended(clock)
    assert place.names == ["notice", "drain_late", "drain_untold"]


# --- words ----------------------------------------------------------------------------------------

ME, OTHER = Peer("0", 0, 1), Peer("1", 0, 1)
CONFIG = Config(ME, 1, "s", "t", 1, "h", {})


def record(kind: Any, n: int, by: Peer) -> Record:
    entry = {"current": True, "transport": "t", "pid": 1, "host": "h"}
    ranks = [(p.group, RankEntry(rank=p.rank, inc=p.inc, **entry)) for p in (ME, OTHER)]
    members = tuple(GroupEntry(group=g, store="s", ranks=(r,)) for g, r in ranks)
    return Record(
        n=n, kind=kind, epoch=3, txn=0 if kind == "epoch" else 1, step=7, lineage="l", cursor=0,
        batches=0, by=by, members=members if kind == "epoch" else (),
    )  # fmt: skip


EPOCH = record("epoch", 5, ME)
HERE = Local(
    "NORMAL", "training", "l", step=7, token=Token(3, 1), head=EPOCH, epoch=EPOCH, since=10.0
)


@pytest.mark.parametrize(
    ("local", "words"),
    [
        (HERE, "its txn is open, and its main thread has not voted; NORMAL for 2.5 s, step 7"),
        (replace(HERE, role="voting", bus_down=True), "in doubt.*; the bus is out of reach"),
        (replace(HERE, role="committing"), "runs the optimizer step"),
        (replace(HERE, role="rolling_back"), "not finished the rollback"),
        (replace(HERE, role="healing", head=record("abort", 6, ME)),
         "no next epoch: no acknowledgement from 1/0#1;"),
        (replace(HERE, role="healing", head=record("abort", 6, OTHER)),
         "no next epoch: 1/0#1 collects the acknowledgements"),
        (replace(HERE, role="healing"), "builds process groups, or fetches"),
        (replace(HERE, role="healing", healed=True), "barrier of its epoch: waiting for 1/0#1"),
        (replace(HERE, role="leaving"), "left with a commit"),
        (replace(HERE, role="joining", epoch=None), "in no epoch"),
    ],
)  # fmt: skip
def test_waiting_for_names_the_missing_parts(local: Local, words: str) -> None:
    assert re.search(words, waiting_for(local, CONFIG, 12.5)), waiting_for(local, CONFIG, 12.5)
