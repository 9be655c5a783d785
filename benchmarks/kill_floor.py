"""The time from a SIGKILL until it can be noticed: a lower bound of every time after a kill.

``python benchmarks/kill_floor.py [TIMES]`` repeatedly kills a process with torch in it, and prints
the times at which its pidfd, the other end of one of its connections, and the lock that it held
(`fft.health.death_mutex`) showed the end.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

from fft.health.death_mutex import DeathMutex

CHILD = """
import os, socket, sys, time, torch
from fft.health.death_mutex import hold
mine = hold(os.environ["FFT_DEATH_MUTEX_FD"])
there = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
begun = time.monotonic()
while time.monotonic() < begun + 0.3:  # at work, as whoever is killed in a job
    (torch.ones(64, 64) @ torch.ones(64, 64)).sum()
there.sendall(b"x")
there.recv(1)
"""


def kill_one() -> tuple[float, float, float, int]:
    """Return the milliseconds to the pidfd, the connection's end and the lock; and the process's
    MiB."""
    line, woken = DeathMutex(), threading.Event()
    lock: list[float] = []

    def wake() -> None:
        lock.append(time.perf_counter())
        woken.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        env = {**os.environ, "FFT_DEATH_MUTEX_FD": str(line.fd)}
        child = subprocess.Popen([sys.executable, "-c", CHILD, port], env=env, pass_fds=[line.fd])
        try:
            line.watch(wake)
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                begun, pidfd, end, held = _timed(child, connection)
            woken.wait()
            return pidfd, end, (lock[0] - begun) * 1e3, held
        finally:
            child.kill()
            child.wait()
            line.close()


def _timed(
    child: subprocess.Popen[bytes], connection: socket.socket
) -> tuple[float, float, float, int]:
    with open(f"/proc/{child.pid}/statm", encoding="ascii") as file:
        held = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    pidfd = os.pidfd_open(child.pid)
    try:
        waiter = select.poll()
        for fd in (pidfd, connection.fileno()):
            waiter.register(fd, select.POLLIN)
        told: dict[int, float] = {}
        begun = time.perf_counter()
        os.kill(child.pid, signal.SIGKILL)
        while len(told) < 2:
            for fd, _ in waiter.poll():
                told[fd] = (time.perf_counter() - begun) * 1e3
                waiter.unregister(fd)
        return begun, told[pidfd], told[connection.fileno()], held
    finally:
        os.close(pidfd)


def main() -> None:
    """Print medians and ranges."""
    found = [kill_one() for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20)]
    for column, name in enumerate(("pidfd", "connection", "lock")):
        times = [row[column] for row in found]
        print(
            f"{name:10} {statistics.median(times):6.1f} ms ({min(times):.1f} to {max(times):.1f})"
        )
    print(f"{len(found)} kills of a process of {found[0][3]} MiB")


if __name__ == "__main__":
    main()
