"""Input queue of a stage: a loader whose batches are the entries of the stage before.

This module runs on the main thread, except for the reader thread.
"""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torchft.manager import Manager

from fft.errors import DataError, FftError
from fft.trace.inputs import ENTRY
from fft.train.data.retries import Superseded
from fft.train.data.source import Due, as_source
from fft.train.limits import Feature
from fft.train.paradigms.stages.output import (
    JOIN_S,
    LOST,
    StageOutput,
    Unauthenticated,
    address_key,
    authenticate,
    cut,
    key_of,
)
from fft.train.session.rank_context import RankContext
from fft.train.session.scope import RankScope

logger = logging.getLogger(__name__)


class StageInput:
    """The entries of the stage before, as a loader for ``transactions``.

    Args:
        manager: see `StageOutput`.
        loader: the loader of the first stage, used for the number of its slices. No item is loaded
            here.

    Raises:
        FftError: the flow of the spec has no stage before this one, or several.
    """

    in_any_order = True

    def __init__(self, manager: Manager, loader: Any) -> None:
        rank: RankContext = manager._parts
        rank.features.use(Feature.STAGE_QUEUE)
        self._manager, self._rank = manager, rank
        before = [other.scope for other in rank.scope.flow if not other.ahead]
        if len(before) != 1:
            raise FftError(
                f"StageInput: expected one stage before {rank.scope.name!r} in the flow of the "
                f"spec, got {before or 'none'}"
            )
        self.scope = before[0]
        self._slices = as_source(loader)
        self.items_per_data_epoch: int | None = getattr(self._slices, "items_per_data_epoch", None)
        """Batches of one data epoch of the loader, or None if it counts none."""
        self._connection: Connection | None = None
        self._reader: threading.Thread | None = None
        self._asked: dict[int, bool] = {}
        """Requested slices, and whether a txn waits for them."""
        self._got: dict[int, Any] = {}
        self._lost = ""
        self._ready = threading.Event()

    def open(self) -> None:
        """Connect, and wait until the stage before has the job's weights.

        Only then may this rank join its own scope.

        Raises:
            DataError: The stage before cannot be reached, or is not ready in time.
        """
        store = self._manager._torchft.store
        try:
            address = tuple(json.loads(store.get(address_key(self.scope))))
            end = socket.create_connection(
                address, self._manager._torchft.connect_timeout.total_seconds()
            )
            connection = authenticate(end, key_of(self._rank), first=False)
        except (RuntimeError, Unauthenticated, *LOST) as error:
            raise DataError(
                f"cannot connect to stage {self.scope!r} of this group: {error}; does it create "
                "fft.StageOutput(manager, …)?"
            ) from error
        self._connection, self._lost = connection, ""
        self._asked, self._got = {}, {}  # requests of an earlier loop are no longer answered
        self._ready.clear()
        connection.send_bytes(json.dumps(["data", repr(self._slices.export(0))]).encode())
        self._reader = threading.Thread(target=self._read, name="fft-flow", daemon=True)
        self._reader.start()
        limit_s = self._rank.limits["flow_limit"].seconds
        with self._rank.watchers.waiting():
            came = self._ready.wait(limit_s)
        if not came or self._lost:
            why = self._lost or f"it has not fetched the job's weights within {limit_s:g} s"
            raise DataError(f"stage {self.scope!r} of this group sends nothing: {why}")

    def holds(self, first: int, count: int) -> bool:
        return self._slices.holds(first, count)

    def take(self, due: Due) -> Any:
        for old in [number for number in self._got if number < due.first]:
            del self._got[old]
        self._ask(due.number, due.first)
        engine = self._rank.job.engine
        assert engine is not None, "a txn is open"
        with self._rank.watchers.waiting():
            is_there = engine.wait_for(lambda: due.number in self._got or bool(self._lost))
        if not is_there:
            raise Superseded
        if due.number not in self._got:
            raise DataError(f"the entry of slice {due.number} cannot be received: {self._lost}")
        found = self._got[due.number]
        if self._slices.holds(due.number, due.step + 1):
            self._ask(due.number + due.step, due.first, is_needed=False)
        plan = self._manager._parts.txn.plan
        assert plan is not None, "the txn is open"
        told = {"slice": due.number, "version": found["version"], "token": list(plan.token)}
        self._rank.job.note(ENTRY, told)
        return found["value"]

    def _ask(self, number: int, done: int, is_needed: bool = True) -> None:
        if number in self._got or self._asked.get(number) in (True, is_needed):
            return
        assert self._connection is not None, "opened"
        self._asked[number] = is_needed
        with suppress(*LOST):  # the reader thread reports the error
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
                if "ready" in found:
                    self._ready.set()
                    continue
                if "refused" in found:
                    self._lose(found["refused"])
                    return
                self._asked.pop(found["slice"], None)
                self._got[found["slice"]] = found
                self._nudge()
        except LOST as error:
            self._lose(f"the connection to the stage before was lost ({error!r})")
        except Exception as error:
            logger.exception("an entry cannot be read")
            self._lose(f"it cannot be read: {error!r}")

    def _lose(self, why: str) -> None:
        self._lost = why
        self._ready.set()
        self._nudge()

    def _nudge(self) -> None:
        if (engine := self._rank.job.engine) is not None:
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
        cut(connection)
        if self._reader is not None:
            self._reader.join(JOIN_S)
        connection.close()


def refuse_unconnected(scope: RankScope, output: StageOutput | None, loader: Any) -> None:
    """Raise FftError if a stage lacks the queue to the stage before it or to the next one."""
    for other in scope.flow:
        if other.ahead and output is None:
            raise FftError(
                f"stage {other.scope!r} depends on this one: create fft.StageOutput(manager, …) "
                "before transactions(), and call its put() in each step function"
            )
        if not other.ahead and not isinstance(loader, StageInput):
            raise FftError(
                f"this stage takes its data from stage {other.scope!r}: pass "
                "fft.StageInput(manager, loader) to transactions(), instead of the loader"
            )
