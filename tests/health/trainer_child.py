"""A trainer for the monitor's tests: it takes steps until told to continue, then obeys its mode.

``trainer_child.py MODE OUT BUS_URL [SUPERVISOR]``: OUT and SUPERVISOR are descriptors, for the
monitor's lines and for its messages to others. Before it hangs or ends, and when it begins a wait
or a critical section, it prints the time.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time

from fft.health.detectors.trainer import MonitorConfig, Pulse
from fft.health.monitor import MonitorProcess
from fft.health.monitor_client import MainThreadProbe

CONFIG = MonitorConfig(
    max_s=float(os.environ.get("MAX_S", "2.5")), grace_s=0.6, min_s=1.0, interval_s=0.05, term_s=0.2
)
STEP_S = 0.02
WAIT_S = 4.0
"""A time longer than every limit of CONFIG for a main thread that does not wait."""


def step(pulse: Pulse, number: int) -> None:
    pulse.begin(number)
    until = time.monotonic() + STEP_S
    while time.monotonic() < until:
        pass
    pulse.end(committed=True)


def now() -> None:
    print(time.monotonic(), flush=True)


def stop(pulse: Pulse) -> None:
    now()
    os.kill(os.getpid(), signal.SIGSTOP)


def keep_the_lock(pulse: Pulse) -> None:
    """Block in a call that keeps the interpreter lock, ignoring SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    now()
    ctypes.PyDLL(None).sleep(600)


def block(pulse: Pulse) -> None:
    """Block in a call that releases the lock and never returns."""
    now()
    threading.Event().wait(600)


def spin(pulse: Pulse) -> None:
    now()
    while True:
        pass


def wait_then_stop(pulse: Pulse) -> None:
    with pulse.waiting:
        now()
        threading.Event().wait(WAIT_S)
    stop(pulse)


def stop_in_a_wait(pulse: Pulse) -> None:
    with pulse.waiting:
        stop(pulse)


def stop_between_txns(pulse: Pulse) -> None:
    """Stop where a main thread may stay for long, as the next txn has not begun."""
    pulse.end(committed=True)
    stop(pulse)


def stop_in_an_atomic_section(pulse: Pulse) -> None:
    with pulse.atomic:
        stop(pulse)


def save_then_stop(pulse: Pulse) -> None:
    """Keep the lock in a critical section for longer than a step function may, below the
    maximum."""
    with pulse.atomic:
        now()
        ctypes.PyDLL(None).usleep(1_800_000)
    stop(pulse)


def compile_then_stop(pulse: Pulse) -> None:
    """Compute in a child for longer than a step function may stall, below the maximum."""
    now()
    code = "import time; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
    stop(pulse)


def wait_for_an_idle_child(pulse: Pulse) -> None:
    now()
    subprocess.run(["sleep", "10"], check=True)


def die(pulse: Pulse) -> None:
    now()
    os.kill(os.getpid(), signal.SIGKILL)


def die_slowly(pulse: Pulse) -> None:
    """Behave as a killed process with much memory: its main thread is gone, the process is not."""
    exit_one_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]
    threading.Thread(target=threading.Event().wait, args=(600,)).start()
    now()
    ctypes.CDLL(None).syscall(exit_one_thread, 0)


def leave(pulse: Pulse) -> None:
    now()


def main(mode: str, out: str, url: str, supervisor: str = "") -> None:
    pulse = Pulse(time.monotonic)
    moves = MainThreadProbe(pulse, CONFIG.interval_s)
    monitor = MonitorProcess(
        pulse,
        CONFIG,
        group="1",
        rank=2,
        bus_url=url or None,
        supervisor=int(supervisor) if supervisor else None,
        on_line=int(out),
    )
    os.close(int(out))
    number = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        step(pulse, number := number + 1)
    for _ in range(30):  # half a second in which the monitor learns the duration of steps
        step(pulse, number := number + 1)
    pulse.begin(number + 1)
    globals()[mode](pulse)
    monitor.close()
    moves.close()
    pulse.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
