"""What operators may have a participant do: carry out a fault, run a check. The engine's thread.

Makes the injector too, since faults of a plan and of a command are one thing.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Literal

from fft.errors import BusError
from fft.messages.commands import (
    Answer,
    Check,
    Command,
    Inject,
    answer_inbox,
    command_to_json,
    encode_answer,
)
from fft.messages.fault_plans import Fault as InjectableFault
from fft.messages.protocol import Peer
from fft.train.diagnosis.check_runner import CheckRunner
from fft.train.epoch_groups import EpochGroups
from fft.train.injector import InjectedFault, Injector
from fft.train.participation import Participation
from fft.train.process_group.sockets import lose_connections

logger = logging.getLogger(__name__)


class OperatorCommands:
    """Obeys for one participant."""

    def __init__(self, job: Participation, injector: Injector | None) -> None:
        self._job = job
        self._injector = injector
        place = (job.peer.group, job.peer.rank)
        self._checks = CheckRunner(place, job.bus, job.trace.note)

    def obey(self, command: Command) -> None:
        """An operator's word to the job. Traced if it concerns this participant."""
        peer = self._job.peer
        if isinstance(command, Check):
            if (task := self._checks.take(command)) is not None:
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
        """Have the fault carried out; or why not."""
        if self._injector is None or not self._injector.open:
            return "it was not started to allow it (fft run --injectable, or FFT_INJECT=1)"
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
    """What carries out planned and commanded faults here; None: the environment allows none."""

    def trace(fault: InjectedFault) -> None:
        told = {"name": fault.name, "kind": fault.kind, "phase": fault.phase, "step": fault.step}
        job.note("inject", told)

    return Injector.from_env(
        claim=lambda key: job.bus.next_number(key) == 1,
        on_inject=trace,
        hands=_Hands(job, groups),
    )


class _Hands:
    """What the injector cannot do by itself; keeps neither job nor groups alive."""

    def __init__(self, job: Participation, groups: EpochGroups) -> None:
        self._job, self._groups = weakref.ref(job), weakref.ref(groups)

    def cut_network(self) -> None:
        if (groups := self._groups()) is not None:
            groups.cut()

    def lose_bus(self) -> None:
        if (job := self._job()) is not None:
            lose_connections(job.bus.url)
