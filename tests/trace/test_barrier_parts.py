"""Tests that judging the barriers of a long history in parts gives the same verdict in less memory.

The moves are fed in the order of `fft audit`: interleaved by the register record that each
participant has reached.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush

import pytest
from jobs import Hasty, Job, calm, go_on_without, history_of, wander

from fft.messages.protocol import Ack, Ballot, Begin, Decision, Join, Leave, Peer, Ready
from fft.protocol.invariants import History, Move
from fft.protocol.participant import Outcome
from fft.trace.barriers import Barriers, judge_live_sets


class Counting(Barriers):
    """A judge that also counts parts and the turns that it keeps."""

    parts = 0
    most = 0

    def __init__(self, traced: Iterable[Peer], lives: int) -> None:
        """Create a judge; ``lives`` is as in `SOME`."""
        self.SOME = lives
        super().__init__(list(traced))

    def take(self, move: Move) -> None:
        kept = self.kept()
        super().take(move)
        self.most = max(self.most, self.kept())
        self.parts += self.kept() < kept

    def kept(self) -> int:
        return sum(map(len, self._turns.values()))


def in_parts(history: History, lives: int) -> Counting:
    """Return the result of the whole history."""
    barriers = Counting(history.moves, lives)
    moves = {peer: iter(found) for peer, found in history.moves.items()}
    ahead = {peer: next(found, None) for peer, found in moves.items()}
    stands = dict.fromkeys(moves, 0)

    def look(peer: Peer) -> int:
        move = ahead[peer]
        if move is not None and move.before.head is not None:
            stands[peer] = max(stands[peer], move.before.head.n)
        return stands[peer]

    heap = sorted((look(peer), peer) for peer in moves)
    while heap:
        at, peer = heappop(heap)
        while (move := ahead[peer]) is not None and look(peer) == at:
            barriers.take(move)
            ahead[peer] = next(moves[peer], None)
        if ahead[peer] is None:
            barriers.ended(peer)
        else:
            heappush(heap, (look(peer), peer))
    return barriers


def without_one(history: History, rng: random.Random) -> History:
    """Remove one participant's trace."""
    gone = rng.choice([peer for peer, found in history.moves.items() if found])
    return History({peer: list(found) for peer, found in history.moves.items() if peer != gone})


def heard_elsewhere(history: History, rng: random.Random) -> History:
    """Let a participant receive a message, a record or votes once more, earlier or later than
    sent."""
    moves = {peer: list(found) for peer, found in history.moves.items()}
    kinds = (Ready, Begin, Ack, Join, Leave, Decision, Ballot)
    words = [m.event for found in moves.values() for m in found if isinstance(m.event, kinds)]
    if not words:
        return history
    found = moves[rng.choice([peer for peer in moves if moves[peer]])]
    i = rng.randrange(len(found))
    same = replace(found[i], after=found[i].before, out=Outcome("ignored"))
    found.insert(i, replace(same, event=rng.choice(words), place="heard elsewhere"))
    return History(moves)


def spoiled(history: History, rng: random.Random) -> Iterator[History]:
    """Lose, swap or alter one or two moves."""
    for _ in range(6):
        yield heard_elsewhere(history, rng)
    untraced = without_one(history, rng)
    yield untraced
    for _ in range(4):
        yield heard_elsewhere(untraced, rng)
    for _ in range(6):
        moves = {peer: list(found) for peer, found in history.moves.items()}
        for _ in range(rng.choice((1, 1, 2))):
            found = moves[rng.choice([peer for peer in moves if moves[peer]])]
            leaves = [i for i, m in enumerate(found) if ("healing", "training") in m.roles]
            enters = [i for i, m in enumerate(found) if m.came_ready]
            match rng.randrange(5):
                case 0 if found:
                    del found[rng.randrange(len(found))]
                case 1 if len(found) > 1:
                    i = rng.randrange(len(found) - 1)
                    found[i], found[i + 1] = found[i + 1], found[i]
                case 2 if leaves:
                    i = rng.choice(leaves)
                    epoch = found[i].after.epoch
                    assert epoch is not None
                    fewer = replace(epoch, members=epoch.members[:-1])
                    found[i] = replace(found[i], after=replace(found[i].after, epoch=fewer))
                case 3 if leaves:
                    del found[rng.choice(leaves)]
                case 4 if enters:
                    del found[rng.choice(enters)]
        yield History(moves)


def wandered(seed: int) -> tuple[History, random.Random]:
    rng = random.Random(seed)
    job = Hasty(2) if seed % 7 == 0 else Job(rng.choice((2, 3, 3)), ranks=1 + seed % 2)
    wander(job, rng, 400)
    if not isinstance(job, Hasty):
        calm(job, rounds=4)
    return history_of(job), rng


REPEATED = (227, 265, 368, 387, 439)
"""Seeds in which a message is repeated many epochs after it was first sent."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "seeds", [REPEATED, range(5), pytest.param(range(5, 60), marks=pytest.mark.long)]
)
def test_the_verdict_of_the_parts_is_that_of_the_whole(seeds: Iterable[int]) -> None:
    """The runs are random; some are sound and some have a violation."""
    parts = good = bad = 0
    for seed in seeds:
        history, rng = wandered(seed)
        for case in (history, *spoiled(history, rng)):
            whole = judge_live_sets(case)
            for lives in (1, 8):
                barriers = in_parts(case, lives)
                finding = barriers.finding(is_whole=True)
                details = seed, lives, whole, finding
                assert (finding.violation is None) == (whole.violation is None), details
                assert whole.violation is not None or finding.checks == whole.checks, details
                parts += barriers.parts
                good, bad = good + (whole.violation is None), bad + (whole.violation is not None)
    assert min(parts, good, bad) > 20, (parts, good, bad)


def test_message_from_an_untraced_peer_ends_no_earlier_part() -> None:
    """A participant receives it before it enters an epoch, so the peer had left that epoch by then
    and no participant can have met it there."""
    job = Job(3).until_running()
    for _ in range(8):
        job.step()
        job.fail(job.node("2"))
        job.step()
        job.step()
    history = History({peer: list(found) for peer, found in job.record.moves.items()})
    del history.moves[(untraced := job.node("1").peer)]
    assert in_parts(history, 1).finding(is_whole=True).violation is None
    moves = history.moves[job.node("0").peer]
    enters = [i for i, m in enumerate(moves) if m.came_ready and m.after.token.epoch == 2]
    move = moves[enters[0]]
    early = replace(move, after=move.before, event=Ready(untraced, 3), out=Outcome("ignored"))
    moves.insert(enters[0], early)
    assert judge_live_sets(history).violation is not None
    assert in_parts(history, 1).finding(is_whole=True).violation is not None


@pytest.mark.long
def test_memory_does_not_grow_with_the_epochs() -> None:
    most = []
    for epochs in (100, 400):
        job = Job(3).until_running()
        for number in range(epochs):
            job.fail(job.node(str(number % 3)))
            job.step()
            job.step()
        barriers = in_parts(job.record, 48)
        finding = barriers.finding(is_whole=True)
        assert finding.violation is None
        assert finding.checks >= 3 * epochs
        most.append(barriers.most)
    assert most[1] == most[0], most


def test_part_waits_for_members_in_an_older_epoch() -> None:
    """A process that was excluded is silent for long; then it returns or ends."""
    job = Job(3).until_running()
    slow = job.node("2")
    job.fail(job.node("0"))
    for _ in range(30):
        go_on_without(job, slow)
        job.fail(job.node("0"))
    assert calm(job) > 0
    for _ in range(30):
        job.fail(job.node("1"))
        job.step()
        job.step()
    barriers = in_parts(job.record, 1)
    assert barriers.finding(is_whole=True) == judge_live_sets(job.record)
    assert barriers.parts > 0


def test_history_with_gaps_is_not_judged() -> None:
    job = Job(2).until_running()
    barriers = in_parts(job.record, 1)
    assert barriers.finding(is_whole=False).checks == 0
