"""The costs of the operations of each bus: their latency, and the server's time for each.

Run: python benchmarks/bus_ops.py [--rounds N] [--seconds S] [--json FILE]. It only measures, and
asserts nothing. The tcp bus is served by a separate process. Its cost per operation is its own CPU
time, which does not depend on how many cores are left for the clients; operations per second do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fft.bus import ErrorBus, Subscription, open_bus, serve_tcp

SPAWN = multiprocessing.get_context("spawn")
BALLOTS = (2, 4, 16, 64)
CLIENTS = (1, 2, 4, 8)
LISTENERS = (1, 4, 16, 64)
SIZES = (300, 30_000, 300_000)
BURST = 200
"""Broadcasts in one burst: well below the ring, so that no listener is overrun."""
LISTENERS_A_PROCESS = 16
LIMIT_S = 120.0


# --- other processes ------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Serve a bus; answer every message with the CPU seconds used so far; end at "end"."""
    with serve_tcp() as server:
        pipe.send(server.url)
        while pipe.recv() != "end":
            pipe.send(time.process_time())


def hammer(pipe: Connection, url: str, seconds: float) -> None:
    """Prepare each requested operation; at the next message repeat it for `seconds` and send the
    count."""
    with open_bus(url) as bus:
        while (operation := pipe.recv()) != "end":
            act = OPERATIONS[operation](bus)
            act()
            pipe.send("ready")
            pipe.recv()
            count, end = 0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                act()
                count += 1
            pipe.send(count)


def hear(pipe: Connection, url: str, listeners: int, inbox: str | None) -> None:
    """Listen `listeners` times; for each number received, wait until all listeners have so many
    messages."""
    changed = threading.Condition()
    heard = [0] * listeners

    def hearing(me: int) -> Callable[[bytes], None]:
        def on_message(payload: bytes) -> None:
            with changed:
                heard[me] += 1
                changed.notify()

        return on_message

    def lost(error: Exception) -> None:
        print(error, file=sys.stderr)

    with open_bus(url) as bus:
        for me in range(listeners):
            if inbox is None:
                bus.subscribe(hearing(me), lost)
            else:
                bus.listen(inbox, hearing(me), lost)
        pipe.send("ready")
        while (count := pipe.recv()) != "end":
            with changed:
                done = changed.wait_for(lambda count=count: min(heard) >= count, LIMIT_S)
            pipe.send(done)


def _number(bus: ErrorBus) -> Callable[[], object]:
    return lambda: bus.next_number("counter")


def _reading(size: int) -> Callable[[ErrorBus], Callable[[], object]]:
    def prepare(bus: ErrorBus) -> Callable[[], object]:
        bus.write(f"value{size}", b"x" * size)
        return lambda: bus.read(f"value{size}")

    return prepare


def _writing(size: int) -> Callable[[ErrorBus], Callable[[], object]]:
    def prepare(bus: ErrorBus) -> Callable[[], object]:
        value = b"x" * size
        return lambda: bus.write(f"value{size}", value)

    return prepare


def _losing(bus: ErrorBus) -> Callable[[], object]:
    bus.compare_set("register", None, b"v" * 300)
    return lambda: bus.compare_set("register", b"w" * 300, b"u" * 300)


OPERATIONS: dict[str, Callable[[ErrorBus], Callable[[], object]]] = {
    "add": _number,
    "compare_set 300 B": _losing,
    **{f"read {size} B": _reading(size) for size in SIZES},
    **{f"write {size} B": _writing(size) for size in SIZES},
}


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Yield a pipe to a process that runs `target`; the message "end" ends it."""
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=target, args=(there, *arguments))
    child.start()
    try:
        yield here
    finally:
        here.send("end")
        child.join(10)


def answer(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_S):
        raise RuntimeError(f"no answer from a process within {LIMIT_S} s")
    return pipe.recv()


def cpu(server: Connection) -> float:
    server.send("cpu")
    return float(answer(server))


# --- latency --------------------------------------------------------------------------------


def timed(rounds: int, operation: Callable[[int], object]) -> list[float]:
    taken = []
    for number in range(rounds):
        start = time.perf_counter()
        operation(number)
        taken.append(time.perf_counter() - start)
    return taken


def until_heard(
    rounds: int,
    start_listening: Callable[[Callable[[bytes], None]], Subscription],
    send: Callable[[], None],
) -> list[float]:
    heard = threading.Event()
    at = [0.0]

    def hear(payload: bytes) -> None:
        at[0] = time.perf_counter()
        heard.set()

    taken = []
    subscription = start_listening(hear)
    for _ in range(rounds):
        heard.clear()
        start = time.perf_counter()
        send()
        if not heard.wait(10):
            raise RuntimeError("a message was not heard within 10 s")
        taken.append(at[0] - start)
    subscription.close()
    return taken


def ballot(clients: list[ErrorBus], rounds: int) -> list[float]:
    """Measure from the common start until the last voter holds all votes."""
    taken = []
    start = threading.Barrier(len(clients))
    began = [0.0] * len(clients)
    ended = [0.0] * len(clients)

    def vote(me: int) -> None:
        for number in range(rounds):
            start.wait(10)
            began[me], ended[me] = time.perf_counter(), 0.0
            if clients[me].ballot(f"ballot{number}", "t", b"y" * 100, len(clients)) is not None:
                ended[me] = time.perf_counter()
            start.wait(10)
            if me == 0:
                taken.append(min(end for end in ended if end) - min(began))
                clients[0].delete(f"ballot{number}")

    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(vote, range(len(clients))))
    return taken


def lost(error: Exception) -> None:
    print(error, file=sys.stderr)


def latencies(url: str, rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []

    def show(name: str, seconds: list[float]) -> None:
        ordered = sorted(value * 1e6 for value in seconds)
        p50, p99 = statistics.median(ordered), ordered[int(len(ordered) * 0.99)]
        scheme = url.partition(":")[0]
        rows.append({"bus": scheme, "operation": name, "p50_us": p50, "p99_us": p99})
        print(f"{scheme:7} {name:22} {p50:8.0f} {p99:8.0f}", flush=True)

    clients = [open_bus(url) for _ in range(max(BALLOTS))]
    a, b = clients[0], clients[1]
    message = b"x" * 300
    heard = until_heard(rounds, lambda on: b.subscribe(on, lost), lambda: a.broadcast(message))
    show("broadcast -> heard", heard)
    heard = until_heard(rounds, lambda on: b.listen("i", on, lost), lambda: a.send("i", message))
    show("send -> heard", heard)
    held: list[bytes | None] = [None]

    def extend(number: int) -> None:
        held[0] = a.compare_set("register", held[0], b"%d" % number)

    show("compare_set", timed(rounds, extend))
    show("read", timed(rounds, lambda number: b.read("register")))
    show("next_number", timed(rounds, lambda number: a.next_number("counter")))
    for voters in BALLOTS:
        show(f"ballot of {voters}", ballot(clients[:voters], max(20, rounds * 2 // voters)))
    for client in clients:
        client.close()
    return rows


# --- the one server at saturation -----------------------------------------------------------


def saturation(
    server: Connection, pipes: list[Connection], operation: str, seconds: float
) -> dict[str, object]:
    for pipe in pipes:
        pipe.send(operation)
    for pipe in pipes:
        answer(pipe)
    before = cpu(server)
    for pipe in pipes:
        pipe.send("go")
    count = sum(answer(pipe) for pipe in pipes)
    used = cpu(server) - before
    row = {
        "operation": operation,
        "clients": len(pipes),
        "per_s": count / seconds,
        "server_cpu_us": used / count * 1e6,
        "server_busy": used / seconds,
    }
    print(
        f"{operation:18} {len(pipes):8} {row['per_s']:10.0f} {row['server_cpu_us']:10.1f}"
        f" {row['server_busy']:8.0%}",
        flush=True,
    )
    return row


@contextmanager
def several(calls: list[tuple[Any, ...]]) -> Iterator[list[Connection]]:
    """Run several processes at once."""
    if not calls:
        yield []
        return
    with process(*calls[0]) as first, several(calls[1:]) as rest:
        yield [first, *rest]


def deliveries(
    server: Connection, url: str, listeners: int, inbox: str | None, rounds: int
) -> dict[str, object]:
    """Measure bursts of 300 bytes to listeners in several processes: the server's time for each."""
    shares = [
        min(LISTENERS_A_PROCESS, listeners - done)
        for done in range(0, listeners, LISTENERS_A_PROCESS)
    ]
    with several([(hear, url, share, inbox) for share in shares]) as pipes, open_bus(url) as bus:
        for pipe in pipes:
            answer(pipe)
        before, start = cpu(server), time.perf_counter()
        for number in range(rounds):
            for _ in range(BURST):
                bus.broadcast(b"x" * 300) if inbox is None else bus.send(inbox, b"x" * 300)
            for pipe in pipes:
                pipe.send((number + 1) * BURST)
            if False in [answer(pipe) for pipe in pipes]:
                raise RuntimeError("a burst was not heard")
        used, wall = cpu(server) - before, time.perf_counter() - start
    count = rounds * BURST
    row = {
        "operation": "broadcast 300 B" if inbox is None else "send 300 B",
        "listeners": listeners,
        "server_cpu_us": used / count * 1e6,
        "server_cpu_us_each": used / count / listeners * 1e6,
        "wall_us": wall / count * 1e6,
    }
    print(
        f"{row['operation']:18} {listeners:8} {row['server_cpu_us']:10.1f}"
        f" {row['server_cpu_us_each']:10.1f} {row['wall_us']:10.1f}",
        flush=True,
    )
    return row


def slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return (constant, factor) of the least-squares line through `points`."""
    fitted = statistics.linear_regression(*zip(*points, strict=True))
    return fitted.intercept, fitted.slope


def model(saturated: list[dict[str, Any]], delivered: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures that a latency model needs, in microseconds of the server's time."""
    # The largest number of clients comes last
    busiest = {r["operation"]: r["server_cpu_us"] for r in saturated}
    reads = [(float(size), busiest[f"read {size} B"]) for size in SIZES]
    writes = [(float(size), busiest[f"write {size} B"]) for size in SIZES]
    heard = [(r["listeners"], r["server_cpu_us"]) for r in delivered if r["listeners"] > 1]
    fixed, each = slope(heard)
    inbox = next(r for r in delivered if r["operation"] == "send 300 B")
    return {
        "add_us": busiest["add"],
        "compare_set_us": busiest["compare_set 300 B"],
        "read_us": busiest["read 300 B"],
        "write_us": busiest["write 300 B"],
        "read_us_per_kB": slope(reads)[1] * 1000,
        "write_us_per_kB": slope(writes)[1] * 1000,
        "broadcast_us": fixed,
        "broadcast_us_per_listener": each,
        "send_and_take_us": inbox["server_cpu_us"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000, help="of each latency")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each saturation")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    print(f"{'bus':7} {'operation':22} {'p50 us':>8} {'p99 us':>8}")
    rows = latencies("memory://bench", options.rounds)
    with process(serve) as server:
        url = answer(server)
        rows += latencies(url, options.rounds)
        print(f"\n{'at saturation':18} {'clients':>8} {'per s':>10} {'cpu us':>10} {'busy':>8}")
        with several([(hammer, url, options.seconds)] * max(CLIENTS)) as pipes:
            saturated = [
                saturation(server, pipes[:clients], operation, options.seconds)
                for operation in OPERATIONS
                for clients in CLIENTS
            ]
        print(
            f"\n{'heard by all':18} {'hearers':>8} {'cpu us':>10} {'each us':>10} {'wall us':>10}"
        )
        rounds = max(1, options.rounds // 400)
        delivered = [deliveries(server, url, 1, "inbox", rounds)]
        delivered += [deliveries(server, url, count, None, rounds) for count in LISTENERS]
    figures = model(saturated, delivered)
    print("\nthe server's time: " + ", ".join(f"{k} {v:.2f}" for k, v in figures.items()))
    if options.json:
        found = {
            "latency": rows,
            "saturation": saturated,
            "delivery": delivered,
            "model": figures,
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
