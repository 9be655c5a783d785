"""The parts of a manager, put together once; how they end, and in which order."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torchft.process_group import ProcessGroup

from fft.bus import open_job_bus
from fft.bus.addresses import own_address
from fft.operate.entering import JobStart, enter
from fft.trace.starts import folder_of
from fft.trace.writer import TraceWriter
from fft.train.checkpoint.checkpointer import Checkpointer
from fft.train.epoch_groups import EpochGroups
from fft.train.healing import Healer, StateExchange
from fft.train.host import EngineHost, LighthouseDoubter
from fft.train.joining import identify, join, store_address
from fft.train.leaving import Leaving
from fft.train.lighthouse import Beacon, Quorums
from fft.train.operator_commands import OperatorCommands, make_injector
from fft.train.participation import Participation
from fft.train.periodic.inner_scope import InnerScope, inner_scope_of
from fft.train.rank_state import RankState
from fft.train.reductions import TxnReductions
from fft.train.settings import Settings, refuse_ranks
from fft.train.stages.scope import scope_of_stage
from fft.train.state.transfer import StateTransfer
from fft.train.transaction import TransactionLoop
from fft.train.voting import Voter
from fft.train.watchers import Watchers
from fft.train.worker import Worker
from fft.util.full_disk import is_disk_full

if TYPE_CHECKING:
    from fft.train.torchft_interface import TorchftInterface


class Parts:
    """Of one manager, whose torchft side is constructed already."""

    def __init__(
        self,
        manager: TorchftInterface,
        settings: Settings,
        pg: ProcessGroup,
        shard_pg: ProcessGroup | None,
        transfer: StateTransfer | None,
        undo: ExitStack,
    ) -> None:
        """``undo`` gets what ends the parts that hold something, for when a later one fails."""
        refuse_ranks(settings.spec, manager._group_world_size)
        self.limits = limits = settings.timeout_table(manager)
        operation_s = limits["bus_operation"].seconds
        start = enter(settings.bus_url, settings.token, operation_s)
        traces = _traces_of(start, settings)
        self.settings = settings = replace(settings, bus_url=start.url, trace_dir=traces)
        bus = open_job_bus(settings.bus_url, settings.token, operation_s)
        undo.callback(bus.close)
        peer = identify(manager, bus)
        self.stage = scope_of_stage(settings, manager, bus, operation_s, undo)
        trace = TraceWriter(traces if self.stage is None else self.stage.traces(traces), peer)
        undo.callback(trace.close)
        self.job = Participation(peer, bus, trace)
        self.watchers = Watchers()
        store = store_address(manager, settings.bus_url)
        alone, address = settings.is_successor, own_address(settings.bus_url)
        self.groups = EpochGroups(manager, peer, store, pg, shard_pg, alone, address)
        self.injector = make_injector(self.job, self.groups)
        self.commands = OperatorCommands(self.job, self.injector)
        self.reductions = TxnReductions(manager, self.watchers, self.injector)
        self.state = RankState(manager, self.injector, settings, self.stage)
        self.exchange = StateExchange(manager, self.state, transfer, self.job.tell_fetch)
        self.checkpointer = self._make_checkpointer(manager)
        self.inner = self._make_inner(manager)
        host, margin_s = EngineHost(manager, self), limits["drain_margin"].seconds
        self.leaving = Leaving(self.job, self.watchers, host, margin_s)
        undo.callback(self.leaving.close)
        self.quorums = self._make_quorums(manager)
        self.healer = Healer(
            manager, self.job, self.state, self.groups, self.exchange, settings.learners
        )
        self.voter = Voter(
            manager,
            self.job,
            self.watchers,
            self.state,
            self.reductions,
            self.healer,
            self.quorums,
            self.injector,
            settings.learners,
        )
        self.worker = Worker(
            manager,
            self.job,
            self.watchers,
            self.state,
            self.groups,
            self.reductions,
            self.exchange,
            self.healer,
            self.voter,
            self.leaving,
            self.quorums,
            self.injector,
            settings.max_body_failures,
            lambda: join(manager, self),
        )
        own = self.job, self.watchers, self.state, self.reductions
        self.loop = TransactionLoop(manager, *own, self.voter, self.worker, settings.spec)

    def _make_checkpointer(self, manager: TorchftInterface) -> Checkpointer | None:
        """What takes durable checkpoints, and resumes from one, if that is wanted."""
        settings = self.settings
        if settings.checkpoint is None:
            return None
        size = settings.expected_groups, manager._group_world_size
        own = settings.checkpoint, self.job, self.state, settings.spec, *size
        if self.stage is None:
            return Checkpointer(*own)
        return Checkpointer(*own, self.stage, self.limits["flow_limit"].seconds)

    def _make_inner(self, manager: TorchftInterface) -> InnerScope | None:
        """The scope of this replica group, if it has several ranks that step alone."""
        ranks, job, state = manager._group_world_size, self.job, self.state
        return inner_scope_of(
            self.settings, ranks, job, self.watchers, self.groups, state, self.limits
        )

    def _make_quorums(self, manager: TorchftInterface) -> Quorums | None:
        """Who asks the lighthouse, if it is in charge: the first rank of a group."""
        if self.settings.membership != "lighthouse" or manager._group_rank != 0:
            return None
        return Quorums(
            cast("Beacon", manager._manager),
            self.job.peer,
            self.limits["quorum_timeout"].seconds,
            self.limits["lighthouse_window"].seconds,
            LighthouseDoubter(self.job),
        )

    def close(self) -> None:
        """Leave the job and end all. Idempotent."""
        self.worker.finish_apply()
        if not _is_failing():
            self.state.before_next()
            self.state.end_gathering()
        self.leaving.end_notices()
        self.job.leave()
        if self.state.output is not None and not _is_failing():
            with self.watchers.waiting():  # else the next stage could not take what is there
                self.state.output.finish(leaves=True, was_left=True)
        if self.inner is not None:
            self.inner.close()
        if self.quorums is not None:
            self.quorums.close()
        self.healer.stop_learning()
        if self.state.output is not None:
            self.state.output.close()
        self.leaving.close()
        self.state.close_source()
        if self.checkpointer is not None:
            with self.watchers.waiting():
                self.checkpointer.close(serves=not _is_failing())
        self.watchers.end_reports()
        self.commands.close()
        self.reductions.close()
        self.state.close()
        self.worker.close()
        self.groups.close()
        if self.injector is not None:
            self.injector.detach()
        self.watchers.close()
        if self.stage is not None:
            self.stage.close()
        self.job.close()


def _is_failing() -> bool:
    """Whether an exception is on its way out of the script, or has ended it."""
    return sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None


def _traces_of(start: JobStart, settings: Settings) -> Path | None:
    """Return the folder for the traces of this start of the job; None: none are written.

    A child of `fft run` gets its folder from there. Other processes look for it themselves, so that
    a second job never writes between the traces of the first.
    """
    root = settings.trace_dir
    if root is None or "FFT_GROUP" in os.environ:
        return root
    try:
        return folder_of(root, start.url.rpartition("/")[2])
    except OSError as error:
        if is_disk_full(error):  # training does not depend on its trace
            return root
        raise
