"""Attacks on the bus of real engines, on the decoders, and on a whole job under ``fft run``."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_job import EngineJob
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import wait_until

from fft.bus import MAX_MESSAGE_BYTES
from fft.bus.base import HEAD, RING_MESSAGES
from fft.bus.memory import MemoryBus
from fft.bus.sealed import SealedBus
from fft.bus.token import JobToken, TokenError
from fft.launch.services import handed_over
from fft.messages.commands import Evict, decode_command, encode_command
from fft.messages.progress import SpeedReport, decode_report, encode_report
from fft.messages.protocol import (
    Ack,
    Death,
    Decision,
    Drain,
    GroupEntry,
    Hello,
    Join,
    Leave,
    Manifest,
    Peer,
    RankEntry,
    Ready,
    Record,
    Token,
    UnreadableMessage,
    Vote,
    decode,
    decode_record,
    decode_vote,
    encode,
    encode_record,
    encode_vote,
)
from fft.messages.wire import Wire, decode_packed, decode_votes, encode_votes, inbox_name
from fft.messages.wire import decode as decode_wire
from fft.util.log_sampler import LogSampler

ATTACKS = 100_000
ROOT = Path(__file__).parents[2]

PEER = Peer("0", 0, 1)
HELLO = Hello(PEER, 1, "127.0.0.1:29500", "http://host-0:1/", 1000, "host-0", 3, "ab", 6, 6)
ENTRY = GroupEntry("0", "127.0.0.1:29500", (RankEntry(0, 1, True, "http://h:1/", 7, "h"),))
EPOCH = Record(9, "epoch", 2, 0, 3, "ab", 6, 6, PEER, (ENTRY,), cause="é\u2028")
COMMIT = Record(10, "commit", 2, 1, 4, "cd", 8, 8, PEER)
MESSAGES = [
    encode(message)
    for message in (
        Death("1", 0, 1000, "host-1", "mallory", "XID"),
        Drain(("0", "1"), "mallory"),
        Leave(Peer("1", 0, 1)),
        Join(HELLO),
        Ack(HELLO, Token(1, 3)),
        Ready(PEER, 2),
        Decision(EPOCH),
        Decision(COMMIT),
    )
] + [Wire().encode(Decision(EPOCH))]
COMMANDS = [encode_command(Evict("0" * 8, "1", "mallory", 0, restart=True))]


class Attacked:
    """A job with a token that has trained three steps and waits, and its attacker's access."""

    def __init__(self, stack: ExitStack, **timeouts: float) -> None:
        self.token = JobToken.fresh()
        name = f"trust-{uuid.uuid4().hex}"
        self.raw = MemoryBus(name)
        stack.callback(self.raw.close)
        self.raw.extra = 2**20
        self.frames: list[bytes] = []
        self.raw.subscribe(self.frames.append, lambda error: None)
        self.heads: list[bytes] = []
        opens: Callable[[str], SealedBus] = lambda url: SealedBus(MemoryBus(name), self.token)  # noqa: E731
        self.job = EngineJob(stack, f"memory://{name}", 2, 1, opens).start(**timeouts)
        for steps in (1, 2, 3):
            self.job.train(steps)
            self.heads.append(self.raw.read(HEAD) or b"")
        wait_until(
            lambda: {m.engine.local.state for m in self.job.members} == {"NORMAL"}, "all wait"
        )
        self._introduce()

    def _introduce(self) -> None:
        """Let every session be received by all engines, because a replay from an unknown session
        would be accepted once.

        A participant that joined before the others listened, and decided nothing, would have such a
        session.
        """
        engines = [m.engine for m in self.job.members]
        fenced = {engine: engine.fenced + len(engines) for engine in engines}
        for engine in engines:
            engine.bus.broadcast(encode(Death("nobody", 0, 1, "nowhere", "test", "none")))
        wait_until(
            lambda: all(engine.fenced >= fenced[engine] for engine in engines), "all are heard"
        )

    def refused(self) -> Counter[str]:
        """Return the number of refusals of all engines together."""
        return sum((Counter(m.bus.refusals()) for m in self.job.members), Counter())


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def forged_frames() -> list[bytes]:
    """Return the messages sealed with a token that the job does not have."""
    made: list[bytes] = []
    name = f"outside-{uuid.uuid4().hex}"
    with MemoryBus(name) as raw, SealedBus(MemoryBus(name), JobToken.fresh()) as outsider:
        raw.extra = 2**20
        raw.subscribe(made.append, lambda error: None)
        for payload in MESSAGES:
            outsider.broadcast(payload)
        wait_until(lambda: len(made) == len(MESSAGES), "all are recorded")
    return made


def bad_frames(own: list[bytes], dice: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield the reason for which a frame must be refused ("" if it depends), and the frame."""
    forged = forged_frames()
    huge = b"fft1 " + bytes(MAX_MESSAGE_BYTES + 300)
    while True:
        yield "repeated", dice.choice(own)
        yield "unsealed", dice.choice(MESSAGES)
        yield "forged", dice.choice(forged)
        yield "unsealed", b"\0" + dice.randbytes(dice.randrange(300))
        frame = bytearray(dice.choice(own))
        yield "", bytes(frame[: dice.randrange(len(frame))])
        frame[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
        yield "", bytes(frame)
        if dice.randrange(100) == 0:
            yield "oversized", huge


def attack(at: Attacked, frames: Iterator[tuple[str, bytes]], count: int) -> Counter[str]:
    """Broadcast ``count`` bad frames at the pace of their listeners; return the number by
    reason."""
    why: Counter[str] = Counter()
    before = at.refused().total()
    for number in range(1, count + 1):
        reason, frame = next(frames)
        why[reason] += 1
        at.raw.broadcast(frame)
        if number % (RING_MESSAGES // 2) == 0 or number == count:
            target = before + number * len(at.job.members)
            wait_until(lambda target=target: at.refused().total() >= target, "all are refused")
    return why


@pytest.mark.long
def test_100_000_bad_messages_move_nothing(stack: ExitStack) -> None:
    at = Attacked(stack)
    engines = [m.engine for m in at.job.members]
    states = [engine.local for engine in engines]
    keys, frames = at.raw.key_count(), bad_frames(at.frames[:], random.Random(4))
    at.frames.clear()
    why = attack(at, frames, ATTACKS // 2)
    at.frames.clear()
    gc.collect()
    blocks = sys.getallocatedblocks()
    why += attack(at, frames, ATTACKS // 2)
    at.frames.clear()
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 2_000, "memory grows with what is refused"
    assert [engine.local for engine in engines] == states
    assert all(engine.local is state for engine, state in zip(engines, states, strict=True))
    assert at.raw.key_count() == keys
    refused = at.refused()
    assert refused.total() == ATTACKS * len(engines)
    by_chance = why.pop("") * len(engines)
    for reason, count in why.items():
        assert 0 <= refused[reason] - count * len(engines) <= by_chance
    at.job.train(6)
    assert [m.restored for m in at.job.members] == [0, 0]


def test_frames_of_the_broadcast_are_nothing_in_an_inbox(stack: ExitStack) -> None:
    at = Attacked(stack)
    states = [m.engine.local for m in at.job.members]
    for member in at.job.members:
        for frame in at.frames[:]:
            at.raw.send(inbox_name(member.peer), frame)
    sent = 2 * len(at.frames)
    wait_until(lambda: at.refused() == Counter(forged=sent), "all are refused")
    assert [m.engine.local for m in at.job.members] == states


def test_persistent_forged_head_is_not_obeyed_and_stops_the_job(stack: ExitStack) -> None:
    at = Attacked(stack, bus_retry=0.1, bus_limit=20.0, vote_window=60.0)
    record = decode_packed(at.heads[-1][32:]).record
    forged = Record(record.n + 1, "abort", record.epoch, record.txn + 1, 0, "evil", 0, 0, PEER)
    honest = at.heads[-1]
    at.raw.write(HEAD, honest[:32] + Wire().encode_record(forged))
    for member in at.job.members:
        member.train(4)
    wait_until(lambda: any(m.engine.local.bus_down for m in at.job.members), "the bus is in doubt")
    assert all(m.engine.local.head == record for m in at.job.members)
    assert all(m.steps == 4 and m.committed[-1].step == 3 for m in at.job.members)
    at.raw.write(HEAD, honest)  # only the process that wrote it could
    at.job.train(5)
    for member in at.job.members:
        assert [r.step for r in member.committed] == [1, 2, 3, 4, 5]


def test_a_forged_head_that_stays_ends_in_doubt(stack: ExitStack) -> None:
    at = Attacked(stack, bus_retry=0.1, bus_limit=1.0, vote_window=0.5)
    at.raw.write(HEAD, b"{}")
    for member in at.job.members:
        member.train(4)
    wait_until(lambda: all(m.ended for m in at.job.members), "all stop")
    assert {m.ended.error for m in at.job.members if m.ended} == {"InDoubt"}
    assert all(m.committed[-1].step == 3 for m in at.job.members)


def test_job_stops_when_its_head_register_goes_back(stack: ExitStack) -> None:
    at = Attacked(stack, bus_retry=0.1, bus_limit=1.0, vote_window=0.5)
    at.raw.write(HEAD, at.heads[0])
    for member in at.job.members:
        member.train(4)
    wait_until(lambda: all(m.ended for m in at.job.members), "all stop")
    assert all(m.committed[-1].step == 3 for m in at.job.members)
    assert {m.ended.error for m in at.job.members if m.ended} == {"InDoubt"}


class PutBack(MemoryBus):
    """A bus whose attacker lets this client's commit win, puts the head back, and deletes the
    ballots.

    This happens before the client gets its answer and sends its announcement, and it waits until
    another participant in doubt has decided otherwise.
    """

    armed = False
    waits: Callable[[], None]

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        held = super().compare_set(key, expected, desired)
        if PutBack.armed and key == HEAD and held == desired and b'"commit"' in desired:
            PutBack.armed = False
            self.write(HEAD, expected or b"")
            for slot in range(8):
                self.delete(f"ballot{slot}")
            wait_until(lambda: self.read(HEAD) != expected, "who is in doubt has decided")
        return held


def test_a_commit_that_is_taken_back_is_noticed_by_both_sides(stack: ExitStack) -> None:
    """One participant has applied the commit and the other has rolled back; neither continues."""
    PutBack.armed = False
    name = f"trust-{uuid.uuid4().hex}"
    raw, token = stack.enter_context(MemoryBus(name)), JobToken.fresh()
    raw.extra = 2**20
    opens: Callable[[str], SealedBus] = lambda url: SealedBus(PutBack(name), token)  # noqa: E731
    job = EngineJob(stack, f"memory://{name}", 2, 1, opens)
    job.start(bus_retry=0.1, bus_limit=2.0, vote_window=0.5)
    job.train(3)
    wait_until(lambda: {m.engine.local.state for m in job.members} == {"NORMAL"}, "all wait")
    PutBack.armed = True
    for member in job.members:
        member.train(5)
    wait_until(lambda: all(m.ended for m in job.members), "both stop")
    assert {m.ended.error for m in job.members if m.ended} == {"InDoubt"}
    other, winner = sorted(job.members, key=lambda m: m.committed[-1].step)
    assert winner.committed[-1].step == 4, "it completed the ballot, and its commit had won"
    assert other.committed[-1].step == 3 and other.restored == 1
    assert decode_packed((raw.read(HEAD) or b"")[32:]).record.kind == "abort", "nobody went on"


def test_a_count_is_spoken_of_at_powers_of_ten() -> None:
    tally = LogSampler()
    assert [n for _ in range(1234) if (n := tally.add("x"))] == [1, 10, 100, 1000]
    assert (tally.add("y"), tally.counts()) == (1, {"x": 1234, "y": 1})


def test_a_token_is_handed_over_by_a_file(tmp_path: Path) -> None:
    with handed_over(None, {}) as made:
        assert made is not None
        JobToken.from_file(made)
    assert not made.exists()
    path = tmp_path / "t"
    for _ in range(2):
        with handed_over(path, {"FFT_TOKEN": "of no matter"}) as kept:
            assert kept == path
            first = JobToken.from_file(path).text()
    assert JobToken.from_file(path).text() == first
    with handed_over(None, {"FFT_TOKEN_FILE": str(path)}) as named:
        assert named == path
    with handed_over(None, {"FFT_TOKEN": first}) as nothing:
        assert nothing is None
    with pytest.raises(TokenError), handed_over(None, {"FFT_TOKEN": "short"}):
        pass


# --- decoders ---------------------------------------------------------------------------------

_ODD: list[Any] = [
    None,
    True,
    -1,
    2**64,
    10**400,
    1e308,
    "",
    "x" * 3000,
    "\ud800",
    "\0",
    [],
    {},
    [[]],
    {"type": "death"},
]
DECODERS: list[tuple[Callable[[bytes], Any], list[bytes]]] = [
    (decode_wire, MESSAGES),
    (decode, MESSAGES),
    (decode_command, COMMANDS),
    (decode_report, [encode_report(SpeedReport("1", 0, 3, 17, 0.25))]),
    (decode_packed, [Wire().encode_record(EPOCH), Wire().encode_record(COMMIT)]),
    (decode_record, [encode_record(EPOCH)]),
    (decode_vote, [encode_vote(Vote(PEER, Manifest(1, 4, "s")))]),
    (decode_votes, [encode_votes([Vote(PEER, Manifest(1, 4, "s")), Vote(PEER, Manifest())])]),
]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every place in JSON data."""
    yield path
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(item, (*path, key))


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _with(copy[path[0]], path[1:], new)
    return copy


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Callable[[bytes], Any], bytes]:
    """Draw a decoder and a valid message of it with a modification."""
    decoder, valid = draw(st.sampled_from(DECODERS))
    data = draw(st.sampled_from(valid))
    how = draw(st.integers(0, 5))
    if how == 0:  # another type or value somewhere
        value = json.loads(data)
        path = draw(st.sampled_from(list(_places(value))))
        data = json.dumps(_with(value, path, draw(st.sampled_from(_ODD)))).encode()
    elif how == 1:  # some bits are flipped
        changed = bytearray(data)
        for at in draw(st.lists(st.integers(0, 8 * len(data) - 1), min_size=1, max_size=6)):
            changed[at // 8] ^= 1 << at % 8
        data = bytes(changed)
    elif how == 2:  # truncated, or doubled
        data = data[: draw(st.integers(0, len(data)))] + data[draw(st.integers(0, len(data))) :]
    elif how == 3:  # nested deeply, or a number without an end
        deep = draw(st.sampled_from([b"[" * 20_000, b'{"a":' * 5_000, b"9" * 20_000]))
        at = draw(st.integers(0, len(data)))
        data = data[:at] + deep + data[at:]
    elif how == 4:  # bytes that are not text
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=8)) + data[at:]
    else:
        data = draw(st.binary(max_size=200))
    return decoder, data


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_decoder_accepts_or_names_the_defect(case: tuple[Callable[[bytes], Any], bytes]) -> None:
    decoder, data = case
    try:
        decoder(data)
    except UnreadableMessage as error:
        json.dumps({"reason": str(error)}).encode()


def test_the_longest_message_and_one_byte_more() -> None:
    for padding, expected in ((MAX_MESSAGE_BYTES, "JSON"), (MAX_MESSAGE_BYTES + 1, "limit")):
        with pytest.raises(UnreadableMessage, match=expected):
            decode_wire(b"x" * padding)
        with pytest.raises(UnreadableMessage, match=expected):
            decode_command(b"x" * padding)


# --- other programs, and a whole job --------------------------------------------------------------


def example() -> str:
    """Return the program that docs/bus.md shows."""
    text = (ROOT / "docs" / "bus.md").read_text()
    return text.partition("```python\n")[2].partition("```")[0]


def said_by_the_example(token: JobToken, job: str, generation: str, epoch: int) -> bytes:
    command = [sys.executable, "-I", "-S", "-c", example(), job, generation, str(epoch)]
    env = {"FFT_TOKEN": token.text()}
    return subprocess.run(command, env=env, capture_output=True, check=True, timeout=60).stdout


def test_documented_program_drives_the_job(stack: ExitStack) -> None:
    at = Attacked(stack)
    name = at.raw.url.removeprefix("memory://")
    at.raw.broadcast(said_by_the_example(JobToken.fresh(), name, at.raw.generation, 1))
    at.raw.broadcast(said_by_the_example(at.token, "another-job", at.raw.generation, 1))
    wait_until(lambda: at.refused() == Counter(forged=4), "both refuse both")
    at.job.train(4)
    at.raw.broadcast(said_by_the_example(at.token, name, at.raw.generation, 1))
    stays, leaves = at.job.members
    for member in at.job.members:
        member.train(20)
    wait_until(lambda: leaves.ended is not None, "the drained group leaves with its next commit")
    wait_until(lambda: stays.committed[-1].step == 20, "the other goes on alone")
    assert leaves.committed[-1].step < 20
    assert leaves.ended and (leaves.ended.error, stays.ended) == (None, None)
    assert [m.restored for m in at.job.members] == [0, 0]
