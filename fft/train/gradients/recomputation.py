"""Compute every n-th step twice before its commit, and compare the gradients of each rank.

A wrong gradient that goes into a reduction becomes part of the average of all replicas, which then
agree on it. So a rank takes fingerprints of its gradients before they are reduced. In a step that
is due, all ranks roll the first attempt back, which restores the parameters and the random states,
and compute the same batch again. A rank whose fingerprints differ votes NO. It is accused if the
difference is in a gradient that depends on no other rank. The comparison requires deterministic
kernels.

After an attempt whose reduced gradients differed between replicas, each rank also compares the next
attempts with one another, and its vote contains the result. Of two replicas, the wrong one is that
which cannot repeat its result while the other one can.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fft.errors import ConfigError, FftError, GradientsNotReproducible
from fft.messages.effects import StartTxn
from fft.train.state.fingerprint import fingerprint

_MAX_COMPUTATIONS = 8
"""Number of computations of a step. If no two of them agree, the step function counts as not
deterministic."""
_BY_SCRIPT = "by the script"


class Recompute(FftError):
    """The step is computed again, to compare its gradients. This is not a failure."""


@dataclass(slots=True)
class _Attempt:
    """The reductions of one attempt, in their order."""

    key: tuple[int, int | None, int, tuple[str, ...]]
    """Step, slice, number of participants, and members. Attempts with equal keys are comparable."""
    layouts: list[str] = field(default_factory=list)
    fingerprints: list[str] = field(default_factory=list)
    """Fingerprints of the reduced tensors before their reductions."""
    own: int = 0
    """Number of reductions before the first one that may depend on other ranks."""
    is_whole: bool = False
    """Whether the step function has ended, so that no reduction is missing."""


@dataclass(frozen=True, slots=True)
class _Voted:
    """The gradients of an attempt in which this rank has voted YES."""

    key: tuple[int, int | None, int, tuple[str, ...]] | None
    inputs: _Attempt | None
    """None if their fingerprints were not taken."""
    result: str
    """Fingerprint of the reduced gradients."""


class Recomputation:
    """The comparison of the attempts of one rank. Main thread only.

    Args:
        every: Steps between two recomputed steps; 0 disables recomputation.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.is_supported = False
        """Whether all ranks of the job take each step together."""
        self._is_repeated = False
        """Whether the next attempt is compared with the one before, where replicas differed."""
        self._key: tuple[int, int | None, int, tuple[str, ...]] | None = None
        self._voted: _Voted | None = None
        """The last attempt in which this rank has voted YES."""
        self._inputs: _Attempt | None = None
        """The open attempt, once its step function has ended, if it is compared."""
        self._is_due = False
        """Whether the step of the open attempt is computed twice."""
        self._attempt: _Attempt | None = None
        """The open attempt, if its fingerprints are taken."""
        self._is_own = True
        """Whether the open attempt has used no result of a reduction yet."""
        self._earlier: list[_Attempt] = []
        """The attempts at the same step before the open one."""

    def repeat(self) -> None:
        """Compare the next attempt with the one before, in which replicas differed."""
        self._is_repeated = self.is_supported

    def begin(self, plan: StartTxn) -> None:
        """Begin an attempt. An attempt that is still open was cut short by a rollback."""
        self._is_due = bool(self._every) and plan.step % self._every == 0
        if not self._is_repeated:
            self._voted = None
        self._is_repeated = False
        self._key = key = (plan.step, plan.slice, plan.participants, plan.members)
        ended, self._attempt, self._is_own = self._attempt, None, True
        self._inputs = None
        if plan.index is None or not (self._is_due or self._voted):
            self._earlier.clear()
            return
        self._attempt = _Attempt(key)
        self._earlier += [] if ended is None else [ended]
        self._earlier = [each for each in self._earlier if each.key == self._attempt.key]

    def before_reduction(self, bucket: torch.Tensor, layout: str) -> None:
        """Take the fingerprint of gradients that are about to be reduced.

        Raises:
            ConfigError: The step is due, and the kernels of their device are not deterministic.
        """
        if self._attempt is None:
            return
        if bucket.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            if not self._is_due:
                self._attempt = None
                return
            raise ConfigError(
                f"ManagerConfig(recompute_every={self._every}) on a {bucket.device.type} device: "
                "expected deterministic kernels, which would give the same gradients twice; call "
                "torch.use_deterministic_algorithms(True), or leave recompute_every out"
            )
        self._attempt.layouts.append(layout)
        self._attempt.fingerprints.append(fingerprint([bucket]))
        self._attempt.own += self._is_own

    def before_reduction_by_script(self, tensor: torch.Tensor) -> None:
        """Take the fingerprint of a tensor that the script reduces.

        It may depend on results of earlier reductions.
        """
        self.results_used()
        self.before_reduction(tensor, _BY_SCRIPT)

    def results_used(self) -> None:
        """Mark all further gradients of this attempt as possibly dependent on other ranks."""
        self._is_own = False

    def compare(self) -> None:
        """Compare the open attempt with those before it, if its step is due.

        One equal attempt is enough, so an earlier attempt with a transient fault does no harm.

        Raises:
            Recompute: There is no attempt to compare with, or the only gradients that differ may
                depend on other ranks.
            GradientsNotReproducible: No earlier attempt is equal, because of this rank.
        """
        now, self._attempt = self._attempt, None
        if now is None or not now.fingerprints:
            return
        earlier, now.is_whole = list(self._earlier), True
        self._inputs = now
        self._earlier.append(now)
        if self._is_due:
            self._judge(now, earlier)

    def _judge(self, now: _Attempt, earlier: list[_Attempt]) -> None:
        """Raise as `compare` unless ``now`` equals one of the ``earlier`` attempts."""
        alike = [each for each in earlier if each.layouts == now.layouts]
        if any(each.fingerprints == now.fingerprints for each in alike):
            return
        whole = sum(each.is_whole for each in earlier)
        if whole and not alike:
            raise GradientsNotReproducible(
                "two computations of the same batch reduced different tensors on this rank"
            )
        wrong = min((_differing(each, now) for each in alike), default=0)
        if wrong:
            raise GradientsNotReproducible(
                f"two computations of the same batch gave different gradients in {wrong} of "
                f"{now.own} buckets of this rank"
            )
        if whole + 1 >= _MAX_COMPUTATIONS:
            raise GradientsNotReproducible(
                f"{whole + 1} computations of the same batch gave different gradients, which use "
                "results of reductions, such as a mean over the groups"
            )
        raise Recompute("the step is computed again, to compare its gradients")

    def repeats(self, result: str | None) -> bool | None:
        """Return whether this rank got the same gradients as in the attempt before.

        Called once for each vote.

        Args:
            result: Fingerprint of the reduced gradients, if it was taken.

        Returns:
            False if its gradients differ, before their reduction or after it. None if those of the
            attempt before are not known. They are known from the third attempt on: replicas differ
            in the first one, and the second one takes fingerprints before the reduction.
        """
        before, inputs = self._voted, self._inputs
        self._voted = None if result is None else _Voted(self._key, inputs, result)
        old = None if before is None or before.key != self._key else before.inputs
        if before is None or old is None or inputs is None or result is None:
            return None
        is_equal = (old.layouts, old.fingerprints) == (inputs.layouts, inputs.fingerprints)
        return is_equal and result == before.result


def _differing(one: _Attempt, other: _Attempt) -> int:
    """Return the number of reductions that differ and depend on no other rank."""
    pairs = zip(one.fingerprints[: one.own], other.fingerprints[: other.own], strict=False)
    return sum(a != b for a, b in pairs)
