"""A job whose groups span hosts, for test_spanning.py: `fft serve` and one `fft run` on each host.

The hosts are network namespaces. A host that is lost loses its link and all of its processes at
once, so that no other host receives a message about it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forked import Forked
from namespaces import Host, hosts_of_one_network
from network_worker import run
from waiting import is_true_within, wait_until

SCRIPT = Path(__file__).with_name("spanning_script.py")
LONG_S = 240.0
GROUPS, RANKS, HERE = 2, 4, 2
PARTS = RANKS // HERE


class SpanningJob:
    """Groups of four ranks on two hosts each. Host 0 serves the bus."""

    def __init__(self, folder: Path, hosts: list[Host], groups: int) -> None:
        self.folder, self.hosts, self.groups = folder, hosts, groups
        token, log = folder / "token", folder / "bus.log"
        serving = ["serve", "--host", "10.77.0.1", "--token-file", str(token), "--no-lighthouse"]
        self.server = Forked(run, hosts[0], *serving, log=log)
        try:
            wait_until(lambda: "FFT_BUS=" in log.read_text(), "the bus is served", LONG_S)
        except BaseException:
            self.server.end()
            raise
        url = re.findall(r"FFT_BUS=(\S+)", log.read_text())[0]
        self.env = {"FFT_BUS": url, "FFT_TOKEN_FILE": str(token)}
        self.agents: dict[int, Forked] = {}
        self._starts = 0

    def start(self, number: int, *options: str, steps: int = 0) -> None:
        """Start `fft run` on a host; without options it has a part of group (number - 1) // 2."""
        self._starts += 1
        of_part = ["--groups", "1", "--first-group", str((number - 1) // PARTS)]
        command = ["run", "--join", *(options or of_part), "--all-groups", str(self.groups)]
        command += ["--ranks", str(RANKS), "--ranks-per-host", str(HERE), "--no-progress"]
        command += ["--trace-dir", str(self.folder / f"traces-{self._starts}"), str(SCRIPT)]
        log = self.folder / f"run-{number}-{self._starts}.log"
        arguments = *command, str(self.folder), str(steps)
        self.agents[number] = Forked(run, self.hosts[number], *arguments, log=log, env=self.env)

    def lose(self, number: int) -> None:
        """Let a host lose its power."""
        self.cut(number)
        for pid in self.pids(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agents[number].end()
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
        files = {rank: self.folder / f"pid-{group}-{rank}" for rank in range(RANKS)}
        return {rank: int(file.read_text()) for rank, file in files.items()}

    def step(self, group: int) -> int:
        """Return the newest step that all ranks of a group have committed."""
        files = [self.folder / f"step-{group}-{rank}" for rank in range(RANKS)]
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

    def traces(self) -> Path:
        """Collect the traces of all hosts in one folder, as for an audit."""
        together = self.folder / "together"
        for folder in self.folder.glob("traces-*"):
            (together / "ends").mkdir(parents=True, exist_ok=True)
            for file in (*folder.glob("*.jsonl"), *folder.glob("ends/*")):
                shutil.copy(file, together / file.relative_to(folder))
        return together


@contextmanager
def spanning_job(folder: Path, hosts: int, groups: int = GROUPS) -> Iterator[SpanningJob]:
    """A job on so many hosts besides host 0; ends all of their processes when it is left."""
    with hosts_of_one_network(folder, hosts + 1) as made:
        job = SpanningJob(folder, made, groups)
        try:
            yield job
        finally:
            for pid in (pid for number in range(len(made)) for pid in job.pids(number)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for agent in (*job.agents.values(), job.server):
                agent.end()
