"""``ManagerFFT``: torchft's Manager whose steps are transactions.

This module constructs the manager and defines its public methods beyond torchft's interface
(`torchft_interface`). Its components (`parts`) do the work; `fft.protocol` decides.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchft.manager import Manager
from torchft.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL

from fft.bus.addresses import own_address
from fft.checkpoints.plan import Checkpointing
from fft.errors import FftError
from fft.messages.protocol import Peer, Token
from fft.protocol.timeouts import TORCHFT_DEFAULT_S
from fft.train.api.parts import Parts
from fft.train.api.torchft_interface import ShutDownAtExit, TorchftInterface
from fft.train.data.source import settings_of
from fft.train.gradients import torch_ddp
from fft.train.gradients.buckets import BUCKET_MB, CommHook
from fft.train.gradients.reducer import Reducer
from fft.train.guard.torchft_adapter import TorchftAdapter
from fft.train.limits import Feature
from fft.train.process_groups.mesh_layout import MeshLayout
from fft.train.session.lighthouse import init_torchft_manager
from fft.train.session.settings import ManagerConfig, read_settings, refuse_unknown
from fft.train.session.step_results import Veto
from fft.train.state.transfer import StateTransfer
from fft.train.state.updates import unwrapped
from fft.train.step.live import LiveBlock, LiveBlocks
from fft.train.step.preemption import NoticeSource
from fft.train.step.transaction import Transaction


class ManagerFFT(TorchftInterface):
    """Drop-in replacement for ``torchft.Manager``; all of its arguments keep their meaning.

    Scripts that call `register` need none of torchft's arguments.

    Args:
        pg: The process group across the replica groups. None means NCCL if CUDA is available,
            otherwise gloo.
        load_state_dict: See torchft; None with `register`.
        state_dict: See torchft; None with `register`.
        min_replica_size: Number of replica groups below which no step is committed.
        bus: URL of the error bus, ``tcp://host:port/job`` or ``memory://name`` (``FFT_BUS``).
            If None and no launcher has set it, this process is the whole job.
        spec: name or path of the FSM spec (``FFT_SPEC``, else ``hsdp``).
        trace_dir: Directory of the trace (``FFT_TRACE_DIR``). If None, no trace is written, so no
            audit is possible.
        shard_pg: The process group over which the model is sharded inside the replica group, if
            any; a rollback aborts and rebuilds it.
        expected_groups: Number of replica groups that the first epoch waits for, at most
            ``join_window`` seconds (``NUM_REPLICA_GROUPS``, else ``min_replica_size``).
        timeouts: Timeouts in seconds by timer name. They override ``timeout`` (which sets
            ``vote_window``) and ``quorum_timeout`` (which sets ``quorum`` and ``ready_window``).
            ``fft config`` lists all timers.
        checkpoint: Location of durable checkpoints, or an ``fft.Checkpointing``; the one that ``fft
            run`` passes takes precedence.
        config: Further settings, such as ``fft.ManagerConfig(digest="commit")``.

    Raises:
        TypeError: An argument is unknown to both torchft and FFT; the message suggests the closest
            name.
        ConfigError: The spec or the job token (``FFT_TOKEN``, ``FFT_TOKEN_FILE``) cannot be used,
            or timeouts contradict each other; the message names ones that would work.
        BusError: No bus answers at ``bus``.
        CheckpointError: Checkpoints cannot be taken as configured.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the names of the arguments first; otherwise Python would report a misspelt argument
        as a missing one.

        A subclass with its own constructor has its own arguments.
        """
        if cls.__init__ is ManagerFFT.__init__:
            refuse_unknown(ManagerFFT.__init__, kwargs)
        made: Self = super().__new__(cls)
        return made

    def __init__(
        self,
        pg: ProcessGroup | None = None,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        min_replica_size: int = 1,
        *args: Any,
        bus: str | None = None,
        spec: str | None = None,
        trace_dir: str | Path | None = None,
        shard_pg: ProcessGroup | None = None,
        expected_groups: int | None = None,
        timeouts: Mapping[str, float] | None = None,
        checkpoint: Checkpointing | str | Path | None = None,
        config: ManagerConfig | None = None,
        **kwargs: Any,
    ) -> None:
        pg = group_of_device() if pg is None else pg
        called = inspect.signature(Manager).bind(
            pg, load_state_dict, state_dict, min_replica_size, *args, **kwargs
        )
        settings = read_settings(
            called,
            bus=bus,
            spec=spec,
            trace_dir=trace_dir,
            expected_groups=expected_groups,
            timeouts=timeouts,
            checkpoint=checkpoint,
            config=config or ManagerConfig(),
        )
        with ExitStack() as undo:
            if settings.alone is not None:
                undo.callback(settings.alone.close)
            transfer, address = None, own_address(settings.bus_url)
            called.arguments.setdefault("hostname", f"[{address}]" if ":" in address else address)
            if called.arguments.get("checkpoint_transport") is None:
                limit = called.arguments.get("timeout", timedelta(seconds=TORCHFT_DEFAULT_S))
                transfer = StateTransfer(settings.token, limit, address=address)
                called.arguments["checkpoint_transport"] = transfer
            try:
                serves = settings.config.membership == "lighthouse"
                init_torchft_manager(self, called, address if serves else None)
            except BaseException:
                if transfer is not None:
                    transfer.shutdown()
                raise
            # the base class has started its server and heartbeats; only this callback stops them
            undo.callback(super(TorchftInterface, self).shutdown)
            self._torchft = TorchftAdapter(self)
            self._torchft.quorum_future = concurrent.futures.Future()
            self._torchft.quorum_future.set_result(None)
            self._parts = Parts(self, settings, pg, shard_pg, transfer, undo)
            self._live = LiveBlocks(self._parts, self._parts.loop)
            peer = self._parts.job.peer
            self._parts.leaving.configure_from_env(self.drain, peer.group, peer.rank)
            self._at_exit = ShutDownAtExit(self)
            undo.pop_all()

    # --- what the user calls ---

    def register(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        lr_scheduler: Any | Sequence[Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        generators: Sequence[torch.Generator] | None = None,
        scaler: Any | None = None,
    ) -> None:
        """Register the state of the job: a rollback restores it, and a joining group fetches it.

        The wrappers that Accelerate and Lightning put around models, optimizers and schedulers are
        removed: FFT steps the optimizers and schedulers inside.

        Args:
            model: one or several modules; FSDP2 modules by their roots.
            optimizer: one or several optimizers, stepped in this order after COMMIT; ``[]`` for a
                frozen stage.
            lr_scheduler: stepped after the optimizers.
            extra: name → object with ``state_dict`` / ``load_state_dict``, for anything else that
                is equal on all groups: a group that joins takes it over from another one.
            generators: random generators that the step function draws from. None means the global
                ones of torch, numpy and random.
            scaler: a ``torch.amp.GradScaler``. The step function scales the loss, and may call
                ``scaler.unscale_(optimizer)`` to clip; FFT calls ``scaler.step`` and
                ``scaler.update``. If any rank finds an inf or NaN, all ranks skip the step: the
                scale backs off, and no optimizer or scheduler is stepped.

        Raises:
            FftError: the models or optimizers use a process group that FFT cannot abort, or an
                optimizer was made before `fully_shard` replaced the parameters that it steps.
        """
        if isinstance(model, torch.optim.Optimizer) or isinstance(optimizer, nn.Module):
            raise FftError(
                "register(model, optimizer, …): expected the model first and the optimizer "
                "second, got them swapped"
            )
        models = [model] if isinstance(model, nn.Module) else list(model)
        single = isinstance(optimizer, torch.optim.Optimizer)
        optimizers: list[Any] = [optimizer] if single else list(optimizer)  # type: ignore[arg-type]
        schedulers = [] if lr_scheduler is None else [lr_scheduler]
        if isinstance(lr_scheduler, Sequence):
            schedulers = list(lr_scheduler)
        models, optimizers, schedulers = (
            [unwrapped(each) for each in given] for given in (models, optimizers, schedulers)
        )
        state, groups = self._parts.state, self._parts.groups
        state.register(models, optimizers, schedulers, extra or {}, generators, scaler)
        groups.refuse_foreign(models, state.registered.optimizer_tensors())

    def sync_gradients(
        self,
        model: nn.Module,
        bucket_cap_mb: float = BUCKET_MB,
        reduce_dtype: torch.dtype | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        """Average the gradients of ``model`` across the replica groups during backward.

        When ``backward()`` returns, ``.grad`` is what the optimizer will apply, as with torch's
        DistributedDataParallel: clip it, scale it, add to it. For FSDP2 modules, the gradient
        shards are reduced. Call this method once for each model.

        Args:
            model: a plain module, an FSDP2 root module, or a DistributedDataParallel wrapper of
                torch or torchft, whose own reducer FFT disables. A registered wrapper needs no
                call. Frozen parameters are skipped. A parameter that receives a gradient on none of
                the groups keeps ``grad = None``.
            bucket_cap_mb: size of a bucket of gradients in MiB.
            reduce_dtype: type of the reduction. ``torch.bfloat16`` halves the traffic of float32
                and rounds; None uses the type of the gradient.
            find_unused_parameters: permit that a parameter receives no gradient on a rank while it
                receives one on others, as DistributedDataParallel does; such a rank counts as
                zeros. A wrapper's own setting is taken over. Without it, the step is not committed,
                and the job ends with an error that names the parameter.

        Raises:
            FftError: DistributedDataParallel averages in a way that FFT does not support, or all
                parameters of the model are averaged already.
        """
        model = unwrapped(model)
        torch_ddp.refuse_unfit(model)
        self._parts.features.use(Feature.SYNC_GRADIENTS)
        reducers, own = self._parts.reducers, set(model.parameters())
        if any(own.issubset(reducer.parameters()) for reducer in reducers):
            raise FftError(
                f"the gradients of this {type(model).__name__} are already averaged by an "
                "earlier sync_gradients() or register_pipeline(); remove this call"
            )
        index, unused = len(reducers), find_unused_parameters
        reductions = self._parts.reductions
        reducers.append(Reducer(model, reductions, bucket_cap_mb, reduce_dtype, index, unused))
        torch_ddp.take_over(model, reducers[-1])

    def _take_over(self, wrapper: nn.Module) -> None:
        """Average the gradients of a DistributedDataParallel wrapper in its place, unless
        `sync_gradients` covers the module already."""
        reducers = self._parts.reducers
        if (reducer := next((r for r in reducers if r.covers(wrapper)), None)) is None:
            self.sync_gradients(wrapper)
        else:
            torch_ddp.refuse_unfit(wrapper)
            torch_ddp.take_over(wrapper, reducer)

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce the buckets of the last ``sync_gradients`` by ``hook(state, bucket)``.

        As with ``DistributedDataParallel.register_comm_hook``, ``bucket.buffer()`` holds the
        gradients, and the hook returns a Future of the tensor that replaces them. It reduces with
        ``manager.allreduce``, so pass the manager in ``state``. If the hook keeps state between
        steps, such as an error feedback, register it: ``register(..., extra=…)``.
        """
        if not self._parts.reducers:
            raise FftError("call sync_gradients(model) before register_comm_hook()")
        self._parts.reducers[-1].register_comm_hook(state, hook)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let ``backward()`` only accumulate gradients; the next one outside reduces them.

        As ``DistributedDataParallel.no_sync``. Under FSDP2 shards are still reduced within the
        group, unless you also use ``set_requires_gradient_sync(False)``.
        """
        before = [(reducer, reducer.quiet(True)) for reducer in self._parts.reducers]
        try:
            yield
        finally:
            for reducer, quiet in before:
                reducer.quiet(quiet)

    def on_commit(self, function: Callable[[], object]) -> None:
        """Call ``function()`` once for each committed step, after the optimizers and schedulers.

        Use it for per-step updates of state, such as an EMA of the weights (register that state as
        ``extra``). If ``function`` raises, the exception propagates and this rank's state counts as
        lost.
        """
        self._parts.state.updates.on_commit(function)

    def veto(self, function: Veto) -> None:
        """Call ``function(result)`` on each rank at the end of each step function, before its vote.

        The function gets a `StepResult`: the metrics that this rank has logged, the norm of the
        gradients, and whether they are finite. It returns None to accept the result, or how all
        ranks of all groups react: ``"skip"`` consumes the batch without a step, ``"replay"``
        repeats the step and ends the job if it is refused again, ``"stop"`` ends the job. It is
        called for each attempt. Register the same vetoes on all ranks, before ``transactions()``.
        In jobs with local steps a veto holds for the ranks of its group.

        A veto is called before ``on_nonfinite`` applies. If it raises, the exception propagates.
        """
        self._parts.features.use(Feature.VETO)
        if self._parts.job.engine is not None:
            raise FftError("call manager.veto() before the first step, on all ranks alike")
        self._parts.results.vetoes.append(function)

    def on_join(self, function: Callable[[], object], limit_s: float = 30.0) -> None:
        """Call ``function()`` when this rank joins the job, and after each rollback.

        It runs before the health checks.

        Use it to rebuild what an abort has destroyed, such as the process groups of another
        library. It runs on the main thread, after the state of the step has been restored. If it
        raises, this rank leaves the job with ``HookFailed``, which names the function and the
        error; the other groups continue, and `fft run` restarts the process.

        Args:
            function: Must be local to this process: the other ranks may be in any state.
            limit_s: Seconds after which the process is ended, with the name of the function in the
                log and in the trace.

        Raises:
            ConfigError: ``limit_s`` is not positive.
        """
        self._parts.worker.hooks.on_join.add(function, limit_s)

    def on_abort(self, function: Callable[[], object], limit_s: float = 5.0) -> None:
        """Call ``function()`` in each rollback, after the process groups of FFT are aborted.

        Use it to unblock the main thread from calls that FFT cannot abort, such as those of another
        process group or communication library. The functions run on a thread of FFT, in the order
        in which they were added. The error of one is logged, and the next one runs.

        Args:
            function: Must be safe while the main thread is in the step function.
            limit_s: Seconds after which the process is ended, with the name of the function in the
                log and in the trace, because the other groups would have to wait.

        Raises:
            ConfigError: ``limit_s`` is not positive.
        """
        self._parts.worker.hooks.on_abort.add(function, limit_s)

    def on_unwound(self, function: Callable[[], object], limit_s: float = 30.0) -> None:
        """Call ``function()`` in each rollback, on the main thread after the step function.

        All collectives of the attempt have ended then, and the state is not restored yet. Use it to
        wait for other asynchronous work of the step function, and to reset global variables. If it
        raises, this rank leaves the job as with `on_join`, without a health check.

        Args:
            function: Must be local to this process: the other ranks may be in any state.
            limit_s: As for `on_join`.

        Raises:
            ConfigError: ``limit_s`` is not positive.
        """
        self._parts.worker.hooks.on_unwound.add(function, limit_s)

    def health_check(self, function: Callable[[], object], limit_s: float = 30.0) -> None:
        """Call ``function()`` before this rank joins the job, and after each rollback.

        If it raises, this rank leaves the job with ``HealthCheckFailed``, which names the check and
        the error; the other groups continue. A restarted process is checked again, so `fft run`
        gives a group up whose check fails twice. Checks run on the main thread, in the order in
        which they were added.

        Args:
            function: Must be local to this process: the other ranks may be in any state.
            limit_s: Seconds after which the process is ended, with the name of the check in the log
                and in the trace.

        Raises:
            ConfigError: ``limit_s`` is not positive.
        """
        self._parts.worker.hooks.health_check.add(function, limit_s)

    def on_complete(self, function: Callable[[], object], limit_s: float = 30.0) -> None:
        """Call ``function()`` once when the job is complete: `transactions` has made its last
        commit.

        It runs on the main thread of each rank that takes part then, before the code after the
        loop. If it raises, the loop raises ``HookFailed``, which names it. It does not run in a
        torchft loop, because FFT does not know the last commit there.

        Args:
            function: Must be local to this process: the other ranks may have ended.
            limit_s: As for `on_join`.

        Raises:
            ConfigError: ``limit_s`` is not positive.
        """
        self._parts.worker.hooks.on_complete.add(function, limit_s)

    def on_leave(self, function: Callable[[], object], limit_s: float = 30.0) -> None:
        """Call ``function()`` once when this rank leaves for good before the job is complete.

        It runs after the rank has left, because it was drained, an error ended the script, or the
        script left its loop. It does not run in a process that is killed. Its error is logged.

        Args:
            function: Must be local to this process: the other ranks may be in any state.
            limit_s: As for `on_join`.

        Raises:
            ConfigError: ``limit_s`` is not positive.
        """
        self._parts.worker.hooks.on_leave.add(function, limit_s)

    def stage_group(self) -> ProcessGroup:
        """The process group between the stages of this replica group, for ``PipelineStage``.

        It is ``shard_pg`` if given, otherwise torch's default process group.
        """
        return self._parts.groups.stage_group()

    def register_pipeline(
        self,
        schedule: Any,
        bucket_cap_mb: float = BUCKET_MB,
        find_unused_parameters: bool = False,
    ) -> None:
        """Roll back and average ``schedule.step(...)`` of the step function like any other step.

        Call it after ``register``, instead of ``sync_gradients``. It requires ``spec="pipeline"``,
        which gives all ranks of a group the same batch: the first stage uses the inputs, the last
        one the targets. When ``step`` returns, ``.grad`` is the mean over microbatches and groups.

        Args:
            schedule: of ``torch.distributed.pipelining`` (not DualPipeV), over stages of plain
                modules made with ``group=manager.stage_group()``.
            bucket_cap_mb: MiB of gradients that are reduced at once.
            find_unused_parameters: as for `sync_gradients`.

        Raises:
            FftError: The schedule, or the way in which its stages are built, is not supported. The
                message gives the fix.
        """

        def averaged(module: nn.Module) -> Reducer:
            unused = find_unused_parameters
            self.sync_gradients(module, bucket_cap_mb, find_unused_parameters=unused)
            return self._parts.reducers[-1]

        self._parts.features.use(Feature.PIPELINE_SCHEDULE)
        self._parts.paradigm.register_pipeline(schedule, averaged)

    def shard_mesh(self) -> DeviceMesh:
        """Device mesh of one dimension over the ranks of this replica group, for ``fully_shard``.

        `mesh` returns one with several dimensions.
        """
        return self._parts.groups.shard_mesh()

    def mesh(
        self,
        names: Sequence[str],
        shape: Sequence[int],
        *,
        same_batch: Collection[str] | None = None,
    ) -> DeviceMesh:
        """Device mesh over the ranks of this replica group, as ``init_device_mesh`` builds it.

        ``manager.mesh(("fsdp", "tp"), (2, 2))`` places ranks 0 and 1 along ``tp``. Each rank has a
        process group along each dimension. A rollback aborts these groups, and the next epoch
        rebuilds them. Call it on all ranks alike, before ``sync_gradients`` and the first step.
        With several dimensions the ranks of this replica group become torch's default process
        group, if there is none.

        Args:
            names: Names of the dimensions, the outermost one first.
            shape: Sizes of the dimensions. Their product must be the number of ranks in this
                replica group.
            same_batch: Dimensions along which all ranks take the same batch. None means those
                called ``tp``, ``cp`` or ``sp``. Along other dimensions each rank takes its own.

        Raises:
            FftError: The arguments do not fit the replica group, `mesh` was called before with
                other arguments, the call comes too late, or the manager has no ``shard_pg`` of FFT.
        """
        groups, torchft = self._parts.groups, self._torchft
        layout = MeshLayout.checked(
            names, shape, same_batch, torchft.group_rank, torchft.group_world_size
        )
        if groups.layout is None:
            if self._parts.reducers:
                raise FftError(
                    "manager.mesh() after sync_gradients(): sharding replaces the parameters whose "
                    "gradients are averaged; call mesh() first, shard the model, then call "
                    "sync_gradients()"
                )
            if self._parts.job.engine is not None:
                raise FftError(
                    "manager.mesh() after the first step: it decides which batches the ranks take; "
                    "call it before transactions()"
                )
        return groups.mesh(layout)

    def transactions(self, loader: Any, max_steps: int | None = None) -> Iterator[Transaction]:
        """Yield transactions until the job has finished or this group has drained.

        After a rollback the next transaction repeats the step. It has the same batch, unless the
        rollback changed the members: the slices of the step are then redistributed.

        Args:
            loader: ``fft.CursorLoader``, ``fft.StreamLoader`` (their workers end with this
                iterator), a sequence of batches, a ``fft.DataSource`` of yours, or any loader with
                ``state_dict``/``load_state_dict``, which every rank draws in full. ``fft.Loader``
                adds settings to a loader, for example for one over a shard of the data.
            max_steps: end the job after this many committed steps.

        Raises:
            DataError: ``loader`` could not be restored, or cannot make up its ``global_batch``.
            UnequalData: ranks that must draw the same items have drawn different ones.
            FftError: a registered model averages its gradients in a way that FFT does not support,
                or a pipeline's schedule is not registered.
        """
        data = settings_of(loader)
        for wrapper in torch_ddp.wrappers_around(self._parts.state.models):
            self._take_over(wrapper)
        self._parts.paradigm.refuse_unregistered()
        self._parts.loop.use_data(data)
        return self._parts.loop.run(data, max_steps)

    def live(self) -> LiveBlock:
        """Return a block that all members of the job finish, or that fails on all of them.

        ``with manager.live() as members:`` waits until every member has entered, and gives each of
        them the same list: one `Peer` for each process, ordered by group and rank. At its end
        it waits for the work queued on devices, and until every member has finished. Enter it
        between two transactions, on all processes, always in the same order. FFT restores nothing
        after a failure except its own state.

        Raises:
            LiveBlockFailed: A member has died or failed in the block; ``failed`` names it.
            LiveBlockMisuse: Blocks are nested, in different orders, or not entered by all.
            StepRetriesExceeded: The block fails by the same error again and again on this rank.
            Drained: This replica group has left the job as asked.
        """
        return self._live.block(sys._getframe(1))

    @property
    def me(self) -> Peer:
        """The entry of this process in the member lists of ``live``."""
        return self._parts.job.peer

    def atomic(self) -> AbstractContextManager[None]:
        """A section of the step function that no rollback interrupts, such as writing a checkpoint.

        All ranks wait for it, so keep it short. It counts as a hang only after ``hang_limit``.
        """
        return self._parts.watchers.atomic()

    def ping(self) -> None:
        """Report progress. Call it in long stretches of Python code that issue no reduction."""
        self._parts.watchers.ping()

    def drain(
        self,
        within: float | None = None,
        reason: str = "asked to",
        *,
        on: signal.Signals | NoticeSource | None = None,
    ) -> None:
        """Leave the job with the next commit. It may be called from any thread or a signal handler.

        Args:
            within: deadline, in seconds from now, or from the signal. If there is no commit until
                ``drain_margin`` before it (see ``fft config``), this participant logs and traces
                what it waits for, and leaves without a commit; the other groups repeat the attempt.
                A second call can only bring the deadline forward.
            reason: text for logs and traces.
            on: when to drain, instead of now: a signal (on the main thread only; an existing
                handler is still called), or an object with ``poll``, such as ``fft.FileNotice`` and
                ``fft.HttpNotice``, whose notices have their own deadlines and reasons. A thread of
                FFT polls it once a second.

        Raises:
            ConfigError: ``within`` is not a positive finite number.
        """
        leaving = self._parts.leaving
        if on is None:
            leaving.drain(within, reason)
        elif isinstance(on, int):
            leaving.on_signal(self.drain, on, within)
        else:
            leaving.on_notice(self.drain, on)

    def stop(self) -> None:
        """End the job after the newest commit, for early stopping.

        Call it between two txns, or in a step function before its first reduction, whose step is
        then dropped. One rank is enough: the others stop after the same step, and a step that they
        have begun is rolled back. The iterator of `transactions` then ends: all groups compare
        their replicas, take the final checkpoint and leave together, without another step. `drain`
        leaves with one more commit instead.

        Raises:
            FftError: groups of this spec take local steps, or are independent stages.
        """
        self._parts.loop.stop()

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the output that the job writes once: log lines, exports, files.

        It is rank 0 of the first participating group of the current transaction. Between two
        transactions, the previous one decides. All ranks agree on it, so one rank writes for each
        committed step, unless that rank dies first. If its group leaves, the next transaction has
        another writer. No rank is the writer before its first transaction. It is a rank of the
        first stage in a pipeline. An ``async`` job may have several writers at once.
        """
        return self._torchft.group_rank == 0 and self.participating_rank() == 0

    def digest(self) -> str:
        """Digest of this rank's parameters, optimizer state and buffers."""
        return self._parts.state.digest()


def group_of_device() -> ProcessGroup:
    """Return a group across the replica groups: NCCL's if CUDA is available, else gloo's."""
    return ProcessGroupNCCL() if torch.cuda.is_available() else ProcessGroupGloo()


__all__ = ["ManagerFFT", "Token", "Transaction"]
