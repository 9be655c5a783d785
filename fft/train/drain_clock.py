"""Deadline timer of a drain: a participant that no commit lets out in time leaves without one.

Shortly before the deadline, it logs the reason and leaves.

One thread (`DrainTimer`) receives notices through a queue that signal handlers may use.
``waiting_for`` describes the state of a participant; it is pure. The host, the manager, reports its
state, writes the trace and leaves. This module does not need torch.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from fft.messages.protocol import Peer
from fft.protocol.state import Config, Local, coordinator, member_peers, waited_for
from fft.train.preemption import Earliest, Notice

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0
"""Limit for one wait on the queue; deadlines have no limit."""
_SHOWN = 8
"""Maximum number of participants that a message names."""


class Leaver(Protocol):
    """Callbacks of the timer into its process, on the timer's thread."""

    def describe_wait(self) -> str | None:
        """Describe what this participant waits for, or return None if it has left."""

    def leave(self, cause: str, limit_s: float) -> bool:
        """Leave now with a message to the others, or at least stop, within ``limit_s`` seconds.

        Returns whether the others received the message.
        """

    def note(self, name: str, data: dict[str, Any]) -> None:
        """Write a note to the trace, if there is one yet."""


@dataclass(frozen=True)
class _NoticeReceived:
    notice: Notice
    at: float


@dataclass(frozen=True)
class _Exited:
    at: float
    error: str | None


class DrainTimer:
    """The timer of one manager, until ``close``."""

    def __init__(self, leaver: Leaver, margin_s: float) -> None:
        self._leaver = leaver
        self._margin_s = margin_s
        self._events: queue.SimpleQueue[_NoticeReceived | _Exited | None] = queue.SimpleQueue()
        self._earliest = Earliest()
        self._due: float | None = None
        """When to leave without a commit, on the monotonic clock; None for never, or if done."""
        self._over = False
        self._thread = threading.Thread(target=self._run, name="fft-drain", daemon=True)
        self._thread.start()

    # --- any thread, signal handlers too ---

    def on_notice(self, notice: Notice) -> None:
        """Receive a notice, which asks this participant to leave."""
        self._events.put(_NoticeReceived(notice, time.monotonic()))

    def left(self, error: str | None = None) -> None:
        """Record that this participant has left. ``error`` is the class of the error that ended it,
        in which case it has not drained."""
        self._events.put(_Exited(time.monotonic(), error))

    def close(self, limit_s: float = 5.0) -> None:
        """End the thread after the notices received so far. Idempotent."""
        self._events.put(None)
        self._thread.join(limit_s)

    # --- its own thread ---

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._wait())
            except queue.Empty:
                if self._wait() == 0:
                    self._on_deadline()
                continue
            match event:
                case None:
                    return
                case _NoticeReceived():
                    self._take(event.notice, event.at)
                case _Exited():
                    self._on_exit(event.at, event.error)

    def _wait(self) -> float | None:
        if self._due is None:
            return None
        return min(max(0.0, self._due - time.monotonic()), _LONGEST_WAIT_S)

    def _take(self, notice: Notice, at: float) -> None:
        if self._over or not self._earliest.take(notice, at):
            return
        within = notice.within_s
        level = logging.INFO if within is None else logging.WARNING
        by = "" if within is None else f", and must be out within {within:.1f} s"
        logger.log(
            level, "this participant leaves the job with the next commit: %s%s", notice.reason, by
        )
        self._leaver.note("notice", {"reason": notice.reason, "within": within})
        if within is not None:
            self._due = at + time_for_a_commit(within, self._margin_s)

    def _on_deadline(self) -> None:
        self._due = None
        why = self._leaver.describe_wait()
        if why is None:
            return  # it has left, and its main thread is about to report it
        notice, deadline = self._earliest.notice, self._earliest.deadline
        assert notice is not None and deadline is not None, "only a deadline can run out"
        self._over = True
        left = max(0.0, deadline - time.monotonic())
        cause = f"{notice.reason}; not out {left:.1f} s before the deadline: {why}"
        logger.warning("this participant leaves now, without waiting for a commit: %s", cause)
        self._leaver.note("drain_late", {"reason": notice.reason, "left": left, "why": why})
        if not self._leaver.leave(cause, left):
            logger.error(
                "this participant stops before its deadline, and could not notify the other ranks"
            )
            self._leaver.note("drain_untold", {"reason": notice.reason})

    def _on_exit(self, at: float, error: str | None) -> None:
        deadline, notice = self._earliest.deadline, self._earliest.notice
        self._due = None
        if self._over or notice is None:
            return
        self._over = True
        left = None if deadline is None else deadline - at
        if error is not None:
            logger.warning("this participant has not drained: it stopped with %s", error)
            told = {"reason": notice.reason, "left": left, "error": error}
            self._leaver.note("drain_failed", told)
            return
        if left is not None:
            when = "before" if left >= 0 else "after"
            logger.warning("this participant has left, %.1f s %s its deadline", abs(left), when)
        self._leaver.note("drained", {"reason": notice.reason, "left": left})


def time_for_a_commit(within_s: float, margin_s: float) -> float:
    """Return the seconds of ``within_s`` in which to wait for a commit; the rest is for leaving
    without one."""
    return within_s - min(margin_s, within_s / 2)


# --- descriptions -------------------------------------------------------------------------------


def waiting_for(s: Local, c: Config, now: float) -> str:
    """Describe what a participant that is to leave waits for. ``now`` is in monotonic seconds."""
    what = (
        f"{_describe_state(s, c)}; {s.state} for {now - s.since:.1f} s, step {s.step}, epoch "
        f"{s.token.epoch}"
    )
    return f"{what}; the bus is out of reach" if s.bus_down else what


def _describe_state(s: Local, c: Config) -> str:
    match s.role:
        case "training":
            return "its txn is open, and its main thread has not voted"
        case "voting":
            others = _names(set(member_peers(s)) - {c.me})
            return (
                f"in doubt: it has voted YES, and waits for the decision or for a vote of {others}"
            )
        case "committing" | "last_commit":
            return "the commit is decided, and its main thread still runs the optimizer step"
        case "aborting":
            return "it has asked for a rollback, which is not decided"
        case "rolling_back":
            return "its main thread has not finished the rollback"
        case "healing" if s.head is not None and s.head.kind != "epoch":
            return f"there is no next epoch: {_no_epoch(s, c)}"
        case "healing" if not s.healed:
            return "its main thread builds process groups, or fetches state"
        case "healing":
            return f"in the barrier of its epoch: {_no_begin(s, c)}"
        case "leaving":
            return "it has left with a commit, and waits until the remaining ranks have moved on"
        case "apart":
            return "it is in its local phase, and no other group has its latest state yet"
        case "joining":
            return f"it is in no epoch: {_no_start(s, c)}"
    return "it has not left"


def _no_start(s: Local, c: Config) -> str:
    """Describe which ranks of this group, or how many groups, are missing before the first
    epoch."""
    ranks = [str(r) for r in range(c.world) if r != c.me.rank and (c.me.group, r) not in s.hellos]
    groups = {group for group, _ in s.hellos} | {c.me.group}
    if ranks:
        return f"no message from rank {', '.join(ranks[:_SHOWN])} of this group"
    if s.epoch is None and len(groups) < max(c.min_groups, c.expected_groups):
        return f"only groups {', '.join(sorted(groups)[:_SHOWN])} of {c.expected_groups} are known"
    return "no epoch has admitted it"


def _no_epoch(s: Local, c: Config) -> str:
    if (gathers := coordinator(s)) not in (None, c.me):
        return f"{gathers} collects the acknowledgements and has the missing ones"
    silent = {peer for peer in waited_for(s) if s.stopped.get(peer, (0, 0)) < s.token} - {c.me}
    return f"no acknowledgement from {_names(silent)}" if silent else "too few groups, or no state"


def _no_begin(s: Local, c: Config) -> str:
    if (gathers := coordinator(s)) not in (None, c.me):
        return f"the coordinator {gathers} knows which ranks are missing"
    missing = {peer for peer in member_peers(s) if s.ready.get(peer) != s.token.epoch}
    return (
        f"waiting for {_names(missing - {c.me})}"
        if missing - {c.me}
        else "the coordinator has not ended the barrier"
    )


def _names(peers: set[Peer]) -> str:
    shown = ", ".join(map(str, sorted(peers)[:_SHOWN]))
    return f"{shown} and {len(peers) - _SHOWN} more" if len(peers) > _SHOWN else shown
