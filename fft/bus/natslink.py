"""One client's link to a NATS JetStream service: address, loop thread, connection and retries.

It uses the network only through nats-py, which is imported here and nowhere else in `fft`. It deals
with streams, subjects and sequence numbers, not with registers, ballots and inboxes.

nats-py is based on asyncio while the callers are threads. Each `NatsLink` therefore has one loop
thread, which `close` ends. The coroutines of this class run on it; a thread calls one with `run`.

**Retries.** An answer can be lost with the connection or the server. `repeat` sends the request
again, with growing pauses, until the bus's timeout is over, so the request must be idempotent.
While no server answers, the client reconnects to any of the servers, with pauses from 20 ms to 1 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote

import nats
import nats.errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg

from fft.bus.addresses import without_password
from fft.bus.base import BusClosed, BusForgot, BusUnreachable, check_job
from fft.bus.token import TOKEN_USER, JobToken, password_of
from fft.errors import BusError
from fft.util.chance import CHANCE

T = TypeVar("T")
Headers = dict[str, str]

PATIENCE: Final = 4
"""Number of timeouts without an answer after which the bus is lost for good. An election takes
less: servers wait 4 to 9 s, which is not configurable, before they elect another leader."""

HEADROOM: Final = 1024  # maximum bytes of headers beside a payload

_FIRST_PAUSE_S: Final = 0.01
_LAST_PAUSE_S: Final = 0.2
_RECONNECT_S: Final = (0.02, 1.0)  # first and longest pause before a server is tried again
_ATTEMPT_S: Final = (0.5, 1.5)  # first and longest wait until an answer is assumed to be lost
_CONNECT_S: Final = 2  # longest wait for one server; a host that was lost answers nothing
_PING_S: Final = 1  # interval of pings; the client drops a server after two unanswered ones
_GRACE_S: Final = 2.0  # extra time on a busy machine before a thread gives up on its coroutine
_CLOSE_S: Final = 0.5
_FORGOTTEN_AFTER: Final = 3  # answers in a row that the stream is missing or has another generation
_DOUBT_S: Final = 0.25  # pause between these checks

NOT_FOUND, NAME_TAKEN, ONE_SERVER = 10059, 10058, 10074  # the server's error codes
_WRONG_SEQUENCE = frozenset({10071, 10164})
_BUSY = frozenset({10005, 10158})  # no peers yet; the same message is in flight


class Again(Exception):
    """The answer is missing, partial or stale; send the request again."""


class WrongSequence(Exception):
    """The subject's last message is not the expected one; nothing was stored."""


class ApiError(BusError):
    """The server refused a request; `code` is the server's error code."""

    def __init__(self, url: str, code: int, text: str) -> None:
        super().__init__(f"the NATS server of {url} refused: {text} (error {code})")
        self.code = code


class Stored(NamedTuple):
    """A message in a stream."""

    seq: int
    subject: str
    payload: bytes
    headers: Headers


@dataclass(frozen=True)
class Address:
    """The settings of a connection, from the bus URL and the environment."""

    servers: list[str]
    job: str
    shown: str
    """The URL without its password, for messages."""
    user: str | None = None
    password: str | None = None
    tls: ssl.SSLContext | None = None
    creds: str | None = None


SCHEMES: Final = ("nats", "tls")
_FORM: Final = "write nats://[user:password@]host:port[,host:port...]/job, tls:// with encryption"


def parse_url(url: str, token: JobToken | None = None) -> Address:
    """Parse `url` and `FFT_NATS_*`; raise `BusError` if either is invalid."""
    scheme, _, rest = url.partition("://")
    place, _, job = rest.partition("/")
    login, at, hosts = place.rpartition("@")
    user, _, password = login.partition(":")
    shown = without_password(url)
    if scheme not in SCHEMES or "?" in job or "#" in job:
        raise BusError(f"bus URL {shown!r}: {_FORM}")
    servers = [_server(scheme, one, shown) for one in hosts.split(",")]
    check_job(job, shown)
    if login == TOKEN_USER:
        if token is None:
            raise BusError(
                f"bus URL {shown!r}: the servers need the login of the job token: set "
                "FFT_TOKEN_FILE; `fft serve` and `fft run` print it"
            )
        password = password_of(token)
    return Address(
        servers,
        job,
        shown,
        user=unquote(user) if at else None,
        password=unquote(password) if password else None,
        tls=_tls(shown) if scheme != "nats" else None,
        creds=None if login == TOKEN_USER else _creds(shown),
    )


def _server(scheme: str, place: str, shown: str) -> str:
    host, colon, port = place.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BusError(f"bus URL {shown!r}: {place!r} is no host:port; {_FORM}")
    return f"{'nats' if scheme == 'nats' else 'tls'}://{host}:{port}"


def _tls(shown: str) -> ssl.SSLContext:
    try:
        folder = os.environ.get("FFT_NATS_TLS")
        context = ssl.create_default_context(cafile=folder and f"{folder}/ca.crt")
        if folder and os.path.exists(cert := f"{folder}/tls.crt"):
            context.load_cert_chain(cert, f"{folder}/tls.key")
    except OSError as error:
        raise BusError(
            f"bus URL {shown!r}: {error}: check ca.crt, tls.crt, tls.key in FFT_NATS_TLS={folder}"
        ) from error
    return context


def _creds(shown: str) -> str | None:
    path = os.environ.get("FFT_NATS_CREDS")
    if path is not None and not os.access(path, os.R_OK):
        raise BusError(f"bus URL {shown!r}: FFT_NATS_CREDS names {path!r}, which cannot be read")
    return path


class NatsLink:
    """A connection that lasts until `close`, or until `PATIENCE` timeouts without an answer."""

    def __init__(self, address: Address, timeout: float) -> None:
        self.address = address
        self.url = address.shown
        self.timeout = timeout
        self.still_ours: Callable[[], Awaitable[bool | None]] | None = None
        """Check whether the service still has this generation; None if it does not answer."""
        self.on_failure: Callable[[BusError], None] = lambda error: None
        self.on_reconnect: Callable[[], None] = lambda: None
        self._failure: BusError | None = None
        self._closed = False
        self._closing = threading.Lock()
        self._answered = time.monotonic()
        self._denials = 0
        self._doubting: asyncio.Task[None] | None = None
        self._attempts: set[asyncio.Timeout] = set()
        self._client = Client()
        self._replies: dict[str, asyncio.Queue[Msg]] = {}
        self._reply_to = ""
        self._last_error = "no answer"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="fft-bus-loop", daemon=True)
        self._thread.start()

    # ---- threads

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in (left := asyncio.all_tasks(self._loop)):
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=_CLOSE_S))
            self._loop.close()

    def run(self, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop and wait for its result, up to the timeout."""
        self.check()
        if threading.current_thread() is self._thread:
            raise BusError("the bus cannot be used from its own loop thread")
        coroutine = self._bounded(operation)
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # the loop has ended
            coroutine.close()
            raise self._closed_error() from error
        try:
            return future.result(self.timeout + _GRACE_S)
        except CancelledError as error:
            raise self._closed_error() from error
        except TimeoutError as error:
            future.cancel()
            raise BusUnreachable(self.url, self._last_error) from error

    async def _bounded(self, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            async with asyncio.timeout(self.timeout):
                return await operation()
        except TimeoutError as error:
            raise BusUnreachable(self.url, self._last_error) from error

    def spawn(self, operation: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a coroutine on the loop from any thread, without waiting for it."""
        coroutine = operation()
        try:
            asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop has ended
            coroutine.close()

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the loop, from any thread; do nothing once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def check(self) -> None:
        """Raise the error that ended this link, if it has ended."""
        if self._closed:
            raise self._closed_error()
        if self._failure is not None:
            if isinstance(self._failure, BusForgot):
                raise BusForgot(str(self._failure))
            raise BusUnreachable(self.url, self._last_error)

    def _closed_error(self) -> BusClosed:
        return BusClosed(f"the bus {self.url} was closed; open it again with open_bus")

    def close(self) -> None:
        """End connection, loop and thread. Idempotent; not to be called on the loop thread."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        closing = asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop)
        with contextlib.suppress(TimeoutError, CancelledError):
            closing.result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S * 2)

    async def _hang_up(self) -> None:
        # the loop ends anyway; on a lost connection, Python 3.12 raises TypeError for unsent data
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._client.close(), _CLOSE_S)

    # ---- the connection

    async def connect(self) -> None:
        """Connect to the first server that answers; raise `BusUnreachable` if none does in time."""
        address = self.address
        # nats-py types the pause as an int but accepts a fraction. It must not shuffle the servers
        # itself: that would draw from the random numbers of the user's script.
        options: dict[str, Any] = {"reconnect_time_wait": _RECONNECT_S[0], "dont_randomize": True}
        if address.tls:
            options["tls"] = address.tls
        try:
            await asyncio.wait_for(
                self._client.connect(
                    CHANCE.sample(address.servers, len(address.servers)),
                    name=f"fft {address.job}",
                    user=address.user,
                    password=address.password,
                    user_credentials=address.creds,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    max_reconnect_attempts=-1,
                    reconnect_to_server_handler=_Backoff(),
                    connect_timeout=_CONNECT_S,
                    ping_interval=_PING_S,
                    pending_size=64 * 1024 * 1024,
                    **options,
                ),
                self.timeout,
            )
        except (nats.errors.Error, OSError) as error:
            raise BusUnreachable(self.url, _reason(error, self._last_error)) from error
        self._reply_to = self._client.new_inbox()
        await self._client.subscribe(f"{self._reply_to}.*", cb=self._on_reply)
        self._answered = time.monotonic()

    async def _on_error(self, error: Exception) -> None:
        self._last_error = _reason(error, self._last_error)

    async def _on_disconnected(self) -> None:
        """End all attempts at once: their answers were lost with the old connection."""
        now = asyncio.get_running_loop().time()
        for attempt in self._attempts:
            if not attempt.expired():
                attempt.reschedule(now)

    async def _on_reconnected(self) -> None:
        self.on_reconnect()

    async def _on_reply(self, message: Msg) -> None:
        queue = self._replies.get(message.subject.rpartition(".")[2])
        if queue is not None:
            queue.put_nowait(message)

    async def hear(self, subject: str, on_note: Callable[[Headers], None]) -> Callable[[], None]:
        """Call `on_note` with the headers of each message on `subject`.

        Returns a function that unsubscribes.
        """

        async def heard(message: Msg) -> None:
            on_note(message.headers or {})

        heard_at = await self._client.subscribe(subject, cb=heard)

        def end() -> None:
            self.spawn(lambda: _unsubscribe(heard_at))

        return end

    # ---- asking

    async def repeat(self, once: Callable[[float], Awaitable[T]]) -> T:
        """Return the result of `once(seconds)`; call it again on `Again` or without an answer.

        Raises `BusUnreachable` when the timeout is over; the request may or may not have taken
        effect.
        """
        deadline = time.monotonic() + self.timeout
        pause, (limit, longest) = _FIRST_PAUSE_S, _ATTEMPT_S
        while True:
            self.check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise BusUnreachable(self.url, self._last_error)
            try:
                return await self._attempt(once, min(left, limit))
            except Again as error:
                self._last_error = _reason(error, self._last_error)
                self._answered = time.monotonic()
            except (nats.errors.Error, OSError) as error:
                self._last_error = _reason(error, self._last_error)
                self._doubt()
            await asyncio.sleep(min(pause * CHANCE.uniform(0.5, 1), max(left, 0)))
            pause, limit = min(pause * 2, _LAST_PAUSE_S), min(limit * 2, longest)

    async def _attempt(self, once: Callable[[float], Awaitable[T]], limit: float) -> T:
        async with asyncio.timeout(limit) as attempt:
            self._attempts.add(attempt)
            try:
                found = await once(limit)
            finally:
                self._attempts.discard(attempt)
        self._answered, self._denials = time.monotonic(), 0
        return found

    def _doubt(self) -> None:
        """Check in the background, after a missing answer, whether the service lost its data.

        Fails the link if no server has answered for `PATIENCE` timeouts.
        """
        if time.monotonic() - self._answered > PATIENCE * self.timeout:
            self._fail(BusUnreachable(self.url, self._last_error))
        elif self._doubting is None or self._doubting.done():
            self._doubting = asyncio.get_running_loop().create_task(self._ask_whose())

    async def _ask_whose(self) -> None:
        """Check the generation, and fail the link after `_FORGOTTEN_AFTER` denials in a row."""
        ours = await self.still_ours() if self.still_ours is not None else None
        self._denials = self._denials + 1 if ours is False else 0
        if self._denials >= _FORGOTTEN_AFTER:
            self._fail(BusForgot(f"the bus at {self.url} has come back empty: it forgot the job"))
        await asyncio.sleep(_DOUBT_S)

    def _fail(self, error: BusError) -> None:
        if self._failure is None:
            self._failure = error
            self.on_failure(error)

    async def publish(
        self, subject: str, payload: bytes, headers: Headers | None, limit: float
    ) -> dict[str, Any]:
        """Publish a message in one attempt; return the acknowledgement that it is committed."""
        self.fits(payload)
        reply = await self._client.request(subject, payload, limit, headers=headers)
        return self._answer(reply.data)

    def fits(self, payload: bytes) -> None:
        """Raise `BusError` if `payload` is too long for the server."""
        if len(payload) + HEADROOM > self._client.max_payload:
            raise BusError(
                f"the NATS server of {self.url} takes messages of {self._client.max_payload} bytes "
                f"with their headers, not of {len(payload)}: set max_payload: 8MB there"
            )

    async def api(self, name: str, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """Send one request to the JetStream API in one attempt; return the answer."""
        body = json.dumps(request).encode()
        reply = await self._client.request(f"$JS.API.{name}", body, limit)
        return self._answer(reply.data)

    def _answer(self, data: bytes) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(data)
        error = found.get("error")
        if error is None:
            return found
        code, text = int(error.get("err_code", 0)), str(error.get("description", error))
        if code in _WRONG_SEQUENCE:
            raise WrongSequence(text)
        if code in _BUSY or (int(error.get("code", 0)) >= 500 and code != ONE_SERVER):
            raise Again(text)
        raise ApiError(self.url, code, text)

    async def get(self, stream: str, request: dict[str, Any], limit: float) -> list[Stored]:
        """Return messages that one replica holds, by a batched direct get in one attempt.

        All of them are committed; the replica may lag, so the newest may be missing.
        """
        token = os.urandom(8).hex()
        queue = self._replies[token] = asyncio.Queue()
        try:
            await self._client.publish(
                f"$JS.API.DIRECT.GET.{stream}",
                json.dumps(request).encode(),
                f"{self._reply_to}.{token}",
            )
            async with asyncio.timeout(limit):
                return await self._collect(queue)
        finally:
            del self._replies[token]

    async def _collect(self, queue: asyncio.Queue[Msg]) -> list[Stored]:
        found: list[Stored] = []
        while True:
            message = await queue.get()
            headers = message.headers or {}
            status = headers.get("Status")
            if status == "503":
                raise nats.errors.NoRespondersError
            if status == "404":
                return []
            last = found[-1].seq if found else 0
            if int(headers.get("Nats-Last-Sequence") or 0) != last:
                raise Again("a part of the answer was lost")
            if status == "204":
                return found
            if status is not None:
                raise Again(f"direct get: {status} {headers.get('Description', '')}")
            seq, subject = int(headers["Nats-Sequence"]), headers["Nats-Subject"]
            found.append(Stored(seq, subject, message.data, headers))


class _Backoff:
    """Choose among the servers tried least, with a pause that grows with the failed attempts."""

    def __call__(self, servers: list[Server], _: dict[str, Any]) -> tuple[Server, float]:
        fewest = min(server.reconnects for server in servers)
        chosen = CHANCE.choice([server for server in servers if server.reconnects == fewest])
        first, longest = _RECONNECT_S
        pause: float = min(first * 2.0 ** min(fewest, 16), longest)
        return chosen, pause * CHANCE.uniform(0.5, 1)


async def _unsubscribe(subscription: Any) -> None:
    with contextlib.suppress(nats.errors.Error, OSError):
        await subscription.unsubscribe()


def _reason(error: BaseException, before: str) -> str:
    """Return the first line of `str(error)`, or `before` for an error without information."""
    mute = (TimeoutError, nats.errors.TimeoutError, BrokenPipeError, ConnectionResetError)
    if isinstance(error, mute):
        return before
    return (str(error).splitlines() or [type(error).__name__])[0]
