"""Stateful property tests of the core against an oracle that does not use the state machine.

The oracle reads the register, and observes the votes, the messages that a rank is ready, and the
optimizer steps that ran or failed. From that alone it derives what each participant holds: (step,
committed txns, cursor). The core must hold the same, for every sequence of events that hypothesis
applies to a job.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import test_rows
from cluster import Node
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from jobs import HSDP, Job, calm

from fft.messages.effects import Apply, Broadcast, CastVote, Heal, StartTxn, Tell
from fft.messages.protocol import (
    Applied,
    ApplyFailed,
    Begin,
    Event,
    Fault,
    Healed,
    HealFailed,
    Peer,
    Ready,
    Record,
    Token,
)
from fft.protocol.participant import Outcome
from fft.protocol.spec import FsmSpec
from fft.protocol.state import GENESIS, Local

# --- the oracle -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The state of one participant. ``txns``: every commit in its state, or None if it is lost."""

    step: int = 0
    txns: tuple[Token, ...] | None = ()
    cursor: int = 0


@dataclass
class Oracle:
    """A derivation of every participant's state from the register and observable events."""

    register: list[Record] = field(default_factory=list)
    yes: dict[Token, set[Peer]] = field(default_factory=dict)
    held: dict[Peer, Held] = field(default_factory=dict)
    fetching: dict[tuple[Peer, int], bool] = field(default_factory=dict)
    ballots: dict[Token, Held] = field(default_factory=dict)
    """The state of the participants that vote YES in a txn."""
    learning: dict[Peer, int] = field(default_factory=dict)
    """Participants that compute without the state, by epoch; the state must arrive before the
    vote."""
    skips: set[Token] = field(default_factory=set)
    """Txns in which a participant votes for a skip."""
    ran: dict[tuple[Peer, Token], bool] = field(default_factory=dict)
    """Whether a participant that applies a txn runs the optimizer step for it."""
    book: dict[str, tuple[Token, ...] | None] = field(
        default_factory=lambda: {"": None, GENESIS: ()}
    )
    spelled: int = 0
    """Number of records whose lineage has been spelled out."""

    def after(self, n: int) -> Held:
        """Return the state that the first ``n`` records of the register lead to."""
        commits = [r for r in self.register[:n] if r.kind == "commit"]
        cursor = commits[-1].cursor if commits else 0
        return Held(sum(not r.skip for r in commits), tuple(r.token for r in commits), cursor)

    def commit(self, token: Token) -> int:
        """Return the place in the register at which ``token`` was committed."""
        found = [i for i, r in enumerate(self.register) if r.kind == "commit" and r.token == token]
        assert len(found) == 1, f"{token} stands {len(found)} times as committed in the register"
        return found[0]

    def epoch(self, number: int) -> int:
        """Return the place in the register at which the epoch was formed."""
        return next(
            i for i, r in enumerate(self.register) if r.kind == "epoch" and r.epoch == number
        )

    def applied(self, peer: Peer, token: Token) -> None:
        """Record that an optimizer step ran, or was skipped by all who voted for that, as in the
        register."""
        n = self.commit(token)
        assert self.register[n].skip == (token in self.skips), f"{token}: not as it was voted for"
        assert self.ran[peer, token] != self.register[n].skip, f"{peer} ran the step of a skip"
        assert self.held[peer] == self.after(n), f"{peer} applied {token} to another state"
        assert peer in self.yes[token], f"{peer} applied {token} without having voted YES"
        self.held[peer] = self.after(n + 1)

    def torn(self, peer: Peer) -> None:
        """Record that a step or a fetch was left half done."""
        self.held[peer] = replace(self.held[peer], txns=None)

    def healed(self, peer: Peer, epoch: int) -> None:
        """Record that it relies on the epoch's state, by a fetch or because it always held it."""
        base = self.after(self.epoch(epoch))
        fetched = self.fetching[peer, epoch]
        assert fetched or self.held[peer] == base, f"{peer} is ready with another state"
        self.held[peer] = base
        self.learning.pop(peer, None)

    def ready(self, peer: Peer, epoch: int) -> None:
        """Check that a participant in the barrier of the epoch holds that epoch's state.

        The state of a participant that is new in the job may still be on its way.
        """
        n = self.epoch(epoch)
        if self.held[peer] != self.after(n):
            known = peer.group in self.register[n].learners and self.fetching[peer, epoch]
            assert known, f"{peer} says that it is ready, with another state"
            self.learning[peer] = epoch

    def votes(self, peer: Peer, token: Token, skip: bool) -> None:
        """Check that a participant that votes YES holds the state of all others that do."""
        self.skips |= {token} if skip else set()
        held = self.held[peer]
        assert self.ballots.setdefault(token, held) == held, f"{peer} voted with another state"
        self.yes.setdefault(token, set()).add(peer)

    def memory_of(self, local: Local) -> Held:
        """Return the state that the core claims, with the lineage spelled out as its commits."""
        for n in range(self.spelled, len(self.register)):
            txns = self.after(n + 1).txns
            assert self.book.setdefault(self.register[n].lineage, txns) == txns
        self.spelled = len(self.register)
        return Held(local.step, self.book[local.lineage], local.cursor)


# --- a job that is watched ------------------------------------------------------------------------


class Watched(Job):
    """A job whose oracle receives everything that can be observed from outside."""

    def __init__(self, groups: int = 2, ranks: int = 1, **config: Any) -> None:
        self.oracle = Oracle()
        self.starts: dict[Token, dict[Peer, StartTxn]] = {}
        self.judged = 0
        super().__init__(groups, ranks, **config)
        self.oracle.register = self.history

    def add(self, group: str, rank: int = 0, *args: object, **kw: object) -> Node:
        """Add a new process, which holds the initial state of all processes."""
        node = super().add(group, rank, *args, **kw)  # type: ignore[arg-type]
        self.oracle.held[node.peer] = Held()
        return node

    def _observe(self, node: Node, before: Local, event: Event, out: Outcome) -> None:
        super()._observe(node, before, event, out)
        match event:
            case Applied(token=token):
                self.oracle.applied(node.peer, token)
            case ApplyFailed():
                self.oracle.torn(node.peer)
            case Healed(epoch=epoch) if out.verdict == "row":
                self.oracle.healed(node.peer, epoch)
            case HealFailed(torn=True) if out.verdict == "row":
                self.oracle.torn(node.peer)
        for effect in out.effects:
            match effect:
                case CastVote(token=token, vote=vote):
                    self.oracle.votes(node.peer, token, vote.skip)
                case Apply(skip=skip):
                    self.oracle.ran[node.peer, node.local.token] = not skip
                case Heal(record=record, fetch_from=source):
                    self.oracle.fetching[node.peer, record.epoch] = source is not None
                case Broadcast(message=Ready() | Begin() as word) | Tell(message=Ready() as word):
                    self.oracle.ready(node.peer, word.epoch)
                case StartTxn(token=token):
                    self.starts.setdefault(token, {})[node.peer] = effect

    # --- what must always hold ---

    def everybody_holds_what_the_register_says(self) -> None:
        """Check (step, commits in the state, cursor) of each participant, alive or not."""
        committed = sum(r.kind == "commit" for r in self.history)
        for peer, node in self.nodes.items():
            expected = self.oracle.memory_of(node.local)
            assert expected == self.oracle.held[peer], f"{peer} says {expected}"
            assert expected.step <= committed, f"{peer} is ahead of the register"
            if node.local.state in ("COMMIT", "DRAIN_COMMIT"):
                self.oracle.commit(node.local.token)

    def commits_are_of_all_and_share_the_data(self) -> None:
        """Check that every member voted YES, and that the groups' slices fill the range between two
        cursors."""
        for n in range(self.judged, len(self.history)):
            record = self.history[n]
            if record.kind != "commit":
                continue
            members = self.history[self.oracle.epoch(record.epoch)].members
            peers = {p for g in members for p in g.peers()}
            assert peers == self.oracle.yes[record.token], "a commit without a YES of every member"
            starts = self.starts[record.token]
            draws = {} if record.live else starts  # a live block takes no data
            took = {(p.group, s.cursor + s.index) for p, s in draws.items() if s.index is not None}
            slices = range(self.oracle.after(n).cursor, record.cursor)
            assert sorted(slice_ for _, slice_ in took) == list(slices), f"{took} of {slices}"
            assert {s.step for s in starts.values()} == {record.step - (not record.skip)}
        self.judged = len(self.history)

    def who_computes_agrees(self) -> None:
        """Check open txns: the epoch is the register's, and all hold the same state, or will."""
        at: dict[Token, Held] = {}
        for node in self.live():
            if node.local.state == "NORMAL":
                token, epoch = node.local.token, node.local.epoch
                assert epoch == self.history[self.oracle.epoch(token.epoch)]
                assert epoch is not None and any(node.peer in g.peers() for g in epoch.members)
                if self.oracle.learning.get(node.peer) == token.epoch:
                    continue
                held = self.oracle.held[node.peer]
                assert at.setdefault(token, held) == held, f"two states in txn {token}"

    def check(self) -> None:
        """Run all checks."""
        self.everybody_holds_what_the_register_says()
        self.commits_are_of_all_and_share_the_data()
        self.who_computes_agrees()


CROWD = 8
"""Number of live processes above which no group is started, as newcomers greet all others."""

SELDOM = st.sampled_from([False] * 7 + [True])
THEN = st.sampled_from(["", "", "settle", "step"])


def happens(**strategies: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a rule after which the job may run for a while; disturbances alone would lead
    nowhere."""

    def wrap(method: Callable[..., Any]) -> Any:
        @functools.wraps(method)
        def both(self: Life, then: str, **given: Any) -> Any:
            result = method(self, **given)
            if then:
                getattr(self.job, then)()
            return result

        return rule(then=THEN, **strategies)(both)

    return wrap


# --- what may happen ------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """A job to which hypothesis applies any events in any order."""

    peers = Bundle("peers")

    @initialize(
        target=peers,
        groups=st.sampled_from([3, 2, 1]),
        ranks=st.integers(1, 2),
        min_groups=st.integers(1, 2),
        running=st.sampled_from([True, True, True, False]),
    )
    def begin(self, groups: int, ranks: int, min_groups: int, running: bool):  # type: ignore[no-untyped-def]
        self.job = Watched(groups, ranks, min_groups=min(groups, min_groups))
        if running:
            self.job.until_running()
        return multiple(*self.job.nodes)

    def node(self, peer: Peer) -> Node | None:
        """Return the process, or the newest one of its rank; None if that does not run either."""
        for node in (self.job.nodes[peer], self.job.node(peer.group, peer.rank)):
            if node.alive and node.finished is None:
                return node
        return None

    @rule(peer=peers, count=st.integers(1, 8))
    def deliver(self, peer: Peer, count: int) -> None:
        for _ in range(count):
            node = self.node(peer)
            if node is not None and node.inbox:
                self.job.deliver(node)

    @rule()
    def deliver_everything(self) -> None:
        self.job.settle()

    @happens(peer=peers)
    def others_go_on_without(self, peer: Peer) -> None:
        for _ in range(2_000):
            waiting = [n for n in self.job.live() if n.inbox and n.peer != peer]
            if not waiting:
                return
            self.job.deliver(waiting[0])
        raise AssertionError("the others do not settle")

    @rule(count=st.integers(1, 3))
    def whole_steps(self, count: int) -> None:
        for _ in range(count):
            self.job.step()

    @happens(peer=peers)
    def miss_decisions(self, peer: Peer) -> None:
        if (node := self.node(peer)) is not None:
            self.job.lose_decisions(node)

    @happens(peer=peers, reductions=st.sampled_from([1, 1, 1, 2, 0]), skip=SELDOM)
    def finish_body(self, peer: Peer, reductions: int, skip: bool) -> None:
        if (node := self.node(peer)) is not None:
            self.job.compute([node], reductions, skip)

    @happens(peer=peers)
    def finish_body_badly(self, peer: Peer) -> None:
        if (node := self.node(peer)) is not None and node.txn is not None:
            self.job.refuse(node)

    @happens(peer=peers)
    def fault(self, peer: Peer) -> None:
        if (node := self.node(peer)) is not None:
            self.job.post(node, Fault(node.local.token, "a fault"))

    @happens(peer=peers, which=st.integers(0, 5))
    def fire_timer(self, peer: Peer, which: int) -> None:
        if (node := self.node(peer)) is not None and node.timers:
            names = sorted(node.timers)
            self.job.fire(names[which % len(names)], [node])

    @happens(name=st.sampled_from(["ack_window", "vote_window", "bus_retry", "ready_window"]))
    def fire_everywhere(self, name: str) -> None:
        self.job.fire(name)

    def may_end(self, peer: Peer, even_the_last: bool) -> bool:
        """Whether the process may end.

        The last group seldom may, as its end loses the state of the job.
        """
        holds = {n.peer.group for n in self.job.live() if n.state == "NORMAL"}
        return even_the_last or bool(holds - {peer.group})

    @happens(peer=peers, noticed=st.booleans(), even_the_last=SELDOM)
    def crash_rank(self, peer: Peer, noticed: bool, even_the_last: bool) -> None:
        node = self.node(peer)
        if node is not None and self.may_end(peer, even_the_last):
            self.job.crash(node, noticed)

    @happens(peer=peers, noticed=st.booleans(), even_the_last=SELDOM)
    def crash_group(self, peer: Peer, noticed: bool, even_the_last: bool) -> None:
        if self.may_end(peer, even_the_last):
            self.job.kill_group(peer.group, noticed)

    @happens(target=peers, group=st.sampled_from(["0", "1", "2"]))
    def start_group(self, group: str):  # type: ignore[no-untyped-def]
        if len(self.job.live()) >= CROWD:
            return multiple()
        return multiple(*(n.peer for n in self.job.start_group(group)))

    @happens(peer=peers, even_the_last=SELDOM)
    def drain(self, peer: Peer, even_the_last: bool) -> None:
        if self.may_end(peer, even_the_last):
            self.job.drain(peer.group)

    @happens(up=st.sampled_from([True, True, False]))
    def bus(self, up: bool) -> None:
        self.job.bus_up = up

    @happens(peer=peers, even_the_last=SELDOM)
    def next_apply_tears(self, peer: Peer, even_the_last: bool) -> None:
        if self.may_end(peer, even_the_last):
            self.job.apply_fails |= {peer}

    @happens(peer=peers, torn=st.booleans())
    def next_healing_fails(self, peer: Peer, torn: bool) -> None:
        self.job.heal_fails[peer] = torn

    @invariant()
    def the_core_holds_what_the_oracle_says(self) -> None:
        self.job.check()

    def teardown(self) -> None:
        if hasattr(self, "job"):
            calm(self.job, 2)
            self.job.check()


Life.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=80,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestTheCoreHoldsWhatTheOracleSays = Life.TestCase


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", test_rows.LIVES)
def test_core_agrees_with_the_oracle_in_the_corpus_of_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These lives take every row of the table; participants that apply or are ready are checked on
    the way."""
    monkeypatch.setattr(test_rows, "Job", Watched)
    job = test_rows.LIVES[name]()
    assert isinstance(job, Watched) and job.oracle.held
    job.check()


# --- the oracle can say no ------------------------------------------------------------------------


def lie(state: str, event: str, index: int, **changed: Any) -> FsmSpec:
    """Return the shipped spec with one row that does something else."""
    data = HSDP.model_dump()
    owner = data["states"].get(state, data["common"])
    owner["on"][event][index].update(changed)
    return FsmSpec.model_validate(data)


LIES = {
    "a commit that is not counted": (
        lie("COMMIT", "applied", 4, effects=["start_txn"]),
        "says Held",
    ),
    "a torn step that is counted": (
        lie("COMMIT", "apply_failed", 4, effects=["note_applied", "next_txn", "propose_abort"]),
        "is ready with another state",
    ),
    "an abort that is applied": (
        lie("common", "decision", 0, to="COMMIT", effects=["note_head", "announce", "apply"]),
        "stands 0 times as committed in the register",
    ),
    "a commit that is not decided": (
        lie("NORMAL", "prepared", 0, to="COMMIT", effects=["apply"]),
        "stands 0 times as committed in the register",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_the_oracle_notices_a_core_that_lies(name: str) -> None:
    """Under a table with a wrong row run a commit, a NO, a failing optimizer step, and a commit."""

    def live(spec: FsmSpec) -> Watched:
        job = Watched(2, 1, spec=spec)
        a, b = job.live()

        def go(act: Callable[[], None]) -> None:
            for part in (job.settle, act, job.settle):
                part()
                job.check()

        def yes_and_no() -> None:
            job.compute([a])
            job.refuse(b)

        go(job.compute)
        go(yes_and_no)
        job.apply_fails = frozenset({b.peer})
        go(job.compute)
        go(job.compute)
        return job

    spec, complaint = LIES[name]
    assert live(HSDP).kinds().count("commit") == 3
    with pytest.raises(AssertionError, match=complaint):
        live(spec)
