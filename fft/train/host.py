"""What threads of FFT's own may do to the manager: the engine, the lighthouse's caller, the exit.

None of them keeps the manager alive.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING

from torchft.manager import Manager

from fft.bus import BusError
from fft.messages.commands import Command
from fft.messages.protocol import Fault, Record, Suspect, Token, encode
from fft.train.participation import Participation
from fft.train.reported import Reported
from fft.util.errors import TxnAborted

if TYPE_CHECKING:
    from fft.train.parts import Parts
    from fft.train.torchft_interface import TorchftInterface

logger = logging.getLogger(__name__)


class EngineHost:
    """What the engine asks of its process; see `fft.engine.loop.Host`."""

    def __init__(self, manager: TorchftInterface, parts: Parts) -> None:
        self._manager, self._parts = weakref.ref(manager), weakref.ref(parts)

    def cancel_futures(self, cause: str) -> None:
        manager, parts = self._manager(), self._parts()
        if manager is None or parts is None:
            return
        if manager._errored is None:
            manager._errored = Reported(TxnAborted(cause))
        parts.reductions.cancel()

    def abort_groups(self, cause: str) -> None:
        if (parts := self._parts()) is not None:
            parts.groups.abort(cause, may_put_off=lambda: _may_meet(parts.job))
            parts.exchange.interrupt()
            if parts.inner is not None:  # perhaps because the engine has failed
                parts.inner.hear_job(cause)

    def members_lost(self) -> None:
        if (parts := self._parts()) is not None and not _may_meet(parts.job):
            parts.groups.abort_if_put_off()

    def interrupt(self, cause: str) -> None:
        if (parts := self._parts()) is None:
            return
        if parts.quorums is not None:
            parts.quorums.end()
        if parts.job.thread.role != "applying":  # the command waits for the end of the update
            parts.watchers.interrupt(cause)
        if parts.inner is not None:
            parts.inner.hear_job(cause)

    def decided(self, record: Record) -> None:
        if (parts := self._parts()) is not None:
            parts.worker.hear(record)

    def command(self, command: Command) -> None:
        if (parts := self._parts()) is not None:
            parts.commands.obey(command)


def _may_meet(job: Participation) -> bool:
    """Whether the ranks of this group may still meet in what the script does between two txns.

    An evaluation there makes collectives of this group alone, and nobody would repeat it. No rank
    of the group has computed anything of the txn that is aborted before all have made those.
    """
    local, me = job.local, job.peer
    if local is None or local.role != "rolling_back" or job.thread.role != "idle":
        return False
    gone = local.dead | local.suspected
    return not any(peer.group == me.group and peer != me for peer in gone)


class LighthouseDoubter:
    """What a lighthouse's quorum, or none, leads to; see `fft.train.lighthouse.Doubter`."""

    def __init__(self, job: Participation) -> None:
        self._job = weakref.ref(job)

    def unnamed(self, token: Token, groups: set[str]) -> None:
        job = self._job()
        local = job.local if job is not None else None
        if job is None or local is None or local.token != token or local.epoch is None:
            return
        job.trace.note("lighthouse", {"unnamed": sorted(groups)}, local)
        cause = "the lighthouse's quorum does not name it"
        ranks = [(e.group, r) for e in local.epoch.members if e.group in groups for r in e.ranks]
        try:
            for group, r in ranks:
                word = Suspect(group, r.rank, r.pid, r.host, "lighthouse", cause)
                job.bus.broadcast(encode(word))
        except BusError as error:  # the engine will notice, if it lasts
            logger.warning("could not say whom the lighthouse does not name: %s", error)

    def failed(self, token: Token, why: str) -> None:
        if (job := self._job()) is not None:
            job.post(Fault(token, f"NoQuorum: {why}", "NoQuorum"))


class ShutDownAtExit:
    """At the exit of a script that has not shut down: torch aborts where its threads still run."""

    def __init__(self, manager: Manager) -> None:
        self._manager = weakref.ref(manager)
        self._pid = os.getpid()

    def __call__(self) -> None:
        manager = self._manager()
        if manager is not None and os.getpid() == self._pid:
            manager.shutdown(wait=False)
