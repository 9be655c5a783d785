"""A job whose groups span hosts, for test_spanning.py: `fft serve` and one `fft run` on each host.

The hosts are network namespaces. The loss of a host is the end of its link and of all its
processes, so that no other host receives a message about it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forked import Forked
from namespaces import Host, hosts_of_one_network
from network_worker import run
from waiting import is_true_within, wait_until

from fft.trace.audit import read_lines

SCRIPT = Path(__file__).with_name("spanning_script.py")
LONG_S = 240.0
GROUPS, RANKS, HERE = 2, 4, 2


class SpanningJob:
    """Two groups of four ranks, of which each host has two. Host 0 serves the bus."""

    def __init__(self, folder: Path, hosts: list[Host]) -> None:
        self.folder, self.hosts, self.traces = folder, hosts, folder / "traces"
        token = folder / "token"
        log = folder / "bus.log"
        serving = ["serve", "--host", "10.77.0.1", "--token-file", str(token), "--no-lighthouse"]
        self.server = Forked(run, hosts[0], *serving, log=log)
        wait_until(lambda: "FFT_BUS=" in log.read_text(), "the bus is served", LONG_S)
        url = re.findall(r"FFT_BUS=(\S+)", log.read_text())[0]
        self.env = {"FFT_BUS": url, "FFT_TOKEN_FILE": str(token)}
        self.agents: dict[int, Forked] = {}
        self._starts = 0

    def start(self, number: int, *options: str, groups: int = GROUPS, first: int = 0) -> Forked:
        """Start `fft run` on a host, whose earlier one has ended."""
        self._starts += 1
        command = ["run", "--join", "--groups", str(groups), "--first-group", str(first)]
        command += ["--all-groups", str(GROUPS), "--ranks", str(RANKS)]
        command += ["--ranks-per-host", str(HERE), "--no-progress", *options]
        command += ["--trace-dir", str(self.traces / f"h{number}-{self._starts}"), str(SCRIPT)]
        log = self.folder / f"h{number}-{self._starts}.log"
        self.agents[number] = Forked(
            run, self.hosts[number], *command, str(self.folder), log=log, env=self.env
        )
        return self.agents[number]

    def lose(self, number: int) -> None:
        """Let a host lose its power."""
        host = self.hosts[number]
        host.ip(f"link set {host.link} down")
        for pid in self.pids(number):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agents[number].end()
        wait_until(lambda: not self.pids(number), "the processes of the host have ended")

    def connect(self, number: int) -> None:
        """Bring the network of a host back."""
        self.hosts[number].ip(f"link set {self.hosts[number].link} up")

    def cut(self, number: int) -> None:
        """Cut a host off; its processes live."""
        self.hosts[number].ip(f"link set {self.hosts[number].link} down")

    def pids(self, number: int) -> list[int]:
        """Return the processes of a host."""
        command = ["ip", "netns", "pids", self.hosts[number].space]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [int(pid) for pid in found.split()]

    def lines(self) -> list[dict[str, Any]]:
        """Return all trace lines in the order of files."""
        return [line for folder in sorted(self.traces.glob("*")) for line in read_lines(folder)]

    def commits(self) -> dict[tuple[str, int], dict[int, tuple[float, str, int]]]:
        """Return wall-clock time, digest and incarnation of each step applied, by place."""
        found: dict[Any, Any] = defaultdict(dict)
        for line in self.lines():
            event = line.get("event") or {}
            if event.get("type") == "applied":
                step = line["step"]
                found[line["group"], line["rank"]][step] = (
                    line.get("t_wall", 0.0),
                    event.get("digest"),
                    line["inc"],
                )
        return found

    def step_of(self, group: int) -> int:
        """Return the newest step that all ranks of a group have applied, by their own files."""
        steps = []
        for rank in range(RANKS):
            file = self.folder / f"step-{group}-{rank}"
            steps.append(int(file.read_text() or 0) if file.exists() else 0)
        return min(steps)

    def wait_for(self, step: int, groups: Sequence[int] = (0, 1), within: float = LONG_S) -> None:
        """Wait until the groups have reached ``step``."""
        for group in groups:
            is_there = is_true_within(
                lambda group=group: self.step_of(group) >= step or self._has_ended(), within
            )
            assert is_there and not self._has_ended(), f"group {group}, {self.where()}"

    def _has_ended(self) -> bool:
        return not any(agent.runs for agent in self.agents.values())

    def where(self) -> str:
        """Describe the steps and the ends of the logs."""
        logs = "\n".join(f"--- {a.log}\n{a.tail()}" for a in self.agents.values())
        return f"steps {[self.step_of(g) for g in range(GROUPS)]}\n{logs}"

    def whole_at(self, group: int, after: int) -> Callable[[], bool]:
        """Return whether the group has passed two steps beyond ``after``."""
        return lambda: self.step_of(group) >= after + 2

    def end(self) -> None:
        """Drain the job, and wait for all `fft run`."""
        (self.folder / "end").touch()
        for number, agent in self.agents.items():
            if self.pids(number):
                agent.wait(LONG_S)

    def pids_of(self, group: int) -> dict[int, int]:
        """Return the process of each rank of a group, by the ranks' own files."""
        return {
            rank: int((self.folder / f"pid-{group}-{rank}").read_text()) for rank in range(RANKS)
        }


@contextmanager
def spanning_job(folder: Path, hosts: int) -> Iterator[SpanningJob]:
    """A job on so many hosts, besides host 0, which serves the bus."""
    with hosts_of_one_network(folder, hosts + 1) as made:
        job = SpanningJob(folder, made)
        try:
            yield job
        finally:
            for number in range(len(made)):
                for pid in job.pids(number):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for agent in (*job.agents.values(), job.server):
                agent.end()
