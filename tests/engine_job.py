"""Jobs of engines in one process, for tests: groups of ranks that train on a real bus.

The main thread of a rank is a thread that carries out the engine's commands at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

from specs import table_of
from waiting import wait_until

from fft.bus import ErrorBus, open_bus, serve_tcp
from fft.engine.calls import Buses
from fft.engine.loop import Engine
from fft.messages.commands import Command
from fft.messages.effects import Apply, Finish, Heal, Restore, StartTxn
from fft.messages.protocol import (
    Applied,
    Healed,
    Manifest,
    Peer,
    Prepared,
    Record,
    Restored,
    Start,
    Token,
)
from fft.protocol.load import load_spec
from fft.protocol.participant import Participant
from fft.protocol.state import Config
from fft.prove.virtual_engine import InertHost
from fft.trace.writer import TraceWriter

SPEC = load_spec("hsdp")
LIMIT_S = 30.0


class Nothing(InertHost):
    """A host without futures, process groups and a main thread; it keeps operators' commands."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def put(self, command: object) -> None: ...

    def command(self, command: Command) -> None:
        self.commands.append(command)


class Rank:
    """One participant: its engine, and a main thread that trains `steps` steps."""

    says: Callable[[StartTxn], dict[str, Any]] = staticmethod(lambda start: {})
    """Additional fields of its vote in a txn."""

    def __init__(self, job: EngineJob, peer: Peer, **timeouts: float) -> None:
        self.peer = peer
        self.steps = 0
        self.asked = threading.Condition()
        self.committed: list[Record] = []
        self.skipped: list[Token] = []
        self.txn = Token(0, 0)
        self.fetched = 0
        self.restored = 0
        self.ended: Finish | None = None
        self.error: BaseException | None = None
        config = Config(
            me=peer,
            world=job.ranks,
            store=f"127.0.0.1:{29500 + int(peer.group)}",
            transport=f"http://host-{peer.group}:1/checkpoint",
            pid=1000 + peer.rank,
            host=f"host-{peer.group}",
            timeouts={**SPEC.timeouts, **timeouts},
            expected_groups=job.groups,
            on_divergence=job.on_divergence,
        )
        self.bus = job.open()
        self.group_bus = job.group_bus(peer.group)
        participant = Participant(table_of(SPEC), config)
        trace = TraceWriter(None, peer)
        local = participant.initial()
        self.host = Nothing()
        self.engine = Engine(participant, local, Buses(self.bus), trace, self.host)
        if self.group_bus is not None:
            self.engine.use_group_bus(self.group_bus)
        self.thread = threading.Thread(target=self._train, name=f"train-{peer}", daemon=True)
        self.engine.start()
        self.engine.post(Start())
        self.thread.start()

    def train(self, steps: int) -> None:
        with self.asked:
            self.steps = steps
            self.asked.notify()

    def _train(self) -> None:
        try:
            while self.ended is None:
                command = self.engine.wait_command(LIMIT_S)
                self.engine.take(command)
                self._do(command)
        except Exception as error:  # noqa: BLE001  # the test's thread asks for it
            self.error = error

    def _do(self, command: Restore | Heal | StartTxn | Apply | Finish) -> None:
        match command:
            case Restore(token=token):
                self.restored += 1
                self.engine.post(Restored(token))
            case Heal(record=record, fetch_from=source):
                self.fetched += source is not None
                self.engine.post(Healed(record.epoch))
            case StartTxn(token=token, step=step) as start:
                self.txn = token
                while step >= self.steps and not self.engine.superseded():
                    with self.asked:  # a newer command sets no event here, so poll
                        self.asked.wait(0.02)
                if not self.engine.superseded():
                    manifest = Manifest(1, 4, "s")
                    self.engine.post(Prepared(token, True, manifest, **self.says(start)))
            case Apply(record=record, skip=skip):
                self.committed.append(record)
                self.skipped += [self.txn] if skip else []
                self.engine.post(Applied(self.txn))  # the record may be a later one
            case Finish():
                self.ended = command


class EngineJob:
    """Groups of ranks on one bus; closes everything at the end."""

    on_divergence: Literal["stop", "heal"] = "stop"

    def __init__(
        self,
        stack: ExitStack,
        url: str,
        groups: int,
        ranks: int,
        opens: Callable[[str], ErrorBus] = open_bus,
    ) -> None:
        self.stack, self.url, self.groups, self.ranks = stack, url, groups, ranks
        self.opens = opens
        self.stores = {}
        if ranks > 1:
            for group in range(groups):
                self.stores[str(group)] = stack.enter_context(serve_tcp(job="group"))
        self.members: list[Rank] = []

    def open(self) -> ErrorBus:
        return self._closed_at_the_end(self.opens(self.url))

    def group_bus(self, group: str) -> ErrorBus | None:
        if group not in self.stores:
            return None
        return self._closed_at_the_end(open_bus(self.stores[group].url))

    def _closed_at_the_end(self, bus: ErrorBus) -> ErrorBus:
        self.stack.callback(bus.close)
        return bus

    def start(self, **timeouts: float) -> EngineJob:
        for group in range(self.groups):
            self.start_group(str(group), **timeouts)
        return self

    def start_group(self, group: str, inc: int = 1, **timeouts: float) -> list[Rank]:
        return [self.start_rank(Peer(group, rank, inc), **timeouts) for rank in range(self.ranks)]

    def start_rank(self, peer: Peer, **timeouts: float) -> Rank:
        made = Rank(self, peer, **timeouts)
        self.stack.callback(made.thread.join, LIMIT_S)
        self.stack.callback(made.engine.close)
        self.members.append(made)
        return made

    def train(self, steps: int) -> None:
        """Wait until every live rank has committed ``steps`` steps."""
        live = [m for m in self.members if m.ended is None]
        for member in live:
            member.train(steps)
        wait_until(
            lambda: all(m.error or (m.committed and m.committed[-1].step >= steps) for m in live),
            f"all have committed {steps} steps",
        )
        assert [m.error for m in live if m.error] == []
