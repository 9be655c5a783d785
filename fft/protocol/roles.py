"""The roles of states: what each state of a spec is for. Pure data.

Every state of a spec names one role. Code that depends on the state of a participant or of its main
thread (invariants, draining, worker, model, simulator, supervisor) checks the role, so a table may
name its states freely.
"""

from __future__ import annotations

from typing import Literal

EngineRole = Literal[
    "joining",  # outside every epoch, asks to join
    "training",  # a txn is open and its step function runs
    "voting",  # voted YES and in doubt until the decision is known
    "committing",  # the optimizer step of a COMMIT runs
    "last_commit",  # as committing, and this participant leaves with the commit
    "aborting",  # has proposed ABORT, which is not decided yet
    "rolling_back",  # ABORT is decided and the main thread unwinds
    "healing",  # the next epoch is being formed; process groups are rebuilt, state is fetched
    "apart",  # local: a group of the job computes outside every epoch until it asks to join
    "leaving",  # left the epoch with a commit, waits until the others have the next epoch
    "terminal",  # out
]

ThreadRole = Literal[
    "idle",  # no txn is open; accepts the next command of the engine
    "restoring",  # unwinds and restores the state at the start of the step
    "connecting",  # builds the process groups of an epoch and fetches the state if needed
    "computing",  # a txn is open and its step function runs
    "waiting",  # the step function has ended; waits for the decision or the rollback
    "applying",  # the update of a COMMIT runs
    "terminal",  # out
]
"""Roles of the main thread's states."""

Role = Literal[EngineRole, ThreadRole]

COMMITTING: frozenset[Role] = frozenset({"committing", "last_commit"})
"""Roles in which a COMMIT is decided and not applied yet."""
AT_WORK: frozenset[Role] = frozenset({"training", "voting", "committing"})
"""Roles of a member in a txn of an epoch that continues."""
OUTSIDE: frozenset[Role] = frozenset({"joining", "apart", "leaving"})
"""Roles outside every epoch: before joining, between epochs, or since the last commit."""
