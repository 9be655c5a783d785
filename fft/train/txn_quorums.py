"""The lighthouse's quorum for a txn, where it is in charge of who is in. Main thread."""

from __future__ import annotations

from fft.engine.loop import Engine
from fft.messages.effects import StartTxn
from fft.train.lighthouse import Quorums
from fft.util.errors import NoQuorum


def ask_for(plan: StartTxn, quorums: Quorums, engine: Engine, most_failures: int) -> None:
    """Have the quorum of a txn asked for, that must name its members.

    Raises NoQuorum: the lighthouse has not answered so often in a row.
    """
    if (epoch := engine.local.epoch) is None:
        return
    if quorums.failures >= most_failures:
        raise NoQuorum(
            f"torchft's lighthouse did not answer in {quorums.failures} attempts in a row "
            f"({quorums.reason}); start it, or train with membership='register'"
        )
    members = {entry.group: entry.ranks[0].inc for entry in epoch.members}
    quorums.begin(plan.token, plan.step, members)
    if engine.superseded():  # rolled back before there was anything to end
        quorums.end()
