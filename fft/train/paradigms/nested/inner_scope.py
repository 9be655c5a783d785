"""The scope inside a replica group of several ranks, which commit each step of the group together.

It is one more instance of the protocol: a job of one group, with an engine, a table of the main
thread, a bus and a trace of its own. The bus is on the group's own store, so that each life of the
group has its own inner job. No other group hears of it.

The job's scope comes first: a rank that has a word of the job's engine carries it out before
anything of this scope. Else ranks could wait in a circle, each in the one scope for a mate that
waits in the other. So whatever the main thread waits for here, it comes back when the job speaks;
what was decided here meanwhile is carried out afterwards. The job's engine waits for nothing here,
and it alone judges who lives: this scope leaves nobody out.

Each rollback of the job's aborts the shard group, too, and each is followed by a new epoch here. As
they meet in it, the ranks compare where they stand; if they differ, all begin anew from the last
synchronisation.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from fft.bus import open_job_bus
from fft.engine.calls import Buses
from fft.engine.executor import StepExecutor
from fft.engine.loop import Command, Engine
from fft.errors import BusError, FftError
from fft.messages.causes import CauseCode
from fft.messages.commands import Command as OperatorCommand
from fft.messages.effects import Apply, Finish, Heal, Restore, StartTxn
from fft.messages.protocol import (
    Applied,
    Fault,
    Healed,
    HealFailed,
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
from fft.train.error_reports import code_of, error_of, text_of
from fft.train.interrupt import Interrupted
from fft.train.local_tensors import local_of
from fft.train.paradigms.periodic.loop import InnerSteps, InnerTransaction, PeriodicLoop
from fft.train.paradigms.periodic.synchronizer import Synchronizer
from fft.train.participation import Participation, bus_url
from fft.train.process_group import GroupAborted
from fft.train.rank_context import RankContext
from fft.train.reductions import ManifestBuilder
from fft.train.state.step_state import TornState
from fft.train.unsafe_places import guarded

logger = logging.getLogger(__name__)

_NEVER_S = 3e8
"""Ten years. Mates are waited for as long as the job keeps the group."""
_UNBOUND = ("quorum", "ready_window")


class InnerScope(InnerSteps):
    """Of one rank. The main thread's, unless said otherwise."""

    def __init__(self, rank: RankContext) -> None:
        """
        Raises:
            FftError: the ranks have no process group that they could meet in.
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
        """Of the job's txn that is open."""
        self._token = Token(0, 0)
        """Of the inner txn that began last here."""
        self._attempt: SharedInnerTransaction | None = None
        """What this rank has voted for, whose decision it has not carried out."""
        self._entered = self._in_body = False
        self._gate = threading.Lock()
        """Held to open or close a body, and to interrupt it: no other body is."""
        self._work: dict[str, Callable[[Any], None]] = {
            "restore": self._restore,
            "connect": self._connect,
            "begin_body": self._refuse_txn,
            "apply": self._apply,
            "leave": self._stop,
        }

    # --- begin and end ---

    def start(self, config: Config) -> None:
        """Join the inner job; ``config``: of this participant in the job. Raises BusError."""
        # named after this life of the job's bus, like the bus of the group's votes
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
        own.engine = Engine(participant, local, Buses(bus), own.trace, _Host(self))
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
        """This process as a participant of the inner job, which it has joined."""
        assert self._own is not None, "the job was joined"
        return self._own

    @property
    def _engine(self) -> Engine:
        engine = self._joined.engine
        assert engine is not None, "it is made with it"
        return engine

    @property
    def _thread(self) -> StepExecutor:
        return self._joined.thread

    # --- any thread ---

    def hear_job(self, cause: str) -> None:
        """The job's engine has a word for the main thread."""
        if self._entered:
            self._groups.abort_shard(cause)
        if self._own is not None and self._own.engine is not None:
            self._own.engine.nudge()

    def abort_groups(self, cause: str) -> None:
        """The attempt is rolled back. A mate that leaves after the job's last txn disturbs nobody:
        who is slower may still be in a collective of its own code."""
        local = self._job.local
        if local is None or local.role != "terminal":
            self._groups.abort_shard(cause)

    def interrupt(self, cause: str) -> None:
        """Unwind the body of an inner step, if that is what is open."""
        with self._gate:
            if self._in_body:
                self._watchers.interrupt(cause)

    # --- the loop of the group's steps ---

    def ready(self, plan: StartTxn) -> bool:
        """Do what this scope's engine asks, until a step may begin. False: the job has a word."""
        self._plan, self._entered = plan, True
        while (command := self._next()) is not None:
            if isinstance(command, StartTxn) and not self._groups.shard_aborted:
                return True
            self._thread.execute(command, self._work)
        return False

    def leave(self) -> None:
        """The main thread turns to the job's scope."""
        self._entered = False

    def transaction(self, loop: PeriodicLoop, plan: StartTxn, drawn: StepInput) -> InnerTransaction:
        """Return the transaction of a step that all ranks of the group make."""
        return SharedInnerTransaction(loop, self, plan, drawn)

    def begin(self) -> bool:
        """A step begins. False: there is another word now."""
        command = self._engine.wait_command()
        if not isinstance(command, StartTxn):
            return False
        self._thread.accept(command)
        self._engine.take(command)
        self._token = command.token
        return True

    def enter_step(self) -> None:
        """Its body begins."""
        with self._gate:
            self._in_body = True
            if self._engine.superseded():  # rolled back before there was anything to unwind
                self._watchers.interrupt("rolled back before it began")

    def exit_step(self) -> None:
        """It has ended, however."""
        with self._gate:
            self._in_body = False

    @property
    def is_rolled_back(self) -> bool:
        """Whether the step that is open here is void by the word of an engine."""
        return self._engine.superseded() or self._job_speaks()

    def fail(self, cause: str, code: CauseCode, source: str) -> None:
        """The body is over without a vote: all ranks of the group roll the step back."""
        self._thread.unwound()
        self._engine.post(Fault(self._token, cause, code, source))

    def vote(self, attempt: SharedInnerTransaction, skip: bool) -> None:
        """Vote for the step, and carry out the decision, unless the job speaks before it comes:
        then it is carried out when this scope is entered again."""
        self._attempt = attempt
        manifest = ManifestBuilder()  # nobody sees what FSDP2 has reduced, but for what came of it
        for parameter in self._state.updates.parameters():
            if parameter.grad is not None:
                manifest.add(local_of(parameter.grad), "gradient")
        self._thread.report(Prepared(self._token, True, manifest.build(), skip=skip))
        while self._thread.role == "waiting" and (command := self._next()) is not None:
            self._thread.execute(command, self._work)

    # --- words of this scope's engine ---

    def _job_speaks(self) -> bool:
        return self._job.engine is not None and self._job.engine.has_word()

    def _next(self) -> Command | None:
        """The next word of this scope's engine. None: the job's has one, which comes first."""
        if self._job_speaks():
            return None
        with self._watchers.waiting():
            self._engine.wait_for(self._job_speaks)
            return None if self._job_speaks() else self._engine.wait_command()

    def _refuse_txn(self, command: StartTxn) -> None:
        """The shard group was aborted since it was built: build it anew, by a rollback."""
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
            else:  # before it began here, or the state that it was computed from is gone
                step.unwind()
        except TornState as error:
            self._begin_anew(text_of(error))
        self._thread.restored(command)

    def _connect(self, command: Heal) -> None:
        epoch, synchronizer = command.record.epoch, self.synchronizer
        assert synchronizer is not None, "looked at before"
        mine = synchronizer.phase.standing()
        try:
            with self._watchers.waiting():
                notes = self._groups.build_shard(command.record, mine, self._job_speaks)
        except Exception as error:  # noqa: BLE001 - the engine hears of it, and tries again
            logger.warning("building the shard group of epoch %d failed: %s", epoch, error)
            self._job.note_error(error)
            code = code_of(error, own=CauseCode.EPOCH_FAILED)
            self._thread.report(HealFailed(epoch, text_of(error), code=code))
            return
        if unlike := {rank: note for rank, note in notes.items() if note != mine}:
            self._begin_anew(f"this rank stands at {mine}, others of its group at {unlike}")
        self._thread.report(Healed(epoch))

    def _apply(self, command: Apply) -> None:
        """Make the update of a step that the group has committed, unless its state is void."""
        attempt, self._attempt = self._attempt, None
        is_due = attempt is not None and self._state.registered.captured
        if is_due and attempt is not None and not attempt.carry_out(lambda: command.skip):
            # It begins anew. Mates may be in the synchronisation already: all come back here.
            self._groups.abort_shard("the update of an inner step has failed on this rank")
            assert self._plan is not None, "a txn of the job is open"
            text = "the update of an inner step has failed; its group begins anew"
            self._job.post(Fault(self._plan.token, text, CauseCode.SCOPE_RESET, "inner"))
        if self._thread.transition_if("applying", "applied"):
            self._engine.post(Applied(self._engine.local.token))

    def _begin_anew(self, why: str) -> None:
        synchronizer, plan = self.synchronizer, self._plan
        assert synchronizer is not None, "looked at before"
        assert plan is not None, "a txn of the job is open"
        logger.error("%s; this rank begins anew from the last synchronisation", why)
        synchronizer.begin_anew(plan, why)

    def _stop(self, command: Finish) -> None:
        """Raises the error that the engine names: without this scope the group makes no step."""
        if command.error is not None:
            raise error_of(command)
        raise FftError(f"the scope of this replica group has ended: {command.reason}")


class _Host:
    """The host of the engine of an inner scope; see `fft.engine.core.Host`."""

    def __init__(self, scope: InnerScope) -> None:
        self._scope = weakref.ref(scope)

    def cancel_futures(self, cause: str) -> None:
        """The futures of the process are those of the job's reductions."""

    def abort_groups(self, cause: str) -> None:
        if (scope := self._scope()) is not None:
            scope.abort_groups(cause)

    def members_lost(self) -> None:
        """No abort was put off."""

    def decided(self, record: Record) -> None:
        """Hangs are of the process, and the job's scope hears of them."""

    def command(self, command: OperatorCommand) -> None:
        """Operators speak to the job."""

    def interrupt(self, cause: str) -> None:
        if (scope := self._scope()) is not None:
            scope.interrupt(cause)


class SharedInnerTransaction(InnerTransaction):
    """An inner step that the ranks of the group commit or repeat together.

    ``committed`` may be False for a step whose decision came after a command of the job's engine.
    Its update is made when the group continues, and functions of ``manager.on_commit`` are called
    then.
    """

    def __init__(
        self, periodic: PeriodicLoop, inner: InnerScope, plan: StartTxn, drawn: StepInput
    ) -> None:
        super().__init__(periodic, plan, drawn)
        self._inner = inner

    @guarded
    def __enter__(self) -> Self:
        super().__enter__()
        self._inner.enter_step()
        return self

    @guarded
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        periodic = self._periodic
        self._loop.exit_step()
        self._inner.exit_step()
        self.closed = True
        if error is not None and not isinstance(error, Exception | Interrupted):
            return self._loop.unwound(self._plan, self._drawn, error)
        periodic.watchers.body_done()
        if error is None:
            error = self._left_undone() or self._vote()
        if error is not None:
            self._give_up(error)
        return True

    def _vote(self) -> Exception | None:
        """Vote YES, and carry out the decision. Return the reason if there can be no vote."""
        state = self._periodic.state
        state.registered.note_edits()
        try:
            skip = state.updates.must_skip()
        except Exception as error:  # noqa: BLE001 - as one of the body's
            return error
        self._inner.vote(self, skip)
        return None

    def _give_up(self, error: BaseException) -> None:
        """Have the group roll the step back, whose step function has failed or was interrupted."""
        periodic, is_void = self._periodic, self._inner.is_rolled_back
        text = text_of(error)
        self._inner.fail(text, code_of(error), type(error).__name__)
        periodic.watchers.txn_ended(committed=False)
        self._note("inner_abort", cause=text)
        if is_void or not isinstance(error, Exception) or isinstance(error, GroupAborted):
            return
        self._give_up_if_hopeless(error)
        logger.warning("an inner step failed here and is computed again: %s", text)
        periodic.job.note_error(error)
