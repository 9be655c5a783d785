"""Recomputation: every n-th step is computed twice before its commit, and compared.

A wrong gradient that goes into a reduction becomes part of the average of all replicas, which then
agree on it. So a rank takes fingerprints of its gradients before they are reduced. In a step that
is due, all ranks roll the first attempt back, which restores the parameters and the random states,
and compute the same batch again. A rank whose fingerprints differ votes NO and is accused. The
comparison requires deterministic kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fft.errors import ConfigError, FftError, GradientsNotReproducible
from fft.messages.effects import StartTxn
from fft.train.state.fingerprint import fingerprint


class Recompute(FftError):
    """The step is computed again, to compare its gradients. It is no failure."""


class _Attempt(NamedTuple):
    key: tuple[int, int | None, int, tuple[str, ...]]
    """Step, slice, number of participants and members: attempts with equal keys are comparable."""
    layouts: list[str]
    """Layouts of the buckets, in the order of their reductions."""
    fingerprints: list[str]
    """Fingerprints of the buckets before their reductions."""


class Recomputation:
    """The comparison of the attempts of one rank. Main thread only.

    Args:
        every: Steps between two recomputed steps; 0 disables recomputation.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._attempt: _Attempt | None = None
        """The open attempt, if its step is due."""
        self._earlier: list[_Attempt] = []
        """The attempts before it at the same step."""

    def refuse(self, spec: str, steps_together: bool) -> None:
        """Raise ConfigError if it is enabled in a job whose ranks do not step together."""
        if self._every and not steps_together:
            raise ConfigError(
                f"ManagerConfig(recompute_every={self._every}) with spec={spec!r}: only supported "
                "where all ranks take each step together (hsdp, ddp, pipeline); leave it out"
            )

    def begin(self, plan: StartTxn) -> None:
        """Begin an attempt."""
        is_due = self._every and plan.index is not None and plan.step % self._every == 0
        ended, self._attempt = self._attempt, None
        if not is_due:
            self._earlier.clear()
            return
        key = (plan.step, plan.slice, plan.participants, plan.members)
        self._attempt = _Attempt(key, [], [])
        self._earlier = [
            each for each in (*self._earlier, ended) if each is not None and each.key == key
        ]

    def note(self, bucket: torch.Tensor, layout: str) -> None:
        """Take the fingerprint of a bucket that is about to be reduced.

        Raises ConfigError if the kernels of its device are not deterministic.
        """
        if self._attempt is None:
            return
        if bucket.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            raise ConfigError(
                f"ManagerConfig(recompute_every={self._every}) on a {bucket.device.type} device: "
                "expected deterministic kernels, which would give the same gradients twice; call "
                "torch.use_deterministic_algorithms(True), or leave recompute_every out"
            )
        self._attempt.layouts.append(layout)
        self._attempt.fingerprints.append(fingerprint([bucket]))

    def compare(self) -> None:
        """Compare the open attempt with those before it, if its step is due.

        One equal attempt is enough: an attempt with a transient fault is outvoted. An attempt that
        a rollback has cut short is not compared.

        Raises:
            Recompute: There is no attempt to compare with.
            GradientsNotReproducible: All attempts differ.
        """
        now = self._attempt
        if now is None or not now.fingerprints:
            return
        whole = [each for each in self._earlier if each.layouts == now.layouts]
        if not whole:
            raise Recompute("the step is computed again, to compare its gradients")
        wrong = min(
            sum(a != b for a, b in zip(now.fingerprints, each.fingerprints, strict=True))
            for each in whole
        )
        if wrong:
            raise GradientsNotReproducible(
                f"two computations of the same batch gave different gradients in {wrong} of "
                f"{len(now.layouts)} buckets of this rank"
            )
