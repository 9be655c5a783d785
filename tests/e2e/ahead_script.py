"""A job of two stages that step by themselves, for test_pipeline_ahead.py.

An encoder with its own loss, and a decoder that learns from its vectors. The arguments are the
folder in which each rank leaves its final state, the number of steps, the minimum seconds of a step
of the last stage, and a JSON object with timeouts and these settings:

- `forget`: a step in which no entry is put
- `frozen`: freeze the encoder
- `more_steps`: additional steps of the last stage
- `alone`: seconds of its steps while the other group is away, so that it comes back before the end
- `groups`: number of groups that a step needs
- `overflow_0`, `overflow_1`: the first or the last stage's loss is inf for batches whose mean is
  above this, so that its scaler skips the step
- `first_seconds`: minimum seconds of a step of the first stage
- `break_0`, `break_1`: the step after which the loop of the first or the last stage is left
- `break_by`: only this group leaves its loop
- `late`: seconds that group 1 stays after that
- `again`: the loop is started again
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ranks import LIMIT, WIDTH, Samples
from torch import nn
from torchft import ProcessGroupGloo

import fft


class Encoder(nn.Module):
    """A model with statistics that each forward changes, and random draws."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.1))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Break(NamedTuple):
    """The step after which a loop is left, and whether it is started again."""

    step: float
    again: bool


def txns(manager: fft.ManagerFFT, data: Any, steps: int, at: Break) -> Iterator[Any]:
    """Yield the txns of one loop, or of two."""
    while True:
        for txn in manager.transactions(data, steps):
            yield txn
            if txn.committed and txn.step == at.step:
                break
        else:
            return
        if not at.again:
            return
        at = Break(-1, False)


class Stepper:
    """The computation of a stage's gradients, with a scaler that skips the step of a loss of
    inf."""

    def __init__(self, manager: fft.ManagerFFT, model: nn.Module, overflow: float) -> None:
        self.model, self.overflow = model, overflow
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        manager.register(model, self.optimizer, schedule, scaler=self.scaler)
        manager.sync_gradients(model)

    def backward(self, loss: torch.Tensor, mean: torch.Tensor) -> None:
        if mean.item() > self.overflow:
            loss = loss * torch.inf
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def first(
    manager: fft.ManagerFFT,
    steps: int,
    forget: float,
    seconds: float,
    overflow: float,
    break_at: Break,
) -> tuple[int, nn.Module]:
    """Train the first stage. Return the maximum number of its entries, and the model."""
    model = Encoder()
    stepper = Stepper(manager, model, overflow)
    slow, most = threading.Event(), 0
    output = fft.StageOutput(manager, lambda x: (model(x), x.mean(1, keepdim=True)))
    for txn in txns(manager, fft.CursorLoader(Samples(), 4, seed=5), steps, break_at):
        with txn:
            wanted = txn.batch.mean(1, keepdim=True)
            vectors = model(txn.batch)
            if txn.step != forget:
                output.put(txn, (vectors, wanted))
            most = max(most, len(output._entries))
            loss = F.mse_loss(model.head(vectors), wanted)
            stepper.backward(loss, wanted.mean())
            slow.wait(seconds)  # the other stage cannot tell this from work
            txn.log(loss=loss.item())
    return most, model


def frozen(manager: fft.ManagerFFT, steps: int) -> tuple[int, nn.Module]:
    model = Encoder().eval().requires_grad_(False)
    manager.register(model, [])
    output = fft.StageOutput(manager, lambda x: (model(x), x.mean(1, keepdim=True)))
    for txn in manager.transactions(fft.CursorLoader(Samples(), 4, seed=5), steps):
        with txn:
            output.put(txn, (model(txn.batch), txn.batch.mean(1, keepdim=True)))
    return len(output._entries), model


def last(
    manager: fft.ManagerFFT,
    steps: int,
    seconds: float,
    alone: float,
    overflow: float,
    break_at: Break,
) -> tuple[int, nn.Module]:
    """Train the last stage. Return as `first` does."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    stepper = Stepper(manager, model, overflow)
    slow, most = threading.Event(), 0
    entries = fft.StageInput(manager, fft.CursorLoader(Samples(), 4, seed=5))
    for txn in txns(manager, entries, steps, break_at):
        with txn:
            most = max(most, len(entries._got))
            vectors, wanted = txn.batch
            loss = F.mse_loss(model(vectors), wanted)
            stepper.backward(loss, wanted.mean())
            # The other stage cannot tell this from work.
            slow.wait(seconds if manager.num_participants() > 1 else max(seconds, alone))
            txn.log(loss=loss.item())
    return most, model


def main() -> None:
    """Train this rank's stage, and leave its digest."""
    folder, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    group, rank = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
    more: dict[str, Any] = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    forget, is_frozen = more.pop("forget", -1), more.pop("frozen", 0)
    more_steps, alone = int(more.pop("more_steps", 0)), more.pop("alone", 0.0)
    groups = int(more.pop("groups", 1))
    overflows = [more.pop(f"overflow_{number}", float("inf")) for number in range(2)]
    first_seconds = more.pop("first_seconds", 0.0)
    again = bool(more.pop("again", 0))
    breaks = [Break(more.pop(f"break_{number}", -1), again) for number in range(2)]
    late = more.pop("late", 0.0)
    if more.pop("break_by", int(group)) != int(group):
        breaks = [Break(-1, False)] * 2
    manager = fft.ManagerFFT(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        spec="pipeline_ahead",
        min_replica_size=groups,
        replica_id=group,
        init_sync=False,
        timeouts={"join_window": 30.0, **more},
        config=fft.ManagerConfig(digest="commit"),
    )
    torch.manual_seed(3)
    try:
        if rank:
            most, model = last(manager, steps + more_steps, seconds, alone, overflows[1], breaks[1])
        elif is_frozen:
            most, model = frozen(manager, steps)
        else:
            most, model = first(manager, steps, forget, first_seconds, overflows[0], breaks[0])
        (folder / f"{group}.{rank}.most").write_text(str(most))
        found: dict[str, Any] = {"digest": manager.digest(), "step": manager.current_step()}
        if group == "1" and not rank:
            threading.Event().wait(late)
        found["buffers"] = [buffer.tolist() for buffer in model.buffers()]
        with suppress(FileExistsError), (folder / f"{group}.{rank}.json").open("x") as file:
            file.write(json.dumps(found))  # a group that has left by `break` is started again
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()
