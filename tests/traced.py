"""Jobs of pure participants with traces like those of engines, and the memory that reading
takes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster import Node
from jobs import HSDP, Job

from fft.messages.protocol import (
    Applied,
    Event,
    GroupEntry,
    Healed,
    Peer,
    Prepared,
    Record,
    Standing,
)
from fft.protocol.participant import Outcome
from fft.protocol.state import Local
from fft.trace.format import DIGESTS
from fft.trace.inputs import LOOP, TORCHFT
from fft.trace.writer import TraceWriter, header


class TracedJob(Job):
    """A job of pure participants that writes the traces that engines would write."""

    def __init__(
        self,
        directory: Path,
        groups: int = 2,
        ranks: int = 1,
        *,
        owes: bool | None = None,
        silent: Iterable[str] = (),
        **config: Any,
    ) -> None:
        self.directory = directory
        self.writers: dict[object, TraceWriter] = {}
        self.loops: set[Peer] = set()
        """Participants whose traces contain a training loop."""
        self.clock = 0.0
        self.digest: str | None = None
        self.owes, self.silent = owes, set(silent)
        """Whether headers state that digests are owed, and groups that nevertheless bring none."""
        super().__init__(groups, ranks, **config)

    def post(self, node: Node, event: Event) -> None:
        """Post an event with a digest, if one is given; the users step by a loop of torchft."""
        if isinstance(event, Prepared) and node.peer not in self.loops:
            self.loops.add(node.peer)
            said = {"runs": TORCHFT, "from": list(event.token)}
            self.writers[node.peer].note(LOOP, said, node.local)
        if self.digest is not None and isinstance(event, Prepared | Applied):
            event = replace(event, digest=f"{self.digest} {node.local.token}")
        if self.digest is not None and self.owes and isinstance(event, Healed):
            event = replace(event, digest=f"{self.digest} epoch {event.epoch}")
        if node.peer.group in self.silent and isinstance(event, Prepared | Applied | Healed):
            event = replace(event, digest=None)
        super().post(node, event)

    def _now(self) -> float:
        self.clock += 0.001
        return self.clock

    def add(self, *args: object, cursor: int = 0, batches: int = 0, **config: object) -> Node:
        node = super().add(*args, **config)  # type: ignore[arg-type]
        node.local = replace(node.local, cursor=cursor, batches=batches)
        writer = TraceWriter(self.directory, node.peer, (self._now, self._now))
        more = {} if self.owes is None else {"owes": {DIGESTS: self.owes}}
        writer.write("header", header(HSDP, node.participant.config, node.local, **more))
        self.writers[node.peer] = writer
        return node

    def _observe(self, node: Node, before: Local, event: Event, out: Outcome) -> None:
        super()._observe(node, before, event, out)
        self.writers[node.peer].outcome(before, node.local, event, out, 0.0)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


def a_record(
    n: int,
    kind: str,
    step: int,
    cursor: int = 0,
    members: Iterable[str] = (),
    standing: Iterable[str] = (),
    **more: Any,
) -> Record:
    """Return a record of a head register; members and standing groups are given by their names."""
    entries = tuple(GroupEntry(group, "store", ()) for group in members)
    alone = tuple(Standing(GroupEntry(group, "store", ()), 0, n) for group in standing)
    more = {"epoch": 1, "txn": n, "lineage": "", "batches": cursor, "by": Peer("0", 0, 1), **more}
    place = {"n": n, "kind": kind, "step": step, "cursor": cursor}
    return Record(**place, **more, members=entries, standing=alone)


def peak_of(reads: Callable[[], bool]) -> int:
    """Return the peak memory of ``reads`` in bytes; its result must be true."""
    gc.collect()
    gc.freeze()  # else the time at which cycles are collected depends on the other tests
    tracemalloc.start()
    try:
        assert reads()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.unfreeze()
