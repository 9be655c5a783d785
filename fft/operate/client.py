"""An operator's connection to a job's bus: open it, read registers, receive and send messages.

A client opens one bus; closing it also closes its listeners and inboxes.
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

from fft.bus import ErrorBus, open_job_bus
from fft.bus.addresses import with_job_of
from fft.bus.base import HEAD, Topic
from fft.bus.starts import open_newest
from fft.bus.token import JobToken
from fft.errors import BusError, FftError
from fft.health.hosts import ROLL, is_roll
from fft.messages.commands import (
    Answer,
    Command,
    Holder,
    RollCall,
    answer_inbox,
    decode_answer,
    decode_command,
    decode_holder,
    encode_command,
    holder_register,
)
from fft.messages.progress import KEPT, Report, decode_report
from fft.messages.protocol import BusMessage, GroupEntry, Record, UnreadableMessage
from fft.messages.wire import EPOCH, SCOPES, Packed, Wire, decode, decode_packed
from fft.protocol.timeouts import bus_operation

FIRST_ANSWER_S = 5.0
"""Time that a participant may take to answer whether it accepts a command."""
_READS = 16
"""Number of attempts to read a consistent state while the job moves on."""
_MISSING = 16
"""Number of missing registers of groups in a row after which no further one is read."""

Word = BusMessage | Command | Report | Packed
_READERS: dict[Topic, Callable[[bytes], Word | RollCall]] = {
    "protocol": decode,
    "commands": decode_command,
    "progress": decode_report,
}


class OperatorError(FftError):
    """A request that cannot be carried out or failed; the text names the place and the remedy."""


@dataclass(frozen=True)
class JobState:
    """A job as its registers show it; a field is ``None`` if its record does not exist yet."""

    head: Record | None = None
    epoch: Record | None = None
    """The epoch record of the head, with its members; None also while it cannot be determined."""

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
    """Return names as a list for display, or a hint if there are none."""
    return ", ".join(names) or "none that could be read; try again"


class Ear:
    """A queue of the messages received on a bus, in order, for another thread to read."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[tuple[Topic, bytes] | BusError] = queue.SimpleQueue()
        self.lose: Callable[[BusError], None] = self._heard.put

    def hear(self, payload: bytes, topic: Topic = "protocol") -> None:
        """Take in a message."""
        self._heard.put((topic, payload))

    def until(self, deadline: float) -> Iterator[tuple[Topic, bytes]]:
        """Yield every message until ``deadline`` (monotonic, s), with its topic.

        Raises the ``BusError`` that ends the subscription.
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
        """Yield the messages until ``deadline``, decoded. Messages that are malformed or meant only
        for ranks are skipped."""
        for topic, payload in self.until(deadline):
            with suppress(UnreadableMessage):
                if not isinstance(word := _READERS[topic](payload), RollCall):
                    yield word


def bus_url(given: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Return the URL of the operator's bus. Raises ``OperatorError`` if there is none."""
    url = given or env.get("FFT_BUS")
    if not url:
        raise OperatorError(
            "no bus: pass --bus, or set FFT_BUS; `fft serve` and `fft run` print it"
        )
    return url


class JobClient:
    """One operator's client of the newest start of a job. Not thread-safe."""

    def __init__(
        self,
        url: str,
        timeout: float | None = None,
        token: JobToken | None = None,
        me: str | None = None,
        bus: ErrorBus | None = None,
    ) -> None:
        """Open the bus.

        Args:
            url: URL of the job's bus.
            timeout: Seconds for an operation on the bus; None: a value that suits the bus.
            token: Token of the job; None: the token that the environment names.
            me: Name of the operator, for display.
            bus: A bus that is already open, of any start of the job; closed together with the
                client.

        Raises:
            BusUnreachable: The bus did not answer within ``timeout``.
        """
        token, timeout = token or JobToken.from_env(), timeout or bus_operation(url)
        self.bus = bus = bus or open_newest(url, token, timeout)
        self._url = url
        self._open = partial(open_job_bus, token=token, timeout=timeout)
        self._stages: list[JobClient] | None = None
        """Clients for the scopes of the later stages; None if they have not been looked up."""
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
        """Return the current head record and its epoch.

        If stages have scopes of their own, the records are those of the first scope and the members
        have the ranks of all scopes.
        """
        state = self._first()
        if state.epoch is None:
            return state
        if self._stages is None:
            held = self.bus.read(SCOPES)
            names = [] if held is None else json.loads(held)
            url, me = with_job_of(self._url, self.bus.url), self.me
            self._stages = [JobClient(url, me=me, bus=self._open(f"{url}.{n}")) for n in names]
        groups = [stage._first().groups for stage in self._stages]
        members = tuple(_with_ranks(entry, groups) for entry in state.epoch.members)
        return JobState(state.head, replace(state.epoch, members=members))

    def supervisors(self) -> dict[str, Holder]:
        """Return the `fft run` that holds each group, also for groups that are not in the job.

        The names of the groups are numbers from 0. Registers may be missing, for a host that has
        not started yet; malformed ones are skipped. Empty if no `fft run` has started any.
        """
        found: dict[str, Holder] = {}
        number = missing = 0
        while missing < _MISSING:
            held = self.bus.read(holder_register(str(number)))
            missing = missing + 1 if held is None else 0
            with suppress(UnreadableMessage):
                found.update({} if held is None else {str(number): decode_holder(held)})
            number += 1
        return found

    def reports(self) -> list[Report]:
        """Return the newest kept reports of ranks, on checkpoints and on traces with gaps.
        Malformed reports are skipped."""
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
        """Raise ``OperatorError`` if the participants need a token that is missing here.

        This check is for a job that has not begun. It uses the roll of hosts; without the token no
        participant would obey.
        """
        held = self.bus.read(ROLL)
        if held is not None and not is_roll(held):
            raise OperatorError(self._without_token())

    def whole(self, packed: Packed) -> Record | None:
        """Return the record with its members; None if the job has moved on and they are gone."""
        return self._wire.found(packed, self.bus.read)

    @contextmanager
    def hearing(self, *topics: Topic) -> Iterator[Ear]:
        """Receive the broadcasts in ``topics`` (default: the protocol) until the block is left."""
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
        """Broadcast ``commands``; the yielded function returns the answers until a deadline."""
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
            with suppress(BusError):  # an unreachable bus keeps nothing
                for inbox in inboxes:
                    self.bus.delete(inbox)


def _with_ranks(entry: GroupEntry, others: Iterable[Mapping[str, GroupEntry]]) -> GroupEntry:
    """Return the group with its ranks in other scopes added."""
    more = (r for groups in others if entry.group in groups for r in groups[entry.group].ranks)
    return replace(entry, ranks=(*entry.ranks, *more))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        return "somebody"
