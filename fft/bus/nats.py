"""The bus over NATS JetStream: `nats://[user:password@]host:port[,host:port...]/job`.

The user `job-token` without a password logs in to servers that FFT has started (natsserver.py): the
password is derived from the job token.

`tls://` encrypts. The environment configures the client: `FFT_NATS_CREDS` (a credentials file) and
`FFT_NATS_TLS` (a folder with `ca.crt`, and the client's `tls.crt` and `tls.key`). It needs
nats-server 2.12 or later with JetStream and `max_payload: 8MB`, and the extra `nats` of this
package. On a cluster, streams have three replicas.

Each job uses these streams, and subjects under `fft.<job>.<generation>.` (`~` for `.` in names):

- `fft-<job>`                state, at most `_HISTORY` messages per subject, all below `s.`:
  `r.<key>` registers, `c.<key>` counters, `b.<slot>.<tag>.<id>` a vote too long for a header,
  `i.<inbox>.<id>` one message to an inbox, `mark` the barrier of reads
- `fft-<job>-<gen>-tally`    `t.<slot>.<tag>`: votes, counted by the server
- `fft-<job>-<gen>-ring`     `m`: the last `RING_MESSAGES` broadcasts, numbered without gaps.
  Each topic other than the protocol has such a stream, `…-ring-<topic>`, with `p.<topic>`, created
  when it is first used: in a shared stream a gap in one topic's numbers would be invisible

**Generation.** A random string in the metadata of the first stream, created with it. It is part of
all subjects, so a client of a bus that came back empty cannot write to the new one: no stream
accepts its messages, so the client reads the metadata and raises `BusForgot`.

**Guarantees of the server** (nats-server: server/raft.go, server/jetstream_batching.go, read at
2.15; ADR-31 for direct get). A publish is acknowledged when a majority has it in its Raft log and
the leader has applied it. The leader checks `Nats-Expected-Last-Subject-Sequence` before it
proposes, against all messages that it has applied, and refuses if another message on that subject
is in flight. A new leader checks no condition before it has applied its inherited log. So an
acknowledged conditional publish is a linearizable compare-and-set. A *refusal* proves nothing: it
comes from a server that believes to be the leader, and a deposed leader may believe so for 10 to
20 s (`lostQuorumCheck`, `lostQuorumInterval`). The same holds for answers to `STREAM.MSG.GET`, and
any replica answers a direct get; there is no lease and no read index.

**Reads.** A read therefore publishes `mark`, which commits with number S, and requests the last
messages of the register and of `mark` from some replica in one request. If the replica has S, it
also has everything that was committed before; otherwise the request is repeated.

**compare_set** publishes on condition that the value's sequence number is still the last. If the
acknowledgement is lost, it publishes the same message (same `Nats-Msg-Id`) again. The server then
answers with the number that the message has, or refuses because the register has changed (a single
server refuses even if this message changed it). After a refusal the client reads the message that
followed the expected value; it has won if that message carries its id. The last `_HISTORY` values
are kept for this. If more values came in between, the outcome is unknown and `BusUnreachable` is
raised.

**Counters** are registers. They are read from any replica, because only a successful write counts.

**Votes** are increments of a server-side counter (ADR-49). An increment carries the vote in a
header, or the name of a message that holds it, so simultaneous voters cost no more than consecutive
ones. The voter that brings the count to `voters` reads all increments up to its own number.

**Messages** are broadcast with an id, and repeated with it until acknowledged; the server drops
duplicates (within 2 minutes). Republished headers wake the listeners, which fetch new messages by
direct get in the order of numbers. They also poll occasionally, since a wake-up can be lost. A
missing number was displaced by newer messages, which raises `BusOverrun`. A new subscriber
broadcasts an empty message that listeners skip; the number of that message is where its
subscription begins.

**Losses.** An operation waits up to `timeout` for a change of leader or server, then raises
`BusUnreachable`. The bus object remains usable; it is lost for good only after `PATIENCE` timeouts
without an answer. A follower stands for election 4 to 9 s after the last message of a killed leader
(server/raft.go, `minElectionTimeoutDefault`; not configurable). The loss of a leader costs that
time, and more if votes are split, so give a replicated bus a timeout of 15 s or more
(`fft.protocol.timeouts` does). A leader that gets SIGTERM hands over first, which costs one answer.
An acknowledged message is not necessarily on disk: the server syncs every 2 minutes unless
`sync_interval: always` is set. Killed servers lose nothing; if a majority of machines lose power at
the same time, acknowledged messages may be lost.

**Listeners.** A task fetches new messages, and a thread delivers them. A listener reads one stream
by direct gets and, for an inbox, purges the messages that it has taken.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from fft.bus.base import (
    MAX_MESSAGE_BYTES,
    MAX_VALUE_BYTES,
    RING_MESSAGES,
    TOPICS,
    BusForgot,
    BusOverrun,
    BusUnreachable,
    ErrorBus,
    Subscription,
    Topic,
    check_bytes,
    check_key,
    check_topic,
    check_voters,
    deliver,
    overrun_text,
    report_lost,
)
from fft.bus.natslink import (
    NAME_TAKEN,
    NOT_FOUND,
    ONE_SERVER,
    Again,
    ApiError,
    Headers,
    NatsLink,
    Stored,
    WrongSequence,
    parse_url,
)
from fft.bus.token import JobToken
from fft.errors import BusError
from fft.util.chance import CHANCE

# --- natslisten ---

NUDGE: Final = "Fft-Nudge"
"""Header of a broadcast that carries no message and only reserves a number."""

_JOIN_WAIT_S: Final = 0.9  # close() promises 1 s; a callback that runs longer is left to finish
_LOOK_S: Final = (0.05, 1.0)  # first and longest interval between reads of the stream
_BEHIND_S: Final = (0.002, 0.1)  # pauses while the replica lacks a message that was announced
_GIVE_UP_S: Final = 5.0  # how long until that message is assumed to be removed
_BATCH: Final = 256
_BATCH_BYTES: Final = 4 * 1024 * 1024


class Listener(Subscription):
    """A subscription that delivers the messages of `subject` in `stream` in order of their numbers.

    With `ring`, every number of the stream belongs to `subject`, so a missing number is a lost
    message.
    """

    def __init__(
        self,
        link: NatsLink,
        stream: str,
        subject: str,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        ring: bool,
        forget: Callable[[Listener], None],
    ) -> None:
        self._link, self._stream, self._subject, self._ring = link, stream, subject, ring
        self._on_message, self._on_lost, self._forget = on_message, on_lost, forget
        self._ready = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._ended = False  # closed or lost, whichever came first
        self._error: BusError | None = None
        self._thread = threading.Thread(target=self._listen, name="fft-bus-listen", daemon=True)
        # The attributes below are used on the event loop only.
        self._next = 1
        self._announced = 0
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._deaf: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None

    # ---- on the loop

    async def open(self, note: str) -> None:
        """Subscribe to the wake-ups on the subject `note`."""
        self._deaf = await self._link.hear(note, self._note)

    def start(self, first: int) -> None:
        """Start fetching messages from number `first` on; called on the loop."""
        self._next = first
        self._task = asyncio.get_running_loop().create_task(self._fetch())
        self._thread.start()

    def look(self) -> None:
        """Make the task read the stream now."""
        self._wake.set()

    def deaf(self) -> None:
        """Unsubscribe from the wake-ups; called instead of `start`, or at the end."""
        self._deaf()

    def _note(self, headers: Headers) -> None:
        self._announced = max(self._announced, int(headers.get("Nats-Sequence", 0)))
        self._wake.set()

    async def _fetch(self) -> None:
        first, longest = _LOOK_S
        look = first
        try:
            while not self._ended:
                await self._take_all()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), look * CHANCE.uniform(0.5, 1))
                look = first if self._wake.is_set() else min(look * 2, longest)
                self._wake.clear()
        except BusError as error:
            self.lose(error)

    async def _take_all(self) -> None:
        """Fetch messages until the stream has no more and every announced one has arrived."""
        taken, pause, since = False, _BEHIND_S[0], time.monotonic()
        while not self._ended:
            try:
                found = await self._link.repeat(self._batch)
            except BusUnreachable:
                self._link.check()  # retry until the link gives up
                continue
            if found:
                taken, since = True, time.monotonic()
                await self._put(found)
            elif self._announced < self._next or time.monotonic() - since > _GIVE_UP_S:
                break
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _BEHIND_S[1])
        if taken and not self._ring:
            await self._clear()

    async def _batch(self, limit: float) -> list[Stored]:
        request = {
            "seq": self._next,
            "next_by_subj": self._subject,
            "batch": _BATCH,
            "max_bytes": _BATCH_BYTES,
        }
        return await self._link.get(self._stream, request, limit)

    async def _put(self, found: list[Stored]) -> None:
        for message in found:
            if message.seq < self._next:
                continue
            if self._ring and message.seq > self._next:
                raise BusOverrun(overrun_text("listener"))
            self._next = message.seq + 1
            if NUDGE not in message.headers:
                self._queue(message.payload)
        while not self._ring and not self._ended and len(self._waiting) > RING_MESSAGES:
            self._room.clear()
            if len(self._waiting) > RING_MESSAGES:
                await self._room.wait()

    def _queue(self, payload: bytes) -> None:
        with self._ready:
            if self._ring and len(self._waiting) >= RING_MESSAGES:
                raise BusOverrun(overrun_text("listener"))
            self._waiting.append(payload)
            self._ready.notify()

    async def _clear(self) -> None:
        """Purge the messages that were taken from the stream."""

        async def purge(limit: float) -> None:
            request = {"filter": self._subject, "seq": self._next}
            await self._link.api(f"STREAM.PURGE.{self._stream}", request, limit)

        with contextlib.suppress(BusUnreachable):  # the next purge covers these messages too
            await self._link.repeat(purge)

    # ---- on the thread

    def _listen(self) -> None:
        while True:
            with self._ready:
                while not self._waiting and not self._ended:
                    self._ready.wait()
                if self._ended:
                    break
                payload = self._waiting.popleft()
            if not self._ring and len(self._waiting) == RING_MESSAGES:
                self._link.call(self._room.set)
            deliver(self._on_message, payload)
        if self._error is not None:
            report_lost(self._on_lost, self._error)

    # ---- the end, from any thread

    def lose(self, error: BusError) -> None:
        """End the subscription and call `on_lost` with `error`, unless it has ended before."""
        if self._end(error):
            self._forget(self)

    def close(self) -> None:
        self._end(None)
        self._forget(self)
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(_JOIN_WAIT_S)

    def _end(self, error: BusError | None) -> bool:
        with self._ready:
            if self._ended:
                return False
            self._ended, self._error = True, error
            self._ready.notify()
        self._link.call(self._stop)
        return True

    def _stop(self) -> None:
        self._deaf()
        self._wake.set()
        self._room.set()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


_HISTORY: Final = 16  # values kept per register, to find the outcome of a write without an answer
_CACHE: Final = 64  # registers whose last message this client remembers
_CONFLICT_S: Final = 0.005  # longest pause after a conflict with another client
_NUMBERS: Final = 2**64
_LONG_NAME: Final = 300  # a longer one is replaced by its digest; a subject has 4096 bytes at most
_SHORT_VOTE: Final = 32 * 1024  # bytes; headers have 64 KiB at most, and votes travel in base64
_VOTE, _LONG_VOTE = "Fft-Vote", "Fft-Long-Vote"
_GENERATION: Final = "fft-generation"


def _token(name: str) -> str:
    """Return `name` as one token of a subject."""
    quoted = quote(name, safe="").replace(".", "%2E").replace("~", "%7E")
    if len(quoted) <= _LONG_NAME:
        return quoted
    return "%sha256-" + hashlib.sha256(name.encode()).hexdigest()


def _place(topic: Topic) -> str:
    """Return the subject of a topic's messages."""
    return "m" if topic == "protocol" else f"p.{topic}"


class NatsBus(ErrorBus):
    """One client of a NATS service, on one job's streams."""

    def __init__(self, url: str, timeout: float = 5.0, token: JobToken | None = None) -> None:
        address = parse_url(url, token)
        if not timeout > 0:
            raise BusError(f"the bus timeout must be more than 0 seconds, not {timeout!r}")
        self.url = address.shown
        self._job = address.job.replace(".", "~")
        self._state = f"fft-{self._job}"
        self._lock = threading.Lock()
        self._listeners: set[Listener] = set()
        self._known: OrderedDict[str, Stored] = OrderedDict()
        self._made: set[Topic] = {"protocol"}
        self._link = NatsLink(address, timeout)
        try:
            self.generation = self._link.run(self._settle)
        except BaseException:
            self._link.close()
            raise
        self._link.still_ours = self._still_ours
        self._link.on_failure = self._lost
        self._link.on_reconnect = self._look

    # ---- messages

    def broadcast(self, payload: bytes, topic: Topic = "protocol") -> None:
        check_topic(topic)
        check_bytes(payload, "a message", MAX_MESSAGE_BYTES + self.extra)

        async def say() -> None:
            await self._make(topic)
            await self._store(_place(topic), payload)

        self._link.run(say)

    def subscribe(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
        topic: Topic = "protocol",
    ) -> Subscription:
        check_topic(topic)
        place, ring = _place(topic), self._ring(topic)
        name = self._subject(place)
        listener = Listener(self._link, ring, name, on_message, on_lost, True, self._forget)

        async def begin() -> int:
            await self._make(topic)
            await listener.open(self._subject("note." + place))
            return int((await self._store(place, b"", {NUDGE: "1"}))["seq"]) + 1

        return self._start(listener, begin)

    def send(self, inbox: str, payload: bytes) -> None:
        check_key(inbox, "inbox")
        check_bytes(payload, "a message", MAX_MESSAGE_BYTES + self.extra)
        name = f"s.i.{_token(inbox)}.{secrets.token_hex(8)}"
        self._link.run(lambda: self._store(name, payload))

    def listen(
        self,
        inbox: str,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[BusError], None],
    ) -> Subscription:
        check_key(inbox, "inbox")
        name = self._subject(f"s.i.{_token(inbox)}.*")
        listener = Listener(self._link, self._state, name, on_message, on_lost, False, self._forget)

        async def begin() -> int:
            await listener.open(self._subject(f"note.i.{_token(inbox)}.*"))
            return 1

        return self._start(listener, begin)

    def _start(self, listener: Listener, begin: Callable[[], Any]) -> Subscription:
        async def start() -> None:
            try:
                first = await begin()
                with self._lock:
                    self._listeners.add(listener)
                listener.start(first)
            except BaseException:
                listener.deaf()
                raise

        self._link.run(start)
        return listener

    # ---- registers

    def read(self, key: str) -> bytes | None:
        check_key(key)
        found = self._link.run(lambda: self._last(f"s.r.{_token(key)}"))
        return None if found is None else found.payload

    def write(self, key: str, value: bytes) -> None:
        check_key(key)
        check_bytes(value, "a register value", MAX_VALUE_BYTES + self.extra)
        self._link.run(lambda: self._store(f"s.r.{_token(key)}", value))

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        check_key(key)
        check_bytes(desired, "a register value", MAX_MESSAGE_BYTES + self.extra)
        name = f"s.r.{_token(key)}"

        async def decide() -> bytes | None:
            held = None if expected is None else self._known.get(name)
            if expected is not None and (held is None or held.payload != expected):
                held = await self._last(name)
            while True:
                if held is None and expected is not None:
                    raise BusForgot(f"register {key!r} on {self.url} is gone; its value was known")
                if held is not None and held.payload != expected:
                    return held.payload
                if await self._swap(name, held.seq if held else 0, desired):
                    return desired
                held = await self._last(name)
                if held is None or held.payload == expected:  # another client's write is in flight
                    await self._conflict()

        return self._link.run(decide)

    def next_number(self, key: str) -> int:
        check_key(key)
        name = f"s.c.{_token(key)}"

        async def take() -> int:
            held = self._known.get(name) or await self._glance(name)
            while True:
                number = (int(held.payload) + 1 if held else 1) % _NUMBERS
                if await self._swap(name, held.seq if held else 0, b"%d" % number):
                    return number
                before, held = held, await self._glance(name)
                if before and held and before.seq == held.seq:
                    await self._conflict()

        return self._link.run(take)

    # ---- ballots

    def ballot(
        self, slot: str, tag: str, vote: bytes, voters: int, weight: int = 1
    ) -> list[bytes] | None:
        check_key(slot, "slot")
        check_key(tag, "tag")
        check_bytes(vote, "a vote", MAX_MESSAGE_BYTES + self.extra)
        check_voters(voters, weight)
        place = f"{_token(slot)}.{_token(tag)}"

        async def cast() -> list[bytes] | None:
            headers = {"Nats-Incr": str(weight)}
            if len(vote) <= _SHORT_VOTE:
                headers[_VOTE] = base64.b64encode(vote).decode()
            else:
                headers[_LONG_VOTE] = name = f"s.b.{place}.{secrets.token_hex(8)}"
                await self._store(name, vote)
            answer = await self._store(f"t.{place}", b"", headers)
            if int(answer.get("val", voters)) < voters:  # absent if this vote was a duplicate
                return None
            seq = int(answer["seq"])
            cast = await self._link.repeat(lambda limit: self._votes(f"t.{place}", seq, limit))
            weights = sum(int(one.headers["Nats-Incr"]) for one in cast)
            votes = [await self._vote(one) for one in cast]
            return [one for one in votes if one is not None] if weights >= voters else None

        return self._link.run(cast)

    async def _votes(self, name: str, last: int, limit: float) -> list[Stored]:
        """Return all votes up to number `last`, in order; raise `Again` if the replica lags."""
        votes: list[Stored] = []
        while not votes or votes[-1].seq < last:
            found = await self._page(self._tally, name, votes[-1].seq + 1 if votes else 1, limit)
            if not found:
                raise Again("the replica that was asked lags behind")
            votes += found
        return votes

    async def _vote(self, cast: Stored) -> bytes | None:
        """Return the vote in an increment, or None if its ballot was deleted meanwhile."""
        if _VOTE in cast.headers:
            return base64.b64decode(cast.headers[_VOTE])
        stored = await self._last(cast.headers[_LONG_VOTE])
        return None if stored is None else stored.payload

    # ---- the rest of the contract

    def delete(self, key: str) -> None:
        check_key(key)
        name = _token(key)

        async def remove() -> None:
            cast = await asyncio.gather(
                self._purge(self._state, f"s.b.{name}.>"), self._purge(self._tally, f"t.{name}.>")
            )
            if any(cast):
                return
            for one in (f"s.r.{name}", f"s.c.{name}", f"s.i.{name}.>"):
                self._known.pop(one, None)
                if await self._purge(self._state, one):
                    return

        self._link.run(remove)

    def key_count(self, messages: bool = True) -> int:
        async def count() -> int:
            streams = (self._state, self._tally, *map(self._ring, TOPICS if messages else ()))
            found = await asyncio.gather(*(self._held(stream) for stream in streams))
            state, *others = found
            return int(state.get("num_subjects", 0) + sum(one["messages"] for one in others))

        return self._link.run(count)

    def close(self) -> None:
        with self._lock:
            ending = list(self._listeners)
        for listener in ending:
            listener.close()
        self._link.close()

    # ---- streams: the coroutines below run on the loop

    def _subject(self, name: str) -> str:
        return f"fft.{self._job}.{self.generation}.{name}"

    @property
    def _tally(self) -> str:
        return f"{self._state}-{self.generation}-tally"

    def _ring(self, topic: Topic) -> str:
        ring = f"{self._state}-{self.generation}-ring"
        return ring if topic == "protocol" else f"{ring}-{topic}"

    async def _store(
        self, name: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Store a message exactly once, republishing as needed; return the server's answer."""
        subject = self._subject(name)
        marked = {"Nats-Msg-Id": secrets.token_hex(12), **(headers or {})}
        return await self._link.repeat(
            lambda limit: self._link.publish(subject, payload, marked, limit)
        )

    async def _last(self, name: str) -> Stored | None:
        """Read the last message of a register linearizably and remember it."""
        subject, mark = self._subject(name), self._subject("s.mark")

        async def look(limit: float) -> Stored | None:
            written = int((await self._link.publish(mark, b"", None, limit))["seq"])
            request = {"multi_last": [subject, mark]}
            found = {m.subject: m for m in await self._link.get(self._state, request, limit)}
            if mark not in found or found[mark].seq < written:
                raise Again("the replica that was asked lags behind")
            return found.get(subject)

        held = await self._link.repeat(look)
        self._remember(name, held)
        return held

    async def _glance(self, name: str) -> Stored | None:
        """Return some replica's last message of a register, which may be stale; for `_swap`."""
        request = {"multi_last": [self._subject(name)]}
        found = await self._link.repeat(partial(self._link.get, self._state, request))
        return found[0] if found else None

    async def _swap(self, name: str, seq: int, payload: bytes) -> bool:
        """Store `payload` if the register's last number is `seq`, or 0 for an empty register.

        Returns whether it was stored. Raises `BusUnreachable` if the outcome is unknown.
        """
        own = secrets.token_hex(12)
        headers = {"Nats-Msg-Id": own, "Nats-Expected-Last-Subject-Sequence": str(seq)}
        asked = 0

        async def attempt(limit: float) -> int | None:
            nonlocal asked
            asked += 1
            try:
                answer = await self._link.publish(self._subject(name), payload, headers, limit)
            except WrongSequence:
                if asked == 1:
                    return None
                return await self._became(name, seq, own, limit)
            return int(answer["seq"])

        stored = await self._link.repeat(attempt)
        if stored is None:
            self._known.pop(name, None)
            return False
        self._remember(name, Stored(stored, name, payload, {}))
        return True

    async def _became(self, name: str, seq: int, own: str, limit: float) -> int | None:
        """Find out after a lost answer and a refusal whether the message `own` follows `seq`.

        Returns its number if it was stored, or None if another message followed `seq`. All messages
        that are read here are committed, so a replica that lags can only cause a retry.
        """
        held = await self._page(self._state, name, 1, limit)
        for message in held:
            if message.headers.get("Nats-Msg-Id") == own:
                return message.seq
        if all(message.seq <= seq for message in held):
            raise Again("the register is not settled")
        if len(held) < _HISTORY or any(message.seq == seq for message in held):
            return None
        raise BusUnreachable(self.url, "an answer was lost, and its result was overwritten")

    async def _page(self, stream: str, name: str, first: int, limit: float) -> list[Stored]:
        request = {"seq": first, "next_by_subj": self._subject(name), "batch": 256}
        return await self._link.get(stream, request, limit)

    async def _purge(self, stream: str, name: str) -> int:
        request = {"filter": self._subject(name)}
        answer = await self._link.repeat(
            lambda limit: self._link.api(f"STREAM.PURGE.{stream}", request, limit)
        )
        return int(answer["purged"])

    def _remember(self, name: str, held: Stored | None) -> None:
        self._known.pop(name, None)
        if held is not None:
            self._known[name] = held
            if len(self._known) > _CACHE:
                self._known.popitem(last=False)

    @staticmethod
    async def _conflict() -> None:
        """Wait a short random time, because the conflicting write is not committed yet."""
        await asyncio.sleep(CHANCE.uniform(0, _CONFLICT_S))

    # ---- one life of the bus

    async def _info(self, stream: str) -> dict[str, Any]:
        return await self._link.repeat(
            lambda limit: self._link.api(f"STREAM.INFO.{stream}", {}, limit)
        )

    async def _held(self, stream: str) -> dict[str, Any]:
        """Return the state of a stream, which is empty if the stream does not exist yet."""
        try:
            state: dict[str, Any] = (await self._info(stream))["state"]
        except ApiError as error:
            if error.code != NOT_FOUND:
                raise
            return {"messages": 0}
        return state

    async def _make(self, topic: Topic) -> None:
        """See that the stream of a topic is there."""
        if topic not in self._made:
            await self._create(self._ring(topic), self._ring_config(topic))
            self._made.add(topic)

    async def _settle(self) -> str:
        """The generation of the bus; a fresh one, with its streams, if there is none."""
        await self._link.connect()
        found = await self._link.repeat(self._find)
        if found is None:
            self.generation = secrets.token_hex(8)
            try:
                await self._create(self._state, self._state_config())
            except ApiError as error:
                if error.code != NAME_TAKEN:  # another client has created it first
                    raise
            found = await self._link.repeat(self._find_made)
        self.generation = found
        await asyncio.gather(
            self._create(self._tally, self._tally_config()),
            self._create(self._ring("protocol"), self._ring_config("protocol")),
        )
        return self.generation

    async def _find_made(self, limit: float) -> str:
        """Find the state stream that was created; a cluster may deny for a while that it exists."""
        found = await self._find(limit)
        if found is None:
            raise Again("the stream that was created is not known to all servers yet")
        return found

    async def _find(self, limit: float) -> str | None:
        try:
            request = self._link.api(f"STREAM.INFO.{self._state}", {}, limit)
            config = (await request)["config"]
        except ApiError as error:
            if error.code == NOT_FOUND:
                return None
            raise
        generation = (config.get("metadata") or {}).get(_GENERATION)
        if generation is None:
            raise BusError(f"stream {self._state!r} of {self.url} was not made by this library")
        return str(generation)

    async def _still_ours(self) -> bool | None:
        try:
            request = self._link.api(f"STREAM.INFO.{self._state}", {}, 1.0)
            config = (await request)["config"]
        except ApiError as error:
            return False if error.code == NOT_FOUND else None
        except Exception:  # noqa: BLE001 - without an answer the owner is unknown
            return None
        return bool((config.get("metadata") or {}).get(_GENERATION) == self.generation)

    async def _create(self, stream: str, config: dict[str, Any]) -> None:
        """Create a stream unless it exists, with three replicas if the server has a cluster."""
        common = {"name": stream, "storage": "file", "retention": "limits", "allow_direct": True}
        for replicas in (3, 1):
            request = {**common, **config, "num_replicas": replicas}
            try:
                await self._link.repeat(partial(self._link.api, f"STREAM.CREATE.{stream}", request))
            except ApiError as error:
                if error.code != ONE_SERVER:
                    raise
            else:
                return

    def _state_config(self) -> dict[str, Any]:
        notes = {"src": self._subject("s.i.>"), "dest": self._subject("note.i.>")}
        return {
            "subjects": [self._subject("s.>")],
            "max_msgs_per_subject": _HISTORY,
            "republish": {**notes, "headers_only": True},
            "metadata": {_GENERATION: self.generation},
        }

    def _tally_config(self) -> dict[str, Any]:
        return {
            "subjects": [self._subject("t.>")],
            "max_msgs_per_subject": -1,
            "allow_msg_counter": True,
        }

    def _ring_config(self, topic: Topic) -> dict[str, Any]:
        place = _place(topic)
        notes = {"src": self._subject(place), "dest": self._subject("note." + place)}
        return {
            "subjects": [self._subject(place)],
            "max_msgs": RING_MESSAGES,
            "discard": "old",
            "republish": {**notes, "headers_only": True},
        }

    # ---- listeners

    def _forget(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.discard(listener)

    def _lost(self, error: BusError) -> None:
        with self._lock:
            ending = list(self._listeners)
        for listener in ending:
            listener.lose(error)

    def _look(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.look()
