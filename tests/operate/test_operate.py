"""Tests of operators on a job's bus: their view, their permitted messages, and how a group
leaves."""

from __future__ import annotations

import io
import json
import queue
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from engine_job import LIMIT_S, EngineJob
from rich.console import Console
from typer.testing import CliRunner
from waiting import wait_until

from fft.bus import BusUnreachable, open_bus, open_job_bus, serve_tcp
from fft.bus.base import HEAD
from fft.bus.token import JobToken
from fft.cli import app
from fft.health.hosts import ROLL, HostWatch, Process
from fft.messages.commands import (
    Answer,
    Evict,
    Holder,
    answer_inbox,
    decode_answer,
    decode_command,
    encode_answer,
    encode_command,
    encode_holder,
    fresh_id,
    holder_register,
)
from fft.messages.progress import (
    CheckpointReport,
    FetchReport,
    HeldReport,
    IdleReport,
    SpeedReport,
    TraceReport,
    decode_report,
    encode_report,
)
from fft.messages.protocol import (
    Death,
    Drain,
    GroupEntry,
    Peer,
    RankEntry,
    Record,
    UnreadableMessage,
    decode,
)
from fft.messages.wire import EPOCH, decode_packed
from fft.operate import drain, say
from fft.operate.client import JobClient, OperatorError, bus_url
from fft.operate.job_view import IN_EPOCH, JOINING, LEFT, JobModel, LossCurve, event_of
from fft.operate.watch import JsonView, ScreenView, Watch, render
from fft.operate.web import state_of
from fft.trace.course import Absence
from fft.train.guard.progress_reporter import ProgressReporter


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["memory", "tcp"])
def url(request: pytest.FixtureRequest, stack: ExitStack) -> str:
    if request.param == "memory":
        return f"memory://operate-{uuid.uuid4().hex}"
    return stack.enter_context(serve_tcp()).url


@pytest.fixture
def memory() -> str:
    return f"memory://operate-{uuid.uuid4().hex}"


# --- looking ---------------------------------------------------------------------------


def test_the_members_are_found_when_the_head_has_moved_on(stack: ExitStack, url: str) -> None:
    job = EngineJob(stack, url, 2, 2).start()
    job.train(3)
    with JobClient(url) as desk:
        state = desk.job()
    assert state.head is not None and state.head.kind == "commit" and state.head.step >= 3
    assert list(state.groups) == ["0", "1"]
    assert [(r.rank, r.pid, r.host) for r in state.groups["1"].ranks] == [
        (0, 1000, "host-1"),
        (1, 1001, "host-1"),
    ]


def test_the_register_of_the_epoch_follows_the_epochs(stack: ExitStack, url: str) -> None:
    job = EngineJob(stack, url, 2, 1).start(vote_window=0.3)
    job.train(2)
    job.members[0].train(3)  # votes, waits in vain, and proposes ABORT
    wait_until(lambda: all(m.restored for m in job.members), "rolled back")
    job.train(4)
    with open_bus(url) as bus:
        held, head = bus.read(EPOCH), bus.read(HEAD)
    assert held is not None and head is not None
    assert decode_packed(held).record.epoch == decode_packed(head).record.epoch > 1


def test_an_empty_bus_has_no_job(memory: str) -> None:
    with JobClient(memory) as desk:
        state = desk.job()
        assert state.head is None and state.groups == {}
        with pytest.raises(OperatorError, match="no job has begun on the bus at memory://"):
            drain.drain(desk, ["0"], wait=1)


def test_missing_bus_url_error_shows_how_to_get_one() -> None:
    assert bus_url("a", {"FFT_BUS": "b"}) == "a"
    assert bus_url(None, {"FFT_BUS": "b"}) == "b"
    with pytest.raises(OperatorError, match="pass --bus, or set FFT_BUS; `fft serve` and"):
        bus_url(None, {})


# --- saying ----------------------------------------------------------------------------


def test_allowed_messages_reach_the_core_unchanged() -> None:
    drain = say.checked(b'{"by": "me", "groups": ["1"], "type": "drain"}', "x")
    assert decode(drain) == Drain(("1",), by="me")
    text = b'{"type":"death","group":"1","rank":0,"pid":7,"host":"h","by":"xid","cause":"XID 79"}'
    assert decode(say.checked(text, "x")) == Death("1", 0, 7, "h", "xid", "XID 79")
    evict = Evict("0" * 8, "1", "me")
    asked = say.checked(encode_command(evict), "x")
    assert decode_command(asked) == evict
    assert [say.topic_of(text) for text in (drain, asked, b"[]", b"raw")] == [
        "protocol",
        "commands",
        "protocol",
        "protocol",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "here: not JSON"),
        ('{"groups": ["1"]}', "here: type: needs one of death, suspect, drain"),
        ('{"type": "begin", "epoch": 3}', "here: type: needs one of death, suspect, drain"),
        ('{"type": "drain", "groups": ["1"]}', "here: drain.by: is missing; add it"),
        ('{"type": "drain", "groups": [1], "by": "x"}', "here: drain.groups.0: "),
        ('{"type": "drain", "groups": [], "by": "x", "to": 1}', "here: drain.to: is not part"),
        ('{"type": "drain", "groups": [], "by": "x", "local": true}', "here: drain.local: "),
        ('{"type": "drain", "groups": [], "by": "x", "v": 2}', "here: drain.v: "),
        (" " * (1024 * 1024 + 1), "here: 1048577 bytes; a message has at most 1048576"),
    ],
)
def test_malformed_message_is_refused_with_place_and_fix(text: str, expected: str) -> None:
    with pytest.raises(OperatorError) as caught:
        say.checked(text.encode(), "here")
    assert str(caught.value).startswith(expected)


def about(kind: str, **what: Any) -> bytes:
    """Return the arguments of `fft dev say` for a message of this kind with all required fields."""
    seen = {"group": "1", "rank": 0, "pid": 1000, "host": "host-1", "by": "me"}
    return json.dumps(
        {"type": kind, **(seen if kind in ("death", "suspect") else {}), **what}
    ).encode()


@pytest.mark.parametrize(
    ("what", "place"), [({"rank": -1}, "rank"), ({"pid": -5}, "pid"), ({"pid": 0}, "pid")]
)
@pytest.mark.parametrize("kind", ["death", "suspect"])
def test_out_of_range_place_is_refused(kind: str, what: dict[str, int], place: str) -> None:
    with pytest.raises(OperatorError, match=f"here: {kind}.{place}: Input should be greater"):
        say.checked(about(kind, **what), "here")


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (about("drain", groups=["1", "7"], by="me"), "no group '7' in the job; its groups: 0, 1"),
        (about("death", group="7"), "no group '7'"),
        (about("suspect", rank=3), "no rank 3 in group 1; its ranks: 0, 1"),
        (encode_command(Evict("0" * 8, "1", "me", 2)), "no rank 2 in group 1"),
        (encode_command(Evict("0" * 8, "x", "me")), "no group 'x'"),
    ],
)
def test_message_about_an_unknown_peer_is_not_sent(
    stack: ExitStack, memory: str, payload: bytes, expected: str
) -> None:
    EngineJob(stack, memory, 2, 2).start().train(1)
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with JobClient(memory) as desk:
        checked, topic = say.checked(payload, "here"), say.topic_of(payload)

        def hear(word: bytes) -> None:
            if word == checked:  # the ranks have their own messages
                received.put(word)

        desk.bus.subscribe(hear, lambda error: None, topic)
        with pytest.raises(OperatorError, match=expected):
            say.send(desk, checked)
        assert say.send(desk, checked, raw=True) == ""
        assert received.get(timeout=LIMIT_S) == checked
        assert received.empty(), "it was said twice"


def test_a_death_of_another_process_at_that_place_is_remarked(
    stack: ExitStack, memory: str
) -> None:
    EngineJob(stack, memory, 2, 2).start().train(1)
    with JobClient(memory) as desk:
        output = say.send(desk, say.checked(about("suspect", pid=4711), "here"))
        assert output.startswith("rank 0 of group 1 is pid 1000 on host-1 now, not 4711 on host-1")
        assert say.send(desk, say.checked(about("suspect"), "here")) == ""


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("raw", [True, False])
def test_command_without_the_job_token_is_not_sent(
    stack: ExitStack, begun: bool, raw: bool
) -> None:
    """The job would not obey.

    With ``begun`` there is a head record; otherwise only heartbeats have come.
    """
    url, token = stack.enter_context(serve_tcp()).url, JobToken.fresh()
    if begun:
        EngineJob(stack, url, 2, 1, lambda url: open_job_bus(url, token)).start().train(1)
    else:
        bus = stack.enter_context(open_job_bus(url, token))
        watch = HostWatch(bus, "test", 5.0, [Process("1", 0, 1000)])
        stack.callback(watch.close)
        wait_until(lambda: bus.read(ROLL) is not None, "it beats")
    payload = about("drain", groups=["1"], by="me")
    with JobClient(url) as desk, pytest.raises(OperatorError, match="set FFT_TOKEN_FILE"):
        say.send(desk, payload, raw)
    with JobClient(url, token=token) as desk:
        assert ("no job has begun" in say.send(desk, payload, raw)) is not (begun or raw)


def test_schema_describes_the_accepted_messages() -> None:
    schema = say.schema()
    kinds = {"#/$defs/" + name for name in schema["$defs"]}
    assert {one["$ref"] for one in schema["oneOf"]} <= kinds
    assert set(schema["$defs"]["Drain"]["properties"]) == {"groups", "by", "v", "type"}
    assert schema["$defs"]["Death"]["required"] == ["group", "rank", "pid", "host", "by"]


# --- leaving ---------------------------------------------------------------------------


def test_drained_group_leaves_without_a_rollback(stack: ExitStack, url: str) -> None:
    job = EngineJob(stack, url, 2, 1).start()
    job.train(2)
    for member in job.members:
        member.train(10_000)
    with JobClient(url) as desk:
        record = drain.drain(desk, ["1"], wait=LIMIT_S)
    assert record.kind == "commit" and record.leavers == ("1",)
    wait_until(lambda: job.members[1].ended is not None, "it has left")
    assert [m.restored for m in job.members] == [0, 0]


def test_drain_of_all_groups_is_one_commit(
    stack: ExitStack, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = EngineJob(stack, memory, 2, 1).start()
    job.train(2)
    for member in job.members:
        member.train(10_000)
    monkeypatch.delenv("FFT_TOKEN", raising=False)
    done = CliRunner().invoke(app, ["drain", "--all", "--bus", memory])
    assert done.exit_code == 0 and done.stdout.startswith("group 0, 1 has left"), done.output
    assert (
        "no group is left, so the job ends" in done.stdout and "fft drain --undo" not in done.stdout
    )
    with open_bus(memory) as bus:
        head = bus.read(HEAD)
    assert head is not None and decode_packed(head).record.leavers == ("0", "1")
    assert CliRunner().invoke(app, ["drain", "--bus", memory]).exit_code == 2


def test_a_group_that_is_not_there_is_answered_with_those_that_are(
    stack: ExitStack, memory: str
) -> None:
    job = EngineJob(stack, memory, 2, 1).start()
    job.train(1)
    with (
        JobClient(memory) as desk,
        pytest.raises(OperatorError, match=r"no group '7'.*groups: 0, 1"),
    ):
        drain.drain(desk, ["0", "7"], wait=1)


def test_drain_that_cannot_end_names_the_obstacle(stack: ExitStack, memory: str) -> None:
    job = EngineJob(stack, memory, 2, 1).start()
    job.train(2)  # no rank trains afterwards
    with JobClient(memory) as desk, pytest.raises(OperatorError) as caught:
        drain.drain(desk, ["1"], wait=0.3)
    assert "group 1 has not left within 0.3 s: nothing was committed" in str(caught.value)
    job.train(3)  # the drain is still in force
    wait_until(lambda: job.members[1].ended is not None, "it has left")


@contextmanager
def supervisor(url: str, *verdicts: tuple[str, str]) -> Iterator[queue.Queue[Evict]]:
    """Run a supervisor that answers every eviction with these words."""
    received: queue.Queue[Evict] = queue.Queue()

    def hear(payload: bytes) -> None:
        word = decode_command(payload)
        if isinstance(word, Evict):
            received.put(word)
            for verdict, text in verdicts:
                answer: Any = Answer(word.id, "the supervisor", verdict, text)  # type: ignore[arg-type]
                bus.send(answer_inbox(word.id), encode_answer(answer))

    with open_bus(url) as bus:
        bus.subscribe(hear, lambda error: None, "commands")
        yield received


def test_an_evicted_group_is_left_out_at_once(stack: ExitStack, url: str) -> None:
    job = EngineJob(stack, url, 3, 1).start()
    job.train(2)
    accepted: list[str] = []
    with (
        supervisor(url, ("accepted", "ending"), ("done", "ended")) as caught,
        JobClient(url) as desk,
    ):
        done = drain.evict(desk, "2", restart=True, grace=1.5, on_accepted=accepted.append)
    assert accepted == ["the supervisor: ending"] and done.done == "ended"
    assert done.told_dead == ("2/0: pid 1000 on host-2",)
    command = caught.get(timeout=LIMIT_S)
    assert (command.group, command.rank, command.grace, command.restart) == ("2", None, 1.5, True)
    wait_until(
        lambda: (
            [
                m.engine.local.epoch is not None and len(m.engine.local.epoch.members)
                for m in job.members[:2]
            ]
            == [2, 2]
        ),
        "an epoch without it",
    )
    # a command is traced by its host, and never reaches the core
    wait_until(lambda: all(len(m.host.commands) == 1 for m in job.members), "all were handed it")
    with open_bus(url) as bus:
        bus.send(answer_inbox(command.id), b"x")
        bus.delete(answer_inbox(command.id))


def test_refused_and_unanswered_evictions_are_reported(
    stack: ExitStack, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = EngineJob(stack, memory, 2, 1).start()
    job.train(1)
    monkeypatch.setattr(drain, "FIRST_ANSWER_S", 0.3)

    def evict(desk: JobClient, place: str) -> str:
        with pytest.raises(OperatorError) as caught:
            drain.evict(desk, place, restart=False, grace=0, on_accepted=lambda text: None)
        return str(caught.value)

    with JobClient(memory) as desk:
        assert "no group '9' is in the job; its groups: 0, 1" in evict(desk, "9")
        assert "no rank 4 in group 1; its ranks: 0" in evict(desk, "1.4")
        with supervisor(memory, ("refused", "the job is ending")):
            assert evict(desk, "1.0") == "the supervisor refused: the job is ending"
        assert "no supervisor answered on memory://" in evict(desk, "1")
        assert "no `fft run` has started group 1" in evict(desk, "1")
        assert "end it by hand" in evict(desk, "0")
        holder = Holder(fresh_id(), "box", 7, free=True)
        desk.bus.write(holder_register("1"), encode_holder(holder))
        reported = evict(desk, "1")
        assert "the fft run with pid 7 on box has ended, and has released group 1" in reported
        desk.bus.write(holder_register("1"), encode_holder(replace(holder, free=False)))
        assert "holds group 1, and may have stopped or been cut off" in evict(desk, "1")


def test_an_answer_is_read_strictly() -> None:
    answer = Answer("0" * 8, "me", "accepted", "x")
    assert decode_answer(encode_answer(answer)) == answer
    with pytest.raises(UnreadableMessage):
        decode_answer(b'{"id": "00000000", "by": "me", "verdict": "perhaps"}')


# --- watching --------------------------------------------------------------------------


class Lines:
    """A view that records its snapshots."""

    stays = False

    def __init__(self) -> None:
        self.events: queue.Queue[dict[str, object]] = queue.Queue()

    def word(self, line: dict[str, object]) -> None:
        self.events.put(line)

    def state(self, watch: object, now: float) -> None: ...

    def close(self) -> None: ...

    def until(self, kind: str) -> dict[str, object]:
        while (line := self.events.get(timeout=LIMIT_S))["event"] != kind:
            pass
        return line


@contextmanager
def watching(url: str) -> Iterator[tuple[Watch, Lines]]:
    lines = Lines()
    watch = Watch(url, lines)
    thread = threading.Thread(target=watch.run, name="watch")
    thread.start()
    try:
        yield watch, lines
    finally:
        watch.stop()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def states(watch: Watch) -> dict[str, str]:
    return {row.group: row.state() for row in watch.model.rows()}


def test_a_job_is_watched_through_a_drain_a_death_and_a_join(stack: ExitStack, url: str) -> None:
    job = EngineJob(stack, url, 3, 1).start()
    job.train(3)
    with watching(url) as (watch, lines):
        lines.until("watching")
        assert states(watch) == dict.fromkeys("012", IN_EPOCH)
        for member in job.members:
            member.train(10_000)
        lines.until("commit")
        with open_bus(url) as bus:
            bus.broadcast(b'{"type":"drain","groups":["2"],"by":"me","v":1}')
            drained = lines.until("drain")
            assert drained == {"event": "drain", "groups": ["2"], "by": "me"}
            wait_until(lambda: states(watch)["2"] == LEFT, "it has left")
            bus.broadcast(
                b'{"type":"death","group":"1","rank":0,"pid":1000,"host":"host-1","by":"xid",'
                b'"cause":"XID 79","v":1}'
            )
            assert lines.until("death")["cause"] == "XID 79"
        # the process lives and asks to join again, but a process that was reported dead is not
        # admitted
        wait_until(lambda: states(watch)["1"] == JOINING, "it asks")
        job.start_group("1", inc=2)[0].train(10_000)
        wait_until(lambda: states(watch)["1"] == IN_EPOCH, "the next process is in")
        assert watch.model.head is not None and watch.model.head.epoch > 2
        wait_until(lambda: watch.model.course.rates() is not None, "two commits of the new epoch")
        assert [change.left for change in watch.model.course.changes if change.left] == [("2",)]


def test_the_state_is_printed_once(stack: ExitStack, memory: str) -> None:
    job = EngineJob(stack, memory, 1, 2).start()
    job.train(2)
    stream = io.StringIO()
    Watch(memory, JsonView(stream, lambda: 1.0, once=True)).once()
    state = json.loads(stream.getvalue())
    assert (state["event"], state["epoch"]) == ("state", 1) and state["step"] >= 2
    assert state["groups"]["0"]["1"] == {"state": IN_EPOCH, "inc": 1, "pid": 1001, "host": "host-0"}
    console = Console(file=io.StringIO(), width=120)
    view = ScreenView(console, memory)
    Watch(memory, view).once()
    view.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "fft watch" in text and "training" in text
    assert "1000@host-0, 1001@host-0" in text


def test_a_terminal_shows_groups_speed_commands_and_a_lost_bus(
    stack: ExitStack, memory: str
) -> None:
    job = EngineJob(stack, memory, 2, 1).start()
    job.train(2)
    file = io.StringIO()
    view = ScreenView(Console(file=file, width=140, force_terminal=True), memory)
    watch = Watch(memory, view)
    thread = threading.Thread(target=watch.run, name="watch")
    thread.start()
    try:
        wait_until(lambda: "training" in file.getvalue(), "it shows the groups")
        with open_bus(memory) as bus:
            bus.broadcast(encode_command(Evict("0" * 8, "7", "somebody")), "commands")
            for member in job.members:
                member.train(4)
            wait_until(lambda: "steps/s" in file.getvalue(), "it shows the speed")
        wait_until(lambda: "evict by somebody: group 7" in file.getvalue(), "it shows the command")
    finally:
        watch.stop()
        thread.join(LIMIT_S)
        watch._lost("gone for a walk")
        view.close()
    assert "trying again: gone for a walk" in file.getvalue()


def test_lost_bus_is_reported_and_retried() -> None:
    server = serve_tcp(job="mine")
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    with watching(server.url) as (watch, lines):
        lines.until("watching")
        server.close()
        assert "cannot be reached" in str(lines.until("bus_lost")["cause"])
        assert watch.model.lost
        with serve_tcp(port=port, job="mine"):
            lines.until("watching")
            assert watch.model.lost == ""
    with pytest.raises(BusUnreachable):
        Watch(server.url, Lines()).once()


def test_stragglers_show_in_the_picture_and_as_events() -> None:
    watch, lines = JobModel(), []
    epoch = Record(1, "epoch", 1, 0, 0, "x", 0, 0, Peer("0", 0, 1), _two_groups())
    watch.begin(epoch, epoch)
    for _ in range(10):
        for group, seconds in (("0", 0.1), ("1", 0.3)):
            lines += watch.see(SpeedReport(group, 0, 1, 5, seconds), 1.0)
    assert [(line["event"], line["rank"], line["slow"]) for line in lines] == [
        ("straggler", "1/0", True)
    ]
    assert watch.pace("1") == "rank 0: 3.0 ×"
    assert watch.pace("0") == ""
    file = io.StringIO()
    Console(file=file, width=140).print(render(watch, "memory://x", 1.0))
    assert "rank 0: 3.0 ×" in file.getvalue()
    assert event_of(SpeedReport("0", 0, 1, 5, 0.1)) is None, "too many to be shown"


def test_stage_scopes_show_which_scope_holds_another() -> None:
    watch = JobModel()
    watch.begin(None, Record(1, "epoch", 1, 0, 0, "x", 0, 0, Peer("0", 0, 1), _two_groups()))
    held = HeldReport("1", 0, 1, 6, "stage1", 3, 4)
    for word in (SpeedReport("1", 1, 1, 4, 0.1, "stage1"), held):
        watch.see(word, 1.0)
    file = io.StringIO()
    Console(file=file, width=140).print(render(watch, "memory://x", 1.0))
    assert "scope stage1: step 4" in file.getvalue()
    expected = (
        "group 1 rank 0 is held: step 6 waits until scope stage1 has taken 4 slices of the data; "
        "it has taken 3"
    )
    assert expected in file.getvalue()
    line = event_of(held)
    assert line is not None
    assert (line["event"], line["needed"]) == ("held", 4)
    watch.see(SpeedReport("1", 0, 1, 6, 0.1, "stage0"), 2.0)
    assert watch.held() == []
    assert watch.scopes == {"stage0": 6, "stage1": 4}


def test_watch_shows_a_long_fetch_until_its_rank_commits() -> None:
    watch, file = JobModel(), io.StringIO()
    watch.begin(None, Record(1, "epoch", 1, 0, 0, "x", 0, 0, Peer("0", 0, 1), _two_groups()))
    report = FetchReport("1", 0, 1, 3 * 2**29, 2**33, 35.0)
    assert decode_report(encode_report(report)) == report
    watch.see(report, 1.0)
    Console(file=file, width=140).print(render(watch, "memory://x", 1.0))
    assert "group 1 rank 0 is fetching the state: 1.5 of 8.0 GiB, 35 s left" in file.getvalue()
    line = event_of(report)
    assert line is not None
    assert (line["event"], line["got"]) == ("fetching", 3 * 2**29)
    watch.see(SpeedReport("1", 0, 1, 6, 0.1), 2.0)
    assert watch.fetches() == []


def test_watch_counts_an_evaluation_beside_a_fault_as_no_loss() -> None:
    watch, by, groups = JobModel(), Peer("0", 0, 1), _two_groups()
    watch.begin(None, Record(1, "epoch", 1, 0, 0, "x", 0, 0, by, groups))
    for step in range(1, 11):
        watch.see(Record(1 + step, "commit", 1, step, step, "x", 2 * step, 2 * step, by), step / 10)
    report = IdleReport("1", 0, 1, 25.0)
    assert decode_report(encode_report(report)) == report
    watch.see(report, 26.0)
    watch.see(Record(12, "abort", 1, 11, 10, "x", 20, 20, by, cause="boom"), 26.1)
    watch.see(Record(13, "epoch", 2, 11, 10, "x", 20, 20, by, groups), 26.15)
    watch.see(Record(14, "commit", 2, 12, 11, "x", 22, 22, by), 26.2)
    (fault,) = state_of(watch, "tcp://bus/job", 27.0)["faults"]
    assert fault["cost"] == "100 ms lost"


def test_watch_shows_checkpoint_and_trace_failures() -> None:
    watch, file = JobModel(), io.StringIO()
    watch.begin(None, Record(1, "epoch", 1, 0, 0, "x", 0, 0, Peer("0", 0, 1), _two_groups()))
    failed = CheckpointReport("0", 0, 1, 20, "failed", "OSError: No space left on device")
    lost = TraceReport("1", 0, 1, "No space left on device")
    for word in (CheckpointReport("0", 0, 1, 10, "published"), failed, lost):
        assert watch.see(word, 1.0) == []
    Console(file=file, width=140).print(render(watch, "memory://x", 1.0))
    assert "newest checkpoint: step 10" in file.getvalue()
    assert "no checkpoint of step 20 from rank 0/0: OSError: No space left" in file.getvalue()
    assert "the trace of rank 1/0 has a gap: No space left on device" in file.getvalue()
    line = event_of(failed)
    assert line is not None
    assert (line["event"], line["outcome"], line["step"]) == ("checkpoint", "failed", 20)
    watch.see(CheckpointReport("0", 0, 1, 30, "published"), 2.0)
    assert watch.troubles() == ["the trace of rank 1/0 has a gap: No space left on device"]
    watch.see(CheckpointReport("0", 0, 1, 40, "too_often", "x"), 3.0)
    assert "take them less often" in watch.troubles()[0]


def test_later_watcher_sees_earlier_failures(stack: ExitStack, url: str) -> None:
    reporter = ProgressReporter(stack.enter_context(open_bus(url)), Peer("0", 0, 1), 0.0)
    for step, outcome in ((10, "published"), (20, "failed"), (15, "left_out")):
        reporter.say(CheckpointReport("0", 0, 1, step, outcome, "No space left"))
    reporter.say(TraceReport("0", 0, 1, "No space left"))
    reporter.close()
    stream = io.StringIO()
    Watch(url, JsonView(stream, lambda: 1.0, once=True)).once()
    line = json.loads(stream.getvalue())
    assert line["checkpoint"] == 10
    with open_bus(url) as bus:
        bus.write("report/trace", b"of a later version")
    with JobClient(url) as desk:
        assert len(desk.reports()) == 2
    assert line["troubles"] == [
        "no checkpoint of step 20 from rank 0/0: No space left",
        "the trace of rank 0/0 has a gap: No space left",
    ]


def _two_groups() -> tuple[GroupEntry, ...]:
    return tuple(
        GroupEntry(name, "127.0.0.1:1", (RankEntry(0, 1, True, "http://h:1/", 7, "h"),))
        for name in "01"
    )


def test_watch_once_shows_a_group_that_is_not_in_the_job(stack: ExitStack, memory: str) -> None:
    job = EngineJob(stack, memory, 1, 1).start()
    job.train(3)
    with open_bus(memory) as bus:
        for group in ("0", "1"):
            holder = Holder(fresh_id(), f"node-{group}", 4711)
            bus.compare_set(holder_register(group), None, encode_holder(holder))
    console = Console(file=io.StringIO(), width=120)
    view = ScreenView(console, memory)
    Watch(memory, view).once()
    view.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no step committed yet" not in text and "step 3" in text
    assert re.search(r"^1 +not in the job .*started by fft run with pid 4711 on node-1", text, re.M)
    watch = Watch(memory, view)
    watch.once()
    state = state_of(watch.model, memory, time.monotonic())
    assert (state["present"], state["expected"], state["step"]) == (1, 2, 3)
    assert [row["hosts"] for row in state["groups"]] == [["host-0"], ["node-1"]]
    assert state["groups"][1]["state"] == "not in the job" and state["is_older"]


def test_watch_shows_the_supervisors_of_later_hosts(stack: ExitStack, memory: str) -> None:
    job = EngineJob(stack, memory, 1, 1).start()
    job.train(1)
    holders = {group: Holder(fresh_id(), f"node-{group}", 4711) for group in "0257"}
    with open_bus(memory) as bus:

        def claim(group: str) -> None:
            bus.compare_set(holder_register(group), None, encode_holder(holders[group]))

        claim("2")  # before those of the first host
        bus.write(holder_register("3"), b"of a later version")
        claim("5")
        with JobClient(memory) as desk:
            assert desk.supervisors() == {group: holders[group] for group in "25"}
        with watching(memory) as (watch, lines):
            lines.until("watching")
            assert watch.model.supervisors.keys() == {"2", "5"}
            claim("0")
            claim("7")
            job.start_group("1")
            for member in job.members:
                member.train(10_000)
            lines.until("epoch")
            wait_until(lambda: watch.model.supervisors == holders, "those that came later")


def test_end_and_verdict_are_two_events(memory: str) -> None:
    verdicts, lines = iter([None, "exit status 0"]), Lines()
    watch = Watch(memory, lines, lambda: next(verdicts))
    watch._end("its work is done")
    thread = threading.Thread(target=watch.wait, name="watch")
    thread.start()
    try:
        assert lines.until("verdict")["how"] == watch.how == "exit status 0"
    finally:
        watch.stop()
        thread.join(LIMIT_S)
    again = Watch(memory, lines, lambda: "exit status 0")
    again._end("exit status 0")
    again.stop()
    again.wait()
    assert lines.until("ended")["how"] == "exit status 0" and lines.events.empty()


def test_commit_that_was_read_from_a_register_may_be_older() -> None:
    peer = Peer("0", 0, 1)
    epoch = Record(1, "epoch", 1, 0, 0, "x", 0, 0, peer, _two_groups())
    first, second, third = (Record(n, "commit", 1, n, n, "x", 0, 0, peer) for n in (2, 3, 4))
    model = JobModel()
    model.begin(first, epoch, now=5.0)
    assert model.is_older
    model.see(second, 5.0)
    assert not model.is_older, "it was received, at the same time of the clock"
    model.begin(second, epoch, now=9.0)
    assert not model.is_older, "no commit while the bus was lost"
    model.begin(third, epoch, now=12.0)
    assert model.is_older


def test_losses_have_a_gap_where_the_group_was_away() -> None:
    model = JobModel()
    model.curves["1"] = LossCurve([(step, 1.0) for step in (2, 4, 9, 11)])
    assert model.losses_by_presence() == {"1": [[(2, 1.0), (4, 1.0), (9, 1.0), (11, 1.0)]]}
    model.course.absences.append(Absence("1", 5, 0.0, planned=False, n=3, steps=3, back=1.0))
    model.course.absences.append(Absence("0", 3, 0.0, planned=False, n=3, steps=3, back=1.0))
    assert model.losses_by_presence() == {"1": [[(2, 1.0), (4, 1.0)], [(9, 1.0), (11, 1.0)]]}
