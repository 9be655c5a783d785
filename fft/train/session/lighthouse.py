"""torchft's lighthouse under FFT: heartbeats for its dashboard, and its quorum on request.

The head register decides the job's membership. If a lighthouse is given, it receives torchft's
heartbeats. With ``membership="lighthouse"`` it is also asked in every txn, and no txn commits
without a lighthouse quorum that lists every group of the epoch. This module uses torchft and its
own threads; it does not use the engine.

Only the first rank of a group asks. COMMIT needs a YES from every rank, so one waiting rank delays
all. torchft's own way, a call of every rank to the group's server, does not survive a rollback:
that server pairs calls by their order, so a rank that was rolled back before its call would stay
one quorum behind the other ranks forever.

An answer counts for a txn if every group of the epoch had asked *in this txn*, which each group
states in the ``data`` of its call. So all groups that receive the same answer draw the same
conclusion, and ask again together.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from inspect import BoundArguments
from types import FunctionType
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from torchft.coordination import LighthouseClient
from torchft.manager import Manager, ManagerServer

from fft.bus.addresses import joined
from fft.errors import FftError
from fft.messages.protocol import Peer, Token

logger = logging.getLogger(__name__)

Membership = Literal["register", "lighthouse"]

_NOWHERE = "none"
"""Placeholder for an address, which torchft's constructor requires."""
_CONNECT_S = 1.0
"""Limit in seconds for one attempt to reach a lighthouse; a thread inside torchft's code cannot be
interrupted."""
_RETRY_S = 1.0
"""Seconds between two attempts to reach a lighthouse."""
_CALL_S = 1.0
"""Limit in seconds for one call. An unanswered call is repeated; `close` waits for it no longer."""
_POLL_S = 0.01
"""Seconds between an answer that does not decide a txn and the next call."""
_RETRY_AFTER_ERROR_S = 0.1
"""Seconds between a call that the lighthouse refused and the next one; torchft's heartbeat
interval."""
_IDLE_CALLS_PER_WINDOW = 4
"""Number of calls per window of a group that needs no answer, which shows that it is alive."""
_MAX_PAUSE_WINDOWS = 64
"""Longest wait, in windows, before a group that gets no answer from the lighthouse rejoins."""


def init_torchft_manager(manager: Manager, called: BoundArguments, serve_at: str | None) -> None:
    """Run torchft's constructor, with `LighthouseBeacon` for its server and a stub for its client.

    Replacing the classes in torchft's module would affect every manager of the process. So the
    constructor's code runs as a function with its own globals.

    Args:
        serve_at: See `LighthouseBeacon`.

    Raises:
        FftError: The lighthouse's address is invalid.
    """
    address = called.arguments.get("lighthouse_addr") or os.environ.get("TORCHFT_LIGHTHOUSE")
    called.arguments["lighthouse_addr"] = address or _NOWHERE
    plain = Manager.__init__
    beacon = partial(LighthouseBeacon, serve_at=serve_at)
    names = {**plain.__globals__, "ManagerServer": beacon, "ManagerClient": _NoClient}
    code, defaults, cells = plain.__code__, plain.__defaults__, plain.__closure__
    init = FunctionType(code, names, plain.__name__, defaults, cells)
    init.__kwdefaults__ = plain.__kwdefaults__
    try:
        init(manager, *called.args, **called.kwargs)
    except BaseException:
        if (made := vars(manager).get("_manager")) is not None:
            made.shutdown()
        raise


class _NoClient:
    """Replaces torchft's ManagerClient: FFT makes no calls to the group's server."""

    def __init__(self, _addr: str, connect_timeout: timedelta) -> None:
        pass


class LighthouseBeacon:
    """Replaces torchft's ManagerServer: sends heartbeats once the lighthouse can be reached.

    torchft's server listens for the dashboard's kill button, and obeys every process that can
    reach it. It is created only for a lighthouse that takes part in membership. Without the
    address of a lighthouse there is no thread and no socket.
    """

    def __init__(
        self, lighthouse_addr: str, bind: str, serve_at: str | None = None, **settings: Any
    ) -> None:
        """Start to connect.

        Args:
            bind: Where torchft's server would listen, ``[::]:PORT``; only the port is used.
            serve_at: IP address at which torchft's server listens, or None for heartbeats alone.
            settings: Further arguments of ManagerServer.

        Raises FftError if the address is invalid.
        """
        self.lighthouse = None if lighthouse_addr == _NOWHERE else lighthouse_addr
        self.settings = settings
        self.server: Any = None
        """torchft's server, if it is wanted and running."""
        self.unreachable_reason = "it has not been reached yet"
        """Why there is no server yet."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if self.lighthouse is None:
            return
        self._place = _place(self.lighthouse)
        port = int(bind.rpartition(":")[2])
        self._bind = None if serve_at is None else joined(serve_at, port)
        limit = min(settings["connect_timeout"], timedelta(seconds=_CONNECT_S))
        self.settings = {**settings, "connect_timeout": limit}
        self._thread = threading.Thread(target=self._run, name="fft-lighthouse", daemon=True)
        self._thread.start()

    def address(self) -> str:
        """Return the address that torchft puts into the group's store; FFT does not use it."""
        return _NOWHERE

    def shutdown(self) -> None:
        """End the heartbeats. Idempotent."""
        self._closed.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(2 * _CONNECT_S)
        with self._lock:
            server, self.server = self.server, None
        if server is not None:
            server.shutdown()

    def _run(self) -> None:
        told = False
        while not self._closed.is_set():
            try:
                # a socket first: torchft's code could not be interrupted while there is no answer
                socket.create_connection(self._place, _CONNECT_S).close()
                if self._bind is None:
                    self._send_heartbeats()
                    return
                server = ManagerServer(
                    lighthouse_addr=self.lighthouse, bind=self._bind, **self.settings
                )
            except (OSError, RuntimeError) as error:
                self.unreachable_reason = str(error)[:200]
                if not told:
                    text = "torchft's lighthouse at %s gets no heartbeats until it can be reached"
                    logger.warning(f"{text} (%s)", self.lighthouse, error)
                told = True
                self._closed.wait(_RETRY_S)
                continue
            with self._lock:
                if not self._closed.is_set():
                    self.server = server
                    return
            server.shutdown()

    def _send_heartbeats(self) -> None:
        """Send heartbeats until `shutdown`. Raises RuntimeError if the lighthouse is lost."""
        limit = self.settings["connect_timeout"]
        client = LighthouseClient(self.lighthouse, connect_timeout=limit)
        while not self._closed.wait(self.settings["heartbeat_interval"].total_seconds()):
            client.heartbeat(self.settings["replica_id"], timeout=limit)


def _place(address: str) -> tuple[str, int]:
    """Return host and port of a lighthouse. Raises FftError."""
    try:
        parts = urlsplit(address)
        if parts.scheme and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise FftError(
        f"the lighthouse's address {address!r} (lighthouse_addr=, or TORCHFT_LIGHTHOUSE) must be "
        "like http://host:29510"
    )


class ListedGroup(NamedTuple):
    """A group in an answer: the incarnation that asked, and its txn."""

    inc: int
    token: Token


@dataclass
class QuorumRequest:
    """A quorum request of one txn, with the answers so far.

    Pure: the caller passes times.
    """

    token: Token
    members: Mapping[str, int]
    """Groups of the epoch, each with the incarnation of its first rank."""
    window_s: float
    begun: float
    granted: bool = False
    """Whether a quorum of this txn lists all members."""
    failed: str | None = None
    """Why there was no quorum in time; None so far."""
    _unnamed: dict[str, float] = field(default_factory=dict)

    def on_reply(self, answer: Mapping[str, ListedGroup], now: float) -> set[str]:
        """Process an answer; return the groups that no answer has listed for ``window_s``."""
        here = {g: answer[g].token for g, inc in self.members.items() if _is_in(answer, g, inc)}
        self.granted = self.granted or all(here.get(group) == self.token for group in self.members)
        missing = self.members.keys() - here.keys()
        self._unnamed = {group: self._unnamed.get(group, now) for group in missing}
        late = {group for group, since in self._unnamed.items() if now - since >= self.window_s}
        self._unnamed.update(dict.fromkeys(late, now))
        return late


def _is_in(answer: Mapping[str, ListedGroup], group: str, inc: int) -> bool:
    return group in answer and answer[group].inc == inc


class QuorumListener(Protocol):
    """Callbacks of `QuorumClient`, on its thread. They return soon and raise nothing."""

    def on_missing_groups(self, token: Token, groups: set[str]) -> None:
        """Handle groups of the epoch that the quorum of this txn does not list."""

    def on_no_quorum(self, token: Token, why: str) -> None:
        """Handle that there was no quorum for this txn in time."""


class QuorumClient:
    """Requests quorums from the lighthouse, on a separate thread, while the manager lives.

    It also asks outside of txns and of the epoch: the lighthouse waits for every group whose
    heartbeats it gets, so a group that does not ask delays the others. It must also list a group
    that joins.
    """

    def __init__(
        self,
        beacon: LighthouseBeacon,
        me: Peer,
        timeout_s: float,
        window_s: float,
        listener: QuorumListener,
    ) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            timeout_s: Limit in seconds for a txn's quorum.
            window_s: Seconds within which an answer must list each member.

        Raises FftError if there is no lighthouse to ask.
        """
        if beacon.lighthouse is None:
            raise FftError(
                "membership='lighthouse' needs torchft's lighthouse: start `fft run` with "
                "--lighthouse, pass lighthouse_addr=, or set TORCHFT_LIGHTHOUSE to what `fft serve "
                "--lighthouse` prints"
            )
        self._beacon = beacon
        self._me = me
        self._timeout_s, self._window_s = timeout_s, window_s
        self._listener = listener
        self._client: Any = None
        self._changed = threading.Condition()
        self._ask: QuorumRequest | None = None
        self._token, self._step = Token(0, 0), 0
        """Values of the last request, which are also sent outside of txns."""
        self._due = 0.0
        """When to call next, on the monotonic clock."""
        self._answered = 0.0
        self._seen: dict[str, Token] = {}
        self._failures = 0
        self._reason = "no answer yet"
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="fft-quorum", daemon=True)

    # --- main thread ---

    def start(self) -> None:
        """Start to send requests."""
        self._thread.start()

    def begin(self, token: Token, step: int, members: Mapping[str, int]) -> None:
        """Begin a txn: request its quorum."""
        with self._changed:
            now = time.monotonic()
            self._ask = QuorumRequest(token, members, self._window_s, now)
            self._token, self._step, self._due = token, step, now
            self._changed.notify_all()

    def wait(self, token: Token) -> str | None:
        """Wait for the quorum of ``token``; return why there is none, or None.

        The result is None if there is a quorum, or if the txn has ended meanwhile.
        """
        with self._changed:
            while (ask := self._ask) is not None and ask.token == token and not ask.granted:
                if ask.failed is not None:
                    return ask.failed
                if not self._thread.is_alive():
                    return "the thread that asks the lighthouse has ended"
                self._changed.wait(self._window_s)  # the other thread gives up after timeout_s
        return None

    def end(self) -> None:
        """End the txn, which was decided or rolled back. Thread-safe."""
        with self._changed:
            ask, self._ask = self._ask, None
            now = time.monotonic()
            if ask is not None and ask.granted:
                self._failures = 0
            elif ask is not None and self._answered < ask.begun < now - self._window_s / 2:
                self._failures += 1
            self._changed.notify_all()

    @property
    def failures(self) -> int:
        """Number of txns in a row without an answer of the lighthouse."""
        return self._failures

    @property
    def reason(self) -> str:
        """Why the last call got no answer."""
        return self._reason

    def pause(self) -> None:
        """Wait for an answer, longer after each failure in a row, while the other groups go on.

        Without this, a healthy group that cannot reach the lighthouse would join and be excluded
        again forever, and would cost the others an attempt each time.
        """
        with self._changed:
            if self._failures == 0:
                return
            now = time.monotonic()
            units = min(2 ** (self._failures - 1), _MAX_PAUSE_WINDOWS)
            self._due = now
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or self._answered > now, units * self._window_s
            )

    def close(self) -> None:
        """End the thread after the call in progress. Idempotent."""
        with self._changed:
            self._closed, self._ask = True, None
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(2 * _CALL_S)

    # --- own thread ---

    def _run(self) -> None:
        while self._wait_until_due():
            with self._changed:
                ask, token, step = self._ask, self._token, self._step
            answer = self._call(token, step)
            now = time.monotonic()
            late: set[str] = set()
            with self._changed:
                if isinstance(answer, float):
                    self._due = now + answer
                else:
                    self._answered = now
                    progress = self._note(answer)
                    if (ask := self._ask) is not None:
                        late = ask.on_reply(answer, now)
                    self._due = now + self._pace(ask, progress)
                failed = ask is self._ask and self._fail(ask, now)
                self._changed.notify_all()
            if ask is not None and late:
                self._listener.on_missing_groups(ask.token, late)
            if ask is not None and failed:
                self._listener.on_no_quorum(ask.token, ask.failed or "")

    def _wait_until_due(self) -> bool:
        """Wait for the next call; return False when closed."""
        with self._changed:
            while not self._closed and (left := self._due - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self._closed

    def _note(self, answer: Mapping[str, ListedGroup]) -> bool:
        """Store the positions of the other groups; return whether one of them has moved since."""
        before, self._seen = self._seen, {group: named.token for group, named in answer.items()}
        mine = self._me.group
        return any(before.get(g) != token for g, token in self._seen.items() if g != mine)

    def _pace(self, ask: QuorumRequest | None, progress: bool) -> float:
        """Return the seconds until the next call."""
        if ask is not None and not ask.granted and ask.failed is None:
            return _POLL_S
        if ask is None and progress:  # the others are working, and their calls wait for this one
            return 0.0
        return self._window_s / _IDLE_CALLS_PER_WINDOW

    def _fail(self, ask: QuorumRequest | None, now: float) -> bool:
        """Mark the request as failed if its time is over. Return whether this call did so."""
        if (
            ask is None
            or ask.granted
            or ask.failed is not None
            or now - ask.begun < self._timeout_s
        ):
            return False
        heard = self._answered >= ask.begun
        said = (
            "at least one group is not listed, or has not started this txn"
            if heard
            else self._reason
        )
        ask.failed = f"no quorum of the lighthouse in {self._timeout_s:g} s: {said}"
        return True

    def _call(self, token: Token, step: int) -> dict[str, ListedGroup] | float:
        """Make one call; return the answer, or the seconds until the next call with ``reason``
        set."""
        server, settings = self._beacon.server, self._beacon.settings
        unreachable = f"the lighthouse at {self._beacon.lighthouse} cannot be reached"
        if server is None:
            self._reason = f"{unreachable}: {self._beacon.unreachable_reason}"
            return _RETRY_AFTER_ERROR_S
        try:
            if self._client is None:
                self._client = LighthouseClient(
                    self._beacon.lighthouse, connect_timeout=settings["connect_timeout"]
                )
            quorum = self._client.quorum(
                replica_id=settings["replica_id"],
                timeout=timedelta(seconds=min(_CALL_S, self._timeout_s)),
                address=server.address(),
                store_address=settings["store_addr"],
                step=step,
                world_size=settings["world_size"],
                shrink_only=False,
                data={"fft": [self._me.group, self._me.inc, token.epoch, token.txn]},
            )
        except TimeoutError:
            self._reason = "it waits for other groups, which its dashboard lists"
            return 0.0
        except (RuntimeError, ValueError) as error:
            self._reason = f"{unreachable}: {str(error).split(', details')[0][:200]}"
            return _RETRY_AFTER_ERROR_S
        return {who: named for entry in quorum.participants for who, named in _read(entry.data)}


def _read(data: Any) -> list[tuple[str, ListedGroup]]:
    """Return the requesting group, or an empty list for a client that is not FFT."""
    said = data.get("fft") if isinstance(data, dict) else None
    match said:
        case [str(group), int(inc), int(epoch), int(txn)]:
            return [(group, ListedGroup(inc, Token(epoch, txn)))]
    if data:
        logger.debug("an unknown member in the lighthouse's quorum: %s", json.dumps(data)[:200])
    return []


__all__ = [
    "LighthouseBeacon",
    "Membership",
    "QuorumClient",
    "QuorumListener",
    "init_torchft_manager",
]
