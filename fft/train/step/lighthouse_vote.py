"""Vote precondition for ``membership="lighthouse"``: a quorum that lists all members."""

from __future__ import annotations

import logging
import weakref
from typing import cast

from fft.bus import BusError
from fft.errors import NoLighthouseQuorum
from fft.messages.causes import CauseCode
from fft.messages.effects import StartTxn
from fft.messages.protocol import Fault, Suspect, Token, encode
from fft.train.session.lighthouse import LighthouseBeacon, QuorumClient
from fft.train.session.participation import Participation
from fft.train.session.rank_context import RankContext
from fft.train.step.step_failures import MAX_FAILURES

logger = logging.getLogger(__name__)


class LighthouseListener:
    """Turns unlisted groups into suspicions, and a missing quorum into a fault of the txn."""

    def __init__(self, job: Participation) -> None:
        self._job = weakref.ref(job)

    def on_missing_groups(self, token: Token, groups: set[str]) -> None:
        job = self._job()
        local = job.local if job is not None else None
        if job is None or local is None or local.token != token or local.epoch is None:
            return
        job.trace.note("lighthouse", {"unnamed": sorted(groups)}, local)
        cause = "the lighthouse's quorum does not list it"
        ranks = [(e.group, r) for e in local.epoch.members if e.group in groups for r in e.ranks]
        try:
            for group, r in ranks:
                word = Suspect(group, r.rank, r.pid, r.host, "lighthouse", cause)
                job.bus.broadcast(encode(word))
        except BusError as error:  # the engine will notice, if it lasts
            logger.warning(
                "could not broadcast the groups that the lighthouse does not list: %s", error
            )

    def on_no_quorum(self, token: Token, why: str) -> None:
        if (job := self._job()) is not None:
            code = CauseCode.NO_LIGHTHOUSE_QUORUM
            job.post(Fault(token, f"NoLighthouseQuorum: {why}", code, "NoLighthouseQuorum"))


class LighthouseVote(QuorumClient):
    """Vote precondition that fails unless a lighthouse quorum lists all members of the epoch."""

    def __init__(self, rank: RankContext) -> None:
        limits, most = rank.limits, rank.settings.config.max_body_failures
        limits_s = limits["quorum_timeout"].seconds, limits["lighthouse_window"].seconds
        beacon, listener = (
            cast("LighthouseBeacon", rank.manager._torchft.manager),
            LighthouseListener(rank.job),
        )
        super().__init__(beacon, rank.job.peer, *limits_s, listener)
        self._job, self._most_failures = rank.job, MAX_FAILURES if most is None else most

    def ask(self, plan: StartTxn) -> None:
        """Request the quorum of the txn that begins.

        Raises:
            NoLighthouseQuorum: the lighthouse did not answer in too many attempts in a row.
        """
        engine = self._job.engine
        if engine is None or (epoch := engine.local.epoch) is None:
            return
        if self.failures >= self._most_failures:
            raise NoLighthouseQuorum(
                f"torchft's lighthouse did not answer in {self.failures} attempts in a row "
                f"({self.reason}); start it, or train with membership='register'"
            )
        members = {entry.group: entry.ranks[0].inc for entry in epoch.members}
        self.begin(plan.token, plan.step, members)
        if engine.superseded():  # rolled back before there was anything to end
            self.end()

    def wait_until_met(self, plan: StartTxn) -> NoLighthouseQuorum | None:
        """Wait for the quorum. Return the error if it did not arrive."""
        why = self.wait(plan.token)
        return None if why is None else NoLighthouseQuorum(why)


def preconditions_of(rank: RankContext) -> list[LighthouseVote]:
    """Return the precondition, if the lighthouse decides and this is the rank that asks it."""
    asks = rank.manager._torchft.group_rank == 0
    decides = rank.settings.config.membership == "lighthouse"
    return [LighthouseVote(rank)] if asks and decides else []
