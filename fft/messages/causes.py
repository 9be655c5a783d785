"""Causes of rollbacks: a code that code acts on, and a text for people. Pure data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from fft.messages.identities import Peer

_MOST_ACCUSED = 32
"""Maximum number of accused participants; more of them are no evidence against any single one."""


class CauseCode(StrEnum):
    """Kinds of causes; docs/reference/causes.md documents each of them."""

    NONE = "none"
    STEP_FAILED = "step_failed"
    COLLECTIVE_FAILED = "collective_failed"
    HANG = "hang"
    UPDATE_FAILED = "update_failed"
    STATE_LOST = "state_lost"
    EPOCH_FAILED = "epoch_failed"
    TOO_FEW_REDUCTIONS = "too_few_reductions"
    DIED = "died"
    SUSPECTED = "suspected"
    LEFT = "left"
    ABSENT = "absent"
    NO_BEGIN = "no_begin"
    NO_DECISION = "no_decision"
    MANIFESTS_DIFFER = "manifests_differ"
    GRADIENT_MISSING = "gradient_missing"
    DATA_DIFFERS = "data_differs"
    BLOCKS_DIFFER = "blocks_differ"
    BLOCK_BESIDE_STEP = "block_beside_step"
    STOPPED = "stopped"
    GRADIENTS_DIFFER = "gradients_differ"
    REPLICAS_DIFFER = "replicas_differ"
    NOT_REPRODUCIBLE = "not_reproducible"
    RECOMPUTED = "recomputed"
    RESULT_REFUSED = "result_refused"
    RESULT_ENDS_JOB = "result_ends_job"
    SKIPPED = "skipped"
    NO_LIGHTHOUSE_QUORUM = "no_lighthouse_quorum"
    SCOPE_RESET = "scope_reset"
    AWAITED = "awaited"

    @property
    def accuses_proposer(self) -> bool:
        """Whether the cause is evidence against the rank that reports it about itself."""
        return self in _OF_THE_PROPOSER

    @property
    def is_counted(self) -> bool:
        """Whether the loops of all ranks count such a rollback, and may end over it."""
        return self in _COUNTED


class LeaveReason(StrEnum):
    """Why a participant, or its group, leaves the job in good order."""

    LAST_STEP = "last_step"
    """No step follows: the job, or this group's part in it, is done."""
    SHARD_ENDED = "shard_ended"
    """Its shard of the data is trained; other groups may have data left."""
    UPSTREAM_ENDED = "upstream_ended"
    """The stage that feeds its own one has ended."""
    DRAINED = "drained"
    """It was asked to leave before its end."""
    SHUT_DOWN = "shut_down"
    """Its script shut it down without a last step, as a loop of torchft ends."""
    LEFT_LOOP = "left_loop"
    """Its script left FFT's own loop before the end, by ``break`` or ``sys.exit()``."""

    @property
    def is_end(self) -> bool:
        """Whether nothing is left to do for the participant."""
        return self in (LeaveReason.LAST_STEP, LeaveReason.SHARD_ENDED, LeaveReason.UPSTREAM_ENDED)


_OF_THE_PROPOSER = frozenset(
    {
        CauseCode.STEP_FAILED,
        CauseCode.HANG,
        CauseCode.UPDATE_FAILED,
        CauseCode.STATE_LOST,
        CauseCode.EPOCH_FAILED,
        CauseCode.TOO_FEW_REDUCTIONS,
        CauseCode.NOT_REPRODUCIBLE,
    }
)
_COUNTED = frozenset(
    {
        CauseCode.MANIFESTS_DIFFER,
        CauseCode.GRADIENT_MISSING,
        CauseCode.DATA_DIFFERS,
        CauseCode.BLOCKS_DIFFER,
        CauseCode.STOPPED,
        CauseCode.GRADIENTS_DIFFER,
        CauseCode.NOT_REPRODUCIBLE,
        CauseCode.RESULT_REFUSED,
        CauseCode.RESULT_ENDS_JOB,
    }
)


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a rollback or a wait, as a participant knows it.

    Attributes:
        code: Its kind; the only part that decisions may depend on, besides ``accused``.
        text: Description for logs, traces and error messages; may be empty.
        accused: Participants that the cause is evidence against; empty if it accuses none.
    """

    code: CauseCode = CauseCode.NONE
    text: str = ""
    accused: tuple[Peer, ...] = ()

    def __post_init__(self) -> None:
        if len(self.accused) > _MOST_ACCUSED:
            object.__setattr__(self, "accused", ())

    @property
    def finding(self) -> str:
        """The text without the name of the participant that reported it."""
        return re.sub(r"^\S+/\d+#\d+: ", "", self.text)

    @classmethod
    def of_own(cls, me: Peer, code: CauseCode, text: str) -> Self:
        """Return a cause that the participant ``me`` reports about itself."""
        return cls(code, text, (me,) if code.accuses_proposer else ())


NO_CAUSE = Cause()
"""No cause is known."""
