"""Tests of diagnoses with real processes on loopback, some of which misbehave; all share one
job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from forked import Forked, as_main
from typer.testing import CliRunner

from fft.bus import open_bus, serve_tcp
from fft.bus.base import HEAD
from fft.cli import app
from fft.messages.commands import Check, CheckTask, fresh_id
from fft.messages.protocol import GroupEntry, Peer, RankEntry, Record
from fft.messages.wire import EPOCH, Wire, encode_register, list_name
from fft.operate.client import JobClient, OperatorError
from fft.operate.diagnosis.rounds import Report, diagnose

PEER = Path(__file__).with_name("peer.py")
END_S = 60.0
LIMIT_S = 30.0
LONGER_S = 15.0
"""A limit for tests that wait for a silent rank; long enough for everything else on a busy
machine."""
SHORT_S = 4.0
"""A limit for tests with a silent rank that check nothing else."""
GROUPS = 5


def epoch_record(groups: int) -> Record:
    entry = RankEntry(0, 1, True, "", 1, "here")
    members = tuple(GroupEntry(str(g), "here:1", (entry,)) for g in range(groups))
    return Record(1, "epoch", 1, 1, 7, "line", 0, 0, Peer("0", 0, 1), members)


def begin_job(url: str, groups: int) -> None:
    """Write the registers of a job that has formed its first epoch."""
    record, wire = epoch_record(groups), Wire()
    with open_bus(url) as bus:
        bus.write(list_name(record), encode_register(record.members))
        bus.write(EPOCH, wire.encode_record(record))
        bus.compare_set(HEAD, None, wire.encode_record(record))


class Job:
    """Processes that answer checks and can be made to misbehave."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.url = stack.enter_context(serve_tcp()).url
        self._modes = [directory / f"mode-{group}" for group in range(GROUPS)]
        self.set({})
        begin_job(self.url, GROUPS)
        peers = Forked(as_main, str(PEER), self.url, *map(str, self._modes), talks=True)
        stack.callback(peers.close)
        stack.callback(peers.wait, END_S)
        stack.callback(peers.stdin.close)
        assert [peers.stdout.readline() for _ in range(GROUPS)] == ["ready\n"] * GROUPS

    def set(self, modes: dict[int, str]) -> None:
        for group, path in enumerate(self._modes):
            path.write_text(modes.get(group, "sound"))

    def diagnose(self, modes: dict[int, str], limit: float = LIMIT_S) -> Report:
        self.set(modes)
        with JobClient(self.url) as desk:
            return diagnose(desk, limit=limit)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack, tmp_path_factory.mktemp("modes"))


def found(report: Report) -> dict[str, tuple[str, str]]:
    return {c.rank[0]: (c.how, "; ".join(c.evidence)) for c in report.verdict.culprits}


def grave(report: Report) -> dict[str, tuple[str, str]]:
    """Return the report without slow ranks, because this machine may be slow."""
    return {group: what for group, what in found(report).items() if what[0] != "slow"}


@pytest.mark.multiprocess
def test_healthy_job_has_no_named_rank(job: Job) -> None:
    report = job.diagnose({})
    assert not grave(report), report.lines()
    assert len(report.findings.alone) == GROUPS
    assert all(o.ok for checks in report.findings.alone.values() for o in checks.values())
    assert {rank for m in report.findings.meetings for rank in m.pair} == set(report.ranks)
    data = json.loads(json.dumps(report.to_json()))
    assert data["step"] == 7 and len(data["ranks"]) == GROUPS


@pytest.mark.one_in(3)
@pytest.mark.multiprocess
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_rank_that_alters_its_data_is_named(job: Job, bad: int) -> None:
    """This holds whether the rank listens, connects, or has no partner in the first round."""
    report = job.diagnose({bad: "flip"})
    assert list(grave(report)) == [str(bad)], report.lines()
    how, evidence = found(report)[str(bad)]
    assert how == "failed" and "corrupted" in evidence
    assert evidence.count("sound with others") >= 2


@pytest.mark.long
@pytest.mark.multiprocess
def test_late_sender_is_named_slow(job: Job) -> None:
    report = job.diagnose({3: "slow"})
    assert found(report)["3"][0] == "slow", report.lines()
    assert not grave(report)


@pytest.mark.long
@pytest.mark.multiprocess
def test_silent_sender_is_named_within_the_limit(job: Job) -> None:
    report = job.diagnose({2: "mute"}, limit=LONGER_S)
    assert found(report)["2"][0] == "failed", report.lines()
    assert "in time" in found(report)["2"][1]


@pytest.mark.long
@pytest.mark.multiprocess
def test_two_bad_ones_of_five_are_both_named(job: Job) -> None:
    report = job.diagnose({0: "flip", 2: "wrong"})
    assert sorted(grave(report)) == ["0", "2"], report.lines()
    assert "3 of 3 products on cpu had a wrong result" in found(report)["2"][1]


@pytest.mark.long
@pytest.mark.multiprocess
def test_unanswering_rank_is_named_by_the_command(job: Job) -> None:
    job.set({1: "silent"})
    done = CliRunner().invoke(app, ["diagnose", "--bus", job.url])
    assert done.exit_code == 1, done.output
    assert "group 1 rank 0 is at fault (silent, confidence medium): does not answer" in done.output
    assert "no supervisor" not in done.output, "nobody asked to evict it"


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("bad", [0, 1])
def test_rank_waiting_for_a_silent_partner_is_not_blamed(job: Job, bad: int) -> None:
    """It is blamed neither while it listens for the partner nor in the rounds after that."""
    report = job.diagnose({bad: "shy"}, limit=LONGER_S)
    hows = {group: how for group, (how, _) in grave(report).items()}
    assert hows == {str(bad): "silent"}, report.lines()
    assert "answered before" in found(report)[str(bad)][1]


@pytest.mark.multiprocess
def test_one_check_at_a_time(job: Job) -> None:
    """A second operator gets an error, and the first one gets the answer."""
    job.set({0: "mute"})
    task = CheckTask("0", 0, "listen", key="0" * 32)
    check = Check(fresh_id(), (task,), "me", limit=SHORT_S)
    with JobClient(job.url) as first, JobClient(job.url) as second, first.asking(check) as answers:
        assert next(answers(time.monotonic() + LIMIT_S)).verdict == "accepted"
        with pytest.raises(OperatorError, match="group 0 rank 0 is busy with another check"):
            diagnose(second)
        assert next(answers(time.monotonic() + LIMIT_S)).verdict == "done"


def test_bus_without_a_job_is_reported() -> None:
    done = CliRunner().invoke(app, ["diagnose", "--bus", "memory://nobody-here"])
    assert done.exit_code == 2 and "no epoch of a job" in done.output
