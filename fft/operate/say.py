"""Messages that a program beside the job may write: their form, and how they are checked.

Reads a file or standard input where it is told to; `send` says one on the bus of a job.
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
_HELP = "`fft say --schema` prints the form, and --raw sends it as it is"


@cache
def _adapter() -> TypeAdapter[Sayable]:
    return TypeAdapter(Annotated[Sayable, Field(discriminator="type")])


def schema() -> dict[str, Any]:
    """JSON schema of every message that a monitor or an operator may write."""
    made: dict[str, Any] = _adapter().json_schema()
    made["title"] = "A message to an FFT job"
    # `local` marks a drain that was asked for inside the process that speaks
    made["$defs"]["Drain"]["properties"].pop("local")
    return made


def read(message: str | None) -> tuple[bytes, str]:
    """The message itself and what to call its source: JSON as it is, ``-``, or a path.

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
    """``text`` as the bus shall carry it.

    Raises:
        OperatorError: not a message that may be written; names ``source``, the place, the mend.
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
    """Say ``payload`` where somebody obeys it; what there is to remark, or nothing.

    Raises:
        OperatorError: the job's token is missing; or (not if ``raw``) it is about a group or a rank
            that the job does not have. It is not sent then.
        BusError: the bus cannot be reached, or holds what another token has sealed.
    """
    job = desk.job()
    if job.head is None:
        desk.check_token()
    remark = "" if raw else _check_places(job, _said(payload), desk.bus.url)
    desk.bus.broadcast(payload, topic_of(payload))
    return remark


def _said(payload: bytes) -> Sayable:
    """What ``checked`` has made."""
    return _adapter().validate_json(payload)


def _check_places(job: JobState, said: Sayable, url: str) -> str:
    """Raise OperatorError unless all places in ``said`` are in the job; else what to remark."""
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
    """The groups, and ranks of them, that a message is about."""
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
    """Where to say ``text``: commands have a topic of their own, by their ``type``."""
    try:
        kind = json.loads(text).get("type")
    except (ValueError, AttributeError, RecursionError):  # --raw
        kind = None
    return "commands" if kind in _COMMANDS else "protocol"


def _problem(error: ValidationError) -> str:
    """The first problem as ``place: what is wrong``."""
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
