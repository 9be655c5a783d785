"""Jobs of pure participants for the tests of the core, recorded for the invariant checks."""

from __future__ import annotations

import random
from typing import Any

from cluster import Cluster, Node

from fft.messages.effects import Heal
from fft.messages.protocol import (
    Decision,
    Drain,
    Event,
    HealFailed,
    Manifest,
    Peer,
    Prepared,
    Token,
)
from fft.protocol.guards import GUARDS
from fft.protocol.invariants import Finding, History, Move, judge
from fft.protocol.load import load_spec
from fft.protocol.participant import Outcome, Participant
from fft.protocol.spec import FsmSpec
from fft.protocol.state import Local, contributors

HSDP = load_spec("hsdp")


class Job(Cluster):
    """A cluster that remembers every move."""

    def __init__(
        self, groups: int = 2, ranks: int = 1, spec: FsmSpec = HSDP, **config: Any
    ) -> None:
        self.record = History()
        super().__init__(spec, observer=self._observe)
        self.ranks = ranks
        self.heal_fails: dict[Peer, bool] = {}
        """Participants whose next healing fails, and whether that loses their state."""
        self.config = {"expected_groups": groups, **config}
        for group in range(groups):
            self.start_group(str(group))

    def _observe(self, node: Node, before: Local, event: Event, out: Outcome) -> None:
        moves = self.record.moves.setdefault(node.peer, [])
        moves.append(Move(node.peer, before, event, node.local, out, f"{node.peer}:{len(moves)}"))
        if out.verdict == "refused":
            raise AssertionError(f"{node.peer} refused {event}: {out.reason}")
        if event.type == "applied" and out.verdict == "row":
            token, cursor = before.token, before.cursor
            able = contributors(before, node.participant.config)
            if node.peer.group in able:
                slice_ = cursor + able.index(node.peer.group)
                self.record.consumed.append((node.peer, Token(*token), slice_, ""))

    def start_group(self, group: str, **start: Any) -> list[Node]:
        """Start all ranks of a group."""
        generation = sum(p.group == group for p in self.nodes)
        return [
            self.add(group, r, self.ranks, store=f"{group}.{generation}", **self.config, **start)
            for r in range(self.ranks)
        ]

    def _heal(self, node: Node, effect: Heal) -> None:
        if node.peer in self.heal_fails:
            torn = self.heal_fails.pop(node.peer)
            self.post(node, HealFailed(effect.record.epoch, "connection reset", torn))
            return
        super()._heal(node, effect)

    def until_running(self) -> Job:
        """Form the first epoch and bring every participant into its first txn."""
        self.settle()
        assert self.states() == {"NORMAL"}
        return self

    def refuse(self, node: Node, cause: str = "nan") -> None:
        """End the node's step function with a NO."""
        assert node.txn is not None
        self.post(node, Prepared(node.txn.token, False, Manifest(), cause))

    def lose_decisions(self, node: Node) -> None:
        """Drop the decisions that wait in the node's inbox."""
        kept = [e for e in node.inbox if not isinstance(e, Decision)]
        node.inbox.clear()
        node.inbox.extend(kept)

    def node(self, group: str, rank: int = 0) -> Node:
        """Return the newest incarnation of (group, rank)."""
        return max(
            (n for p, n in self.nodes.items() if p[:2] == (group, rank)), key=lambda n: n.peer.inc
        )

    def kinds(self) -> list[str]:
        """Return the kinds of all register records, in order."""
        return [r.kind for r in self.history]

    def fetches(self) -> dict[str, int]:
        """Return the state transfers so far by newest participant, without those that fetched
        nothing."""
        return {
            str(n.peer): sum(h.fetch_from is not None for h in n.heals)
            for n in self.nodes.values()
            if n.fetched
        }

    def start_anew(self, group: str) -> None:
        """Kill the group, let the others continue, and start it again, so that it asks to join."""
        self.kill_group(group)
        self.settle()
        self.start_group(group)

    def kill_group(self, group: str, tell: bool = True) -> None:
        """SIGKILL all ranks of a group."""
        for node in self.group(group):
            self.crash(node, tell)

    def group(self, group: str) -> list[Node]:
        """Return the live nodes of a group."""
        return [n for n in self.live() if n.peer.group == group]

    def drain(self, *groups: str) -> None:
        """Request that groups leave, as a supervisor would."""
        self.broadcast(Drain(groups=groups, by="test"))

    def states(self) -> set[str]:
        """Return the FSM states of the live nodes."""
        return {n.state for n in self.live()}

    def steps(self) -> set[int]:
        """Return the committed steps of the live nodes."""
        return {n.local.step for n in self.live()}

    def verdict(self) -> list[Finding]:
        """Return the findings with a violation."""
        return [f for f in judge(history_of(self)) if f.violation]


class Hasty(Job):
    """A cluster whose participants leave the barrier as soon as they are in it."""

    def add(self, *args: Any, **config: Any) -> Node:
        node = super().add(*args, **config)
        node.core.participant = _Impatient(node.participant.table, node.participant.config)
        return node


class _Impatient(Participant):
    guards = {**GUARDS, "all_ready": GUARDS["i_am_ready"]}


def history_of(job: Job) -> History:
    """Return all moves, without members that never handled an event."""
    for peer in job.nodes:
        job.record.moves.setdefault(peer, [])
    return job.record


def go_on_without(job: Job, slow: Node) -> None:
    """Deliver all messages to every node but ``slow``, and fire their timers."""
    while waiting := [n for n in job.live() if n.inbox and n is not slow]:
        job.deliver(waiting[0])
    others = [n for n in job.live() if n is not slow]
    for timer in ("ack_window", "pause"):
        job.fire(timer, others)


def wander(job: Job, rng: random.Random, actions: int) -> None:
    """Random deliveries, faults, crashes, restarts, drains, suspicions and bus outages."""
    whims = random.Random(actions)
    for _ in range(actions):
        live = job.live()
        if not live:
            return
        dice = rng.random()
        node = rng.choice(live)
        if dice < 0.80:
            waiting = [n for n in live if n.inbox]
            if waiting:
                job.deliver(rng.choice(waiting))
        elif dice < 0.92:
            skip = whims.random() < 0.1
            job.compute([node], reductions=whims.randint(0, 1) if skip else 1, skip=skip)
        elif dice < 0.945:
            job.fail(node)
        elif dice < 0.955:
            job.fire(rng.choice(["ack_window", "vote_window", "join_interval"]), [node])
        elif dice < 0.965:
            job.kill_group(node.peer.group, tell=rng.random() < 0.7)
        elif dice < 0.985:
            dead = {str(g) for g in range(3)} - {n.peer.group for n in live}
            if dead:
                job.start_group(rng.choice(sorted(dead)))
        elif dice < 0.99:
            job.drain(node.peer.group)
        elif dice < 0.995:
            job.apply_fails = frozenset({node.peer})
        else:
            job.bus_up = not job.bus_up


def calm(job: Job, rounds: int = 60) -> int:
    """Inject no more faults and let every node continue. Return the commits made meanwhile."""
    job.bus_up = True
    job.apply_fails = frozenset()
    before = job.head.step if job.head else 0
    for _ in range(rounds):
        job.step()
        waiting = {n.peer: n.timers.get("coordinator_window") for n in job.live()}
        for timer in ("ack_window", "join_interval", "pause", "vote_window"):
            job.fire(timer)
            job.settle()
        # Longer than the other timers: it fires if no sign of life re-arms it.
        for node in job.live():
            armed = node.timers.get("coordinator_window")
            if armed is not None and armed == waiting.get(node.peer):
                job.fire("coordinator_window", [node])
        job.settle()
        if any(n.state in ("INIT", "HEALING", "DRAIN_WAIT") for n in job.live()):
            job.fire("join_window")
            job.fire("drain_window")
            job.fire("ready_window")
            job.settle()
    return (job.head.step if job.head else 0) - before
