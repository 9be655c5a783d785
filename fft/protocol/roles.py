"""What a state is for, whatever a spec calls it. Pure data.

Every state of a spec names one role. Whoever asks where a participant or its main thread stands
(invariants, draining, worker, model, simulator, supervisor) asks for the role, so that a table may
name its states as it likes.
"""

from __future__ import annotations

from typing import Literal

EngineRole = Literal[
    "joining",  # outside every epoch, asks to come in
    "training",  # a txn is open, its body runs
    "voting",  # voted YES, in doubt until the decision is known
    "committing",  # the optimizer step of a COMMIT runs
    "last_commit",  # the same, and this participant leaves with it
    "aborting",  # asks for ABORT, which is not decided
    "rolling_back",  # ABORT is decided, the main thread unwinds
    "healing",  # the next epoch is formed: groups are rebuilt, state is fetched
    "apart",  # a group of the job, outside every epoch: computes alone until it asks to come in
    "leaving",  # out of the epoch by a commit, waits for those who stay
    "terminal",  # out
]

ThreadRole = Literal[
    "idle",  # no txn is open here: takes whatever the engine commands
    "restoring",  # unwinds, and puts back the start of the step
    "connecting",  # builds the groups of an epoch, and fetches the state if need be
    "computing",  # a txn is open, its body runs
    "waiting",  # the body is over: for the decision, or for the rollback
    "applying",  # the update of a COMMIT runs
    "terminal",  # out
]
"""Of the main thread's states."""

Role = Literal[EngineRole, ThreadRole]

COMMITTING: frozenset[Role] = frozenset({"committing", "last_commit"})
"""A COMMIT is decided and not applied yet."""
AT_WORK: frozenset[Role] = frozenset({"training", "voting", "committing"})
"""A member of an epoch that goes on, in one of its txns."""
OUTSIDE: frozenset[Role] = frozenset({"joining", "apart", "leaving"})
"""In no epoch: not yet, not any more, or since the commit just applied."""
