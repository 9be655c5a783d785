"""One of the two ranks of part 7. It writes its findings to ``rank<N>.jsonl``."""

from __future__ import annotations

import argparse
import faulthandler
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.acceptance.gpu.findings import Pen
from tests.acceptance.gpu.part import STACKS_S
from tests.acceptance.gpu.parts import nets
from tests.acceptance.gpu.parts.rings import LIMIT, RINGS, GroupRing

FREED_MS = 100.0
"""Limit from the abort until a waiting rank is free; this is the guarantee under test."""


def main() -> None:
    """Run one trial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trial", choices=["connects", "blocked", "fsdp"], required=True)
    parser.add_argument("--device", choices=list(RINGS), required=True)
    parser.add_argument("--ring", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True, metavar="S", help="then it is killed")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(max(0.5, args.limit - STACKS_S))
    if args.device == "cuda":
        torch.cuda.set_device(0)
    store = dist.TCPStore("localhost", args.port, wait_for_workers=False, timeout=LIMIT)
    pen = Pen(args.folder / f"rank{args.rank}.jsonl", "nccl_pair")
    ring = RINGS[args.device][args.ring](args.port, args.rank, 2)
    {"connects": _connects, "blocked": _blocked, "fsdp": _fsdp}[args.trial](
        pen, ring, args.rank, store, args.device
    )
    ring.close()


def _meet(store: Any, place: str) -> None:
    """Wait until both ranks are here."""
    store.add(place, 1)
    deadline = time.monotonic() + LIMIT.total_seconds()
    while store.add(place, 0) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other rank does not come to {place}")
        time.sleep(0.002)


def _connects(pen: Pen, ring: Any, rank: int, store: Any, device: str) -> None:
    ring.build(0)
    tensor = torch.full((1024,), float(rank + 1), device=device)
    ring.reduce(tensor).wait()
    nets.synchronize(device)
    assert float(tensor[0]) == 3.0, f"the sum of 1 and 2 is {float(tensor[0])}"
    _meet(store, "connected")
    ring.abort()
    ring.quiet()


def _blocked(pen: Pen, ring: Any, rank: int, store: Any, device: str) -> None:
    """Let rank 0 reduce without rank 1, while rank 0's main thread waits for the device."""
    for record in range(3):
        ring.build(record)
        tensor = torch.ones(1 << 22, device=device)
        ring.reduce(tensor).wait()
        nets.synchronize(device)
        _meet(store, f"built/{record}")
        at: dict[str, float] = {}
        if rank == 0:
            tensor.fill_(1.0)
            work = ring.reduce(tensor)
            killer = threading.Thread(target=_abort_later, args=(ring, at))
            killer.start()
            try:
                work.wait()  # with NCCL the stream waits; with gloo this thread waits
                nets.synchronize(device)
            except RuntimeError as error:
                pen.measured("what the waiting rank hears", str(error))
            freed = time.perf_counter()
            killer.join()
            took = 1e3 * (freed - at["asked"])
            what = f"a rank that waits for the other is freed (epoch {record})"
            pen.check(what, 0 <= took < FREED_MS, freed_ms=round(took, 2))
            ring.quiet()
            tensor.fill_(7.0)
            time.sleep(0.2)
            nets.synchronize(device)
            stays = bool((tensor == 7.0).all())
            pen.check(f"and its tensor is not written afterwards (epoch {record})", stays)
        _meet(store, f"over/{record}")
        if rank == 1:
            ring.abort()
            ring.quiet()
    if isinstance(ring, GroupRing):  # a bare library waits at a store that cannot be cancelled
        _alone(pen, ring, rank, store, device)


class _Late:
    """A library for a rank that is present, and does not begin before the other is free."""

    def __init__(self, library: Any, store: Any) -> None:
        self._store, self.make = store, library.make

    def connect(self, made: Any) -> None:
        _meet(self._store, "free")
        raise RuntimeError("planned: this rank does not connect")


def _alone(pen: Pen, ring: Any, rank: int, store: Any, device: str) -> None:
    """Let rank 0 connect without rank 1: rank 0 is freed, and the next epoch works."""
    record = 10
    _meet(store, "alone")  # the abort of the last group takes NCCL a second on rank 1
    if rank == 0:
        at: dict[str, float] = {}
        killer = threading.Thread(target=_abort_later, args=(ring, at))
        killer.start()
        said = ""
        try:
            ring.build(record)
        except RuntimeError as error:
            said = str(error)
        freed = time.perf_counter()
        killer.join()
        took, abort = (1e3 * (end - at["asked"]) for end in (freed, time.perf_counter()))
        what = "a rank that connects, and the other does not, is freed"
        figures = {"freed_ms": round(took, 2), "abort_ms": round(abort, 2)}
        pen.check(what, bool(said) and 0 <= took < FREED_MS, said, **figures)
        _meet(store, "free")
    elif device == "cuda":
        library = ring.pg._library
        ring.pg._library = _Late(library, store)
        try:
            ring.build(record)
        except RuntimeError as error:
            pen.measured("what the rank that does not connect hears", str(error))
        ring.pg._library = library
    else:  # gloo has no such place, so the rank does not come at all
        _meet(store, "free")
    ring.abort()
    ring.quiet()
    ring.build(record + 1)
    tensor = torch.full((1024,), float(rank + 1), device=device)
    ring.reduce(tensor).wait()
    right = bool((tensor == 3.0).all())
    pen.check(f"and the group is good in the next epoch (rank {rank})", right)
    _meet(store, "good")
    ring.abort()
    ring.quiet()


def _abort_later(ring: Any, at: dict[str, float]) -> None:
    time.sleep(0.5)  # it is in the collective by then, and would stay there
    at["asked"] = time.perf_counter()
    ring.abort()


def _fsdp(pen: Pen, ring: Any, rank: int, store: Any, device: str) -> None:
    """Run four steps, without and with a rollback in the third, each over a group and its mesh."""
    plain = _train(ring, store, rank, device, 0, rolled_back=False)
    faulty = _train(ring, store, rank, device, 10, rolled_back=True)
    pen.check(f"FSDP2 rolled back in a step (rank {rank})", plain == faulty, f"{plain} {faulty}")


def _train(ring: Any, store: Any, rank: int, device: str, record: int, rolled_back: bool) -> str:
    from torch.distributed.fsdp import fully_shard

    from fft.train.state.local_tensors import local_of
    from fft.train.state.step_state import StepState

    ring.build(record)
    torch.manual_seed(0)
    model = nets.Net(256, dropout=0.0).to(device)
    mesh = ring.pg.mesh()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = StepState([model], [optimizer])
    step = 0
    while step < 4:
        state.capture()
        loss = nets.loss_of(model, nets.batch(256, device, seed=10 * step + rank))
        if rolled_back and step == 2 and rank == 1:
            rolled_back = False
            _meet(store, f"failed/{record}")  # the other is in its backward pass
            _roll_back(ring, state, record + 1)
            continue
        if rolled_back and step == 2:
            rolled_back = False
            store.add(f"failed/{record}", 1)
            killer = threading.Thread(target=_abort_later, args=(ring, {}))
            killer.start()
            try:
                loss.backward()
                nets.synchronize(device)
            except RuntimeError:  # the collectives that come after the abort are refused
                pass
            killer.join()
            _roll_back(ring, state, record + 1)
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
    nets.synchronize(device)
    found = nets.bits(local_of(p) for p in model.parameters())
    _meet(store, f"trained/{record}")
    ring.abort()
    ring.quiet()
    return found


def _roll_back(ring: Any, state: Any, record: int) -> None:
    ring.abort()
    ring.quiet()
    state.restore()
    ring.build(record)


if __name__ == "__main__":
    main()
