"""Of two supervisors that want one group, one has it: claims of groups, on the job's bus.

The register ``supervisor/GROUP`` names who has claimed the group, and the inbox at which that one
is asked whether it lives. So a job's start waits for nobody, unless the group was claimed before.

Owns one listener. Reads the clock, and whether a process of this host is there. What is to happen
to a group that was taken over is the supervisor's: it takes `losses`, and says `yielded`.
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
from functools import cache
from typing import Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from fft.bus import BusError, ErrorBus
from fft.launch.supervisor.config import SupervisorError
from fft.messages.commands import Answer, Id, answer_inbox, decode_answer, encode_answer, fresh_id
from fft.messages.protocol import Count, Name, Text, UnreadableMessage
from fft.operate.client import Ear
from fft.util.pidfd import is_there

GRACE_S = 10.0
"""For the processes of a group that is taken over to leave after a commit, before SIGKILL."""
_SILENCE_S = 10.0
"""Who does not answer for so long is dead, or stopped; a bus may have changed its leader."""
_GONE_S = 1.0
"""The same, where its process was on this host and is not there any more."""
_AGAIN_S = 0.5
"""Between two looks at the registers while somebody is waited for."""
_YIELD_S = GRACE_S + 15.0
"""For who has said that it yields: the grace, and the end of its processes."""

logger = logging.getLogger(__name__)

_CONFIG = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_CONFIG)
class Holder:
    """Who has claimed a group. ``id`` names its inbox; ``free``: it has let go of the group."""

    id: Id
    host: str
    pid: Count
    free: bool = False
    v: Literal[1] = 1

    def __str__(self) -> str:
        return f"fft run with pid {self.pid} on {self.host}"


@dataclass(frozen=True, config=_CONFIG)
class Claim:
    """To the inbox of a holder: somebody else wants these groups; say that you live, or yield."""

    id: Id
    groups: tuple[Name, ...]
    by: Text
    take_over: bool = False
    probes: bool = False
    """A host with spares asks, in case you are gone: that you answer is all that it wants."""
    v: Literal[1] = 1


class Loss(NamedTuple):
    """A group that another supervisor has now. ``claim``: to answer when its processes have
    ended; None: it was taken from one who did not answer, so its new processes run already."""

    group: str
    by: str
    claim: str | None


@cache
def _holders() -> TypeAdapter[Holder]:
    return TypeAdapter(Holder)


@cache
def _claims() -> TypeAdapter[Claim]:
    return TypeAdapter(Claim)


def register(group: str) -> str:
    """Where it stands who has claimed the group."""
    return f"supervisor/{group}"


class Claims:
    """The claims of one supervisor, from its making until ``close``. Raises ``BusError``."""

    def __init__(self, bus: ErrorBus, wake: Callable[[], None], serves: bool = False) -> None:
        """``wake`` is called, from any thread, when there is a loss. ``serves``: the bus ends with
        this process, so it keeps one group at least."""
        self._bus, self._wake, self._serves = bus, wake, serves
        self._me = Holder(fresh_id(), socket.gethostname(), os.getpid())
        self._mine: dict[str, bytes] = {}
        """The groups claimed, and what their registers hold then."""
        self._losses: queue.SimpleQueue[Loss] = queue.SimpleQueue()
        self._inbox = f"supervisor/{self._me.id}"
        self._listener = bus.listen(self._inbox, self._hear, self._on_lost)

    def take(
        self, groups: Iterable[str], take_over: bool, is_asked: Callable[[], bool] = lambda: False
    ) -> None:
        """Claim the groups. A holder that lives yields if ``take_over``; one that is gone anyway.

        ``is_asked``: whether to end the wait for others, with whatever was claimed. Raises
        SupervisorError: somebody else has one of them. Blocks for 35 s at most, then.
        """
        others = self._claimed_by_others(groups)
        if not others:
            return
        claim = Claim(fresh_id(), tuple(others), str(self._me), take_over)
        with self._answers_to(claim) as ear:
            self._ask(claim, others, ear, is_asked)

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
        """Claim a group if who has claimed it does not answer; whether it is ours now.

        Not if it was let go of: that was meant so. ``is_unwanted`` is asked meanwhile. Blocks for
        10 s at most. Raises BusError, SupervisorError.
        """
        held = self._bus.read(register(group))
        if held is None or (holder := self._holder(group, held)).free or group in self._mine:
            return False
        claim = Claim(fresh_id(), (group,), str(self._me), probes=True)
        deadline = time.monotonic() + _patience(holder)
        with self._answers_to(claim) as ear:
            self._bus.send(f"supervisor/{holder.id}", _claims().dump_json(claim))
            while (now := time.monotonic()) < deadline:
                if is_unwanted() or any(ear.until(min(deadline, now + _AGAIN_S))):
                    return False
        if is_unwanted():
            return False
        self._take_from_the_silent(claim, {group: (held, holder)})
        return group in self._mine

    def keeps(self, group: str) -> bool:
        """Whether the group is still ours, before processes of it are started; else it is a loss.

        Who was cut off from the bus may not have heard that it was taken over. Raises BusError.
        """
        if (mine := self._mine.get(group)) is None:
            return False
        held = self._bus.read(register(group))
        if held == mine:
            return True
        self._lose(group, "another fft run" if held is None else str(self._holder(group, held)))
        self._wake()
        return False

    def losses(self) -> Iterator[Loss]:
        """What was lost since the last call; each group once."""
        with suppress(queue.Empty):
            while True:
                yield self._losses.get_nowait()

    def yielded(self, loss: Loss) -> None:
        """All processes of the group have ended: whoever takes it over may start its own."""
        if loss.claim is None:
            return
        try:
            self._release(loss.group)
            word = Answer(loss.claim, str(self._me), "done", f"group {loss.group} is free")
            self._bus.send(answer_inbox(loss.claim), encode_answer(word))
        except BusError as error:
            logger.error("could not hand group %s over: %s", loss.group, error)

    def close(self) -> None:
        """Let go of all groups, and stop listening. Idempotent."""
        self._listener.close()
        try:
            for group in list(self._mine):
                self._release(group)
            self._bus.delete(self._inbox)
        except BusError as error:  # who comes next finds that this process is gone
            logger.warning("the claims of this job's groups stay on the bus: %s", error)

    # --- who claims --------------------------------------------------------------------

    def _claimed_by_others(self, groups: Iterable[str]) -> dict[str, tuple[bytes, Holder]]:
        """Claim those that nobody has; the others, and what their registers hold."""
        others = {}
        for group in groups:
            if group in self._mine:
                continue
            held = self._bus.read(register(group))
            while held is None or (holder := self._holder(group, held)).free:
                held = self._set(group, held)
                if group in self._mine:
                    break
            else:
                others[group] = held, holder
        return others

    def _set(self, group: str, expected: bytes | None) -> bytes | None:
        """Put us in the place of ``expected``; what is held afterwards."""
        desired = _holders().dump_json(self._me)
        held = self._bus.compare_set(register(group), expected, desired)
        if held == desired:
            self._mine[group] = desired
        return held

    def _holder(self, group: str, held: bytes) -> Holder:
        try:
            return _holders().validate_json(held)
        except ValidationError:
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
                    deadline = max(deadline, time.monotonic() + _patience(holder))
                    self._bus.send(f"supervisor/{holder.id}", _claims().dump_json(claim))
                    logger.warning("group %s was claimed by %s; asking", list(others), holder)
            for _, payload in ear.until(min(deadline, time.monotonic() + _AGAIN_S)):
                with suppress(UnreadableMessage):
                    answer = decode_answer(payload)
                    if answer.verdict == "refused":
                        raise SupervisorError(
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
            # if it was only stopped, it hears of it when it goes on
            self._bus.send(f"supervisor/{holder.id}", _claims().dump_json(claim))
            if _is_gone(holder):
                self._bus.delete(f"supervisor/{holder.id}")

    # --- who holds ---------------------------------------------------------------------

    def _hear(self, payload: bytes) -> None:
        """Thread of the listener: the supervisor may be busy starting processes for long."""
        try:
            claim = _claims().validate_json(payload)
        except ValidationError as error:
            logger.warning("what another supervisor says is not in FFT's format: %s", error)
            return
        held = [group for group in claim.groups if group in self._mine]
        kept = [g for g in held if self._bus.read(register(g)) == self._mine[g]]
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

    def _release(self, group: str) -> None:
        held = self._mine.pop(group, None)
        if held is not None:
            free = _holders().dump_json(replace(self._me, free=True))
            self._bus.compare_set(register(group), held, free)

    def _on_lost(self, error: BusError) -> None:
        logger.error("other supervisors cannot be heard any more: %s", error)


def _patience(holder: Holder) -> float:
    return _GONE_S if _is_gone(holder) else _SILENCE_S


def _is_gone(holder: Holder) -> bool:
    return holder.host == socket.gethostname() and not is_there(holder.pid)
