"""Take groups out of a running job: after a commit (drain), or at once (evict).

Sends requests on the bus and waits, up to a limit, for their result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fft.errors import BusError
from fft.messages.commands import Evict, decode_holder, fresh_id, holder_register
from fft.messages.protocol import Death, Drain, Record, UnreadableMessage, encode
from fft.messages.wire import Packed
from fft.operate.client import FIRST_ANSWER_S, Ear, JobClient, JobState, OperatorError, listed

_AGAIN_S = 2.0
"""Interval between repeated drain requests, because a slow subscriber may have missed one."""
STARTED_AGAIN = "it is started again"
"""End of the supervisor's answer if it starts the group again."""
_REAPED_S = 20.0
"""Time beyond the grace period for the supervisor to see the processes end."""


def drain(desk: JobClient, groups: Sequence[str], wait: float) -> Record:
    """Ask ``groups`` to leave, and wait for it, at most ``wait`` seconds.

    Returns the record with which the last of them left. Raises ``OperatorError`` if a group does
    not exist or has not left; then the text describes what happened meanwhile.
    """
    with desk.hearing() as ear:
        before = desk.job()
        before.check_groups(groups, desk.bus.url)
        return _have_left(desk, ear, groups, wait, before)


def _have_left(
    desk: JobClient, ear: Ear, groups: Sequence[str], wait: float, before: JobState
) -> Record:
    missing, commits, abort = set(groups), 0, ""
    for word in _asked(desk, ear, missing, wait):
        record = word.record
        if record.kind == "commit":
            commits += 1
            missing -= set(record.leavers)
        elif record.kind == "abort":
            abort = f"; the last attempt was rolled back: {record.cause}"
        # a group that was left out or died is gone as well
        elif (epoch := desk.whole(word)) is not None:
            missing &= {entry.group for entry in epoch.members}
        if not missing:
            return record
    assert before.head is not None
    what = f"{commits} steps were committed meanwhile" if commits else "nothing was committed"
    raise OperatorError(
        f"group {listed(sorted(missing))} has not left within {wait:g} s: {what}, since step "
        f"{before.head.step}{abort}. The drain request remains; look with `fft watch`, or "
        "leave the group out at once with `fft evict`"
    )


def _asked(desk: JobClient, ear: Ear, missing: set[str], wait: float) -> Iterator[Packed]:
    """Yield the records broadcast within ``wait`` seconds; repeat the request to ``missing``."""
    deadline = time.monotonic() + wait
    while (now := time.monotonic()) < deadline:
        desk.bus.broadcast(encode(Drain(tuple(sorted(missing)), by=desk.me)))
        for word in ear.words(min(deadline, now + _AGAIN_S)):
            if isinstance(word, Packed):
                yield word


@dataclass(frozen=True)
class Eviction:
    """Result of an eviction."""

    told_dead: tuple[str, ...]
    """Descriptions of the processes that were declared dead to the job."""
    done: str
    """Final answer of the supervisor."""


def evict(
    desk: JobClient, place: str, *, restart: bool, grace: float, on_accepted: Callable[[str], None]
) -> Eviction:
    """Leave out GROUP or GROUP.RANK at once, and have its processes ended by their supervisor.

    The job continues without it before its processes have ended.

    Args:
        desk: Client of the job.
        place: GROUP or GROUP.RANK.
        restart: Whether the supervisor starts the processes again.
        grace: Seconds that the processes have to end.
        on_accepted: Called with the first answer of the supervisor.

    Raises:
        OperatorError: There is no such rank or group, no supervisor answers on this bus, or it
            refused.
    """
    job = desk.job()
    group, rank = _place(job, place)
    told = _tell_dead(desk, job, group, rank)
    command = Evict(fresh_id(), group, desk.me, rank, grace, restart)
    return _carried_out(desk, command, told, job, on_accepted)


def bring_back(desk: JobClient, group: str) -> None:
    """Have the supervisor start a group again that was drained or evicted.

    Raises:
        OperatorError: The group is in the job, no supervisor answers, or it refused.
    """
    job = desk.job()
    if group in job.groups:
        raise OperatorError(f"group {group} is in the job; its groups: {listed(job.groups)}")
    command = Evict(fresh_id(), group, desk.me, None, 0.0, restart=True)
    done = _carried_out(desk, command, (), job, lambda _: None).done
    if not done.endswith(STARTED_AGAIN):
        raise OperatorError(done)


def _carried_out(
    desk: JobClient,
    command: Evict,
    told: tuple[str, ...],
    job: JobState,
    on_accepted: Callable[[str], None],
) -> Eviction:
    """Send the command and wait until the supervisor of the group has carried it out."""
    group, grace = command.group, command.grace
    with desk.asking(command) as answers:
        for answer in answers(time.monotonic() + FIRST_ANSWER_S):
            if answer.verdict == "refused":
                raise OperatorError(f"{answer.by} refused: {answer.text}")
            on_accepted(f"{answer.by}: {answer.text}")
            break
        else:
            raise OperatorError(_nobody(desk, told, group, job))
        for answer in answers(time.monotonic() + grace + _REAPED_S):
            if answer.verdict == "done":
                return Eviction(told, answer.text)
    raise OperatorError(
        f"the processes of group {group} have not ended after {grace + _REAPED_S:g} s"
    )


def _place(job: JobState, text: str) -> tuple[str, int | None]:
    """Parse GROUP or GROUP.RANK; the name of a group may contain a dot."""
    group, dot, rank = text.rpartition(".")
    if text in job.groups or not dot or not rank.isdecimal():
        return text, None
    return group, int(rank)


def _tell_dead(desk: JobClient, job: JobState, group: str, rank: int | None) -> tuple[str, ...]:
    """Broadcast a death notice for each process of the place that is in the epoch."""
    entry = job.groups.get(group)
    ranks = [] if entry is None else [r for r in entry.ranks if rank in (None, r.rank)]
    if entry is not None and not ranks:
        numbers = ", ".join(str(r.rank) for r in entry.ranks)
        raise OperatorError(f"no rank {rank} in group {group}; its ranks: {numbers}")
    cause = f"evicted by {desk.me}"
    for r in ranks:
        desk.bus.broadcast(encode(Death(group, r.rank, r.pid, r.host, "operator", cause)))
    return tuple(f"{group}/{r.rank}: pid {r.pid} on {r.host}" for r in ranks)


def _nobody(desk: JobClient, told: tuple[str, ...], group: str, job: JobState) -> str:
    """Explain why an eviction had no effect, or only part of it."""
    missing = _why_silent(desk, group)
    if not told:
        return f"{missing}, and no group {group!r} is in the job; its groups: {listed(job.groups)}"
    return (
        f"{missing}. The job was told to continue without {'; '.join(told)}. A process that "
        "still lives is not let in again: end it by hand"
    )


def _why_silent(desk: JobClient, group: str) -> str:
    """Explain why no supervisor has answered a request about ``group``."""
    silent = f"no supervisor answered on {desk.bus.url} within {FIRST_ANSWER_S:g} s"
    try:
        head, held = desk.job().head, desk.bus.read(holder_register(group))
        if head is not None and head.last:
            return f"{silent}: the job has ended with step {head.step}, and its supervisors too"
        if held is None:
            return f"{silent}: no `fft run` has started group {group}"
        holder = decode_holder(held)
    except (BusError, OperatorError, UnreadableMessage) as error:
        return f"{silent}; it cannot be seen which one holds group {group}: {error}"
    if holder.free:
        return f"{silent}: the {holder} has ended, and has released group {group}"
    return f"{silent}: the {holder} holds group {group}, and may have stopped or been cut off"
