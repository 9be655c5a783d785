"""What a stage gives to the next one, where each steps by itself: a queue between two ranks.

The earlier stage offers an **entry** for each slice of the data that it computes; the later one
asks for the slices that its transactions take. An entry is kept until the step that takes it is
committed, so that an attempt that is repeated reads it again. One that is not there any more, for
its group was another one then, is made anew from the slice, with the parameters of that time. One
that a body has not given is made when its txn is committed.

Main thread, but for the threads that accept, hear and send.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torchft.manager import Manager

from fft.bus.addresses import own_address
from fft.bus.token import derive
from fft.engine.loop import Engine
from fft.errors import DataError, FftError
from fft.protocol.elsewhere import Elsewhere
from fft.protocol.flow import has_left_well
from fft.trace.inputs import MADE_ANEW
from fft.train.data.batch_copy import copied
from fft.train.data.source import DataSource, Due
from fft.train.rank import Rank
from fft.train.watchers import Watchers
from fft.util.kernel_limit import limit_in_kernel

JOIN_S = 5.0
"""For a thread of ours to end that was told to."""
_GREET_S = 10.0
"""For the other end of a connection to show that it has the job's token."""
LOST = (EOFError, OSError)
"""Errors of a connection whose other end has gone."""
PLAIN = (int, float, bool, str, bytes, type(None))
"""Types of values that an entry may contain besides tensors."""


class Stranger(Exception):
    """The other end has not shown in time that it has the job's token."""


def refuse_other_spec(rank: Rank) -> None:
    """Raise FftError unless the stages of the spec have scopes of their own."""
    if not rank.scope.by_rank:
        raise FftError(
            f"spec {rank.settings.spec.name!r} has no stages that step by themselves: use "
            "spec='pipeline_ahead'"
        )


def key_of(rank: Rank) -> bytes:
    token = rank.settings.token
    return token.key("fft1", "flow") if token is not None else derive(b"", "fft1", "flow")


def place(scope: str) -> str:
    """In the group's store: where the rank of that stage can be reached."""
    return f"fft/flow/{scope}"


def packed(value: dict[str, Any]) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def kept_of(value: Any) -> Any:
    """A copy in the host's memory, without gradients. Raises FftError: it cannot be sent."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, PLAIN):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
    raise FftError(
        f"an entry holds a {kind}; it can hold tensors, numbers, text, bytes and None, in tuples, "
        "lists and dicts: put a tensor in its place"
    )


def greet(end: socket.socket, key: bytes, first: bool) -> Connection:
    """A connection on ``end``, whose other end has ``key``, too. Raises Stranger, and closes it.

    ``first``: who asks first; the other end does not.
    """
    limit_in_kernel(end, _GREET_S)
    connection = Connection(end.detach())
    steps = (deliver_challenge, answer_challenge)
    try:
        for step in steps if first else reversed(steps):
            step(connection, key)
    except (AuthenticationError, *LOST) as error:
        connection.close()
        raise Stranger(str(error)) from error
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        limit_in_kernel(same, None)
    return connection


def cut(connection: Connection) -> None:
    """Wake whoever reads from it: it has ended."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class Taker:
    """A connection of the next stage."""

    connection: Connection
    asked: set[int] = field(default_factory=set)
    is_gone: bool = False
    is_told: bool = False
    """That the group leaves."""
    is_welcome: bool = False
    """It knows that there is somebody with the job's weights here."""
    data: str = ""
    """Its description of the data; empty before it has sent one."""


logger = logging.getLogger(__name__)


_TAKER = "fft-flow-taker"
"""Name of threads that serve the next stage."""


@dataclass(frozen=True)
class _Entry:
    value: Any
    version: int
    """Committed steps of the parameters that it was computed with."""


class StageOutput:
    """What this stage gives to the next one. Make it after ``register``, once.

    Args:
        manager: with a spec whose stages have scopes of their own, such as ``pipeline_ahead``.
        produce: batch → entry, without side effects, for a slice whose entry is not there any
            more; called between two transactions, without gradients. An entry is a tensor, or
            tuples, lists and dicts of tensors and plain values.

    Raises:
        FftError: this stage has no next one in the flow of the spec.
    """

    def __init__(self, manager: Manager, produce: Callable[[Any], Any]) -> None:
        rank: Rank = manager._parts.rank
        refuse_other_spec(rank)
        self._manager, self._rank = manager, rank
        after = [other.scope for other in rank.scope.flow if other.ahead]
        if len(after) != 1:
            raise FftError(
                f"StageOutput: by the flow of the spec {after or 'no stage'} takes what "
                f"{rank.scope.name!r} gives; it is for exactly one"
            )
        if self._rank.state.step is None:
            raise FftError("call manager.register(model, optimizer) before StageOutput(manager, …)")
        self._after, self._produce = after[0], produce
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}
        self._wanted: set[int] = set()
        """Slices that somebody waits for."""
        self._taken = 0
        """All before it are committed by who takes them."""
        self._takers: list[Taker] = []
        self._was_taken = self._leaves = self._closed = False
        self._is_ready = False
        """The job's weights are here."""
        self._forgets = self._is_finished = False
        self._put_in: tuple[int, int] | None = None
        """The attempt in which something was put last."""
        self._source: DataSource | None = None
        self._key = key_of(rank)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listening = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self._thread = threading.Thread(target=self._accept, name="fft-flow", daemon=True)
        self._thread.start()
        host = own_address(self._rank.settings.bus_url)
        address = [host, self._listening.getsockname()[1]]
        manager._torchft.store.set(place(rank.scope.name), json.dumps(address))
        manager._parts.paradigm.output = self

    def put(self, txn: Any, value: Any) -> None:
        """In the body of ``txn``: offer ``value``, of its batch, to the next stage.

        It is copied to the host's memory, without its gradients.
        """
        drawn = txn._drawn
        if drawn.slice is None:  # a batch that does not count here: another group offers it
            self._meet_others()
            return
        if (attempt := (txn.epoch, txn.attempt)) == self._put_in:
            raise FftError("put() is called twice in this body: a slice of the data has one entry")
        self._put_in = attempt
        kept = tree_map(kept_of, value)
        self._offer(drawn.slice, _Entry(kept, txn.step))
        self._meet_others()

    def _offer(self, number: int, entry: _Entry) -> None:
        """Keep it for the next stage, if that can still ask for it."""
        after = self._next_stage
        with self._changed:
            self._forget(after.cursor)
            if number >= self._taken and not after.has_ended:
                self._entries[number] = entry
            self._wanted.discard(number)
            self._changed.notify_all()

    @property
    def _next_stage(self) -> Elsewhere:
        """Its scope, as far as it is known here."""
        local = self._rank.job.local
        assert local is not None, "a txn has begun"
        return next(e for e in local.elsewhere if e.scope == self._after)

    def _meet_others(self) -> None:
        """Of a frozen stage, which has no gradients: the groups reduce something all the same, so
        that they are in one step, and the commit is not one of nothing."""
        if not self._rank.state.updates.has_optimizers:
            self._manager.allreduce(torch.ones(1)).wait()

    # --- the main thread, between two transactions ---

    def export_entries(self, slices: range) -> list[tuple[int, int, Any]]:
        """Slice, version and value of those of ``slices`` that the next stage may still take."""
        with self._changed:
            there = sorted(self._entries.items())
        return [(number, each.version, each.value) for number, each in there if number in slices]

    def load_entries(self, entries: Sequence[tuple[int, int, Any]]) -> None:
        """Offer what `export_entries` gave; before the job is joined."""
        with self._changed:
            self._entries |= {number: _Entry(value, v) for number, v, value in entries}

    def draws_from(self, source: DataSource) -> None:
        """Where the slices come from that an entry is made anew for. Raises DataError."""
        if not source.in_any_order:
            raise DataError(
                "an entry that is lost with its group is made anew from its slice, and this loader "
                "can only be read from its beginning; use fft.CursorLoader or fft.StreamLoader"
            )
        self._source = source

    def give_until_command(self, engine: Engine, watchers: Watchers, computing: int | None) -> None:
        """Make what is waited for, until the engine has a command for this thread.

        A txn of this stage that is held may wait for this very thing. The next stage is told as
        soon as the job's weights are here: it may be its turn to come, before a txn begins here.
        The slice ``computing`` of an open txn has its turn when that is committed: the next stage
        may hear of that first, and ask.
        """
        while not engine.has_word():
            with watchers.waiting():
                is_due = engine.wait_for(
                    lambda: (
                        self._has_state and (bool(self._wanted - {computing}) or not self._is_ready)
                    )
                )
            if is_due:
                self.make(but=computing)

    def make(self, but: int | None = None) -> None:
        """Make the entries that are waited for; all ``but`` that which is about to be computed."""
        if not self._has_state:
            return
        with self._changed:
            self._is_ready = True
            self._changed.notify_all()
        for number in sorted(self._wanted - {but}):
            self._make(number)

    def _make(self, number: int) -> None:
        assert self._source is not None, "the loop has begun"
        batch = copied(self._source.take(Due(0, number, 1)))
        try:
            with self._rank.state.preserved(), torch.no_grad():
                value = tree_map(kept_of, self._produce(batch))
        except Exception as error:
            error.add_note(f"as StageOutput made the entry of slice {number} anew")
            raise
        version = self._manager._torchft.step
        logger.info("the entry of slice %d was made anew, with version %d", number, version)
        self._rank.job.note(MADE_ANEW, {"slice": number, "version": version})
        self._offer(number, _Entry(value, version))

    @property
    def _has_state(self) -> bool:
        """Whether the weights here are the job's: not those of a process that has just come.

        Who has left between two epochs keeps those of the last commit.
        """
        local, step = self._rank.job.local, self._rank.state.registered
        return local is not None and (local.healed or (has_left_well(local) and not step.captured))

    def committed(self, txn: Any) -> None:
        """Make the entry of ``txn`` if its body has put nothing; say so once, unless skipped.

        Now: when it is asked for depends on time, and so would the weights.
        """
        number, has_put = txn._drawn.slice, self._put_in == (txn.epoch, txn.attempt)
        if has_put or number is None or not self._has_state or self._next_stage.has_ended:
            return
        if not txn.skipped and not self._forgets:
            self._forgets = True
            logger.warning(
                "the body of slice %d has given nothing to the next stage; its entry is made after "
                "its step, by the function of StageOutput. Call output.put(txn, …) in each body",
                number,
            )
            self._rank.job.note("entry_forgotten", {"slice": number})
        self._make(number)

    def finish(self, leaves: bool, was_left: bool = False) -> None:
        """Give what is left, until the next stage has ended, too. Once, when the loop is over, or
        when this rank has left: a loop that is left by `break` may be gone on with until then.

        Args:
            leaves: this group leaves the job, which may go on; the next stage leaves it as well.
            was_left: the loop was left by `break`, and its loader is closed.
        """
        if self._is_finished or self._source is None or self._closed:
            return
        self._is_finished = True
        limit_s = self._rank.limits["flow_limit"].seconds
        with self._changed:
            self._leaves = leaves
            self._changed.notify_all()
        while True:
            with self._changed:
                came = self._changed.wait_for(
                    lambda: (
                        self._closed or bool(self._wanted) or (self._was_taken and not self._takers)
                    ),
                    limit_s,
                )
                if not self._wanted or self._closed or not self._has_state:
                    break
            if was_left:
                self._source.open()
                was_left = False  # once
            self.make()
        if not came:
            logger.error("the next stage has not ended, and asked for nothing, for %g s", limit_s)

    def close(self) -> None:
        """End the connections and the thread. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            for taker in self._takers:
                cut(taker.connection)
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join(JOIN_S)
        self._listening.close()

    # --- threads of ours ---

    def _accept(self) -> None:
        while not self._closed:
            try:
                end, _ = self._listening.accept()
            except OSError:  # closed; or whoever came has gone already
                continue
            threading.Thread(target=self._meet, args=(end,), name=_TAKER, daemon=True).start()

    def _meet(self, end: socket.socket) -> None:
        """Serve somebody, if he has the job's token."""
        try:
            taker = Taker(greet(end, self._key, first=True))
        except Stranger as error:
            logger.warning("somebody without the job's token came for entries: %s", error)
            return
        with self._changed:
            if self._closed:
                taker.connection.close()
                return
            self._takers.append(taker)
            self._was_taken = True
        threading.Thread(target=self._send, args=(taker,), name=_TAKER, daemon=True).start()
        self._hear(taker)

    def _hear(self, taker: Taker) -> None:
        """What somebody asks for, until it has ended."""
        try:
            while True:
                words = json.loads(taker.connection.recv_bytes())
                if words[0] == "data":
                    taker.data = words[1]
                    continue
                number, done, is_needed = words
                with self._changed:
                    self._forget(done)
                    taker.asked.add(number)
                    if is_needed and number not in self._entries:
                        self._wanted.add(number)
                        self._nudge()
                    self._changed.notify_all()
        except LOST:
            with self._changed:
                taker.is_gone = True
                self._changed.notify_all()

    def _send(self, taker: Taker) -> None:
        """Entries as they come, to who has asked for them."""
        with taker.connection:
            try:
                while (entry := self._next(taker)) is not None:
                    taker.connection.send_bytes(entry)
            except LOST:
                logger.info("the next stage has gone while an entry was sent to it")
            finally:
                with self._changed:
                    self._takers.remove(taker)
                    self._changed.notify_all()

    def _next(self, taker: Taker) -> bytes | None:
        """The next one that it has asked for and that is there; None: it needs none any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or taker.is_gone
                    or taker.is_told < self._leaves
                    or taker.is_welcome < self._is_ready
                    or bool(taker.asked & self._entries.keys())
                )
            )
            if self._closed or taker.is_gone:
                return None
            if taker.is_told < self._leaves:
                taker.is_told = True
                return packed({"leaves": True})
            if taker.is_welcome < self._is_ready:
                taker.is_welcome = True
                return packed({"ready": True})
            if (refused := self._unlike(taker)) is not None:
                return packed({"refused": refused})
            number = min(taker.asked & self._entries.keys())
            taker.asked.discard(number)
            entry = self._entries[number]
        return packed({"slice": number, "version": entry.version, "value": entry.value})

    def _unlike(self, taker: Taker) -> str | None:
        """What to say to somebody who has other data; None: they are the same."""
        mine = None if self._source is None else repr(self._source.export(0))
        if mine is None or taker.data in ("", mine):
            return None
        return (
            f"its loader is {taker.data}, and that of the first stage is {mine}: give StageInput "
            "the loader of the first stage"
        )

    def _forget(self, done: int) -> None:
        """The slices before ``done`` are committed by who takes them."""
        self._taken = max(self._taken, done)
        for old in [number for number in self._entries if number < self._taken]:
            del self._entries[old]

    def _nudge(self) -> None:
        if (engine := self._rank.job.engine) is not None:
            engine.nudge()
