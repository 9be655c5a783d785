"""Groups of several ranks that take local steps together: HSDP in LocalSGD or DiLoCo."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fft.bus import open_job_bus
from fft.engine.calls import Buses
from fft.engine.executor import StepExecutor
from fft.engine.loop import Command, Engine
from fft.errors import BusError, FftError, ResultRefused
from fft.messages.causes import CauseCode
from fft.messages.commands import Command as OperatorCommand
from fft.messages.effects import Apply, Finish, Heal, Restore, StartTxn
from fft.messages.protocol import (
    Applied,
    Fault,
    Healed,
    HealFailed,
    NoStep,
    Peer,
    Prepared,
    Record,
    Start,
    Token,
)
from fft.protocol.participant import Participant
from fft.protocol.spec import FsmSpec
from fft.protocol.state import GENESIS, Config
from fft.protocol.table import Table
from fft.protocol.timeouts import timers
from fft.trace.format import inner_folder
from fft.trace.writer import TraceWriter, header
from fft.train.data.step_input import StepInput
from fft.train.gradients.reductions import ManifestBuilder
from fft.train.guard.interrupt import Interrupted
from fft.train.guard.unsafe_places import guarded
from fft.train.limits import Feature
from fft.train.paradigms.periodic.loop import InnerSteps, InnerTransaction, PeriodicLoop
from fft.train.paradigms.periodic.paradigm import Periodic
from fft.train.paradigms.periodic.synchronizer import Synchronizer
from fft.train.process_groups import GroupAborted
from fft.train.session.error_reports import code_of, error_of, text_of
from fft.train.session.participation import Participation, bus_url
from fft.train.session.rank_context import RankContext
from fft.train.state.local_tensors import local_of
from fft.train.state.step_state import TornState
from fft.train.step.transaction import TransactionLoop

logger = logging.getLogger(__name__)

_NEVER_S = 3e8
"""Ten years, in effect unlimited: ranks wait for each other as long as the job keeps the group."""
_UNBOUND = ("quorum", "ready_window")


class InnerScope(InnerSteps):
    """The inner scope of one rank; methods run on the main thread unless noted otherwise."""

    def __init__(self, rank: RankContext) -> None:
        """
        Raises:
            FftError: The ranks have no shard process group.
        """
        if not rank.groups.has_shard_group:
            raise FftError(
                f"spec {rank.settings.spec.name!r} with {rank.world} ranks in a replica group, "
                "which commit their steps together: pass shard_pg=fft.ShardProcessGroupGloo(), and "
                "shard the model over manager.shard_mesh()"
            )
        rank.groups.shard_has_own_scope = True
        self.synchronizer: Synchronizer | None = None
        """Synchronizes this group with the others; set before the loop begins."""
        self._job, self._watchers = rank.job, rank.watchers
        self._groups, self._state = rank.groups, rank.state
        self._settings, self._limits = rank.settings, rank.limits
        self._own: Participation | None = None
        self._plan: StartTxn | None = None
        """Plan of the open txn of the job."""
        self._token = Token(0, 0)
        """Token of the most recent inner txn on this rank."""
        self._attempt: SharedInnerTransaction | None = None
        """The step for which this rank voted and whose decision is not applied yet."""
        self._entered = self._in_body = False
        self._gate = threading.Lock()
        """Serializes entry, exit and interruption, so that only an inner step is interrupted."""
        self._work: dict[str, Callable[[Any], None]] = {
            "restore": self._restore,
            "connect": self._connect,
            "begin_body": self._refuse_txn,
            "apply": self._apply,
            "leave": self._stop,
        }

    # --- begin and end ---

    def start(self, config: Config) -> None:
        """Join the inner job.

        Args:
            config: Configuration of this participant in the outer job.

        Raises:
            BusError: The inner bus is not available.
        """
        # named after the generation of the job bus, like the bus of the group's votes
        url = bus_url(config.store, f"{self._job.bus.generation}-inner")
        operation_s = self._limits["bus_operation"].seconds
        bus = open_job_bus(url, self._settings.token, operation_s, purpose="inner bus")
        peer, spec = self._job.peer, self._settings.spec.inner
        try:
            peer = peer._replace(inc=bus.next_number(f"inc/{peer.group}/{peer.rank}"))
        except BusError:
            bus.close()
            raise
        root = self._settings.trace_dir
        folder = None if root is None else inner_folder(root, peer.group, config.store)
        own = self._own = Participation(peer, bus, TraceWriter(folder, peer))
        config = self._config(config, spec, peer)
        participant = Participant(Table(spec), config)
        local = participant.initial(lineage=GENESIS, step=0, cursor=0, batches=0)
        own.trace.write("header", header(spec, config, local))
        own.engine = Engine(participant, local, Buses(bus), own.trace, _Host(self), is_inner=True)
        own.engine.start()
        own.engine.post(Start())

    def _config(self, config: Config, spec: FsmSpec, peer: Peer) -> Config:
        return replace(
            config,
            me=peer,
            transport="",
            timeouts={**timers(spec, self._limits), **dict.fromkeys(_UNBOUND, _NEVER_S)},
            min_groups=1,
            expected_groups=1,
            min_reductions=1,
            leases=False,
            on_divergence="stop",
            fixed_with_spares=False,
        )

    def close(self) -> None:
        """Leave the inner job and end its engine. Idempotent."""
        if self._own is not None:
            self._own.leave()
            self._own.close()

    @property
    def _joined(self) -> Participation:
        """This process as a participant of the inner job."""
        assert self._own is not None, "the job was joined"
        return self._own

    @property
    def _engine(self) -> Engine:
        engine = self._joined.engine
        assert engine is not None, "it is made with it"
        return engine

    @property
    def _executor(self) -> StepExecutor:
        return self._joined.executor

    # --- any thread ---

    def hear_job(self, cause: str) -> None:
        """Abort the shard group and wake the main thread for a command of the job's engine."""
        if self._entered:
            self._groups.abort_shard(cause)
        if self._own is not None and self._own.engine is not None:
            self._own.engine.nudge()

    def abort_groups(self, cause: str) -> None:
        """Abort the shard group for a rollback.

        After the end of the job it stays, because a slower rank may still run collectives in
        user code.
        """
        local = self._job.local
        if local is None or local.role != "terminal":
            self._groups.abort_shard(cause)

    def interrupt(self, cause: str) -> None:
        """Interrupt the step function of an inner step if it is running."""
        with self._gate:
            if self._in_body:
                self._watchers.interrupt(cause)

    # --- inner steps ---

    def ready(self, plan: StartTxn) -> bool:
        """Execute commands of this scope's engine until a step may begin.

        Returns:
            False if a command of the job's engine arrives first.
        """
        self._plan, self._entered = plan, True
        while (command := self._next()) is not None:
            if isinstance(command, StartTxn) and not self._groups.shard_aborted:
                return True
            self._executor.execute(command, self._work)
        return False

    def leave(self) -> None:
        """Leave this scope; the main thread continues in the job scope."""
        self._entered = False

    def transaction(self, loop: PeriodicLoop, plan: StartTxn, drawn: StepInput) -> InnerTransaction:
        """Return the transaction of a step that all ranks of the group take."""
        return SharedInnerTransaction(loop, self, plan, drawn)

    def begin(self) -> bool:
        """Begin a step. Return False if another command has superseded it."""
        command = self._engine.wait_command()
        if not isinstance(command, StartTxn):
            return False
        self._executor.accept(command)
        self._engine.take(command)
        self._token = command.token
        return True

    def enter_step(self) -> None:
        """Start the step function; `interrupt` may interrupt it from now on."""
        with self._gate:
            self._in_body = True
            if self._engine.superseded():  # a rollback came before the step function
                self._watchers.interrupt("rolled back before it began")

    def exit_step(self) -> None:
        """End the step function, whether it succeeded or failed."""
        with self._gate:
            self._in_body = False

    @property
    def is_rolled_back(self) -> bool:
        """Whether a command of either engine has superseded the open inner step."""
        return self._engine.superseded() or self._job_speaks()

    def fail(self, cause: str, code: CauseCode, source: str) -> None:
        """Roll the step back on all ranks of the group, instead of a vote."""
        self._executor.unwound()
        self._engine.post(Fault(self._token, cause, code, source))

    def vote(self, attempt: SharedInnerTransaction, skip: bool) -> None:
        """Vote for the step and apply the decision.

        If a command of the job's engine arrives before the decision, the decision is applied when
        the main thread enters this scope again.
        """
        self._attempt = attempt
        manifest = ManifestBuilder()  # FSDP2's reductions are not visible, only their results
        for parameter in self._state.updates.parameters():
            if parameter.grad is not None:
                manifest.add(local_of(parameter.grad), "gradient")
        self._executor.report(Prepared(self._token, True, manifest.build(), skip=skip))
        while self._executor.role == "waiting" and (command := self._next()) is not None:
            self._executor.execute(command, self._work)

    # --- commands of this scope's engine ---

    def _job_speaks(self) -> bool:
        return self._job.engine is not None and self._job.engine.has_command()

    def _next(self) -> Command | None:
        """Return the next command of this scope, or None if the job's engine has a command."""
        if self._job_speaks():
            return None
        with self._watchers.waiting():
            self._engine.wait_for(self._job_speaks)
            return None if self._job_speaks() else self._engine.wait_command()

    def _refuse_txn(self, command: StartTxn) -> None:
        """Request a rollback that rebuilds the shard group, which has been aborted."""
        self._token = command.token
        text = "the shard group was aborted with the job's txn"
        self.fail(text, CauseCode.SCOPE_RESET, "job")

    def _restore(self, command: Restore) -> None:
        step = self._state.registered
        self._attempt = None
        self._groups.unwind_shard(command.cause.text, self._watchers.waiting())
        self._state.updates.forget()
        try:
            if step.captured:
                step.restore()
            else:  # the step has not begun here, or its start state is lost
                step.unwind()
        except TornState as error:
            self._begin_anew(text_of(error))
        self._executor.restored(command)

    def _connect(self, command: Heal) -> None:
        epoch, synchronizer = command.record.epoch, self.synchronizer
        assert synchronizer is not None, "looked at before"
        mine = synchronizer.phase.standing()
        try:
            with self._watchers.waiting():
                notes = self._groups.build_shard(command.record, mine, self._job_speaks)
        except Exception as error:  # noqa: BLE001 - reported to the engine, which retries
            logger.warning("building the shard group of epoch %d failed: %s", epoch, error)
            self._job.note_error(error)
            code = code_of(error, own=CauseCode.EPOCH_FAILED)
            self._executor.report(HealFailed(epoch, text_of(error), code=code))
            return
        if unlike := {rank: note for rank, note in notes.items() if note != mine}:
            self._begin_anew(f"this rank stands at {mine}, others of its group at {unlike}")
        self._executor.report(Healed(epoch))

    def _apply(self, command: Apply) -> None:
        """Apply the update of a committed step, unless its state has been discarded."""
        attempt, self._attempt = self._attempt, None
        is_due = attempt is not None and self._state.registered.captured
        if is_due and attempt is not None and not attempt.carry_out(lambda: command.skip):
            # This rank has restarted from the last synchronization. Other ranks of the group may
            # already be synchronizing, and a rollback of the job's txn brings them back.
            self._groups.abort_shard("the update of an inner step has failed on this rank")
            assert self._plan is not None, "a txn of the job is open"
            text = "the update of an inner step has failed; its group begins anew"
            self._job.post(Fault(self._plan.token, text, CauseCode.SCOPE_RESET, "inner"))
        if self._executor.transition_if("applying", "applied"):
            self._engine.post(Applied(self._engine.local.token))

    def _begin_anew(self, why: str) -> None:
        synchronizer, plan = self.synchronizer, self._plan
        assert synchronizer is not None, "looked at before"
        assert plan is not None, "a txn of the job is open"
        logger.error("%s; this rank begins anew from the last synchronisation", why)
        synchronizer.begin_anew(plan, why)

    def _stop(self, command: Finish) -> None:
        """Raise the engine's error, because the group cannot train without this scope."""
        if command.error is not None:
            raise error_of(command)
        raise FftError(f"the scope of this replica group has ended: {command.reason}")


class _Host:
    """The host of the engine of an inner scope; see `fft.engine.core.Host`."""

    def __init__(self, scope: InnerScope) -> None:
        self._scope = weakref.ref(scope)

    def cancel_futures(self, cause: str) -> None:
        """Do nothing, because all futures of the process belong to the job's reductions."""

    def abort_groups(self, cause: str) -> None:
        if (scope := self._scope()) is not None:
            scope.abort_groups(cause)

    def members_lost(self) -> None:
        """Do nothing, because this scope never defers an abort."""

    def decided(self, record: Record) -> None:
        """Do nothing, because the job scope detects hangs."""

    def no_step(self, message: NoStep) -> None:
        """Do nothing, because this scope has no live blocks."""

    def command(self, command: OperatorCommand) -> None:
        """Do nothing, because operators send commands to the job only."""

    def interrupt(self, cause: str) -> None:
        if (scope := self._scope()) is not None:
            scope.interrupt(cause)


class SharedInnerTransaction(InnerTransaction):
    """An inner step that all ranks of the group commit or repeat together.

    ``committed`` may be False for a step whose decision came after a command of the job's engine.
    When the group continues, it applies the update and calls the functions of
    ``manager.on_commit``.
    """

    def __init__(
        self, periodic: PeriodicLoop, inner: InnerScope, plan: StartTxn, drawn: StepInput
    ) -> None:
        super().__init__(periodic, plan, drawn)
        self._inner = inner

    @guarded
    def _enter(self) -> None:
        super()._enter()
        self._inner.enter_step()

    @guarded
    def _exit(self) -> None:
        super()._exit()
        self._inner.exit_step()

    def _complete(self) -> Exception | None:
        return self._left_undone() or self._vote()

    def _fail(self, error: BaseException) -> bool:
        if not isinstance(error, Exception | Interrupted):
            return super()._fail(error)
        self._give_up(error)
        return True

    def _vote(self) -> Exception | None:
        """Vote YES and apply the decision. Return the error if the rank cannot vote."""
        self._periodic.state.registered.note_edits()
        try:
            skip = self.must_skip()
        except Exception as error:
            if isinstance(error, ResultRefused) and error.ends_job:
                self._periodic.job.note_error(error)
                raise
            return error  # handled like an error of the step function
        self._inner.vote(self, skip)
        return None

    def _give_up(self, error: BaseException) -> None:
        """Roll the step back on all ranks after its step function failed or was interrupted."""
        periodic, is_void = self._periodic, self._inner.is_rolled_back
        text = text_of(error)
        self._inner.fail(text, code_of(error), type(error).__name__)
        periodic.watchers.txn_ended(committed=False)
        self._note("inner_abort", cause=text)
        if is_void or not isinstance(error, Exception) or isinstance(error, GroupAborted):
            return
        self._raise_if_retries_exceeded(error)
        logger.warning("an inner step failed here and is computed again: %s", text)
        periodic.job.note_error(error)


class Nested(Periodic):
    """Groups take local steps in inner scopes; a txn of the job synchronizes the groups.

    Attributes:
        inner: The inner scope of the ranks of this group.
    """

    kind = Feature.SHARDED_LOCAL_STEPS

    def __init__(self, rank: RankContext) -> None:
        super().__init__(rank)
        self.inner = InnerScope(rank)

    def joined(self, config: Config) -> None:
        self.inner.start(config)

    def interrupted(self, cause: str) -> None:
        self.inner.hear_job(cause)

    def restore(self) -> None:
        """Leave the state unchanged, because the inner scope restores it on all ranks together."""

    def _loop_of(self, loop: TransactionLoop, synchronizer: Synchronizer) -> PeriodicLoop:
        self.inner.synchronizer = synchronizer
        return PeriodicLoop(self._rank, loop, synchronizer, self.inner)

    def close(self) -> None:
        self.inner.close()
