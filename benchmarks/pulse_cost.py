"""The cost of the heartbeat for a main thread: its writes, and the slowdown of a busy loop by
probes.

Run ``python benchmarks/pulse_cost.py``. It only measures, and asserts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fft.health.detectors.trainer import Pulse, PulseReader
from fft.health.monitor_client import MainThreadProbe

ROUNDS = 200_000
LOOP_S = 2.0


def cost(call: Callable[[], object]) -> float:
    """Return the nanoseconds of one call; the best of five rounds, as noise only makes it
    slower."""
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter_ns()
        for _ in range(ROUNDS):
            call()
        best = min(best, (time.perf_counter_ns() - begun) / ROUNDS)
    return best


def loops() -> int:
    """Return the iterations of a loop of bytecodes in `LOOP_S` seconds of this thread's own
    time."""
    count, until = 0, time.thread_time() + LOOP_S
    while time.thread_time() < until:
        count += 1
    return count


def main() -> None:
    """Print one figure per line."""
    pulse = Pulse(time.monotonic)
    reader = PulseReader(pulse.fd)

    def waits() -> None:
        with pulse.waiting:
            pass

    def txn() -> None:
        pulse.begin(1)
        pulse.end(committed=True)

    for name, call in {
        "ping": pulse.ping,
        "begin and end of a txn": txn,
        "begin and end of a wait": waits,
        "a reading (other process)": reader.read,
    }.items():
        print(f"{name:28} {cost(call):8.0f} ns")
    alone = loops()
    for interval_s in (0.1, 0.01):
        moves = MainThreadProbe(pulse, interval_s)
        print(f"moves every {interval_s:g} s slow a loop by {100 * (1 - loops() / alone):.2f} %")
        moves.close()
    reader.close()
    pulse.close()


if __name__ == "__main__":
    main()
