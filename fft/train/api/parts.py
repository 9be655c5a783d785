"""The components of a manager: their construction, joining the job, and shutdown.

The engine's thread holds only weak references to the components. Other threads and `atexit` hold
them until `shutdown`.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torchft.manager import REPLICA_ID_KEY, Manager, WorldSizeMode
from torchft.process_group import ProcessGroup

from fft.bus import BusError, ErrorBus, open_job_bus
from fft.bus.addresses import (
    HOW_TO_REACH,
    joined,
    own_address,
    reachable,
    reachable_url,
    why_unreachable,
    with_job_of,
)
from fft.bus.base import HEAD
from fft.checkpoints.plan import MemoryPlan
from fft.engine.calls import Buses
from fft.engine.loop import Engine
from fft.errors import ConfigError, FftError, NoState
from fft.messages.causes import CauseCode
from fft.messages.commands import Command, RollCall, fresh_id
from fft.messages.protocol import Fault, NoStep, Peer, RankEntry, Record, Start
from fft.operate.client import JobClient, OperatorError
from fft.operate.entering import JobStart, enter
from fft.protocol.active import at_most
from fft.protocol.participant import Participant
from fft.protocol.state import GENESIS, Config, Local
from fft.protocol.table import Table
from fft.protocol.timeouts import bus_operation, timers
from fft.trace.format import DIGESTS, UNREACHABLE
from fft.trace.starts import folder_of
from fft.trace.writer import TraceWriter, header
from fft.train.api.torchft_diloco import refuse_dropping
from fft.train.checkpoint.checkpointer import Checkpointer
from fft.train.checkpoint.memory import MemoryCopies
from fft.train.gradients.reducer import Reducers
from fft.train.gradients.reductions import OpenTxn, Reductions
from fft.train.guard.watchers import Watchers
from fft.train.paradigms.selection import features_of, paradigm_of, scope_of
from fft.train.process_groups.epoch_groups import EpochGroups
from fft.train.session.error_reports import QuietLogger
from fft.train.session.participation import Participation
from fft.train.session.rank_context import RankContext
from fft.train.session.rank_state import RankState
from fft.train.session.settings import (
    Settings,
    common_settings,
    monitor_config,
    refuse_other_settings,
)
from fft.train.session.step_results import ResultJudge
from fft.train.state.transfer import StateTransfer
from fft.train.step.attempt import Attempt
from fft.train.step.commits import CommitExecutor
from fft.train.step.healing import Healer
from fft.train.step.leaving import Leaving
from fft.train.step.operator_commands import OperatorCommands, make_injector
from fft.train.step.transaction import TransactionLoop
from fft.train.step.worker import Worker
from fft.util.files import is_disk_full
from fft.util.pidfd import is_there

logger = logging.getLogger(__name__)

STORE_KEY = "fft/store"
"""The key, in a replica group's store, of the address at which other groups reach the store."""
_STORE_S = 60.0
"""Timeout in seconds until rank 0 publishes the address. The ranks start together, so the timeout
covers differences in the time to import torch."""
_SHOWN = 5
"""Maximum number of parameter shapes that are listed in a warning."""


class Parts(RankContext):
    """The components of one manager, created after the torchft manager is constructed."""

    def __init__(
        self,
        manager: Manager,
        settings: Settings,
        pg: ProcessGroup,
        shard_pg: ProcessGroup | None,
        transfer: StateTransfer | None,
        undo: ExitStack,
    ) -> None:
        """Construct the components.

        Args:
            undo: Receives a callback for each component that owns resources. The caller runs the
                callbacks if a later component fails to construct.
        """
        features = features_of(settings, manager)
        limits = settings.timeout_table(manager)
        operation_s = limits["bus_operation"].seconds
        start = enter(settings.bus_url, settings.token, operation_s)
        traces = _traces_of(start, settings)
        settings = replace(settings, bus_url=start.url, trace_dir=traces)
        bus = open_job_bus(settings.bus_url, settings.token, operation_s)
        undo.callback(bus.close)
        peer = identify(manager, bus)
        scope = scope_of(settings, manager, bus, operation_s, undo)
        trace = TraceWriter(scope.traces(traces), peer)
        undo.callback(trace.close)
        job, watchers = Participation(peer, bus, trace), Watchers()
        home = store_address(manager, settings.bus_url)
        is_replacement, address = settings.is_replacement, own_address(settings.bus_url)
        groups = EpochGroups(manager, peer, home, pg, shard_pg, is_replacement, address)
        injector = make_injector(job, groups)
        self.commands = OperatorCommands(job, injector)
        txn = OpenTxn()
        manager._torchft.logger = QuietLogger(txn, manager._torchft.logger)
        every, nonfinite = settings.config.recompute_every, settings.config.on_nonfinite
        reductions = Reductions(txn, manager, watchers, injector, every)
        state = RankState(manager, injector, settings)
        results = ResultJudge(job, groups, reductions.recomputation, nonfinite)
        own = scope, job, watchers, groups, state, txn, reductions, Reducers(), results, injector
        super().__init__(manager, settings, features, limits, *own)
        self.paradigm = self.state.paradigm = paradigm_of(self)
        reductions.recomputation.is_supported = self.paradigm.steps_together
        self.checkpointer: Checkpointer | None = None
        self.memory: MemoryCopies | None = None
        if settings.checkpoint is not None:
            self.checkpointer = self.state.checkpoints = Checkpointer(settings.checkpoint, self)
        if (plan := MemoryPlan.from_env()) is not None:
            self.memory = self.state.checkpoints = MemoryCopies(plan, self, self.checkpointer)
        self.leaving = Leaving(
            self.job, self.watchers, EngineHost(self), limits["drain_margin"].seconds
        )
        undo.callback(self.leaving.close)
        self.healer = Healer(self, transfer)
        self.commits = commits = CommitExecutor(self)
        self.attempt = Attempt(self, self.healer, self.leaving, commits)
        begin = partial(join, self)
        self.worker = Worker(self, self.healer, commits, self.attempt, begin)
        self.loop = TransactionLoop(self, commits, self.attempt, self.worker, self.watch)

    def watch(self) -> None:
        """Start the supervision of the calling thread, which trains. Idempotent."""
        if self.watchers.main is None:
            monitor = monitor_config(self.limits) if self.settings.monitor else None
            self.watchers.watch(monitor, self.job.peer, self.settings.bus_url, self.handle_hang)

    def handle_hang(self, reason: str) -> None:
        """React to a hang of the main thread. Called on a thread of the monitor's client.

        In FFT's own loop, the rollback interrupts the step function, and the rank joins the next
        epoch. In a torchft loop nothing can interrupt the thread, so its group is excluded until
        the thread returns. Otherwise the barrier of the next epoch would wait for it. A rank with a
        pending collective may only be waiting for the hung rank, so it is not excluded.
        """
        job, plan, local = self.job, self.txn.plan, self.job.local
        if local is not None and local.role == "apart":  # lets waiting groups continue
            job.broadcast_hang(reason)
        if job.executor.role == "applying":
            self.commits.handle_hang(reason)
        if plan is None or job.executor.role == "applying":
            return
        waits = self.groups.pending()
        if self.txn.by_fft or waits or not job.broadcast_hang(reason):
            job.post(Fault(plan.token, f"hangs: {reason}", CauseCode.HANG, "Hang"))

    def close(self) -> None:
        """Leave the job and shut down all components. Idempotent."""
        self.commits.finish()
        if not _is_failing():
            self.state.checkpoints.take()
            self.state.reshard_models()
        self.leaving.end_notices()
        self.loop.close()
        self.job.leave()
        with self.watchers.waiting():
            self.worker.hooks.terminate()
        self.paradigm.left(_is_failing())
        for each in self.attempt.preconditions:
            each.close()
        self.healer.cancel_fetch()
        self.paradigm.close()
        self.leaving.close()
        self.state.close_source()
        with self.watchers.waiting():
            if self.memory is not None:
                self.memory.close()
            if self.checkpointer is not None:
                self.checkpointer.close(serves=not _is_failing())
        self.watchers.end_reports()
        self.commands.close()
        self.reducers.close()
        self.state.close()
        self.commits.close()
        self.groups.close()
        if self.injector is not None:
            self.injector.detach()
        self.watchers.close()
        self.scope.close()
        self.job.close()


_ANSWER_S = 2.0
"""Timeout in seconds for a liveness reply from a rank of the job."""
_RETRY_S = 1.0
_MAX_PROBES = 16
"""Maximum number of donor ranks that are probed; one reachable rank is enough."""


def wait_for_donor(
    job: Participation, settings: Settings, limit_s: float, is_over: Callable[[], bool]
) -> None:
    """Wait until a potential donor of the state is reachable, or until no rank of the job is alive.

    The donors are the ranks with the same rank number in other groups. If a job is running on the
    bus, a separate connection sends the liveness queries.

    Args:
        job: The job session of this rank.
        settings: The URL of the bus, with its password, and the job token.
        limit_s: Timeout in seconds.
        is_over: Returns whether this process has been asked to leave.

    Raises:
        NoState: Ranks are alive, but none is reachable within ``limit_s``. The message lists their
            addresses.
    """
    url, token = with_job_of(settings.bus_url, job.bus.url), settings.token
    try:
        if job.bus.read(HEAD) is None:
            return
        opened = open_job_bus(url, token, bus_operation(url))
        with JobClient(url, token=token, bus=opened) as client:
            _wait(client, job, limit_s, is_over)
    except (BusError, OperatorError) as error:  # the engine enforces the timeout of the bus
        logger.warning("cannot determine whether the ranks of the job are reachable: %s", error)


def _wait(
    client: JobClient, job: Participation, limit_s: float, is_over: Callable[[], bool]
) -> None:
    deadline, told, me = time.monotonic() + limit_s, "", job.peer
    while (why := _unreached(_donors(client, me))) and _is_alive(client) and not is_over():
        text = (
            f"rank {me.group}/{me.rank} waits outside the job, because it cannot reach a rank that "
            f"has the state: {why}; {HOW_TO_REACH}"
        )
        if time.monotonic() > deadline:
            raise NoState(f"{text}. It waited for {limit_s:g} s")
        if why != told:
            logger.error("%s", text)
            job.note(UNREACHABLE, {"why": why})
            told = why
        time.sleep(_RETRY_S)  # poll: there is no event for a firewall change


def _donors(client: JobClient, me: Peer) -> list[RankEntry]:
    """Return the members of other groups with the rank number of ``me``.

    Ranks on this host whose process has exited are omitted.
    """
    epoch = client.job().epoch
    groups = () if epoch is None else epoch.members
    ranks = [r for group in groups if group.group != me.group for r in group.ranks]
    here = socket.gethostname()
    return [r for r in ranks if r.rank == me.rank and (r.host != here or is_there(r.pid))]


def _unreached(donors: list[RankEntry]) -> str:
    """Return why none of ``donors`` is reachable; empty if one is, or if none can be probed."""
    places = [urlsplit(donor.transport) for donor in donors[:_MAX_PROBES]]
    known = [(p.hostname, p.port) for p in places if p.scheme == "http" and p.hostname and p.port]
    if len(known) < len(places) or not known:  # no donors, or a custom transport
        return ""
    with ThreadPoolExecutor(len(known), "fft-donors") as pool:
        found = list(pool.map(_trouble, known))
    return "" if None in found else "; ".join(filter(None, found))


def _trouble(address: tuple[str, int]) -> str | None:
    if (error := why_unreachable(address)) is None:
        return None
    return f"{joined(*address)} cannot be reached from this host ({error})"


def _is_alive(client: JobClient) -> bool:
    """Return whether a rank that holds the job's state replies."""
    with client.asking(RollCall(fresh_id(), client.me)) as answers:
        return any(True for _ in answers(time.monotonic() + _ANSWER_S))


def _is_failing() -> bool:
    """Return whether an exception is propagating out of the script or has terminated it."""
    return sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None


def _traces_of(start: JobStart, settings: Settings) -> Path | None:
    """Return the folder for the traces of this start of the job, or None to write no traces.

    `fft run` passes the folder to its child processes. Other processes determine the folder here,
    so that a second job does not write into the folder of the first.
    """
    root = settings.trace_dir
    if root is None or "FFT_GROUP" in os.environ:
        return root
    try:
        return folder_of(root, start.name)
    except OSError as error:
        if is_disk_full(error):  # training does not depend on its trace
            return root
        raise


def identify(manager: Manager, bus: ErrorBus) -> Peer:
    """Return the identity of this process in the job: a new incarnation of its group's rank."""
    # Use the launcher's name of the group: its death reports and drain requests refer to it.
    named = manager._torchft.store.get(REPLICA_ID_KEY).decode().split(":")[0]
    group = os.environ.get("FFT_GROUP") or named
    incarnation = bus.next_number(f"inc/{group}/{manager._torchft.group_rank}")
    return Peer(group, manager._torchft.group_rank, incarnation)


def join(parts: Parts) -> Engine:
    """Join the job: start the engine of this rank. Called on the thread that trains."""
    job, watchers, settings = parts.job, parts.watchers, parts.settings
    parts.state.checkpoints.resume()
    config = _config(parts)
    _refuse_unfit(parts)
    parts.worker.hooks.begin()
    refuse_other_settings(job.bus, _common_settings(parts, config))
    scope = parts.scope
    participant = Participant(Table(scope.spec), config)
    local = _initial(parts, participant)
    reforms = job.reforms = _can_reform(parts, config)
    more = {"reforms": reforms, "owes": {DIGESTS: parts.state.traces_digests}}
    more["batches"] = parts.paradigm.batches
    job.trace.write("header", header(scope.spec, config, local, **more))
    limit_s = parts.limits["quorum"].seconds
    wait_for_donor(job, settings, limit_s, lambda: parts.leaving.is_asked)
    parts.state.checkpoints.joined()
    _warn_of_unreduced_parameters(parts)
    _warn_of_other_generators(parts)
    parts.watch()
    if parts.paradigm.steps_together and job.bus.read(HEAD) is not None:
        # In FFT's own loop the limit is higher, because a rollback interrupts the first step, which
        # would then load all again. After a rehearsal this call has no effect.
        watchers.join(is_strict=settings.is_replacement or not parts.txn.by_fft)
    atexit.register(parts.manager._at_exit)
    engine = job.engine = Engine(
        participant,
        local,
        Buses(scope.bus, job.bus),
        job.trace,
        EngineHost(parts),
        scope.others,
    )
    engine.start()
    parts.paradigm.joined(config)
    for each in parts.attempt.preconditions:
        each.start()
    speed = watchers.report_speed(
        job.bus, job.peer, settings.config.progress_interval, scope.reported_as
    )
    job.report_to(speed)
    for group in parts.groups.inner:
        group.waiting = speed.waiting
    engine.post(Start())
    parts.leaving.ask()
    return engine


def _refuse_unfit(parts: Parts) -> None:
    """Raise FftError if the registered state cannot be trained. Called when it is complete."""
    most = at_most(parts.settings.config.active)
    least = parts.manager._torchft.min_replica_size
    if most is not None and most < least:
        raise ConfigError(
            f"ManagerConfig(active=…): max_active({most}) is less than min_replica_size={least}, "
            "so no step could be made; change one of them"
        )
    if (step := parts.state.registered_state) is not None:
        parts.state.refuse_unfit()
        parts.groups.refuse_foreign(parts.state.models, step.optimizer_tensors())
        parts.paradigm.refuse_unconnected()
    parts.state.refuse_unsendable()
    for function in parts.state.users.values():
        refuse_dropping(function)
    for reducer in parts.reducers:
        reducer.update_layout()


def store_address(manager: Manager, bus_url: str) -> str:
    """Return ``host:port`` of the store of this replica group, for the ranks of all groups.

    Rank 0 determines the address and publishes it in the store. The ranks cannot resolve it
    independently: some hosts map their own name to a loopback address (torchrun, Debian), so the
    results would differ.
    """
    store = manager._torchft.store
    if manager._torchft.group_rank == 0:
        store.set(STORE_KEY, joined(reachable(store.host, bus_url), store.port))
    try:
        store.wait([STORE_KEY], timedelta(seconds=_STORE_S))
    except RuntimeError as error:  # c10d's DistStoreError
        raise FftError(
            f"rank 0 of this replica group has not published the address of their store within "
            f"{_STORE_S:g} s: start all ranks of the group with ManagerFFT; see its log"
        ) from error
    return str(store.get(STORE_KEY).decode())


def _transport(manager: Manager, bus_url: str) -> Any:
    """Return the URL at which this rank serves its state. `Config` raises for a non-string."""
    served = manager._torchft.checkpoint_transport.metadata()
    return reachable_url(served, bus_url) if isinstance(served, str) else served


def _config(parts: Parts) -> Config:
    settings, torchft = parts.settings, parts.manager._torchft
    mode = torchft.replica_world_size_mode
    return Config(
        me=parts.job.peer,
        store=parts.groups.store,
        spans_hosts=parts.groups.spans_hosts,
        home="" if parts.groups.home == parts.groups.store else parts.groups.home,
        transport=_transport(parts.manager, settings.bus_url),
        pid=os.getpid(),
        host=socket.gethostname(),
        timeouts=timers(settings.spec, parts.limits),
        min_groups=torchft.min_replica_size,
        expected_groups=settings.expected_groups,
        on_divergence=settings.on_divergence,
        fixed_with_spares=mode == WorldSizeMode.FIXED_WITH_SPARES,
        fixed_slices=parts.loop.fixed_slices,
        rules=settings.config.active,
        place=settings.config.place if settings.config.active else "",
        **parts.scope.terms(torchft.group_world_size),
    )


def _common_settings(parts: Parts, config: Config) -> dict[str, Any]:
    """Return the settings that must be equal in all processes of the job."""
    return common_settings(
        parts.settings.spec,
        ranks_of_a_group=parts.world,
        min_replica_size=config.min_groups,
        world_size_mode=parts.manager._torchft.replica_world_size_mode.name,
        on_divergence=config.on_divergence,
        membership=parts.settings.config.membership,
        on_nonfinite=parts.settings.config.on_nonfinite,
        recompute_every=parts.settings.config.recompute_every,
        check_buffers=parts.settings.config.check_buffers,
        vetoes=len(parts.results.vetoes),
        slices_of_a_global_batch=config.fixed_slices,
        mesh=parts.groups.mesh_text,
        active=list(map(str, parts.settings.config.active)),
        **parts.paradigm.common_settings(),
    )


def _initial(parts: Parts, participant: Participant) -> Local:
    """Return the initial state of this rank: a fresh one, or that of the loaded checkpoint."""
    state, torchft = parts.state, parts.manager._torchft
    step = torchft.step
    own = f"fresh:{parts.job.peer.group}:{parts.groups.store}"
    fresh = own if torchft.init_sync else GENESIS
    if parts.settings.is_replacement:  # the process initialized its weights without its group
        fresh = f"fresh:{parts.job.peer}"
    return participant.initial(
        lineage=state.lineage or (fresh if step == 0 else f"step:{step}"),
        step=step,
        cursor=state.cursor,
        batches=torchft.batches_committed,
        returned=state.returned,
    )


def _can_reform(parts: Parts, config: Config) -> bool:
    """Return whether a replacement process may take over from a lost rank of this group."""
    may = parts.paradigm.can_reform and not parts.attempt.preconditions
    return config.world > 1 and may and parts.groups.can_reform


def _warn_of_unreduced_parameters(parts: Parts) -> None:
    """Warn about parameters that are stepped but not reduced, which makes groups diverge.

    Also warn about reduced parameters that no optimizer steps.
    """
    reducers = parts.reducers
    reduced = {id(p) for reducer in reducers for p in reducer.parameters()}
    stepped = [p for p in parts.state.updates.parameters() if p.requires_grad]
    if unreduced := [tuple(p.shape) for p in stepped if reduced and id(p) not in reduced]:
        text = (
            f"{len(unreduced)} parameters of the optimizers are in no model of sync_gradients(), "
            "so their gradients are not averaged across the groups; shapes: "
            f"{unreduced[:_SHOWN]}"
        )
        parts.job.warn("not_averaged", text)
    known = {id(p) for p in stepped}
    idle = [p for r in reducers for p in r.parameters() if p.requires_grad and id(p) not in known]
    if idle and stepped:
        shapes = [tuple(p.shape) for p in idle[:_SHOWN]]
        text = "%d parameters of sync_gradients() are in no registered optimizer; shapes: %s"
        logger.warning(text, len(idle), shapes)


def _warn_of_other_generators(parts: Parts) -> None:
    """Warn that rollbacks do not restore the global generators, if the script lists its own."""
    step = parts.state.registered_state
    own = None if step is None else step.generators
    if own is not None and torch.default_generator not in own:
        parts.job.warn(
            "own_generators",
            "register(generators=…) without torch.default_generator: a rollback does not restore "
            "the global generators, so a repeated step has other dropout masks and other numbers "
            "of torch.rand(); add torch.default_generator if the step function draws from it",
        )


class EngineHost:
    """The engine's callbacks into this process; implements `fft.engine.core.Host`.

    `Worker` has both halves of a rollback, on the engine's thread and on the main thread.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = weakref.ref(parts)

    def _run(self, callback: Callable[[Parts], None]) -> None:
        if (parts := self._parts()) is not None:
            callback(parts)

    def cancel_futures(self, cause: str) -> None:
        self._run(lambda parts: parts.reductions.cancel(cause))

    def abort_groups(self, cause: str) -> None:
        self._run(lambda parts: parts.worker.abort(cause))

    def members_lost(self) -> None:
        self._run(lambda parts: parts.worker.members_lost())

    def interrupt(self, cause: str) -> None:
        self._run(lambda parts: parts.worker.interrupt(cause))

    def decided(self, record: Record) -> None:
        self._run(lambda parts: parts.commits.on_record(record))

    def no_step(self, message: NoStep) -> None:
        self._run(lambda parts: parts.attempt.presence.receive(message))

    def command(self, command: Command) -> None:
        self._run(lambda parts: parts.commands.execute(command))
