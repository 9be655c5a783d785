"""What both ends of the queue between two stages share: who they are, and how entries travel.

Sockets are multiprocessing's connections, which authenticate each other; the address is in the
group's own store. Entries are tensors and plain values: nothing that is unpickled runs.
"""

from __future__ import annotations

import io
import os
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from fft.bus.token import derive
from fft.util.errors import FftError

if TYPE_CHECKING:
    from fft.train.manager import ManagerFFT
    from fft.train.parts import Parts
    from fft.train.stages.scope import StageScope

JOIN_S = 5.0
"""For a thread of ours to end that was told to."""
LOST = (EOFError, OSError)
"""What a connection raises whose other end has gone."""


def parts_of(manager: ManagerFFT) -> tuple[Parts, StageScope]:
    """Raises FftError: the stages of its spec have no scopes of their own."""
    parts = manager._parts
    if parts.stage is None:
        raise FftError(
            f"spec {parts.settings.spec.name!r} has no stages that step by themselves: use "
            "spec='pipeline_ahead'"
        )
    return parts, parts.stage


def key_of(parts: Parts) -> bytes:
    token = parts.settings.token
    return token.key("fft1", "flow") if token is not None else derive(b"", "fft1", "flow")


def place(scope: str) -> str:
    """In the group's store: where the rank of that stage can be reached."""
    return f"fft/flow/{scope}"


def packed(value: dict[str, Any]) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def kept_of(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def cut(connection: Connection) -> None:
    """Wake whoever reads from it: it has ended."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
