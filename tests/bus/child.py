"""The other process in the bus tests: it serves, writes, or dies at a chosen point."""

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
    """Reserve a number, and die before a message is written under it."""
    bus = TcpBus(url)
    print(bus._rings["protocol"].take_number(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hear(url: str) -> None:
    """Print when listening, and run until stdin ends."""
    with open_bus(url) as bus:
        bus.subscribe(lambda payload: None, lambda error: None)
        print("ready", flush=True)
        sys.stdin.read()


def listen(url: str, inbox: str) -> None:
    """Print when listening to an inbox, and run until stdin ends."""
    with open_bus(url) as bus:
        bus.listen(inbox, lambda payload: None, lambda error: None)
        print("ready", flush=True)
        sys.stdin.read()


def decide(url: str, key: str, mine: str) -> None:
    """Print what a register holds; after a line of input, read it again, try to change it, and
    print."""
    with open_bus(url, 20.0) as bus:
        held = bus.read(key)
        assert held is not None
        print(held.decode(), flush=True)
        sys.stdin.readline()
        print("asking", flush=True)
        now, after = bus.read(key), bus.compare_set(key, held, mine.encode())
        assert now is not None and after is not None
        print(now.decode(), after.decode(), flush=True)


if __name__ == "__main__":
    commands = {
        "serve": serve,
        "write": write,
        "die-between": die_between,
        "hear": hear,
        "listen": listen,
        "decide": decide,
    }
    commands[sys.argv[1]](*sys.argv[2:])
