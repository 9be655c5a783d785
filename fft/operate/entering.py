"""Find the start of the job that a process joins when it now comes to the job's bus.

The process takes part in the job that is there if a live participant holds its state. Otherwise
that job is over. Its register is then closed, so that no live process of it can commit anything or
join the next start, and the next start of the job begins with its own keys (`fft.bus.starts`).

Uses the bus, the clock, and the process list of this host. Blocks its caller for at most 10 s, plus
the time that the bus takes.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fft.bus import ErrorBus, open_job_bus
from fft.bus.base import HEAD
from fft.bus.starts import begin, newest, url_of
from fft.bus.token import JobToken
from fft.messages.commands import RollCall, encode_command, fresh_id
from fft.messages.exits import gone_register, gone_value
from fft.messages.protocol import Decision, Peer, Record
from fft.messages.wire import Wire
from fft.operate.client import JobClient, JobState
from fft.protocol.timeouts import bus_operation
from fft.util.pidfd import is_there

logger = logging.getLogger(__name__)

_SILENCE_S = 10.0
"""A job whose participants have not answered for this long is over. This is twice the time after
which a joiner takes over a job without answers (``join_window``), because a bus may have changed
its leader meanwhile."""
_ALL_GONE_S = 1.0
"""The same limit, if none of the members' processes exists any more."""
_AGAIN_S = 1.0
"""Interval between questions; a participant that is just resubscribing may miss one."""


@dataclass(frozen=True)
class JobStart:
    """One start of a job."""

    url: str
    """URL of its bus."""
    number: int
    """Its number, from 1."""
    generation: str = field(default="", compare=False)
    """Generation of its bus; empty if it was not asked for, or if the bus is in this process."""

    @property
    def name(self) -> str:
        """A name that no other start has, not even under the same URL on a bus that came back
        empty."""
        return f"{self.url.rpartition('/')[2]}.{self.generation}"


def enter(
    url: str,
    token: JobToken | None,
    timeout: float | None = None,
    env: Mapping[str, str] = os.environ,
) -> JobStart:
    """Return the start of the job at ``url`` that a process that starts now takes part in.

    A child of ``fft run`` receives its start from the supervisor. A process that torchelastic
    restarts begins no job after the last step.

    Args:
        url: URL of the job's bus.
        token: Token of the job.
        timeout: Seconds for an operation on the bus; None: a value that suits the bus.
        env: Environment of the process.

    Raises:
        BusError: An operation on the bus failed.
        OperatorError: The registers cannot be read without the job's token.
    """
    timeout = timeout or bus_operation(url)
    if "FFT_GROUP" in env:
        return JobStart(url, 1)
    is_restart = int(env.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
    with open_job_bus(url, token, timeout) as bus:
        # a bus in this process has another one each time the last of its users has closed it
        generation = "" if url.startswith("memory:") else bus.generation
        while True:
            number = newest(bus)
            start = JobStart(url_of(url, number), number, generation)
            if not _is_over(start, token, timeout, is_restart):
                return start
            begin(bus, number + 1)


def _is_over(start: JobStart, token: JobToken | None, timeout: float, is_restart: bool) -> bool:
    """Whether that job has ended; if so, it is closed."""
    bus = open_job_bus(start.url, token, timeout)
    with JobClient(start.url, bus=bus) as desk:
        while (held := bus.read(HEAD)) is not None:
            job = desk.job()
            if (head := job.head) is None or (head.last and is_restart):
                return False
            if head.last:
                return True
            if not _all_have_left(job) and _lives(desk, job):
                return False
            if _close(bus, held, head):
                logger.warning(
                    "the job on %s has ended at step %d: nobody of it is left. Start %d of the job "
                    "begins; to go on from a checkpoint, load it",
                    start.url,
                    head.step,
                    start.number + 1,
                )
                return True
    return False


def _all_have_left(job: JobState) -> bool:
    if job.head is None or job.head.kind != "commit" or job.epoch is None:
        return False
    return job.groups.keys() <= set(job.head.leavers)


def _lives(desk: JobClient, job: JobState) -> bool:
    """Whether a participant that holds the state of the job answers."""
    began = time.monotonic()
    are_gone = _are_gone(job, desk.bus, writes=False)
    until = began + (_ALL_GONE_S if are_gone else _SILENCE_S)
    call = RollCall(fresh_id(), desk.me)
    with desk.asking(call) as answers:
        for _ in answers(min(until, time.monotonic() + _AGAIN_S)):
            return True
        logger.warning(
            "nobody of the job on %s answers; if nobody does for %g s, it is over",
            desk.bus.url,
            until - began,
        )
        while (now := time.monotonic()) < until:
            desk.bus.broadcast(encode_command(call), "commands")
            for _ in answers(min(until, now + _AGAIN_S)):
                return True
            if _are_gone(job, desk.bus, writes=True):  # another host may have written as well
                until = min(until, began + _ALL_GONE_S)
    return False


def _are_gone(job: JobState, bus: ErrorBus, writes: bool) -> bool:
    """Whether the processes of all members no longer exist, here or by the registers.

    Args:
        writes: Write those of this host into the registers, because none of them has answered.
    """
    if job.epoch is None:
        return False
    here, are_gone = socket.gethostname(), True
    for group in job.epoch.members:
        for rank in group.ranks:
            name, value = gone_register(group.group, rank.rank), gone_value(rank.pid, rank.host)
            if rank.host == here and not _is_there(rank.pid):
                if writes:
                    bus.write(name, value)
            elif bus.read(name) != value:
                are_gone = False
    return are_gone


def _is_there(pid: int) -> bool:
    """Whether another process has this pid; in this process the engine would have answered."""
    return pid != os.getpid() and is_there(pid)


def closing(head: Record) -> Record:
    """Return the record after ``head`` that ends a job without live participants.

    It is an epoch without members: a participant of an older epoch is fenced and learns that the
    job has ended. Earlier decisions remain.
    """
    return replace(
        head,
        n=head.n + 1,
        kind="epoch",
        epoch=head.epoch + 1,
        txn=0,
        by=Peer(f"start@{socket.gethostname()}"[:64], 0, os.getpid()),
        members=(),
        learners=(),
        change=False,
        leavers=(),
        reasons=(),
        last=True,
        skip=False,
        fetched=(),
        odd=(),
        diverged=False,
        cause="nobody of the job was left, and another one was started on its bus",
    )


def _close(bus: ErrorBus, held: bytes, head: Record) -> bool:
    """Append the last record after ``head``, whose encoded form is ``held``.

    Returns False if another process was faster.
    """
    wire, record = Wire(), closing(head)
    desired = wire.encode_record(record)
    if bus.compare_set(HEAD, held, desired) != desired:
        return False
    bus.broadcast(wire.encode(Decision(record)))
    return True
