"""How the loop of a stage ends, where each stage steps by itself. Main thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fft.train.participation import Participation

if TYPE_CHECKING:
    from fft.train.rank_state import RankState

logger = logging.getLogger(__name__)


def end_stage(job: Participation, state: RankState, is_over: bool, is_still_in: bool) -> None:
    """This rank takes no more txns; the next stage may need what it has given.

    Args:
        is_over: nothing is left to do for this stage.
        is_still_in: no commit has said so.
    """
    if is_over:
        state.at_end()
    if is_still_in:
        job.leave()  # until it hears that, the next stage is held
    if state.output is not None:
        state.output.finish(leaves=not is_over)


def has_ended_with_its_data(job: Participation, step: int, max_steps: int | None) -> bool:
    """Whether a loop that has come to its end did so because the stage before has; says so if it
    had more to do."""
    local = job.local
    others = () if local is None else local.elsewhere
    before = [other for other in others if not other.ahead and other.has_ended]
    if local is None or not before:
        return False
    if max_steps is not None and step < max_steps:
        logger.warning(
            "stage %r has ended after %d slices of the data, and this one, which follows it, has "
            "ended with them: at step %d, before max_steps=%d",
            before[0].scope,
            before[0].cursor,
            step,
            max_steps,
        )
    return job.peer not in local.leaving
