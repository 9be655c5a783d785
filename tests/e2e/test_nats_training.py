"""Tests of training on a NATS cluster with killed leaders: no step is lost, doubled or
different."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from nats_servers import NatsServers
from stage import Member, aborts, events, job, slices
from waiting import wait_until

import fft

STEPS = 30
KILLS = (8, 18)
"""Steps with a kill in the step function, so that the votes of each meet a cluster without a
leader."""
LONG_S = 240.0
"""A limit for an election of 4 to 9 s after a kill, on a busy machine that is several times
slower."""


class Killer:
    """A step function of group 0 that kills the server that leads the job's registers and votes."""

    def __init__(self, servers: NatsServers) -> None:
        self._servers = servers
        self.killed: list[int] = []

    def __call__(self, member: Member, txn: fft.Transaction) -> None:
        if member.group != "0" or txn.step not in KILLS[len(self.killed) :]:
            return
        wait_until(self._servers.whole, "all replicas are current", LONG_S)
        leader = self._servers.leaders()[f"fft-{self._servers.job}"]
        self._servers.kill(leader)
        self.killed.append(leader)


def train(traces: Path, servers: NatsServers | None = None) -> list[str]:
    """Train three groups to the end; return the digests of their states."""
    killer = Killer(servers) if servers is not None else None
    with job(traces, 3, servers.url if servers is not None else None) as made:
        members = [made.member(str(group), timeout=timedelta(minutes=1)) for group in range(3)]
        for member in members:
            member.start(lambda one: one.train(STEPS, body=killer))
        for number, step in enumerate(KILLS if killer and servers else ()):
            wait_until(
                lambda step=step: members[0].manager.current_step() > step,  # type: ignore[misc]
                f"step {step} is committed",
                LONG_S,
            )
            assert killer and servers
            # On this thread, as the server dies with the thread that started it
            servers.start(killer.killed[number])
        for member in members:
            member.end(LONG_S)
            assert member.error is None, member.error
        made.audit()
        return [member.manager.digest() for member in members]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_leader_costs_time_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(tmp_path / "calm")
    with NatsServers(cluster=3) as servers:
        assert train(tmp_path / "killed", servers) == expected
    assert aborts(tmp_path / "killed") == [], "an election is waited for, nobody is suspected"
    assert sorted(slices(tmp_path / "killed")[0]) == list(range(3 * STEPS))
    applied = [line["wall"] for line in events(tmp_path / "killed", "applied")]
    gaps = sorted((after - before for before, after in pairwise(applied)), reverse=True)
    with capsys.disabled():
        print(f"\n  longest times without a commit: {gaps[0]:.2f} s, {gaps[1]:.2f} s")
    # no follower stands for election earlier than 3 s after a kill: 4 s after the last heartbeat
    assert gaps[len(KILLS) - 1] > 1.5, "the commits met a cluster without a leader"
