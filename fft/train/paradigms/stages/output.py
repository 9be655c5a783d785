"""Output queue of a stage that commits its steps by itself: a queue between two ranks.

The earlier stage offers an **entry** for each slice of the data that it computes; the later one
asks for the slices that its transactions take. An entry is kept until the step that takes it is
committed, so that an attempt that is repeated reads it again. An entry that is missing, because
another group computed it, is recomputed from its slice with the current parameters. An entry that
no step function has put is computed when its txn commits.

This module runs on the main thread, except for the threads that accept, receive and send.
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
from fft.errors import FftError
from fft.protocol.flow import has_left_well
from fft.protocol.state import ScopePosition
from fft.trace.inputs import MADE_ANEW
from fft.train.data.batch_copy import copied
from fft.train.data.source import DataSource, Due
from fft.train.guard.watchers import Watchers
from fft.train.limits import Feature
from fft.train.session.rank_context import RankContext
from fft.util.kernel_limit import limit_in_kernel
from fft.util.listening import Waiting, listening_on

JOIN_S = 5.0
"""Limit in seconds for a thread of this module to end."""
_GREET_S = 10.0
"""Limit in seconds for the other end of a connection to authenticate."""
LOST = (EOFError, OSError)
"""Errors of a connection whose other end has gone."""
PLAIN = (int, float, bool, str, bytes, type(None))
"""Types of values that an entry may contain besides tensors."""


class Unauthenticated(Exception):
    """The other end has not authenticated by the job's token in time."""


def key_of(rank: RankContext) -> bytes:
    token = rank.settings.token
    return token.key("fft1", "flow") if token is not None else derive(b"", "fft1", "flow")


def address_key(scope: str) -> str:
    """Return the key in the group's store of the address of that stage's rank."""
    return f"fft/flow/{scope}"


def packed(value: dict[str, Any]) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def cpu_copy(value: Any) -> Any:
    """Return a detached copy in the host's memory. Raises FftError if it cannot be sent."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, PLAIN):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
    raise FftError(
        f"an entry contains a {kind}; expected tensors, numbers, text, bytes and None, in tuples, "
        "lists and dicts: convert it to a tensor"
    )


def authenticate(end: socket.socket, key: bytes, first: bool) -> Connection:
    """Authenticate the other end of ``end`` by ``key``, and return a connection.

    Args:
        end: The socket.
        key: The key of both ends.
        first: Whether this end sends the first challenge, as one of the two must.

    Raises:
        Unauthenticated: The other end has not authenticated; the connection is closed.
    """
    with end:
        limit_in_kernel(end, _GREET_S)
        connection = Connection(os.dup(end.fileno()))
        steps = (deliver_challenge, answer_challenge)
        try:
            for step in steps if first else reversed(steps):
                step(connection, key)
        except (AuthenticationError, *LOST) as error:
            connection.close()
            raise Unauthenticated(str(error)) from error
        limit_in_kernel(end, None)
    return connection


def cut(connection: Connection) -> None:
    """Shut the connection down, which wakes its reader."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class Consumer:
    """A connection of the next stage."""

    connection: Connection
    requested: set[int] = field(default_factory=set)
    is_gone: bool = False
    leave_sent: bool = False
    """A message was sent that the group leaves."""
    ready_sent: bool = False
    """A message was sent that this stage has the job's weights."""
    data: str = ""
    """Its description of the data; empty before it has sent one."""


logger = logging.getLogger(__name__)


_CONSUMER = "fft-flow-consumer"
"""Name of threads that serve the next stage."""


@dataclass(frozen=True)
class _Entry:
    value: Any
    version: int
    """Number of committed steps of the parameters with which the entry was computed."""


class StageOutput:
    """The queue to the next stage. Create it once, after ``register``.

    Args:
        manager: with a spec whose stages have their own scopes, such as ``pipeline_ahead``.
        produce: function without side effects that maps a batch to its entry. It recomputes a
            missing entry, between two transactions, without gradients. An entry is a tensor, or
            tuples, lists and dicts of tensors and plain values.

    Raises:
        FftError: the flow of the spec has no stage after this one, or several.
    """

    def __init__(self, manager: Manager, produce: Callable[[Any], Any]) -> None:
        rank: RankContext = manager._parts
        rank.features.use(Feature.STAGE_QUEUE)
        self._manager, self._rank = manager, rank
        after = [other.scope for other in rank.scope.flow if other.ahead]
        if len(after) != 1:
            raise FftError(
                f"StageOutput: expected one stage after {rank.scope.name!r} in the flow of the "
                f"spec, got {after or 'none'}"
            )
        if self._rank.state.registered_state is None:
            raise FftError("call manager.register(model, optimizer) before StageOutput(manager, …)")
        self._after, self._produce = after[0], produce
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}
        self._wanted: set[int] = set()
        """Slices that the next stage has requested and waits for."""
        self._taken = 0
        """The next stage has committed all slices before this one."""
        self._consumers: list[Consumer] = []
        self._was_taken = self._leaves = self._closed = False
        self._is_ready = False
        """This rank has the job's weights."""
        self._forgets = self._is_finished = False
        self._put_in: tuple[int, int] | None = None
        """The attempt in which `put` was called last."""
        self.source: DataSource | None = None
        self._key = key_of(rank)
        host = own_address(self._rank.settings.bus_url)
        self._waiting = Waiting()
        self._listening = listening_on(host)
        self._thread = threading.Thread(target=self._accept, name="fft-flow", daemon=True)
        self._thread.start()
        address = [host, self._listening.getsockname()[1]]
        manager._torchft.store.set(address_key(rank.scope.name), json.dumps(address))
        manager._parts.paradigm.output = self

    def put(self, txn: Any, value: Any) -> None:
        """Offer ``value`` to the next stage, for the batch of ``txn``, inside ``with txn:``.

        It is copied to the host's memory, without its gradients.
        """
        drawn = txn._drawn
        if drawn.slice is None:  # a batch that does not count here: another group offers its entry
            self._sync_frozen_stage()
            return
        if (attempt := (txn.epoch, txn.attempt)) == self._put_in:
            raise FftError(
                "put() was called twice in this step function: call it once in each transaction"
            )
        self._put_in = attempt
        kept = tree_map(cpu_copy, value)
        self._offer(drawn.slice, _Entry(kept, txn.step))
        self._sync_frozen_stage()

    def _offer(self, number: int, entry: _Entry) -> None:
        """Keep the entry, unless the next stage has committed its slice or has ended."""
        after = self._next_stage
        with self._changed:
            self._forget(after.cursor)
            if number >= self._taken and not after.has_ended:
                self._entries[number] = entry
            self._wanted.discard(number)
            self._changed.notify_all()

    @property
    def _next_stage(self) -> ScopePosition:
        """The scope of the next stage, as far as this rank knows it."""
        local = self._rank.job.local
        assert local is not None, "a txn has begun"
        return next(e for e in local.others if e.scope == self._after)

    def _sync_frozen_stage(self) -> None:
        """All-reduce a number in a frozen stage, which has no gradients.

        This keeps the groups in lockstep, and the manifest of the vote is not empty.
        """
        if not self._rank.state.updates.has_optimizers:
            self._manager.allreduce(torch.ones(1)).wait()

    # --- the main thread, between two transactions ---

    def export_entries(self, slices: range) -> list[tuple[int, int, Any]]:
        """Return slice, version and value of entries that the next stage may still take."""
        with self._changed:
            there = sorted(self._entries.items())
        return [(number, each.version, each.value) for number, each in there if number in slices]

    def load_entries(self, entries: Sequence[tuple[int, int, Any]]) -> None:
        """Offer the result of `export_entries`, before the job is joined."""
        with self._changed:
            self._entries |= {number: _Entry(value, v) for number, v, value in entries}

    def serve_until_command(
        self, engine: Engine, watchers: Watchers, computing: int | None
    ) -> None:
        """Compute requested entries until the engine has a command for this thread.

        A txn of this stage that is held may depend on these entries. The next stage receives a
        message as soon as this rank has the job's weights, because it may have to join before a txn
        can begin here. The entry of slice ``computing`` is excluded, because its open txn sends it
        at its commit; the next stage may learn of that commit first, and request it.
        """
        while not engine.has_command():
            with watchers.waiting():
                is_due = engine.wait_for(
                    lambda: (
                        self._has_state and (bool(self._wanted - {computing}) or not self._is_ready)
                    )
                )
            if is_due:
                self.compute_requested(but=computing)

    def compute_requested(self, but: int | None = None) -> None:
        """Compute the requested entries, ``but`` that of the slice of the open txn."""
        if not self._has_state:
            return
        with self._changed:
            self._is_ready = True
            self._changed.notify_all()
        for number in sorted(self._wanted - {but}):
            self._make(number)

    def _make(self, number: int) -> None:
        assert self.source is not None, "the loop has begun"
        batch = copied(self.source.take(Due(0, number, 1)))
        try:
            with self._rank.state.preserved(), torch.no_grad():
                value = tree_map(cpu_copy, self._produce(batch))
        except Exception as error:
            error.add_note(f"while StageOutput recomputed the entry of slice {number}")
            raise
        version = self._manager._torchft.step
        logger.info("the entry of slice %d was recomputed, with version %d", number, version)
        self._rank.job.note(MADE_ANEW, {"slice": number, "version": version})
        self._offer(number, _Entry(value, version))

    @property
    def _has_state(self) -> bool:
        """Whether this rank has the job's weights. A new process has to fetch them first.

        A rank that left between two epochs keeps those of its last commit.
        """
        local, step = self._rank.job.local, self._rank.state.registered
        return local is not None and (local.healed or (has_left_well(local) and not step.captured))

    def committed(self, txn: Any) -> None:
        """Compute the entry of ``txn`` if its step function has put none, and warn once.

        If it were computed on request, its weights would depend on timing.
        """
        number, has_put = txn._drawn.slice, self._put_in == (txn.epoch, txn.attempt)
        if has_put or number is None or not self._has_state or self._next_stage.has_ended:
            return
        if not txn.skipped and not self._forgets:
            self._forgets = True
            logger.warning(
                "the step function of slice %d has not called output.put(); its entry is "
                "computed after its step, by the function of StageOutput. Call output.put(txn, "
                "…) in each step function",
                number,
            )
            self._rank.job.note("entry_forgotten", {"slice": number})
        self._make(number)

    def finish(self, leaves: bool, was_left: bool = False) -> None:
        """Serve the remaining requests until the next stage has ended, too.

        It runs once, when the loop is over or this rank has left the job. Until then, a loop that
        was left by `break` may continue.

        Args:
            leaves: this group drains, while the job may continue; the next stage of the group
                drains too.
            was_left: the loop was left by `break`, and its loader is closed.
        """
        if self._is_finished or self.source is None or self._closed:
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
                        self._closed
                        or bool(self._wanted)
                        or (self._was_taken and not self._consumers)
                    ),
                    limit_s,
                )
                if not self._wanted or self._closed or not self._has_state:
                    break
            if was_left:
                self.source.open()
                was_left = False  # once
            self.compute_requested()
        if not came:
            logger.error(
                "the next stage has neither ended nor requested an entry for %g s; giving up",
                limit_s,
            )

    def close(self) -> None:
        """End the connections and the thread. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            for consumer in self._consumers:
                cut(consumer.connection)
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join(JOIN_S)
        self._listening.close()

    # --- threads of ours ---

    def _accept(self) -> None:
        while not self._closed:
            try:
                end, client = self._listening.accept()
            except OSError:  # the listener is closed, or the client has disconnected already
                continue
            self._waiting.enter(end, client[0])
            threading.Thread(target=self._serve, args=(end,), name=_CONSUMER, daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        """Serve one connection after its authentication."""
        try:
            consumer = Consumer(authenticate(end, self._key, first=True))
        except Unauthenticated as error:
            logger.warning(
                "rejected a connection that did not authenticate by the job's token: %s", error
            )
            return
        finally:
            self._waiting.leave(end)
        with self._changed:
            if self._closed:
                consumer.connection.close()
                return
            self._consumers.append(consumer)
            self._was_taken = True
        threading.Thread(target=self._send, args=(consumer,), name=_CONSUMER, daemon=True).start()
        self._receive_requests(consumer)

    def _receive_requests(self, consumer: Consumer) -> None:
        """Receive the requests of one consumer until it disconnects."""
        try:
            while True:
                words = json.loads(consumer.connection.recv_bytes())
                if words[0] == "data":
                    consumer.data = words[1]
                    continue
                number, done, is_needed = words
                with self._changed:
                    self._forget(done)
                    consumer.requested.add(number)
                    if is_needed and number not in self._entries:
                        self._wanted.add(number)
                        self._nudge()
                    self._changed.notify_all()
        except LOST:
            with self._changed:
                consumer.is_gone = True
                self._changed.notify_all()

    def _send(self, consumer: Consumer) -> None:
        """Send requested entries to one consumer as they become available."""
        with consumer.connection:
            try:
                while (entry := self._next(consumer)) is not None:
                    consumer.connection.send_bytes(entry)
            except LOST:
                logger.info("the next stage has gone while an entry was sent to it")
            finally:
                with self._changed:
                    self._consumers.remove(consumer)
                    self._changed.notify_all()

    def _next(self, consumer: Consumer) -> bytes | None:
        """Wait for the next message to this consumer; return None if the connection is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or consumer.is_gone
                    or consumer.leave_sent < self._leaves
                    or consumer.ready_sent < self._is_ready
                    or bool(consumer.requested & self._entries.keys())
                )
            )
            if self._closed or consumer.is_gone:
                return None
            if consumer.leave_sent < self._leaves:
                consumer.leave_sent = True
                return packed({"leaves": True})
            if consumer.ready_sent < self._is_ready:
                consumer.ready_sent = True
                return packed({"ready": True})
            if (refused := self._loader_mismatch(consumer)) is not None:
                return packed({"refused": refused})
            number = min(consumer.requested & self._entries.keys())
            consumer.requested.discard(number)
            entry = self._entries[number]
        return packed({"slice": number, "version": entry.version, "value": entry.value})

    def _loader_mismatch(self, consumer: Consumer) -> str | None:
        """Return the message for a consumer with another loader, or None if the loaders match."""
        mine = None if self.source is None else repr(self.source.export(0))
        if mine is None or consumer.data in ("", mine):
            return None
        return (
            f"its loader is {consumer.data}, but that of the first stage is {mine}: pass the "
            "loader of the first stage to StageInput"
        )

    def _forget(self, done: int) -> None:
        """Drop the entries before slice ``done``, which the next stage has committed."""
        self._taken = max(self._taken, done)
        for old in [number for number in self._entries if number < self._taken]:
            del self._entries[old]

    def _nudge(self) -> None:
        if (engine := self._rank.job.engine) is not None:
            engine.nudge()
