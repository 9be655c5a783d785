"""torchtitan's ``Trainer`` on FFT's transactions. It needs the extra ``titan``.

Write ``from fft.integrations.torchtitan import FFTTrainer as Trainer`` in the module with the
configuration of a model, and start torchtitan's entry point with ``fft run``. torchtitan shards the
model over the ranks of a replica group, and FFT averages the gradients across the groups.
`FFTTrainer.train` runs each optimizer step as a transaction; logging, checkpoints and validation
follow its commit.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.experiments.torchft.config.job_config import FaultTolerance
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

import fft
from fft.integrations.processes import groups, process_group, shard_process_group


def _fault_tolerance() -> FaultTolerance:
    kind = "nccl" if torch.cuda.is_available() else "gloo"
    # Faults abort collectives at once, so a long limit costs nothing. It must exceed the time of a
    # checkpoint: while one group writes it, the others wait in a collective.
    return FaultTolerance(enable=True, process_group=kind, process_group_timeout_ms=300_000)


class FFTTrainer(Trainer):
    """torchtitan's ``Trainer`` whose optimizer steps are transactions across replica groups.

    The replica groups take the place of torchtitan's ``data_parallel_replicate_degree``, also for
    ``training.global_batch_size`` and the shares of the data. With ``fault_tolerance.enable=False``
    this class is torchtitan's ``Trainer`` without replica groups.

    Attributes:
        manager: The manager of this rank. Not set with ``fault_tolerance.enable=False``.

    Raises:
        FftError: A setting is not supported; the message gives the fix.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration of a ``Trainer``, with a section ``fault_tolerance``."""

        fault_tolerance: FaultTolerance = field(default_factory=_fault_tolerance)

    manager: fft.ManagerFFT
    ntokens_seen: int
    """Number of tokens that all groups have read, unlike in torchtitan's ``Trainer``."""

    def __init__(self, config: Config) -> None:
        if not config.fault_tolerance.enable:
            super().__init__(config)
            return
        _refuse_unsupported(config)
        self._group = int(os.environ.get("REPLICA_GROUP_ID", "0"))
        self._groups = groups()
        # this process replaces a lost rank; the manager removes the variable
        self._is_successor = "FFT_SUCCESSOR" in os.environ
        training: Any = config.training
        if training.global_batch_size > 0:
            per_group, rest = divmod(training.global_batch_size, self._groups)
            if rest:
                raise fft.FftError(
                    "training.global_batch_size: expected a multiple of the number of groups, "
                    f"{self._groups}, got {training.global_batch_size}"
                )
            config.training = replace(training, global_batch_size=per_group)
        config.dataloader = _DataConfig(config.dataloader, self)
        super().__init__(config)
        states = {"train_state": self}
        optimizers, schedulers = list(self.optimizers), list(self.lr_schedulers)
        self.manager.register(self.model_parts, optimizers, schedulers, states)
        for model in self.model_parts:
            self.manager.sync_gradients(model)
        for name in ("log", "log_validation"):
            function = getattr(self.metrics_processor, name)
            setattr(self.metrics_processor, name, partial(self._log_once, function))

    def init_distributed(self) -> ParallelDims:
        """Create the manager, and make its shard group torch's default process group."""
        config: Any = self.config
        if not config.fault_tolerance.enable:
            return super().init_distributed()
        settings, is_cuda = config.fault_tolerance, self.device.type == "cuda"
        limit = timedelta(milliseconds=settings.process_group_timeout_ms)
        is_nccl = settings.process_group == "nccl"
        self._shard_pg = shard_process_group(is_cuda, limit)
        self.manager = fft.ManagerFFT(
            pg=process_group(is_nccl, limit),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=settings.min_replica_size,
            shard_pg=self._shard_pg,
            # the first step waits for all groups, which do not start at the same time
            timeouts={"join_window": float(config.comm.init_timeout_seconds)},
        )
        mesh = self.manager.shard_mesh()
        self._shard_pg.register_as_default()
        dims = _GroupDims.from_config(config.parallelism, mesh.size())
        if dims.tp > 1:
            mesh = self.manager.mesh(("fsdp", "tp"), (dims.dp_shard, dims.tp))
        dims.group_mesh = mesh
        return dims

    @property
    def _shares(self) -> int:
        """Number of batches of a replica group: the ranks along ``tp`` work on the same one."""
        return self.parallel_dims.dp_shard

    # --- the loop ---

    def train(self) -> None:
        """Train until ``training.steps`` steps are committed, or until this group is drained."""
        if not self.config.fault_tolerance.enable:
            super().train()
            return
        config, manager, source = self.config, self.manager, self.dataloader
        assert isinstance(source, _Data), "built by _DataConfig"
        if not self._is_successor:  # a successor fetches its state, and cannot load collectively
            self.checkpointer.load(step=config.checkpoint.load_step)
        txns = manager.transactions(fft.Loader(source.steps, sharded="rank"), config.training.steps)
        txn = next(txns, None)  # joins the job, and fetches the state of a job that is running
        first = self.step
        logger.info("Training starts at step %d", first + 1)
        folder = {"base_folder": config.dump_folder, "leaf_folder": f"replica_{self._group}"}
        with config.profiler.build(global_step=first, **folder) as profiler:
            while txn is not None:
                sl.set_step(self.step + 1, relative_step=self.step + 1 - first)
                with sl.log_trace_span("step"), txn:
                    computed = self._compute(txn)
                if txn.committed and not txn.skipped:
                    self._finish_step(computed)
                    profiler.step()
                txn = next(txns, None)
        if self.step < config.training.steps:
            logger.info("This group has left the job at step %d", self.step)
        else:
            logger.info("Training completed")

    def _compute(self, txn: fft.Transaction) -> _Computed:
        """Compute the gradients of one step: the step function.

        This is torchtitan's ``train_step`` up to the optimizer, with sums over all groups.
        """
        micro_batches, device = txn.batch, self.device
        present = self.manager.num_participants()
        seen = self.ntokens_seen
        local = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in micro_batches)
        # torchtitan adds the gradients of all ranks up, and FFT averages them over the groups. So
        # the divisor is the number of tokens in all groups, divided by the number of groups.
        tokens = txn.mean(torch.tensor(float(local), dtype=torch.float64, device=device))
        divisor = (tokens * self._shares).float()
        loss = torch.zeros((), device=device)
        for number, (inputs, labels) in enumerate(micro_batches):
            inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}
            is_last = number == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else self.manager.no_sync():
                part = self.forward_backward_step(
                    input_dict=inputs, labels=labels.to(device), global_valid_tokens=divisor
                )
            loss += part.detach()
        with sl.log_trace_span("optim"):
            norm = dist_utils.clip_grad_norm_(
                [p for m in self.model_parts for p in m.parameters()],
                self.config.training.max_norm,
                foreach=True,
            )
        # each rank writes only the row of its batch, so the sum over all batches has all values
        values = torch.zeros(present * self._shares, 3, dtype=torch.float64, device=device)
        place = (self.manager.participating_rank() or 0) * self._shares
        place += self._rank // self.parallel_dims.tp
        summed = loss.double() * divisor
        values[place, 0], values[place, 1] = summed, summed / max(local, 1)
        values[place, 2] = self.ntokens_seen - seen
        self.ntokens_seen = seen
        values = (txn.mean(values) * len(values)).cpu()
        mean = float(values[:, 0].sum() / (float(tokens) * len(values)))
        if not math.isfinite(mean):
            raise RuntimeError(f"Loss is not finite ({mean}) at step {self.step + 1}")
        txn.log(loss=mean, grad_norm=float(norm))
        return _Computed(
            mean, float(values[:, 1].max()), float(norm), round(float(values[:, 2].sum()))
        )

    @property
    def _rank(self) -> int:
        """This rank in its replica group."""
        return torch.distributed.get_rank()

    def _finish_step(self, computed: _Computed) -> None:
        """Count, log, save and validate after the commit of a step."""
        self.step += 1
        self.ntokens_seen += computed.tokens
        self.gc_handler.run(self.step)
        processor, data = self.metrics_processor, self.dataloader
        processor.ntokens_since_last_log += computed.tokens // (self._shares * self._groups)
        processor.data_loading_times.append(data.steps.take_seconds())
        if processor.should_log(self.step):
            extra = {"n_tokens_seen": self.ntokens_seen, **self.lr_schedulers.get_metrics()}
            processor.log(self.step, computed.mean, computed.max, computed.norm, extra)
        is_last = self.step == self.config.training.steps
        if self.manager.participating_rank() == 0:
            with self.manager.atomic():
                self.checkpointer.save(self.step, last_step=is_last)
        if self.config.validator.enable and self.validator.should_validate(self.step):
            self.validator.validate(self.model_parts, self.step)

    def _log_once(self, log: Any, *args: Any, **kwargs: Any) -> None:
        """Log on one rank of the job. On the others, begin the next measurement interval."""
        processor = self.metrics_processor
        if self.manager.is_writer or processor.config.save_for_all_ranks:
            log(*args, **kwargs)
        else:
            processor.ntokens_since_last_log = 0
            processor.data_loading_times.clear()
            processor.time_last_log = time.perf_counter()

    def close(self) -> None:
        """Leave the job, and release what torchtitan and FFT hold."""
        super().close()
        if self.config.fault_tolerance.enable:
            self.manager.shutdown()
            self._shard_pg.unregister()


@dataclass(frozen=True)
class _Computed:
    """The results of a step function, equal on all ranks."""

    mean: float
    """Mean loss of the tokens of all groups."""
    max: float
    """Largest mean loss of a rank."""
    norm: float
    """Norm of the gradients before clipping."""
    tokens: int
    """Number of tokens that all groups have read."""


class _GroupDims(ParallelDims):
    """The dimensions of a replica group, on the process groups that FFT rebuilds after faults."""

    group_mesh: DeviceMesh

    def build_mesh(self) -> DeviceMesh:
        mesh = self.group_mesh
        fsdp = mesh["fsdp"] if self.tp > 1 else mesh
        self._single_axis_meshes.update(dict.fromkeys(("batch", "loss", "fsdp"), fsdp))
        if self.tp > 1:
            self._single_axis_meshes["tp"] = mesh["tp"]
        return mesh

    def get_optional_mesh(
        self, dims: str | list[str], *, include_singleton_axes: bool = False
    ) -> DeviceMesh | None:
        if not self._single_axis_meshes:
            self.build_mesh()
        names = [dims] if isinstance(dims, str) else list(dims)
        return self._single_axis_meshes.get(names[0]) if len(names) == 1 else None


# --- data ---


class _DataConfig:
    """The configuration of a dataloader that reads the share of one rank of all groups."""

    def __init__(self, config: Any, trainer: FFTTrainer) -> None:
        self._config, self._trainer = config, trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def build(self, *, dp_world_size: int, dp_rank: int, **others: Any) -> _Data:
        trainer = self._trainer
        per_step = trainer.gradient_accumulation_steps
        others["snapshot_every_n_steps"] = per_step  # FFT reads the loader's state at each step
        loader = self._config.build(
            dp_world_size=trainer._groups * dp_world_size,
            dp_rank=trainer._group * dp_world_size + dp_rank,
            **others,
        )
        return _Data(loader, per_step, trainer)


class _Data(BaseDataLoader):
    """The dataloader that torchtitan's checkpoints contain, with the state of the manager.

    FFT reads ahead, so the position of torchtitan's own dataloader is beyond the committed step.
    """

    def __init__(self, loader: BaseDataLoader, per_step: int, trainer: FFTTrainer) -> None:
        self.steps = _Steps(loader, per_step)
        self._trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps)

    def state_dict(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save(self._trainer.manager.state_dict(), buffer)
        return {f"fft_rank_{self._trainer._rank}": buffer.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = io.BytesIO(state_dict[f"fft_rank_{self._trainer._rank}"])
        self._trainer.manager.load_state_dict(torch.load(saved, weights_only=True))


class _Steps:
    """A stateful loader. An item is the list of micro-batches of this rank for one step."""

    def __init__(self, loader: BaseDataLoader, per_step: int) -> None:
        self._loader, self._per_step = loader, per_step
        self._seconds = 0.0

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self._loader)
        while True:
            begun = time.perf_counter()
            item = list(itertools.islice(batches, self._per_step))
            self._seconds += time.perf_counter() - begun
            if len(item) < self._per_step:
                return
            yield item

    def take_seconds(self) -> float:
        """Return the time that loading batches has taken since the last call, in seconds."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader.load_state_dict(state_dict)


def _refuse_unsupported(config: Any) -> None:
    """Raise FftError for settings that FFTTrainer does not support."""
    settings, parallel, training = config.fault_tolerance, config.parallelism, config.training
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {
        f"parallelism.{name}_parallel_degree": (getattr(parallel, f"{name}_parallel_degree"), (1,))
        for name in ("context", "pipeline", "expert")
    }
    replicas = parallel.data_parallel_replicate_degree
    group = int(os.environ.get("REPLICA_GROUP_ID", "0"))
    saves = config.checkpoint
    mode = getattr(saves, "async_mode", None) if saves.enable else "disabled"
    found |= {
        # `fft run --groups` replicates the model
        "parallelism.data_parallel_replicate_degree": (replicas, (1,)),
        "parallelism.spmd_backend": (parallel.spmd_backend, ("partial_dtensor",)),
        # a graph replays backward without the hooks that average the gradients
        "training.disable_cuda_graphs": (training.disable_cuda_graphs, (True,)),
        "training.enable_cpu_offload": (training.enable_cpu_offload, (False,)),
        "comm.mode": (config.comm.mode, ("default",)),
        "fault_tolerance.process_group": (settings.process_group, ("gloo", "nccl")),
        "fault_tolerance.semi_sync_method": (settings.semi_sync_method, (None,)),
        # `fft run` sets both
        "fault_tolerance.replica_id": (settings.replica_id, (0, group)),
        "fault_tolerance.group_size": (settings.group_size, (0, groups())),
        # for the other modes torchtitan makes process groups that FFT cannot abort
        "checkpoint.async_mode": (mode, ("disabled",)),
        "checkpoint.create_seed_checkpoint": (config.checkpoint.create_seed_checkpoint, (False,)),
        # hooks of the optimizer, such as load balancing of experts, would not reach all groups
        "model_spec.post_optimizer_build_fn": (config.model_spec.post_optimizer_build_fn, (None,)),
    }
    for name, (value, allowed) in found.items():
        if value not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise fft.FftError(
                f"FFTTrainer: {name}: expected {expected}, got {value!r}; change it, or set "
                "fault_tolerance.enable=False to train without FFT"
            )
