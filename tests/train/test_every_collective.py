"""Tests of every operation on FFT's process groups: undisturbed, with a late peer, aborted,
repeated.

Two real ranks run the table in `collective_table` once for each kind of group; each row is then a
separate test. Operations that gloo or torchft's group cannot do are listed with their refusal.
"""

from __future__ import annotations

import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from collective_table import RANKS, REFUSED, ROWS, Place, Refusal, Row
from rollback_harness import NOISE_S, client, run
from torch._C._distributed_c10d import _register_process_group
from torchft.process_group import ProcessGroupGloo
from waiting import wait_until

from fft.train.process_groups import AbortableGroup, ShardProcessGroupGloo

MINUTE = timedelta(seconds=60)
LIMIT = timedelta(seconds=20)
LATE_S = 0.2
"""Delay of the late peer: several times the interval of checks for an abort."""
SENTINEL = 12345.0
KINDS = ("shard", "replicate")


class Rank:
    """One rank of the table's two, its group, and a store to meet the other rank through."""

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
        self.store.wait([f"meet/{self.meetings}/{1 - self.rank}"], LIMIT)

    def finish(self, row: Row, place: Place | None = None) -> None:
        """Run the row to its end, and compare."""
        found = row.run(place or self.place())
        flat = [tensor.detach().flatten().tolist() for tensor in found]
        assert flat == row.want[self.rank], f"{flat} in place of {row.want[self.rank]}"

    def together(self, row: Row) -> None:
        self.finish(row)
        self.meet()
        # gloo completes a future before it records the end in the Work
        wait_until(lambda: self.group.pending() == 0, "the op to be over")

    def late(self, row: Row) -> None:
        """Rank 0 enters when rank 1 has been waiting for `LATE_S`."""
        if self.rank == 0:
            self.meet()
            self.finish(row)
        else:
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(self.finish, row)
                wait_until(lambda: self.group.pending() > 0, "the op to start")
                threading.Event().wait(LATE_S)  # it must not end within this time
                early = waiting.done()
                self.meet()
                waiting.result(NOISE_S)
            assert not early, "it did not wait for its peer"
        self.meet()

    def aborted(self, row: Row) -> dict[str, Any]:
        """Rank 0 enters when rank 1, blocked, was aborted and is quiet; then rank 0 aborts
        itself."""
        if self.rank == 0:
            self.meet()
        place = self.place()
        ended, errors = [0.0], [None]

        def block() -> None:
            try:
                row.run(place)
            except Exception as caught:  # noqa: BLE001 - shown by the test
                errors[0] = caught
            ended[0] = time.monotonic()

        waiter = threading.Thread(target=block)
        waiter.start()
        # the late rank usually fails at once, but gloo loses some of its sends
        wait_until(lambda: self.group.pending() > 0 or not waiter.is_alive(), "the op to start")
        waiter.join(0.01)  # most ops are waiting by now; the few others must work as well
        assert waiter.is_alive() or self.rank == 0, f"it does not block: {errors}"
        begin = time.monotonic()
        self.group.abort("test")
        waiter.join(NOISE_S)
        assert not waiter.is_alive(), "the abort did not free it"
        self.group.quiesce(LIMIT)
        # a send that gloo has lost writes nothing, but ends only with its timeout
        assert self.group.pending() == 0 or self.group._generation.stranded
        for tensor in place.outputs:
            tensor.fill_(SENTINEL)
        self.meet()
        if self.rank == 1:
            self.meet()
        assert all(bool((tensor == SENTINEL).all()) for tensor in place.outputs)
        if self.rank == 0:
            return {}
        assert errors[0] is not None, "it ended as if nothing had happened"
        return {"error": f"{type(errors[0]).__name__}: {errors[0]}", "freed": ended[0] - begin}

    def judge(self, row: Row) -> dict[str, Any]:
        """Run all checks of a row. ``failed``: the failures and their places."""
        result: dict[str, Any] = {}
        for part in (self.together, self.late, self.aborted):
            try:
                result.update(part(row) or {})
            except Exception:  # noqa: BLE001 - shown by the row's test
                return {"failed": f"{part.__name__}:\n{traceback.format_exc()}"}
        try:
            self.configure()
            self.together(row)
        except Exception:  # noqa: BLE001 - as above
            return {"failed": f"configured again:\n{traceback.format_exc()}"}
        return result

    def refused(self, refusal: Refusal) -> str:
        """Return nothing, or the problem with the refusal."""
        try:
            refusal.call(self.place())
        except refusal.kind as error:
            wrong = "" if refusal.text in str(error) else str(error)
        except Exception:  # noqa: BLE001 - shown by its test
            wrong = traceback.format_exc()
        else:
            wrong = "it is not refused"
        return wrong or ("" if self.group.pending() == 0 else "it left an op pending")

    def mend(self, name: str, bad: bool) -> None:
        """Start both ranks anew after a row, if it failed on either."""
        self.store.set(f"row/{name}/{self.rank}", "bad" if bad else "good")
        keys = [f"row/{name}/{r}" for r in range(RANKS)]
        # The other rank may have to give up first, at each meeting
        self.store.wait(keys, 4 * LIMIT)
        if b"bad" not in self.store.multi_get(keys):
            return
        self.group.abort("a row failed")
        self.group.quiesce(LIMIT)
        self.store.set(f"mark/{name}/{self.rank}", str(max(self.epoch, self.meetings) + 1))
        marks = [int(self.store.get(f"mark/{name}/{r}")) for r in range(RANKS)]
        self.epoch = self.meetings = max(marks)
        self.configure()


def _through_the_table(rank: int, ranks: int, port: int, kind: str) -> Any:
    me = Rank(rank, port, kind)
    rows, refused = {}, {}
    mine = [row for row in ROWS.values() if kind == "shard" or not row.shard_only]
    for name, refusal in REFUSED[kind].items():
        refused[name] = me.refused(refusal)
        me.mend(f"refused {name}", False)
    for row in sorted(mine, key=lambda row: row.world):
        if row.world and not dist.is_initialized():
            world = dist.PrefixStore("world", client(port))
            dist.init_process_group("gloo", store=world, rank=rank, world_size=ranks)
        rows[row.name] = me.judge(row)
        me.mend(row.name, "failed" in rows[row.name])
    me.group.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return rows, refused


@pytest.fixture(scope="module")
def tables() -> dict[str, list[tuple[dict[str, Any], dict[str, str]]]]:
    """Return both ranks' results of every row and every refusal, by kind of group."""
    return {kind: run(RANKS, _through_the_table, kind) for kind in KINDS}


CASES = [(k, n) for k in KINDS for n, row in ROWS.items() if k == "shard" or not row.shard_only]


@pytest.mark.one_in(2)
@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_an_operation(tables: dict[str, Any], kind: str, name: str) -> None:
    peer, blocked = (rows[name] for rows, _ in tables[kind])
    failed = [
        f"rank {n}: {reported['failed']}"
        for n, reported in enumerate((peer, blocked))
        if "failed" in reported
    ]
    assert not failed, "\n".join(failed)  # show both, as one often waits for the other in vain
    print(f"\nfreed {blocked['freed'] * 1e3:.1f} ms after the abort: {blocked['error']}")
    assert blocked["error"].startswith("GroupAborted: ")
    assert f"on the {kind} group (rank 1 of 2): test" in blocked["error"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in KINDS for n in REFUSED[k]])
def test_unsupported_collective_is_refused(tables: dict[str, Any], kind: str, name: str) -> None:
    for _, refused in tables[kind]:
        assert refused[name] == ""
