"""Live sets for programs without a training loop: a manager and the process group of its blocks."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torchft.process_group import ProcessGroup, ProcessGroupGloo

from fft.errors import FftError
from fft.messages.identities import Peer
from fft.train.api.manager import ManagerFFT
from fft.train.session.settings import ManagerConfig
from fft.train.step.live import LiveBlock


class LiveSet:
    """The live set of a program without a training loop, as `live_set` returns it.

    Attributes:
        group: Process group over the members of the open block, in the order of their list.
        manager: The manager behind it.
    """

    def __init__(self, manager: ManagerFFT, group: ProcessGroup) -> None:
        self.manager, self.group = manager, group

    @property
    def me(self) -> Peer:
        """The entry of this process in the member lists."""
        return self.manager.me

    def __call__(self) -> LiveBlock:
        """Return a block, for ``with live() as members:``; see ``ManagerFFT.live``."""
        return self.manager._live.block(sys._getframe(1))

    def close(self) -> None:
        """Leave the live set. Idempotent."""
        self.manager.shutdown()

    def __enter__(self) -> LiveSet:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def live_set(
    group: ProcessGroup | None = None,
    *,
    min_members: int = 1,
    timeouts: Mapping[str, float] | None = None,
    config: ManagerConfig | None = None,
) -> LiveSet:
    """Create the live set of a program that ``fft run --groups N script.py`` starts; the process
    joins it at its first block.

    Args:
        group: A process group of torchft that is not configured yet; None means gloo.
        min_members: The smallest number of processes that a block may have.
        timeouts: Timeouts in seconds by name, as for ``ManagerFFT``.
        config: Further settings, as for ``ManagerFFT``.

    Raises:
        FftError: The replica group has several ranks.
    """
    group = ProcessGroupGloo() if group is None else group
    manager = ManagerFFT(
        pg=group,
        load_state_dict=lambda _: None,  # the program keeps its own state
        state_dict=dict,
        min_replica_size=min_members,
        timeouts=timeouts,
        config=config,
    )
    if (ranks := manager._torchft.group_world_size) > 1:
        manager.shutdown()
        raise FftError(
            f"a live set in a replica group of {ranks} ranks: expected 1. Start the program "
            "with `fft run --groups N`, without --ranks"
        )
    return LiveSet(manager, group)
