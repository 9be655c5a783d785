"""An operator's place at a job's bus: how it is opened, read, listened to and spoken to.

Opens one bus; ends it, its listeners and its inboxes when it is closed.
"""

from __future__ import annotations

import getpass
import json
import os
import queue
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self

from fft.bus import BusError, ErrorBus, open_job_bus
from fft.bus.base import HEAD, Topic
from fft.bus.starts import open_newest
from fft.bus.token import JobToken
from fft.health.hosts import ROLL, is_roll
from fft.messages.commands import (
    Answer,
    Command,
    RollCall,
    answer_inbox,
    decode_answer,
    decode_command,
    encode_command,
)
from fft.messages.progress import KEPT, Report, decode_report
from fft.messages.protocol import BusMessage, GroupEntry, Record, UnreadableMessage
from fft.messages.wire import (
    EPOCH,
    SCOPES,
    Packed,
    Wire,
    decode,
    decode_packed,
)
from fft.protocol.timeouts import bus_operation
from fft.util.errors import FftError

FIRST_ANSWER_S = 5.0
"""How long who is asked may take to say whether it obeys."""
_READS = 16
"""How often the job may move on while it is looked at."""

Word = BusMessage | Command | Report | Packed
_READERS: dict[Topic, Callable[[bytes], Word | RollCall]] = {
    "protocol": decode,
    "commands": decode_command,
    "progress": decode_report,
}


class OperatorError(FftError):
    """What was asked cannot be done, or was not: names the place and the mend."""


@dataclass(frozen=True)
class JobState:
    """A job as its registers show it; ``None``: nothing yet."""

    head: Record | None = None
    epoch: Record | None = None
    """Of the head, with its members; None also while that cannot be told."""

    @property
    def groups(self) -> dict[str, GroupEntry]:
        """The groups of the epoch, by name."""
        return {} if self.epoch is None else {entry.group: entry for entry in self.epoch.members}

    def check_groups(self, names: Iterable[str], url: str) -> None:
        """Raise ``OperatorError`` unless all ``names`` are groups of the epoch."""
        known = self.groups
        if self.head is None:
            raise OperatorError(
                f"no job has begun on the bus at {url}; is it the job's FFT_BUS, its name included?"
            )
        for name in names:
            if name not in known:
                raise OperatorError(f"no group {name!r} in the job; its groups: {listed(known)}")


def listed(names: Iterable[str]) -> str:
    """Names for a person; says so if there are none."""
    return ", ".join(names) or "none that could be read; try again"


class Ear:
    """What is heard on a bus, in order, for a thread that takes it when it has time."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[tuple[Topic, bytes] | BusError] = queue.SimpleQueue()
        self.lose: Callable[[BusError], None] = self._heard.put

    def hear(self, payload: bytes, topic: Topic = "protocol") -> None:
        """Take in a message."""
        self._heard.put((topic, payload))

    def until(self, deadline: float) -> Iterator[tuple[Topic, bytes]]:
        """Every message until ``deadline`` (monotonic, s), and where it was said.

        Raises the ``BusError`` that ends it.
        """
        while (left := deadline - time.monotonic()) > 0:
            try:
                heard = self._heard.get(timeout=left)
            except queue.Empty:
                return
            if isinstance(heard, BusError):
                raise heard
            yield heard

    def words(self, deadline: float) -> Iterator[Word]:
        """The same, read; what is not in the form of its topic, or is for ranks only, is passed
        over."""
        for topic, payload in self.until(deadline):
            with suppress(UnreadableMessage):
                if not isinstance(word := _READERS[topic](payload), RollCall):
                    yield word


def bus_url(given: str | None, env: Mapping[str, str] = os.environ) -> str:
    """The bus that an operator means. Raises ``OperatorError`` if none was named."""
    url = given or env.get("FFT_BUS")
    if not url:
        raise OperatorError(
            "no bus: pass --bus, or set FFT_BUS; `fft serve` and `fft run` print it"
        )
    return url


class JobClient:
    """One operator at the newest start of a job. Not for several threads."""

    def __init__(
        self,
        url: str,
        timeout: float | None = None,
        token: JobToken | None = None,
        me: str | None = None,
        bus: ErrorBus | None = None,
    ) -> None:
        """Raises ``BusUnreachable`` within ``timeout`` seconds (None: what fits the bus).

        ``token``: of the job; None: what the environment names. ``me``: who asks, for people.
        ``bus``: opened already, whatever start it is of; it is closed with this.
        """
        token, timeout = token or JobToken.from_env(), timeout or bus_operation(url)
        self.bus = bus = bus or open_newest(url, token, timeout)
        self._open = partial(open_job_bus, token=token, timeout=timeout)
        self._stages: list[JobClient] | None = None
        """Of the scopes of further stages; None: not looked for."""
        self.me = me or f"{_user()}@{socket.gethostname()}"
        self._wire = Wire()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stage in self._stages or ():
            stage.bus.close()
        self.bus.close()

    def job(self) -> JobState:
        """The head record and its epoch, as of now.

        Where stages have scopes of their own: those of the first, and the ranks of all.
        """
        state = self._first()
        if state.epoch is None:
            return state
        if self._stages is None:
            held = self.bus.read(SCOPES)
            names = [] if held is None else json.loads(held)
            url, me = self.bus.url, self.me
            self._stages = [JobClient(url, me=me, bus=self._open(f"{url}.{n}")) for n in names]
        groups = [stage._first().groups for stage in self._stages]
        members = tuple(_with_ranks(entry, groups) for entry in state.epoch.members)
        return JobState(state.head, replace(state.epoch, members=members))

    def reports(self) -> list[Report]:
        """The newest reports of ranks that are kept: of checkpoints, and of traces with gaps. What
        cannot be read is passed over."""
        found: list[Report] = []
        for held in filter(None, map(self.bus.read, KEPT)):
            with suppress(UnreadableMessage):
                found.append(decode_report(held))
        return found

    def _first(self) -> JobState:
        head = None
        for _ in range(_READS):
            held = self.bus.read(HEAD)
            if held is None:
                return JobState()
            packed = self._read(held)
            head = packed.record
            if head.kind != "epoch":
                if (latest := self.bus.read(EPOCH)) is None:
                    continue
                packed = self._read(latest)
            epoch = self.whole(packed)
            if epoch is not None and epoch.epoch == head.epoch:
                return JobState(epoch if head.kind == "epoch" else head, epoch)
        return JobState(head)

    def _read(self, held: bytes) -> Packed:
        try:
            return decode_packed(held)
        except UnreadableMessage:
            raise OperatorError(self._without_token()) from None

    def _without_token(self) -> str:
        return (
            f"what is on the bus at {self.bus.url} cannot be read without the job's token: "
            "set FFT_TOKEN_FILE; `fft serve` and `fft run` print it"
        )

    def check_token(self) -> None:
        """Before a job has begun: raise ``OperatorError`` if those who are there need a token that
        is missing here, by the roll of hosts; else nobody of them would obey."""
        held = self.bus.read(ROLL)
        if held is not None and not is_roll(held):
            raise OperatorError(self._without_token())

    def whole(self, packed: Packed) -> Record | None:
        """The record with its members; None if the job has moved on and they are gone."""
        return self._wire.found(packed, self.bus.read)

    @contextmanager
    def hearing(self, *topics: Topic) -> Iterator[Ear]:
        """What is broadcast in ``topics`` (none: the protocol) until the block is left."""
        ear = Ear()
        with ExitStack() as open_ones:
            for topic in topics or ("protocol",):
                hear = partial(ear.hear, topic=topic)
                open_ones.enter_context(closing(self.bus.subscribe(hear, ear.lose, topic)))
            yield ear

    @contextmanager
    def asking(
        self, *commands: Command | RollCall
    ) -> Iterator[Callable[[float], Iterator[Answer]]]:
        """Broadcast ``commands``; what is yielded gives the answers until a deadline."""
        ear, inboxes = Ear(), [answer_inbox(command.id) for command in commands]
        listeners = [self.bus.listen(inbox, ear.hear, ear.lose) for inbox in inboxes]

        def answers(deadline: float) -> Iterator[Answer]:
            for _, payload in ear.until(deadline):
                with suppress(UnreadableMessage):
                    yield decode_answer(payload)

        try:
            for command in commands:
                self.bus.broadcast(encode_command(command), "commands")
            yield answers
        finally:
            for listener in listeners:
                listener.close()
            with suppress(BusError):  # a bus that is gone keeps nothing
                for inbox in inboxes:
                    self.bus.delete(inbox)


def _with_ranks(entry: GroupEntry, others: Iterable[Mapping[str, GroupEntry]]) -> GroupEntry:
    """The group with its ranks in other scopes."""
    more = (r for groups in others if entry.group in groups for r in groups[entry.group].ranks)
    return replace(entry, ranks=(*entry.ranks, *more))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        return "somebody"
