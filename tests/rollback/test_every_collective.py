"""Every operation on FFT's process groups: undisturbed, with a late peer, aborted, and again.

Two real ranks go through the table in `collective_table`, once for each kind of group; each row is
then a test of its own. What gloo, or torchft's group, cannot do at all is listed with its refusal.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_table import RANKS, ROWS, Place, Row, x
from rollback_harness import NOISE_S, client, run, store_server, until
from torch._C._distributed_c10d import _register_process_group
from torchft.process_group import ProcessGroupGloo

from fft.rollback import AbortableGroup, CollectiveFailed, GroupAborted, ShardProcessGroupGloo

MINUTE = timedelta(seconds=60)
LIMIT = timedelta(seconds=20)
LATE_S = 0.2
"""How late the late peer is: several times as long as one look for an abort lasts."""
SENTINEL = 12345.0
KINDS = ("shard", "replicate")


class Rank:
    """One rank of the table's two, its group, and a store to meet the other through."""

    def __init__(self, rank: int, port: int, kind: str) -> None:
        self.rank, self.port, self.kind = rank, port, kind
        self.store = client(port)
        self.meetings = 0
        pg = ShardProcessGroupGloo(MINUTE) if kind == "shard" else ProcessGroupGloo(MINUTE)
        self.group = AbortableGroup(pg, kind)
        self.epoch = 0
        self.configure()
        self.mesh = pg.mesh() if kind == "shard" else None
        if kind == "replicate":  # what torchft's register() leads to
            pg._set_group_name("replicate")
            _register_process_group("replicate", pg)

    def configure(self) -> None:
        self.epoch += 1
        address = f"localhost:{self.port}/{self.kind}/{self.epoch}"
        self.group.configure(address, str(self.rank), self.rank, RANKS, timeout=LIMIT)

    def place(self) -> Place:
        return Place(self.group.pg, self.rank, self.group.pg.group_name, self.mesh)

    def meet(self) -> None:
        self.meetings += 1
        self.store.set(f"meet/{self.meetings}/{self.rank}", "1")
        self.store.get(f"meet/{self.meetings}/{1 - self.rank}")

    def finish(self, row: Row, place: Place | None = None) -> None:
        """Run the row to its end, and compare."""
        found = row.run(place or self.place())
        flat = [tensor.detach().flatten().tolist() for tensor in found]
        assert flat == row.want[self.rank], f"{flat} in place of {row.want[self.rank]}"

    def together(self, row: Row) -> None:
        self.finish(row)
        self.meet()
        assert self.group.pending() == 0

    def late(self, row: Row) -> None:
        """Rank 0 enters when rank 1 has been waiting for `LATE_S`."""
        if self.rank == 0:
            self.meet()
            self.finish(row)
        else:
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(self.finish, row)
                until(lambda: self.group.pending() > 0, "the op to start")
                threading.Event().wait(LATE_S)  # it has this long to end too early
                early = waiting.done()
                self.meet()
                waiting.result(NOISE_S)
            assert not early, "it did not wait for its peer"
        self.meet()

    def aborted(self, row: Row) -> dict[str, Any]:
        """Rank 0 enters when rank 1, blocked, was aborted and is quiet."""
        if self.rank == 0:
            self.meet()
            error: BaseException | None = None
            try:
                row.run(self.place())
            except RuntimeError as caught:
                error = caught
            self.meet()
            self.group.abort("the peer went away")
            self.group.quiesce(LIMIT)
            return {"error": repr(error)}
        place, ended, errors = self.place(), [0.0], [None]

        def block() -> None:
            try:
                row.run(place)
            except RuntimeError as caught:
                errors[0] = caught
            ended[0] = time.monotonic()

        waiter = threading.Thread(target=block)
        waiter.start()
        until(lambda: self.group.pending() > 0, "the op to start")
        waiter.join(0.01)  # most are in their wait by now; a few are not, which must do as well
        assert waiter.is_alive(), f"it does not block: {errors}"
        begin = time.monotonic()
        self.group.abort("test")
        waiter.join(NOISE_S)
        assert not waiter.is_alive(), "the abort did not free it"
        self.group.quiesce(LIMIT)
        for tensor in place.outputs:
            tensor.fill_(SENTINEL)
        self.meet()
        self.meet()
        assert all(bool((tensor == SENTINEL).all()) for tensor in place.outputs)
        assert errors[0] is not None, "it ended as if nothing had happened"
        assert self.group.pending() == 0
        return {"error": f"{type(errors[0]).__name__}: {errors[0]}", "freed": ended[0] - begin}


def _through_the_table(rank: int, ranks: int, port: int, kind: str) -> Any:
    me = Rank(rank, port, kind)
    found: dict[str, dict[str, Any]] = {}
    for name, row in ROWS.items():
        if row.shard_only and kind != "shard":
            continue
        result: dict[str, Any] = {}
        for what in (me.together, me.late, me.aborted, me.configure, me.together):
            takes_row = what != me.configure
            try:
                done = what(row) if takes_row else what()
            except Exception:  # noqa: BLE001 - shown by the row's test
                result["failed"] = f"{what.__name__}:\n{traceback.format_exc()}"
                break
            result.update(done or {})
        found[name] = result
        # both go on alike: a row that failed on one side leaves a group of its own behind
        me.store.set(f"row/{name}/{rank}", "bad" if "failed" in result else "good")
        if b"bad" in (me.store.get(f"row/{name}/{r}") for r in range(ranks)):
            me.group.abort("a row failed")
            me.group.quiesce(LIMIT)
            me.meetings += 100
            me.store.set(f"again/{name}/{rank}", str(max(me.epoch, me.meetings)))
            marks = [int(me.store.get(f"again/{name}/{r}")) for r in range(ranks)]
            me.epoch = me.meetings = max(marks)
            me.configure()
    me.group.close()
    return found


@pytest.fixture(scope="module")
def tables() -> dict[str, list[dict[str, Any]]]:
    """What both ranks say of every row, by kind of group."""
    return {kind: run(RANKS, _through_the_table, kind) for kind in KINDS}


CASES = [(k, n) for k in KINDS for n, row in ROWS.items() if k == "shard" or not row.shard_only]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_an_operation(tables: dict[str, list[dict[str, Any]]], kind: str, name: str) -> None:
    peer, blocked = (table[name] for table in tables[kind])
    assert "failed" not in blocked, blocked["failed"]
    assert "failed" not in peer, peer["failed"]
    print(f"\nfreed {blocked['freed'] * 1e3:.1f} ms after the abort: {blocked['error']}")
    assert f"on the {kind} group (rank 1 of 2): test" in blocked["error"]
    assert peer["error"] != "None", "the peer's op ended as if nothing had happened"
