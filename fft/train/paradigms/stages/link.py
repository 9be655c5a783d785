"""What both ends of the queue between two stages share: who they are, and how entries travel.

Sockets are multiprocessing's connections, which authenticate each other; the address is in the
group's own store. Entries are tensors and plain values: nothing that is unpickled runs.
"""

from __future__ import annotations

import io
import os
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch

from fft.bus.token import derive
from fft.errors import FftError
from fft.train.rank import Rank
from fft.util.kernel_limit import limit_in_kernel

JOIN_S = 5.0
"""For a thread of ours to end that was told to."""
_GREET_S = 10.0
"""For the other end of a connection to show that it has the job's token."""
LOST = (EOFError, OSError)
"""What a connection raises whose other end has gone."""
PLAIN = (int, float, bool, str, bytes, type(None))
"""What may be in an entry beside tensors."""


class Stranger(Exception):
    """The other end has not shown in time that it has the job's token."""


def refuse_other_spec(rank: Rank) -> None:
    """Raise FftError unless the stages of the spec have scopes of their own."""
    if not rank.scope.by_rank:
        raise FftError(
            f"spec {rank.settings.spec.name!r} has no stages that step by themselves: use "
            "spec='pipeline_ahead'"
        )


def key_of(rank: Rank) -> bytes:
    token = rank.settings.token
    return token.key("fft1", "flow") if token is not None else derive(b"", "fft1", "flow")


def place(scope: str) -> str:
    """In the group's store: where the rank of that stage can be reached."""
    return f"fft/flow/{scope}"


def packed(value: dict[str, Any]) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def kept_of(value: Any) -> Any:
    """A copy in the host's memory, without gradients. Raises FftError: it cannot be sent."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, PLAIN):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
    raise FftError(
        f"an entry holds a {kind}; it can hold tensors, numbers, text, bytes and None, in tuples, "
        "lists and dicts: put a tensor in its place"
    )


def greet(end: socket.socket, key: bytes, first: bool) -> Connection:
    """A connection on ``end``, whose other end has ``key``, too. Raises Stranger, and closes it.

    ``first``: who asks first; the other end does not.
    """
    limit_in_kernel(end, _GREET_S)
    connection = Connection(end.detach())
    steps = (deliver_challenge, answer_challenge)
    try:
        for step in steps if first else reversed(steps):
            step(connection, key)
    except (AuthenticationError, *LOST) as error:
        connection.close()
        raise Stranger(str(error)) from error
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        limit_in_kernel(same, None)
    return connection


def cut(connection: Connection) -> None:
    """Wake whoever reads from it: it has ended."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class Taker:
    """A connection of the next stage."""

    connection: Connection
    asked: set[int] = field(default_factory=set)
    is_gone: bool = False
    is_told: bool = False
    """That the group leaves."""
    is_welcome: bool = False
    """It knows that there is somebody with the job's weights here."""
    data: str = ""
    """What it takes the data to be; empty: it has not said yet."""
