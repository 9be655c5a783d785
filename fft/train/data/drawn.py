"""What one attempt at a step takes of the data, and what there is to say of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fft.util.errors import FftError

NO_PASSES = "are for data that have passes: give transactions() an fft.CursorLoader"
ALONE = (
    "are for groups that step together: each of these reads a part of the data of its own, and no "
    "step is the last of a pass; count txn.step, the synchronisations"
)
"""Why there is no pass to speak of."""


@dataclass(frozen=True, slots=True)
class Passes:
    """How many passes over the data are over ``before`` a txn, and ``after`` its commit."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """The input of one attempt."""

    batch: Any
    """A copy: the body may do with it what it likes."""
    is_last: bool
    """There are no items for another txn of all groups."""
    waited_ms: float
    """For the input of this step, by all attempts at it so far; the copy included."""
    slice: int | None
    """Number of the slice of the data that it is a part of; None: it does not count."""
    item: int
    """Number of the item of the data."""
    counted: Passes | str = NO_PASSES
    """Passes of the loader; or why there are none."""
    digest: str | None = None
    """Digest of the data that all ranks must draw alike; None: it cannot be compared."""
    shard: str = ""
    """Name of the shard that the data are drawn from; empty: all ranks draw the same data."""

    ids: list[int] | list[str] | None = None
    """Ids of the samples, for the audit; None: they are not known."""
    consumed: float | None = None
    """Fraction of the data that is consumed with this txn; None: they have no known end."""

    @property
    def progress(self) -> float:
        """`consumed`. Raises FftError if there is none."""
        if self.consumed is None:
            raise FftError(
                "txn.progress is for data with an end that all groups share: give transactions() a "
                "list, an fft.CursorLoader with passes=, or an fft.StreamLoader with items="
            )
        return self.consumed

    @property
    def passes(self) -> Passes:
        """Raises FftError: the data have none."""
        if isinstance(self.counted, str):
            raise FftError(f"txn.ends_pass and txn.passes {self.counted}")
        return self.counted

    def in_words(self, step: int, peer: object) -> str:
        """Which batch it is, for who looks for what was wrong with it; ``step``: of its txn."""
        where = f"in the txn of step {step}, on {peer}"
        if self.slice is None:
            return f"{where}, with a batch that does not count"
        return f"{where}, with slice {self.slice} of the data (item {self.item})"
