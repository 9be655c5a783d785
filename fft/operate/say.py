"""Messages that a program outside the job may send: their form, and how they are checked.

Reads a file or standard input on request; `send` sends one message on the bus of a job.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any, assert_never

from pydantic import Field, TypeAdapter, ValidationError

from fft.bus.base import Topic
from fft.messages.commands import COMMANDS, Check, Command, Evict, Inject, encode_command
from fft.messages.fault_plans import Fault
from fft.messages.protocol import MAX_MESSAGE, Death, Drain, Suspect, encode
from fft.operate.client import JobClient, JobState, OperatorError, listed

Sayable = Death | Suspect | Drain | Command
_COMMANDS = ("evict", "inject", "check")
_KINDS = ("death", "suspect", "drain", *_COMMANDS)
_HELP = "`fft dev say --schema` prints the form, and --raw sends it as it is"


@cache
def _adapter() -> TypeAdapter[Sayable]:
    return TypeAdapter(Annotated[Sayable, Field(discriminator="type")])


def schema() -> dict[str, Any]:
    """Return the JSON schema of every message that a monitor or an operator may send."""
    made: dict[str, Any] = _adapter().json_schema()
    made["title"] = "A message to an FFT job"
    # `local` marks a drain that was requested inside the sending process
    made["$defs"]["Drain"]["properties"].pop("local")
    return made


def read(message: str | None) -> tuple[bytes, str]:
    """Return the message and a name for its source: literal JSON, ``-``, or a path.

    Raises ``OperatorError`` if there is nothing to read.
    """
    if message is None:
        raise OperatorError("no message: give JSON, a file, or - for standard input")
    if message.lstrip().startswith("{"):
        return message.encode(), "message"
    if message == "-":
        return sys.stdin.buffer.read(MAX_MESSAGE + 1), "standard input"
    try:
        with Path(message).open("rb") as file:
            return file.read(MAX_MESSAGE + 1), message
    except (OSError, ValueError) as error:
        raise OperatorError(
            f"{message!r} is neither JSON nor a file that can be read: {error}"
        ) from error


def checked(text: bytes, source: str) -> bytes:
    """Return ``text`` in the form that the bus carries.

    Raises:
        OperatorError: The text is not a message that may be sent; names ``source``, the place and
            the remedy.
    """
    if len(text) > MAX_MESSAGE:
        raise OperatorError(f"{source}: {len(text)} bytes; a message has at most {MAX_MESSAGE}")
    try:
        message = _adapter().validate_json(text)
    except ValidationError as error:
        raise OperatorError(f"{source}: {_problem(error)}; {_HELP}") from None
    if isinstance(message, Drain) and message.local:
        raise OperatorError(f"{source}: drain.local: only a group sets this, for itself; remove it")
    return encode_command(message) if isinstance(message, COMMANDS) else encode(message)


def send(desk: JobClient, payload: bytes, raw: bool = False) -> str:
    """Send ``payload`` in its topic. Returns a remark for the operator, or an empty string.

    Raises:
        OperatorError: The job's token is missing; or (unless ``raw``) the message is about a group
            or rank that the job does not have. It is then not sent.
        BusError: The bus cannot be reached, or its contents are sealed with another token.
    """
    job = desk.job()
    if job.head is None:
        desk.check_token()
    remark = "" if raw else _check_places(job, _said(payload), desk.bus.url)
    desk.bus.broadcast(payload, topic_of(payload))
    return remark


def _said(payload: bytes) -> Sayable:
    """Parse the output of ``checked``."""
    return _adapter().validate_json(payload)


def _check_places(job: JobState, said: Sayable, url: str) -> str:
    """Return a remark for the operator. Raises OperatorError if a place is not in the job."""
    if job.head is None:
        return f"no job has begun on the bus at {url}; only who has started already hears this"
    if job.epoch is None:
        return "the job moves on too fast to see its groups; they were not compared"
    anyway = "(--raw sends it anyway, if a process of it is about to join)"
    for group, rank in _places(said):
        if (entry := job.groups.get(group)) is None:
            listing = listed(job.groups)
            raise OperatorError(f"no group {group!r} in the job; its groups: {listing} {anyway}")
        ranks = [r.rank for r in entry.ranks]
        if rank is not None and rank not in ranks:
            listing = ", ".join(map(str, ranks))
            raise OperatorError(f"no rank {rank} in group {group}; its ranks: {listing} {anyway}")
    if isinstance(said, Death | Suspect):
        member = next(r for r in job.groups[said.group].ranks if r.rank == said.rank)
        if (member.pid, member.host) != (said.pid, said.host):
            return (
                f"rank {said.rank} of group {said.group} is pid {member.pid} on {member.host} now, "
                f"not {said.pid} on {said.host}: the job does not leave that one out"
            )
    return ""


def _places(said: Sayable) -> list[tuple[str, int | None]]:
    """Return the groups, and their ranks if given, that a message is about."""
    match said:
        case Drain():
            return [(group, None) for group in said.groups]
        case Death() | Suspect() | Evict():
            return [(said.group, said.rank)]
        case Check():
            return [(task.group, task.rank) for task in said.tasks]
        case Inject():
            fault = said.fault
            return [(fault.group, getattr(fault, "rank", None))] if isinstance(fault, Fault) else []
        case _:
            assert_never(said)


def topic_of(text: bytes) -> Topic:
    """Return the topic for ``text``: commands, recognized by their ``type``, have their own."""
    try:
        kind = json.loads(text).get("type")
    except (ValueError, AttributeError, RecursionError):  # possible with --raw
        kind = None
    return "commands" if kind in _COMMANDS else "protocol"


def _problem(error: ValidationError) -> str:
    """Return the first problem as ``place: what is wrong``."""
    problem = error.errors(include_url=False)[0]
    kind = problem["type"]
    if kind == "json_invalid":
        return f"not JSON: {problem['ctx']['error']}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return f"type: needs one of {', '.join(_KINDS)}"
    place = ".".join(str(part) for part in problem["loc"]) or "message"
    if kind == "missing":
        return f"{place}: is missing; add it"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place}: is not part of this message; remove it or correct its spelling"
    return f"{place}: {problem['msg']} (found {problem.get('input')!r:.60}); correct it"
