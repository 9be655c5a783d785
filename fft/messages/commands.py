"""Commands: requests of an operator to a job's processes over its bus, and their answers.

Commands are not part of the protocol: the engine hands them to its host, and the core never sees
one. Pure data in a strict form; any other form is refused as a whole. A command is broadcast in the
topic ``commands``. Its answers go to an inbox named after the command, which only the sender reads.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from fft.messages.codec import Codec
from fft.messages.fault_plans import AnyFault
from fft.messages.protocol import MAX_MESSAGE, Count, Name, Text

BY_SUPERVISOR = "supervisor"
"""Sender name of the supervisor when it announces a fault of its services."""
LONGEST_GRACE_S = 600.0
LONGEST_CHECK_S = 120.0
MOST_CHECKED = 8_000
"""Maximum number of tasks in one message."""

_CONFIG = ConfigDict(strict=True, extra="forbid")
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{8,32}$")]
AnswerKind = Literal["accepted", "refused", "done"]


def fresh_id() -> str:
    """Return a unique name for a command."""
    return uuid.uuid4().hex


@dataclass(frozen=True, config=_CONFIG)
class Evict:
    """Ask the supervisor to end these processes and, with ``restart``, to start their group again.

    The supervisor sends SIGCONT and SIGTERM at once, and SIGKILL to the rest of the group after
    ``grace`` seconds.
    """

    id: Id
    group: Name
    by: Text
    rank: Count | None = None
    """Rank to end, or None for every rank. A group does not continue without one of its ranks."""
    grace: Annotated[float, Field(ge=0, le=LONGEST_GRACE_S)] = 10.0
    restart: bool = False
    v: Literal[1] = 1
    type: Literal["evict"] = "evict"


@dataclass(frozen=True, config=_CONFIG)
class Inject:
    """Inject a fault into the ranks that it names, or into the supervisor's services.

    Only processes that were started with permission to inject faults obey it.
    """

    id: Id
    fault: AnyFault
    by: Text
    v: Literal[1] = 1
    type: Literal["inject"] = "inject"


@dataclass(frozen=True, config=_CONFIG)
class CheckTask:
    """The part of one process in a ``Check``: checks of its own, or one side of a pairwise
    check."""

    group: Name
    rank: Count
    part: Literal["alone", "listen", "connect"]
    address: Annotated[str, Field(max_length=300)] = ""
    """``host:port`` to connect to."""
    key: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    """Key by which the two sides of a pairwise check authenticate each other."""


@dataclass(frozen=True, config=_CONFIG)
class Check:
    """Ask the ranks that its tasks name to check themselves in bounded time and memory.

    A rank runs one check at a time and refuses a second one. The listening side sends its address
    in its first answer; all ranks send their results in the last one
    (``fft.train.step.operator_commands``).
    """

    id: Id
    tasks: Annotated[tuple[CheckTask, ...], Field(max_length=MOST_CHECKED)]
    by: Text
    round: Count = 0
    limit: Annotated[float, Field(gt=0, le=LONGEST_CHECK_S)] = 20.0
    """Seconds after which an unfinished check counts as failed."""
    v: Literal[1] = 1
    type: Literal["check"] = "check"


@dataclass(frozen=True, config=_CONFIG)
class RollCall:
    """Ask the holders of the job's state to answer, which shows that the job is alive.

    Starting processes send it, not operators. The engine answers without involving its host.
    """

    id: Id
    by: Text
    v: Literal[1] = 1
    type: Literal["roll_call"] = "roll_call"


Command = Evict | Inject | Check
COMMANDS = (Evict, Inject, Check)


@dataclass(frozen=True, config=_CONFIG)
class Answer:
    """Answer to a command: ``accepted`` or ``refused`` at once, and ``done`` after longer work."""

    id: Id
    by: Text
    verdict: AnswerKind
    text: Text = ""


@dataclass(frozen=True, config=_CONFIG)
class Holder:
    """The supervisor that claimed a group."""

    id: Id
    """Name of its inbox."""
    host: str
    pid: Count
    node: str = ""
    """Name of its host for the scheduler."""
    free: bool = False
    """It has released the group."""
    begun: Count = 0
    """The step of the checkpoint that it began with."""
    status: Count | None = None
    """Its exit status, if it has ended in good order."""
    v: Literal[1] = 1

    def __str__(self) -> str:
        return f"fft run with pid {self.pid} on {self.host}"


_COMMANDS = Codec[Command | RollCall](
    Annotated[Command | RollCall, Field(discriminator="type")], MAX_MESSAGE
)
_ANSWERS = Codec[Answer](Answer)
_HOLDERS = Codec[Holder](Holder)
encode_command, decode_command = _COMMANDS.encode, _COMMANDS.decode
"""Encode and decode a command of the topic ``commands``."""
command_to_json = _COMMANDS.plain
"""Convert a command to plain data for the trace."""
encode_answer, decode_answer = _ANSWERS.encode, _ANSWERS.decode
"""Encode and decode an answer for the inbox of the sender of the command."""
encode_holder, decode_holder = _HOLDERS.encode, _HOLDERS.decode
"""Encode and decode a holder for its register."""


def holder_register(group: str) -> str:
    """Return the name of the register that holds the group's `Holder`."""
    return f"supervisor/{group}"


def answer_inbox(command_id: str) -> str:
    """Return the inbox for the answers to a command."""
    return f"answer/{command_id}"
