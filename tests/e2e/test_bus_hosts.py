"""Tests of a job whose bus is served by NATS on three of its hosts, one of which is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from forked import Forked
from namespaces import needs_namespaces
from network_worker import leader, list_listeners
from spanning import LONG_S, SpanningJob, check, new_ranks, spanning_job
from stage import events
from waiting import wait_until

HOSTS = (1, 2, 3)
ELECTION_S = (1.5, 30.0)
"""Bounds of the longest time without a commit: followers wait for 4 to 9 s since the last message
of their leader, and a busy machine adds to that."""
pytestmark = [pytest.mark.timeout(900), pytest.mark.multiprocess, needs_namespaces]


@contextmanager
def training(folder: Path) -> Iterator[SpanningJob]:
    """A job of a group on each of three hosts, all of which serve the bus."""
    with spanning_job(folder, 3, groups=3, servers=HOSTS, ranks=1, here=1) as job:
        for host in HOSTS:
            job.start(host)
        job.advances(0, 1, 2)
        yield job


def leading(job: SpanningJob) -> int:
    """Return the host whose server leads the registers and votes of the job."""
    file = job.folder / "leader"
    asked = Forked(leader, job.hosts[0], job.env["FFT_BUS"], job.token, file)
    assert asked.wait(LONG_S) == 0
    return HOSTS[int(file.read_text().removeprefix("s"))]


def longest_pause(traces: Path, group: int) -> float:
    """Return the longest time between two commits of a group, in seconds."""
    walls = [line["wall"] for line in events(traces, "applied") if line["group"] == str(group)]
    return max(after - before for before, after in pairwise(sorted(walls)))


@pytest.mark.long
@pytest.mark.parametrize("loss", ["killed", "cut"])
def test_loss_of_the_host_of_the_leader_costs_an_election(
    tmp_path: Path, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with training(tmp_path) as job:
        lost = leading(job)
        listed = tmp_path / "listeners"
        assert Forked(list_listeners, job.hosts[lost], listed).wait(LONG_S) == 0
        servers = [at for at, line in json.loads(listed.read_text()) if "nats-server" in line[0]]
        assert sorted(servers) == [f"10.77.0.{lost + 1}"] * 2 + ["127.0.0.1"]
        others = [host - 1 for host in HOSTS if host != lost]
        before = {group: job.processes(group) for group in range(3)}
        if loss == "killed":
            job.lose(lost)
        else:
            job.cut(lost)
        job.advances(*others)
        alone = job.step(lost - 1)
        job.advances(*others)
        assert job.step(lost - 1) == alone, "a host without the others commits nothing"
        assert not new_ranks(job, before), "no other process restarts"
        job.connect(lost)
        if loss == "killed":
            job.serve(lost)
            job.start(lost)
            assert job.url(lost) == job.env["FFT_BUS"], "an empty server has caught up"
        job.advances(0, 1, 2)
        assert new_ranks(job, before) <= {(lost - 1, 0)}, "no other process restarts"

        # the bus survives another loss, so the server of the host that came back takes part
        wait_until(lambda: leading(job) > 0, "a leader is there", LONG_S)
        other = next(host for host in HOSTS if host != lost)
        last = next(host for host in HOSTS if host not in (lost, other))
        job.lose(other)
        job.advances(lost - 1, last - 1)
        traces = check(job)
    pause = longest_pause(traces, last - 1)
    with capsys.disabled():
        print(f"\n  longest time without a commit: {pause:.1f} s")
    assert ELECTION_S[0] < pause < ELECTION_S[1]
