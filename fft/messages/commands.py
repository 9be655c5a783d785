"""Commands: requests of an operator to a job's processes over its bus, and their answers.

They are not part of the protocol: the engine hands them to its host, and the core never sees one.
Pure data, with a strict form: anything else is refused as a whole. A command is broadcast, in the
topic ``commands``; an answer goes to an inbox of the asker, named after the command, so nobody else
pays for it.
"""

from __future__ import annotations

import uuid
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from fft.messages.fault_plans import AnyFault
from fft.messages.protocol import MAX_MESSAGE, Count, Name, Text, UnreadableMessage, unreadable

BY_SUPERVISOR = "supervisor"
"""Who speaks, where the supervisor says that a fault of its services happens now."""
LONGEST_GRACE_S = 600.0
LONGEST_CHECK_S = 120.0
MOST_CHECKED = 8_000
"""So many tasks fit into one message."""

_CONFIG = ConfigDict(strict=True, extra="forbid")
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{8,32}$")]
AnswerKind = Literal["accepted", "refused", "done"]


def fresh_id() -> str:
    """A name for one command; nobody draws the same."""
    return uuid.uuid4().hex


@dataclass(frozen=True, config=_CONFIG)
class Evict:
    """To the supervisor: end these processes, and start their group again only if asked to.

    SIGCONT and SIGTERM at once; SIGKILL to whoever of the group is left after ``grace`` seconds.
    """

    id: Id
    group: Name
    by: Text
    rank: Count | None = None
    """None: every rank of the group. A group does not go on without one of its ranks."""
    grace: Annotated[float, Field(ge=0, le=LONGEST_GRACE_S)] = 10.0
    restart: bool = False
    v: Literal[1] = 1
    type: Literal["evict"] = "evict"


@dataclass(frozen=True, config=_CONFIG)
class Inject:
    """Break something on purpose: to the ranks that the fault names, or to the supervisor.

    Obeyed only by processes that were started to allow it.
    """

    id: Id
    fault: AnyFault
    by: Text
    v: Literal[1] = 1
    type: Literal["inject"] = "inject"


@dataclass(frozen=True, config=_CONFIG)
class CheckTask:
    """What one process does in a `Check`: checks of its own, or one side of a meeting."""

    group: Name
    rank: Count
    part: Literal["alone", "listen", "connect"]
    address: Annotated[str, Field(max_length=300)] = ""
    """``host:port`` to connect to."""
    key: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    """By which the two sides of a meeting know each other."""


@dataclass(frozen=True, config=_CONFIG)
class Check:
    """To the ranks that its tasks name: check yourselves, in bounded time and memory.

    One check at a time; who is at one refuses another. The side that listens says its address in
    its first answer; all say their results in the last (`fft.train.diagnosis.check_runner`).
    """

    id: Id
    tasks: Annotated[tuple[CheckTask, ...], Field(max_length=MOST_CHECKED)]
    by: Text
    round: Count = 0
    limit: Annotated[float, Field(gt=0, le=LONGEST_CHECK_S)] = 20.0
    """Seconds after which whatever is not through has failed."""
    v: Literal[1] = 1
    type: Literal["check"] = "check"


@dataclass(frozen=True, config=_CONFIG)
class RollCall:
    """To whoever holds the state of the job: answer, so that the asker knows that the job lives.

    Said by who starts, not by operators: the engine answers, and its host never hears of it.
    """

    id: Id
    by: Text
    v: Literal[1] = 1
    type: Literal["roll_call"] = "roll_call"


Command = Evict | Inject | Check
COMMANDS = (Evict, Inject, Check)


@dataclass(frozen=True, config=_CONFIG)
class Answer:
    """``accepted`` or ``refused`` comes at once; ``done`` when there is something to wait for."""

    id: Id
    by: Text
    verdict: AnswerKind
    text: Text = ""


@cache
def _commands() -> TypeAdapter[Command | RollCall]:
    return TypeAdapter(Annotated[Command | RollCall, Field(discriminator="type")])


@cache
def _answers() -> TypeAdapter[Answer]:
    return TypeAdapter(Answer)


def answer_inbox(command_id: str) -> str:
    """Where the answers to a command go."""
    return f"answer/{command_id}"


def encode_command(command: Command | RollCall) -> bytes:
    """Command → bytes for the topic ``commands``."""
    return _commands().dump_json(command)


def decode_command(payload: bytes) -> Command | RollCall:
    """Bytes of the topic ``commands`` → command. Raises ``UnreadableMessage``."""
    if len(payload) > MAX_MESSAGE:
        raise UnreadableMessage(f"message of {len(payload)} bytes; the limit is {MAX_MESSAGE}")
    try:
        return _commands().validate_json(payload)
    except ValidationError as error:
        raise unreadable(error) from None


def encode_answer(answer: Answer) -> bytes:
    """Answer → bytes for the inbox of who asked."""
    return _answers().dump_json(answer)


def decode_answer(data: bytes) -> Answer:
    """Bytes of the inbox → answer. Raises ``UnreadableMessage``."""
    try:
        return _answers().validate_json(data)
    except ValidationError as error:
        raise unreadable(error) from None


def command_to_json(command: Command) -> dict[str, Any]:
    """Command → plain data for the trace."""
    data: dict[str, Any] = _commands().dump_python(command, mode="json")
    return data
