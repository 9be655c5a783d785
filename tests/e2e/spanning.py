"""A job on several hosts for tests: `fft serve`, and one `fft run` on each host.

The hosts are network namespaces. A host that is lost loses its link and all of its processes at
once, so that no other host receives a message about it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forked import Forked
from namespaces import Host, hosts_of_one_network
from network_worker import run
from stage import digests, records, slices
from waiting import is_true_within, wait_until

from fft.trace.audit import audit_dir

SCRIPT = Path(__file__).with_name("spanning_script.py")
LONG_S = 240.0
GROUPS, RANKS, HERE = 2, 4, 2


class SpanningJob:
    """Groups of four ranks on two hosts each by default. ``servers``: the hosts with the bus."""

    def __init__(
        self,
        folder: Path,
        hosts: list[Host],
        groups: int,
        servers: Sequence[int] = (0,),
        ranks: int = RANKS,
        here: int = HERE,
    ) -> None:
        self.folder, self.hosts, self.groups = folder, hosts, groups
        self.ranks, self.here, self._of_bus = ranks, here, servers
        self.token = folder / "token"
        self.agents: dict[int, Forked] = {}
        self.servers: dict[int, Forked] = {}
        self.losses = self._starts = 0
        try:
            for number in servers:
                self.serve(number)
            (url,) = {self.url(number) for number in servers}
        except BaseException:
            self.end()
            raise
        self.env = {"FFT_BUS": url, "FFT_TOKEN_FILE": str(self.token)}

    def serve(self, number: int) -> None:
        """Start `fft serve` on a host."""
        self._starts += 1
        log = self.folder / f"bus-{number}-{self._starts}.log"
        hosts = ",".join(f"10.77.0.{n + 1}" for n in self._of_bus)
        self.servers[number] = Forked(
            run,
            self.hosts[number],
            "serve",
            "--hosts",
            hosts,
            "--token-file",
            str(self.token),
            log=log,
        )

    def url(self, number: int) -> str:
        """Return the URL of the bus once the server of a host serves it."""
        log = self.servers[number].log
        assert log is not None
        wait_until(lambda: "FFT_BUS=" in log.read_text(), "the bus is served", LONG_S)
        return str(re.findall(r"FFT_BUS=(\S+)", log.read_text())[0])

    def start(self, number: int, *options: str, steps: int = 0) -> None:
        """Start `fft run` on a host; without options it has the next part of a group."""
        self._starts += 1
        of_part = ["--groups", "1", "--first-group", str((number - 1) * self.here // self.ranks)]
        command = ["run", "--join", *(options or of_part), "--all-groups", str(self.groups)]
        command += ["--ranks", str(self.ranks), "--ranks-per-host", str(self.here)]
        command += ["--no-progress"]
        command += ["--trace-dir", str(self.folder / f"traces-{self._starts}"), str(SCRIPT)]
        log = self.folder / f"run-{number}-{self._starts}.log"
        arguments = *command, str(self.folder), str(steps)
        self.agents[number] = Forked(run, self.hosts[number], *arguments, log=log, env=self.env)

    def lose(self, number: int) -> None:
        """Let a host lose its power."""
        self.losses += 1
        self.cut(number)
        for pid in self.pids(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for each in (self.agents, self.servers):
            if number in each:
                each[number].end()
        wait_until(lambda: not self.pids(number), "the processes of the host have ended")

    def cut(self, number: int) -> None:
        """Cut a host off; its processes live."""
        self.hosts[number].ip(f"link set {self.hosts[number].link} down")

    def connect(self, number: int) -> None:
        """Bring the network of a host back."""
        self.hosts[number].ip(f"link set {self.hosts[number].link} up")

    def pids(self, number: int) -> list[int]:
        """Return the processes of a host."""
        command = ["ip", "netns", "pids", self.hosts[number].space]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [int(pid) for pid in found.split()]

    def ranks_on(self, number: int, group: int) -> set[int]:
        """Return the ranks of a group whose processes are on a host."""
        here = set(self.pids(number))
        return {rank for rank, pid in self.processes(group).items() if pid in here}

    def processes(self, group: int) -> dict[int, int]:
        """Return the newest process of each rank of a group."""
        files = {rank: self.folder / f"pid-{group}-{rank}" for rank in range(self.ranks)}
        return {rank: int(file.read_text()) for rank, file in files.items()}

    def step(self, group: int) -> int:
        """Return the newest step that all ranks of a group have committed."""
        files = [self.folder / f"step-{group}-{rank}" for rank in range(self.ranks)]
        return min(int(file.read_text()) if file.exists() else 0 for file in files)

    def advances(self, *groups: int, by: int = 3, within: float = LONG_S) -> None:
        """Wait until all ranks of the groups have committed ``by`` further steps."""
        for group in groups:
            goal = self.step(group) + by
            is_there = is_true_within(
                lambda group=group, goal=goal: self.step(group) >= goal or not self._runs(), within
            )
            logs = "\n".join(f"--- {a.log}\n{a.tail()}" for a in self.agents.values())
            at = [self.step(g) for g in range(self.groups)]
            assert is_there and self.step(group) >= goal, f"group {group} stays at {at}\n{logs}"

    def _runs(self) -> bool:
        return any(agent.runs for agent in self.agents.values())

    def drain(self) -> None:
        """Let all groups leave after a commit, and wait for each `fft run` that has not ended."""
        (self.folder / "end").touch()
        for number, agent in self.agents.items():
            if self.pids(number):
                agent.wait(LONG_S)

    def end(self) -> None:
        """Kill all processes of the job."""
        for number in range(len(self.hosts)):
            for pid in self.pids(number):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in (*self.agents.values(), *self.servers.values()):
            process.end()

    def traces(self) -> Path:
        """Collect the traces of all hosts in one folder, as for an audit."""
        together = self.folder / "together"
        for folder in self.folder.glob("traces-*"):
            (together / "ends").mkdir(parents=True, exist_ok=True)
            for file in (*folder.glob("*.jsonl"), *folder.glob("ends/*")):
                shutil.copy(file, together / file.relative_to(folder))
        return together


def check(job: SpanningJob) -> Path:
    """End the job, check its audit, its data and its bits, and return its traces.

    A rank that is killed after a commit may not have written which slice it has consumed.
    """
    job.drain()
    traces = job.traces()
    report = audit_dir(traces)
    assert report.ok, report.render()
    cursor = max(record["cursor"] for record in records(traces))
    for taken in slices(traces).values():
        assert len(set(taken)) == len(taken) >= cursor - job.losses
    of_groups: dict[tuple[int, int], set[str]] = {}
    for (_, rank, step), found in digests(traces).items():
        of_groups.setdefault((rank, step), set()).update(found)
    assert of_groups and all(len(found) == 1 for found in of_groups.values())
    return traces


def new_ranks(job: SpanningJob, before: dict[int, dict[int, int]]) -> set[tuple[int, int]]:
    """Return group and rank of the processes that were started since ``before``."""
    now = {group: job.processes(group) for group in before}
    return {(g, r) for g in now for r in now[g] if now[g][r] != before[g][r]}


@contextmanager
def spanning_job(
    folder: Path, hosts: int, groups: int = GROUPS, **settings: Any
) -> Iterator[SpanningJob]:
    """A job on so many hosts besides host 0; ends all of their processes when it is left."""
    with hosts_of_one_network(folder, hosts + 1) as made:
        job = SpanningJob(folder, made, groups, **settings)
        try:
            yield job
        finally:
            job.end()
