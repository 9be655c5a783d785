"""The choice of the checkpoint that a job begins with; unusable ones are logged, never guessed."""

from __future__ import annotations

import logging

from fft.durable.checkpoints import Checkpoints
from fft.durable.manifest import Manifest, name_of
from fft.errors import CheckpointError

logger = logging.getLogger(__name__)


def choose(checkpoints: Checkpoints, resume: bool | int) -> Manifest | None:
    """Return the checkpoint to begin with, or None to begin from the start.

    Args:
        resume: As in `fft.durable.plan.Checkpointing`.

    Raises:
        CheckpointError: Checkpoints exist but ``resume`` is False, none of them can be used, or the
            store cannot be read.
        DamagedCheckpoint: The checkpoint of the requested step does not exist or is damaged.
    """
    url = checkpoints.store.url
    try:
        if resume is False:
            _refuse_used(checkpoints)
            return None
        if resume is not True:
            return checkpoints.manifest(resume)
        manifest, problems = checkpoints.newest()
        _name_leftovers(checkpoints, manifest)
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


def _name_leftovers(checkpoints: Checkpoints, manifest: Manifest | None) -> None:
    """Log that a killed process left the chosen checkpoint unpublished, or only unfinished ones."""
    if manifest is None:
        if left := [entry.name for entry in checkpoints.found() if entry.step is None]:
            names = ", ".join(left)
            logger.warning("%s has only what was never finished: %s", checkpoints.store.url, names)
    elif (name := checkpoints.directory(manifest)) != name_of(manifest.step):
        logger.warning(
            "the checkpoint of step %d is in %s: whole, but cut off before it got its name",
            manifest.step,
            name,
        )


def _refuse_used(checkpoints: Checkpoints) -> None:
    """Raise CheckpointError if checkpoints exist: a new job must not mix its own with them."""
    steps = [entry.name for entry in checkpoints.found() if entry.step is not None]
    if steps:
        raise CheckpointError(
            f"{checkpoints.store.url} has checkpoints already (the newest: {steps[-1]}): go on "
            "from them by --resume (resume=True), or name another place for those of a new job"
        )
