"""What one stage gives another, where each steps by itself: a queue between two ranks of a group.

The earlier stage offers an **entry** for each slice of the data that it computes; the later one
asks for the slices that its transactions take. An entry is kept until the step that takes it is
committed, so that an attempt that is repeated reads it again. One that is not there any more, for
its group was another one then, is made anew from the slice, with the parameters of that time.

Touches sockets (multiprocessing's connections, which authenticate each other), and the group's own
store, where the address is. Entries are tensors and plain values: nothing that is unpickled runs.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from fft.bus.token import derive
from fft.train.data.batch_copy import copied
from fft.train.data.source import DataError, DataSource, Due, Superseded, as_source
from fft.util.errors import FftError

if TYPE_CHECKING:
    from fft.train.manager import ManagerFFT
    from fft.train.parts import Parts
    from fft.train.stage_scope import StageScope

logger = logging.getLogger(__name__)

_JOIN_S = 5.0
"""For a thread of ours to end that was told to."""
_LOST = (EOFError, OSError)


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

    def __init__(self, manager: ManagerFFT, produce: Callable[[Any], Any]) -> None:
        self._manager, (self._parts, stage) = manager, _parts_of(manager)
        after = [other.scope for other in stage.flow if other.ahead]
        if len(after) != 1:
            raise FftError(
                f"StageOutput: by the flow of the spec {after or 'no stage'} takes what "
                f"{stage.name!r} gives; it is for exactly one"
            )
        if self._parts.state.step is None:
            raise FftError("call manager.register(model, optimizer) before StageOutput(manager, …)")
        self._produce = produce
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}
        self._wanted: set[int] = set()
        """Slices that somebody waits for."""
        self._taken = 0
        """All before it are committed by who takes them."""
        self._takers: list[_Taker] = []
        self._was_taken = self._leaves = self._closed = False
        self._source: DataSource | None = None
        self._key = _key_of(self._parts)
        self._listener = Listener(("", 0), "AF_INET", authkey=self._key)
        self._thread = threading.Thread(target=self._accept, name="fft-flow", daemon=True)
        self._thread.start()
        address = [socket.gethostname(), self._listener.address[1]]
        manager._store.set(_place(stage.name), json.dumps(address))
        self._parts.worker.output = self

    def put(self, txn: Any, value: Any) -> None:
        """In the body of ``txn``: offer ``value``, of its batch, to the next stage.

        It is copied to the host's memory, without its gradients.
        """
        drawn = txn._drawn
        if drawn.slice is None:
            return  # a batch that does not count here: another group offers it
        kept = tree_map(_copied, value)
        with self._changed:
            if drawn.slice >= self._taken:
                self._entries[drawn.slice] = _Entry(kept, txn.step)
            self._wanted.discard(drawn.slice)
            self._changed.notify_all()

    # --- the main thread, between two transactions ---

    def draws_from(self, source: DataSource) -> None:
        """Where the slices come from that an entry is made anew for. Raises DataError."""
        if not source.in_any_order:
            raise DataError(
                "an entry that is lost with its group is made anew from its slice, and this loader "
                "can only be read from its beginning; use fft.CursorLoader or fft.StreamLoader"
            )
        self._source = source

    def is_due(self) -> bool:
        """Whether somebody waits for an entry that is not there."""
        return bool(self._wanted)

    def make(self, but: int | None = None) -> None:
        """Make the entries that are waited for; all ``but`` that which is about to be computed."""
        for number in sorted(self._wanted - {but}):
            assert self._source is not None, "the loop has begun"
            batch = copied(self._source.take(Due(0, number, 1)))
            assert self._parts.state.step is not None, "asked before"
            with self._parts.state.step.preserved(), torch.no_grad():
                value = tree_map(_copied, self._produce(batch))
            version = self._manager._step
            logger.info("the entry of slice %d was made anew, with version %d", number, version)
            self._parts.job.note("entry_made_anew", {"slice": number, "version": version})
            with self._changed:
                self._entries[number] = _Entry(value, version)
                self._wanted.discard(number)
                self._changed.notify_all()

    def finish(self, leaves: bool) -> None:
        """The loop is over: give what is left, until the next stage has ended, too.

        Args:
            leaves: this group leaves the job, which goes on; the next stage leaves it as well.
        """
        limit_s = self._parts.limits["flow_limit"].seconds
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
                if not self._wanted or self._closed:
                    break
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
                _cut(taker.connection)
        with suppress(*_LOST, AuthenticationError):  # it waits for somebody to come
            Client(("localhost", self._listener.address[1]), authkey=self._key).close()
        self._thread.join(_JOIN_S)
        self._listener.close()

    # --- threads of ours ---

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except AuthenticationError as error:
                logger.warning("somebody without the job's token came for entries: %s", error)
                continue
            except _LOST:
                continue
            with self._changed:
                if self._closed:
                    connection.close()
                    return
                taker = _Taker(connection)
                self._takers.append(taker)
                self._was_taken = True
            name = "fft-flow-taker"
            for work in (self._hear, self._send):
                threading.Thread(target=work, args=(taker,), name=name, daemon=True).start()

    def _hear(self, taker: _Taker) -> None:
        """What somebody asks for, until it has ended."""
        try:
            while True:
                number, done, is_needed = json.loads(taker.connection.recv_bytes())
                with self._changed:
                    self._forget(done)
                    taker.asked.add(number)
                    if is_needed and number not in self._entries:
                        self._wanted.add(number)
                        self._nudge()
                    self._changed.notify_all()
        except _LOST:
            with self._changed:
                taker.is_gone = True
                self._changed.notify_all()

    def _send(self, taker: _Taker) -> None:
        """Entries as they come, to who has asked for them."""
        with taker.connection:
            try:
                while (entry := self._next(taker)) is not None:
                    taker.connection.send_bytes(entry)
            except _LOST:
                logger.info("the next stage has gone while an entry was sent to it")
            finally:
                with self._changed:
                    self._takers.remove(taker)
                    self._changed.notify_all()

    def _next(self, taker: _Taker) -> bytes | None:
        """The next one that it has asked for and that is there; None: it needs none any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or taker.is_gone
                    or taker.is_told < self._leaves
                    or bool(taker.asked & self._entries.keys())
                )
            )
            if self._closed or taker.is_gone:
                return None
            if taker.is_told < self._leaves:
                taker.is_told = True
                return _packed({"leaves": True})
            number = min(taker.asked & self._entries.keys())
            taker.asked.discard(number)
            entry = self._entries[number]
        return _packed({"slice": number, "version": entry.version, "value": entry.value})

    def _forget(self, done: int) -> None:
        """The slices before ``done`` are committed by who takes them."""
        self._taken = max(self._taken, done)
        for old in [number for number in self._entries if number < self._taken]:
            del self._entries[old]

    def _nudge(self) -> None:
        if (engine := self._parts.job.engine) is not None:
            engine.nudge()


@dataclass(eq=False)
class _Taker:
    """A connection of the next stage."""

    connection: Connection
    asked: set[int] = field(default_factory=set)
    is_gone: bool = False
    is_told: bool = False
    """That the group leaves."""


class StageInput:
    """What the stage before gives: the loader of the stage that takes it. For ``transactions``.

    Args:
        manager: as of `StageOutput`.
        loader: the loader of the first stage: it says how many slices there are. None of its items
            is loaded here.

    Raises:
        FftError: this stage follows no other one in the flow of the spec.
    """

    in_any_order = True

    def __init__(self, manager: ManagerFFT, loader: Any) -> None:
        self._manager = manager
        self._parts, stage = _parts_of(manager)
        before = [other.scope for other in stage.flow if not other.ahead]
        if len(before) != 1:
            raise FftError(
                f"StageInput: {stage.name!r} follows {before or 'no stage'} in the flow of the "
                "spec; it takes what exactly one gives"
            )
        self.scope = before[0]
        self._slices = as_source(loader)
        self._connection: Connection | None = None
        self._reader: threading.Thread | None = None
        self._asked: dict[int, bool] = {}
        """Slices that were asked for, and whether they are needed."""
        self._got: dict[int, Any] = {}
        self._lost = ""

    def open(self) -> None:
        """Connect. Raises DataError: there is nobody."""
        store = self._manager._store
        try:
            host, port = json.loads(store.get(_place(self.scope)))
            connection = Client((host, port), authkey=_key_of(self._parts))
        except (RuntimeError, AuthenticationError, *_LOST) as error:
            raise DataError(
                f"rank of stage {self.scope!r} of this group offers nothing: {error}; does it make "
                "fft.StageOutput(manager, …)?"
            ) from error
        self._connection, self._lost = connection, ""
        self._reader = threading.Thread(target=self._read, name="fft-flow", daemon=True)
        self._reader.start()

    def holds(self, first: int, count: int) -> bool:
        return self._slices.holds(first, count)

    def take(self, due: Due) -> Any:
        for old in [number for number in self._got if number < due.first]:
            del self._got[old]
        self._ask(due.number, due.first)
        engine = self._parts.job.engine
        assert engine is not None, "a txn is open"
        is_there = engine.wait_for(lambda: due.number in self._got or bool(self._lost))
        if not is_there:
            raise Superseded
        if due.number not in self._got:
            raise DataError(f"the entry of slice {due.number} was waited for: {self._lost}")
        found = self._got[due.number]
        if self._slices.holds(due.number, due.step + 1):
            self._ask(due.number + due.step, due.first, is_needed=False)
        self._parts.job.note("entry", {"slice": due.number, "version": found["version"]})
        return found["value"]

    def _ask(self, number: int, done: int, is_needed: bool = True) -> None:
        if number in self._got or self._asked.get(number) in (True, is_needed):
            return
        assert self._connection is not None, "opened"
        self._asked[number] = is_needed
        with suppress(*_LOST):  # the reader tells
            self._connection.send_bytes(json.dumps([number, done, is_needed]).encode())

    def _read(self) -> None:
        connection = self._connection
        assert connection is not None, "opened"
        try:
            while True:
                found = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=True)
                if "leaves" in found:
                    self._manager.drain(reason=f"stage {self.scope} of this group has left")
                    continue
                self._asked.pop(found["slice"], None)
                self._got[found["slice"]] = found
                self._nudge()
        except _LOST as error:
            self._lost = f"the stage before has gone ({error!r})"
            self._nudge()

    def _nudge(self) -> None:
        if (engine := self._parts.job.engine) is not None:
            engine.nudge()

    def export(self, first: int) -> Any:
        return self._slices.export(first)

    def load(self, state: Any, first: int) -> None:
        self._slices.load(state, first)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        _cut(connection)
        if self._reader is not None:
            self._reader.join(_JOIN_S)
        connection.close()


def _parts_of(manager: ManagerFFT) -> tuple[Parts, StageScope]:
    """Raises FftError: the stages of its spec have no scopes of their own."""
    parts = manager._parts
    if parts.stage is None:
        raise FftError(
            f"spec {parts.settings.spec.name!r} has no stages that step by themselves: use "
            "spec='pipeline_ahead'"
        )
    return parts, parts.stage


def _key_of(parts: Parts) -> bytes:
    token = parts.settings.token
    return token.key("fft1", "flow") if token is not None else derive(b"", "fft1", "flow")


def _place(scope: str) -> str:
    """In the group's store: where the rank of that stage can be reached."""
    return f"fft/flow/{scope}"


def _packed(value: dict[str, Any]) -> bytes:
    packed = io.BytesIO()
    torch.save(value, packed)
    return packed.getvalue()


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _cut(connection: Connection) -> None:
    """Wake whoever reads from it: it has ended."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
