"""Fault injector: triggers faults inside one participant, at exact points of its steps.

It raises, hangs, stops or kills its own process, sends itself a SIGTERM, and cuts its own
connections through the given ``ConnectionFaults``; it touches nothing else. A planned fault happens
once per job, however often a process restarts; the caller's ``claim`` ensures that. A commanded
fault is received once, by the live processes, and needs no claim.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, Protocol

from fft.health.compiling import never_compiled
from fft.messages.fault_plans import (
    MODEL_PHASES,
    BusLossFault,
    DrainFault,
    Fault,
    FaultPlan,
    HangFault,
    KillFault,
    NanGradientFault,
    NetworkCutFault,
    OneSidedFault,
    SlowFault,
    StopFault,
    load_plan,
)

Claim = Callable[[str], bool]
logger = logging.getLogger(__name__)


class InjectedFault(RuntimeError):
    """The exception that an injected fault raises; also its description for ``on_inject``."""

    def __init__(
        self, name: str, kind: str, phase: str, *, group: str, rank: int, step: int
    ) -> None:
        super().__init__(f"injected fault {name!r} ({kind} at {phase}, step {step})")
        self.name = name
        self.kind = kind
        self.phase = phase
        self.group = group
        self.rank = rank
        self.step = step


class _Removable(Protocol):
    def remove(self) -> None: ...


class ConnectionFaults(Protocol):
    """Actions that only the owner of the connections can perform."""

    def cut_network(self) -> None:
        """End the connections of this rank's process groups."""

    def lose_bus(self) -> None:
        """End this process's connections to the bus."""


class Injector:
    """Triggers the faults of a plan, or of commands, inside one participant.

    Call it from the training thread only, except `add`. All conditions are equal on all ranks of a
    group, so a planned fault for the whole group is armed on all of them in the same txn.

    Args:
        claim: Returns True to exactly the first caller ever with that key in the job, including
            restarts.
        on_inject: Called before the fault happens, so that it can be traced.
        hands: It may be omitted if no fault needs it.
    """

    def __init__(
        self,
        plan: FaultPlan,
        group: str,
        rank: int,
        ranks: int,
        claim: Claim,
        on_inject: Callable[[InjectedFault], None],
        hands: ConnectionFaults | None = None,
    ) -> None:
        self._mine: list[Fault] = [
            f
            for f in plan.faults
            if isinstance(f, Fault) and f.group == group and _concerns(f, rank)
        ]
        self._group = group
        self._rank = rank
        self._ranks = ranks
        self._claim = claim
        self._on_inject = on_inject
        self._hands = hands
        self._commanded: set[str] = set()
        self._incoming: queue.SimpleQueue[Fault] = queue.SimpleQueue()
        self.open = False
        """Whether faults may be added, which might need the hooks of a model."""
        self._armed: list[Fault] = []
        self._held: set[str] = set()
        self._step = -1
        self._epoch = (0, 0)
        self._delay, self._delays, self._delayed = 0.0, 0, False
        self._hooks: list[_Removable] = []

    @classmethod
    def from_env(
        cls,
        claim: Claim,
        on_inject: Callable[[InjectedFault], None],
        env: Mapping[str, str] = os.environ,
        hands: ConnectionFaults | None = None,
    ) -> Injector | None:
        """Create the injector that the environment configures, or return None if it enables none.

        It reads FFT_FAULTS, FFT_INJECT (1: accept commands, as with a plan), REPLICA_GROUP_ID,
        RANK, WORLD_SIZE and NUM_REPLICA_GROUPS. Raises ConfigError.
        """
        path = env.get("FFT_FAULTS")
        if not path and env.get("FFT_INJECT") != "1":
            return None
        ranks = int(env.get("WORLD_SIZE", "1"))
        groups = int(env["NUM_REPLICA_GROUPS"]) if "NUM_REPLICA_GROUPS" in env else None
        plan = load_plan(path, groups, ranks) if path else FaultPlan(faults=[])
        group, rank = env.get("REPLICA_GROUP_ID", "0"), int(env.get("RANK", "0"))
        made = cls(plan, group, rank, ranks, claim, on_inject, hands)
        made.open = True
        return made

    def add(self, fault: Fault) -> None:
        """Queue a commanded fault. It fires at the next matching point of the training thread.

        The fault must concern this participant and have an unused name. Call this from any thread.
        """
        self._incoming.put(fault)

    def begin(self, step: int, groups: int, commits_in_epoch: int) -> None:
        """Begin a txn that attempts ``step`` in an epoch of ``groups`` groups."""
        self._step, self._epoch = step, (groups, commits_in_epoch)
        self._armed, self._delayed = [], False
        for fault in list(self._mine):
            self._arm(fault)
        self._admit()

    def at(self, phase: str) -> None:
        """Fire the faults that are due at ``phase``, which the txn has reached.

        Raises InjectedFault (an exception), does not return (a kill), or returns when it is done.
        """
        self._admit()
        for fault in list(self._armed):
            due = _fires_at(fault, phase) or self._is_missed(fault, phase)
            if due and self._claim_firing(fault):
                self._carry_out(fault, self._announce(fault, phase))
        if phase == "before_allreduce" and self._delays > 0 and not self._delayed:
            self._delayed = True
            self._delays -= 1
            hang(self._delay)

    def fails_after_allreduce(self) -> bool:
        """Whether to report the last reduction of the txn as failed.

        Call it once all reductions of the txn were waited for and have succeeded.
        """
        self._admit()
        for fault in list(self._armed):
            if isinstance(fault, OneSidedFault) and self._claim_firing(fault):
                self._announce(fault, "after_allreduce")
                return True
        return False

    def poisons(self, where: Literal["before", "after"]) -> bool:
        """Whether to put a NaN into a gradient ``where`` ("before" or "after") its reduction.

        Call it before every reduction, and after the last one of a txn.
        """
        self._admit()
        for fault in list(self._armed):
            if (
                isinstance(fault, NanGradientFault)
                and fault.where == where
                and self._claim_firing(fault)
            ):
                self._announce(fault, f"{where}_allreduce")
                return True
        return False

    def attach(self, model: Any) -> None:
        """Hook a middle submodule of a torch ``model`` (FSDP2 too) for forward and backward.

        A compiled model has no hooks inside: Dynamo traces the hooks of the submodule and finds
        that they do nothing while it compiles, so the graphs are those of a run without faults. In
        a compiled model the gradients show the progress: the first gradient of any parameter shows
        that forward is over, one of the submodule shows that backward has reached it. It does
        nothing if no planned or commanded fault can use the hooks. `detach` reverses it.
        """
        phases = {getattr(fault, "phase", None) for fault in self._mine}
        if not self.open and phases.isdisjoint(MODEL_PHASES):
            return
        from torch.compiler import is_compiling  # a caller that has a model has loaded torch

        def before(_module: Any, _args: Any) -> None:
            if not is_compiling():
                self.at("forward")

        def after(_module: Any, _args: Any, output: Any) -> None:
            if not is_compiling():
                self._watch(output)

        def early(_parameter: Any) -> None:
            self._catch_up("forward")

        def halfway(_parameter: Any) -> None:
            self._catch_up("forward", "backward")

        for hook in (before, after, early, halfway):
            never_compiled(hook)
        target = _middle_module(model)
        self._hooks += [target.register_forward_pre_hook(before)]
        self._hooks += [target.register_forward_hook(after)]
        trained = [p for p in model.parameters() if p.requires_grad]
        inside = {id(p) for p in target.parameters() if p.requires_grad} or set(map(id, trained))
        for parameter in trained:
            hook = halfway if id(parameter) in inside else early
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Remove all hooks from the models."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _watch(self, output: Any) -> None:
        """Fire when the gradient of a middle output is available, halfway through backward."""
        if not any(getattr(fault, "phase", None) == "backward" for fault in self._armed):
            return
        tensor = next(_tensors(output), None)
        if tensor is not None:
            tensor.register_hook(lambda _grad: self.at("backward"))

    def _catch_up(self, *phases: str) -> None:
        """Fire an armed fault whose own hook was skipped, because the model is compiled."""
        for fault in list(self._armed):
            place = getattr(fault, "phase", None)
            if place in phases and _fires_at(fault, place) and self._claim_firing(fault):
                self._carry_out(fault, self._announce(fault, "backward"))

    def _is_missed(self, fault: Fault, phase: str) -> bool:
        """Return whether no hook can fire the fault in a model, because none is registered.

        It fires at the first point of the txn that the injector reaches without hooks.
        """
        place = getattr(fault, "phase", None)
        if self._hooks or place not in MODEL_PHASES or phase not in ("before_allreduce", "vote"):
            return False
        logger.warning(
            "injected fault %r fires at %s, not in %s: no model is registered; call "
            "manager.register(model, optimizer), also in a torchft loop",
            fault.name,
            phase,
            place,
        )
        return True

    def _admit(self) -> None:
        """Take in added faults, and arm those that are due in the current txn."""
        with suppress(queue.Empty):
            while True:
                fault = self._incoming.get_nowait()
                self._commanded.add(fault.name)
                self._mine.append(fault)
                self._arm(fault)

    def _arm(self, fault: Fault) -> None:
        """Arm the fault if it is due in the current txn."""
        held = fault.name in self._held
        if not held and not fault.due(self._step, *self._epoch):
            return
        if _whole_group(fault) and not held and fault.name not in self._commanded:
            # It is claimed when armed, not when it fires: another rank that fires first ends this
            # process too, which must not repeat the fault afterwards.
            if not self._claim(self._key(fault)):
                self._mine.remove(fault)
                return
            self._held.add(fault.name)
        self._armed.append(fault)

    def _carry_out(self, fault: Fault, injected: InjectedFault) -> None:
        match fault:
            case KillFault():
                os.kill(os.getpid(), signal.SIGKILL)
            case DrainFault():
                os.kill(os.getpid(), signal.SIGTERM)
            case HangFault():
                hang(fault.seconds, fault.holding_gil)
            case StopFault():
                stop_this_process(fault.seconds)
            case SlowFault():
                self._delay, self._delays = fault.seconds, fault.steps
            case NetworkCutFault() if self._hands is not None:
                self._hands.cut_network()
            case BusLossFault() if self._hands is not None:
                self._hands.lose_bus()
            case _:
                raise injected

    def _key(self, fault: Fault, rank: int | None = None) -> str:
        return f"faults/{fault.name}/{fault.group}/{self._rank if rank is None else rank}"

    def _claim_firing(self, fault: Fault) -> bool:
        """Disarm the fault, and return whether this rank fires it now."""
        self._armed.remove(fault)
        self._mine.remove(fault)
        if fault.name in self._commanded:
            self._commanded.discard(fault.name)
            return True
        if _whole_group(fault):
            self._held.discard(fault.name)
            for other in range(self._ranks):  # a rank that has not begun this txn must not fire
                if other != self._rank:
                    self._claim(self._key(fault, other))
            return True
        anyone = getattr(fault, "rank", None) is None
        return self._claim(f"faults/{fault.name}/{fault.group}" if anyone else self._key(fault))

    def _announce(self, fault: Any, phase: str) -> InjectedFault:
        injected = InjectedFault(
            fault.name, fault.kind, phase, group=self._group, rank=self._rank, step=self._step
        )
        self._on_inject(injected)
        return injected


def _whole_group(fault: Fault) -> bool:
    is_group_kill = isinstance(fault, KillFault) and fault.rank is None
    return is_group_kill or isinstance(fault, DrainFault)


def _concerns(fault: Fault, rank: int) -> bool:
    return getattr(fault, "rank", None) in (None, rank)


def _fires_at(fault: Fault, phase: str) -> bool:
    """Whether the fault fires in ``phase``."""
    match fault:
        case DrainFault():
            return phase == "vote"
        case SlowFault():
            return phase == "before_allreduce"
    place = getattr(fault, "phase", None)
    return place == phase or (place == "next" and phase != "apply")


def _middle_module(model: Any) -> Any:
    """Return the middle of the longest stack of blocks, else of the children, else the model
    itself.

    Containers are recognized by class name, so that this module needs no torch; ``fully_shard``
    prefixes the name. A ModuleList comes first: it is never called itself, but its members are.
    """
    for container in ("ModuleList", "Sequential"):
        stacks = [m for m in model.modules() if type(m).__name__.endswith(container) and len(m)]
        if stacks:
            blocks = list(max(stacks, key=len).children())
            return blocks[len(blocks) // 2]
    children = list(model.children())
    return children[len(children) // 2] if children else model


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors of a (nested) module output that take part in the backward pass."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif getattr(value, "requires_grad", False):
        yield value


# Wakes a stopped process. It refers to the stopped process by a pidfd, so it never hits a reused
# process number. It repeats SIGCONT until that process closes the pipe, because a SIGCONT just
# before the SIGSTOP would be lost.
_WAKER = """
import os, select, signal, sys
pidfd, pipe, seconds = int(sys.argv[1]), 0, float(sys.argv[2])
waiter = select.poll()
waiter.register(pidfd, select.POLLIN)
waiter.register(pipe, select.POLLIN | select.POLLHUP)
os.write(1, b"!")
while not waiter.poll(seconds * 1000):
    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    seconds = 0.5
"""
_READY_S = 60.0  # for the helper process to start, on a busy machine


def hang(seconds: float, holding_gil: bool = False) -> None:
    """Wait on this thread for ``seconds``, with the GIL held if ``holding_gil``."""
    if not holding_gil:
        threading.Event().wait(seconds)
        return
    libc = ctypes.PyDLL(None)  # its functions keep the GIL
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:  # a signal ends one wait early
        libc.poll(None, 0, int(left * 1000) + 1)


def stop_this_process(seconds: float) -> None:
    """Stop this process by SIGSTOP for ``seconds``.

    A helper process sends SIGCONT, after which this function returns.
    """
    pidfd = os.pidfd_open(os.getpid())
    try:
        waker = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WAKER, str(pidfd), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[pidfd],
        )
        assert waker.stdin is not None
        assert waker.stdout is not None
        with waker.stdin, waker.stdout:
            if waker.stdout.read(1) != b"!":
                raise OSError("the helper process that wakes this one did not start")
            os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait(_READY_S)
    finally:
        os.close(pidfd)
