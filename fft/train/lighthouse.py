"""What is left of torchft's lighthouse: heartbeats for its dashboard, and its say, if it is asked.

The job's membership is decided in the head register. A lighthouse that is given gets torchft's
heartbeats; with ``membership="lighthouse"`` it is asked in every txn too, and no txn commits
without a quorum of it that names every group of the epoch. Uses torchft and threads of its own;
knows nothing of the engine.

Only the first rank of a group asks. COMMIT needs everyone's YES, so that its waiting holds for all;
and torchft's own way, by a call of every rank to the group's server, does not outlive a rollback:
that server pairs calls by their order, so a rank that was rolled back before it called stays one
quorum behind its mates for ever.

An answer counts for a txn if every group of the epoch had asked *in this txn*, which each says in
the ``data`` of its call: so all who get one answer judge it alike, and ask again together.
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
from inspect import BoundArguments
from types import FunctionType
from typing import Any, Literal, NamedTuple, Protocol, get_args
from urllib.parse import urlsplit

from torchft.coordination import LighthouseClient
from torchft.manager import Manager, ManagerServer

from fft.messages.protocol import Peer, Token
from fft.util.errors import FftError

logger = logging.getLogger(__name__)

Membership = Literal["register", "lighthouse"]

_NOWHERE = "none"
"""In the place of an address: torchft's constructor wants one."""
_CONNECT_S = 1.0
"""For one attempt to reach a lighthouse; a thread that is in torchft's code cannot be ended."""
_RETRY_S = 1.0
"""Between two attempts to reach a lighthouse that is not there."""
_CALL_S = 1.0
"""For one call; one that gets no answer is made again, and `close` waits for it at most."""
_AGAIN_S = 0.01
"""Between an answer that does not settle a txn and the next call."""
_REFUSED_S = 0.1
"""Between a call that a lighthouse did not take and the next one; torchft's heartbeat interval."""
_IDLE_PART = 4
"""Who needs no answer asks so often in a window all the same: who asks is alive."""
_LONGEST_PAUSE = 64
"""Windows; the longest wait of a group that the lighthouse does not answer before it comes back."""


def membership_of(given: str | None) -> Membership:
    """What was chosen, by ``membership=`` or ``FFT_MEMBERSHIP``. Raises FftError."""
    for known in get_args(Membership):
        if (given or "register") == known:
            return known  # type: ignore[no-any-return]
    known_ones = " or ".join(map(repr, get_args(Membership)))
    raise FftError(f"membership={given!r} (or FFT_MEMBERSHIP): it is {known_ones}")


def construct(manager: Manager, called: BoundArguments) -> None:
    """Run torchft's constructor, with `Beacon` for its server and nothing for its client.

    Not by putting other classes into torchft's module, which every manager of the process would
    see: the constructor's code runs as a function with names of its own.

    Raises:
        FftError: the lighthouse's address is none.
    """
    address = called.arguments.get("lighthouse_addr") or os.environ.get("TORCHFT_LIGHTHOUSE")
    called.arguments["lighthouse_addr"] = address or _NOWHERE
    plain = Manager.__init__
    names = {**plain.__globals__, "ManagerServer": Beacon, "ManagerClient": _NoClient}
    code, defaults, cells = plain.__code__, plain.__defaults__, plain.__closure__
    init = FunctionType(code, names, plain.__name__, defaults, cells)
    init.__kwdefaults__ = plain.__kwdefaults__
    try:
        init(manager, *called.args, **called.kwargs)
    except BaseException:
        if (beacon := vars(manager).get("_manager")) is not None:
            beacon.shutdown()
        raise


class _NoClient:
    """In the place of torchft's ManagerClient: FFT makes no calls to the group's server."""

    def __init__(self, _addr: str, connect_timeout: timedelta) -> None:
        pass


class Beacon:
    """In the place of torchft's ManagerServer: makes one as soon as the lighthouse is there.

    That serves the dashboard's kill button and sends the heartbeats, from threads of torchft's.
    Without an address there is no server, no thread and no socket.
    """

    def __init__(self, lighthouse_addr: str, **settings: Any) -> None:
        """``settings`` are those of ManagerServer. Raises FftError: the address is none."""
        self.lighthouse = None if lighthouse_addr == _NOWHERE else lighthouse_addr
        self.settings = settings
        self.server: Any = None
        self.trouble = "it has not been reached yet"
        """Why there is no server, while there is none."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if self.lighthouse is None:
            return
        self._place = _place(self.lighthouse)
        limit = min(settings["connect_timeout"], timedelta(seconds=_CONNECT_S))
        self.settings = {**settings, "connect_timeout": limit}
        self._thread = threading.Thread(target=self._run, name="fft-lighthouse", daemon=True)
        self._thread.start()

    def address(self) -> str:
        """What torchft puts into the group's store; nobody of FFT asks there."""
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
                # a socket first: torchft's code could not be left while nobody answers
                socket.create_connection(self._place, _CONNECT_S).close()
                server = ManagerServer(lighthouse_addr=self.lighthouse, **self.settings)
            except (OSError, RuntimeError) as error:
                self.trouble = str(error)[:200]
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


def _place(address: str) -> tuple[str, int]:
    """Host and port of a lighthouse. Raises FftError."""
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


class Named(NamedTuple):
    """A group in an answer: which process asked, and in which txn."""

    inc: int
    token: Token


@dataclass
class Ask:
    """What one txn wants of the lighthouse, and has heard of it. Pure: it is fed with times."""

    token: Token
    members: Mapping[str, int]
    """Groups of the epoch, each with the incarnation of its first rank."""
    window_s: float
    begun: float
    had: bool = False
    """A quorum of this txn names them all."""
    failed: str | None = None
    """Why there was none in time."""
    _unnamed: dict[str, float] = field(default_factory=dict)

    def hear(self, answer: Mapping[str, Named], now: float) -> set[str]:
        """Take in an answer. Returns the groups that were named in none for ``window_s``."""
        here = {g: answer[g].token for g, inc in self.members.items() if _is_in(answer, g, inc)}
        self.had = self.had or all(here.get(group) == self.token for group in self.members)
        missing = self.members.keys() - here.keys()
        self._unnamed = {group: self._unnamed.get(group, now) for group in missing}
        late = {group for group, since in self._unnamed.items() if now - since >= self.window_s}
        self._unnamed.update(dict.fromkeys(late, now))
        return late


def _is_in(answer: Mapping[str, Named], group: str, inc: int) -> bool:
    return group in answer and answer[group].inc == inc


class Doubter(Protocol):
    """What `Quorums` finds, said on its thread; returns soon, and raises nothing."""

    def unnamed(self, token: Token, groups: set[str]) -> None:
        """The quorum of this txn does not name these groups of the epoch."""

    def failed(self, token: Token, why: str) -> None:
        """There was no quorum for this txn in time."""


class Quorums:
    """Asks the lighthouse, on a thread of its own, for as long as the manager lives.

    Also outside of txns, and of the epoch: the lighthouse waits for all whose heartbeats it gets,
    so that who does not ask holds up the others, and a group that comes in must be known to it.
    """

    def __init__(
        self,
        beacon: Beacon,
        me: Peer,
        timeout_s: float,
        window_s: float,
        doubter: Doubter,
    ) -> None:
        """``timeout_s``: for a txn's quorum. ``window_s``: for the naming of a member.

        Raises FftError: there is no lighthouse to ask.
        """
        if beacon.lighthouse is None:
            raise FftError(
                "membership='lighthouse' needs torchft's lighthouse: pass lighthouse_addr=, or set "
                "TORCHFT_LIGHTHOUSE to what `fft serve` prints"
            )
        self._beacon = beacon
        self._me = me
        self._timeout_s, self._window_s = timeout_s, window_s
        self._doubter = doubter
        self._client: Any = None
        self._changed = threading.Condition()
        self._ask: Ask | None = None
        self._token, self._step = Token(0, 0), 0
        """As last asked for; said outside of txns, too."""
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
        """Ask from now on."""
        self._thread.start()

    def begin(self, token: Token, step: int, members: Mapping[str, int]) -> None:
        """A txn begins: ask for its quorum."""
        with self._changed:
            now = time.monotonic()
            self._ask = Ask(token, members, self._window_s, now)
            self._token, self._step, self._due = token, step, now
            self._changed.notify_all()

    def wait(self, token: Token) -> str | None:
        """Wait for the quorum of ``token``. Why there is none; None: had, or asked for no more."""
        with self._changed:
            while (ask := self._ask) is not None and ask.token == token and not ask.had:
                if ask.failed is not None:
                    return ask.failed
                if not self._thread.is_alive():
                    return "the thread that asks the lighthouse has ended"
                self._changed.wait(self._window_s)  # the other thread gives up after timeout_s
        return None

    def end(self) -> None:
        """The txn is decided, or rolled back. Any thread."""
        with self._changed:
            ask, self._ask = self._ask, None
            now = time.monotonic()
            if ask is not None and ask.had:
                self._failures = 0
            elif ask is not None and self._answered < ask.begun < now - self._window_s / 2:
                self._failures += 1
            self._changed.notify_all()

    @property
    def failures(self) -> int:
        """Txns in a row that the lighthouse gave no answer in."""
        return self._failures

    @property
    def reason(self) -> str:
        """Why the last call was not answered."""
        return self._reason

    def pause(self) -> None:
        """The others go on without this group: wait for an answer, longer each time in a row.

        Without it a group that is well, but cannot reach the lighthouse, would come in and be left
        out again for ever, and cost the others an attempt each time.
        """
        with self._changed:
            if self._failures == 0:
                return
            now = time.monotonic()
            units = min(2 ** (self._failures - 1), _LONGEST_PAUSE)
            self._due = now
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or self._answered > now, units * self._window_s
            )

    def close(self) -> None:
        """End the thread; a call that is out is waited for. Idempotent."""
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
                        late = ask.hear(answer, now)
                    self._due = now + self._pace(ask, progress)
                failed = ask is self._ask and self._fail(ask, now)
                self._changed.notify_all()
            if ask is not None and late:
                self._doubter.unnamed(ask.token, late)
            if ask is not None and failed:
                self._doubter.failed(ask.token, ask.failed or "")

    def _wait_until_due(self) -> bool:
        """Whether there is more to do: False when closed."""
        with self._changed:
            while not self._closed and (left := self._due - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self._closed

    def _note(self, answer: Mapping[str, Named]) -> bool:
        """Remember where the others are; whether one of them has gone on since."""
        before, self._seen = self._seen, {group: named.token for group, named in answer.items()}
        mine = self._me.group
        return any(before.get(g) != token for g, token in self._seen.items() if g != mine)

    def _pace(self, ask: Ask | None, progress: bool) -> float:
        """Seconds to the next call."""
        if ask is not None and not ask.had and ask.failed is None:
            return _AGAIN_S
        if ask is None and progress:  # the others are at work, and their calls wait for mine
            return 0.0
        return self._window_s / _IDLE_PART

    def _fail(self, ask: Ask | None, now: float) -> bool:
        """Give the txn's quorum up, if it is time to."""
        if ask is None or ask.had or ask.failed is not None or now - ask.begun < self._timeout_s:
            return False
        heard = self._answered >= ask.begun
        said = "some group is not named, or has not come to this txn" if heard else self._reason
        ask.failed = f"no quorum of the lighthouse in {self._timeout_s:g} s: {said}"
        return True

    def _call(self, token: Token, step: int) -> dict[str, Named] | float:
        """One call: the answer; or seconds to the next call, and ``reason`` says why."""
        server, settings = self._beacon.server, self._beacon.settings
        unreachable = f"the lighthouse at {self._beacon.lighthouse} cannot be reached"
        if server is None:
            self._reason = f"{unreachable}: {self._beacon.trouble}"
            return _REFUSED_S
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
            self._reason = "it waits for others; its dashboard says for whom"
            return 0.0
        except (RuntimeError, ValueError) as error:
            self._reason = f"{unreachable}: {str(error).split(', details')[0][:200]}"
            return _REFUSED_S
        return {who: named for entry in quorum.participants for who, named in _read(entry.data)}


def _read(data: Any) -> list[tuple[str, Named]]:
    """Who asked: none, if it was not a group of FFT."""
    said = data.get("fft") if isinstance(data, dict) else None
    match said:
        case [str(group), int(inc), int(epoch), int(txn)]:
            return [(group, Named(inc, Token(epoch, txn)))]
    if data:
        logger.debug("an unknown member in the lighthouse's quorum: %s", json.dumps(data)[:200])
    return []


__all__ = ["Beacon", "Doubter", "Membership", "Quorums", "construct", "membership_of"]
