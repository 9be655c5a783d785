"""Tests of copies in memory in jobs of two hosts, all of whose processes end.

Either each host has a group, or both groups span both hosts. The criteria are those of
test_near_state.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from forked_run import FftRun, fft, run_command
from namespaces import Host, hosts_of_one_network, needs_namespaces
from network_worker import run
from test_durable import (
    LIMIT_S,
    STEPS,
    began_at,
    ends,
    folders,
    kill_ranks,
    run_undisturbed,
)
from test_durable import arguments as durable_arguments
from test_near_state import has_copies, judge, reached
from typer.testing import CliRunner
from waiting import wait_until

from fft.cli import app
from fft.trace.audit import read_lines
from fft.trace.resumed import audit_job

pytestmark = [pytest.mark.multiprocess, needs_namespaces]
SHAPES = {
    "groups": [{"groups": 1, "first-group": 0}, {"groups": 1, "first-group": 1}],
    "parts": [{"ranks-per-host": 1}, {"ranks-per-host": 1}],
    "one group": [{"groups": 1, "all-groups": 1, "ranks-per-host": 1}] * 2,
}


class Agent(FftRun):
    """`fft run` on a host."""

    def __init__(self, host: Host, *arguments: str, folder: Path, env: dict[str, str]) -> None:
        made = Path(tempfile.mkdtemp(prefix="said-", dir=folder))
        self._out, self._err = made / "stdout", made / "stderr"
        self._out.touch(), self._err.touch()
        files = str(self._out), str(self._err)
        Forked.__init__(self, _on_host, host, os.getcwd(), files, arguments, False, env=env)


def _on_host(host: Host, *arguments: Any) -> None:
    host.enter()
    run_command(*arguments)


class HostsJob:
    """A job of two hosts; host 0 serves the bus."""

    def __init__(
        self, root: Path, hosts: list[Host], shape: str, least: tuple[object, ...]
    ) -> None:
        self.root, self.hosts, self.shape, self._least = root, hosts, SHAPES[shape], least
        token, log = root / "token", root / "bus.log"
        serving = ["serve", "--host", "10.77.0.1", "--token-file", str(token), "--no-lighthouse"]
        self.server = Forked(run, hosts[0], *serving, log=log)
        wait_until(lambda: "FFT_BUS=" in log.read_text(), "the bus is served", LIMIT_S)
        url = re.findall(r"FFT_BUS=(\S+)", log.read_text())[0]
        self._env = {"FFT_BUS": url, "FFT_TOKEN_FILE": str(token)}
        self.agents: dict[int, Agent] = {}

    def start(self, *numbers: int) -> None:
        """Start `fft run` on these hosts, always by the same commands."""
        given: dict[str, object] = {"all-groups": 2, "memory": 1, "checkpoint": None, "every": None}
        for number in numbers or (1, 2):
            options = given | self.shape[number - 1]
            script = STEPS, self.root / "out", 0.1, *self._least
            command = durable_arguments(self.root, *script, **options)
            command.insert(1, "--join")
            self.agents[number] = Agent(
                self.hosts[number], *command, folder=self.root, env=self._env
            )

    def end(self, *numbers: int) -> None:
        """Kill all processes of these hosts."""
        for number in numbers or (1, 2):
            while pids := _pids(self.hosts[number]):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if number in self.agents:
                self.agents[number].end()

    def waits(self) -> None:
        """Wait for the successful end of the job."""
        for agent in self.agents.values():
            assert agent.wait(LIMIT_S) == 0, self.tail()

    def tail(self) -> str:
        """Return what all of its `fft run` have printed."""
        return "\n".join(agent.tail() for agent in self.agents.values())

    def sources(self) -> dict[str, tuple[str, int]]:
        """Return for each rank of the newest start where its state is from: the tier, and the
        number of other hosts."""
        notes = read_lines(folders(self.root)[-1], lambda line: line.get("note") == "resumed")
        return {
            f"{line['group']}/{line['rank']}": (line["data"]["tier"], len(line["data"]["from"]))
            for line in notes
        }


def _pids(host: Host) -> list[int]:
    command = ["ip", "netns", "pids", host.space]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in found.split()]


@contextmanager
def hosts_job(root: Path, shape: str, is_one_enough: bool = False) -> Iterator[HostsJob]:
    """A job that is started, and ended when the block is left.

    Args:
        is_one_enough: The job goes on with one group.
    """
    least = ("stall", 10**6) if is_one_enough else ()
    with hosts_of_one_network(root, 3) as hosts:
        job = HostsJob(root, hosts, shape, least)
        try:
            job.start()
            yield job
        finally:
            job.end()
            job.server.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """The final states of a run on one host, without kills."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), STEPS)


OWN = {f"{group}/{rank}": ("memory", 0) for group in range(2) for rank in range(2)}


@pytest.mark.parametrize("shape", ["groups", pytest.param("parts", marks=pytest.mark.long)])
def test_hosts_begin_again_when_all_trainers_are_killed(
    shape: str, undisturbed: dict[str, list[object]], tmp_path: Path
) -> None:
    with hosts_job(tmp_path, shape) as job:
        wait_until(lambda: has_copies(tmp_path, 3), "some copies", LIMIT_S)
        kill_ranks(tmp_path)
        job.waits()
        assert job.sources() == OWN
        assert (
            job.tail().count("all groups that had the state have died: the job starts again") == 2
        )
    judge(tmp_path, undisturbed, 2)


@pytest.mark.long
@pytest.mark.parametrize("shape", ["groups", "parts"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_same_commands_resume_from_the_memory_of_the_hosts(
    shape: str, is_lost: bool, undisturbed: dict[str, list[object]], tmp_path: Path
) -> None:
    """All processes are killed, those of `fft run` as well; then one host may lose its memory."""
    with hosts_job(tmp_path, shape) as job:
        wait_until(lambda: has_copies(tmp_path, 3), "some copies", LIMIT_S)
        job.end()
        if is_lost:
            job.hosts[1].forget()
        job.start()
        job.waits()
        assert sorted(job.sources().values()) == (
            [("memory", 0)] * 2 + [("peer", 1)] * 2 if is_lost else [("memory", 0)] * 4
        )
        lacks = "has no buffers and random states of group" in job.tail()
        assert lacks == is_lost
        report = CliRunner().invoke(app, ["report", str(tmp_path / "traces")]).output
        assert ("(2 ranks from other hosts: 10.77.0." in report) == is_lost, report
    judge(tmp_path, ends(tmp_path) if lacks else undisturbed, 2)


@pytest.mark.long
def test_job_goes_on_from_the_memory_of_the_host_that_is_left(tmp_path: Path) -> None:
    """All trainers are killed, and a host is lost at that moment and does not come back."""
    with hosts_job(tmp_path, "groups", is_one_enough=True) as job:
        wait_until(lambda: has_copies(tmp_path, 3), "some copies", LIMIT_S)
        job.end(1)
        kill_ranks(tmp_path)
        job.hosts[1].forget()
        assert job.agents[2].wait(LIMIT_S) == 0, job.tail()
        assert job.sources() == {"1/0": ("memory", 0), "1/1": ("memory", 0)}
        assert "has no buffers and random states of group 0" in job.tail()
    report = audit_job(tmp_path / "traces")
    assert report.ok, report.render()
    before, after = folders(tmp_path)
    assert began_at(after) >= reached(before) - 1


def is_elsewhere(line: dict[str, Any]) -> bool:
    """Return whether a line of a trace tells that a copy is on another host as well."""
    return line.get("note") == "memory_copy_on_peer"


@pytest.mark.long
@pytest.mark.parametrize("has_agents", [True, False])
def test_one_group_is_copied_to_another_host(has_agents: bool, tmp_path: Path) -> None:
    """All trainers are killed and a host loses its memory, with or without the `fft run` of both;
    also the random states come back."""
    alone = tmp_path / "alone"
    alone.mkdir()
    command = durable_arguments(alone, STEPS, alone / "out", groups=1, checkpoint=None, every=None)
    command.remove("--resume")
    done = fft(*command, folder=alone, within=LIMIT_S)
    assert done.returncode == 0, done.stderr
    with hosts_job(tmp_path, "one group") as job:

        def has_some() -> bool:
            notes = (line for f in folders(tmp_path) for line in read_lines(f, is_elsewhere))
            return len(list(notes)) >= 6

        wait_until(has_some, "some copies", LIMIT_S)
        if has_agents:
            for copy in job.hosts[1].memory.glob("fft-*/step-*"):
                shutil.rmtree(copy)
            kill_ranks(tmp_path)
        else:
            job.end()
            job.hosts[1].forget()
            job.start()
        job.waits()
        assert sorted(job.sources().values()) == [("memory", 0), ("peer", 1)]
        assert "has no buffers and random states" not in job.tail()
    assert ends(tmp_path) == ends(alone)
    report = audit_job(tmp_path / "traces")
    assert report.ok, report.render()
    before, after = folders(tmp_path)
    assert began_at(after) >= reached(before) - 1
