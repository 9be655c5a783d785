"""Replacement of one lost rank in a group that keeps the others, by a warm spare if there is one.

`Spares` are processes that have loaded what the script imports and wait for a role. A pair of
sockets connects each one with its other end in `fft.launch.script_runner`. All runs on the
supervisor's thread.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from fft.launch.supervisor.children import Child
from fft.launch.supervisor.config import RunConfig
from fft.launch.supervisor.groups import Group, why_not_started
from fft.launch.supervisor.launching import SUCCESSOR, Launcher
from fft.launch.supervisor.losses import holds
from fft.launch.verdict import cause_of
from fft.trace.tail import JobView
from fft.util.files import claimed

logger = logging.getLogger(__name__)


# --- spares ---

GROUP = "spare"
"""Group name of a process without a role."""
_REFILL_S = 5.0
"""Time from the loss or use of a spare until the next one starts, in seconds; the job has the
processor to itself meanwhile."""
_MOST_IN_VAIN = 3
"""Number of spares that may end without a role before no more are started."""

Start = Callable[[int, int], Child]
"""Starts a spare, given its number and the descriptor of its end of the sockets."""


class Spare:
    """A process without a role."""

    def __init__(self, number: int, start: Start) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.child = start(number, theirs.fileno())
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self.began = time.monotonic()
        self._socket = ours
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether it has loaded everything."""
        with suppress(OSError):
            self._is_ready |= self._socket.recv(1) != b""
        return self._is_ready

    def take_role(self, env: Mapping[str, str], log: Path) -> bool:
        """Send the role that ``env`` describes; return whether it was sent."""
        if self.child.dies_within(0):
            self._socket.close()
            return False
        word = json.dumps({"env": dict(env), "log": str(log)}).encode() + b"\n"
        try:
            self._socket.setblocking(True)
            self._socket.sendall(word)
        except OSError:
            return False
        finally:
            self._socket.close()
        return True

    def close(self) -> None:
        """Close our end of the sockets."""
        self._socket.close()


class Spares:
    """A pool of spares, refilled after each loss or use."""

    def __init__(self, wanted: int, start: Start) -> None:
        """Prepare a pool of ``wanted`` spares; ``start`` may raise OSError."""
        self._wanted = wanted
        self._start = start
        self._spares: list[Spare] = []
        self._number = 0
        self._in_vain = 0
        self._refill_at: float | None = None

    def __iter__(self) -> Iterator[Child]:
        return (spare.child for spare in self._spares)

    @property
    def ready(self) -> int:
        """Number of spares that can take a role at once."""
        return sum(spare.is_ready for spare in self._spares)

    def started(self) -> list[Child]:
        """Start the missing spares if the pause is over; return the new processes."""
        if self._refill_at is not None and time.monotonic() < self._refill_at:
            return []
        self._refill_at = None
        new: list[Child] = []
        while len(self._spares) < self._wanted and self._in_vain < _MOST_IN_VAIN:
            self._number += 1
            try:
                self._spares.append(Spare(self._number, self._start))
            except OSError as error:
                logger.warning("spare %d could not be started: %s", self._number, error)
                self._in_vain += 1
                break
            new.append(self._spares[-1].child)
        return new

    def take(self, env: Mapping[str, str], log: Path) -> Child | None:
        """Give a spare the role that ``env`` describes; return it, or None if there is none."""
        for spare in sorted(self._spares, key=lambda s: not s.is_ready):
            self._spares.remove(spare)
            self._refill_at = time.monotonic() + _REFILL_S
            if spare.take_role(env, log):
                self._in_vain = 0
                return spare.child
            spare.child.signal(signal.SIGKILL)
        return None

    def late(self, limit_s: float) -> list[Child]:
        """Return the spares that have not loaded everything within ``limit_s`` seconds."""
        now = time.monotonic()
        return [s.child for s in self._spares if not s.is_ready and now > s.began + limit_s]

    def ended(self, child: Child) -> None:
        """Remove a spare that has ended without a role."""
        for spare in [spare for spare in self._spares if spare.child is child]:
            self._spares.remove(spare)
            spare.close()
        self._in_vain += 1
        self._refill_at = time.monotonic() + _REFILL_S
        more = "; no more are started" if self._in_vain == _MOST_IN_VAIN else ""
        logger.warning("%s%s", child.verdict(set()), more)

    def end(self) -> None:
        """End all spares and start no more."""
        self._wanted = 0
        for spare in self._spares:
            spare.close()
            spare.child.signal(signal.SIGKILL)


_MOST_IN_A_ROW = 3
"""Number of successors of one rank that may be lost in a row before they take part."""

_HANGS_S = 60.0
_TIMES = 3.0
"""A successor counts as hanging if its first txn has not begun after ``_HANGS_S`` seconds and after
``_TIMES`` times the time that its group took. The same limit holds for a spare until it has loaded
everything."""


class Reforming:
    """Replaces the lost ranks of one job. Owns the spares."""

    def __init__(self, config: RunConfig, launcher: Launcher) -> None:
        self._config = config
        self._coming: dict[Child, float] = {}
        """Successors that have not begun their first txn, with their start times in seconds."""
        self._in_a_row: dict[tuple[str, int, int], int] = {}
        """Number of successors since one took part, by group, start of the group, and rank."""
        self._launcher = launcher
        self.spares = Spares(config.spares, self._start_spare)

    def _start_spare(self, number: int, role_fd: int) -> Child:
        env = {"FFT_ROLE_FD": str(role_fd)}
        log = claimed(self._launcher.logs / f"spare-{number}.log")
        return self._launcher.start_one(GROUP, number, 1, env, log, (role_fd,))

    def is_waited_for(self, lost: Child) -> bool:
        """Return whether the other groups wait for a successor of ``lost``."""
        window = self._config.reform_window
        may_wait = self.spares.ready > 0 if window is None else window > 0
        return lost.is_replaced and may_wait

    def may_replace(
        self, group: Group, lost: Child, view: JobView, groups: Collection[Group]
    ) -> bool:
        """Return whether ``lost`` may be replaced while other ranks of its group live.

        It may not if it ended before it had committed, because its successor would do the same. It
        may not either if no other rank of its group has committed, or if no other group holds its
        state.

        Args:
            groups: All groups of this host.
        """
        others = [other for other in groups if other is not group]
        is_whole = self._config.parts_in_all == len(groups)
        if is_whole and not any(holds(other, lost.rank, view) for other in others):
            return False
        if not self._config.reform or self._config.groups_in_all < 2 or not group.is_to_go_on:
            return False
        if not reforms(group, view):
            return False
        now = view.since(group.name, group.incs_before)
        settled = {rank for rank in now if now[rank].commits > 0}
        mates = {c.rank for c in group.living if c is not lost and not c.told_dead}
        is_next = self._may_call_next(group, lost) and lost.rank not in now
        has_mates = bool(mates & settled) or group.begun.reforms  # perhaps on other hosts
        return (lost.rank in settled or is_next) and has_mates

    def _may_call_next(self, group: Group, lost: Child) -> bool:
        """Return whether another spare may replace a successor that has taken no part yet."""
        count = self._in_a_row.get((group.name, group.starts, lost.rank), 0)
        return lost in self._coming and self.spares.ready > 0 and count < _MOST_IN_A_ROW

    def late(self, groups: Mapping[str, Group], view: JobView) -> Iterator[tuple[Child, str]]:
        """Yield each spare and successor that hangs, once, with a description."""
        hang = *self._late_spares(groups, view), *self._late_successors(groups, view)
        for child, limit in hang:
            text = f"it was to take the place of a lost rank, and was not ready after {limit:.0f} s"
            logger.warning("pid %d is ended: %s", child.pid, text)
            yield child, text

    def _late_spares(
        self, groups: Mapping[str, Group], view: JobView
    ) -> Iterator[tuple[Child, float]]:
        for group in groups.values():
            here = set(group.ranks) & view.since(group.name, group.known_incs).keys()
            if group.took is None and len(here) == group.local:
                group.took = time.monotonic() - group.started_at
        if known := [group.took for group in groups.values() if group.took is not None]:
            limit = max(_HANGS_S, _TIMES * max(known))
            yield from ((child, limit) for child in self.spares.late(limit))

    def _late_successors(
        self, groups: Mapping[str, Group], view: JobView
    ) -> Iterator[tuple[Child, float]]:
        now = time.monotonic()
        for child, since in list(self._coming.items()):
            group = groups[child.group]
            limit = max(_HANGS_S, _TIMES * (group.took or 0.0))
            if child.rank in view.since(group.name, group.incs_before):
                del self._coming[child]
            elif not child.alive:
                del self._coming[child]
                logger.warning(
                    "group %s: pid %d, which was to take the place of rank %d, ended before it "
                    "took part (%s); the group is not re-formed",
                    *(group.name, child.pid, child.rank, cause_of(child.code)),
                )
            elif now > since + limit:
                del self._coming[child]
                yield child, limit

    def replace(self, group: Group, lost: Child, view: JobView) -> Child | None:
        """Replace ``lost`` by a spare or a new process.

        Returns:
            The successor, or None if none can be started or no other rank of the group lives.
        """
        mates = [child for child in group.living if not child.dies_within(0)]
        if not mates and not group.spans:
            return None
        place = (group.name, group.starts, lost.rank)
        took_part = lost.rank in view.since(group.name, group.incs_before)
        self._in_a_row[place] = 1 if took_part else self._in_a_row.get(place, 0) + 1
        inc = view.incs(group.name).get(lost.rank, 0)
        env = {**self._launcher.place(group, lost.rank), SUCCESSOR: "1"}
        start = partial(self._start, group, lost.rank, env)
        try:
            group.forget_address_of(lost.rank)
            child = group.replace(lost, inc, self._launcher.logs, start)
        except (OSError, RuntimeError) as error:  # torch's store raises RuntimeError
            logger.error("%s", why_not_started(group, error))
            return None
        self._coming.pop(lost, None)
        self._coming[child] = time.monotonic()
        logger.warning(
            "group %s lost rank %d (pid %d, %s): pid %d is to take its place; its other ranks run "
            "on: %s",
            *(group.name, lost.rank, lost.pid, cause_of(lost.code), child.pid),
            ", ".join(str(mate.rank) for mate in mates) or "those of other hosts",
        )
        return child

    def _start(self, group: Group, rank: int, env: Mapping[str, str], log: Path) -> Child:
        spare = self.spares.take(env, log)
        return spare or self._launcher.start_one(group.name, rank, group.starts, env, log)


def reforms(group: Group, view: JobView) -> bool:
    """Return whether the script lets lost ranks of the group be replaced, by its ranks here."""
    seen = {rank: view.ranks.get((group.name, rank)) for rank in group.ranks}
    return all(rank is not None and rank.reforms for rank in seen.values())
