"""The heartbeat of a host, and the judges that check the heartbeats of other hosts.

The process that is responsible for the processes of a host (its supervisor or, without one, each
trainer's monitor) writes its heartbeats into its own register, ``host/ID``: their number, and the
processes that they are for. Another register, ``hosts``, is the roll: it names the senders in the
order of their arrival. Heartbeats are not broadcast, so each costs the bus one write, regardless of
the number of readers. A judge that begins later can still read a register, whereas a broadcast
would be gone.

The first `JUDGES` senders on the roll check all hosts, and all other hosts check these. So the job
always has a judge, and the cost grows with the number of hosts, not with its square. A judge that
finds that a host has vanished (`fft.health.detectors.silence`) sends ``suspect`` for each of its
processes in the epoch, and removes the host from the roll. Two judges may do so without harm. A
host that was removed and sends heartbeats again finds itself missing and enters the roll again. A
suspicion is never final.

Uses these registers and one thread.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from fft.bus.base import HEAD, BusClosed, BusForged, BusForgot, ErrorBus
from fft.errors import BusError
from fft.health.detectors.silence import BEATS, Beating, HostJudge, Looked
from fft.messages.codec import Codec
from fft.messages.protocol import Count, Name, Suspect, UnreadableMessage, encode
from fft.messages.wire import EPOCH, Wire, decode_packed
from fft.util.log_sampler import LogSampler

ROLL = "hosts"
"""The register that names the senders of heartbeats."""
JUDGES = 3
"""Number of senders that check all hosts."""
BEATS_A_SECOND = 400
"""Maximum heartbeat rate of a whole job; in a big job each host sends and is judged more slowly."""
_TRIES = 16
"""Maximum number of attempts to change the roll, if others change it too, until the next turn."""
_LOOKS = 2.0  # in pauses: the maximum time between two looks that counts; beyond it we were absent
_END_S = 1.0

logger = logging.getLogger(__name__)

_CONFIG = ConfigDict(strict=True, extra="forbid")
_Form = TypeVar("_Form")


class Process(NamedTuple):
    """A process of a host, and its place in the job."""

    group: Name
    rank: Count
    pid: Count


@dataclass(frozen=True, config=_CONFIG)
class Beat:
    """The ``number``-th heartbeat of a sender, for ``processes`` of ``host``.

    ``limit`` is the maximum silence, in seconds, after which they are suspected.
    """

    number: Count
    host: str
    limit: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
    processes: tuple[Process, ...]
    v: Literal[1] = 1


@dataclass(frozen=True, config=_CONFIG)
class Roll:
    """The senders of heartbeats, in the order of their arrival."""

    senders: tuple[Name, ...] = ()
    v: Literal[1] = 1


_BEATS = Codec[Beat](Beat)
_ROLLS = Codec[Roll](Roll)


def is_roll(held: bytes) -> bool:
    """Whether ``held`` can be read as a roll."""
    try:
        _ROLLS.decode(held)
    except UnreadableMessage:
        return False
    return True


def beats(bus: ErrorBus, sender: str) -> bool:
    """Return whether a sender is on the roll, so that no judge has found it silent."""
    held = bus.read(ROLL)
    return held is not None and sender in _ROLLS.decode(held).senders


def beat_name(sender: str) -> str:
    """Return the name of the register with a sender's heartbeats."""
    return f"host/{sender}"


class HostWatch:
    """Send heartbeats for this host and judge others, from construction until ``close``.

    Set ``processes`` whenever they change. Other components report a lost bus; here it only ends or
    delays the heartbeats.
    """

    def __init__(
        self,
        bus: ErrorBus,
        by: str,
        limit_s: float,
        processes: Sequence[Process] = (),
        sender: str = "",
    ) -> None:
        """Start the thread.

        Args:
            bus: The job's bus.
            by: Kind of this sender, for display.
            limit_s: Seconds of silence of this host after which others suspect it.
            processes: Processes that the heartbeats are for.
            sender: Name of this sender on the roll; a random one by default.
        """
        self.processes = tuple(processes)
        self.sender = sender or secrets.token_hex(8)
        self.alone = True
        """No other sender was on the roll at the last look."""
        self._bus, self._limit = bus, limit_s
        self._host = socket.gethostname()
        self._by = f"{by} on {self._host}"
        self._pause = limit_s / BEATS
        self._judge = HostJudge(_LOOKS * self._pause)
        self._beats = 0
        self._wire = Wire()
        self._entered = False
        self._told: dict[str, set[Process]] = {}
        """Sender → the processes that we have reported as vanished with their host."""
        self._troubles = LogSampler()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fft-hosts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeats and leave the roll, within 1 s. Idempotent."""
        self._stop.set()
        self._thread.join(_END_S)

    # --- the thread ---

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._turn()
            except (BusClosed, BusForgot):  # the owner of the bus knows already, or is notified
                return
            except (BusError, UnreadableMessage) as error:
                self._complain("a heartbeat failed", error)
            self._stop.wait(self._pause)
        # otherwise others remove us from the roll later, which is harmless
        with suppress(BusError, UnreadableMessage):
            self._strike({self.sender})

    def _turn(self) -> None:
        """Send a heartbeat, check the other hosts, and report the ones that have vanished."""
        self._beats += 1
        limit = max(self._limit, BEATS * self._pause)
        beat = Beat(self._beats, self._host, limit, self.processes)
        self._bus.write(beat_name(self.sender), _BEATS.encode(beat))
        roll = self._enrolled()
        self._keep_pace(len(roll))
        found = self._found(self._whom(roll))
        hosts = {who: Beating(beat.number, beat.host, beat.limit) for who, beat in found.items()}
        steps = self._steps() if self._judge.doubts(time.monotonic()) else None
        now = time.monotonic()
        self._judge.observe(Looked(now, hosts, steps))
        vanished = self._judge.vanished(now)
        through = self._accuse({who: found[who] for who in vanished}, vanished)
        if gone := through | self._judge.forgotten(now):
            self._strike(gone)

    def _keep_pace(self, senders: int) -> None:
        pause = max(self._limit / BEATS, senders / BEATS_A_SECOND)
        if pause != self._pause:
            self._pause = pause
            self._judge = HostJudge(_LOOKS * pause)

    def _whom(self, roll: Sequence[str]) -> list[str]:
        judges = roll[:JUDGES]
        whom = roll if self.sender in judges else judges
        return [sender for sender in whom if sender != self.sender]

    def _found(self, senders: Iterable[str]) -> dict[str, Beat]:
        found = {}
        for sender in senders:
            try:
                if (held := self._bus.read(beat_name(sender))) is not None:
                    found[sender] = _BEATS.decode(held)
            # one bad register must hide only its own sender
            except (BusForged, UnreadableMessage) as error:
                self._complain("an unreadable heartbeat", error)
        return found

    def _steps(self) -> int | None:
        head = self._bus.read(HEAD)
        return None if head is None else decode_packed(head).record.step

    def _accuse(self, beats: Mapping[str, Beat], reasons: Mapping[str, str]) -> set[str]:
        """Report the members of the epoch among the vanished; return the senders that are finished.

        Participants ignore a report about a process that is not in their epoch. A process that
        vanishes while it waits to join is therefore reported as soon as it is a member.
        """
        self._told = {who: told for who, told in self._told.items() if who in beats}
        members = self._members() if beats else {}
        through = set()
        for sender, beat in beats.items():
            if sender not in self._told:
                logger.warning("host %s has vanished: %s", beat.host, reasons[sender])
            told = self._told.setdefault(sender, set())
            for process in set(beat.processes) - told:
                if members.get((process.group, process.rank)) == (process.pid, beat.host):
                    word = Suspect(*process, beat.host, self._by, reasons[sender])
                    self._bus.broadcast(encode(word))
                    told.add(process)
            if told >= set(beat.processes):
                through.add(sender)
        return through

    def _members(self) -> dict[tuple[str, int], tuple[int, str]]:
        """Return the process id and host of each place in the newest epoch."""
        if (held := self._bus.read(EPOCH)) is None:
            return {}
        record = self._wire.found(decode_packed(held), self._bus.read)
        if record is None:  # the job has moved on meanwhile
            return {}
        return {place: (entry.pid, entry.host) for place, entry in record.entries.items()}

    def _complain(self, what: str, error: Exception) -> None:
        if (count := self._troubles.add(what)) is not None:
            logger.warning("%s (%d by now): %s", what, count, error)

    # --- the roll ---

    def _enrolled(self) -> tuple[str, ...]:
        """Return the senders on the roll, including this one."""
        _, roll = self._roll()
        self.alone = not set(roll.senders) - {self.sender}
        if self.sender in roll.senders:
            return roll.senders
        if self._entered:
            logger.warning(
                "other hosts took this host for vanished; it enters the roll of hosts again"
            )
        senders = self._change(lambda senders: (*senders, self.sender))
        self._entered = True
        return senders

    def _strike(self, gone: Iterable[str]) -> None:
        gone = set(gone)
        self._change(lambda senders: tuple(s for s in senders if s not in gone))
        for sender in gone:
            self._bus.delete(beat_name(sender))

    def _change(self, to: Callable[[tuple[str, ...]], tuple[str, ...]]) -> tuple[str, ...]:
        """Change the roll and return its new value. Others may change it at the same time."""
        for _ in range(_TRIES):
            held, roll = self._roll()
            wanted = to(roll.senders)
            if wanted == roll.senders:
                return wanted
            desired = _ROLLS.encode(Roll(wanted))
            if self._bus.compare_set(ROLL, held, desired) == desired:
                return wanted
        raise BusError(f"the roll of hosts on {self._bus.url} keeps changing; trying again")

    def _roll(self) -> tuple[bytes | None, Roll]:
        held = self._bus.read(ROLL)
        return held, Roll() if held is None else _ROLLS.decode(held)
