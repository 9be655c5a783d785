"""The interface of a recipe: its place in the job, a manager, and a record of its results.

A recipe is a function that trains as users write it. It runs in the processes of `crew`.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchft import ProcessGroupGloo

import fft

LIMIT = timedelta(seconds=60)
"""Timeout of every process group."""


@dataclass
class Job:
    """One rank of one run of a recipe."""

    group: int
    rank: int
    steps: int
    dropout: float
    """Dropout rate; 0 if a process is killed, because a heal does not restore random generators."""
    part: int
    """Number of the job, for recipes that continue in another one."""
    is_last: bool
    """Whether no other part follows."""
    folder: Path
    """Folder in which all parts of this run may keep checkpoints."""
    bus: str
    traces: Path
    store_port: int
    losses: list[float] = field(default_factory=list)
    consumed: list[list[int]] = field(default_factory=list)
    """Sample numbers of each committed step of this process."""
    gradients: list[dict[str, str]] = field(default_factory=list)
    """Digests of what `reduced` was called with, for each committed step."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Results that only the test of this recipe checks."""
    result: dict[str, Any] = field(default_factory=dict)
    _reduced: dict[str, str] | None = None
    _ends: list[Callable[[], object]] = field(default_factory=list)

    def manager(self, **options: Any) -> fft.ManagerFFT:
        """Return a manager as all recipes use it; ``options`` are its arguments and settings."""
        own = {k: options.pop(k) for k in fft.ManagerConfig.model_fields if k in options}
        values: dict[str, Any] = {
            "pg": ProcessGroupGloo(timeout=LIMIT),
            "min_replica_size": 2,
            "replica_id": str(self.group),
            "store_addr": "127.0.0.1",
            "store_port": self.store_port,
            "init_sync": False,
            "bus": self.bus,
            "trace_dir": self.traces,
            "config": fft.ManagerConfig(**{"digest": "commit", **own}),
            "timeouts": {"join_window": 30.0},  # on a busy machine a group may start late
            **options,
        }
        manager = fft.ManagerFFT(**values)
        self._ends.append(manager.shutdown)
        return manager

    def sharded_manager(self, **options: Any) -> fft.ManagerFFT:
        """Return a manager for a group of FSDP2 ranks."""
        shard_pg = fft.ShardProcessGroupGloo(timeout=LIMIT)
        manager = self.manager(shard_pg=shard_pg, **options)
        self._ends.append(shard_pg.unregister)
        return manager

    def own_seed(self) -> None:
        """Seed the generators of this rank differently from here on: dropout masks,
        augmentation."""
        torch.manual_seed(100 + 10 * self.group + self.rank)

    def reduced(self, model: nn.Module) -> None:
        """Record the gradients that the step will apply, if it is committed."""
        self._reduced = bits({name: p.grad for name, p in model.named_parameters()})

    def committed(self, indices: torch.Tensor, loss: float) -> None:
        """Record a committed step: the sample numbers of its batch, and its loss."""
        self.consumed.append(indices.tolist())
        self.losses.append(loss)
        if self._reduced is not None:
            self.gradients.append(self._reduced)

    def ended(
        self,
        model: nn.Module,
        optimizer: Any,
        schedule: Any = None,
        **others: Any,
    ) -> None:
        """Record every bit of the final state; ``others`` have a ``state_dict``."""
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self.result = {
            "parameters": bits(dict(model.named_parameters())),
            "optimizer": bits([o.state_dict() for o in optimizers]),
            "schedule": bits(schedule.state_dict() if schedule is not None else None),
            "buffers": bits(dict(model.named_buffers())),
            "rng": bits(torch.get_rng_state()),
            **{name: bits(other.state_dict()) for name, other in others.items()},
        }

    def close(self) -> None:
        """Close everything that the recipe opened."""
        while self._ends:
            self._ends.pop(0)()


def bits(value: Any, name: str = "") -> dict[str, str]:
    """Yield every tensor and value of plain data by its place, as a digest of all its bits."""
    if isinstance(value, torch.Tensor):
        local = value._local_tensor if isinstance(value, DTensor) else value
        raw = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        text = hashlib.sha256(raw.data).hexdigest()[:16]
        return {name: f"{local.dtype}{tuple(local.shape)}{text}"}
    if isinstance(value, Mapping):
        pairs: Any = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    else:
        return {name: repr(value)}
    found: dict[str, str] = {}
    for key, item in pairs:
        found |= bits(item, f"{name}.{key}" if name else str(key))
    return found


def run(task: Mapping[str, Any], group: int, rank: int) -> dict[str, Any]:
    """Run the recipe that ``task`` names in this process, and return its results."""
    os.environ.pop("FFT_FAULTS", None)
    # Hooks on the model are compiled with it, so install them always
    os.environ["FFT_INJECT"] = "1"
    if task["plan"]:
        os.environ["FFT_FAULTS"] = task["plan"]
    module, _, name = str(task["recipe"]).partition(".")
    job = Job(
        group,
        rank,
        task["steps"],
        task["dropout"],
        task["part"],
        task["is_last"],
        Path(task["folder"]),
        task["bus"],
        Path(task["traces"]),
        task["store_port"],
    )
    torch.manual_seed(3)
    try:
        getattr(importlib.import_module(module), name)(job)
    finally:
        job.close()
    return {
        "bits": job.result,
        "losses": job.losses,
        "consumed": job.consumed,
        "gradients": job.gradients,
        "facts": job.facts,
    }
