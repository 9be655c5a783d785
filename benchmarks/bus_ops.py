"""What one operation of each bus costs, in microseconds. Measures only; asserts nothing.

Run: python benchmarks/bus_ops.py [rounds]. The tcp bus is served from a process of its own.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from fft.bus import ErrorBus, open_bus, serve_tcp


def serve(pipe: Connection) -> None:
    with serve_tcp() as server:
        pipe.send(server.url)
        pipe.recv()


def show(url: str, name: str, seconds: list[float]) -> None:
    ordered = sorted(value * 1e6 for value in seconds)
    p99 = ordered[int(len(ordered) * 0.99)]
    scheme = url.partition(":")[0]
    print(f"{scheme:7} {name:22} {statistics.median(ordered):8.0f} {p99:8.0f}")


def timed(rounds: int, operation: Callable[[int], object]) -> list[float]:
    taken = []
    for number in range(rounds):
        start = time.perf_counter()
        operation(number)
        taken.append(time.perf_counter() - start)
    return taken


def broadcast_heard(sender: ErrorBus, listener: ErrorBus, rounds: int) -> list[float]:
    heard = threading.Event()
    at = [0.0]

    def hear(payload: bytes) -> None:
        at[0] = time.perf_counter()
        heard.set()

    taken = []
    subscription = listener.subscribe(hear, lambda error: print(error, file=sys.stderr))
    for _ in range(rounds):
        heard.clear()
        start = time.perf_counter()
        sender.broadcast(b"x" * 300)
        if not heard.wait(10):
            raise RuntimeError("a message was not heard within 10 s")
        taken.append(at[0] - start)
    subscription.close()
    return taken


def ballot(clients: list[ErrorBus], rounds: int) -> list[float]:
    """From the common start until the last voter holds all votes."""
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


def measure(url: str, rounds: int) -> None:
    clients = [open_bus(url) for _ in range(4)]
    a, b = clients[0], clients[1]
    show(url, "broadcast -> heard", broadcast_heard(a, b, rounds))
    held: list[bytes | None] = [None]

    def extend(number: int) -> None:
        held[0] = a.compare_set("register", held[0], b"%d" % number)

    show(url, "compare_set", timed(rounds, extend))
    show(url, "read", timed(rounds, lambda number: b.read("register")))
    show(url, "next_number", timed(rounds, lambda number: a.next_number("counter")))
    for voters in (2, 4):
        show(url, f"ballot of {voters}", ballot(clients[:voters], rounds))
    for client in clients:
        client.close()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print(f"{'bus':7} {'operation':22} {'p50 us':>8} {'p99 us':>8}")
    measure("memory://bench", rounds)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,))
    server.start()
    try:
        measure(here.recv(), rounds)
    finally:
        here.send("end")
        server.join(10)


if __name__ == "__main__":
    main()
