"""Tests of groups that span hosts: 2 groups of 4 FSDP2 ranks, of which each host has 2.

Each host has its own folder of traces, so no supervisor sees the ranks of the others.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from forked_run import fft
from namespaces import needs_namespaces
from spanning import GROUPS, LONG_S, RANKS, SCRIPT, check, new_ranks, spanning_job
from stage import digests, fetches, records
from waiting import wait_until

STEPS = 12
pytestmark = [pytest.mark.timeout(900), pytest.mark.multiprocess, needs_namespaces]


def test_group_on_two_hosts_has_the_bits_of_one_host(tmp_path: Path) -> None:
    alone, place = tmp_path / "alone", tmp_path / "place"
    place.mkdir()
    command = ["run", "--groups", str(GROUPS), "--ranks", str(RANKS), "--trace-dir", str(alone)]
    done = fft(*command, str(SCRIPT), str(place), str(STEPS), folder=tmp_path, within=LONG_S)
    assert done.returncode == 0, done.stderr
    with spanning_job(tmp_path, 2) as job:
        for host in (1, 2):
            job.start(host, "--groups", str(GROUPS), steps=STEPS)
        assert [agent.wait(LONG_S) for agent in job.agents.values()] == [0, 0], [
            agent.tail() for agent in job.agents.values()
        ]
        spread = digests(job.traces())
    assert spread == digests(alone) and len(spread) == GROUPS * RANKS * STEPS
    for group in range(GROUPS):
        variables = [json.loads((tmp_path / f"env-{group}-{r}").read_text()) for r in range(RANKS)]
        shown = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        assert [tuple(int(each[name]) for name in shown) for each in variables] == [
            (0, 0, 0, 0, 2, 4),
            (1, 1, 0, 0, 2, 4),
            (2, 0, 1, 1, 2, 4),
            (3, 1, 1, 1, 2, 4),
        ]


@pytest.mark.long
def test_ranks_hosts_and_agents_that_are_lost_return_to_a_group_that_stays(tmp_path: Path) -> None:
    with spanning_job(tmp_path, 4) as job:
        for host in range(1, 5):
            job.start(host)
        job.advances(0, 1)
        first = next(host for host in (1, 2) if 0 in job.ranks_on(host, 0))
        before = {group: job.processes(group) for group in range(GROUPS)}

        # a rank is killed: its `fft run` replaces it, and the other host keeps its processes
        os.kill(before[0][3], signal.SIGKILL)
        wait_until(lambda: job.processes(0) != before[0], "a process follows", LONG_S)
        job.advances(0, 1)
        assert new_ranks(job, before) == {(0, 3)}

        # the host with the group's store is lost: the others go on, and the rest stays loaded
        before = {group: job.processes(group) for group in range(GROUPS)}
        job.lose(first)
        job.advances(1)
        job.connect(first)
        job.start(first)
        wait_until(lambda: job.processes(0)[1] != before[0][1], "processes follow", LONG_S)
        job.advances(0, 1)
        assert new_ranks(job, before) == {(0, 0), (0, 1)}

        # an `fft run` is killed, and its ranks end with it
        before = {group: job.processes(group) for group in range(GROUPS)}
        other = 3 if 2 in job.ranks_on(3, 1) else 4
        job.agents[other].end()
        wait_until(lambda: not job.pids(other), "its ranks have ended")
        job.start(other)
        wait_until(lambda: job.processes(1)[3] != before[1][3], "processes follow", LONG_S)
        job.advances(0, 1)
        assert new_ranks(job, before) == {(1, 2), (1, 3)}
        traces = check(job)
    entries = [member for record in records(traces) for member in record["members"]]
    ours = [(each["store"], each.get("home", "")) for each in entries if each["group"] == "0"]
    assert len({store for store, _ in ours}) == 1, "the group keeps its identity"
    assert ours[0][1] == "" and ours[-1][1] != "", "it meets at the store of the new process"
    sources = {(group, source) for group, _, _, _, source in fetches(traces)}
    assert sources == {("0", "1"), ("1", "0")}


@pytest.mark.long
def test_spare_host_takes_the_place_of_one_that_is_cut_off(tmp_path: Path) -> None:
    with spanning_job(tmp_path, 5) as job:
        for host in range(1, 5):
            job.start(host)
        job.start(5, "--groups", "0", "--spares", "2")
        job.advances(0, 1)
        wait_until(lambda: len(job.pids(5)) > 3, "spares wait", LONG_S)
        before = {group: job.processes(group) for group in range(GROUPS)}
        first = next(host for host in (1, 2) if 0 in job.ranks_on(host, 0))
        job.cut(first)
        wait_until(lambda: job.processes(0)[1] != before[0][1], "spares take over", LONG_S)
        job.advances(0, 1)
        assert new_ranks(job, before) == {(0, 0), (0, 1)} and job.ranks_on(5, 0) == {0, 1}
        job.connect(first)
        wait_until(
            lambda: not set(before[0].values()) & set(job.pids(first)),
            "the host that was cut off ends its old processes",
            LONG_S,
        )
        job.advances(0, 1)
        assert new_ranks(job, before) == {(0, 0), (0, 1)}
        check(job)


@pytest.mark.long
def test_group_lends_a_host_to_another_if_both_have_lost_one(tmp_path: Path) -> None:
    with spanning_job(tmp_path, 6, groups=3) as job:
        for host in range(1, 7):
            job.start(host)
        job.advances(0, 1, 2)
        before = {group: job.processes(group) for group in range(3)}
        lost = {0: job.ranks_on(1, 0), 2: job.ranks_on(5, 2)}
        for host in (1, 5):
            job.lose(host)
        wait_until(
            lambda: new_ranks(job, before) == {(0, rank) for rank in lost[0]},
            "the host of group 2 runs the lost ranks of group 0",
            LONG_S,
        )
        job.advances(0, 1)
        assert job.ranks_on(6, 0) == lost[0] and not job.ranks_on(6, 2)
        # the lost hosts come back, with their old commands, and both belong to the lender now
        for host in (1, 5):
            job.connect(host)
            job.start(host)
        wait_until(lambda: len(new_ranks(job, before)) == 6, "group 2 is started", LONG_S)
        job.advances(0, 1, 2)
        assert {(0, rank) for rank in lost[0]} | {(2, r) for r in range(RANKS)} == new_ranks(
            job, before
        )
        check(job)
