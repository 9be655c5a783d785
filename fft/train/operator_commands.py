"""Commands of operators to a participant: inject a fault, run a diagnostic check.

This module runs on the engine's thread. It also creates the injector, which handles planned and
commanded faults in the same way.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from fft.bus import BusError, ErrorBus
from fft.bus.addresses import own_address
from fft.messages.commands import (
    Answer,
    AnswerKind,
    Check,
    CheckTask,
    Command,
    Inject,
    answer_inbox,
    command_to_json,
    encode_answer,
)
from fft.messages.fault_plans import Fault as InjectableFault
from fft.messages.protocol import Peer
from fft.operate.diagnosis.plan import Outcome
from fft.trace.blame import Place
from fft.train.diagnosis import checks
from fft.train.epoch_groups import EpochGroups
from fft.train.injector import InjectedFault, Injector
from fft.train.participation import Participation
from fft.train.process_group.sockets import lose_connections

logger = logging.getLogger(__name__)


_TEXT = 250
_END_S = 2.0


class CheckRunner:
    """Runs one check at a time and passes each result to ``note``, on its own thread."""

    def __init__(
        self, place: Place, bus: ErrorBus, note: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._place = place
        self._who = f"group {place[0]} rank {place[1]}"
        self._bus = bus
        self._note = note
        self._line = checks.CheckSockets()
        self._thread: threading.Thread | None = None
        self._worker: threading.Thread | None = None
        """Thread of a check that cannot be interrupted; it may still run after its time limit."""
        self._busy = False
        self._closed = False

    def start(self, check: Check) -> CheckTask | None:
        """Start this rank's task of ``check``, if there is one, and return it at once.

        Call it from one thread only.
        """
        mine = (t for t in check.tasks if (t.group, t.rank) == self._place)
        task = next(mine, None)
        if task is None or self._closed:
            return None
        if self._busy:
            self._answer(check, "refused", {"error": "busy with another check"})
            return task
        self._busy = True
        self._line = checks.CheckSockets()
        self._thread = threading.Thread(
            target=self._work, args=(check, task, self._line), name="fft-check", daemon=True
        )
        self._thread.start()
        return task

    def close(self) -> None:
        """Interrupt a running check."""
        self._closed = True
        self._line.cut()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_END_S)

    # --- the thread of a check ---

    def _work(self, check: Check, task: CheckTask, line: checks.CheckSockets) -> None:
        try:
            told = self._results(check, task, line)
            self._note("check", {"id": check.id, "round": check.round, "found": told})
        finally:
            self._busy = False  # reset before the answer, after which the next request may arrive
        self._answer(check, "done", told)

    def _results(self, check: Check, task: CheckTask, line: checks.CheckSockets) -> dict[str, Any]:
        deadline = time.monotonic() + check.limit
        if task.part == "alone":
            self._answer(check, "accepted", {})
            found = {
                "compute": self._bounded(checks.compute, deadline),
                "memory": self._bounded(checks.memory, deadline),
            }
        else:
            found = {"network": self._check_connection(check, task, line, deadline)}
        return {
            kind: {
                "ok": one.ok,
                "seconds": round(one.seconds, 4),
                "text": " ".join(one.text.split())[:_TEXT],
            }
            for kind, one in found.items()
        }

    def _check_connection(
        self, check: Check, task: CheckTask, line: checks.CheckSockets, deadline: float
    ) -> Outcome:
        if task.part == "connect":
            self._answer(check, "accepted", {})
            return checks.connect(task.address, task.key, deadline, line)
        try:
            listening = checks.Listening(own_address(self._bus.url), task.key, line)
        except OSError as error:
            self._answer(check, "accepted", {})
            return Outcome(False, 0.0, f"cannot listen: {error}")
        try:
            self._answer(check, "accepted", {"address": listening.address})
            return listening.run(deadline)
        finally:
            listening.close()

    def _bounded(self, check: Callable[[], Outcome], deadline: float) -> Outcome:
        """Return the result of ``check``, or a failure if it does not end in time.

        A check may not end because a device hangs, for example.
        """
        began = time.monotonic()
        if self._worker is not None and self._worker.is_alive():
            return Outcome(False, 0.0, "not begun: an earlier check never ended")
        found: list[Outcome] = []

        def work() -> None:
            try:
                found.append(check())
            except Exception as error:  # noqa: BLE001 -- any error is the result of the check
                found.append(Outcome(False, 0.0, f"{type(error).__name__}: {error}"))

        self._worker = threading.Thread(target=work, name="fft-check-work", daemon=True)
        self._worker.start()
        self._worker.join(max(0.0, deadline - began))
        seconds = time.monotonic() - began
        return found[0] if found else Outcome(False, seconds, f"not finished in {seconds:.0f} s")

    def _answer(self, check: Check, verdict: AnswerKind, data: dict[str, Any]) -> None:
        word = Answer(check.id, self._who, verdict, json.dumps(data, ensure_ascii=False))
        try:
            self._bus.send(answer_inbox(check.id), encode_answer(word))
        except BusError as error:  # the requester reports the missing answer
            logger.warning("could not answer a check: %s", error)


class OperatorCommands:
    """Executes operator commands for one participant."""

    def __init__(self, job: Participation, injector: Injector | None) -> None:
        self._job = job
        self._injector = injector
        place = (job.peer.group, job.peer.rank)
        self._checks = CheckRunner(place, job.bus, job.trace.note)

    def execute(self, command: Command) -> None:
        """Execute a command of an operator. Trace it if it concerns this participant."""
        peer = self._job.peer
        if isinstance(command, Check):
            if (task := self._checks.start(command)) is not None:
                told = command_to_json(replace(command, tasks=(task,)))
                self._job.trace.note("command", told)
            return
        fault = command.fault if isinstance(command, Inject) else None
        if isinstance(fault, InjectableFault) and not _concerns(fault, peer):
            return
        refusal = None
        if isinstance(fault, InjectableFault):
            refusal = self._admit(fault)
            self._answer(command, refusal)
        self._job.note("command", {**command_to_json(command), "refused": refusal})

    def _admit(self, fault: InjectableFault) -> str | None:
        """Arm the fault, or return why it is refused."""
        if self._injector is None or not self._injector.open:
            return (
                "fault injection is disabled in this process; start it by fft run --injectable, "
                "or with FFT_INJECT=1"
            )
        self._injector.add(fault)
        return None

    def _answer(self, command: Command, refusal: str | None) -> None:
        who = f"group {self._job.peer.group} rank {self._job.peer.rank}"
        verdict: Literal["refused", "accepted"] = "accepted" if refusal is None else "refused"
        word = encode_answer(Answer(command.id, who, verdict, refusal or "armed"))
        try:
            self._job.bus.send(answer_inbox(command.id), word)
        except BusError as error:  # the engine will notice, if it lasts
            logger.warning("could not answer a command: %s", error)

    def close(self) -> None:
        """End the checks. Idempotent."""
        self._checks.close()


def _concerns(fault: InjectableFault, peer: Peer) -> bool:
    return fault.group == peer.group and getattr(fault, "rank", None) in (None, peer.rank)


def make_injector(job: Participation, groups: EpochGroups) -> Injector | None:
    """Return the fault injector of this process, or None if the environment enables none."""

    def trace(fault: InjectedFault) -> None:
        told = {"name": fault.name, "kind": fault.kind, "phase": fault.phase, "step": fault.step}
        job.note("inject", told)

    return Injector.from_env(
        claim=lambda key: job.bus.next_number(key) == 1,
        on_inject=trace,
        hands=_ConnectionFaults(job, groups),
    )


class _ConnectionFaults:
    """Connection faults for the injector. It keeps neither the job nor the groups alive."""

    def __init__(self, job: Participation, groups: EpochGroups) -> None:
        self._job, self._groups = weakref.ref(job), weakref.ref(groups)

    def cut_network(self) -> None:
        if (groups := self._groups()) is not None:
            groups.cut()

    def lose_bus(self) -> None:
        if (job := self._job()) is not None and not job.bus.lose():
            lose_connections(job.bus.url)
