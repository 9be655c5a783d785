"""One group of the job, under FFT or under torchft: it trains to the end, and writes its events.

``BENCH_SYSTEM`` selects the system, ``BENCH_DIR`` the folder for events, ``BENCH_OUTER`` the number
of synchronizations, and ``BENCH_FAULT_EVERY`` the number between faults. Both loops have the same
model, data, optimizers and faults. `figures` describes the events.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchft import Manager, ProcessGroupGloo

from benchmarks.diloco.plan import (
    AT_INNER,
    BATCH,
    EVERY,
    GROUPS,
    LONELY_S,
    UNCOMMITTED,
    VICTIM,
    Schedule,
)
from benchmarks.side_by_side.events import Pen
from benchmarks.side_by_side.model import checksum
from benchmarks.side_by_side.place import meet
from benchmarks.side_by_side.victim import Planted, failing
from benchmarks.whole_step import CONTEXT, GPT

REDUCE = timedelta(seconds=5)
CALL = timedelta(seconds=10)
QUORUM = timedelta(seconds=60)
PROBE = 16
"""Windows of the text on which the job's parameters are evaluated, after each synchronization."""


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """A data set of windows of Python's own documentation, in printable ASCII, and their
    numbers."""

    def __init__(self) -> None:
        topics = pydoc_data.topics.topics
        text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
        codes = (torch.tensor(list(text)) - 31).clamp(0, 95)
        self._held_out, self._codes = codes[: PROBE * CONTEXT], codes[PROBE * CONTEXT :]

    def __len__(self) -> int:
        return 60_000  # more than a run takes

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        at = index * 7919 % (len(self._codes) - CONTEXT)
        return self._codes[at : at + CONTEXT], index

    def probe(self) -> torch.Tensor:
        """Return windows that are in no sample."""
        return self._held_out.view(PROBE, CONTEXT)


class Recorder:
    """A recorder of this group's inner steps, which also plants the group's faults."""

    def __init__(self, directory: Path, group: int, model: nn.Module, text: Text) -> None:
        self.pen = Pen(directory, group, 0)
        self.samples: list[list[int]] = []
        """Samples of the inner steps since the last synchronization that this group's parameters
        have."""
        self.synced = False
        self.manager: Manager
        self._model, self._probe, self._windows = model, GPT(2, 64), text.probe()
        self._weighs = group != VICTIM
        self._is_victim = group == VICTIM
        self._fired = directory / "fired"
        lengths = (int(os.environ[name]) for name in ("BENCH_OUTER", "BENCH_FAULT_EVERY"))
        self._schedule, self._whole = Schedule(*lengths), 0
        self._fails_next = False

    # --- inner steps ---

    def begin(self, samples: list[int]) -> None:
        """Begin an inner step, with a fault if one is due."""
        self.pen.say("begin", samples=samples, step=self.manager.current_step())
        if self._whole == 0 and self.synced:
            time.sleep(LONELY_S / EVERY)
        self._break()

    def ended(self, samples: list[int], well: bool) -> None:
        """Record the end of an inner step."""
        if well:
            self.samples.append(samples)
        else:
            self.pen.say("failed")

    def dropped(self, why: str) -> None:
        """Record that this group's work since the last synchronization is void."""
        self.pen.say("dropped", why=why, step=self.manager.current_step())
        self.samples = []

    # --- synchronizations ---

    def outer_stepped(self, *_: Any) -> None:
        """Record that the job's parameters have taken a step here."""
        manager = self.manager
        n = manager.num_participants()
        self._whole, self.synced = (self._whole + 1 if n == GROUPS else 0), True
        loss = self._weigh() if self._weighs else None
        consumed = [number for step in self.samples for number in step]
        bits, step = checksum(self._model), manager.current_step()
        self.pen.say("sync", step=step, n=n, sum=bits, samples=consumed, loss=loss)
        self.samples = []

    def _weigh(self) -> float:
        self._probe.load_state_dict(self._model.state_dict())
        with torch.no_grad():
            return float(self._probe(self._windows))

    # --- faults ---

    def _break(self) -> None:
        if not self._is_victim or len(self.samples) != AT_INNER:
            return
        fired = self._fired.stat().st_size if self._fired.exists() else 0
        step = self.manager.current_step()
        kind = self._schedule.due(fired, step, self._whole)
        if kind is None:
            return
        with self._fired.open("a") as file:
            file.write(".")
        self.pen.say("fault", kind=kind, step=step)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exception":
            raise Planted(f"planted before synchronisation {step + 1}")
        self._fails_next = True

    def listen(self, pg: Any) -> None:
        """Intercept the reductions."""
        reduce = pg.allreduce

        def allreduce(*args: Any, **kwargs: Any) -> Any:
            work = reduce(*args, **kwargs)
            if not self._fails_next:
                return work
            self._fails_next = False
            return failing(work, lambda: self.pen.say("one_sided"))

        pg.allreduce = allreduce


def built() -> tuple[GPT, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return the model, the inner and the outer optimizer, equal in every process."""
    torch.manual_seed(3)
    model = GPT(2, 64)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return model, inner, outer


def trained(model: nn.Module, windows: torch.Tensor) -> None:
    """Run forward, backward and clipping."""
    model(windows).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


# --- FFT ------------------------------------------------------------------------------------------


def fft_loop(group: int, outer_steps: int, directory: Path) -> None:
    """Run FFT's DiLoCo in FFT's loop."""
    import fft

    text, (model, inner, outer) = Text(), built()
    record = Recorder(directory, group, model, text)
    pg = ProcessGroupGloo(timeout=REDUCE)
    record.listen(pg)
    record.manager = manager = fft.ManagerFFT(
        pg=pg,
        spec="diloco",
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=str(group),
        init_sync=False,
        timeout=CALL,
        timeouts={"join_window": 30.0},
    )
    try:
        manager.register(model, inner)
        outer.register_step_post_hook(record.outer_stepped)
        fft.DiLoCo(manager, [model], inner, outer, EVERY)
        loader = fft.CursorLoader(text, batch_size=BATCH, seed=5)
        meet(directory, GROUPS, 1)
        txn: Any
        for txn in manager.transactions(loader, max_steps=outer_steps):
            windows, numbers = txn.batch
            if txn.inner_step < len(record.samples):
                record.dropped("the group begins anew")
            with txn:
                record.begin(numbers.tolist())
                trained(model, windows)
            record.ended(numbers.tolist(), txn.committed)
        record.pen.say("exit")
    finally:
        manager.shutdown()


# --- torchft --------------------------------------------------------------------------------------


class Position:
    """The batches that a torchft group has used of its share, on disk, saved at each
    synchronization."""

    def __init__(self, text: Text, group: int, directory: Path) -> None:
        from torchft.data import DistributedSampler

        sampler = DistributedSampler(
            text, group, GROUPS, group_rank=0, num_replicas=1, shuffle=True, seed=5
        )
        self._text, self._numbers = text, list(sampler)
        self._file = directory / f"position-{group}"
        self._at = int(self._file.read_text()) if self._file.exists() else 0

    def batches(self) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Yield batches from the position of the previous process on."""
        while True:
            numbers = self._numbers[self._at * BATCH : (self._at + 1) * BATCH]
            self._at += 1
            yield torch.stack([self._text[number][0] for number in numbers]), numbers

    def keep(self, *_: Any) -> None:
        """Save the position when a synchronization is committed."""
        new = self._file.with_suffix(".new")
        new.write_text(str(self._at))
        new.replace(self._file)


def torchft_loop(group: int, outer_steps: int, directory: Path) -> None:
    """Run torchft's DiLoCo and Manager.

    The loop continues after an exception, with the next batch.
    """
    from torchft.local_sgd import DiLoCo

    text, (model, inner, outer) = Text(), built()
    record = Recorder(directory, group, model, text)
    pg = ProcessGroupGloo(timeout=REDUCE)
    record.listen(pg)

    def state() -> dict[str, Any]:
        optimizer = inner.state_dict()
        return {"model": model.state_dict(), "inner": optimizer, "samples": record.samples}

    def load(found: dict[str, Any]) -> None:
        record.dropped("another group's state")
        model.load_state_dict(found["model"])
        inner.load_state_dict(found["inner"])
        # These samples are in the parameters
        record.samples = [list(step) for step in found["samples"]]

    record.manager = manager = Manager(
        pg=pg,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"bench_{group}",
        use_async_quorum=False,
        init_sync=False,
        timeout=CALL,
        quorum_timeout=QUORUM,
    )
    manager._checkpoint_transport.recv_checkpoint = _weighed(
        manager._checkpoint_transport.recv_checkpoint, record.pen
    )
    position = Position(text, group, directory)
    meet(directory, GROUPS, 1)  # no group must be alone because it was the first
    outer.register_step_post_hook(record.outer_stepped)
    outer.register_step_post_hook(position.keep)
    try:
        with DiLoCo(manager, [model], inner, outer, EVERY) as diloco:
            for windows, numbers in position.batches():
                if manager.current_step() >= outer_steps:
                    break
                inner.zero_grad()
                try:
                    record.begin(numbers)
                    trained(model, windows)
                except Planted:
                    record.ended(numbers, well=False)
                    continue
                record.ended(numbers, well=True)
                inner.step()  # this call also synchronizes
                if diloco._local_step == 0 and record.samples:
                    record.dropped(UNCOMMITTED)
        record.pen.say("exit")
    finally:
        with suppress(Exception):
            manager.shutdown()


def _weighed(receive: Callable[..., Any], pen: Pen) -> Callable[..., Any]:
    """Wrap ``receive`` so that it reports the bytes of all tensors that arrived."""

    def size(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.nbytes
        if isinstance(value, dict):
            return sum(map(size, value.values()))
        return sum(map(size, value)) if isinstance(value, (list, tuple)) else 0

    def received(*args: Any, **kwargs: Any) -> Any:
        found = receive(*args, **kwargs)
        pen.say("fetched", bytes=size(found))
        return found

    return received


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    loop = {"fft": fft_loop, "torchft": torchft_loop}[os.environ["BENCH_SYSTEM"]]
    group, directory = int(os.environ["REPLICA_GROUP_ID"]), Path(os.environ["BENCH_DIR"])
    loop(group, int(os.environ["BENCH_OUTER"]), directory)


if __name__ == "__main__":
    main()
