"""Tests of the tables of verdicts: each row is taken by the facts that it is for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fft.errors import (
    GradientLayoutMismatch,
    GradientMissing,
    JobEnded,
    NoState,
    NotEnoughGroups,
    OtherSettings,
    RestartRefused,
    ResultRefused,
    StateMismatch,
    UnequalData,
)
from fft.launch.exit_status import ExitStatus
from fft.launch.verdict import (
    AFTER,
    GROUPS,
    STATUS,
    WHOLE,
    Failure,
    GroupEnd,
    JobEnd,
    Judged,
    Next,
    Statuses,
    first,
    verdict,
)
from fft.messages.causes import LeaveReason
from fft.messages.exits import Exit, decode_exit, encode_exit
from fft.messages.protocol import Peer, Record
from fft.util.error_places import Place

KILLED, TERMINATED = -9, -15


def place(kind: type[BaseException] = ValueError, where: str = "train.py:3 f") -> Place:
    kinds = tuple(k.__name__ for k in kind.__mro__)
    return Place(kinds[0], kinds, "no", where, "", "Traceback …")


def x(group: str = "0", rank: int = 0, **fields: Any) -> Exit:
    return Exit(group, rank, 7, "here", 5, **{"status": 0, **fields})


def raised(kind: type[BaseException], group: str = "0", **fields: Any) -> Exit:
    return x(group, status=1, place=place(kind), **fields)


LAST, DRAINED = LeaveReason.LAST_STEP, LeaveReason.DRAINED
DONE = GroupEnd("0", (x(reason=LAST),))
LEFT = GroupEnd("0", (x(reason=DRAINED),))


def other(*exits: Exit, **fields: Any) -> GroupEnd:
    return GroupEnd("1", exits or (x("1", reason=LAST),), **fields)


def judged(*groups: GroupEnd, **facts: Any) -> Judged:
    return verdict(
        JobEnd(groups, **facts), lambda e: f"group {e.group} rank {e.rank} ended: {e.status}"
    )


# --- what follows the end of a group --------------------------------------------------------------

BEFORE = place()
_ENDED = {
    "data differ": Failure(place(UnequalData), committed=True),
    "no second call": Failure(place(RestartRefused), committed=True),
    "refused": Failure(place(ResultRefused), committed=True),
    "no gradient": Failure(place(GradientMissing), committed=True),
    "item, once": Failure(replace(place(ConnectionError), item="item 7")),
    "item": Failure(replace(place(KeyError), item="item 7"), committed=True),
    "left alone": Failure(place(NotEnoughGroups), committed=True),
    "may pass": Failure(place(ConnectionResetError), BEFORE, 2, 1, committed=True),
    "exit code in the job": Failure(place(SystemExit), place(SystemExit), committed=True),
    "another model here": Failure(place(GradientLayoutMismatch), committed=True),
    "other models": Failure(place(GradientLayoutMismatch)),
    "other settings here": Failure(place(OtherSettings), committed=True),
    "other settings": Failure(place(OtherSettings)),
    "again at the start": Failure(place(), BEFORE, groups=4),
    "not loadable": Failure(place(ModuleNotFoundError), groups=4),
    "unfit checkpoint": Failure(place(StateMismatch), groups=4),
    "all at the start": Failure(place(), alike=2),
    "at the start": Failure(place(), alike=2, groups=4),
    "only group": Failure(place(), groups=1, here=1, committed=True),
    "groups alike": Failure(place(), BEFORE, alike=2, committed=True),
    "again": Failure(place(), BEFORE, committed=True),
    "once": Failure(place(KeyError), BEFORE, committed=True),
}
_JOB = {
    *("data differ", "no second call", "refused", "no gradient", "item", "other models"),
    *("other settings", "again at the start", "not loadable", "unfit checkpoint"),
    *("all at the start", "only group", "groups alike"),
}
_GROUP = {"left alone", "another model here", "other settings here", "again"}


@pytest.mark.parametrize("name", [row.name for row in AFTER])
def test_end_of_a_group_is_followed_by_what_its_row_demands(name: str) -> None:
    row = first(AFTER, _ENDED[name])
    assert row.name == name
    assert row.then.ends == ("job" if name in _JOB else "group" if name in _GROUP else "")
    assert isinstance(row.then, Next) and bool(row.then.why) == bool(row.then.ends)


# --- how a group has ended ------------------------------------------------------------------------

_GROUP_ENDS: dict[str, tuple[GroupEnd, dict[str, Any], str]] = {
    "ended on request": (other(x("1", status=KILLED), fate="evicted"), {}, ""),
    "the script is wrong": (other(raised(KeyError, "1")), {"hopeless": True}, ""),
    "finished": (other(), {}, ""),
    "asked as it started": (
        other(x("1", status=TERMINATED, asked=True, took_part=False)),
        {},
        "group 1 was asked to end while it started",
    ),
    "asked as it exited": (
        other(x("1", status=TERMINATED, reason=DRAINED)),
        {"asked_to_end": True},
        "group 1 had left, and SIGTERM ended its process at its exit",
    ),
    "too late for a stage": (other(raised(JobEnded, "1"), is_told=True), {}, ""),
    "too late": (other(raised(JobEnded, "1")), {}, "group 1 came back when the job was over"),
    "killed at the end": (
        other(x("1", status=KILLED)),
        {"asked_to_end": True},
        "group 1 ended with SIGKILL as the job was to end",
    ),
    "cut short": (
        other(x("1", status=KILLED)),
        {"is_over": True},
        "the job was over; group 1 ended with SIGKILL, and was no longer needed",
    ),
    "given up": (other(x("1", status=1), fate="given up"), {}, "group 1 rank 0 ended: 1"),
    "failed": (other(x("1", status=1)), {}, "group 1 rank 0 ended: 1"),
}


@pytest.mark.parametrize("name", [row.name for row in GROUPS])
def test_group_that_has_ended_is_described_by_its_row(name: str) -> None:
    group, facts, text = _GROUP_ENDS[name]
    found = judged(DONE, group, **facts)
    told = [line for line in found.lines if "group 1" in line]
    assert told == [text] * bool(text)
    assert found.ok == (name not in ("given up", "failed"))


@pytest.mark.parametrize(
    ("exits", "decisive"),
    [
        ((x("1", 0, status=KILLED), x("1", 1, status=3)), 3),
        ((x("1", 0, status=KILLED), x("1", 1, status=-11)), -11),
        ((x("1", 0, status=0), x("1", 1, early=True)), 0),
    ],
)
def test_process_that_died_by_itself_explains_the_end_of_its_group(
    exits: tuple[Exit, ...], decisive: int
) -> None:
    failed = other(*exits).failed
    assert failed is not None and failed.status == decisive


def test_over_without_a_group_that_ended_by_itself_is_a_problem() -> None:
    found = judged(GroupEnd("0", (x(status=KILLED),)), is_over=True)
    assert found.status is ExitStatus.FAILED
    assert found.lines[0] == "no group ended by itself after the last step"


# --- the exit status ------------------------------------------------------------------------------

STOP = Record(
    *(9, "commit", 1, 9, 5, "x", 0, 0, Peer("0", 0, 1)),
    leavers=("0", "1"),
    reasons=(LAST, DRAINED),
    last=True,
    skip=True,
)
AWAY = other(x("1", status=TERMINATED, asked=True, took_part=False))
_STATUS: dict[str, tuple[ExitStatus, tuple[GroupEnd, ...], dict[str, Any]]] = {
    "bus lost after the end": (
        *(ExitStatus.FEWER_GROUPS, (DONE,)),
        {"bus_is_lost": True, "problems": ["the bus"]},
    ),
    "bus lost": (ExitStatus.BUS_LOST, (LEFT,), {"bus_is_lost": True, "problems": ["the bus"]}),
    "no progress": (
        *(ExitStatus.NO_PROGRESS, (GroupEnd("0", (x(status=KILLED),), "given up"),)),
        {"no_progress": True},
    ),
    "problems": (ExitStatus.FAILED, (DONE, other(x("1", status=KILLED))), {}),
    "plan finished": (ExitStatus.COMPLETE, (LEFT,), {"is_plan_through": True, "has_plan": True}),
    "plan without a group": (
        *(ExitStatus.FAILED, (LEFT, other(x("1", status=1), fate="given up"))),
        {"is_plan_through": True, "has_plan": True},
    ),
    "ended elsewhere": (ExitStatus.DRAINED, (AWAY,), {"others": ExitStatus.DRAINED}),
    "asked to end": (ExitStatus.DRAINED, (LEFT, AWAY), {"asked_to_end": True}),
    "stopped when asked": (
        *(ExitStatus.DRAINED, (DONE, other(x("1", reason=DRAINED)))),
        {"head": STOP},
    ),
    "all drained": (ExitStatus.DRAINED, (LEFT, other(x("1", reason=DRAINED))), {}),
    "a group lost": (
        *(ExitStatus.FEWER_GROUPS, (DONE, other(x("1", status=KILLED), fate="given up"))),
        {},
    ),
    "a shard untrained": (
        *(ExitStatus.FEWER_GROUPS, (GroupEnd("0", (x(reason=LeaveReason.SHARD_ENDED),)), AWAY)),
        {},
    ),
    "a group drained": (ExitStatus.FEWER_GROUPS, (DONE, other(x("1", reason=DRAINED))), {}),
    "only given up": (
        ExitStatus.FAILED,
        (GroupEnd("0", (x(status=KILLED),), "given up"),),
        {},
    ),
    "complete": (ExitStatus.COMPLETE, (DONE, AWAY), {}),
}


@pytest.mark.parametrize("name", [row.name for row in STATUS])
def test_exit_status_is_that_of_the_row_of_the_end(name: str) -> None:
    status, groups, facts = _STATUS[name]
    found = judged(*groups, **facts)
    assert (found.row, found.status) == (name, status)


@pytest.mark.parametrize(
    ("groups", "facts", "status", "text"),
    [
        ((DONE, other()), {"asked_to_end": True}, ExitStatus.COMPLETE, "left after step 0"),
        ((LEFT, other()), {"has_plan": True}, ExitStatus.COMPLETE, None),
        (
            (DONE, other(x("1", early=True))),
            *({"reached": {0: 9}}, ExitStatus.FAILED),
            "group 1 rank 0 ended with exit status 0 after step 5, unasked",
        ),
        (
            (
                other(x("1", reason=LeaveReason.SHARD_ENDED)),
                GroupEnd("0", (raised(NotEnoughGroups),)),
            ),
            *({}, ExitStatus.FAILED),
            "group 1 left after step 5, because its shard of the data was trained to its end",
        ),
        ((AWAY,), {"others": ExitStatus.FAILED}, ExitStatus.FAILED, "those of other hosts failed"),
        ((GroupEnd("0", (x(),)),), {"is_idle": True}, ExitStatus.FAILED, "no rank began a trans"),
        ((GroupEnd("0", (raised(NoState),)),), {}, ExitStatus.FAILED, "NoState: all processes"),
        ((DONE,), {"unfinished": "no"}, ExitStatus.FAILED, "the fault plan was not finished: no"),
    ],
)
def test_verdict_names_the_cause_beside_the_status(
    groups: tuple[GroupEnd, ...], facts: dict[str, Any], status: ExitStatus, text: str | None
) -> None:
    found = judged(*groups, **facts)
    assert found.status is status, found
    assert (not found.lines) if text is None else any(text in line for line in found.lines)


_PARTS = {
    "complete": Statuses([ExitStatus.COMPLETE] * 2, True),
    "done by some": Statuses([ExitStatus.COMPLETE, None], True),
    "hosts lost": Statuses([ExitStatus.FAILED, None], True),
    "drained": Statuses([ExitStatus.DRAINED] * 2, True),
    "no progress": Statuses([ExitStatus.NO_PROGRESS, ExitStatus.DRAINED], True),
    "failed": Statuses([ExitStatus.DRAINED] * 2, False),
}


@pytest.mark.parametrize("name", [row.name for row in WHOLE])
def test_status_of_the_whole_job_is_that_of_its_row(name: str) -> None:
    assert first(WHOLE, _PARTS[name]).name == name


def test_exit_crosses_the_bus_unchanged() -> None:
    found = x(reason=DRAINED, status=KILLED, place=place(KeyError), log="here", asked=True)
    assert decode_exit(encode_exit(found)) == found
