"""Follow a running job by its trace files, for the supervisor and the metrics.

The files are ``<dir>/g<group>r<rank>i<incarnation>.jsonl``.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fft.messages.protocol import Peer
from fft.trace.format import scope_folders, scope_of
from fft.trace.history import History, Injected, RankView
from fft.trace.lines import Line, parsed

_FILE = re.compile(r"g(?P<group>.+)r(?P<rank>\d+)i(?P<inc>\d+)\.jsonl")


@dataclass
class JobView(History):
    """The supervisor's view of a job."""

    begun: int = 0
    """Step of the checkpoint that the job has begun with."""
    is_stale: bool = False
    """There are gaps, and the registers, which have the job's progress, could not be read."""

    def of(self, group: str) -> list[RankView]:
        """Return the ranks of ``group`` seen so far, in order."""
        return [view for (name, _), view in sorted(self.ranks.items()) if name == group]

    def incs(self, group: str) -> dict[int, int]:
        """Return the newest incarnation seen of each rank of ``group``."""
        return {rank: view.inc for (name, rank), view in self.ranks.items() if name == group}

    def committed_since(self, group: str, incs: dict[int, int]) -> bool:
        """Whether an incarnation newer than ``incs`` has committed a step."""
        return any(view.commits > 0 for view in self.since(group, incs).values())

    def joined_since(self, group: str, incs: dict[int, int]) -> bool:
        """Whether an incarnation newer than ``incs`` has joined an epoch."""
        return any(view.role != "joining" for view in self.since(group, incs).values())

    def since(self, group: str, incs: dict[int, int]) -> dict[int, RankView]:
        """Return the ranks of ``group`` whose incarnation differs from that in ``incs``."""
        ranks = {rank: view for (name, rank), view in self.ranks.items() if name == group}
        return {rank: view for rank, view in ranks.items() if view.inc != incs.get(rank)}

    def see_member(self, peer: Peer, step: int, has_committed: bool) -> None:
        """Take from the registers that ``peer`` is in the newest epoch of its scope.

        Args:
            step: The step that the scope has reached.
            has_committed: The scope has committed in that epoch.
        """
        known = self.ranks.get((peer.group, peer.rank))
        if known is None or known.inc < peer.inc:
            known = self.ranks[peer.group, peer.rank] = RankView(peer.inc)
        self.committed |= step > self.begun
        if known.inc == peer.inc:
            known.step, known.commits = max(known.step, step), max(known.commits, has_committed)
            known.role = "training" if known.role == "joining" else known.role

    def note_service_fault(self, name: str, kind: str) -> None:
        """Record that a fault of a service, which concerns no rank, is being carried out now."""
        epoch = max((rank.epoch for rank in self.ranks.values()), default=0)
        self.injected[name] = Injected(name, kind, "", self.step, epoch)

    @property
    def cursor(self) -> int:
        """The position in the data of the newest record, in items."""
        return self.course.cursor

    @property
    def progress(self) -> tuple[int, int]:
        """The step, and a number that rises with each live block that the job has finished."""
        return self.step, self.course.block

    def reached(self, number: int) -> int:
        """Return the step of the ranks with that number, which may have their own scope."""
        own = [view.step for (_, rank), view in self.ranks.items() if rank == number]
        return max(own, default=0) if self.has_stages else self.step


class TraceTail:
    """A reader that follows all trace files of a directory; `poll` reads the appended lines."""

    def __init__(self, directory: Path, begun: int = 0) -> None:
        """Open no file yet. ``begun`` is as in `JobView`."""
        self.view = JobView(begun=begun)
        self._directory = directory
        self._files: dict[Path, IO[bytes]] = {}
        self._rest: dict[Path, bytes] = {}
        """The beginning of a line at the end of each open file."""
        self._through: set[Path] = set()
        """Files of processes that have been replaced: read to the end, and closed."""

    def poll(self) -> JobView:
        """Read every line completed since the last call and return the updated view."""
        found = (p for folder in scope_folders(self._directory) for p in folder.glob("*.jsonl"))
        for path in sorted(found, key=lambda path: path.name):
            is_new = path not in self._files and path not in self._through
            if is_new and _FILE.fullmatch(path.name):
                self._files[path], self._rest[path] = path.open("rb"), b""
        over = [path for path in self._files if self._is_replaced(path)]
        appended = [self._appended(path) for path in self._files]
        for at, scope, line in heapq.merge(*appended, key=lambda timed: timed[0]):
            self.view.add(line, at, scope)
        for path in over:  # otherwise a job that starts many processes holds a descriptor for each
            self._files.pop(path).close()
            del self._rest[path]
            self._through.add(path)
        return self.view

    def _is_replaced(self, path: Path) -> bool:
        """Return whether a newer process of the rank has a trace."""
        match = _FILE.fullmatch(path.name)
        assert match is not None, "others are not opened"
        newest = self.view.ranks.get((match["group"], int(match["rank"])))
        return newest is not None and newest.inc > int(match["inc"])

    def _appended(self, path: Path) -> Iterator[tuple[float, str, Line]]:
        """Yield time, scope and value of each line that was completed since the last call.

        Reads the file at the first line that is asked for, and parses lines one at a time.
        """
        scope = scope_of(self._directory, path.parent)
        *pieces, self._rest[path] = (self._rest[path] + self._files[path].read()).split(b"\n")
        for line in map(parsed, pieces):
            if line is not None:
                yield line.wall, scope, line

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
