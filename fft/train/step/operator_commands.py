"""Commands of an operator that a rank carries out, and the checks of a diagnosis."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from fft.bus import BusError, ErrorBus
from fft.bus.addresses import family_of, joined, own_address
from fft.messages.commands import (
    Answer,
    AnswerKind,
    Check,
    CheckTask,
    Command,
    Inject,
    answer_inbox,
    command_to_json,
    encode_answer,
)
from fft.messages.fault_plans import Fault as InjectableFault
from fft.messages.protocol import Peer
from fft.operate.diagnosis.plan import Outcome
from fft.trace.course import Place
from fft.train.guard.injector import InjectedFault, Injector
from fft.train.process_groups.epoch_groups import EpochGroups
from fft.train.process_groups.sockets import lose_connections
from fft.train.session.participation import Participation
from fft.train.step import operator_commands as checks

logger = logging.getLogger(__name__)


_TEXT = 250
_END_S = 2.0


class CheckRunner:
    """Runs one check at a time and passes each result to ``note``, on its own thread."""

    def __init__(
        self, place: Place, bus: ErrorBus, note: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._place = place
        self._who = f"group {place[0]} rank {place[1]}"
        self._bus = bus
        self._note = note
        self._line = checks.CheckSockets()
        self._thread: threading.Thread | None = None
        self._worker: threading.Thread | None = None
        """Thread of a check that cannot be interrupted; it may still run after its time limit."""
        self._busy = False
        self._closed = False

    def start(self, check: Check) -> CheckTask | None:
        """Start this rank's task of ``check``, if there is one, and return it at once.

        Call it from one thread only.
        """
        mine = (t for t in check.tasks if (t.group, t.rank) == self._place)
        task = next(mine, None)
        if task is None or self._closed:
            return None
        if self._busy:
            self._answer(check, "refused", {"error": "busy with another check"})
            return task
        self._busy = True
        self._line = checks.CheckSockets()
        self._thread = threading.Thread(
            target=self._work, args=(check, task, self._line), name="fft-check", daemon=True
        )
        self._thread.start()
        return task

    def close(self) -> None:
        """Interrupt a running check."""
        self._closed = True
        self._line.cut()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_END_S)

    # --- the thread of a check ---

    def _work(self, check: Check, task: CheckTask, line: checks.CheckSockets) -> None:
        try:
            told = self._results(check, task, line)
            self._note("check", {"id": check.id, "round": check.round, "found": told})
        finally:
            self._busy = False  # reset before the answer, after which the next request may arrive
        self._answer(check, "done", told)

    def _results(self, check: Check, task: CheckTask, line: checks.CheckSockets) -> dict[str, Any]:
        deadline = time.monotonic() + check.limit
        if task.part == "alone":
            self._answer(check, "accepted", {})
            found = {
                "compute": self._bounded(checks.compute, deadline),
                "memory": self._bounded(checks.memory, deadline),
            }
        else:
            found = {"network": self._check_connection(check, task, line, deadline)}
        return {
            kind: {
                "ok": one.ok,
                "seconds": round(one.seconds, 4),
                "text": " ".join(one.text.split())[:_TEXT],
            }
            for kind, one in found.items()
        }

    def _check_connection(
        self, check: Check, task: CheckTask, line: checks.CheckSockets, deadline: float
    ) -> Outcome:
        if task.part == "connect":
            self._answer(check, "accepted", {})
            return checks.connect(task.address, task.key, deadline, line)
        try:
            listening = checks.Listening(own_address(self._bus.url), task.key, line)
        except OSError as error:
            self._answer(check, "accepted", {})
            return Outcome(False, 0.0, f"cannot listen: {error}")
        try:
            self._answer(check, "accepted", {"address": listening.address})
            return listening.run(deadline)
        finally:
            listening.close()

    def _bounded(self, check: Callable[[], Outcome], deadline: float) -> Outcome:
        """Return the result of ``check``, or a failure if it does not end in time.

        A check may not end because a device hangs, for example.
        """
        began = time.monotonic()
        if self._worker is not None and self._worker.is_alive():
            return Outcome(False, 0.0, "not begun: an earlier check never ended")
        found: list[Outcome] = []

        def work() -> None:
            try:
                found.append(check())
            except Exception as error:  # noqa: BLE001 -- any error is the result of the check
                found.append(Outcome(False, 0.0, f"{type(error).__name__}: {error}"))

        self._worker = threading.Thread(target=work, name="fft-check-work", daemon=True)
        self._worker.start()
        self._worker.join(max(0.0, deadline - began))
        seconds = time.monotonic() - began
        return found[0] if found else Outcome(False, seconds, f"not finished in {seconds:.0f} s")

    def _answer(self, check: Check, verdict: AnswerKind, data: dict[str, Any]) -> None:
        word = Answer(check.id, self._who, verdict, json.dumps(data, ensure_ascii=False))
        try:
            self._bus.send(answer_inbox(check.id), encode_answer(word))
        except BusError as error:  # the requester reports the missing answer
            logger.warning("could not answer a check: %s", error)


class OperatorCommands:
    """Executes operator commands for one participant."""

    def __init__(self, job: Participation, injector: Injector | None) -> None:
        self._job = job
        self._injector = injector
        place = (job.peer.group, job.peer.rank)
        self._checks = CheckRunner(place, job.bus, job.trace.note)

    def execute(self, command: Command) -> None:
        """Execute a command of an operator. Trace it if it concerns this participant."""
        peer = self._job.peer
        if isinstance(command, Check):
            if (task := self._checks.start(command)) is not None:
                told = command_to_json(replace(command, tasks=(task,)))
                self._job.trace.note("command", told)
            return
        fault = command.fault if isinstance(command, Inject) else None
        if isinstance(fault, InjectableFault) and not _concerns(fault, peer):
            return
        refusal = None
        if isinstance(fault, InjectableFault):
            refusal = self._admit(fault)
            self._answer(command, refusal)
        self._job.note("command", {**command_to_json(command), "refused": refusal})

    def _admit(self, fault: InjectableFault) -> str | None:
        """Arm the fault, or return why it is refused."""
        if self._injector is None or not self._injector.open:
            return (
                "fault injection is disabled in this process; start it by fft run --injectable, "
                "or with FFT_INJECT=1"
            )
        self._injector.add(fault)
        return None

    def _answer(self, command: Command, refusal: str | None) -> None:
        who = f"group {self._job.peer.group} rank {self._job.peer.rank}"
        verdict: Literal["refused", "accepted"] = "accepted" if refusal is None else "refused"
        word = encode_answer(Answer(command.id, who, verdict, refusal or "armed"))
        try:
            self._job.bus.send(answer_inbox(command.id), word)
        except BusError as error:  # the engine will notice, if it lasts
            logger.warning("could not answer a command: %s", error)

    def close(self) -> None:
        """End the checks. Idempotent."""
        self._checks.close()


def _concerns(fault: InjectableFault, peer: Peer) -> bool:
    return fault.group == peer.group and getattr(fault, "rank", None) in (None, peer.rank)


def make_injector(job: Participation, groups: EpochGroups) -> Injector | None:
    """Return the fault injector of this process, or None if the environment enables none."""

    def trace(fault: InjectedFault) -> None:
        told = {"name": fault.name, "kind": fault.kind, "phase": fault.phase, "step": fault.step}
        job.note("inject", told)

    return Injector.from_env(
        claim=lambda key: job.bus.next_number(key) == 1,
        on_inject=trace,
        hands=_ConnectionFaults(job, groups),
    )


class _ConnectionFaults:
    """Connection faults for the injector. It keeps neither the job nor the groups alive."""

    def __init__(self, job: Participation, groups: EpochGroups) -> None:
        self._job, self._groups = weakref.ref(job), weakref.ref(groups)

    def cut_network(self) -> None:
        if (groups := self._groups()) is not None:
            groups.cut()

    def lose_bus(self) -> None:
        if (job := self._job()) is not None and not job.bus.lose():
            lose_connections(job.bus.url)


COMPUTE_REPEATS = 3


@dataclass(frozen=True)
class Chain:
    """A chain of matrix products, and the digest of the correct result.

    The numbers are small integers, so all sums are exact in every order and on every device. A rank
    with another digest computes incorrectly.
    """

    size: int
    products: int
    digest: str


ON_PROCESSOR = Chain(16, 2048, "141a4cd826a19a95f6ffca3cef2e34b5")
"""Small enough for torch to use one thread, because its threads belong to the trainer, and would
wait for each other on a busy machine."""
ON_ACCELERATOR = Chain(1024, 64, "75eb33a7ca8c8c7c7674af53b8c972f1")

MEMORY_BYTES = 64 * 1024 * 1024
_PART = 16 * 1024
"""Number of words filled and compared at a time; torch would use several threads for more."""
_MEMORY_PATTERNS = (0x5555555555555555, -0x5555555555555556)

ROUND_TRIPS = 20
BULK_BLOCKS = 8
BULK_BLOCK = 1024 * 1024
_HELLO = b"fft-check"
_MESSAGE_BYTES = 64
_ACCEPTS = 64
_GOOD, _BAD = b"+", b"-"


class CheckError(Exception):
    """A check failed; the message has the reason."""


# --- compute ---------------------------------------------------------------------------------


def compute() -> Outcome:
    """Compute a fixed chain of matrix products several times and compare the digests."""
    import torch

    device = _device(torch)
    chain = ON_PROCESSOR if device == "cpu" else ON_ACCELERATOR
    began = time.monotonic()
    try:
        digests = [_product(torch, device, chain) for _ in range(COMPUTE_REPEATS)]
    except torch.OutOfMemoryError as error:
        return Outcome(None, 0.0, f"out of memory on {device}: {error}"[:200])
    except RuntimeError as error:
        return Outcome(False, 0.0, f"the product failed on {device}: {error}"[:200])
    wrong = sum(digest != chain.digest for digest in digests)
    if wrong:
        text = f"{wrong} of {COMPUTE_REPEATS} products on {device} had a wrong result"
        return Outcome(False, time.monotonic() - began, text)
    return Outcome(True, time.monotonic() - began, f"correct result on {device}")


def _product(torch: Any, device: str, chain: Chain) -> str:
    """Return the digest of the products, each of which is reduced to small integers."""
    numbers = torch.arange(chain.size * chain.size, dtype=torch.int64)
    shape = (chain.size, chain.size)
    factor = ((numbers * 7919 % 1009) % 17 - 8).reshape(shape).to(torch.float32).to(device)
    value = ((numbers * 104729 % 2003) % 17 - 8).reshape(shape).to(torch.float32).to(device)
    with torch.no_grad():
        for _ in range(chain.products):
            value = torch.remainder(factor @ value, 17.0) - 8.0
    whole = value.to("cpu").to(torch.int8).numpy().tobytes()
    return _digest(whole)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# --- memory ----------------------------------------------------------------------------------


def memory() -> Outcome:
    """Fill memory with a pattern and its inverse, different at every place, and read it back."""
    import torch

    device = _device(torch)
    began = time.monotonic()
    try:
        places = torch.arange(_PART, dtype=torch.int64, device=device)
        held = torch.empty(MEMORY_BYTES // 8, dtype=torch.int64, device=device)
        wrong = sum(_changed(held, places, pattern) for pattern in _MEMORY_PATTERNS)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Outcome(None, 0.0, f"out of memory on {device}: {error}"[:200])
    except RuntimeError as error:
        return Outcome(False, 0.0, f"the memory of {device} failed: {error}"[:200])
    seconds = time.monotonic() - began
    if wrong:
        return Outcome(
            False, seconds, f"{wrong} words on {device} were read back with other values"
        )
    return Outcome(True, seconds, f"{held.nbytes >> 20} MiB on {device} verified")


def _changed(held: Any, places: Any, pattern: int) -> int:
    """Write to ``held`` and return the number of words that read back differently."""
    for start in range(0, len(held), _PART):
        held[start : start + _PART] = (places + start) ^ pattern
    return sum(
        int((held[start : start + _PART] != ((places + start) ^ pattern)).sum())
        for start in range(0, len(held), _PART)
    )


def _device(torch: Any) -> str:
    """Return the accelerator that the process uses, or the processor."""
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    return "cpu"


# --- network ---------------------------------------------------------------------------------


class CheckSockets:
    """The sockets of one connection test, which another thread can cut."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._cut = False
        self._lock = threading.Lock()

    def add(self, end: socket.socket) -> None:
        """Add a socket of the test."""
        with self._lock:
            self._sockets.append(end)
            cut = self._cut
        if cut:
            self.cut()

    def cut(self) -> None:
        """Shut down the sockets, so that every wait on them fails."""
        with self._lock:
            self._cut = True
            sockets = list(self._sockets)
        for end in sockets:
            with suppress(OSError):  # closed, or never connected
                end.shutdown(socket.SHUT_RDWR)


class Listening:
    """The listening side of a connection test. Raises ``OSError`` if it cannot listen."""

    def __init__(self, host: str, key: str, line: CheckSockets) -> None:
        self._key = key
        self._line = line
        self._server = socket.socket(family_of(host), socket.SOCK_STREAM)
        try:
            self._server.bind((host, 0))
            self._server.listen(4)
        except OSError:
            self._server.close()
            raise
        line.add(self._server)
        self.address = joined(*self._server.getsockname()[:2])

    def run(self, deadline: float) -> Outcome:
        """Wait for the partner and check the connection, until ``deadline`` (monotonic, s)."""
        try:
            with self._partner(deadline) as partner:
                return _exchange(partner, self._key, deadline, first=False)
        except (CheckError, OSError) as error:
            return Outcome(False, 0.0, _describe(error))

    def _partner(self, deadline: float) -> socket.socket:
        for _ in range(_ACCEPTS):
            self._server.settimeout(_left(deadline, "no peer connected"))
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                raise CheckError("no peer connected in time") from None
            self._line.add(connection)
            try:
                hello = _receive(connection, len(_HELLO) + 32, deadline)
                if hmac.compare_digest(hello, _HELLO + self._key.encode()):
                    return connection
            except (CheckError, OSError):
                pass  # not the partner, which may still come
            connection.close()
        raise CheckError("only unauthenticated peers connected")

    def close(self) -> None:
        """Stop waiting."""
        self._server.close()


def connect(address: str, key: str, deadline: float, line: CheckSockets) -> Outcome:
    """Connect to the partner at ``address`` and test, until ``deadline`` (monotonic, s)."""
    host, _, port = address.rpartition(":")
    try:
        left = _left(deadline, "no time to connect")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as partner:
            line.add(partner)
            partner.sendall(_HELLO + key.encode())
            return _exchange(partner, key, deadline, first=True)
    except (CheckError, OSError, ValueError) as error:
        return Outcome(False, 0.0, _describe(error))


def _exchange(partner: socket.socket, key: str, deadline: float, *, first: bool) -> Outcome:
    """Exchange round trips, then bulk data in both directions, and verify all bytes."""
    partner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    began = time.monotonic()
    for number in range(ROUND_TRIPS):
        word = _bytes(key, f"trip {number}", _MESSAGE_BYTES)
        if first:
            _send(partner, word, deadline)
        if _receive(partner, _MESSAGE_BYTES, deadline) != word:
            raise CheckError(f"the reply to round trip {number} was corrupted")
        if not first:
            _send(partner, word, deadline)
    trips = time.monotonic() - began
    if first:
        _send_bulk(partner, key, "there", deadline)
        _take_bulk(partner, key, "back", deadline)
    else:
        _take_bulk(partner, key, "there", deadline)
        _send_bulk(partner, key, "back", deadline)
    seconds = time.monotonic() - began
    rate = 2 * BULK_BLOCKS * BULK_BLOCK / max(seconds - trips, 1e-9) / 1e6
    text = f"round trip {1e3 * trips / ROUND_TRIPS:.2f} ms, {rate:.0f} MB/s"
    return Outcome(True, seconds, text)


def _send_bulk(partner: socket.socket, key: str, way: str, deadline: float) -> None:
    for number in range(BULK_BLOCKS):
        _send(partner, _bytes(key, f"{way} {number}", BULK_BLOCK), deadline)
    if _receive(partner, 1, deadline) != _GOOD:
        raise CheckError("the peer has received corrupted data")


def _take_bulk(partner: socket.socket, key: str, way: str, deadline: float) -> None:
    changed = sum(
        _receive(partner, BULK_BLOCK, deadline) != _bytes(key, f"{way} {number}", BULK_BLOCK)
        for number in range(BULK_BLOCKS)
    )
    _send(partner, _BAD if changed else _GOOD, deadline)
    if changed:
        raise CheckError(f"{changed} of {BULK_BLOCKS} blocks arrived corrupted")


def _bytes(key: str, what: str, size: int) -> bytes:
    """Return bytes that both sides can compute and that no fault produces by chance."""
    return hashlib.shake_128(f"{key} {what}".encode()).digest(size)


def _send(partner: socket.socket, data: bytes, deadline: float) -> None:
    partner.settimeout(_left(deadline, "the peer did not read the data"))
    partner.sendall(data)


def _receive(partner: socket.socket, size: int, deadline: float) -> bytes:
    got = bytearray()
    while len(got) < size:
        partner.settimeout(_left(deadline, "the peer sent too little"))
        try:
            part = partner.recv(min(size - len(got), 1 << 20))
        except TimeoutError:
            raise CheckError("the peer sent too little in time") from None
        if not part:
            raise CheckError("the peer closed the connection")
        got += part
    return bytes(got)


def _left(deadline: float, what: str) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise CheckError(f"{what} in time")
    return left


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckError) else f"{type(error).__name__}: {error}"[:200]
