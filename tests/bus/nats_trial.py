"""A trial of the NATS bus: leaders are killed while clients write, without effect on the results.

Used by `test_nats.py`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from nats_servers import NatsServers
from waiting import wait_until

from fft.bus import BusUnreachable, open_bus

WAIT_S = 60.0
TIMEOUT_S = 20.0  # of the buses: more than an election takes


@dataclass
class Told:
    """The answers that one writer got."""

    won: list[bytes] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)
    unknown: list[bytes] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    perhaps: list[bytes] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)  # of whole rounds, all answered
    errors: list[BaseException] = field(default_factory=list)


class Writer:
    """A thread that extends the chain of heads, broadcasts, and draws numbers, until stopped."""

    def __init__(self, name: str, url: str) -> None:
        self.told = Told()
        self._name = name
        self._bus = open_bus(url, TIMEOUT_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"writer {name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        count = 0
        try:
            while not self._stop.is_set():
                count += 1
                begun = time.monotonic()
                try:
                    self._round(count)
                except BusUnreachable:
                    continue
                self.told.times.append((begun, time.monotonic()))
        except BaseException as error:  # noqa: BLE001 - reported by `end`
            self.told.errors.append(error)

    def _round(self, count: int) -> None:
        held = self._bus.read("head")
        before = held.partition(b"<")[0] if held else b""
        mine = b"%s.%d" % (self._name.encode(), count)
        try:
            after = self._bus.compare_set("head", held, mine + b"<" + before)
        except BusUnreachable:
            self.told.unknown.append(mine + b"<" + before)
            raise
        won = after == mine + b"<" + before
        (self.told.won if won else self.told.lost).append(mine + b"<" + before)
        try:
            self._bus.broadcast(mine)
        except BusUnreachable:
            self.told.perhaps.append(mine)
            raise
        self.told.sent.append(mine)
        self.told.numbers.append(self._bus.next_number("n"))
        votes = self._bus.ballot(f"of {self._name}", str(count), mine, 1)
        assert votes == [mine], "the last voter gets the votes"
        self._bus.delete(f"of {self._name}")

    def stop(self) -> None:
        self._stop.set()

    def end(self) -> None:
        self.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "a writer hangs"
        self._bus.close()


class Listener:
    """A collector of all messages that one client receives."""

    def __init__(self, url: str) -> None:
        self.heard: list[bytes] = []
        self.lost: list[BaseException] = []
        self._bus = open_bus(url, TIMEOUT_S)
        self._bus.subscribe(self.heard.append, self.lost.append)

    def end(self) -> None:
        self._bus.close()


class Trial:
    """Writers and listeners on a cluster whose leaders are killed."""

    def __init__(self, servers: NatsServers, writers: int = 4, listeners: int = 3) -> None:
        self._servers = servers
        self._bus = open_bus(servers.url, TIMEOUT_S)
        self.listeners = [Listener(servers.url) for _ in range(listeners)]
        self.writers = [Writer(f"w{number}", servers.url) for number in range(writers)]

    def progress(self, since: float) -> bool:
        """Whether every writer has completed a whole round that began after `since`."""
        return all(
            writer.told.errors or any(begun > since for begun, _ in writer.told.times[-2:])
            for writer in self.writers
        )

    def kill_leader(self, number: int) -> tuple[float, float]:
        """Kill a leader, and start it again later.

        Returns the seconds until the last of its streams had another leader, and until a writer had
        completed a whole round.
        """
        wait_until(lambda: self.progress(time.monotonic() - WAIT_S), "writers are at work", WAIT_S)
        streams = sorted(self._servers.leaders())
        leader = self._servers.leaders()[streams[number % len(streams)]]
        self._servers.kill(leader)
        killed, wall = time.monotonic(), time.time()
        wait_until(lambda: self.progress(killed), "service after a leader was killed", WAIT_S)
        back = min(done for w in self.writers for begun, done in w.told.times if begun > killed)
        elected = max(self._servers.elections(since=wall), default=wall)
        self._servers.start(leader)
        self._servers.wait()
        wait_until(self._servers.whole, "all replicas are current", WAIT_S)
        return elected - wall, back - killed

    def close(self) -> None:
        for writer in self.writers:
            writer.stop()
        for one in (*self.writers, *self.listeners):
            one.end()  # type: ignore[attr-defined]
        self._bus.close()

    def judge(self) -> str:
        """Stop the writers, check all answers, and return a line about the result."""
        for writer in self.writers:
            writer.stop()
        for writer in self.writers:
            writer.end()
            assert not writer.told.errors, writer.told.errors
        links = self._judge_chain()
        heard = self._judge_messages()
        numbers = [number for writer in self.writers for number in writer.told.numbers]
        assert len(set(numbers)) == len(numbers), "a number was given twice"
        doubtful = sum(len(w.told.unknown) + len(w.told.perhaps) for w in self.writers)
        return f"{links} links, {heard} messages, {len(numbers)} numbers, {doubtful} unknown"

    def _judge_chain(self) -> int:
        told = [writer.told for writer in self.writers]
        asked = {
            value.partition(b"<")[0]: value.partition(b"<")[2]
            for one in told
            for value in (*one.won, *one.lost, *one.unknown)
        }
        chain = []
        head = self._bus.read("head") or b""
        name, before = head.partition(b"<")[0], head.partition(b"<")[2]
        while name:
            assert asked.get(name) == before, f"{name!r} is not what was asked for"
            chain.append(name)
            name, before = before, asked.get(before, b"")
        assert len(set(chain)) == len(chain)
        for one in told:
            for value in one.won:
                assert value.partition(b"<")[0] in chain, f"won, but not in the chain: {value!r}"
            for value in one.lost:
                assert value.partition(b"<")[0] not in chain, f"lost, but in the chain: {value!r}"
        return len(chain)

    def _judge_messages(self) -> int:
        last = b"the last one"
        self._bus.broadcast(last)
        for listener in self.listeners:
            wait_until(
                lambda one=listener: last in one.heard[-1:] or one.lost,  # type: ignore[misc]
                "the last message",
                WAIT_S,
            )
            assert not listener.lost, listener.lost
        heard = self.listeners[0].heard
        assert all(listener.heard == heard for listener in self.listeners), "heard in two orders"
        counts = Counter(heard)
        assert max(counts.values()) == 1, "a message was heard twice"
        sent = {message for writer in self.writers for message in writer.told.sent}
        perhaps = {message for writer in self.writers for message in writer.told.perhaps}
        assert sent <= set(heard), f"lost: {sent - set(heard)}"
        assert set(heard) - sent - perhaps == {last}
        for writer in self.writers:
            mine = [m for m in heard if m in set(writer.told.sent)]
            assert mine == writer.told.sent, "a writer's messages changed places"
        return len(heard)
