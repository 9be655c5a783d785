"""The other process in the bus tests: serves, writes, or dies at a chosen point."""

from __future__ import annotations

import os
import signal
import sys

from fft.bus import open_bus, serve_tcp
from fft.bus.tcpstore import TcpBus


def serve(port: str) -> None:
    with serve_tcp(port=int(port), job="test") as server:
        print(server.url, flush=True)
        sys.stdin.read()


def write(url: str, name: str, count: str) -> None:
    with open_bus(url) as bus:
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(int(count)):
            bus.broadcast(f"{name}:{number}".encode())
        print("written", flush=True)


def die_between(url: str) -> None:
    """Take a number, and die before anything is written under it."""
    bus = TcpBus(url)
    print(bus._take_number(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hear(url: str) -> None:
    """Say that we listen, and live until stdin ends."""
    with open_bus(url) as bus:
        bus.subscribe(lambda payload: None, lambda error: None)
        print("ready", flush=True)
        sys.stdin.read()


def listen(url: str, inbox: str) -> None:
    """Say that we listen to an inbox, and live until stdin ends."""
    with open_bus(url) as bus:
        bus.listen(inbox, lambda payload: None, lambda error: None)
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    commands = {
        "serve": serve,
        "write": write,
        "die-between": die_between,
        "hear": hear,
        "listen": listen,
    }
    commands[sys.argv[1]](*sys.argv[2:])
