"""Which checkpoint a job begins with. Names those that cannot be used; never guesses."""

from __future__ import annotations

import logging

from fft.durable.checkpoints import Checkpoints
from fft.durable.manifest import Manifest
from fft.durable.plan import CheckpointError

logger = logging.getLogger(__name__)


def choose(checkpoints: Checkpoints, resume: bool | int) -> Manifest | None:
    """The checkpoint to begin with, as `fft.durable.plan.Checkpointing` says; None: with none.

    Raises:
        CheckpointError: there are some, and it was not said to go on from them; or there is none
            that can be used.
        DamagedCheckpoint: the one that was asked for.
    """
    url = checkpoints.store.url
    try:
        if resume is False:
            _refuse_used(checkpoints)
            return None
        if resume is not True:
            return checkpoints.manifest(resume)
        manifest, problems = checkpoints.newest()
    except OSError as error:
        raise CheckpointError(f"the checkpoints at {url} cannot be read: {error}") from error
    for problem in problems:
        logger.error("a checkpoint is not used: %s", problem)
    if manifest is None and problems:
        raise CheckpointError(
            f"no checkpoint at {url} can be used: {'; '.join(problems)}. To begin anew, name "
            "another place"
        )
    return manifest


def _refuse_used(checkpoints: Checkpoints) -> None:
    """Raise CheckpointError if there are checkpoints: a new job must not go on among them."""
    steps = [entry.name for entry in checkpoints.found() if entry.step is not None]
    if steps:
        raise CheckpointError(
            f"{checkpoints.store.url} has checkpoints already (the newest: {steps[-1]}): go on "
            "from them by --resume (resume=True), or name another place for those of a new job"
        )
