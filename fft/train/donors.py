"""A joiner waits outside the epoch until it can reach a rank that holds the job's state.

A fetch that fails inside the epoch rolls back every group. So a joiner first connects to the ranks
that it may have to fetch from, before it asks to join. Touches the bus and those listeners.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from fft.bus import ErrorBus, open_job_bus
from fft.bus.addresses import HOW_TO_REACH, joined, why_unreachable
from fft.bus.base import HEAD
from fft.bus.token import JobToken
from fft.errors import BusError, NoState
from fft.messages.commands import RollCall, fresh_id
from fft.messages.protocol import Peer, RankEntry
from fft.operate.client import JobClient, OperatorError
from fft.protocol.timeouts import bus_operation
from fft.trace.format import UNREACHABLE
from fft.util.pidfd import is_there

logger = logging.getLogger(__name__)

_ANSWER_S = 2.0
"""For a rank of the job to answer that it lives."""
_AGAIN_S = 1.0
_LOOKED_AT = 16
"""Ranks that are connected to at most; one that answers is enough."""


def wait_for_donor(
    bus: ErrorBus,
    token: JobToken | None,
    me: Peer,
    limit_s: float,
    is_over: Callable[[], bool],
    note: Callable[[str, dict[str, Any]], None],
) -> None:
    """Return when a rank that may give ``me`` the state can be connected to, or none lives.

    Args:
        bus: of the job. A connection of its own asks there, if a job has begun on it.
        me: the joiner; ranks of its own number in other groups give the state.
        limit_s: seconds to wait outside.
        is_over: whether this process shall leave the job anyway.
        note: writes a note to the trace.

    Raises:
        NoState: living ranks cannot be reached for ``limit_s``; names their addresses.
    """
    try:
        if bus.read(HEAD) is None:
            return
        opened = open_job_bus(bus.url, token, bus_operation(bus.url))
        with JobClient(bus.url, token=token, bus=opened) as client:
            _wait(client, me, limit_s, is_over, note)
    except (BusError, OperatorError) as error:  # the engine bounds the absence of the bus
        logger.warning("whether the ranks of the job can be reached is not known: %s", error)


def _wait(
    client: JobClient,
    me: Peer,
    limit_s: float,
    is_over: Callable[[], bool],
    note: Callable[[str, dict[str, Any]], None],
) -> None:
    deadline, told = time.monotonic() + limit_s, ""
    while (why := _unreached(_donors(client, me))) and _is_alive(client) and not is_over():
        text = (
            f"rank {me.group}/{me.rank} waits outside the job, because it cannot reach a rank that "
            f"has the state: {why}; {HOW_TO_REACH}"
        )
        if time.monotonic() > deadline:
            raise NoState(f"{text}. It waited for {limit_s:g} s")
        if why != told:
            logger.error("%s", text)
            note(UNREACHABLE, {"why": why})
            told = why
        time.sleep(_AGAIN_S)  # nothing reports that a firewall was opened


def _donors(client: JobClient, me: Peer) -> list[RankEntry]:
    """The members of other groups with the number of ``me``, but for dead ones of this host."""
    epoch = client.job().epoch
    groups = () if epoch is None else epoch.members
    ranks = [r for group in groups if group.group != me.group for r in group.ranks]
    here = socket.gethostname()
    return [r for r in ranks if r.rank == me.rank and (r.host != here or is_there(r.pid))]


def _unreached(donors: list[RankEntry]) -> str:
    """Why none of the ``donors`` can be connected to; empty: one can, or there is none."""
    places = [urlsplit(donor.transport) for donor in donors[:_LOOKED_AT]]
    known = [(p.hostname, p.port) for p in places if p.scheme == "http" and p.hostname and p.port]
    if len(known) < len(places) or not known:  # a transport of the user's own
        return ""
    with ThreadPoolExecutor(len(known), "fft-donors") as pool:
        found = list(pool.map(_trouble, known))
    return "" if None in found else "; ".join(filter(None, found))


def _trouble(address: tuple[str, int]) -> str | None:
    if (error := why_unreachable(address)) is None:
        return None
    return f"{joined(*address)} cannot be reached from this host ({error})"


def _is_alive(client: JobClient) -> bool:
    """Whether a rank that holds the job's state answers."""
    with client.asking(RollCall(fresh_id(), client.me)) as answers:
        return any(True for _ in answers(time.monotonic() + _ANSWER_S))
