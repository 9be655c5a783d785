"""Tests of the live-set semantics: the executions of JAX's document, an exhaustive oracle, runs of
FFT."""

from __future__ import annotations

import cProfile
import importlib
import pstats
import random
import re
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import Hasty, Job, calm, go_on_without, history_of, wander

from fft.messages.protocol import Healed, Ready
from fft.protocol.invariants import Finding, History, Move
from fft.trace.audit import trace_files
from fft.trace.barriers import execution_of, judge_live_sets
from fft.trace.live_sets import (
    Event,
    Execution,
    ExecutionError,
    Instant,
    LiveSetVerdict,
    Mark,
    decide,
    judged,
    render,
    timed,
    unheard,
)
from fft.trace.read import TraceFile
from fft.trace.replay import Replay

Timed = dict[str, list[tuple[float, Event]]]

# --- executions drawn as text -----------------------------------------------------------------

_WORDS = re.compile(r"S|X|\[=*|\](?P<set>[0-9,]*)")
_KINDS = {"S": "start", "X": "fail", "[": "enter", "]": "leave"}


def read(diagram: str) -> tuple[Timed, list[int]]:
    """Return the events of each row by column, and the columns of the drawn instants."""
    lines: Timed = {}
    instants: list[int] = []
    for row in diagram.splitlines():
        name, _, drawing = row.partition("|")
        if not name.strip():
            instants = [i for i, c in enumerate(drawing) if c == "^"]
            continue
        events = lines.setdefault(name.strip(), [])
        assert not _WORDS.sub("", drawing).strip(), f"not understood: {row}"
        for word in _WORDS.finditer(drawing):
            kind: Any = _KINDS[word[0][0]]
            members = frozenset((word["set"] or "").split(",")) if kind == "leave" else frozenset()
            events.append((word.start(), Event(kind, members=members)))
    return lines, instants


VECTORS: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "liveset" / "executions.yaml").read_text()
)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_execution_of_the_document(vector: dict[str, Any]) -> None:
    lines, _ = read(vector["diagram"])
    moving, fixed = timed(lines), timed(lines, failures_move=False)
    for execution, expected in ((moving, vector["valid"]), (fixed, vector["unmoved"])):
        verdict = decide(execution)
        assert verdict.valid == expected == oracle(execution), render(execution, verdict)
        check_witness(execution, verdict)
    if "because" in vector:
        assert decide(moving).reason == vector["because"]


def test_every_drawing_is_a_vector() -> None:
    names = [v["name"] for v in VECTORS]
    assert len(set(names)) == len(names)
    drawn = {int(n.split()[1].rstrip(",")) for n in names if n.startswith("figure")}
    assert drawn == set(range(1, 18))


@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if "^" in v["diagram"]], ids=lambda v: v["name"]
)
def test_instants_that_the_document_draws(vector: dict[str, Any]) -> None:
    """The instants confirm that the drawings are parsed correctly."""
    lines, instants = read(vector["diagram"])
    answers = {e.members for line in lines.values() for _, e in line if e.kind == "leave"}
    found = {frozenset(n for n in lines if _inside(lines[n], at)) for at in instants}
    assert found == answers
    for at in instants:
        outside = [n for n in lines if not _inside(lines[n], at)]
        assert not any(_alive(lines[n], at) for n in outside)


def _inside(line: list[tuple[float, Event]], at: int) -> bool:
    """Whether the line is in the barrier at that column, both ends included."""
    enters = [x for x, e in line if e.kind == "enter"]
    ends = [min(y for y, e in line if y > x and e.kind != "act") for x in enters]
    return any(x <= at <= y for x, y in zip(enters, ends, strict=True))


def _alive(line: list[tuple[float, Event]], at: int) -> bool:
    past = [e.kind for x, e in line if x <= at]
    return bool(past) and past[-1] != "fail"


# --- the oracle: every order of all events, one after another -----------------------------------


def oracle(execution: Execution) -> bool:
    """Whether some order of all events gives every answer its instant, by trying all orders."""
    lines = execution.lines
    names = sorted(lines)
    total = sum(e.kind == "leave" for line in lines.values() for e in line)
    seen: set[tuple[tuple[int, ...], frozenset[Mark]]] = set()

    def go(at: dict[str, int], happy: frozenset[Mark]) -> bool:
        happy |= _happy(lines, at)
        if (key := (tuple(at[n] for n in names), happy)) in seen:
            return False
        seen.add(key)
        if len(happy) == total and all(at[n] == len(lines[n]) for n in names):
            return True
        for name in names:
            mark = (name, at[name])
            waits = any(i >= at[q] for (q, i), later in execution.before if later == mark)
            left = lines[name][at[name] :]
            lost = bool(left) and left[0].kind == "leave" and mark not in happy
            if left and not waits and not lost and go({**at, name: at[name] + 1}, happy):
                return True
        return False

    return go(dict.fromkeys(names, 0), frozenset())


def _happy(lines: Any, at: dict[str, int]) -> frozenset[Mark]:
    """Return the leaves whose set matches the state at this point."""
    inside: dict[str, tuple[str, int | None]] = {}
    alive: set[str] = set()
    for name, line in lines.items():
        for i, event in enumerate(line[: at[name]]):
            if event.kind == "start":
                alive.add(name)
            elif event.kind == "fail":
                alive.discard(name)
                inside.pop(name, None)
            elif event.kind == "leave":
                inside.pop(name)
            elif event.kind == "enter":
                ends = [j for j, e in enumerate(line) if j > i and e.kind in ("leave", "fail")]
                leaves = ends and line[ends[0]].kind == "leave"
                inside[name] = (event.barrier, ends[0] if leaves else None)
    found = set()
    for name, (barrier, leave) in inside.items():
        if leave is None:
            continue
        members = lines[name][leave].members
        same = all(
            q in inside
            and inside[q][0] == barrier
            and (inside[q][1] is None or lines[q][inside[q][1]].members == members)
            for q in members
        )
        if name in members and same and alive <= members:
            found.add((name, leave))
    return frozenset(found)


def check_witness(execution: Execution, verdict: LiveSetVerdict) -> None:
    """Check that a witness is an order of all events, within the given one, with an instant per
    answer."""
    if not verdict.valid:
        assert verdict.reason
        assert not verdict.order
        return
    place = {x: n for n, x in enumerate(verdict.order) if not isinstance(x, Instant)}
    events = {(name, i) for name, line in execution.lines.items() for i in range(len(line))}
    assert set(place) == events
    assert len(verdict.order) == len(events) + len(verdict.instants)
    assert all(place[a] < place[b] for a, b in execution.before)
    at, happy = dict.fromkeys(execution.lines, 0), set[Mark]()
    for x in verdict.order:
        if isinstance(x, Instant):
            now = _happy(execution.lines, at)
            assert {execution.lines[n][i].members for n, i in now} == {x.members}
            happy |= now
        else:
            assert at[x[0]] == x[1]
            at[x[0]] += 1
    assert happy == {m for m in events if execution.lines[m[0]][m[1]].kind == "leave"}


# --- random executions --------------------------------------------------------------------------

NAMES = "abc"
NEXT = {
    "dead": ("start",),
    "out": ("enter", "enter", "enter", "fail", "act"),
    "in": ("leave", "leave", "leave", "fail", "act"),
}
STATE = {"start": "out", "enter": "in", "leave": "out", "fail": "dead"}


def draw_execution(rng: random.Random) -> Execution:
    """Draw a small execution, ordered by a clock or by messages; half of the sets are likely
    ones."""
    state, events = dict.fromkeys(NAMES, "dead"), []
    alive_in: dict[str, set[str]] = {n: set() for n in NAMES}
    for _ in range(rng.randint(8, 16)):
        name = rng.choice(NAMES)
        kind: Any = rng.choice(NEXT[state[name]])
        state[name] = STATE.get(kind, state[name])
        for n in NAMES:
            if state[n] == "in":
                alive_in[n] = {m for m in NAMES if state[m] == "in"}
        guess = alive_in[name] if rng.random() < 0.6 else set(rng.sample(NAMES, rng.randint(0, 2)))
        members = frozenset(guess | {name} if kind == "leave" else ())
        barrier = "x" if kind == "enter" and rng.random() < 0.1 else ""
        events.append((name, Event(kind, barrier, members)))
    if rng.random() < 0.5:
        lines: Timed = {n: [] for n in NAMES}
        now = 0
        for name, event in events:
            now += rng.random() < 0.7 or any(t == now for t, _ in lines[name])
            lines[name].append((now, event))
        return timed(lines, failures_move=rng.random() < 0.8)
    return _by_messages(rng, events)


def _by_messages(rng: random.Random, events: list[tuple[str, Event]]) -> Execution:
    marks: list[Mark] = []
    for n, (name, _) in enumerate(events):
        marks.append((name, sum(events[j][0] == name for j in range(n))))
    pairs = set()
    for _ in range(rng.randint(0, 4)):
        i, j = sorted(rng.sample(range(len(marks)), 2))
        failure = "fail" in (events[i][1].kind, events[j][1].kind)
        if marks[i][0] != marks[j][0] and not failure:
            pairs.add((marks[i], marks[j]))
    lines = {n: tuple(e for name, e in events if name == n) for n in NAMES}
    return Execution(lines, frozenset(pairs))


@settings(derandomize=True, max_examples=800, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_decision_equals_the_oracle(seed: int) -> None:
    execution = draw_execution(random.Random(seed))
    verdict = decide(execution)
    assert verdict.valid == oracle(execution), render(execution, verdict)
    check_witness(execution, verdict)


def test_random_executions_are_of_every_sort() -> None:
    """The comparison above would be weak if nearly all executions had one verdict."""
    sorts: Counter[str] = Counter()
    for seed in range(1500):
        verdict = decide(draw_execution(random.Random(seed)))
        if verdict.answers:
            words = "" if verdict.valid else verdict.reason.split(" of")[0].split(":")[0]
            sorts[words or f"valid, {min(len(verdict.instants), 3)}"] += 1
    assert sorts["no instant"] > 150, sorts
    assert sorts["no common order"] > 10, sorts
    assert sorts["valid, 1"] > 150 < sorts["valid, 1"], sorts
    assert sorts["valid, 2"] > 30, sorts


# --- what is no execution -------------------------------------------------------------------------

START, ENTER, FAIL, ACT = Event("start"), Event("enter"), Event("fail"), Event("act")


def leave(*members: str) -> Event:
    return Event("leave", members=frozenset(members))


@pytest.mark.parametrize(
    ("lines", "before", "text"),
    [
        ({"a": (ENTER,)}, (), "process a, event 1: enter while it is dead"),
        ({"a": (START, leave("a"))}, (), "process a, event 2: leave while it is out"),
        ({"a": (START, START)}, (), "process a, event 2: start while it is out"),
        ({"a": (START, ENTER, ENTER)}, (), "process a, event 3: enter while it is in the barrier"),
        ({"a": (START, FAIL, FAIL)}, (), "process a, event 3: fail while it is dead"),
        ({"a": (START, ENTER, leave("b"))}, (), "process a was given {b}, which has no line"),
        (
            {"a": (START, ACT), "b": (START, ACT)},
            ((("a", 1), ("b", 0)), (("b", 1), ("a", 0))),
            "circular; none can be first of: a's start (event 1), b's start (event 1)",
        ),
    ],
)
def test_invalid_execution_is_reported(lines: Any, before: Any, text: str) -> None:
    with pytest.raises(ExecutionError, match=re.escape(text)):
        decide(Execution(lines, frozenset(before)))


def test_recipient_of_a_live_set_is_a_member() -> None:
    lines = {"a": (START, ENTER, leave("b"), FAIL), "b": (START, ENTER)}
    verdict = decide(Execution(lines))
    assert verdict.reason == "no instant: a was given {b}, which leaves out a itself"


def test_an_act_stops_a_failure_that_moves() -> None:
    """Without the act, b may be considered dead from its start on."""
    lines = {"a": (START, ENTER, leave("a")), "b": (START, ACT, FAIL)}
    later = frozenset({(("a", 2), ("b", 1)), (("b", 0), ("a", 1))})
    verdict = decide(Execution(lines, later))
    assert verdict.reason == (
        "no instant: a was given {a}, but a is in the barrier with that answer or none only until "
        "a's leave (event 3), which comes before b's fail (event 3)"
    )
    assert decide(Execution({**lines, "b": (START, FAIL)}, frozenset({(("b", 0), ("a", 1))}))).valid


def test_orders_that_come_to_the_same_are_tried_once() -> None:
    """a and b are each alone in either order; the continuation (figure 17) fails after both."""
    lines, _ = read(next(v["diagram"] for v in VECTORS if v["name"] == "figure 17"))
    later = timed(lines)
    alone = {n: (START, ENTER, leave(n), FAIL) for n in "ab"}
    pairs = {((n, 2), (q, 0)) for n in alone for q in lines}
    assert len(decide(Execution(alone)).instants) == 2
    execution = Execution({**alone, **later.lines}, later.before | pairs)
    verdict = decide(execution)
    assert not verdict.valid
    assert not oracle(execution)
    assert verdict.reason == decide(later).reason


def test_a_witness_and_a_reason_can_be_read() -> None:
    lines, _ = read("0 | S [==]0,1\n1 | S  [X\n")
    execution = timed(lines)
    assert render(execution, decide(execution)) == "\n".join(
        [
            "valid, in this order:",
            "  0 start",
            "  1 start",
            "  0 enter",
            "  1 enter",
            "  --- instant: {0, 1} in the barrier, others dead",
            "  0 leave with {0, 1}",
            "  1 fail",
        ]
    )
    lines, _ = read("0 | S [==]0,1\n1 | S      [==]0,1\n")
    execution = timed(lines)
    assert "1's enter (event 2)" in render(execution, decide(execution))


def test_many_rounds_cost_little() -> None:
    """16 processes, 100 barriers and no failures: one instant after another."""
    names = [f"{n:02}" for n in range(16)]
    lines: Timed = {n: [(0, START)] for n in names}
    for number in range(100):
        for i, name in enumerate(names):
            lines[name].append((2 * number + 0.01 * i + 1, Event("enter", f"epoch {number}")))
            lines[name].append((2 * number + 2 - 0.01 * i, leave(*names)))
    verdict = decide(timed(lines))
    assert verdict.valid
    assert verdict.answers == 1600
    assert len(verdict.instants) == 100


# --- runs of FFT ----------------------------------------------------------------------------------


def left(history: History) -> int:
    """Return the number of barriers that were left, counted once per participant."""
    return sum(roles == ("healing", "training") for m in history.all() for roles in m.roles)


def good(job: Job) -> LiveSetVerdict:
    """Check that there is no finding, every barrier is counted, and the witness is valid."""
    history = history_of(job)
    finding = judge_live_sets(history)
    assert finding.violation is None, finding
    assert finding.checks == left(history)
    execution = execution_of(history)
    verdict = decide(execution)
    check_witness(execution, verdict)
    return verdict


def until_ready(job: Job, *groups: str) -> None:
    """Run until every participant has the first epoch's record and is healed, and these are
    ready."""
    while able := [n for n in job.live() if n.inbox and n.inbox[0].type != "healed"]:
        job.deliver(able[0])
    for group in groups:
        job.deliver(job.node(group))


def test_every_epoch_of_a_run_has_its_instant() -> None:
    job = Job(3).until_running()
    job.step()
    job.kill_group("1")
    job.step()
    job.start_group("1")
    for _ in range(3):
        job.step()
    job.drain("2")
    for _ in range(3):
        job.step()
    formed = [r for r in job.history if r.kind == "epoch"]
    assert len(formed) == 4
    assert [(x.barrier, x.members) for x in good(job).instants] == [
        (f"epoch {r.epoch}", frozenset(str(p) for g in r.members for p in g.peers()))
        for r in formed
    ]


def test_process_ending_after_ready_was_alive_at_the_instant() -> None:
    job = Job(2)
    until_ready(job, "0", "1")
    assert job.states() == {"HEALING"}
    job.crash(job.node("1"), tell=False)
    job.settle()
    assert job.states() == {"NORMAL"}
    verdict = good(job)
    end = ("1/0#1", len(execution_of(job.record).lines["1/0#1"]) - 1)
    (instant,) = verdict.instants
    assert verdict.order.index(end) > verdict.order.index(instant)


def test_process_ending_before_ready_keeps_all_in_the_barrier() -> None:
    job = Job(2)
    until_ready(job, "0")
    job.crash(job.node("1"), tell=False)
    job.settle()
    assert job.states() == {"HEALING"}
    assert left(history_of(job)) == 0
    assert judge_live_sets(job.record) == Finding("barriers")


def test_process_declared_dead_was_out_until_it_returned() -> None:
    job = Job(3).until_running()
    slow = job.node("2")
    held = list[Any]()
    job.fail(job.node("0"))
    for _ in range(6):
        go_on_without(job, slow)
        held.append(slow.state)
    assert set(held) == {"NORMAL"}
    assert job.node("0").state == "NORMAL"
    assert calm(job) > 0
    sizes = [len(x.members) for x in good(job).instants]
    assert sizes[:2] == [3, 2]
    assert sizes[-1] == 3


def test_random_runs() -> None:
    instants = 0
    for seed in range(20):
        job = Job(3, ranks=1 + seed % 2)
        wander(job, random.Random(seed), 300)
        calm(job, rounds=5)
        instants += len(good(job).instants)
    assert instants > 20


def test_member_without_a_trace_is_judged_by_its_messages() -> None:
    job = Job(2).until_running()
    history = history_of(job)
    del history.moves[job.node("1").peer]
    finding = judge_live_sets(history)
    assert (finding.checks, finding.violation) == (1, None)
    moves = history.moves[job.node("0").peer]
    word, other = Ready(job.node("1").peer, 1), Ready(job.node("0").peer, 1)
    moves[:] = [replace(m, event=other) if m.event == word else m for m in moves]
    finding = judge_live_sets(history)
    assert finding.violation == (
        "no instant: 0/0#1 was given {0/0#1, 1/0#1} in epoch 1, but 1/0#1 is never in the barrier "
        "with that answer or none"
    )


# --- runs that must not be ------------------------------------------------------------------------


@pytest.fixture
def run() -> Job:
    """Return two epochs of three groups, the second one after a fault."""
    job = Job(3).until_running()
    job.fail(job.node("0"))
    job.step()
    job.step()
    good(job)
    return job


def doctor(job: Job, group: str, which: Any, *becomes: Any) -> Finding:
    """Replace the moves for which ``which`` is true by the results of ``becomes``."""
    moves = job.record.moves[job.node(group).peer]
    changed = [m for m in moves if which(m)]
    assert changed
    moves[:] = [x for m in moves for x in ([f(m) for f in becomes] if m in changed else [m])]
    return judge_live_sets(job.record)


def is_leaving(move: Any) -> bool:
    return ("healing", "training") in move.roles


def test_a_member_that_never_entered(run: Job) -> None:
    second = Healed(2, 0)
    finding = doctor(run, "1", lambda m: m.event == second)
    assert finding.violation is not None
    assert "leave while it is out" in finding.violation
    run.record.moves[run.node("1").peer] = [
        m for m in run.record.moves[run.node("1").peer] if not is_leaving(m)
    ]
    finding = judge_live_sets(run.record)
    assert finding.violation is not None
    assert "1/0#1 is never in the barrier" in finding.violation
    assert "in epoch 2" in finding.violation


def test_participant_given_a_different_member_set_is_found(run: Job) -> None:
    def less(move: Any) -> Any:
        fewer = replace(move.after.epoch, members=move.after.epoch.members[:2])
        return replace(move, after=replace(move.after, epoch=fewer))

    finding = doctor(run, "0", lambda m: is_leaving(m) and m.after.epoch.epoch == 2, less)
    assert finding.violation is not None
    assert "was given {0/0#1, 1/0#1} in epoch 2" in finding.violation
    assert "{0/0#1, 1/0#1, 2/0#1}" in finding.violation or "2/0#1 is dead" in finding.violation


@pytest.mark.parametrize(("group", "word"), [("0", "ready"), ("1", "begin")])
def test_message_received_before_it_was_sent_is_found(run: Job, group: str, word: str) -> None:
    """The coordinator receives that another is in the barrier; another, that all are."""
    moves = run.record.moves[run.node(group).peer]
    received = [m for m in moves if m.event.type == word]
    assert received, f"{group} heard no {word}"
    moves[:] = received + moves
    finding = judge_live_sets(run.record)
    assert finding.violation is not None
    assert "a message that was sent only later" in finding.violation


def test_one_entered_after_the_others_had_moved_on(run: Job) -> None:
    """Its ready for the second epoch comes after it has seen the commits of that epoch."""
    peer = run.node("1").peer
    moves = run.record.moves[peer]
    late = [m for m in moves if m.event == Healed(2, 0) or is_leaving(m)]
    late = [m for m in late if m.after.epoch is not None and m.after.epoch.epoch == 2]
    assert late[0].event.type == "healed"
    seen = next(n for n, m in enumerate(moves) if m.record and m.record.step > 0)
    rest = [m for m in moves[: seen + 1] if m not in late]
    run.record.moves[peer] = [*rest, *late]
    finding = judge_live_sets(run.record)
    assert finding.violation is not None
    assert "a message that was sent only later" in finding.violation, finding


def test_each_epoch_is_judged_in_the_time_of_the_ones_before() -> None:
    """A long run has thousands of epochs, and each needs only the stays in its own barrier."""
    calls = []
    for count in (50, 200):
        line = [(3.0 * n + i, e) for n in range(count) for i, e in enumerate(_epoch(str(n)))]
        profile = cProfile.Profile()
        verdict, by_luck = profile.runcall(judged, timed({"a": line, "b": line}))
        assert verdict.valid and verdict.answers == 2 * count and by_luck is None
        calls.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    assert calls[1] < 5 * calls[0], calls


def _epoch(name: str) -> tuple[Event, ...]:
    leave = Event("leave", members=frozenset("ab"))
    return Event("start"), Event("enter", name), leave, Event("fail")


def test_process_that_skips_the_barrier_is_found_despite_lucky_timing() -> None:
    job = Hasty(2)
    until_ready(job, "0", "1")
    finding = judge_live_sets(history_of(job))
    execution = execution_of(job.record)
    assert decide(execution).valid
    assert len(unheard(execution)) == 2
    assert finding.violation is not None
    assert "without having heard that" in finding.violation
    assert finding.place in finding.violation


def test_process_that_skips_the_barrier_is_found_without_the_other() -> None:
    job = Hasty(2)
    until_ready(job, "0")
    job.crash(job.node("1"), tell=False)
    job.settle()
    finding = judge_live_sets(history_of(job))
    assert finding.violation is not None
    assert "1/0#1 is never in the barrier" in finding.violation


# --- traces of a real run -------------------------------------------------------------------------


def test_traces_of_real_managers(tmp_path: Path) -> None:
    """Two managers run in threads over gloo, with a fault; each epoch has its instant."""
    pytest.importorskip("torchft")
    sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
    try:
        stage = importlib.import_module("stage")
    finally:
        sys.path.pop(0)
    failed = threading.Event()

    def body(member: Any, txn: Any) -> None:
        if member.group == "1" and txn.step == 1 and not failed.is_set():
            failed.set()
            raise ValueError("planned")

    with stage.job(tmp_path / "traces", 2) as job:
        job.run(lambda member: member.train(3, body=body))
    history = History()
    for path in trace_files(tmp_path / "traces"):
        replayed = Finding("replay")
        for move in Replay(TraceFile(path), replayed).run():
            if isinstance(move, Move):
                history.moves.setdefault(move.peer, []).append(move)
        assert replayed.violation is None, replayed
    finding = judge_live_sets(history)
    assert finding.violation is None, finding
    assert finding.checks == left(history) >= 4
    execution = execution_of(history)
    check_witness(execution, verdict := decide(execution))
    assert len(verdict.instants) >= 2


# --- live blocks ----------------------------------------------------------------------------------


def job_with_blocks(blocks: int) -> Job:
    """Three groups enter and end some live blocks; then one dies in a block, and two go on."""
    job = Job(3).until_running()
    for _ in range(blocks):
        for part in ("entry of a.py:1", "end of a.py:1"):
            job.compute(reductions=0, skip=True, block=part)
            job.settle()
    job.compute(reductions=0, skip=True, block="entry of a.py:1")
    job.settle()
    job.kill_group("2")
    job.settle()
    for part in ("entry of a.py:1", "end of a.py:1"):
        job.compute(reductions=0, skip=True, block=part)
        job.settle()
    return job


def test_entries_of_live_blocks_are_barriers_of_the_execution() -> None:
    job = job_with_blocks(blocks=2)
    found = judge_live_sets(history_of(job))
    assert found.violation is None
    # two epochs, and the entries of three blocks of three members and of one of two
    assert found.checks == (3 + 2) + (3 * 3 + 2)


def test_live_block_answer_without_a_vote_is_found() -> None:
    history = history_of(job_with_blocks(blocks=1))
    peer = min(history.moves)
    moves = history.moves[peer]
    at = next(i for i, m in enumerate(moves) if m.entered("voting"))
    blind = replace(moves[at].event, manifest=replace(moves[at].event.manifest, block=""))
    moves[at] = replace(moves[at], event=blind)
    found = judge_live_sets(history)
    assert found.violation is not None and "leave" in found.violation


def test_live_block_answer_that_leaves_a_member_out_is_found() -> None:
    history = history_of(job_with_blocks(blocks=1))
    peer = min(history.moves)
    for i, move in enumerate(history.moves[peer]):
        if move.obeyed == "commit":
            epoch = replace(move.before.epoch, members=move.before.epoch.members[:2])
            history.moves[peer][i] = replace(move, before=replace(move.before, epoch=epoch))
            break
    found = judge_live_sets(history)
    assert found.violation is not None
