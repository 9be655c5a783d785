"""The fault, as the victim injects it: in itself, or by notifying the launcher that it is ready.

It fires once per repetition, in the attempt after the job has committed often enough as a whole. In
every other rank it does nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.events import Pen
from benchmarks.side_by_side.place import tell_launcher

HANG_S = 1000.0
_SIGNAL_S = 0.3
"""Seconds that the victim waits in its all-reduce, so that the signal finds it there."""


class Planted(RuntimeError):
    """The injected exception."""


class Victim:
    """The fault of a plan, and the time when it is due."""

    def __init__(self, plan: dict[str, Any], pen: Pen, group: int, rank: int) -> None:
        self._kind, self._phase, self._warm = plan["kind"], plan["phase"], plan["warm"]
        self.pace = plan["pace"]
        self._pen = pen
        self._fired = Path(os.environ["BENCH_DIR"], "fired")
        self._is_me = self._kind not in ("", "stream") and [group, rank] == list(plan["victim"])
        if self._is_me and self._fired.exists():  # this process replaces the victim
            self._is_me = False
        self._whole = 0
        self._settle_s, self._first = plan["settle"], 0.0
        self._armed = False
        self._calls = self._last_calls = 0
        self._is_asked = False
        if self._kind == "stream":
            signal.signal(signal.SIGUSR2, self._ask)

    def _ask(self, _number: int, _frame: Any) -> None:
        self._is_asked = True

    def count(self, whole: bool) -> None:
        """Count a commit."""
        self._first = self._first or time.monotonic()
        self._whole = self._whole + 1 if whole else 0

    def begin(self) -> None:
        """Begin an attempt."""
        self._last_calls, self._calls = self._calls, 0
        is_settled = time.monotonic() >= self._first + self._settle_s
        self._armed = self._is_me and self._whole >= self._warm and is_settled
        if self._armed and self._kind in ("term", "lighthouse", "bus"):
            self._disarm()
            tell_launcher(self._kind)

    def at(self, phase: str) -> None:
        """Raise or hang here if that is the plan for ``phase``."""
        if self._is_asked and phase == "backward":
            self._is_asked = False
            raise Planted("asked by the launcher")
        if not self._armed or phase != self._phase:
            return
        self._disarm()
        self._pen.say("fault", kind=self._kind)
        if self._kind == "hang":
            time.sleep(HANG_S)
        raise Planted(f"planted in {phase}")

    def _disarm(self) -> None:
        self._armed = self._is_me = False
        self._fired.touch()

    def listen(self, manager: Any, pg: Any) -> None:
        """Intercept the reductions if the fault is in one of them."""
        if not self._is_me:
            return
        if self._kind in ("kill", "stop"):
            manager.allreduce = self._standing(manager.allreduce)
        elif self._kind == "one_sided":
            pg.allreduce = self._counted(pg.allreduce)

    def _is_last(self) -> bool:
        """Whether this is the attempt's last reduction, judged by the previous attempt."""
        self._calls += 1
        return self._armed and self._calls >= self._last_calls

    def _standing(self, allreduce: Any) -> Any:
        """Wrap an all-reduce: the others are in the last one, and this rank does not enter it."""

        def reduce(*args: Any, **kwargs: Any) -> Any:
            if self._is_last():
                self._disarm()
                tell_launcher(self._kind)
                time.sleep(_SIGNAL_S)
            return allreduce(*args, **kwargs)

        return reduce

    def _counted(self, allreduce: Any) -> Any:
        """Wrap an all-reduce: the last one succeeds, and is reported as failed on this side."""

        def reduce(*args: Any, **kwargs: Any) -> Any:
            work = allreduce(*args, **kwargs)
            if not self._is_last():
                return work
            self._disarm()
            return failing(work, lambda: self._pen.say("fault", kind=self._kind))

        return reduce


def failing(work: Any, on_fail: Callable[[], None]) -> Any:
    """Return ``work`` with waits that fail after it is done; the first one calls ``on_fail``."""

    class OneSided:
        told = False

        def wait(self, *args: Any) -> bool:
            work.wait(*args)
            if not self.told:
                self.told = True
                on_fail()
            raise RuntimeError("planted: the all-reduce failed on this side")

        def __getattr__(self, name: str) -> Any:
            return getattr(work, name)

    return OneSided()
