"""Claims on the job's bus that give one supervisor exclusive ownership of a replica group.

The register ``supervisor/GROUP`` names the holder of the group and the inbox at which other
supervisors ask whether the holder lives. So a job's start waits only for groups that were claimed
before.

The module owns one listener. It reads the clock and checks whether a process of this host exists.
The supervisor handles groups that were taken over: it takes `losses` and calls `yielded`.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fft.bus import ErrorBus
from fft.errors import BusError
from fft.health.hosts import beats
from fft.launch.bad_hosts import own_name
from fft.launch.supervisor.config import GroupHeld, SupervisorError
from fft.launch.supervisor.spanning import part_name
from fft.messages.codec import Codec
from fft.messages.commands import (
    Answer,
    Holder,
    Id,
    answer_inbox,
    decode_answer,
    decode_holder,
    encode_answer,
    encode_holder,
    fresh_id,
    holder_register,
)
from fft.messages.protocol import Name, Text, UnreadableMessage
from fft.operate.client import Ear
from fft.util.pidfd import is_there

GRACE_S = 10.0
"""Time for the processes of a group that is taken over to leave after a commit, before SIGKILL, in
seconds."""
_SILENCE_S = 10.0
"""Silence, in seconds, after which a holder counts as dead or stopped. It is longer than a change
of the bus's leader."""
_GONE_S = 1.0
"""The same limit for a holder on this host whose process no longer exists, and for one whose host
was found to have vanished, in seconds."""
_AGAIN_S = 0.5
"""Interval between two reads of the registers while waiting for a holder, in seconds."""
_YIELD_S = GRACE_S + 15.0
"""Time limit for a holder that has agreed to yield, in seconds: the grace and the end of its
processes."""

logger = logging.getLogger(__name__)

_CONFIG = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_CONFIG)
class Claim:
    """A request for groups, sent to the inbox of their holder, which answers or yields them."""

    id: Id
    groups: tuple[Name, ...]
    by: Text
    take_over: bool = False
    probes: bool = False
    """The request of a host with spares, which only checks whether the holder answers."""
    v: Literal[1] = 1


class Loss(NamedTuple):
    """A group that another supervisor now holds.

    ``claim`` is the request to answer when the group's processes here have ended. It is None if
    the group was taken over because this supervisor did not answer; its new processes run already.
    """

    group: str
    by: str
    claim: str | None


_CLAIMS = Codec[Claim](Claim)


class Claims:
    """The claims of one supervisor, from construction until ``close``. Raises ``BusError``."""

    def __init__(self, bus: ErrorBus, wake: Callable[[], None], serves: bool = False) -> None:
        """Listen for requests.

        Args:
            wake: Called, from any thread, when a group may have been lost.
            serves: The bus ends with this process, so it keeps at least one group.
        """
        self._bus, self._wake, self._serves = bus, wake, serves
        self.lost_hosts: dict[str, str] = {}
        """The host of the silent supervisor from which each group was taken."""
        self.id = fresh_id()
        """Name of this supervisor, also as a sender of heartbeats."""
        self._me = Holder(self.id, socket.gethostname(), os.getpid(), own_name())
        self.status: int | None = None
        """Exit status of this supervisor, which `close` writes to the registers of its groups."""
        self._mine: dict[str, bytes] = {}
        """The groups claimed, with the values of their registers while this process holds them."""
        self._losses: queue.SimpleQueue[Loss] = queue.SimpleQueue()
        self._inbox = f"supervisor/{self._me.id}"
        self._listener = bus.listen(self._inbox, self._hear, self._on_lost)

    def begin(self, step: int) -> None:
        """Name the step of the checkpoint that the job begins with, before groups are claimed."""
        self._me = replace(self._me, begun=step)

    def statuses(self, groups: Iterable[str]) -> list[int | None]:
        """Return for each group the exit status of the supervisor that has released it, or None.

        Raises:
            BusError: The bus cannot be reached.
            SupervisorError: A register cannot be read.
        """
        found = [(group, self._bus.read(holder_register(group))) for group in groups]
        return [None if held is None else self._holder(g, held).status for g, held in found]

    def take(
        self, groups: Iterable[str], take_over: bool, is_asked: Callable[[], bool] = lambda: False
    ) -> None:
        """Claim the groups, taking them over from holders that are gone.

        Blocks for at most 35 s if another supervisor holds one of them.

        Args:
            take_over: Ask living holders to yield as well.
            is_asked: Returns whether to end the wait early, with the groups claimed so far.

        Raises:
            GroupHeld: Another supervisor keeps one of the groups.
        """
        others = self._claimed_by_others(groups)
        if not others:
            return
        claim = Claim(fresh_id(), tuple(others), str(self._me), take_over)
        with self._answers_to(claim) as ear:
            self._ask(claim, others, ear, is_asked)

    def take_part(
        self,
        group: str,
        parts: int,
        is_asked: Callable[[], bool],
        has_copies: Callable[[int], bool] = lambda part: False,
    ) -> int | None:
        """Claim one of the parts of a group: a free one, or one whose holder does not answer.

        A host prefers parts of whose ranks it has copies. With parts of several groups it prefers
        different parts, because the ranks with one number, which have the same shard, must not be
        lost together.

        Args:
            parts: Number of parts of the group.
            has_copies: Returns whether this host has copies of the ranks of a part.
            is_asked: Returns whether to give up; called during waits.

        Returns:
            The number of the part, or None if asked to give up.

        Raises:
            GroupHeld: All parts have other supervisors, which live.
        """
        order = sorted(
            range(parts), key=lambda part: (not has_copies(part), (part - int(group)) % parts)
        )
        for take in self._has_claimed, partial(self.adopt, is_unwanted=is_asked):
            for part in order:
                if take(part_name(group, part)):
                    return part
                if is_asked():
                    return None
        raise GroupHeld(
            f"all {parts} parts of group {group} have supervisors that live; start this one with "
            "other groups (--first-group), or as a host of spares (--groups 0 --spares)"
        )

    def take_lost(self, names: Iterable[str], is_asked: Callable[[], bool]) -> str | None:
        """Claim one of these parts that has lost its host, or whose host was lent to another group.

        Args:
            is_asked: Returns whether to give up; called during waits.

        Returns:
            The name of the part, or None if no part lacks a host.
        """
        for name in names:
            if (held := self._bus.read(holder_register(name))) is None:
                continue
            holder = self._holder(name, held)
            is_lent = holder.free and holder.status is None
            if self._has_claimed(name) if is_lent else self.adopt(name, is_asked):
                return name
        return None

    def _has_claimed(self, name: str) -> bool:
        return not self._claimed_by_others([name])

    @contextmanager
    def _answers_to(self, claim: Claim) -> Iterator[Ear]:
        ear = Ear()
        listener = self._bus.listen(answer_inbox(claim.id), ear.hear, ear.lose)
        try:
            yield ear
        finally:
            listener.close()
            self._bus.delete(answer_inbox(claim.id))

    def adopt(self, group: str, is_unwanted: Callable[[], bool] = lambda: False) -> bool:
        """Claim a group if its holder does not answer; return whether that succeeded.

        A group that its holder released is not claimed, because the release was intended. Blocks
        for at most 10 s.

        Args:
            is_unwanted: Returns whether to give up; called during the wait.

        Raises:
            BusError: The bus cannot be reached.
            SupervisorError: The register cannot be read.
        """
        held = self._bus.read(holder_register(group))
        if held is None or (holder := self._holder(group, held)).free or group in self._mine:
            return False
        claim = Claim(fresh_id(), (group,), str(self._me), probes=True)
        deadline = time.monotonic() + self._patience(holder)
        with self._answers_to(claim) as ear:
            self._bus.send(f"supervisor/{holder.id}", _CLAIMS.encode(claim))
            while (now := time.monotonic()) < deadline:
                if is_unwanted() or any(ear.until(min(deadline, now + _AGAIN_S))):
                    return False
        if is_unwanted():
            return False
        self._take_from_the_silent(claim, {group: (held, holder)})
        return group in self._mine

    def is_silent(self, group: str) -> bool:
        """Return whether the group has a holder whose host was found to have vanished.

        Raises:
            BusError: The bus cannot be reached.
            SupervisorError: The register cannot be read.
        """
        held = self._bus.read(holder_register(group))
        if held is None or (holder := self._holder(group, held)).free:
            return False
        return not beats(self._bus, holder.id)

    def _patience(self, holder: Holder) -> float:
        """Return the seconds of silence after which a holder counts as dead or stopped."""
        is_lost = _is_gone(holder) or not beats(self._bus, holder.id)
        return _GONE_S if is_lost else _SILENCE_S

    def keeps(self, group: str) -> bool:
        """Check, before processes of the group are started, that this supervisor still holds it.

        Otherwise the group becomes a loss. A supervisor that was cut off from the bus may have
        missed that its group was taken over.

        Raises:
            BusError: The bus cannot be reached.
        """
        if (mine := self._mine.get(group)) is None:
            return False
        held = self._bus.read(holder_register(group))
        if held == mine:
            return True
        self._lose(group, "another fft run" if held is None else str(self._holder(group, held)))
        self._wake()
        return False

    def losses(self) -> Iterator[Loss]:
        """Yield the groups lost since the last call, each once."""
        with suppress(queue.Empty):
            while True:
                yield self._losses.get_nowait()

    def yielded(self, loss: Loss) -> None:
        """Release a lost group whose processes have all ended, so that its new holder starts it."""
        if loss.claim is None:
            return
        try:
            self.release(loss.group)
            word = Answer(loss.claim, str(self._me), "done", f"group {loss.group} is free")
            self._bus.send(answer_inbox(loss.claim), encode_answer(word))
        except BusError as error:
            logger.error("could not hand group %s over: %s", loss.group, error)

    def close(self) -> None:
        """Release all groups and stop listening. Idempotent."""
        self._listener.close()
        try:
            for group in list(self._mine):
                self.release(group, self.status)
            self._bus.delete(self._inbox)
        except BusError as error:  # the next claimant finds that this process is gone
            logger.warning("the claims of this job's groups stay on the bus: %s", error)

    # --- claiming ----------------------------------------------------------------------

    def _claimed_by_others(self, groups: Iterable[str]) -> dict[str, tuple[bytes, Holder]]:
        """Claim the free groups; return the others with the values of their registers."""
        others = {}
        for group in groups:
            if group in self._mine:
                continue
            held = self._bus.read(holder_register(group))
            while held is None or (holder := self._holder(group, held)).free:
                held = self._set(group, held)
                if group in self._mine:
                    break
            else:
                others[group] = held, holder
        return others

    def _set(self, group: str, expected: bytes | None) -> bytes | None:
        """Replace ``expected`` by this supervisor; return the register's value afterwards."""
        desired = encode_holder(self._me)
        held = self._bus.compare_set(holder_register(group), expected, desired)
        if held == desired:
            self._mine[group] = desired
        return held

    def _holder(self, group: str, held: bytes) -> Holder:
        try:
            return decode_holder(held)
        except UnreadableMessage:
            raise SupervisorError(
                f"who supervises group {group} cannot be read on {self._bus.url} without the "
                "job's token: set FFT_TOKEN_FILE; `fft serve` prints it"
            ) from None

    def _ask(
        self,
        claim: Claim,
        others: dict[str, tuple[bytes, Holder]],
        ear: Ear,
        is_asked: Callable[[], bool],
    ) -> None:
        asked: set[str] = set()
        deadline = 0.0
        while others and not is_asked():
            holders = {holder.id: holder for _, holder in others.values()}
            for holder in holders.values():
                if holder.id not in asked:
                    asked.add(holder.id)
                    deadline = max(deadline, time.monotonic() + self._patience(holder))
                    self._bus.send(f"supervisor/{holder.id}", _CLAIMS.encode(claim))
                    names = ", ".join(others)
                    logger.warning("group %s was claimed by %s; asking", names, holder)
            for _, payload in ear.until(min(deadline, time.monotonic() + _AGAIN_S)):
                with suppress(UnreadableMessage):
                    answer = decode_answer(payload)
                    if answer.verdict == "refused":
                        raise GroupHeld(
                            f"{answer.text}. Give this one other groups (--first-group), or end "
                            "that one, or start this one with --take-over"
                        )
                    if answer.verdict == "accepted":
                        deadline = time.monotonic() + _YIELD_S
                    break
            if time.monotonic() >= deadline:
                self._take_from_the_silent(claim, others)
            others = self._claimed_by_others(others)

    def _take_from_the_silent(self, claim: Claim, others: dict[str, tuple[bytes, Holder]]) -> None:
        for group, (held, holder) in others.items():
            logger.warning("group %s is taken over: %s does not answer", group, holder)
            self._set(group, held)
            self.lost_hosts[group] = holder.node
            # a holder that was only stopped receives this when it continues
            self._bus.send(f"supervisor/{holder.id}", _CLAIMS.encode(claim))
            if _is_gone(holder):
                self._bus.delete(f"supervisor/{holder.id}")

    # --- holding -----------------------------------------------------------------------

    def _hear(self, payload: bytes) -> None:
        """Answer a request on the listener's thread, since starting processes may keep the
        supervisor busy for long."""
        try:
            claim = _CLAIMS.decode(payload)
        except UnreadableMessage as error:
            logger.warning("a message of another supervisor is not in FFT's format: %s", error)
            return
        held = [group for group in claim.groups if group in self._mine]
        kept = [g for g in held if self._bus.read(holder_register(g)) == self._mine[g]]
        for group in held:
            if group not in kept:
                self._lose(group, claim.by)
        is_last = self._serves and len(kept) == len(self._mine)
        if kept and claim.take_over and not is_last:
            self._say(claim, "accepted", f"group {', '.join(kept)} is being handed over")
            for group in kept:
                self._losses.put(Loss(group, claim.by, claim.id))
        elif kept:
            level = logging.DEBUG if claim.probes else logging.WARNING
            logger.log(level, "%s wants group %s, and was refused", claim.by, ", ".join(kept))
            text = f"group {', '.join(kept)} has a supervisor that lives, {self._me}"
            if claim.take_over:
                text += ", which serves the job's bus and would end with its last group"
            self._say(claim, "refused", text)
        self._wake()

    def _lose(self, group: str, by: str) -> None:
        if self._mine.pop(group, None) is not None:  # else it is known
            self._losses.put(Loss(group, by, None))

    def _say(self, claim: Claim, verdict: Literal["accepted", "refused"], text: str) -> None:
        word = encode_answer(Answer(claim.id, str(self._me), verdict, text))
        self._bus.send(answer_inbox(claim.id), word)

    def release(self, group: str, status: int | None = None) -> None:
        """Let other supervisors claim the group. Raises BusError."""
        held = self._mine.pop(group, None)
        if held is not None:
            free = encode_holder(replace(self._me, free=True, status=status))
            self._bus.compare_set(holder_register(group), held, free)

    def _on_lost(self, error: BusError) -> None:
        logger.error("other supervisors cannot be heard any more: %s", error)


def _is_gone(holder: Holder) -> bool:
    return holder.host == socket.gethostname() and not is_there(holder.pid)
