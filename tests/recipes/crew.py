"""Worker processes that run many recipes in turn, and the supervisor that restarts killed ones.

One set serves many cases. Each part of a case is its own job on one bus. When a case exceeds its
time limit, the error contains the stacks of all workers, and the set is restarted for the next
case.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import yaml
from forked import Forked
from recipe_worker import work

from fft.bus import open_bus, serve_tcp
from fft.bus.tcpserver import host_store
from fft.messages.protocol import Death, encode

BOUND_S = 120.0
"""Time limit in seconds for one part of a case; two seconds is usual."""
_DUMP_S = 10.0
"""Time limit in seconds for a worker to write its stacks."""
Place = tuple[int, int]


class CaseFailed(AssertionError):
    """A worker raised, ended by itself, or did not finish in time."""


@dataclass(frozen=True)
class Case:
    """One run of a recipe."""

    recipe: str
    """``module.function``."""
    name: str
    steps: int
    dropout: float = 0.1
    parts: int = 1
    faults: tuple[dict[str, Any], ...] = ()
    kills: bool = False
    """Whether one group is killed in each part, and restarted."""
    bound_s: float = BOUND_S


@dataclass
class Run:
    """The results of a case."""

    folder: Path
    results: list[dict[Place, dict[str, Any]]] = field(default_factory=list)
    """Results of each part, by (group, rank)."""
    killed: list[Place] = field(default_factory=list)
    restarts: set[int] = field(default_factory=set)
    """Parts in which a group was killed."""

    def traces(self, part: int = -1) -> Path:
        """Return the folder of a part's traces."""
        return self.folder / f"part-{part % len(self.results)}"


class _Child:
    def __init__(self, place: Place, ranks: int, log: Path) -> None:
        self.place, self.log = place, log
        self.connection, theirs = Pipe()
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        env["FFT_MONITOR"] = "0"  # else each rank of each case would start a monitor process
        group, rank = place
        env |= {"REPLICA_GROUP_ID": str(group), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
        self.process = Forked(work, theirs, group, rank, env=env, log=log)
        theirs.close()
        # not the end of the connection, which workers of a data loader may hold for a while
        self.death = os.pidfd_open(self.process.pid)

    def stacks(self) -> str:
        """Return the end of its log, with the stacks of all its threads if it is still running."""
        if self.process.runs:
            size = self.log.stat().st_size
            self.process.signal(signal.SIGUSR1)
            deadline = time.monotonic() + _DUMP_S
            while self.log.stat().st_size == size and time.monotonic() < deadline:
                time.sleep(0.01)  # its signal handler writes without notification
        return f"=== {self.place}\n{self.process.tail()}"

    def close(self) -> None:
        self.process.end()
        self.connection.close()
        os.close(self.death)


class Crew:
    """``groups`` × ``ranks`` workers, started when they are first needed."""

    def __init__(self, folder: Path, groups: int = 2, ranks: int = 1) -> None:
        self._folder = folder
        self._ranks = ranks
        self._places = [(g, r) for g in range(groups) for r in range(ranks)]
        self._children: dict[Place, _Child] = {}
        self._server = serve_tcp()
        self._address = self._server.url.rsplit("/", 1)[0]
        self._stores: list[Any] = []

    def close(self) -> None:
        """End the workers and the bus."""
        self._stop()
        self._server.close()

    def run(self, case: Case) -> Run:
        """Run all parts of a case. Raises CaseFailed."""
        done = Run(self._folder / case.name)
        done.folder.mkdir()
        plan = done.folder / "plan.yaml"
        if case.faults:
            plan.write_text(yaml.safe_dump({"faults": list(case.faults)}))
        for part in range(case.parts):
            task = {
                "recipe": case.recipe,
                "steps": case.steps,
                "dropout": case.dropout,
                "part": part,
                "is_last": part + 1 == case.parts,
                "folder": str(done.folder),
                "plan": str(plan) if case.faults else "",
                "bus": f"{self._address}/{case.name}-{part}",
                "traces": str(done.folder / f"part-{part}"),
            }
            done.results.append({})
            try:
                self._run_part(case, task, done)
            except BaseException:
                self._stop()
                raise
            finally:
                self._stores.clear()
        return done

    def _run_part(self, case: Case, task: dict[str, Any], done: Run) -> None:
        for group in sorted({group for group, _ in self._places}):
            self._tell(group, task)
        waiting, deadline = set(self._places), time.monotonic() + case.bound_s
        while waiting:
            seen: dict[Any, _Child] = {}
            for child in map(self._children.__getitem__, waiting):
                seen |= {child.connection: child, child.death: child}
            ready = wait(list(seen), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise CaseFailed(self._told(f"{case} is not through after {case.bound_s} s"))
            words = [end for end in ready if isinstance(end, Connection)]
            child = seen[(words or ready)[0]]
            try:
                if not words:
                    raise EOFError
                kind, said = child.connection.recv()
            except EOFError:
                code = child.process.wait(_DUMP_S)
                if not case.kills or code != -signal.SIGKILL or task["part"] in done.restarts:
                    why = f"{case}: {child.place} ended with {code}"
                    raise CaseFailed(self._told(why)) from None
                waiting |= self._restart(child.place[0], task, done)
                continue
            if kind == "failed":
                raise CaseFailed(self._told(f"{case}: {child.place} raised\n{said}"))
            done.results[-1][child.place] = said
            waiting.discard(child.place)

    def _tell(self, group: int, task: dict[str, Any]) -> None:
        """Send a task to the ranks of a group, with their own store."""
        store, port = host_store()
        self._stores.append(store)
        for place in self._places:
            if place[0] == group:
                if place not in self._children:
                    log = self._folder / f"g{place[0]}r{place[1]}.log"
                    self._children[place] = _Child(place, self._ranks, log)
                self._children[place].connection.send({**task, "store_port": port})

    def _restart(self, group: int, task: dict[str, Any], done: Run) -> set[Place]:
        """Report the dead group and restart it as a whole, as a supervisor does."""
        mates = {place for place in self._places if place[0] == group}
        bus = open_bus(task["bus"])
        for place in mates:
            child = self._children.pop(place)
            child.close()
            name, host = str(group), socket.gethostname()
            dead = Death(name, place[1], child.process.pid, host, "crew", "killed")
            bus.broadcast(encode(dead))
        bus.close()
        done.killed += sorted(mates)
        done.restarts.add(task["part"])
        self._tell(group, task)
        return mates

    def _told(self, why: str) -> str:
        return "\n".join([why, *(child.stacks() for child in self._children.values())])

    def _stop(self) -> None:
        for child in self._children.values():
            child.close()
        self._children.clear()
