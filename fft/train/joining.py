"""How a manager joins its job: by its first txn, so that a checkpoint can be loaded before."""

from __future__ import annotations

import atexit
import logging
import os
import socket
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torchft.manager import REPLICA_ID_KEY, Manager, WorldSizeMode

from fft.bus import ErrorBus
from fft.bus.addresses import joined, reachable, reachable_url
from fft.engine.loop import Engine
from fft.messages.protocol import Peer, Start
from fft.protocol.participant import Participant
from fft.protocol.state import GENESIS, Config, Local
from fft.protocol.table import Table
from fft.protocol.timeouts import timers
from fft.trace.format import DIGESTS
from fft.trace.writer import header
from fft.train.common_settings import common_settings, refuse_other_settings
from fft.train.donors import wait_for_donor
from fft.train.hangs import hung
from fft.train.host import EngineHost
from fft.train.settings import monitor_config
from fft.train.torchft_diloco import refuse_dropping
from fft.util.errors import FftError

if TYPE_CHECKING:
    from fft.train.parts import Parts
    from fft.train.torchft_interface import TorchftInterface

logger = logging.getLogger(__name__)

STORE_KEY = "fft/store"
"""In the store of a replica group: its address, by which other groups reach it."""
_STORE_S = 60.0
"""For rank 0 to publish it: both have been started together, and import torch meanwhile."""
_SHOWN = 5
"""Shapes of parameters that a warning names."""


def identify(manager: Manager, bus: ErrorBus) -> Peer:
    """Who this process is in the job: a new incarnation of its group's rank."""
    # A launcher that reports deaths and asks for drains must mean the group that we call so.
    named = manager._store.get(REPLICA_ID_KEY).decode().split(":")[0]
    group = os.environ.get("FFT_GROUP") or named
    incarnation = bus.next_number(f"inc/{group}/{manager._group_rank}")
    return Peer(group, manager._group_rank, incarnation)


def join(manager: TorchftInterface, parts: Parts) -> Engine:
    """Start the engine of ``manager``, on the thread that trains."""
    job, watchers, settings = parts.job, parts.watchers, parts.settings
    parts.state.resume()
    config = _config(manager, parts)
    if parts.state.step is not None:
        # again, since the models may have been sharded after register()
        parts.state.step.refuse_replaced_parameters()
        parts.groups.refuse_foreign(parts.state.models, parts.state.step.optimizer_tensors())
        if settings.spec.ranks == "shards":
            parts.groups.refuse_unconnected()
    parts.state.refuse_unsendable()
    for function in parts.state.users.values():  # complete by now, unlike at their registration
        refuse_dropping(function)
    for reducer in parts.reductions.reducers:
        reducer.update_layout()
    refuse_other_settings(job.bus, _common_settings(manager, parts, config))
    spec, stage = settings.spec, parts.stage
    if stage is not None:
        spec = stage.spec
    participant = Participant(Table(spec), config)
    local = _initial(manager, parts, participant)
    reforms = job.reforms = _can_reform(parts, config)
    owes = {DIGESTS: parts.state.owes_digests}
    job.trace.write("header", header(spec, config, local, reforms=reforms, owes=owes))
    wait_for_donor(
        job.bus,
        settings.token,
        job.peer,
        parts.limits["quorum"].seconds,
        lambda: parts.leaving.is_asked,
        job.note,
    )
    if parts.checkpointer is not None:
        parts.checkpointer.joined()
    _warn_of_strangers(parts)
    if config.world > 1:
        job.open_group_bus(config.store, settings.token, parts.limits["bus_operation"].seconds)
    config_of_monitor = monitor_config(parts.limits) if settings.monitor else None
    watchers.watch(config_of_monitor, job.peer, settings.bus_url, partial(hung, parts))
    atexit.register(manager._at_exit)
    engine = job.engine = Engine(
        participant,
        local,
        job.bus if stage is None else stage.bus,
        job.trace,
        EngineHost(manager, parts),
        job.group_bus,
        job.bus,
        () if stage is None else stage.others,
    )
    engine.start()
    if parts.inner is not None:
        parts.inner.start(config)
    if parts.quorums is not None:
        parts.quorums.start()
    speed = watchers.report_speed(
        job.bus, job.peer, settings.progress_interval, None if stage is None else stage.name
    )
    job.report_to(speed)
    if parts.groups.shard is not None:
        parts.groups.shard.waiting = speed.waiting
    engine.post(Start())
    parts.leaving.ask()
    return engine


def store_address(manager: Manager, bus_url: str) -> str:
    """Return ``host:port`` of the store of this replica group, for the ranks of all groups.

    Rank 0 decides it and passes it on by the store itself: where the host's name is a loopback
    address on its own host (torchrun, Debian), the ranks of one group would not agree.
    """
    store = manager._store
    if manager._group_rank == 0:
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
    """Return where the state of this rank is served; `Config` refuses what is no text."""
    served = manager._checkpoint_transport.metadata()
    return reachable_url(served, bus_url) if isinstance(served, str) else served


def _config(manager: Manager, parts: Parts) -> Config:
    settings, mode = parts.settings, manager._replica_world_size_mode
    stage = parts.stage
    return Config(
        me=parts.job.peer,
        world=manager._group_world_size if stage is None else 1,
        first_rank=0 if stage is None else stage.rank,
        flow=() if stage is None else stage.flow,
        store=parts.groups.store,
        transport=_transport(manager, settings.bus_url),
        pid=os.getpid(),
        host=socket.gethostname(),
        timeouts=timers(settings.spec, parts.limits),
        min_groups=manager._min_replica_size,
        expected_groups=settings.expected_groups,
        min_reductions=settings.spec.policies.min_reductions,
        leases=settings.spec.is_periodic,
        bound=settings.spec.bound,
        quorum=settings.spec.policies.quorum,
        on_divergence=settings.on_divergence,
        fixed_with_spares=mode == WorldSizeMode.FIXED_WITH_SPARES,
    )


def _common_settings(manager: Manager, parts: Parts, config: Config) -> dict[str, Any]:
    """What this process must have in common with all others of its job."""
    synchronizer = parts.state.synchronizer
    return common_settings(
        parts.settings.spec,
        ranks_of_a_group=manager._group_world_size,
        min_replica_size=config.min_groups,
        world_size_mode=manager._replica_world_size_mode.name,
        on_divergence=config.on_divergence,
        membership=parts.settings.membership,
        **({} if synchronizer is None else synchronizer.plan),
    )


def _initial(manager: Manager, parts: Parts, participant: Participant) -> Local:
    """What this rank begins with: a fresh state, or that of the checkpoint that was loaded."""
    state, step = parts.state, manager._step
    own = f"fresh:{parts.job.peer.group}:{parts.groups.store}"
    fresh = own if manager._init_sync else GENESIS
    if parts.settings.is_successor:  # its weights were built without its group
        fresh = f"fresh:{parts.job.peer}"
    return participant.initial(
        lineage=state.lineage or (fresh if step == 0 else f"step:{step}"),
        step=step,
        cursor=state.cursor,
        batches=manager._batches_committed,
        returned=state.returned,
    )


def _can_reform(parts: Parts, config: Config) -> bool:
    """Whether this group may go on with another process for one that it lost."""
    is_whole = parts.stage is None and parts.inner is None and parts.quorums is None
    return config.world > 1 and is_whole and not config.bound and parts.groups.can_reform


def _warn_of_strangers(parts: Parts) -> None:
    """Parameters that are stepped, but not reduced, make groups differ."""
    reducers = parts.reductions.reducers
    reduced = {id(p) for reducer in reducers for p in reducer.parameters()}
    stepped = [p for p in parts.state.updates.parameters() if p.requires_grad]
    if strangers := [tuple(p.shape) for p in stepped if reduced and id(p) not in reduced]:
        logger.warning(
            "%d parameters of the optimizers are in no model of sync_gradients(), so "
            "their gradients are not averaged across the groups; shapes: %s",
            len(strangers),
            strangers[:_SHOWN],
        )
        told = {"count": len(strangers), "shapes": [list(s) for s in strangers[:_SHOWN]]}
        parts.job.note("not_averaged", told)
    known = {id(p) for p in stepped}
    idle = [p for r in reducers for p in r.parameters() if p.requires_grad and id(p) not in known]
    if idle and stepped:
        shapes = [tuple(p.shape) for p in idle[:_SHOWN]]
        text = "%d parameters of sync_gradients() are in no registered optimizer; shapes: %s"
        logger.warning(text, len(idle), shapes)
