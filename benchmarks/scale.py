"""The growth of the protocol's costs with the job: calibrate, run the model, write table and plot.

    python -m benchmarks.scale --calibrate            measure the real store, once; --check: again
    python -m benchmarks.scale [--design NAME] [--groups 2,5,10] [--start 2,5] [--quick]
    python -m benchmarks.scale --render               table and plot from the stored results

It writes `calibration.json`, one file of results for each design, and `scale.svg` to ``--out``, and
the tables to the page beside it. It measures and models, and asserts nothing. The store is served
by a separate process on loopback. See docs/scale.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.scale_model.costs import (
    DESIGNS,
    Costs,
    Design,
    Handling,
    handling_from,
    prices_from,
)
from benchmarks.scale_model.job import LargeJob, Node, Phase, event_kind
from benchmarks.scale_report import render
from fft.bus.tcpserver import host_store
from fft.bus.tcpstore import PAUSE_S
from fft.engine.calls import Call
from fft.messages.protocol import BusMessage, Decision, Event, Peer, decode, encode
from fft.protocol.load import load_spec
from fft.protocol.participant import Outcome
from fft.protocol.state import Local
from fft.trace.writer import TraceWriter

SPEC = load_spec("hsdp")
PHASES = ("step", "rollback", "kill")
_CLIENTS = 8
_VOTERS = 32
"""Number of voters of the step that checks the prices."""
_LIMIT = timedelta(seconds=30)

# --- the real store ---------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Serve a store in this process: send its port, then its processor time at each request."""
    store, port = host_store()
    pipe.send(port)
    while pipe.recv() != "end":
        pipe.send(time.process_time())
    del store


class Probe:
    """Clients of one real store, and the processor time of the store's process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._port = pipe.recv()
        self.clients = [self.client() for _ in range(_CLIENTS)]

    def client(self) -> Any:
        """Return one more connection."""
        return dist.TCPStore(  # type: ignore[attr-defined]  # torch's own stubs leave it out
            "127.0.0.1", self._port, None, False, _LIMIT, wait_for_workers=False
        )

    def spent(self) -> float:
        """Return the seconds of processor time of the store's process."""
        self._pipe.send("spent")
        return float(self._pipe.recv())

    def cost(self, rounds: int, operation: Callable[[Any, int, int], object]) -> float:
        """Return the store's microseconds for each of many operations of all clients at once."""

        def work(me: int) -> None:
            for number in range(rounds):
                operation(self.clients[me], me, number)

        before = self.spent()
        with ThreadPoolExecutor(_CLIENTS) as pool:
            list(pool.map(work, range(_CLIENTS)))
        self.clients[0].add("settled", 1)  # all requests without an answer are served by now
        return (self.spent() - before) / (rounds * _CLIENTS) * 1e6

    def listening(self, listeners: int, messages: int, size: int) -> float:
        """Return the microseconds for one listener to receive one broadcast, without the
        writing."""
        stores = [self.client() for _ in range(listeners)]
        heard = [threading.Semaphore(0) for _ in stores]

        def listen(me: int) -> None:
            for number in range(messages):
                stores[me].multi_get([f"m{listeners}/{size}/{number}", "settled"])
                heard[me].release()

        return self._spread(listen, stores, heard, messages, f"m{listeners}/{size}", size, True)

    def waiting(self, listeners: int, messages: int, size: int) -> float:
        """Return the microseconds for one listener to wait for and take one message of its
        inbox."""
        stores = [self.client() for _ in range(listeners)]
        heard = [threading.Semaphore(0) for _ in stores]

        def listen(me: int) -> None:
            taken = 0
            while taken < messages:
                try:
                    stores[me].queue_pop(f"i{me}", False)
                except dist.QueueEmptyError:
                    stores[me].wait([f"i{me}"])
                    continue
                taken += 1
                heard[me].release()

        return self._spread(listen, stores, heard, messages, "i", size, False)

    def step(self, listeners: int, steps: int, name: str) -> float:
        """Return the microseconds for one step: all vote, the last reads and decides, all receive
        it.

        The requests equal those of `fft.bus.tcpstore`; the voters share the clients.
        """
        stores = [self.client() for _ in range(listeners)]
        heard = [threading.Semaphore(0) for _ in stores]
        each = listeners // _CLIENTS
        start = threading.Barrier(_CLIENTS)

        def listen(me: int) -> None:
            for number in range(steps):
                stores[me].multi_get([f"d{name}/{number}", "settled"])
                heard[me].release()

        def vote(me: int) -> None:
            store = self.clients[me]
            for number in range(steps):
                start.wait(30)
                for _ in range(each):
                    store.append(f"ballot{name}{number}", "y" * 110)
                    if store.add(f"count{name}{number}", 1) == listeners:
                        decide(store, number)
                if me == 0:
                    for one in heard:
                        one.acquire(timeout=30)

        def decide(store: Any, number: int) -> None:
            store.compare_set(f"ballot{name}{number}", "?", "?")
            store.compare_set(f"head{name}", str(number - 1) if number else "", str(number))
            store.add("ring", 1)
            store.compare_set(f"d{name}/{number}", "", "x" * 300)
            store.delete_key(f"d{name}/{number - 1024}")
            store.add("ring", 0)

        threads = [threading.Thread(target=listen, args=(i,)) for i in range(listeners)]
        for thread in threads:
            thread.start()
        before = self.spent()
        with ThreadPoolExecutor(_CLIENTS) as pool:
            list(pool.map(vote, range(_CLIENTS)))
        for thread in threads:
            thread.join(30)
        return (self.spent() - before) / steps * 1e6

    def _spread(
        self,
        listen: Callable[[int], None],
        stores: list[Any],
        heard: list[threading.Semaphore],
        messages: int,
        name: str,
        size: int,
        shared: bool,
    ) -> float:
        threads = [threading.Thread(target=listen, args=(i,)) for i in range(len(stores))]
        for thread in threads:
            thread.start()
        before, writer = self.spent(), self.clients[0]
        for number in range(messages):
            if shared:
                writer.set(f"{name}/{number}", b"x" * size)
            else:
                for me in range(len(stores)):
                    writer.queue_push(f"{name}{me}", b"x" * size)
            for each in heard:
                if not each.acquire(timeout=30):
                    raise RuntimeError("a message was not heard within 30 s")
        for thread in threads:
            thread.join(30)
        return (self.spent() - before) / (messages * len(stores)) * 1e6


def measure(probe: Probe) -> dict[str, Any]:
    """Measure the prices of `benchmarks.scale_model.costs.Prices`, in microseconds."""
    small, large = b"x" * 300, b"x" * 300_000
    probe.clients[0].set("settled", "0")
    probe.clients[0].set("large", large)
    cost = probe.cost

    def swap(value: bytes, at: str) -> Callable[[Any, int, int], object]:
        return lambda c, me, k: c.compare_set(f"{at}{me}", value if k else b"", value)

    reading = cost(2000, lambda c, me, k: c.compare_set("none", b"?", b"?"))
    byte_out = (cost(400, lambda c, me, k: c.compare_set("large", b"?", b"?")) - reading) / 300_000
    swapping = cost(4000, swap(small, "s"))
    thrice = cost(300, swap(large, "l"))
    byte_in = max(0.0, (thrice - swapping - 299_700 * byte_out) / 599_400)
    known = 600 * byte_in + 300 * byte_out
    adding = cost(4000, lambda c, me, k: c.add(f"n{me}", 1))

    def paced() -> int:
        time.sleep(0.0005)
        return 0

    # In a job, requests without an answer come one by one from many clients. Sent without a pause,
    # they would reach the store in bunches, which cost much less; a vote does come together with
    # its count.
    voting = cost(4000, lambda c, me, k: (c.append(f"a{me}", "y" * 100), c.add(f"n{me}", 1)))
    pushing = cost(1000, lambda c, me, k: (c.queue_push(f"q{me}", small), paced()))
    setting = cost(1000, lambda c, me, k: (c.set(f"s{me}", small), paced()))
    prices = {
        "add": adding,
        "append": voting - adding - 100 * byte_in,
        "compare_set": swapping - known,
        "delete": cost(4000, lambda c, me, k: c.delete_key(f"s{me}")),
        "set": setting - 300 * byte_in,
        "push": pushing - 300 * byte_in,
        "pop": cost(1000, lambda c, me, k: c.queue_pop(f"q{me}", False)) - 300 * byte_out,
        "hear": statistics.median(probe.listening(n, 200, 300) for n in (16, 32, 64))
        - 300 * byte_out,
    }
    prices["wait_pop"] = probe.waiting(32, 200, 300) - prices["push"] - 300 * (byte_in + byte_out)
    trips = []
    for _ in range(3000):
        start = time.perf_counter()
        probe.clients[0].add("trips", 1)
        trips.append((time.perf_counter() - start) * 1e6)
    return {
        "operation_us": {k: round(max(0.1, v), 2) for k, v in sorted(prices.items())},
        "byte_in_us": round(byte_in, 6),
        "byte_out_us": round(byte_out, 6),
        "hop_us": round((statistics.median(trips) - adding) / 2, 1),
    }


@contextmanager
def real_store() -> Iterator[Probe]:
    """Yield a store in its own process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,))
    server.start()
    try:
        yield Probe(here)
    finally:
        here.send("end")
        server.join(10)


def calibrate(out: Path) -> None:
    """Measure a real store and write `calibration.json`."""
    with real_store() as probe:
        found = [measure(probe) for _ in range(3)]
    middle: dict[str, Any] = {
        key: statistics.median(one[key] for one in found)
        for key in ("byte_in_us", "byte_out_us", "hop_us")
    }
    middle["operation_us"] = {
        kind: statistics.median(one["operation_us"][kind] for one in found)
        for kind in found[0]["operation_us"]
    }
    middle["looks_per_second"] = round(2 / sum(PAUSE_S), 1)
    middle["what"] = (
        "processor time of a TCPStore server's process for each operation, 8 clients at once, "
        "median of three rounds; hop: half of a round trip over loopback, less the server's part"
    )
    middle["where"] = f"torch {torch.__version__}, Python {platform.python_version()}"
    write(out / "calibration.json", middle)


def check(out: Path) -> None:
    """Measure a whole step at a real store, and compare with the same requests by the prices."""
    calibration = json.loads((out / "calibration.json").read_text())
    prices = prices_from(calibration)
    with real_store() as probe:
        probe.clients[0].set("settled", "0")
        real = statistics.median(probe.step(_VOTERS, 200, name) for name in "abcde")
    one = {"append": _VOTERS, "add": _VOTERS + 2, "compare_set": 3, "delete": 1, "hear": _VOTERS}
    sizes = _VOTERS * 110 * (prices.byte_in + prices.byte_out) + _VOTERS * 300 * prices.byte_out
    modelled = sum(prices.of(kind) * number for kind, number in one.items()) + sizes
    calibration["check"] = {
        "participants": _VOTERS,
        "measured_us": round(real),
        "modelled_us": round(modelled * 1e6),
    }
    write(out / "calibration.json", calibration)


# --- the real engine --------------------------------------------------------------------------


class MeteredNode(Node):
    """A participant that measures what each event costs the real engine, trace and codec."""

    job: Metered
    _kind = ""
    """Kind of the event that is being handled."""
    _took = 0.0

    def outcome(self, before: Local, after: Local, event: Event, out: Outcome, now: float) -> None:
        super().outcome(before, after, event, out, now)
        self.job.trace.outcome(before, after, event, out, now)
        self._kind = event_kind(event)
        small = not (isinstance(event, Decision) and event.record and event.record.members)
        if isinstance(event, BusMessage) and small:
            start = time.thread_time()
            payload = encode(event)
            self._took -= time.thread_time() - start  # only its receipt belongs to the event
            decode(payload)

    def _advance(self, go_on: Callable[..., Call | None], *given: object) -> None:
        start = time.thread_time()
        super()._advance(go_on, *given)
        self._took += time.thread_time() - start
        if self.call is None:
            if self._kind:
                self.job.spent.setdefault(self._kind, []).append(self._took)
            self._kind, self._took = "", 0.0


class Metered(LargeJob):
    """A job of metered participants."""

    node = MeteredNode

    def __init__(self, design: Design, costs: Costs, groups: int, trace: TraceWriter) -> None:
        self.trace = trace
        self.spent: dict[str, list[float]] = {}
        super().__init__(SPEC, design, costs, groups)
        self.spent.clear()  # of the first epoch


def measure_handling(design: Design, costs: Costs, sizes: list[int]) -> dict[str, list[float]]:
    """Return kind of event → [microseconds, microseconds for each participant of the job]."""
    points: dict[str, list[tuple[int, float]]] = {}
    for groups in sizes:
        with tempfile.TemporaryDirectory() as directory:
            trace = TraceWriter(Path(directory), Peer("0", 0, 1))
            job = Metered(design, costs, groups, trace)
            participants = len(job.nodes)
            for phase in ("step", "step", "rollback", "step", "kill"):
                getattr(job, phase)()
            trace.close()
        for kind, taken in job.spent.items():
            points.setdefault(kind, []).append((participants, statistics.fmean(taken) * 1e6))
    lines = {kind: line(found) for kind, found in points.items()}
    lines["other"] = [max(base for base, _ in lines.values()), 0.0]
    return {kind: [round(a, 1), round(b, 4)] for kind, (a, b) in sorted(lines.items())}


def line(points: list[tuple[int, float]]) -> list[float]:
    """Return [base, slope] of the least-squares line through the points, neither below 0."""
    if len(points) < 2:
        return [points[0][1], 0.0]
    slope, _ = statistics.linear_regression(*zip(*points, strict=True))
    slope = max(0.0, slope)
    return [max(0.0, statistics.fmean(y - slope * x for x, y in points)), slope]


# --- runs -------------------------------------------------------------------------------------


def scenario(design: Design, costs: Costs, groups: int, phases: str) -> list[Phase]:
    """Run the phases of one job, and print each as it ends."""
    job = LargeJob(SPEC, design, costs, groups, formed=not phases.startswith("start"))
    found = []
    for name in phases.split():
        began = time.monotonic()
        phase: Phase = getattr(job, name)()
        found.append(phase)
        print(
            f"{design.name:8} {groups:6} x {job.ranks}  {name:9} {phase.total():9} requests  "
            f"store {phase.busy * 1e3:10.1f} ms  span {phase.span * 1e3:10.1f} ms  "
            f"({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    return found


def run(design: Design, given: argparse.Namespace) -> None:
    """Run the design at all sizes and write its results after each."""
    out: Path = given.out
    prices = prices_from(json.loads((out / "calibration.json").read_text()))
    guess = Costs(prices, Handling({"other": (1e-4, 0.0)}))
    handling = measure_handling(design, guess, given.meter)
    costs = Costs(prices, handling_from(handling))
    done: list[dict[str, Any]] = []
    data = {"design": design.name, "label": given.label, "ranks": 8, "handling_us": handling}
    for many in given.groups:
        # The second step, as the store then holds what it holds in the long run.
        names = "step step"
        if many <= given.largest_rollback:
            names += " rollback"
        if many <= given.largest_kill:
            names += " step kill"
        found = scenario(design, costs, many, names)
        done += [phase.to_json() for phase in found[1:3] + found[4:]]
        write(out / f"{design.name}.json", {**data, "phases": done})
    for many in given.start:
        done += [scenario(design, costs, many, "start")[0].to_json()]
        write(out / f"{design.name}.json", {**data, "phases": done})


def write(path: Path, data: dict[str, Any]) -> None:
    """Write one JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def numbers(text: str) -> list[int]:
    """Parse ``2,5,10`` to [2, 5, 10]; an empty text to an empty list."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Run the requested actions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibrate", action="store_true", help="measure the real store")
    parser.add_argument("--check", action="store_true", help="hold the prices against a real step")
    parser.add_argument(
        "--design", action="append", choices=sorted(DESIGNS), help="default: shipped"
    )
    parser.add_argument("--groups", type=numbers, default=[2, 5, 10, 25, 100])
    parser.add_argument("--start", type=numbers, default=[2, 5, 10], help="sizes that start, too")
    parser.add_argument("--largest-kill", type=int, default=100, help="groups; none lost above")
    parser.add_argument("--largest-rollback", type=int, default=1000, help="groups; none above")
    parser.add_argument("--meter", type=numbers, default=[4, 10, 20], help="sizes timed")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute in all")
    parser.add_argument("--label", default="", help="the commit of the engine")
    parser.add_argument("--render", action="store_true", help="only table and plot")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "scale")
    given = parser.parse_args()
    if given.calibrate:
        calibrate(given.out)
    if given.calibrate or given.check:
        check(given.out)
    elif not given.render:
        if not (given.out / "calibration.json").exists():
            sys.exit(f"no {given.out}/calibration.json; run with --calibrate first")
        if given.quick:
            given.groups, given.start, given.meter = [2, 4, 8], [2], [2, 4, 8]
        gc.disable()  # objects live as long as their job, so collecting cycles would be wasted time
        for name in given.design or ["shipped"]:
            run(DESIGNS[name], given)
    if not given.calibrate and not given.check:
        render(given.out)


if __name__ == "__main__":
    main()
