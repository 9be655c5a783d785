"""Tests of the verdict on votes, and of its agreement with the tables of older traces."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import Job

from fft.messages.causes import CauseCode
from fft.messages.effects import Decide
from fft.messages.protocol import Ballot, Manifest, Peer, Vote
from fft.protocol.tally import Abort, Commit, Expected, Live, Pending, Tally, tally
from fft.trace.older import OlderParticipant

PEERS = [Peer(group, rank, 1) for group in "012" for rank in (0, 1)]
STRANGER = Peer("0", 0, 2)
EXPECTED = Expected(frozenset(PEERS), step=7)
ENTRY = "entry of a.py:9"


def ballot(**other: object) -> list[Vote]:
    """Return a vote of every member; ``other`` are fields of the vote of 2/1."""
    names = {"leaving", "last", "skip", "digest"}
    manifest = Manifest(1, 4, "a", "f", None, "d", shard="", block="")
    votes = [Vote(peer, manifest, digest="s") for peer in PEERS]
    fields = {k: v for k, v in other.items() if k not in names}
    changed = {k: v for k, v in other.items() if k in names}
    votes[-1] = replace(votes[-1], manifest=replace(manifest, **fields), **changed)
    return votes


def code_of(votes: list[Vote], expected: Expected = EXPECTED) -> CauseCode | str:
    """Return the code of an ABORT, or the name of another verdict."""
    verdict = tally(votes, expected)
    return verdict.cause.code if isinstance(verdict, Abort) else type(verdict).__name__


# few values each, so that votes often match
digests = st.sampled_from([None, "a", "a", "a", "b"])
manifests = st.builds(
    Manifest,
    count=st.sampled_from([1, 1, 1, 2]),
    shapes=st.sampled_from(["", "", "", "x"]),
    fingerprint=digests,
    repeats=st.sampled_from([None, True, False]),
    data=digests,
    shard=st.sampled_from(["", "", "", "0"]),
    block=st.sampled_from(["", "", "", "", ENTRY, "end of a.py:9"]),
)
flags = st.sampled_from([False, False, False, True])
contents = st.builds(Vote, st.just(PEERS[0]), manifests, flags, flags, flags, digests)


@st.composite
def ballots(draw: st.DrawFn) -> list[Vote]:
    """Draw votes of up to all members, most of them alike, in any order."""
    usual, odd = draw(contents), draw(st.lists(contents, max_size=2))
    several = [usual] * 3 + odd
    voters = draw(st.one_of(st.just(PEERS), st.lists(st.sampled_from(PEERS), unique=True)))
    votes = [replace(draw(st.sampled_from(several)), peer=peer) for peer in voters]
    return draw(st.permutations(votes))


expectations = st.builds(
    Expected,
    st.just(frozenset(PEERS)),
    st.frozensets(st.sampled_from(PEERS), max_size=2),
    st.booleans(),
    st.just(7),
)


@given(ballots(), st.randoms(use_true_random=False))
def test_tally_of_parts_combines_into_tally_of_whole(
    votes: list[Vote], chance: random.Random
) -> None:
    """Parts overlap, come in any order, and are combined as any tree."""
    parts = [Tally.of(chance.sample(votes, chance.randint(0, len(votes)))) for _ in range(3)]
    parts += [Tally.of([vote]) for vote in votes]
    chance.shuffle(parts)
    while len(parts) > 1:
        i = chance.randrange(len(parts) - 1)
        parts[i : i + 2] = [parts[i].combine(parts[i + 1])]
    assert parts == [] or parts[0] == Tally.of(votes)


@given(ballots(), ballots(), ballots())
def test_tally_combination_is_associative_commutative_and_idempotent(
    a: list[Vote], b: list[Vote], c: list[Vote]
) -> None:
    x, y, z = map(Tally.of, (a, b, c))
    assert x.combine(y).combine(z) == x.combine(y.combine(z))
    assert x.combine(y) == y.combine(x)
    assert x.combine(x) == x == x.combine(Tally())


@given(ballots(), expectations)
def test_tally_verdict_does_not_depend_on_the_order_of_votes(
    votes: list[Vote], expected: Expected
) -> None:
    assert tally(votes, expected) == tally(votes[::-1], expected)
    assert Tally.of(votes).votes == sorted(votes, key=lambda vote: vote.peer)


@given(ballots(), expectations)
def test_tally_commits_only_complete_and_equal_votes(votes: list[Vote], expected: Expected) -> None:
    verdict = tally(votes, expected)
    assert isinstance(verdict, Pending) == (len(votes) < len(PEERS))
    if isinstance(verdict, Commit):
        for rank in (0, 1):
            same = [vote for vote in votes if vote.peer.rank == rank]
            assert len({vote.manifest.reduced for vote in same}) == 1
            assert len({vote.digest for vote in same} - {None}) <= 1
            prints = {vote.manifest.fingerprint for vote in same} - {None}
            assert len(prints) <= 1 or isinstance(verdict, Live)
        assert verdict.skip == any(vote.skip for vote in votes)
    if isinstance(verdict, Abort):
        assert verdict.cause.text and not (verdict.ranks and verdict.ends_job)


OLDER_ROWS = [  # PREPARED.ballot of hsdp, as it stands in older traces
    (["blocks_differ", "beside_a_step"], ["note_blocks", "note_beside_step", "propose_abort"]),
    (["blocks_differ"], ["note_blocks", "propose_abort"]),
    (["in_live_block", "manifests_fit", "digests_fit"], ["propose_live"]),
    (["manifests_fit", "gradients_fit", "digests_fit"], ["propose_commit"]),
    (["manifests_fit", "digests_fit"], ["note_unequal_gradients", "propose_abort"]),
    (["digests_fit", "data_differ", "somebody_skips"],
     ["note_misfit", "note_unequal_data", "note_skippers", "propose_abort"]),
    (["digests_fit", "data_differ"], ["note_misfit", "note_unequal_data", "propose_abort"]),
    (["digests_fit", "somebody_skips"], ["note_misfit", "note_skippers", "propose_abort"]),
    (["digests_fit"], ["note_misfit", "propose_abort"]),
    (["odd_ones_known"], ["note_differing", "propose_odd"]),
    ([], ["note_differing", "propose_end"]),
]  # fmt: skip
JOBS = {
    policy: Job(3, ranks=2, on_divergence=policy).until_running() for policy in ("stop", "heal")
}


@given(ballots(), st.sampled_from(["stop", "heal"]))
def test_tally_proposes_what_the_rows_of_older_tables_propose(
    votes: list[Vote], policy: str
) -> None:
    node = JOBS[policy].node("0")
    c = node.participant.config
    event = Ballot(node.local.token, tuple(sorted(votes, key=lambda vote: vote.peer)))
    older, new = replace(node.local), replace(node.local)
    row = next(
        (
            effects
            for guards, effects in OLDER_ROWS
            if all(OlderParticipant.guards[g](older, c, event) for g in ["all_voted", *guards])
        ),
        [],
    )
    proposed = [e for name in row for e in OlderParticipant.actions[name](older, c, event)]
    now = [
        effect
        for guard, action in (
            ("tally_commits", "propose_commit"),
            ("tally_aborts", "propose_refusal"),
        )
        if OlderParticipant.guards[guard](new, c, event)
        for effect in OlderParticipant.actions[action](new, c, event)
    ]
    assert now == proposed and all(isinstance(effect, Decide) for effect in now)
    assert (new.cause, new.skip, new.proposed) == (older.cause, older.skip, older.proposed)


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ({}, "Commit"),
        ({"block": ENTRY}, CauseCode.BLOCK_BESIDE_STEP),
        ({"block": ENTRY, "digest": "t"}, CauseCode.BLOCK_BESIDE_STEP),
        ({"digest": "t"}, CauseCode.REPLICAS_DIFFER),
        ({"digest": "t", "count": 2, "skip": True}, CauseCode.REPLICAS_DIFFER),
        ({"digest": None}, "Commit"),
        ({"skip": True}, "Commit"),
        ({"skip": True, "count": 0}, CauseCode.SKIPPED),
        ({"skip": True, "data": "e"}, CauseCode.SKIPPED),
        ({"data": "e", "count": 2}, CauseCode.DATA_DIFFERS),
        ({"shard": "1"}, CauseCode.DATA_DIFFERS),
        ({"data": None, "shard": "1"}, "Commit"),
        ({"count": 2}, CauseCode.MANIFESTS_DIFFER),
        ({"shapes": "b"}, CauseCode.MANIFESTS_DIFFER),
        ({"count": 2, "fingerprint": "g"}, CauseCode.MANIFESTS_DIFFER),
        ({"fingerprint": "g"}, CauseCode.GRADIENTS_DIFFER),
        ({"fingerprint": None}, "Commit"),
    ],
)
def test_tally_takes_the_first_verdict_that_holds(
    other: dict[str, object], verdict: CauseCode | str
) -> None:
    assert code_of(ballot(**other)) == verdict


def test_tally_enters_a_live_block_only_if_all_vote_for_it() -> None:
    entry = [replace(v, manifest=Manifest(block=ENTRY), digest=None) for v in ballot()]
    verdict = tally(entry, EXPECTED)
    assert isinstance(verdict, Live) and verdict.part == "entry"
    other = replace(entry[0], manifest=Manifest(block="entry of b.py:1"))
    assert code_of([other, *entry[1:]]) == CauseCode.BLOCKS_DIFFER
    assert code_of([replace(entry[0], digest="s"), *entry[1:]]) == "Live"
    odd = [replace(vote, digest=digest) for vote, digest in zip(entry, "ssssst", strict=True)]
    assert code_of(odd) == CauseCode.REPLICAS_DIFFER


@pytest.mark.parametrize(
    ("digests", "joiners", "heals", "ranks"),
    [
        ("ssssst", [], False, None),
        ("ssssst", [], True, PEERS[5:]),
        ("ssstst", [], True, PEERS[1:2]),
        ("ssssut", [], True, PEERS[4:]),
        ("ssssst", PEERS[5:], False, PEERS[5:]),
        ("ssssst", PEERS[4:], False, PEERS[5:]),
        ("sssuut", PEERS[5:], False, None),
    ],
)
def test_tally_names_divergent_ranks_or_ends_the_job(
    digests: str, joiners: list[Peer], heals: bool, ranks: list[Peer] | None
) -> None:
    votes = [replace(v, digest=digest) for v, digest in zip(ballot(), digests, strict=True)]
    expected = replace(EXPECTED, joiners=frozenset(joiners), heals=heals)
    verdict = tally(votes, expected)
    assert isinstance(verdict, Abort) and verdict.cause.code == CauseCode.REPLICAS_DIFFER
    assert (list(verdict.ranks), verdict.ends_job) == (ranks or [], ranks is None)


def test_tally_waits_for_every_member_and_takes_no_strangers_vote() -> None:
    votes = ballot()
    stranger = replace(votes[0], peer=STRANGER)
    assert code_of(votes) == code_of([*votes, votes[0]]) == "Commit"
    for wrong in ([], votes[1:], [stranger, *votes[1:]], [*votes, stranger]):
        assert code_of(wrong) == "Pending"


def test_tally_commit_lists_the_groups_that_leave() -> None:
    *others, last = ballot(last=True)
    leaving = [replace(others[0], leaving=True), *others[1:]]
    assert tally([*leaving, last], EXPECTED) == Commit(leaving=frozenset("02"))
    skip = [*others, replace(last, skip=True)]
    assert tally(skip, EXPECTED) == Commit(skip=True), "a last step that is skipped is repeated"


def code_of_all(votes: tuple[Vote, ...]) -> CauseCode | str:
    """Return the code of the verdict if the voters are all members."""
    return code_of(list(votes), Expected(frozenset(vote.peer for vote in votes)))


@pytest.mark.parametrize(
    ("manifests", "fit"),
    [
        ({("0", 0): "a", ("0", 1): "b", ("1", 0): "a", ("1", 1): "b"}, True),
        ({("0", 0): "a", ("0", 1): "b", ("1", 0): "b", ("1", 1): "a"}, False),
        ({("0", 0): "a", ("1", 0): "a"}, True),
    ],
)
def test_tally_compares_reductions_rank_by_rank(
    manifests: dict[tuple[str, int], str], fit: bool
) -> None:
    """Shards of one rank number are reduced with each other; those of two numbers may differ."""
    votes = tuple(Vote(Peer(*who, 1), Manifest(1, 4, s)) for who, s in manifests.items())
    assert code_of_all(votes) == ("Commit" if fit else CauseCode.MANIFESTS_DIFFER)


def test_tally_lets_ranks_of_a_group_reduce_different_tensors() -> None:
    """Pipeline stages do; only equal rank numbers of different groups must match."""
    for more, fit in ((0, True), (1, False)):
        counts = {("0", 0): 1, ("0", 1): 2, ("1", 0): 1, ("1", 1): 2 + more}
        votes = tuple(Vote(Peer(*who, 1), Manifest(n, 4, "a")) for who, n in counts.items())
        assert code_of_all(votes) == ("Commit" if fit else CauseCode.MANIFESTS_DIFFER)


@pytest.mark.parametrize(
    ("prints", "fit"),
    [
        (["a", "b", "a", "b"], True),
        (["a", "b", "a", "a"], False),
        (["a", "b", None, "b"], True),
        ([None, None, None, None], True),
    ],
)
def test_tally_compares_the_gradient_digests_that_were_taken(
    prints: list[str | None], fit: bool
) -> None:
    peers = [Peer(group, rank, 1) for group in "01" for rank in (0, 1)]
    votes = tuple(
        Vote(peer, Manifest(1, 4, "a", fingerprint=own))
        for peer, own in zip(peers, prints, strict=True)
    )
    assert code_of_all(votes) == ("Commit" if fit else CauseCode.GRADIENTS_DIFFER)


@pytest.mark.parametrize(
    ("data", "fit"),
    [
        ([("", "d"), ("", "d"), ("", "d"), ("", "d")], True),
        ([("", "d"), ("", "d"), ("", "d"), ("", "e")], False),
        ([("", "d"), ("", "e"), ("", "d"), ("", "e")], False),
        ([("", "d"), ("", None), ("", None), ("", "d")], True),
        ([("0", "d"), ("0", "d"), ("1", "e"), ("1", "e")], True),
        ([("0", "d"), ("0", "e"), ("1", "f"), ("1", "f")], False),
        ([("", "d"), ("", "d"), ("1", "d"), ("1", "d")], False),
    ],
)
def test_tally_compares_data_of_one_shard(data: list[tuple[str, str | None]], fit: bool) -> None:
    peers = [Peer(group, rank, 1) for group in "01" for rank in (0, 1)]
    votes = tuple(
        Vote(peer, Manifest(1, 4, "a", data=digest, shard=shard))
        for peer, (shard, digest) in zip(peers, data, strict=True)
    )
    assert code_of_all(votes) == ("Commit" if fit else CauseCode.DATA_DIFFERS)
