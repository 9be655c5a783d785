"""``ManagerFFT``: torchft's Manager whose steps are transactions. Thin: the core has the protocol.

Touches torchft, torch and the process groups; runs on the user's main thread, plus what the
engine calls from its own thread (``_EngineHost``).
"""

from __future__ import annotations

import atexit
import concurrent.futures
import hashlib
import inspect
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self, cast

import torch
from torch import nn
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Work
from torchft.manager import (
    REPLICA_ID_KEY,
    ExceptionWithTraceback,
    Manager,
    WorldSizeMode,
    _ManagedWork,
)
from torchft.process_group import ProcessGroup
from torchft.utils import synchronize
from torchft.work import _DummyWork

import fft.util.errors
from fft.bus import BusError, ErrorBus, open_job_bus
from fft.bus.token import JobToken
from fft.engine.loop import Engine
from fft.health.death_mutex import Hold, hold
from fft.health.monitor import MonitorConfig
from fft.health.monitor_client import MonitorClient, supervisor_socket
from fft.messages.commands import (
    Answer,
    Check,
    Command,
    Inject,
    answer_inbox,
    command_to_json,
    encode_answer,
)
from fft.messages.fault_plans import Fault as InjectableFault
from fft.messages.protocol import (
    Applied,
    Apply,
    ApplyFailed,
    Connected,
    Drain,
    Fault,
    Finish,
    Heal,
    Healed,
    HealFailed,
    Manifest,
    Peer,
    Prepared,
    Record,
    Restore,
    Restored,
    Start,
    StartTxn,
    Stop,
    Suspect,
    Token,
    encode,
)
from fft.protocol.load import load_spec
from fft.protocol.participant import Participant
from fft.protocol.state import GENESIS, Config
from fft.protocol.table import Table
from fft.protocol.timeouts import ARGUMENTS, TORCHFT_DEFAULT_S, Given, from_env, resolve, timers
from fft.trace.writer import TraceWriter, header
from fft.train.body_failures import ANY, BodyFailures
from fft.train.data.source import DataSource, Drawn, Inputs, as_source
from fft.train.diagnosis.check_runner import CheckRunner
from fft.train.drain_clock import DrainClock, waiting_for
from fft.train.injector import InjectedFault, Injector
from fft.train.interrupt import Interrupted, Interrupter
from fft.train.lighthouse import Beacon, Membership, Quorums, construct, membership_of
from fft.train.place_log import PlaceLog
from fft.train.preemption import INTERVAL_S, Notice, NoticeSource, Poller, source_of
from fft.train.process_group import AbortableGroup, GroupAborted, ShardProcessGroupGloo
from fft.train.process_group.sockets import lose_connections
from fft.train.reducer import BUCKET_MB, CommHook, Reducer
from fft.train.speed_reporter import SpeedReporter, interval_from
from fft.train.standalone import Alone, is_alone
from fft.train.state.equality_checks import EqualityChecks, refuse_interval
from fft.train.state.learning import Learning
from fft.train.state.step_state import StepState, TornState
from fft.train.state.transfer import StateTransfer
from fft.train.unsafe_places import guarded
from fft.train.updates import StepWatch, Updates
from fft.util.errors import (
    BodyKeepsFailing,
    Drained,
    FftError,
    NoQuorum,
    TxnAborted,
    UnlikeGroups,
)

logger = logging.getLogger(__name__)

Digest = Literal["never", "commit"]
Learners = Literal["auto", "always", "never"]

_FRAMES = 4
"""Calls of the main thread that are named when it is too late to leave with a commit."""
_STOP_LEARNING_S = 5.0
"""For a fetch that is wanted no longer to end."""
_UNFINISHED = "optimizer.step() was begun and did not finish"
SCALER = "grad_scaler"
"""Name of the scaler's state among what is registered."""
_LONGEST_CAUSE = 1500
"""Characters that the others are told; a message has its limits."""


class ManagerFFT(Manager):  # type: ignore[misc]
    """Use in the place of ``torchft.Manager``; every argument of it keeps its meaning.

    Args:
        bus: URL of the error bus, ``tcp://host:port/job`` or ``memory://name`` (``FFT_BUS``).
            None, where no launcher says of other processes either: this one is the whole job.
        spec: name or path of the FSM spec (``FFT_SPEC``, else ``hsdp``).
        trace_dir: where the trace goes (``FFT_TRACE_DIR``); None: no trace, no audit.
        shard_pg: the process group the model is sharded over inside the replica group, if any;
            a rollback aborts and rebuilds it too.
        expected_groups: how many replica groups the first epoch waits for, for ``join_window``
            seconds (``NUM_REPLICA_GROUPS``, else ``min_replica_size``).
        timeouts: seconds by the spec's timer names; come before ``timeout`` (``vote_window``)
            and ``quorum_timeout`` (``quorum``, ``ready_window``). ``fft config`` shows them all.
        digest: ``commit``: trace a digest of this rank's parameters and optimizer state after
            every commit, so that the audit can compare replicas bit by bit. Costs one pass over
            them. (Module buffers may differ between replicas: batch-norm statistics are local.)
        check_replicas: every so many steps replicas compare a fingerprint of parameters and
            optimizer state in their votes; a power of 2. None: as often as costs 1 % of the time;
            0: never. Needs ``register``.
        on_divergence: what follows if they differ. ``stop``: the job ends with ``Diverged``.
            ``heal``: who differs from most fetches their state; without a majority, stop. None:
            as the spec says (``policies``), which is ``stop`` as shipped.
        learners: a group that joins computes its first step on weights that are not the job's,
            while its state is on its way. ``auto``: not where bodies change reduced gradients, by
            clipping, say, since that might depend on the weights: then it waits for the state.
            ``always``: it need not wait, for they depend on the gradients alone. ``never``: it
            always waits.
        max_body_failures: re-raise when this rank's own body fails so often in a row at one step.
            None: 2 times by the same error (class, words and every call), 5 times in all.
        monitor: whether a process beside this one watches it: rolls back when the main thread
            hangs, ends the process when that does not help, and tells of its death. None: unless
            ``FFT_MONITOR=0`` (a debugger stops main threads, too), if the main thread trains.
        progress_interval: seconds between two words of progress, by which slow ranks are named; 0:
            none (``FFT_PROGRESS_INTERVAL``, else 1).
        membership: ``register``: the job's register decides alone who is in, and a lighthouse, if
            one is given (``lighthouse_addr``, ``TORCHFT_LIGHTHOUSE``), only gets heartbeats.
            ``lighthouse``: no txn commits without a quorum of it that names every group; give all
            groups the same (``FFT_MEMBERSHIP``, else ``register``).

    Raises:
        SpecError: the spec cannot be used.
        TimeoutsError: timeouts that contradict each other; says which would work.
        TokenError: the job token (``FFT_TOKEN``, ``FFT_TOKEN_FILE``) cannot be used.
        BusUnreachable: nobody answers at ``bus``.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        load_state_dict: Callable[[Any], None] | None,
        state_dict: Callable[[], Any] | None,
        min_replica_size: int,
        *args: Any,
        bus: str | None = None,
        spec: str | None = None,
        trace_dir: str | Path | None = None,
        shard_pg: ProcessGroup | None = None,
        expected_groups: int | None = None,
        timeouts: Mapping[str, float] | None = None,
        digest: Digest = "never",
        check_replicas: int | None = None,
        on_divergence: Literal["stop", "heal"] | None = None,
        learners: Learners = "auto",
        max_body_failures: int | None = None,
        monitor: bool | None = None,
        progress_interval: float | None = None,
        membership: Membership | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_interval(check_replicas)
        self._spec = load_spec(spec or os.environ.get("FFT_SPEC") or "hsdp")
        url = bus or os.environ.get("FFT_BUS")
        called = inspect.signature(Manager).bind(
            pg, load_state_dict, state_dict, min_replica_size, *args, **kwargs
        )
        self._alone: Alone | None = None
        if not url and not is_alone(called):
            raise FftError("no bus: pass bus=, or set FFT_BUS to what `fft serve` prints")
        self._token = JobToken.from_env()
        chosen = membership_of(membership or os.environ.get("FFT_MEMBERSHIP"))
        self._quorums: Quorums | None = None
        self._progress_interval = interval_from(progress_interval)
        self._pacer: SpeedReporter | None = None
        self._engine: Engine | None = None
        self._group_bus: ErrorBus | None = None
        self._interrupter: Interrupter | None = None
        self._watched: MonitorClient | None = None
        self._hold: Hold | None = None
        self._clock: DrainClock | None = None
        self._pollers: list[Poller] = []
        self._main: int | None = None
        """Thread that trains; known once it has joined the job."""
        self._txn: StartTxn | None = None
        self._applying: Apply | None = None
        self._reduced: torch.Tensor | None = None
        """The last tensor reduced in this txn, where faults may be injected."""
        self._raise_on_abort = False
        if not url:
            self._alone = Alone(called)
            url, expected_groups = self._alone.bus_url, 1
            # a breakpoint is a hang
            monitor = os.environ.get("FFT_MONITOR") == "1" if monitor is None else monitor
        transfer = None
        if called.arguments.get("checkpoint_transport") is None:
            limit = called.arguments.get("timeout", timedelta(seconds=TORCHFT_DEFAULT_S))
            transfer = called.arguments["checkpoint_transport"] = StateTransfer(self._token, limit)
        self._transfer = transfer
        try:
            construct(self, called)
        except BaseException:
            if transfer is not None:
                transfer.shutdown()
            if self._alone is not None:
                self._alone.close()
            raise
        try:
            self._quorum_future: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._quorum_future.set_result(None)
            table = resolve(self._spec, self._given(timeouts or {}), url)
            self._timeouts = timers(self._spec, table)
            limit, grace = table["hang_limit"].seconds, table["hang_grace"].seconds
            host_s = table["host_limit"].seconds
            self._hang = MonitorConfig(limit, grace, min_s=min(1.0, limit), host_s=host_s)
            self._monitor = os.environ.get("FFT_MONITOR") != "0" if monitor is None else monitor
            self._bus_url = url
            self._bus_operation = table["bus_operation"].seconds
            self._bus = open_job_bus(url, self._token, self._bus_operation)
            self._replicate = AbortableGroup(pg, "replicate")
            self._shard = AbortableGroup(shard_pg, "shard") if shard_pg is not None else None
            self._futures: set[_CancellableFuture] = set()
            self._works: list[Work] = []
            self._reducers: list[Reducer] = []
            """Their hooks on parameters keep us alive, which the garbage collector does not see."""
            self._manifest = _ManifestBuilder()
            self._state: StepState | None = None
            self._updates = Updates()
            self._steps: StepWatch | None = None
            """Of a loop that steps its optimizer itself; from its first commit on."""
            self._position: Record | None = None
            """The record that the state on this rank is that of."""
            self._source: DataSource | None = None
            self._is_over = False
            """The last txn of all was committed."""
            self._loader: Any = None
            """What the source draws from; it knows what was drawn and not consumed."""
            self._served: Record | None = None
            """The epoch whose first state is served."""
            self._learning: Learning | None = None
            self._learners = learners
            self._has_extra = False
            self._on_divergence = on_divergence
            self._has_learned = False
            """The body of this txn began before the state was there."""
            self._is_reduced_by_hand = False
            """The user has reduced something in this txn, besides the reducers."""
            self._checks: EqualityChecks | None = None
            self._check_every = check_replicas
            self._equality: str | None = None
            """Digest of the state that this txn began with, if it is to be compared."""
            self._torn: str | None = None
            """Why the state of this rank is lost, which the engine is to hear with the rollback."""
            self._digest = digest
            self._max_body_failures = ANY if max_body_failures is None else max_body_failures
            self._body_failures = BodyFailures(max_body_failures)
            self._at_exit = _ShutDown(self)
            self._finish: Finish | None = None
            """The engine's last word: whoever asks for a txn after it hears it again."""
            self._lineage, self._cursor = "", 0
            self._data: Any = None
            """Where a stateful loader resumes."""
            self._drain_asked = False
            self._expected = expected_groups or int(
                os.environ.get("NUM_REPLICA_GROUPS", str(min_replica_size))
            )
            directory = trace_dir or os.environ.get("FFT_TRACE_DIR")
            self._trace_dir = Path(directory) if directory else None
            self._logger = _QuietLogger(self, vars(self)["_logger"])
            self._identify()
            self._injector = self._make_injector()
            place = (self._peer.group, self._peer.rank)
            self._station = CheckRunner(place, self._bus, self._trace.note)
            self._clock = DrainClock(_Leaver(self), table["drain_margin"].seconds)
            self._drain_as_set()
            if chosen == "lighthouse" and self._group_rank == 0:
                self._quorums = Quorums(
                    cast("Beacon", self._manager),
                    self._peer,
                    table["quorum_timeout"].seconds,
                    table["lighthouse_window"].seconds,
                    _Doubter(self),
                )
        except BaseException:
            # torchft has begun to serve and to send heartbeats, which nobody else could end now.
            self._end_drain()
            super().shutdown()
            for made in ("_bus", "_trace", "_alone"):
                if getattr(self, made, None) is not None:
                    getattr(self, made).close()
            raise

    # --- identity and start ---

    def _given(self, timeouts: Mapping[str, float]) -> dict[str, Given]:
        """What the user chose; torchft has put its own environment variables in already."""
        chosen = {name: Given(float(seconds), "timeouts=") for name, seconds in timeouts.items()}
        for name in ARGUMENTS:
            seconds = getattr(self, f"_{name}").total_seconds()
            if seconds != TORCHFT_DEFAULT_S:
                chosen[name] = Given(seconds, f"{name}=")
        return {**chosen, **from_env(os.environ)}

    def _identify(self) -> None:
        # A launcher that reports deaths and asks for drains must mean the group that we call so.
        named = self._store.get(REPLICA_ID_KEY).decode().split(":")[0]
        group = os.environ.get("FFT_GROUP") or named
        incarnation = self._bus.next_number(f"inc/{group}/{self._group_rank}")
        self._peer = Peer(group, self._group_rank, incarnation)
        store: Any = self._store
        self._store_addr = f"{store.host}:{store.port}"
        self._trace = TraceWriter(self._trace_dir, self._peer)
        self._places = PlaceLog(self._trace)

    def _start(self) -> Engine:
        """Join the job. Late, so that a checkpoint can be loaded before."""
        config = Config(
            me=self._peer,
            world=self._group_world_size,
            store=self._store_addr,
            transport=self._checkpoint_transport.metadata(),
            pid=os.getpid(),
            host=socket.gethostname(),
            timeouts=self._timeouts,
            min_groups=self._min_replica_size,
            expected_groups=self._expected,
            min_reductions=self._spec.policies.min_reductions,
            on_divergence=self._on_divergence or self._spec.policies.on_divergence,
            fixed_with_spares=self._replica_world_size_mode == WorldSizeMode.FIXED_WITH_SPARES,
        )
        if self._state is not None:
            try:
                self._state.export()
            except TypeError as error:  # else it shows when somebody joins, and stops the others
                raise FftError(
                    f"what is registered cannot be sent to a group that joins: {error}"
                ) from error
        self._warn_of_strangers()
        participant = Participant(Table(self._spec), config)
        fresh = GENESIS if not self._init_sync else f"fresh:{self._peer.group}:{self._store_addr}"
        local = participant.initial(
            lineage=self._lineage or (fresh if self._step == 0 else f"step:{self._step}"),
            step=self._step,
            cursor=self._cursor,
            batches=self._batches_committed,
        )
        self._trace.write("header", header(self._spec, config, local))
        self._group_bus = self._open_group_bus()
        if threading.current_thread() is threading.main_thread():
            self._interrupter = Interrupter()  # else Python lets nobody interrupt the bodies
            self._watch()
            self._hold = hold(os.environ.get("FFT_LIFELINE_FD"))
        self._main = threading.get_ident()
        atexit.register(self._at_exit)
        self._engine = Engine(
            participant, local, self._bus, self._trace, _EngineHost(self), self._group_bus
        )
        self._engine.start()
        if self._quorums is not None:
            self._quorums.start()
        self._pacer = SpeedReporter(self._bus, self._peer, self._progress_interval)
        if self._shard is not None:
            self._shard.waiting = self._pacer.waiting
        self._engine.post(Start())
        if self._drain_asked:
            self._ask_to_leave()
        return self._engine

    def _warn_of_strangers(self) -> None:
        """Parameters that are stepped, but not reduced, make groups differ."""
        reduced = {id(p) for reducer in self._reducers for p in reducer.parameters()}
        stepped = [p for p in self._updates.parameters() if p.requires_grad]
        if strangers := [tuple(p.shape) for p in stepped if reduced and id(p) not in reduced]:
            logger.warning(
                "%d parameters of the optimizers are in no model of sync_gradients(), so "
                "their gradients are not averaged across the groups; shapes: %s",
                len(strangers),
                strangers[:5],
            )

    def _open_group_bus(self) -> ErrorBus | None:
        """A bus on the group's own store, where its ranks vote first; None: they vote apart."""
        if self._group_world_size == 1:
            return None
        host, _, port = self._store_addr.rpartition(":")
        reach = f"[{host}]" if ":" in host else host
        try:
            # Named after this life of the job's bus, whose epochs nobody else's votes can mean.
            url = f"tcp://{reach}:{port}/{self._bus.generation}"
            return open_job_bus(url, self._token, self._bus_operation, purpose="group bus")
        except BusError as error:
            logger.warning("every rank votes for itself: %s", error)
            return None

    def _make_injector(self) -> Injector | None:
        return Injector.from_env(
            claim=lambda key: self._bus.next_number(key) == 1,
            on_inject=lambda fault: self._trace.note(
                "inject",
                {
                    "name": fault.name,
                    "kind": fault.kind,
                    "phase": fault.phase,
                    "step": fault.step,
                },
                self._engine.local if self._engine else None,
            ),
            hands=_Hands(self),
        )

    def _obey(self, command: Command) -> None:
        """Engine thread: an operator's word to the job. Traced if it concerns this participant."""
        if isinstance(command, Check):
            if (task := self._station.take(command)) is not None:
                told = command_to_json(replace(command, tasks=(task,)))
                self._trace.note("command", told)
            return
        fault = command.fault if isinstance(command, Inject) else None
        if isinstance(fault, InjectableFault):
            if fault.group != self._peer.group:
                return
            if getattr(fault, "rank", None) not in (None, self._peer.rank):
                return
        refusal = None
        if isinstance(fault, InjectableFault):
            refusal = self._admit(fault)
            self._answer(command, refusal)
        local = self._engine.local if self._engine is not None else None
        self._trace.note("command", {**command_to_json(command), "refused": refusal}, local)

    def _admit(self, fault: InjectableFault) -> str | None:
        """Have the fault carried out; or why not."""
        if self._injector is None or not self._injector.open:
            return "it was not started to allow it (fft run --injectable, or FFT_INJECT=1)"
        self._injector.add(fault)
        return None

    def _answer(self, command: Command, refusal: str | None) -> None:
        who = f"group {self._peer.group} rank {self._peer.rank}"
        verdict: Literal["refused", "accepted"] = "accepted" if refusal is None else "refused"
        word = encode_answer(Answer(command.id, who, verdict, refusal or "armed"))
        try:
            self._bus.send(answer_inbox(command.id), word)
        except BusError as error:  # the engine will notice, if it lasts
            logger.warning("could not answer a command: %s", error)

    def _watch(self) -> None:
        if not self._monitor:
            return
        try:
            self._watched = MonitorClient(
                self._hang,
                self._suspected,
                group=self._peer.group,
                rank=self._peer.rank,
                # under a supervisor it is the supervisor that tells of deaths
                bus_url=None if "FFT_GROUP" in os.environ else self._bus_url,
                supervisor=supervisor_socket(os.environ.get("FFT_SUPERVISOR_FD")),
            )
        except OSError as error:
            logger.warning("nobody watches this process: its monitor cannot be started: %s", error)

    def _suspected(self, reason: str) -> None:
        """The monitor says that the main thread hangs; on a thread of its own."""
        plan = self._txn
        if plan is not None and self._applying is None and self._engine is not None:
            self._engine.post(Fault(plan.token, f"hangs: {reason}", "Hang"))

    def _waiting(self) -> AbstractContextManager[None]:
        """Around what waits for others: whatever is wrong then is not this rank's."""
        return nullcontext() if self._watched is None else self._watched.pulse.waiting

    def _drain_as_set(self) -> None:
        """What the environment says of when to leave."""
        name = os.environ.get("FFT_DRAIN_SIGNAL")
        if name and threading.current_thread() is threading.main_thread():
            self.drain_on(signal.Signals[name], within=_drain_within())
        if notice := os.environ.get("FFT_NOTICE"):
            self.drain_on(source_of(notice, self._peer.group, self._peer.rank))

    def _end_drain(self) -> None:
        for poller in self._pollers:
            poller.close()
        self._pollers.clear()
        if self._clock is not None:
            self._clock.close()

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
        """Name the state of the job: what a rollback puts back and what a joiner fetches.

        Args:
            model: one or several modules; FSDP2 modules by their roots.
            optimizer: stepped by the transaction after COMMIT, in this order.
            lr_scheduler: stepped after the optimizers.
            extra: name → object with ``state_dict`` / ``load_state_dict``, for anything else.
            generators: random generators that the body draws from; None: the global ones of
                torch, numpy and random.
            scaler: a ``torch.amp.GradScaler``. The body scales the loss, and may call
                ``scaler.unscale_(optimizer)`` to clip; the transaction does the rest. Where any
                rank finds an inf or NaN, the step is skipped on all: the scale backs off, no
                optimizer and no scheduler is stepped.
        """
        models = [model] if isinstance(model, nn.Module) else list(model)
        single = isinstance(optimizer, torch.optim.Optimizer)
        optimizers: list[Any] = [optimizer] if single else list(optimizer)  # type: ignore[arg-type]
        schedulers: list[Any] = []
        if lr_scheduler is not None:
            schedulers = (
                list(lr_scheduler) if isinstance(lr_scheduler, Sequence) else [lr_scheduler]
            )
        others = dict(extra or {})
        self._has_extra = bool(others)
        if scaler is not None:
            if SCALER in others:
                raise FftError(f"extra={{{SCALER!r}: …}} and scaler=: give one of them")
            others[SCALER] = scaler
        updates = Updates(optimizers, schedulers, scaler)
        for function in self._updates.after:  # registered before
            updates.on_commit(function)
        self._updates.close()
        self._updates = updates
        self._state = StepState(models, optimizers, schedulers, others, generators)
        self._checks = EqualityChecks(self._state.fingerprint, self._check_every)
        if self._injector is not None:
            for module in models:
                self._injector.attach(module)

    def sync_gradients(
        self,
        model: nn.Module,
        bucket_cap_mb: float = BUCKET_MB,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Average the gradients of ``model`` across the replica groups during backward.

        When ``backward()`` returns, ``.grad`` is what the optimizer will apply, as with torch's
        DistributedDataParallel: clip it, scale it, add to it. FSDP2 modules have their shards
        reduced. Several models: call it for each.

        Args:
            model: plain, or by its FSDP2 root. Frozen parameters are left out; those that get a
                gradient on no group keep ``grad = None``.
            bucket_cap_mb: MiB of gradients that are reduced at once.
            reduce_dtype: reduce in this type, such as ``torch.bfloat16``, at half the traffic of
                float32 and with its rounding; None: in that of the gradient.
        """
        self._reducers.append(Reducer(model, self, bucket_cap_mb, reduce_dtype))

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce the buckets of the last ``sync_gradients`` by ``hook(state, bucket)``.

        As ``DistributedDataParallel.register_comm_hook``: ``bucket.buffer()`` holds the gradients,
        the hook returns a Future of what shall be in their place. It reduces by
        ``manager.allreduce``, so pass the manager as ``state``, or in it. Whatever the hook keeps
        from step to step belongs to the state: ``register(..., extra=…)``.
        """
        if not self._reducers:
            raise FftError("call sync_gradients(model) before register_comm_hook()")
        self._reducers[-1].register_comm_hook(state, hook)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it ``backward()`` only accumulates gradients; the next one outside reduces all.

        As ``DistributedDataParallel.no_sync``. Saves the reductions between; without it the result
        is that of the same mean. Under FSDP2 shards are still reduced within the group, unless you
        also use ``set_requires_gradient_sync(False)``.
        """
        before = [(reducer, reducer.quiet(True)) for reducer in self._reducers]
        try:
            yield
        finally:
            for reducer, quiet in before:
                reducer.quiet(quiet)

    def on_commit(self, function: Callable[[], object]) -> None:
        """Call ``function()`` once for each committed step, after the optimizers and schedulers.

        For what must happen once a step and belongs to the state, such as an EMA of the weights
        (register its state as ``extra``). An exception in it leaves the state torn, and is raised.
        """
        self._updates.on_commit(function)

    def shard_mesh(self) -> DeviceMesh:
        """Device mesh over the ranks of this replica group, for ``fully_shard``."""
        if self._shard is None or not isinstance(self._shard.pg, ShardProcessGroupGloo):
            raise FftError("shard_mesh() needs shard_pg=fft.ShardProcessGroupGloo(...)")
        if self._shard.pg._pg is None:
            self._configure_shard(f"boot/{self._peer.inc}", 0)
        return self._shard.pg.mesh()

    def transactions(
        self, loader: Any, max_steps: int | None = None, replay_only: bool = False
    ) -> Iterator[Transaction]:
        """Yield transactions, the same batch again after a rollback, until drained or done.

        Args:
            loader: ``fft.CursorLoader``, ``fft.StreamLoader`` (their workers end with this
                iterator), a sequence of batches, a ``fft.DataSource`` of yours, or any loader with
                ``state_dict``/``load_state_dict``, which every rank draws in full.
            max_steps: leave, with all groups, after this many committed steps.
            replay_only: take any iterable: a group that joins cannot go on, and the job cannot
                be resumed.

        Raises:
            DataError: ``loader`` could not be restored.
        """
        if self._state is None:
            raise FftError("call manager.register(model, optimizer) before transactions()")
        if self._is_over:
            raise FftError(
                f"this job is over since step {self._step}: its last step (max_steps), or the end "
                "of its data, has come, and all groups have left. Call transactions() once, with "
                "the total of steps; what is done between epochs fits between two txns"
            )
        self._raise_on_abort = True
        if self._source is None or self._loader is not loader or self._source.in_any_order:
            self._source, self._loader = as_source(loader, replay_only), loader
        if self._data is not None:
            self._source.load(self._data, self._cursor * self._group_world_size)
            self._data = None
        inputs = Inputs(self._source, self._group_world_size, self._group_rank)
        try:
            self._source.open()  # before there are process groups, whose sockets workers would have
            while (plan := self._begin()) is not None:
                if max_steps is not None and plan.step >= max_steps:
                    return
                if (drawn := inputs.draw(plan)) is None:
                    return
                self._state.capture()
                last_step = max_steps is not None and plan.step + 1 >= max_steps
                txn = Transaction(self, plan, drawn, drawn.is_last or last_step)
                yield txn
                if not txn.closed:
                    raise FftError("the body of a txn must run inside `with txn:`")
        finally:
            self._source.close()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A section of the body that no rollback interrupts, such as the writing of a checkpoint.

        What waits for it is everyone: keep it short. It is taken for a hang after ``hang_limit``
        only.
        """
        pulse = nullcontext() if self._watched is None else self._watched.pulse.atomic
        own = nullcontext() if self._interrupter is None else self._interrupter.atomic()
        with own, pulse:
            yield

    def ping(self) -> None:
        """Say that work is done, in a long stretch of Python that issues no reduction."""
        if self._watched is not None:
            self._watched.pulse.ping()

    def drain(self, within: float | None = None, reason: str = "asked to") -> None:
        """Leave with the next commit; may be called from any thread or a signal handler.

        Args:
            within: seconds in which this participant must be out. If there is no commit until
                ``drain_margin`` before that (see ``fft config``), it logs and traces what it waits
                for, and leaves without one: the others lose this attempt. An earlier deadline of a
                second call counts, a later one does not.
            reason: for people.

        Raises:
            NoticeError: ``within`` is no time.
        """
        notice = Notice(reason, within)
        self._ask_to_leave()
        if self._clock is not None:
            self._clock.hear(notice)

    def _ask_to_leave(self) -> None:
        self._drain_asked = True
        if self._engine is not None:
            by = f"{self._peer}"
            self._engine.post(Drain(groups=(self._peer.group,), by=by, local=True))

    def drain_on(
        self,
        source: signal.Signals | NoticeSource,
        within: float | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Drain when this process gets a signal, or when a notice source says so.

        Args:
            source: a signal, on the main thread only; a handler that was there is called too. Or
                whatever has ``poll``, such as ``fft.train.preemption.FileNotice`` and
                ``HttpNotice``. within: seconds that a signal leaves; the notices of a source say it
                themselves. interval_s: seconds between two polls of a source, on a thread of its
                own.
        """
        if not isinstance(source, int):
            reader = weakref.WeakMethod(self.drain)
            self._pollers.append(Poller(source, lambda n: _pass_on(reader, n), interval_s))
            return
        previous, owner = signal.getsignal(source), os.getpid()

        @guarded
        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() != owner:  # a forked worker, to whom our way of ending means nothing
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
                signal.raise_signal(number)
                return
            if self._watched is not None and self._watched.pulse.doomed:
                signal.signal(number, signal.SIG_DFL)  # no request: this process hung
                signal.raise_signal(number)
            self.drain(within, signal.Signals(number).name)
            if callable(previous):
                previous(number, frame)

        signal.signal(source, handle)

    @property
    def asked_to_leave(self) -> bool:
        """Whether somebody in this process has asked it to leave: a notice, a signal, the end."""
        return self._drain_asked

    @property
    def drained(self) -> bool:
        """Whether this participant has left for good."""
        engine = self._engine
        return engine is not None and engine.local.role == "terminal"

    def digest(self) -> str:
        """Digest of this rank's parameters, optimizer state and buffers."""
        if self._state is None:
            raise FftError("call manager.register(model, optimizer) before digest()")
        return self._state.digest()

    # --- the step, on the main thread ---

    def _begin(self) -> StartTxn | None:
        """Do what the engine asks until a txn may begin. None: drained."""
        engine = self._engine or self._start()
        self._finish_apply()
        if self._steps is not None and self._steps.was_torn:
            # noticed late: by a second optimizer, after the first one was counted
            self._torn = _UNFINISHED
            self._steps.begin()
        while True:
            with self._waiting():
                command = self._finish or engine.wait_command()
            engine.take(command)
            match command:
                case Restore():
                    self._restore(command)
                case StartTxn() if self._torn is not None:  # and the rollback comes
                    engine.post(Fault(command.token, self._torn, "apply"))
                case Heal() if self._torn is not None:
                    engine.post(HealFailed(command.record.epoch, self._torn, torn=True))
                case Heal():
                    with self._waiting():  # it has limits of its own
                        self._heal(command)
                case StartTxn():
                    self._enter(command)
                    return command
                case Finish():
                    self._finish = command
                    self._leave_txn()
                    if command.error is not None:
                        raise _error(command)
                    return None
                case Apply():  # a decision for a body that has already raised out of its step
                    self._applying = command
                    self._apply_failed(RuntimeError("interrupted before the optimizer step"))

    def _leave_txn(self) -> None:
        """Out: what the main thread does from now on is no step of the job's."""
        self._txn = None
        self._stop_learning()
        if self._watched is not None:
            self._watched.pulse.end(committed=False)
        if self._clock is not None:
            self._clock.left()

    def _enter(self, plan: StartTxn) -> None:
        if self._served is not None and (plan.token.txn > 1 or not self._served.learners):
            self._checkpoint_transport.disallow_checkpoint()
            self._served = None
        self._errored: ExceptionWithTraceback | None = None
        self._works.clear()
        self._has_learned = self._learning is not None
        self._is_reduced_by_hand = False
        if not self._raise_on_abort:  # else they begin with the body
            self._begin_reducers()
        self._reduced = None
        self._manifest = _ManifestBuilder()
        self._step = plan.step
        self._participating_replica_rank = plan.index
        self._participating_replica_world_size = plan.participants
        if self._state is not None and self._source is None:
            self._state.capture()  # else after the items are drawn, which may use random numbers
        self._txn = plan
        # of a learner the state is still on its way
        checks = None if self._has_learned else self._checks
        self._equality = None if checks is None else checks.digest(plan.step)
        if self._pacer is not None:
            self._pacer.begin()
        if self._watched is not None:
            self._watched.pulse.begin(plan.step)
            self._watched.compilations.attach()
        self._ask_lighthouse(plan)
        if self._injector is not None:
            self._injector.begin(plan.step, len(plan.members), plan.commits)

    def _begin_reducers(self) -> None:
        for reducer in self._reducers:
            reducer.begin(exact=self._has_learned)

    def _ask_lighthouse(self, plan: StartTxn) -> None:
        """Have the quorum of this txn asked for; it is waited for before the vote."""
        engine, quorums = self._engine, self._quorums
        if quorums is None or engine is None or (epoch := engine.local.epoch) is None:
            return
        if quorums.failures >= self._max_body_failures:
            self._leave_txn()
            raise NoQuorum(
                f"torchft's lighthouse did not answer in {quorums.failures} attempts in a row "
                f"({quorums.reason}); start it, or train with membership='register'"
            )
        members = {entry.group: entry.ranks[0].inc for entry in epoch.members}
        quorums.begin(plan.token, plan.step, members)
        if engine.superseded():  # rolled back before there was anything to end
            quorums.end()

    def _await_quorum(self, plan: StartTxn) -> None:
        if self._quorums is None or self._errored is not None:
            return
        if (why := self._quorums.wait(plan.token)) is not None:
            self._errored = _Reported(NoQuorum(why))

    def _prepare(self, skip: bool = False, last: bool = False) -> Apply | None:
        """Vote and wait for the decision. The record to apply, or None: rolled back.

        ``skip``: this rank wants no optimizer step in this txn; then there is none on any.
        ``last``: leave with its commit, unless it is skipped.
        """
        plan, engine = self._txn, self._engine
        if plan is None or engine is None:
            raise FftError("should_commit() without a txn: call start_quorum() first")
        if self._pacer is not None:
            self._pacer.end()
        with self._waiting():
            self._await_reductions()
            self._await_quorum(plan)
        self._inject("vote")
        if self._state is not None:
            self._state.note_edits()
        if self._has_state():
            edited = self._check_edits()
            skip = self._must_skip() or skip
            yes = self._errored is None
            cause = "" if self._errored is None else _text(self._errored.original_exception)
            manifest, digest = self._manifest.build(), self._equality
            engine.post(Prepared(plan.token, yes, manifest, cause, skip, digest, edited, last))
            self._inject("after_vote")
        with self._waiting():
            command = engine.wait_command()
        self._txn = None
        if self._quorums is not None:
            self._quorums.end()
        if isinstance(command, Apply):
            engine.take(command)
            self._note_commit(command.record, plan)
            return command
        if isinstance(command, Finish) and command.error is not None:
            engine.take(command)
            self._finish = command
            self._leave_txn()
            raise _error(command)
        return None

    def _has_state(self) -> bool:
        """Whether this rank can vote. A NO needs no state; a YES of a learner does."""
        if self._learning is None or self._errored is not None:
            return True
        with self._waiting():  # the fetch has limits of its own
            return self._learn()

    def _must_skip(self) -> bool:
        """Whether the scaler found an inf, on any rank of the group: each has but its shard."""
        if self._errored is not None:
            return False
        found = self._updates.must_skip()
        if self._shard is None or not self._updates.scales:
            return found
        most = AllreduceOptions()
        most.reduceOp = ReduceOp.MAX  # type: ignore[assignment]
        flag = torch.tensor([float(found)])
        try:
            with self._waiting():
                self._shard.pg.allreduce([flag], most).wait()
        except RuntimeError as error:
            self.report_error(error)
            return False
        return bool(flag.item())

    def _check_edits(self) -> bool:
        """Whether this body has changed reduced gradients. Not by weights that are not the job's.

        A learner that has done so says NO: after the rollback it waits for the state first.
        """
        edited = not self._reducers or self._is_reduced_by_hand or self._updates.were_unscaled
        edited = edited or any(reducer.edited() for reducer in self._reducers)
        if edited and self._has_learned and self._learners != "always" and self._errored is None:
            self.report_error(
                RuntimeError(
                    "the body changed reduced gradients while the state of this group was still on "
                    "its way; it computes this step again with the state (learners='always' says "
                    "that the change depends on gradients alone)"
                )
            )
        return edited and self._learners != "always"

    def _await_reductions(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        if torch.accelerator.is_available():
            synchronize()
        if (error := self._pg.errored()) is not None:
            self.report_error(error)
        if self._reduced is not None and self._injector and self._injector.poisons("after"):
            _poison(self._reduced)
        self._reduced = None
        if self._errored is None and self._injector and self._injector.fails_after_allreduce():
            self.report_error(RuntimeError("injected: the last all-reduce failed on this side"))

    def _inject(self, phase: str) -> None:
        """Carry out a planned fault of ``phase`` as what it would be here: a reported error."""
        if self._injector is None:
            return
        try:
            self._injector.at(phase)
        except InjectedFault as fault:
            self.report_error(fault)

    def _note_commit(self, record: Record, plan: StartTxn) -> None:
        self._errored = None  # it came after the decision: the next reduction is one on all ranks
        self._step = record.step
        self._position = record
        self._batches_committed = record.batches
        self._commit_failures = 0
        self._body_failures.committed()
        if self._pacer is not None:
            self._pacer.committed(self._step, len(plan.members) * self._group_world_size)
        if self._state is not None:
            self._state.forget()
        if self._checks is not None:
            self._checks.committed()

    def _finish_apply(self) -> None:
        """The optimizer step that COMMIT asked for is behind us: tell the engine."""
        if self._applying is None or self._engine is None:
            return
        if self._steps is not None and self._steps.was_torn:
            self._steps.begin()
            self._apply_failed(RuntimeError(_UNFINISHED))
            return
        token, self._applying = self._engine.local.token, None
        if self._watched is not None:
            self._watched.pulse.end(committed=True)
        digest = None
        if self._digest == "commit" and self._state is not None:
            digest = self._state.digest(buffers=False)
        self._engine.post(Applied(token, digest))

    def _apply_failed(self, error: BaseException) -> None:
        if self._engine is None:
            return
        self._applying = None
        self._engine.post(ApplyFailed(self._engine.local.token, _text(error)))
        self._places.note(error, self._engine.local)

    def _run_optimizers(self, command: Apply) -> None:
        self._applying = command
        try:
            if self._injector is not None:
                self._injector.at("apply")
            if command.skip:
                self._updates.skip()
            else:
                self._updates.apply()
        except Exception as error:
            logger.exception("optimizer step failed after COMMIT; this state is torn")
            self._apply_failed(error)
            return
        try:
            if not command.skip:
                self._updates.done()
        except Exception as error:  # the user's own; what it was to change may be half changed
            self._apply_failed(error)
            raise
        self._finish_apply()

    # --- rollback and healing, on the main thread ---

    def _restore(self, command: Restore) -> None:
        """Wait until nothing old can write, then put back the start of the step."""
        self._txn = None
        self._stop_learning()
        if self._watched is not None:
            self._watched.pulse.end(committed=False)
        for group in self._groups():
            group.abort(command.cause)
            with self._waiting():
                group.quiesce(self._timeout)
        self._works.clear()
        for reducer in self._reducers:
            reducer.reset()
        self._updates.forget()
        if self._state is not None:
            if self._state.captured:
                self._put_back()
            else:  # aborted before this rank began the txn: its state is that of the last commit
                self._state.unwind()
        assert self._engine is not None
        if self._quorums is not None and self._engine.local.stuck:
            with self._waiting():
                self._quorums.pause()
        torn, self._torn = self._torn, None
        self._engine.post(Restored(command.token, torn is not None, torn or ""))

    def _put_back(self) -> None:
        assert self._state is not None
        try:
            self._state.restore()
        except TornState as error:  # it can be had from a peer
            logger.warning("%s; this rank fetches the state", error)
            self._torn = _text(error)

    def _groups(self) -> list[AbortableGroup]:
        return [self._replicate] + ([self._shard] if self._shard is not None else [])

    def _heal(self, command: Heal) -> None:
        assert self._engine is not None
        epoch = command.record.epoch
        touched = False
        try:
            self._configure(command)
            if command.send_to:
                self._send_state(command)
            size, source = 0, ""
            if self._learns(command):
                self._begin_to_learn(command)
                return
            if command.fetch_from is not None:
                payload, size = self._fetch_state(command)
                touched = True
                self._load_state(payload, command.record)
                source = command.record.members[command.fetch_from].group
        except Exception as error:
            logger.warning("healing for epoch %d failed: %s", epoch, error)
            self._engine.post(HealFailed(epoch, _text(error), torn=touched))
            self._places.note(error, self._engine.local)
            # What came and does not fit in here would only stop the others again.
            if touched or isinstance(error, UnlikeGroups):
                raise
            return
        self._healed(command.record, size, source)

    def _healed(self, record: Record, size: int, source: str) -> None:
        assert self._engine is not None
        self._step = record.step
        self._position = record
        self._batches_committed = record.batches
        digest = None
        if self._digest == "commit" and self._state is not None:
            digest = self._state.digest(buffers=False)
        self._engine.post(Healed(record.epoch, size, source, digest))

    def _learns(self, command: Heal) -> bool:
        """Whether to fetch while the others compute; else they wait for it.

        What a function of the user's gives or takes may change in a body, and a stream of data
        cannot be read before it is known where the others are.
        """
        late = command.fetch_from is not None and self._peer.group in command.record.learners
        # What a body moves on by itself, beyond buffers, it would have moved on the wrong state.
        may = self._learners == "always" or (self._learners == "auto" and not self._has_extra)
        late = late and may
        own = self._state is not None and self._transfer is not None and not self._user_state_dicts
        return late and own and (self._source is None or self._source.in_any_order)

    def _begin_to_learn(self, command: Heal) -> None:
        assert self._engine is not None and self._transfer is not None
        assert command.fetch_from is not None
        self._bind_transfer(command.record)
        self._learning = Learning(
            command.record,
            command.record.members[command.fetch_from].group,
            lambda: self._fetch_state(command),
            self._transfer.interrupt,
            self._engine.nudge,
        )
        self._engine.post(Connected(command.record.epoch))

    def _learn(self) -> bool:
        """Take over the state that came while the body ran. False: rolled back, or it failed."""
        learning, engine = self._learning, self._engine
        assert learning is not None and engine is not None and self._state is not None
        if not engine.wait_for(lambda: learning.ended):
            return False
        self._learning = None
        record, touched = learning.record, False
        try:
            payload, size = learning.result()
            touched = True
            self._load_state(payload, record, keep_gradients=True)
        except Exception as error:
            logger.warning("no state for epoch %d: %s", record.epoch, error)
            engine.post(HealFailed(record.epoch, _text(error), torn=touched))
            self._places.note(error, engine.local)
            if touched:
                raise
            return False
        self._healed(record, size, learning.source)
        return True

    def _stop_learning(self) -> None:
        learning, self._learning = self._learning, None
        if learning is not None:
            learning.close(_STOP_LEARNING_S)

    def _configure(self, command: Heal) -> None:
        record, rank = command.record, self._group_rank
        members = record.members
        self._quorum_id = record.epoch
        # Both rendezvous at once; torchft's quorum thread has nothing else to do here.
        shard = None
        if self._shard is not None:
            shard = self._executor.submit(self._configure_shard, f"{record.n}", record.epoch)
        self._replicate.note = ", ".join(reducer.model for reducer in self._reducers)
        self._replicate.configure(
            f"{members[0].store}/fft/{record.n}.{record.epoch}/{rank}",
            self._peer.group,
            command.index,
            len(members),
            record.epoch,
            rank,
            self._group_world_size,
            [i * self._group_world_size + rank for i in range(len(members))],
            timeout=self._quorum_timeout,
        )
        if shard is not None:
            shard.result()
        self._check_layouts(command)

    def _check_layouts(self, command: Heal) -> None:
        """Unlike reductions would meet in gloo, which ends the process then.

        Who has the job's state is right, and goes on without whoever differs.
        """
        mine, record = self._replicate.note, command.record
        unlike = {r: note for r, note in self._replicate.notes.items() if note != mine}
        if not unlike:
            return
        held = [entry.ranks[self._group_rank].current for entry in record.members]
        index, note = next(iter(unlike.items()))
        text = (
            f"group {self._peer.group} reduces {mine or 'nothing by sync_gradients'}, but group "
            f"{record.members[index].group} {note or 'nothing by sync_gradients'}: all groups must "
            "have the same model, frozen alike, and call sync_gradients alike"
        )
        is_right = held[command.index] and not all(held)
        raise RuntimeError(text) if is_right else UnlikeGroups(text)

    def _configure_shard(self, name: str, epoch: int) -> None:
        assert self._shard is not None
        self._shard.configure(
            f"{self._store_addr}/fft/shard/{name}",
            self._peer.group,
            self._group_rank,
            self._group_world_size,
            epoch,
            self._group_rank,
            self._group_world_size,
            None,
            timeout=self._quorum_timeout,
        )

    def _send_state(self, command: Heal) -> None:
        record = command.record
        position = record.cursor * self._group_world_size
        payload: dict[str, Any] = {
            "fft": {"lineage": record.lineage, "cursor": record.cursor},
            "torchft": {"step": record.step, "batches_committed": record.batches},
            "user": {key: value() for key, value in self._user_state_dicts.items()},
            "state": self._state.export(bool(record.learners)) if self._state else None,
            "data": self._source.export(position) if self._source is not None else None,
        }
        self._bind_transfer(record)
        self._checkpoint_transport.send_checkpoint(
            dst_ranks=list(command.send_to),
            step=record.step,
            state_dict=payload,
            timeout=self._timeout,
        )
        self._served = record

    def _fetch_state(self, command: Heal) -> tuple[dict[str, Any], int]:
        assert command.fetch_from is not None
        record = command.record
        entry = record.members[command.fetch_from].ranks[self._group_rank]
        self._bind_transfer(record)
        payload = cast(
            "dict[str, Any]",
            self._checkpoint_transport.recv_checkpoint(
                src_rank=command.fetch_from,
                metadata=entry.transport,
                step=record.step,
                timeout=self._timeout,
            ),
        )
        if payload["fft"]["lineage"] != record.lineage:
            raise FftError(
                f"fetched lineage {payload['fft']['lineage']}, the epoch needs {record.lineage}"
            )
        return payload, _tensor_bytes(payload)

    def _bind_transfer(self, record: Record) -> None:
        """Of another epoch or lineage nothing shall be sent or taken. torchft's know steps only."""
        if self._transfer is not None:
            self._transfer.about = f"{self._group_rank} {record.n} {record.epoch} {record.lineage}"

    def _load_state(
        self, payload: dict[str, Any], record: Record, keep_gradients: bool = False
    ) -> None:
        missing = [key for key in self._load_state_dict_fns if key not in payload["user"]]
        if missing:
            raise FftError(f"the peer's state lacks {missing[0]!r}, which is registered here")
        if self._state is None and not self._load_state_dict_fns:
            raise FftError(
                "this rank must fetch state, but has nothing to load it into: pass state_dict and "
                "load_state_dict, or call manager.register(model, optimizer)"
            )
        for key, load in self._load_state_dict_fns.items():
            load(payload["user"][key])
        if self._state is not None:
            self._state.load(payload["state"], keep_gradients)
        if self._source is not None:
            self._source.load(payload["data"], record.cursor * self._group_world_size)

    # --- torchft's Manager ---

    def start_quorum(
        self,
        allow_heal: bool = True,
        shrink_only: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        """Begin the next txn. Returns at once, except after a rollback or a membership change.

        There is no quorum call: membership changes only with an epoch, and state is current when
        this returns. ``allow_heal``, ``shrink_only`` and ``timeout`` are accepted and not needed.

        Raises:
            Drained: this group has left; it is a ``SystemExit`` with status 0.
        """
        if self._txn is not None:
            if self._errored is None and self._manifest.empty:
                return
            # The user skips this step, as after a scaler that found an inf: all do, together.
            command = self._prepare(skip=True)
            if command is not None:
                assert command.skip, "one vote for a skip makes it one"
                self._applying = command
                self._updates.skip()
                self._finish_apply()
        if self._begin() is None:
            raise Drained("this replica group has drained")

    def wait_quorum(self) -> None:
        """Return at once: membership is known when a txn begins."""

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Vote, and learn the decision: equal on all ranks of all groups.

        Raises:
            RuntimeError: ``max_retries`` failures in a row.
            InDoubt, Fenced, NoEpoch (NoState, NotEnoughGroups): this participant must stop.
        """
        command = self._prepare()
        if command is not None:
            self._applying = command
            if self._steps is None:
                self._steps = StepWatch()
            self._steps.begin()
            if command.skip:  # another rank skips this step
                self._finish_apply()
            return not command.skip
        self._commit_failures += 1
        if self._max_retries is not None and self._commit_failures > self._max_retries:
            raise RuntimeError(
                f"should_commit failed {self._commit_failures} times consecutively, exceeding "
                f"max_retries={self._max_retries}"
            )
        return False

    @guarded
    def report_error(self, e: Exception) -> None:
        """Report an error of this rank: the txn is rolled back on every rank of every group.

        Between two txns there is nothing to roll back: what failed then, such as the averaging of
        a loss, failed, and the next txn begins without it, as under torchft. Only the error of an
        update that was begun after ``should_commit()`` costs this rank its state.
        """
        engine = self._engine
        if engine is None:
            super().report_error(e)
            return
        if self._applying is not None and (self._steps is None or not self._steps.is_done):
            self._apply_failed(e)
            return
        first, self._errored = self._errored is None, _Reported(e)
        if self._txn is None:
            logger.warning("failed between two txns, which changes no state: %s", _text(e))
        elif not isinstance(e, (TxnAborted, GroupAborted)):
            engine.post(Fault(self._txn.token, _text(e), type(e).__name__))
            if first:  # after it is told, for this reads source files
                self._places.note(e, engine.local)

    @guarded
    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: Any = ReduceOp.AVG,
    ) -> Work:
        """torchft's fault tolerant all-reduce; what it reduced goes into the vote's manifest."""
        if self._txn is None and not self._raise_on_abort:
            self._finish_apply()  # so that whoever waits in it can be freed by a rollback
        if self._injector is not None:
            self._injector.at("before_allreduce")
        if self._raise_on_abort and (error := self._errored) is not None:
            raise TxnAborted(str(error.original_exception))
        self._is_reduced_by_hand = True
        self._manifest.add(tensor, reduce_op)
        if self._injector is not None:
            self._reduced = tensor
            if self._injector.poisons("before"):
                _poison(tensor)
        self.ping()
        work: Work = super().allreduce(tensor, should_quantize, reduce_op)
        if isinstance(work, _DummyWork):
            # What torchft's DDP hook expects, which a bare _DummyWork makes it fail on.
            work = _ManagedWork(self, work, tensor)
            work.get_future().then(lambda _: tensor)
        work.__class__ = _TxnWork
        self._works.append(work)
        if self._injector is not None:
            self._injector.at("during_allreduce")
        return work

    def reduce_gradients(self, tensor: torch.Tensor, layout: str) -> Work:
        """For the reducers: `allreduce`, of what lies in ``tensor`` as ``layout`` says."""
        by_hand = self._is_reduced_by_hand
        work = self.allreduce(tensor)
        self._is_reduced_by_hand = by_hand
        self._manifest.note(layout)
        return work

    def reduced(self) -> None:
        """For the reducers: raise if a reduction of this txn failed and the body shall unwind."""
        self._works.clear()
        if (error := self._errored) is not None and self._raise_on_abort:
            raise TxnAborted(str(error.original_exception))
        if self._injector is not None:
            self._injector.at("after_allreduce")

    def wrap_future(
        self,
        fut: torch.futures.Future[Any],
        default: Any,
        timeout: timedelta | None = None,
    ) -> torch.futures.Future[Any]:
        """As torchft's; a rollback completes the future with ``default`` at once."""
        if fut.done() and not torch.accelerator.is_available():
            return self._settled(fut, default)
        outer = _CancellableFuture(default, self._futures.discard)
        self._futures.add(outer)
        super().wrap_future(fut, default, timeout).add_done_callback(outer.settle)
        return outer.future

    def _settled(self, fut: torch.futures.Future[Any], default: Any) -> torch.futures.Future[Any]:
        """A future that has its result or error already, without torchft's thread for timeouts.

        With an accelerator a future is done when its work is queued there, so this is for the rest.
        """
        try:
            fut.value()
        except Exception as error:
            self._logger.exception(f"a future failed, the step will not be committed: {error}")
            self.report_error(error)
            fut = torch.futures.Future()
            fut.set_result(default)
        return fut

    def num_participants(self) -> int:
        """Groups whose gradients count in the present txn."""
        return int(self._participating_replica_world_size)

    def participating_rank(self) -> int | None:
        """Index of this group among the participating groups; None: a spare."""
        rank: int | None = self._participating_replica_rank
        return rank

    def state_dict(self) -> dict[str, Any]:
        """torchft's, plus lineage, data cursor and, of a stateful loader, its state there."""
        at = self._position  # not where the engine stands: it hears of an update when it is over
        lineage, cursor = (self._lineage, self._cursor) if at is None else (at.lineage, at.cursor)
        found = {**super().state_dict(), "lineage": lineage, "cursor": cursor}
        if self._source is not None and not self._source.in_any_order:
            found["data"] = self._source.export(cursor * self._group_world_size)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; before the first step only.

        Raises:
            FftError: the manager has already joined the job.
        """
        if self._engine is not None:
            raise FftError("load_state_dict() must come before the first step")
        super().load_state_dict(state_dict)
        self._lineage = state_dict.get("lineage", "")
        self._cursor = state_dict.get("cursor", state_dict["batches_committed"])
        self._data = state_dict.get("data")

    def shutdown(self, wait: bool = True) -> None:
        """Leave the job and end every thread, socket and file of this manager. Idempotent.

        Called when the interpreter exits, if it was not before.
        """
        atexit.unregister(self._at_exit)
        self._finish_apply()
        for poller in self._pollers:
            poller.close()
        if self._pacer is not None:
            self._pacer.close()
        if self._engine is not None:
            self._engine.close()
        if self._quorums is not None:
            self._quorums.close()
        self._stop_learning()
        self._end_drain()
        if self._source is not None:
            self._source.close()
        self._station.close()
        for reducer in self._reducers:
            reducer.close()
        self._reducers.clear()
        self._updates.close()
        if self._steps is not None:
            self._steps.close()
        for group in self._groups():
            group.close()
        if self._injector is not None:
            self._injector.detach()
        if self._group_bus is not None:
            self._group_bus.close()
        if self._interrupter is not None:
            self._interrupter.close()
        if self._watched is not None:
            self._watched.close()
        if self._hold is not None:
            self._hold.release()
        if self._engine is not None and self._engine.abandoned:
            # That waits for the bus, and there is no time to.
            threading.Thread(target=self._bus.close, name="fft-bus-close", daemon=True).start()
        else:
            self._bus.close()
        self._trace.close()
        super().shutdown(wait)
        if self._alone is not None:
            self._alone.close()

    # --- for Transaction ---

    @guarded
    def _open_body(self) -> None:
        self._updates.opened()
        self._begin_reducers()  # not before: by `txn.step` users unfreeze what it says is due
        if self._interrupter is None or self._engine is None:
            return
        self._interrupter.enter()
        if self._engine.superseded():  # rolled back before there was anything to unwind
            self._interrupter.request("rolled back before it began")

    @guarded
    def _close_body(self) -> None:
        self._updates.in_body = False
        if self._interrupter is not None:
            self._interrupter.leave()

    def _body_failed(self, plan: StartTxn, error: Exception) -> None:
        """An exception left the body: report it; give up if it keeps coming at one step."""
        if isinstance(error, (TxnAborted, GroupAborted)) or self._errored is not None:
            return
        why = self._body_failures.failed(plan.step, plan.members, error)
        if (batch := self._which_batch(plan)) not in getattr(error, "__notes__", ()):
            error.add_note(batch)
        if why is not None and self._engine is not None:
            self._places.note(error, self._engine.local)
            raise BodyKeepsFailing(f"{why}; that error is the cause of this one") from error
        self.report_error(error)

    def _unreduced(self) -> FftError | None:
        """What a body that has ended well has left undone: no step could be right with it."""
        if self._errored is not None:
            return None
        if self._manifest.empty and self._spec.policies.min_reductions:
            return FftError(
                "the body has ended without reducing a gradient across the groups (`continue`? no "
                "backward()? no sync_gradients(model)?): a body must come to its backward() for "
                "every batch; multiply the loss by 0 where one is not to count"
            )
        if self._updates.were_scheduled:
            return FftError(
                "scheduler.step() inside `with txn:`: the transaction steps the registered "
                "schedulers itself, after COMMIT; take the call out of the body"
            )
        for reducer in self._reducers:
            if (why := reducer.unfinished) is not None:
                return FftError(f"{why}: such gradients are not those of the other groups")
        return None

    def _which_batch(self, plan: StartTxn) -> str:
        """In words, for who looks for what was wrong with it."""
        where = f"in the txn of step {plan.step}, on {self._peer}"
        if plan.index is None:
            return f"{where}, with a batch that does not count"
        number = plan.cursor + plan.index
        item = number * self._group_world_size + self._group_rank
        return f"{where}, with slice {number} of the data (item {item})"


class Transaction:
    """One attempt at one step. ``with txn:`` runs the body; leaving it votes and decides.

    Attributes:
        batch: what this rank takes. A copy: a replay finds it as it was loaded.
        step: committed steps before this txn.
        contributes: whether what the body computes counts. A spare's does not, nor that of a group
            in the txn in which it joins: its weights are not those of the job before the end of it.
        committed: after the body: whether the txn was committed; its data are consumed then.
        skipped: after the body: whether it was committed without an optimizer step.
    """

    def __init__(self, manager: ManagerFFT, plan: StartTxn, drawn: Drawn, last: bool) -> None:
        self.batch = drawn.batch
        self.step = plan.step
        self.contributes = plan.index is not None
        self.epoch, self.attempt = plan.token
        self.committed = self.skipped = False
        self.closed = False
        self._manager = manager
        self._plan = plan
        self._is_last = last
        self._waited_ms = drawn.waited_ms

    def log(self, **metrics: float) -> None:
        """Put figures of this attempt into the trace."""
        manager = self._manager
        if manager._engine is not None:
            manager._trace.note("metrics", metrics, manager._engine.local)

    @guarded
    def __enter__(self) -> Self:
        self._manager._open_body()
        return self

    @guarded
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        manager = self._manager
        manager._close_body()
        self.closed = True
        if isinstance(error, Interrupted):
            return True
        if error is not None:
            if not isinstance(error, Exception):
                return False
            manager._body_failed(self._plan, error)
            return True
        if (mistake := manager._unreduced()) is not None:
            manager._body_failed(self._plan, mistake)
            return True
        command = manager._prepare(last=self._is_last)
        if command is not None:
            self.committed, self.skipped = True, command.skip
            manager._is_over = self._is_last and not command.skip
            slice_number = (
                None if self._plan.index is None else self._plan.cursor + self._plan.index
            )
            manager._trace.note(
                "consumed",
                {
                    "slice": slice_number,
                    "step": self._plan.step,
                    "token": list(self._plan.token),
                    "input_ms": round(self._waited_ms, 3),
                },
            )
            manager._run_optimizers(command)
        return True


class _EngineHost:
    """What the engine thread may do to the manager; does not keep it alive."""

    def __init__(self, manager: ManagerFFT) -> None:
        self._manager = weakref.ref(manager)

    def cancel_futures(self, cause: str) -> None:
        manager = self._manager()
        if manager is None:
            return
        if manager._errored is None:
            manager._errored = _Reported(TxnAborted(cause))
        for future in list(manager._futures):
            future.cancel()

    def abort_groups(self, cause: str) -> None:
        manager = self._manager()
        if manager is not None:
            for group in manager._groups():
                group.abort(cause)
            if manager._transfer is not None:
                manager._transfer.interrupt()

    def interrupt(self, cause: str) -> None:
        manager = self._manager()
        if manager is not None and manager._quorums is not None:
            manager._quorums.end()
        if manager is not None and manager._interrupter is not None:
            manager._interrupter.request(cause)

    def command(self, command: Command) -> None:
        manager = self._manager()
        if manager is not None:
            manager._obey(command)


class _Doubter:
    """What a lighthouse's quorum, or none, may do to the manager; does not keep it alive."""

    def __init__(self, manager: ManagerFFT) -> None:
        self._manager = weakref.ref(manager)

    def unnamed(self, token: Token, groups: set[str]) -> None:
        manager = self._manager()
        engine = manager._engine if manager is not None else None
        if manager is None or engine is None:
            return
        local = engine.local
        if local.token != token or local.epoch is None:
            return
        manager._trace.note("lighthouse", {"unnamed": sorted(groups)}, local)
        cause = "the lighthouse's quorum does not name it"
        ranks = [(e.group, r) for e in local.epoch.members if e.group in groups for r in e.ranks]
        try:
            for group, r in ranks:
                word = Suspect(group, r.rank, r.pid, r.host, "lighthouse", cause)
                manager._bus.broadcast(encode(word))
        except BusError as error:  # the engine will notice, if it lasts
            logger.warning("could not say whom the lighthouse does not name: %s", error)

    def failed(self, token: Token, why: str) -> None:
        manager = self._manager()
        if manager is not None and manager._engine is not None:
            manager._engine.post(Fault(token, f"NoQuorum: {why}", "NoQuorum"))


class _Leaver:
    """What the clock of a drain may do to the manager; does not keep it alive."""

    def __init__(self, manager: ManagerFFT) -> None:
        self._manager = weakref.ref(manager)

    def why_still_here(self) -> str | None:
        manager = self._manager()
        engine = manager._engine if manager is not None else None
        if manager is None or engine is None:
            return None  # it has not joined: nobody waits for it
        if engine.ended.is_set():
            return None
        local = engine.local
        text = waiting_for(local, engine.participant.config, time.monotonic())
        if (held_up := engine.held_up()) is not None:
            text = f"{held_up}; before that, {text}"
        return f"{text}; its main thread is in {_place(manager._main)}"

    def leave(self, cause: str, limit_s: float) -> bool:
        manager = self._manager()
        engine = manager._engine if manager is not None else None
        if manager is None or engine is None:
            return True
        engine.post(Stop(cause[:_LONGEST_CAUSE]))
        told = engine.ended.wait(limit_s / 2)
        if not told:  # the bus is silent; who ends with an error is said dead by its supervisor
            doubt = f"stopped before a deadline without a word to the others: {cause}"
            engine.abandon(Finish(doubt, error="InDoubt"))
        # Only now: that the others hear why comes before that their connections end.
        host = _EngineHost(manager)
        host.cancel_futures(cause)
        host.abort_groups(cause)
        return told

    def note(self, name: str, data: dict[str, Any]) -> None:
        manager = self._manager()
        if manager is not None and manager._engine is not None:
            manager._trace.note(name, data, manager._engine.local)


class _ShutDown:
    """At the exit of a script that has not shut down: torch aborts where its threads still run."""

    def __init__(self, manager: ManagerFFT) -> None:
        self._manager = weakref.ref(manager)
        self._pid = os.getpid()

    def __call__(self) -> None:
        manager = self._manager()
        if manager is not None and os.getpid() == self._pid:
            manager.shutdown(wait=False)


class _Hands:
    """What the injector cannot do by itself; does not keep the manager alive."""

    def __init__(self, manager: ManagerFFT) -> None:
        self._manager = weakref.ref(manager)

    def cut_network(self) -> None:
        manager = self._manager()
        for group in manager._groups() if manager is not None else ():
            group.cut()

    def lose_bus(self) -> None:
        manager = self._manager()
        if manager is not None:
            lose_connections(manager._bus.url)


class _Reported(ExceptionWithTraceback):  # type: ignore[misc]
    """torchft's record of an error, with the stack trace put into words when it is asked for.

    To do that at once reads source files, in the middle of a rollback.
    """

    def __init__(self, error: Exception) -> None:
        Exception.__init__(self, str(error))
        self.original_exception = error

    @property
    def stack_trace(self) -> str:
        """As torchft's attribute of this name."""
        return "".join(traceback.format_exception(self.original_exception))


class _QuietLogger:
    """torchft's logger of a manager, less the stack traces of what an abort has caused."""

    def __init__(self, manager: ManagerFFT, inner: Any) -> None:
        self._manager = weakref.ref(manager)
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def exception(self, message: str) -> None:
        """Log with the stack trace, unless the txn is being rolled back anyway."""
        manager = self._manager()
        error = manager._errored if manager is not None else None
        if error is not None:
            self._inner.info(message)
        else:
            self._inner.exception(message)


class _TxnWork(_ManagedWork):  # type: ignore[misc]
    """torchft's managed work; its future is there after a failed wait too, as DDP needs."""

    is_over = False
    """It was waited for, with success, and there is no accelerator's stream to wait in again."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As torchft's: False, and the error reported, if the work failed."""
        if self.is_over and self._managed_fut_tail._fut is not None:
            return True
        pacer = self._manager._pacer
        with nullcontext() if pacer is None else pacer.waiting:
            done = bool(super().wait(timeout))
        self.is_over = done and not torch.accelerator.is_available()
        tail = self._managed_fut_tail
        if tail._fut is None:
            tail._fut = torch.futures.Future()
            tail._fut.set_result(self._value)
        return done


class _CancellableFuture:
    """A torch future that completes with the wrapped one, or with ``default`` when cancelled."""

    def __init__(self, default: Any, on_done: Callable[[_CancellableFuture], None]) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self._default = default
        self._on_done = on_done
        self._lock = threading.Lock()
        self._done = False

    def settle(self, inner: torch.futures.Future[Any]) -> None:
        """Complete as the wrapped future, whose errors torchft has already replaced."""
        self._set(inner.value())

    def cancel(self) -> None:
        """Complete with the default now."""
        self._set(self._default)

    def _set(self, value: Any) -> None:
        with self._lock:
            if self._done:
                return
            self._done = True
        self._on_done(self)
        self.future.set_result(value)


class _ManifestBuilder:
    """Counts the reductions of a txn for its vote."""

    def __init__(self) -> None:
        self._count = 0
        self._bytes = 0
        self._shapes = hashlib.blake2b(digest_size=8)

    @property
    def empty(self) -> bool:
        """Whether nothing was reduced yet."""
        return self._count == 0

    def add(self, tensor: torch.Tensor, op: Any) -> None:
        """Note one reduction, in issue order."""
        self._count += 1
        if not tensor.is_sparse:  # else how much it is differs between the groups
            self._bytes += tensor.nbytes
        self._shapes.update(f"{op}|{tensor.dtype}|{tuple(tensor.shape)};".encode())

    def note(self, layout: str) -> None:
        """What lay in the last tensor."""
        self._shapes.update(layout.encode())

    def build(self) -> Manifest:
        """The manifest so far."""
        return Manifest(self._count, self._bytes, self._shapes.hexdigest())


def _pass_on(drain: weakref.WeakMethod[Callable[..., None]], notice: Notice) -> None:
    """Thread of a source: what it says, to a manager that still lives."""
    if (call := drain()) is not None:
        call(notice.within_s, notice.reason)


def _drain_within() -> float | None:
    """Seconds that the drain signal leaves, as the environment says."""
    text = os.environ.get("FFT_DRAIN_WITHIN")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        raise FftError(f"FFT_DRAIN_WITHIN={text!r}: give a number of seconds, such as 30")
    return seconds


def _place(thread: int | None) -> str:
    """Where a thread is, innermost call first: file, line and function."""
    frame = sys._current_frames().get(thread or -1)
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        found.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or "no Python code"


def _poison(tensor: torch.Tensor) -> None:
    """Make one value of ``tensor`` NaN, as a memory error would."""
    with torch.no_grad():
        tensor[(0,) * tensor.dim()] = float("nan")


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_tensor_bytes, value))
    return 0


def _text(error: BaseException) -> str:
    """One line that says what happened; without gloo's source path and its general advice."""
    first = (str(error).splitlines() or [""])[0]
    plain = re.sub(r"^\[/\S+?:\d+\] ", "", first).split(". This is typically")[0]
    # the name of a file may come with half a character, which no message carries
    return f"{type(error).__name__}: {plain}"[:500].encode("utf-8", "replace").decode()


def _error(command: Finish) -> FftError:
    kind = getattr(fft.util.errors, command.error or "", FftError)
    assert issubclass(kind, FftError)
    return kind(command.reason)


__all__ = ["ManagerFFT", "Token", "Transaction"]
