"""The cost of the protocol without network: machine, core and trace, per transition and per step.

It prints medians and 99th percentiles in microseconds, and asserts nothing. Run with fft installed:
``python benchmarks/transition_cost.py [steps]``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fft.messages.protocol import Event
from fft.protocol.load import load_spec
from fft.protocol.participant import Outcome
from fft.protocol.state import Local
from fft.protocol.table import LookupTable, Table, Turn
from fft.trace.writer import TraceWriter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from cluster import Cluster, Node

SPEC = load_spec("hsdp")


def times(function: Callable[[], object], rounds: int) -> list[float]:
    """Return the duration of each of ``rounds`` calls, in microseconds."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function()
        found.append((time.perf_counter() - begin) * 1e6)
    return found


def show(what: str, found: list[float]) -> None:
    """Print one line of the table."""
    p99 = sorted(found)[int(len(found) * 0.99)]
    print(f"{what:<52}{statistics.median(found):>9.1f}{p99:>9.1f}")


class Recorder:
    """A recorder that times ``handle`` and keeps its results for the trace."""

    def __init__(self) -> None:
        self.handled: list[tuple[Local, Local, Event, Outcome]] = []

    def observe(self, node: Node, before: Local, event: Event, out: Outcome) -> None:
        """Record an event; an observer of the cluster."""
        self.handled.append((before, node.local, event, out))


def main() -> None:
    """Measure and print."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    print(f"{'µs':<52}{'median':>9}{'p99':>9}")
    training = next(name for name, state in SPEC.states.items() if state.role == "training")
    for name, table in (("library", Table(SPEC)), ("look-up", LookupTable(SPEC))):
        taken = times(lambda t=table: t.take(Turn(training, lambda _: True), "prepared"), 20_000)
        show(f"machine: one row taken, {name}", taken)

    recorder = Recorder()
    cluster = Cluster(SPEC, recorder.observe)
    for group in ("0", "1"):
        for rank in (0, 1):
            cluster.add(group, rank, 2, store=group, expected_groups=2)
    cluster.step()
    recorder.handled.clear()
    per_step = times(cluster.step, steps)
    show("core: one committed step, per participant of 4", [t / 4 for t in per_step])

    rows = [h for h in recorder.handled if h[3].verdict == "row"]
    node = next(iter(cluster.nodes.values()))
    core = [
        times(lambda b=before, e=event: node.participant.handle(b, e, 0.0), 1)[0]
        for before, _, event, _ in rows
    ]
    show("core: one event handled (table, guards, effects)", core)

    with tempfile.TemporaryDirectory() as directory:
        writer = TraceWriter(Path(directory), node.peer)
        traced = [
            times(lambda h=h: writer.outcome(h[0], h[1], h[2], h[3], 0.0), 1)[0] for h in rows
        ]
        writer.close()
        lines = sum(len(h[3].steps) for h in rows)
        size = sum(p.stat().st_size for p in Path(directory).iterdir())
    show("trace: one event written (JSON, chain digest, write)", traced)
    print(
        f"rows per step and participant: {lines / steps / 4:.1f}; {size / lines:.0f} bytes a line"
    )


if __name__ == "__main__":
    main()
