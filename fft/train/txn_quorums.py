"""The lighthouse's quorum for a txn, where it is in charge of who is in. Main thread."""

from __future__ import annotations

import logging
import weakref

from fft.engine.loop import Engine
from fft.errors import BusError, NoLighthouseQuorum
from fft.messages.causes import CauseCode
from fft.messages.effects import StartTxn
from fft.messages.protocol import Fault, Suspect, Token, encode
from fft.train.lighthouse import Quorums
from fft.train.participation import Participation

logger = logging.getLogger(__name__)


def ask_for(plan: StartTxn, quorums: Quorums, engine: Engine, most_failures: int) -> None:
    """Have the quorum of a txn asked for, that must name its members.

    Raises NoLighthouseQuorum: the lighthouse has not answered so often in a row.
    """
    if (epoch := engine.local.epoch) is None:
        return
    if quorums.failures >= most_failures:
        raise NoLighthouseQuorum(
            f"torchft's lighthouse did not answer in {quorums.failures} attempts in a row "
            f"({quorums.reason}); start it, or train with membership='register'"
        )
    members = {entry.group: entry.ranks[0].inc for entry in epoch.members}
    quorums.begin(plan.token, plan.step, members)
    if engine.superseded():  # rolled back before there was anything to end
        quorums.end()


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
            code = CauseCode.NO_LIGHTHOUSE_QUORUM
            job.post(Fault(token, f"NoLighthouseQuorum: {why}", code, "NoLighthouseQuorum"))
