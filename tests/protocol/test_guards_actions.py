"""Tests of guards, actions and the participant, each by its required result and the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from cluster import Node
from jobs import HSDP, Job

from fft.messages.protocol import (
    Ack,
    Applied,
    ApplyFailed,
    Ballot,
    Begin,
    BusDown,
    Connected,
    Death,
    Decision,
    Drain,
    Event,
    Fault,
    Healed,
    HealFailed,
    Hello,
    Here,
    Join,
    Leave,
    Manifest,
    NoStep,
    Peer,
    Prepared,
    Ready,
    Record,
    Restored,
    ScopeRecord,
    Start,
    Stop,
    Suspect,
    Synchronise,
    Timer,
    Token,
    Vote,
)
from fft.protocol.equality import (
    divergent_ranks,
    gradient_digest,
    unequal_data,
    wrong_gradients,
)
from fft.protocol.guards import GUARDS
from fft.protocol.load import load_spec
from fft.protocol.participant import Participant
from fft.protocol.spec import FsmSpec
from fft.protocol.spec_checks import check_spec
from fft.protocol.table import Table

HELLO = Hello(Peer("1", 0, 1), 1, "1.0", "t", 1001, "sim", 0, "genesis", 0, 0)
RECORD = Record(9, "commit", 1, 1, 1, "x", 1, 1, Peer("1", 0, 1))
EVENTS: list[Event] = [
    Join(HELLO),
    Ack(HELLO, Token(1, 1)),
    Ready(HELLO.peer, 1),
    Begin(HELLO.peer, 1),
    Here(HELLO.peer),
    NoStep(HELLO.peer, Token(1, 1), "entry of a.py:1"),
    Leave(HELLO.peer),
    Death("1", 0, 1001, "sim", "test"),
    Suspect("1", 0, 1001, "sim", "test"),
    Drain(("1",), "test"),
    ScopeRecord("stage1", 1, 1, ("1",)),
    Decision(None),
    Decision(RECORD),
    Start(),
    Synchronise(),
    Prepared(Token(1, 1), True, Manifest(1)),
    Ballot(Token(1, 1), (Vote(HELLO.peer, Manifest(1)),)),
    Applied(Token(1, 1)),
    ApplyFailed(Token(1, 1), "x"),
    Fault(Token(1, 1), "x"),
    Restored(Token(1, 1)),
    Connected(1),
    Healed(1),
    HealFailed(1, "x"),
    Stop(),
    BusDown("read", "x"),
    Timer("pause", 1),
]


def running(groups: int = 2, **config: object) -> tuple[Job, Node]:
    """Return a job in its first txn, and its first participant."""
    job = Job(groups, **config).until_running()
    return job, job.node("0")


def handle(node: Node, event: Event):  # type: ignore[no-untyped-def]
    return node.participant.handle(node.local, event, 0.0)


def test_the_list_of_events_is_whole() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))


# --- guards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_answers_any_event_in_any_state(name: str) -> None:
    """Exit rows are evaluated after every event, so a guard may get any event, not only its own."""
    outside = Job(2, expected_groups=3)
    outside.settle()
    for job in (outside, running()[0]):
        node = job.node("0")
        kept = replace(node.local)
        for event in EVENTS:
            argument = ["bus_limit"] if name == "armed" else []
            answer = GUARDS[name](node.local, node.participant.config, event, *argument)
            assert answer is True or answer is False
        assert node.local == kept, "a guard only asks"


@pytest.mark.parametrize(
    "name",
    ["votes_yes", "tally_commits", "tally_aborts", "superseded", "decided_commit", "decided_abort",
     "epoch_ends", "i_leave", "epoch_with_me", "moved_on", "settled_commit", "has_history"],
)  # fmt: skip
def test_guard_on_an_event_rejects_all_other_events(name: str) -> None:
    _, node = running()
    own = {
        "votes_yes": Prepared, "tally_commits": Ballot, "tally_aborts": Ballot, "superseded": Join,
    }.get(name, Decision)  # fmt: skip
    for event in EVENTS:
        if not isinstance(event, own):
            assert not GUARDS[name](node.local, node.participant.config, event)


def test_unequal_data_names_the_ranks_with_and_without_sharded() -> None:
    votes = [
        Vote(Peer("0", rank, 1), Manifest(1, 4, "a", data="d", shard=shard))
        for rank, shard in enumerate(("", "0"))
    ]
    whole, part = (str(vote.peer) for vote in votes)
    assert unequal_data(votes) == (
        f"all data (no sharded=) are read by {whole}, and a shard by {part}; pass the same "
        "sharded= on all ranks"
    )


def test_drain_request_survives_later_events() -> None:
    """The request is part of the state: a drain that came during a txn still counts after the
    epoch."""
    _, node = running()
    asked = GUARDS["asked_to_leave"]
    c = node.participant.config
    assert not asked(node.local, c, Drain((c.me.group,), "test")), "the drain is not noted yet"
    other, _ = handle(node, Drain(("1",), "test"))
    assert not asked(other, c, Start())
    mine, _ = handle(node, Drain((c.me.group,), "test"))
    assert asked(mine, c, Start())


def test_joiner_is_answered_by_the_head_writer_or_by_all_without_it() -> None:
    job, node = running()
    assert job.head is not None
    answers, c = GUARDS["answers_joiners"], node.participant.config
    answered = [answers(n.local, n.participant.config, Join(HELLO)) for n in job.live()]
    assert sorted(answered) == [False, True], "one answer is enough"
    by = {"me": c.me, "the other": Peer("1", 0, 1), "a member of an older epoch": Peer("2", 0, 1)}
    heads = {who: replace(job.head, by=peer) for who, peer in by.items()}
    expected = {w: answers(replace(node.local, head=h), c, Join(HELLO)) for w, h in heads.items()}
    assert expected == {"me": True, "the other": False, "a member of an older epoch": True}
    assert not answers(replace(node.local, head=None), c, Join(HELLO))


def test_unwinding_acknowledgement_is_remembered() -> None:
    """Only its own message counts, not that of an earlier process with the same identity."""
    _, node = running()
    unwinding, c = GUARDS["said_unwinding"], node.participant.config
    known = node.local.hellos["0", 0]
    words = {
        "not unwinding": known,
        "unwinding": replace(known, unwinding=True),
        "the process before": replace(known, unwinding=True, peer=c.me._replace(inc=0)),
    }
    found = {
        word: unwinding(replace(node.local, hellos={("0", 0): h}), c, Restored(Token(1, 1)))
        for word, h in words.items()
    }
    assert found == {"not unwinding": False, "unwinding": True, "the process before": False}
    assert not unwinding(replace(node.local, hellos={}), c, Restored(Token(1, 1)))


# --- fencing: what is old, cleared or unasked for changes nothing ---------------------------------


def late(name: str) -> tuple[Node, Event, str]:
    """Return (participant, event, text of its refusal)."""
    job, node = running()
    job.fail(node)
    job.settle()
    assert node.local.token == Token(2, 1) and node.state == "NORMAL"
    return node, *{
        "a second restore": (Restored(Token(1, 1)), "I wait for None"),
        "connected in the epoch before": (Connected(1), "connected for epoch 1"),
        "healed for the epoch before": (Healed(1), "healed for epoch 1"),
        "healing failed in the epoch before": (HealFailed(1, "reset", True), "epoch 1"),
        "applied in the txn before": (Applied(Token(1, 1)), "applied of"),
        "ballot of the txn before": (Ballot(Token(1, 1), ()), "ballot of"),
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["a second restore", "connected in the epoch before", "healed for the epoch before",
     "healing failed in the epoch before", "applied in the txn before", "ballot of the txn before"],
)  # fmt: skip
def test_an_answer_of_the_main_thread_that_comes_late_is_fenced(name: str) -> None:
    node, event, reason = late(name)
    after, out = handle(node, event)
    assert out.verdict == "fenced" and reason in out.reason
    assert after == node.local and out.effects == []


@pytest.mark.parametrize("word", [Join(HELLO), Ack(HELLO, Token(9, 1)), Ready(HELLO.peer, 9)])
def test_ended_participant_is_fenced_under_its_incarnation(word: Event) -> None:
    job, node = running(3)
    job.kill_group("1")
    job.deliver(node)
    assert HELLO.peer in node.local.dead
    after, out = handle(node, word)
    assert out.verdict == "fenced" and out.reason == "1/0#1 has ended" and after == node.local


def test_a_txn_that_i_did_not_vote_for_cannot_have_been_committed() -> None:
    """Such a record violates validity: the table has no row for it, and it is not applied."""
    job, node = running()
    assert job.head is not None
    forged = replace(job.head, n=2, kind="commit", txn=1, step=1, lineage="forged", members=())
    after, out = handle(node, Decision(forged))
    assert out.verdict == "refused" and out.reason == "NORMAL: no guard of 'decision' holds"
    assert after == node.local and out.effects == out.steps == []


# --- the participant over other tables ------------------------------------------------------------


def changed(edit) -> Participant:  # type: ignore[no-untyped-def]
    """Return a participant over a table that passes the checks but is not the shipped one."""
    data = HSDP.model_dump()
    edit(data)
    spec = FsmSpec.model_validate(data)
    assert check_spec(spec) == []
    return Participant(Table(spec), Job(2).node("0").participant.config)


def test_exit_row_that_never_settles_is_named_instead_of_looping() -> None:
    def edit(data):  # type: ignore[no-untyped-def]
        data["states"]["INIT"]["exit"].append({"guard": ["not paused"], "effects": []})

    participant = changed(edit)
    with pytest.raises(AssertionError, match="exit rows of INIT never settle"):
        participant.handle(participant.initial(), Start(), 0.0)


def test_an_event_deferred_in_two_states_in_a_row_waits_for_the_third() -> None:
    """The event is deferred twice and handled once: order is kept and no event is lost."""

    def edit(data):  # type: ignore[no-untyped-def]
        waiting = data["states"]["DRAIN_WAIT"]
        del waiting["on"]["decision"]
        waiting["defer"] = {"decision": "the last state will tell"}
        waiting["on"]["timer.drain_window"] = [{"to": "NORMAL"}]
        data["states"]["COMMIT"]["on"]["applied"][0]["effects"].append("next_txn")

    participant = changed(edit)
    job, node = running()
    head = replace(job.history[0], n=2, kind="commit", txn=1, members=(), leavers=("0",))
    abort = Decision(replace(head, n=3, kind="abort", txn=2))
    s = replace(node.local, state="DRAIN_COMMIT", head=head)
    s, out = participant.handle(s, abort, 0.0)
    assert out.verdict == "deferred" and s.deferred == (abort,)
    s, out = participant.handle(s, Applied(s.token), 0.0)
    assert s.state == "DRAIN_WAIT" and s.deferred == (abort,)
    s, out = participant.handle(s, Timer("drain_window", s.timers["drain_window"]), 0.0)
    assert [step.event for step in out.steps] == ["timer.drain_window", "decision"]
    assert s.state == "ROLLBACK_SYNC.forming" and s.deferred == () and s.head == abort.record


# --- what only teaching specs do ------------------------------------------------------------------


def test_broadcast_decisions_without_a_register_write_hold() -> None:
    """The register holds epochs only, each the successor of the one before."""
    job = Job(2, spec=load_spec("plain_votes")).until_running()
    a, _ = job.live()
    job.step()
    job.refuse(a)
    job.settle()
    assert [n.local.token for n in job.live()] == [Token(2, 1)] * 2
    assert (job.kinds(), job.steps(), job.verdict()) == (["epoch", "epoch"], {1}, [])


def test_assumed_abort_reads_no_register() -> None:
    job = Job(2, spec=load_spec("plain_votes")).until_running()
    a, b = job.live()
    job.compute([a])
    job.settle()
    job.fire("vote_window", [a])
    job.deliver(a)
    assert (a.state, b.state) == ("ROLLBACK_SYNC", "NORMAL")
    assert a.local.head is not None and a.local.head.kind == "abort"
    assert a.local.head not in job.history and b.local.head == job.head


def test_assumed_commit_reads_no_register() -> None:
    job = Job(2, spec=load_spec("local_commit")).until_running()
    a, b = job.live()
    job.compute([a])
    job.settle()
    assert (a.local.step, b.local.step, job.kinds()) == (1, 0, ["epoch"])
    assert a.local.head is not None and a.local.head.leavers == ()
    job.compute([b])
    job.settle()
    assert a.local.head == b.local.head, "equal decisions are equal, whoever took them"


@pytest.mark.parametrize("ahead", [-2, -1, 0, 1, 2])
def test_member_that_knows_the_epochs_record_and_asks_is_outside(ahead: int) -> None:
    """A message from before it was admitted names an older record."""
    job = Job(3).until_running()
    here, other = job.node("0").local, job.node("1")
    assert here.epoch is not None
    here = replace(here, epoch=replace(here.epoch, n=5))
    assert here.epoch is not None
    later_hello = replace(here.hellos["1", 0], head=here.epoch.n + ahead)
    asks = GUARDS["asks_to_come_in"](here, other.participant.config, Join(later_hello))
    assert asks == (ahead >= 0)
    stranger = replace(later_hello, peer=Peer("9", 0, 1))
    assert GUARDS["asks_to_come_in"](here, other.participant.config, Join(stranger))


@pytest.mark.parametrize(
    ("attempts", "accused"),
    [
        ([("a", True), ("b", False)], ["1/0#1"]),  # the other replica has repeated its result
        ([("a", True), ("b", None)], []),  # that rank had nothing to compare
        ([("a", None), ("b", False)], []),  # no replica has repeated its result
        ([("a", False), ("b", False)], []),
        ([("a", None), ("b", None)], []),
        ([("a", True), ("b", True)], []),
        ([("a", False), ("a", False), ("b", True)], ["2/0#1"]),  # most agree
        ([("a", True), ("a", False)], []),  # the gradients are equal
    ],
)
def test_differing_gradients_accuse_only_a_rank_that_changed_its_own(
    attempts: list[tuple[str, bool | None]], accused: list[str]
) -> None:
    votes = [
        Vote(Peer(str(group), 0, 1), Manifest(1, 4, "a", fingerprint=digest, repeats=repeats))
        for group, (digest, repeats) in enumerate(attempts)
    ]
    text, found = wrong_gradients(votes)
    assert list(map(str, found)) == accused
    assert ("could not repeat its own" in text) == (len(attempts) == 2 and bool(accused))


def test_no_rank_is_accused_if_another_shard_has_no_majority() -> None:
    votes = [
        Vote(Peer(group, rank, 1), Manifest(1, 4, "a", fingerprint=digest, repeats=repeats))
        for group, rank, digest, repeats in (
            *(("0", 0, "a", True), ("1", 0, "b", False)),
            *(("0", 1, "c", None), ("1", 1, "d", False)),
        )
    ]
    assert wrong_gradients(votes)[1] == ()
    assert list(map(str, wrong_gradients(votes[:2])[1])) == ["1/0#1"]
    three = [Vote(Peer("2", 0, 1), Manifest(1, 4, "a", fingerprint="a")), *votes]
    assert divergent_ranks(three, gradient_digest) is None
    assert list(map(str, divergent_ranks(three[:3], gradient_digest) or ())) == ["1/0#1"]
