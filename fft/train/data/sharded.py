"""Loaders over a shard of the data: each group, or each rank, draws from its own shard.

Every rank counts the slices that each group has consumed; the counts are part of the job's state.
Only the processes of a group have the loader of its shard. So they publish its state on the bus
from time to time, with the count that it belongs to. A restarted process loads the newest published
state, and draws again the items that its group has consumed since.

This module runs on the main thread, between two step functions.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fft.errors import BusError, DataError
from fft.messages.effects import StartTxn
from fft.train.data.batch_copy import copied
from fft.train.data.retries import is_ahead, retried
from fft.train.data.source import Due, Identify, Sharded, StreamSource, named
from fft.train.data.step_input import SHARDED, StepInput
from fft.train.state.plain_state import plain

logger = logging.getLogger(__name__)

PUBLISH_S = 1.0
"""Minimum time between two publications of a state, in seconds."""
LONGEST_STATE = 4 * 1024 * 1024
"""Maximum size of a state that is published, in bytes."""


@dataclass(frozen=True)
class ShardStateStore:
    """Access to the published states of the shards on the bus.

    Attributes:
        read: Returns the bytes published under a name, or None.
        write: Publishes bytes under a name.
    """

    read: Callable[[str], bytes | None]
    write: Callable[[str, bytes], None]


class ShardedSource:
    """The loader of one shard, and the counts of all shards.

    It is opened, exported, loaded and closed like a `DataSource`, and drawn from by `draw`.

    Args:
        loader: A loader of the batches of this shard, with ``state_dict`` and ``load_state_dict``.
        kind: ``"group"`` if the ranks of a group all draw the same shard and take an item each;
            ``"rank"`` if each item of a group's step comes from a shard of its own, which the ranks
            that work on this item all draw.
        group: The replica group of this process.
        rank: Number of the item of this rank among those of its group.
        ranks: Number of different items that the ranks of a group take.
        shelf: The place where states are published.
        identify: The function for `StreamSource`.
    """

    in_any_order = False

    def __init__(
        self,
        loader: Any,
        kind: Sharded,
        group: str,
        rank: int,
        ranks: int,
        shelf: ShardStateStore,
        identify: Identify | None = None,
    ) -> None:
        self.kind, self.shard = kind, group if kind == "group" else f"{group}/{rank}"
        self.positions: dict[str, int] = {}
        """Number of slices that each group has consumed."""
        self._loader, self._group, self._shelf = loader, group, shelf
        self._rank, self._takers = rank, ranks if kind == "group" else 1
        """Number of this rank, and number of items in a slice."""
        self._ranks = ranks
        self._publishes = kind == "rank" or rank == 0
        self._published_at = -PUBLISH_S
        self._checkpoint_groups: set[str] = set()
        """Groups with a shard in the checkpoint that this job resumes from."""
        self._stream = StreamSource(loader, identify, f" of shard {self.shard}")
        self.alive: Callable[[], object] = lambda: None
        """Called while a failed item waits for its next attempt."""

    @property
    def _first(self) -> int:
        """Number, within the shard, of the first item that is not consumed."""
        return self.positions.get(self._group, 0) * self._takers

    def draw(self, plan: StartTxn) -> tuple[Any, bool, int, str | None] | None:
        """Draw the batch for ``plan``.

        Returns:
            The batch, whether it is the last, the number of its slice in the shard, and a digest of
            the items that must be equal on all ranks of the shard; None if the shard has ended.
        """
        first, count = self._first, self._takers
        self._refuse_missing(plan)
        self._publish()
        number = first + (self._rank if count > 1 else 0)

        def take(ahead: bool = True) -> tuple[Any, bool, int, str | None] | None:
            is_last = ahead and not self._stream.holds(first, 2 * count)
            if (is_last or not ahead) and not self._stream.holds(first, count):
                self._publish_end(first // count)
                return None
            if is_last:
                self._publish_end(first // count + 1)
            batch = copied(self._stream.take(Due(first, number, count)))
            return batch, is_last, first // count, self._stream.fingerprint(first, count)

        try:
            return retried(take, self._some_item, self.alive)
        except Exception as error:
            if not is_ahead(error, first + count):
                raise
            return take(ahead=False)  # the error comes in the txn in which the item is due

    @property
    def _some_item(self) -> str:
        return f"an item of shard {self.shard}"

    def ids(self, batch: Any) -> list[int] | list[str] | None:
        """Return the sample ids in ``batch`` for the trace, or None if they are not known."""
        return self._stream.ids(batch)

    def committed(self, plan: StartTxn) -> None:
        """Count the commit of ``plan``, which consumes a slice of each contributing group."""
        for group in plan.members:
            self.positions.setdefault(group, 0)
        for group in plan.contributors:
            self.positions[group] += 1

    def _publish(self) -> None:
        """Publish the state of this shard, at most once in `PUBLISH_S`."""
        now = time.monotonic()
        if not self._publishes or now - self._published_at < PUBLISH_S:
            return
        buffer = io.BytesIO()
        torch.save(plain(self._own(), f"state of {named(self._loader)}"), buffer)
        self._published_at = now
        if buffer.tell() <= LONGEST_STATE:
            try:
                self._shelf.write(_key(self.shard), buffer.getvalue())
            except BusError as error:  # the engine detects and handles a lost bus
                logger.warning("the state of shard %s was not published: %s", self.shard, error)
            return
        self._publishes = False
        logger.warning(
            "the state of %s has %d bytes, and at most %d are published: a process that replaces "
            "this one draws the items of its shard again from the beginning",
            named(self._loader),
            buffer.tell(),
            LONGEST_STATE,
        )

    def _publish_end(self, slices: int) -> None:
        """Publish the number of slices of this shard, which is known now."""
        try:
            self._shelf.write(_end_key(self.shard), b"%d" % slices)
        except BusError as error:
            logger.warning("the end of shard %s was not published: %s", self.shard, error)

    def _is_complete(self, group: str) -> bool:
        """Return whether the whole shard of ``group`` was consumed, as far as was published."""
        shard = group if self.kind == "group" else f"{group}/{self._rank}"
        try:
            end = self._shelf.read(_end_key(shard))
        except BusError as error:
            logger.warning("the end of shard %s cannot be seen: %s", shard, error)
            return False
        return end is not None and int(end) <= self.positions[group]

    def _own(self) -> dict[str, Any]:
        """Return the state of this shard."""
        position = self.positions.get(self._group, 0)
        return {"position": position, "state": self._stream.export(self._first)}

    def _published(self, shard: str) -> dict[str, Any] | None:
        """Return the newest published state of ``shard``, or None."""
        if (found := self._shelf.read(_key(shard))) is None:
            return None
        state: dict[str, Any] = torch.load(io.BytesIO(found), weights_only=True)
        return state

    # --- the interface of DataSource ---

    def open(self) -> None:
        """Do nothing: the first item is drawn when its txn begins."""

    def export(self, first: int) -> Any:
        """Return the counts of all shards, and the state of this one."""
        return self._header() | {"states": {self.shard: self._own()}}

    def export_all(self) -> Any:
        """Return the counts and the newest published states of all shards, for a checkpoint."""
        states = {self.shard: self._own()}
        for group in self.positions:
            shard = group if self.kind == "group" else f"{group}/{self._rank}"
            if shard not in states and (found := self._published(shard)) is not None:
                states[shard] = found
        return self._header() | {"states": states}

    def _header(self) -> dict[str, Any]:
        return {
            "sharded": self.kind,
            "ranks": self._ranks,
            "positions": dict(self.positions),
        }

    def load(self, state: Any, first: int) -> None:
        """Load the counts, and continue this shard at the count of its group."""
        self._refuse_other(state)
        self.positions = dict(state["positions"])
        start = self._stream.start
        # this process can reach the position by reading further
        if start is not None and start <= self._first:
            self._skip()
        else:
            self._restore(state["states"].get(self.shard))

    def resume(self, state: Any, first: int) -> None:
        """Load the state of a checkpoint; the groups must be those that wrote it."""
        self._refuse_other(state)
        if (groups := set(state["positions"])) and self._group not in groups:
            raise DataError(
                f"the checkpoint has the shards of the groups {', '.join(sorted(groups))}, but "
                f"this is group {self._group!r}, whose shard would overlap with theirs. {_RESHARD}"
            )
        self.load(state, first)
        self._checkpoint_groups = groups

    def _refuse_missing(self, plan: StartTxn) -> None:
        expected, self._checkpoint_groups = self._checkpoint_groups, set()
        if missing := sorted(expected - set(plan.members)):
            raise DataError(
                f"the checkpoint has the shards of the groups {', '.join(sorted(expected))}, and "
                f"this job begins without {', '.join(missing)}, whose data would never be trained. "
                f"{_RESHARD}"
            )

    def _restore(self, given: dict[str, Any] | None) -> None:
        """Continue at the count of this group from the newest state that is not beyond it."""
        position = self.positions.get(self._group, 0)
        states = [s for s in (given, self._published(self.shard)) if s is not None]
        fitting = [s for s in states if s["position"] <= position]
        begun = max(fitting, key=lambda s: int(s["position"]), default=None)
        if begun is not None:
            self._stream.load(begun["state"], begun["position"] * self._takers)
        elif self._stream.start is not None:
            raise DataError(
                f"shard {self.shard}: expected a published state up to slice {position}, found "
                f"none, and {named(self._loader)} has already been read in this process; restart "
                "the group, which then reads its shard from the beginning"
            )
        at = begun["position"] if begun is not None else 0
        self._skip()
        logger.info("shard %s continues at slice %d, from slice %d", self.shard, position, at)

    def _skip(self) -> None:
        """Draw and drop the items that the group has consumed."""
        skip = partial(self._stream.skip, self._first)
        if not retried(skip, self._some_item, self.alive):
            raise DataError(
                f"shard {self.shard}: expected at least {self._first} items, which its group has "
                f"consumed, but {named(self._loader)} ends before; pass the same data as before"
            )

    def _refuse_other(self, state: Any) -> None:
        """Raise DataError if ``state`` belongs to data that are divided differently."""
        is_sharded = isinstance(state, dict) and "sharded" in state
        theirs = f"sharded={state['sharded']!r}" if is_sharded else "a loader that is not sharded"
        if not is_sharded or state["sharded"] != self.kind:
            raise DataError(
                f"the loader has sharded={self.kind!r}, and the state comes from "
                f"{theirs}; pass the loader and the sharded= of the job that wrote the state"
            )
        if state["ranks"] != self._ranks:
            raise DataError(
                f"the state comes from groups that take {state['ranks']} items in a step, and "
                f"this group takes {self._ranks}, so the shards differ. {_RESHARD}"
            )

    def close(self) -> None:
        """Warn if some shards were consumed less than others: their data may lack training."""
        most = max(self.positions.values(), default=0)
        behind = sorted(group for group, slices in self.positions.items() if slices < most)
        if not behind:
            return
        told = ", ".join(f"{g}: {n}" for g, n in sorted(self.positions.items()))
        complete = [group for group in behind if self._is_complete(group)]
        if complete:
            logger.warning(
                "the shards have unequal lengths (slices by group: %s): group %s had no more data, "
                "and the others trained without it; divide the data into equal shards",
                *(told, ", ".join(complete)),
            )
        if away := [group for group in behind if group not in complete]:
            logger.warning(
                "the groups have consumed different parts of their shards (slices by group: %s): "
                "group %s was absent for some steps, and no other group trained its shard "
                "meanwhile; to train the rest, resume from a checkpoint with all groups",
                *(told, ", ".join(away)),
            )


class ShardedInputs:
    """The inputs of one rank from its shard, txn by txn."""

    def __init__(self, source: ShardedSource) -> None:
        self._source = source
        self._step, self._waited_s = -1, 0.0

    @property
    def alive(self) -> Callable[[], object]:
        """Called while a failed item waits for its next attempt."""
        return self._source.alive

    @alive.setter
    def alive(self, alive: Callable[[], object]) -> None:
        self._source.alive = alive

    def draw(self, plan: StartTxn) -> StepInput | None:
        """Return the input for ``plan``, or None if the shard has ended; not in a step function."""
        began, source = time.monotonic(), self._source
        try:
            if (taken := source.draw(plan)) is None:
                return None
        except Exception as error:
            error.add_note(
                f"while the batch of step {plan.step} was drawn from shard {source.shard}"
            )
            raise
        batch, is_last, number, digest = taken
        if plan.step != self._step:
            self._step, self._waited_s = plan.step, 0.0
        self._waited_s += time.monotonic() - began
        waited_ms = self._waited_s * 1e3
        return StepInput(
            batch,
            is_last,
            waited_ms,
            plan.slice,
            number,
            SHARDED,
            digest,
            source.shard,
            source.ids(batch),
        )


_RESHARD = (
    "The shards of a loader cannot be redistributed: resume with the groups and ranks that wrote "
    "the state, or use fft.StreamLoader or fft.CursorLoader, which divide the data among any "
    "number"
)


def _key(shard: str) -> str:
    return f"shard/{shard}"


def _end_key(shard: str) -> str:
    return f"shard-end/{shard}"
