"""The measurements: the rows (a layout, a model, a fault), and the systems side by side. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

PACE_S = 0.04
"""Seconds that a step of the rows with faults computes; a whole step takes some 45 ms."""
AFTER = 25
"""Commits of the whole job before the fault. FFT's monitor needs some of them after its start."""
SETTLE_S = 1.0
"""Seconds from the first commit to the end or stop of a process: without `fft run` its monitor
notifies the others, and that has just started."""
SETTLED = 10
"""Commits of every survivor after a fault that end the repetition."""
STOPPED_S = 5.0
LIGHTHOUSE_AWAY_S = 2.0
"""Seconds without a lighthouse; its command takes that long to start, because it imports torch."""
NEVER_S = 20.0
NEVER_DEFAULT_S = 75.0
"""Limit that covers plain torchft's 60 s."""
IN_VAIN = 2
"""Number of repetitions without a recovery after which the limit is NEVER_S."""

Manager = Literal["fft", "torchft", "nvrx"]
Loop = Literal["drop-in", "transactions"]
Model = Literal["plain", "ddp", "fsdp"]
Lost = Literal["nobody", "group"]


@dataclass(frozen=True)
class System:
    """The system that runs the work, and its settings."""

    name: str
    title: str
    manager: Manager
    tuned: bool = False
    supervised: bool = False
    """Whether `fft run` supervises; otherwise the remaining processes notice deaths."""
    loop: Loop = "drop-in"
    bus: Literal["tcp", "nats"] = "tcp"


FFT = System("fft", "FFT", "fft")
FFT_TXN = System("fft-txn", "FFT, transactions", "fft", loop="transactions")
FFT_NATS = System("fft-nats", "FFT, bus on NATS", "fft", bus="nats")
FFT_RUN = System("fft-run", "FFT under fft run", "fft", supervised=True)
FFT_TXN_RUN = System(
    "fft-txn-run", "FFT under fft run, transactions", "fft", supervised=True, loop="transactions"
)
TORCHFT = System("torchft", "torchft, default", "torchft")
TUNED = System("torchft-tuned", "torchft, tuned", "torchft", tuned=True)
NVRX = System("nvrx", "NVRx in-process restart", "nvrx", tuned=True)
CALLED = System("fft-restartable", "FFT, fft.restartable", "fft", supervised=True)
SYSTEMS = {
    s.name: s for s in (FFT, FFT_TXN, FFT_NATS, FFT_RUN, FFT_TXN_RUN, CALLED, TORCHFT, TUNED, NVRX)
}


@dataclass(frozen=True)
class Fault:
    """The fault, injected by the victim itself, or by the launcher when the victim is ready.

    ``exception`` (forward, backward, after), ``one_sided``, ``hang``: the victim. ``kill``,
    ``stop``, ``term``: signals of the launcher. ``lighthouse``, ``bus``: a service is restarted.
    """

    kind: str
    phase: str = ""
    restart: bool = False
    """Whether `fft run` or the launcher restarts the killed process."""
    lost: Lost = "nobody"
    """The processes whose commits are not awaited: the victim's group, if the fault removes it."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    title: str
    systems: tuple[System, ...]
    fault: Fault | None = None
    groups: int = 3
    ranks: int = 1
    model: Model = "plain"
    pace_s: float = PACE_S
    steps: int = 0
    """Number of measured steps, in rows without a fault."""
    over_ms: tuple[tuple[str, float], ...] = ()
    """(system, ms): the target is a next commit within one step plus this time, after the threshold
    for a hang."""
    gap_steps: float = 0.0
    """The target of FFT's longest gap between commits, in steps."""
    whole_s: float = 0.0
    """How long after the fault all groups are awaited to contribute again; 0 if they are not."""
    example: bool = False
    """Whether the ranks run `examples/from_nvrx.py`."""

    @property
    def layout(self) -> str:
        """The layout as shown in tables."""
        return f"{self.groups} × {self.ranks}" + (" FSDP2" if self.ranks > 1 else "")

    def threshold_ms(self, step_ms: float) -> float:
        """Return the time until FFT's monitor detects a hang: 5 x the median step, at least a
        second."""
        stands_still = self.fault is not None and self.fault.kind in ("hang", "stop")
        return max(1000.0, 5 * step_ms) if stands_still else 0.0

    @property
    def victim(self) -> tuple[int, int]:
        """The (group, rank) with the fault: in the last group, because group 0 hosts the stores."""
        return self.groups - 1, self.ranks - 1

    def limit_s(self, system: System, in_vain: int = 0) -> float:
        """Return the time without a recovery after which it counts as never.

        ``in_vain``: number of repetitions with that result, if no other has another result.
        """
        if self.fault is not None and self.fault.kind == "bus":
            return 60.0  # bus_limit and what follows it
        slow = system.manager == "torchft" and not system.tuned and in_vain < IN_VAIN
        return max(NEVER_DEFAULT_S if slow else NEVER_S, self.whole_s)

    def plan(self, system: System) -> dict[str, Any]:
        """Return the settings of a worker."""
        fault = self.fault
        return {
            "manager": system.manager,
            "tuned": system.tuned,
            "loop": system.loop,
            "model": self.model,
            "pace": self.pace_s,
            "groups": self.groups,
            "ranks": self.ranks,
            "warm": AFTER,
            "settle": SETTLE_S if fault is not None and fault.kind in _TOLD_OF else 0.0,
            "steps": self.steps,
            "victim": list(self.victim),
            "kind": fault.kind if fault else "",
            "phase": fault.phase if fault else "",
        }


_TOLD_OF = frozenset({"kill", "stop", "hang"})
_OVER_50 = (("fft", 50.0), ("fft-txn", 50.0))
_BOTH = (FFT, TORCHFT, TUNED)
_SHARDED = (FFT_TXN, TORCHFT, TUNED)
_UNWOUND = (FFT, FFT_TXN, TORCHFT, TUNED)
"""Systems compared where the other ranks are in their step functions, which only transactions
unwind."""


def _quiet(groups: int, ranks: int, pace_s: float, systems: tuple[System, ...] = _BOTH) -> Row:
    work = "50 ms step" if pace_s else "near-zero model"
    title = f"no fault, {groups} × {ranks}{' FSDP2' if ranks > 1 else ''}, {work}"
    name = f"quiet-{groups}x{ranks}-{'50ms' if pace_s else 'zero'}"
    model: Model = "fsdp" if ranks > 1 else "plain"
    steps = 120 if pace_s else 250
    return Row(name, title, systems, None, groups, ranks, model, pace_s, steps)


def _exception(phase: str, title: str, systems: tuple[System, ...] = _BOTH) -> Row:
    fault = Fault("exception", phase)
    return Row(f"exception-{phase}", title, systems, fault, over_ms=_OVER_50, whole_s=10)


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        *(_quiet(groups, 1, 0.0) for groups in (2, 3, 4)),
        _quiet(2, 2, 0.0),
        _quiet(2, 1, 0.05, (FFT_RUN, *_BOTH)),
        *(_quiet(groups, 1, 0.05) for groups in (3, 4)),
        _quiet(2, 2, 0.05),
        _exception("forward", "exception in forward", _UNWOUND),
        _exception("backward", "exception in backward", (*_UNWOUND, NVRX)),
        _exception("after", "exception after the all-reduces"),
        Row(
            "one-sided",
            "one-sided failure",
            _BOTH,
            Fault("one_sided"),
            over_ms=_OVER_50,
            whole_s=10,
        ),
        Row(
            "sigkill",
            "SIGKILL in mid all-reduce",
            (FFT_RUN, FFT, TORCHFT, TUNED, NVRX),
            Fault("kill", lost="group"),
            over_ms=(("fft-run", 100.0), ("fft", 300.0)),
        ),
        Row(
            "from-nvrx-exception",
            "a function that is called again: exception",
            (CALLED, NVRX),
            Fault("exception"),
            whole_s=10,
            example=True,
        ),
        Row(
            "from-nvrx-sigkill",
            "a function that is called again: SIGKILL",
            (CALLED, NVRX),
            Fault("kill", lost="group"),
            example=True,
        ),
        Row(
            "hang",
            "hang in backward",
            (FFT_TXN, FFT, TORCHFT, TUNED, NVRX),
            Fault("hang", "backward", lost="group"),
            over_ms=(("fft-txn", 100),),
            whole_s=6,
        ),
        Row(
            "hang-2x1",
            "hang in backward, 2 groups",
            (FFT_TXN, TORCHFT, TUNED),
            Fault("hang", "backward", lost="group"),
            groups=2,
            over_ms=(("fft-txn", 100),),
            whole_s=6,
        ),
        Row(
            "sigstop",
            f"SIGSTOP {STOPPED_S:g} s in mid all-reduce",
            (FFT_TXN_RUN, FFT_TXN, TORCHFT, TUNED),
            Fault("stop", lost="group"),
            over_ms=(("fft-txn-run", 100), ("fft-txn", 100)),
            whole_s=STOPPED_S + 8,
        ),
        Row("drain", "SIGTERM (drain)", _BOTH, Fault("term", lost="group"), gap_steps=2),
        Row(
            "restart",
            "SIGKILL and restart",
            (FFT_RUN, TORCHFT, TUNED),
            Fault("kill", restart=True, lost="group"),
            over_ms=(("fft-run", 100.0),),
            whole_s=60,
        ),
        Row(
            "lighthouse",
            "lighthouse restart",
            _BOTH,
            Fault("lighthouse"),
            gap_steps=2,
            whole_s=10,
        ),
        Row("bus", "bus restart, tcp (default)", (FFT,), Fault("bus"), whole_s=10),
        Row("bus-nats", "bus restart, NATS", (FFT_NATS,), Fault("bus"), whole_s=10),
        Row(
            "fsdp-exception",
            "one rank of an FSDP2 group: exception in backward",
            _SHARDED,
            Fault("exception", "backward"),
            over_ms=(("fft-txn", 100.0),),
            groups=2,
            ranks=2,
            model="fsdp",
            whole_s=10,
        ),
        Row(
            "fsdp-sigkill",
            "one rank of an FSDP2 group: SIGKILL",
            (FFT_TXN_RUN, FFT_TXN, TORCHFT, TUNED),
            Fault("kill", lost="group"),
            over_ms=(("fft-txn-run", 150.0),),
            groups=2,
            ranks=2,
            model="fsdp",
        ),
        Row(
            "fsdp-hang",
            "one rank of an FSDP2 group: hang in backward",
            _SHARDED,
            Fault("hang", "backward", lost="group"),
            over_ms=(("fft-txn", 150),),
            groups=2,
            ranks=2,
            model="fsdp",
            whole_s=6,
        ),
        Row(
            "ddp-sigkill",
            "torchft's DDP wrapper: SIGKILL in mid all-reduce",
            (FFT_RUN, FFT, TORCHFT, TUNED),
            Fault("kill", lost="group"),
            over_ms=(("fft-run", 100.0), ("fft", 300.0)),
            model="ddp",
        ),
    )
}  # fmt: skip

QUICK: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("quiet-3x1-zero", ("fft", "torchft")),
    ("exception-backward", ("fft", "torchft-tuned")),
    ("one-sided", ("fft", "torchft-tuned")),
    ("sigkill", ("fft-run", "fft", "torchft-tuned")),
    ("drain", ("fft", "torchft", "torchft-tuned")),
    ("fsdp-sigkill", ("fft-txn-run", "torchft-tuned")),
)
"""The rows of `make bench-quick`, with one repetition each."""
