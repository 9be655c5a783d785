"""The wire form of records and votes: canonical, small, and strict."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fft.messages.protocol as core
from fft.messages.protocol import (
    Decision,
    Drain,
    GroupEntry,
    Manifest,
    Peer,
    RankEntry,
    Record,
    UnreadableMessage,
    Vote,
)
from fft.messages.wire import (
    MAX_LIST,
    MissingList,
    Packed,
    Wire,
    decode,
    decode_packed,
    decode_votes,
    encode_packed,
    encode_register,
    encode_votes,
    list_name,
)


def members(groups: int, ranks: int = 8) -> tuple[GroupEntry, ...]:
    def rank(group: int, number: int) -> RankEntry:
        host = f"node-{group:05d}"
        address = f"http://{host}:{30000 + group * 37 % 9000}/"
        return RankEntry(number, 1, True, address, 1000 + number, host)

    return tuple(
        GroupEntry(str(g), f"node-{g:05d}:29500", tuple(rank(g, r) for r in range(ranks)))
        for g in range(groups)
    )


def epoch(groups: int = 2, number: int = 3, **fields: object) -> Record:
    record = Record(7, "epoch", number, 0, 5, "a1", 10, 10, Peer("0", 0, 1), members(groups))
    return replace(record, **fields)  # type: ignore[arg-type]


COMMIT = Record(8, "commit", 3, 1, 6, "a2", 12, 12, Peer("1", 0, 1), cause="x" * 2000)


def test_a_record_without_members_needs_no_list() -> None:
    there, here = Wire(), Wire()
    packed = decode(there.encode(Decision(COMMIT)))
    assert isinstance(packed, Packed)
    assert packed.members == ""
    assert here.whole(packed) == COMMIT


def test_member_list_is_read_once_for_all_records_with_that_list() -> None:
    there, here = Wire(), Wire()
    first, second = epoch(), epoch(number=4, n=9, by=Peer("1", 1, 2))
    packed = decode(there.encode(Decision(first)))
    assert isinstance(packed, Packed)
    assert here.whole(packed) is None
    assert here.complete(packed, encode_register(first.members)) == first
    again = decode(there.encode(Decision(second)))
    assert isinstance(again, Packed)
    assert here.whole(again) == second
    assert here.whole(there.pack(epoch(3))) is None


def test_announcement_has_the_encoding_of_the_register_record() -> None:
    wire = Wire()
    assert wire.encode(Decision(epoch())) == wire.encode_record(epoch())
    assert decode_packed(wire.encode_record(epoch())) == wire.pack(epoch())


def test_equal_records_pack_to_equal_bytes() -> None:
    writer, reader = Wire(), Wire()
    mine = writer.encode_record(epoch(5))
    read = reader.complete(decode_packed(mine), encode_register(epoch(5).members))
    assert reader.encode_record(read) == mine
    assert Wire().encode_record(read) == mine
    assert writer.encode_record(epoch(6)) != mine
    assert encode_packed(decode_packed(mine)) == mine


def test_a_packed_record_does_not_grow_with_its_members() -> None:
    wire = Wire()
    small, large = (len(wire.encode_record(epoch(groups))) for groups in (1, 2000))
    assert small == large < 450
    assert len(encode_register(epoch(2000).members)) < 40 * 2000 * 8


def test_only_the_newest_lists_are_held() -> None:
    wire = Wire()
    packed = [wire.pack(epoch(groups)) for groups in range(1, 8)]
    assert [wire.whole(p) is not None for p in packed] == [False] * 3 + [True] * 4
    wire.pack(epoch(4))  # used again, so it stays
    wire.pack(epoch(8))
    assert wire.whole(packed[3]) is not None
    assert wire.whole(packed[4]) is None


def bomb() -> bytes:
    return zlib.compress(b" " * (MAX_LIST + 1), 9)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, "is empty"),
        (b"", "truncated"),
        (b"no zlib", "has no list"),
        (encode_register(epoch(2).members)[:-1], "truncated"),
        (encode_register(epoch(3).members), "does not have the members"),
        (zlib.compress(b'[{"group": "0"}]'), "has no list"),
        (bomb(), "unpacks to more than"),
    ],
)
def test_mismatched_member_list_is_refused(data: bytes | None, expected: str) -> None:
    packed = Wire().pack(epoch(2))
    with pytest.raises(MissingList, match=expected) as caught:
        Wire().complete(packed, data)
    assert list_name(epoch(2)) in str(caught.value)


@pytest.mark.parametrize(
    "payload",
    [
        b'{"members":',
        b'{"members":"","record":{},"type":"record"}',
        encode_packed(Packed("", COMMIT)).replace(b'"n":8', b'"n":-1'),
        encode_packed(Packed("", epoch())),
        encode_packed(Packed("", COMMIT)).replace(b'"record"', b'"more":1,"record"'),
        b'{"members":"' + b"x" * 1024 * 1024,
        b"\xff",
    ],
)
def test_invalid_message_is_refused(payload: bytes) -> None:
    with pytest.raises(UnreadableMessage):
        decode(payload)


def test_other_messages_cross_as_they_are() -> None:
    drain = Drain(groups=("1",), by="supervisor")
    assert Wire().encode(drain) == core.encode(drain)
    assert decode(core.encode(drain)) == drain
    assert decode(core.encode(Decision(None))) == Decision(None)
    assert decode(Wire().encode(Decision(COMMIT, won=True))) == Decision(COMMIT, won=True)


peers = st.builds(Peer, st.text(min_size=1, max_size=8), st.integers(0, 9), st.integers(1, 9))
manifests = st.builds(Manifest, st.integers(0, 3), st.integers(0, 3))
digests = st.sampled_from([None, "", "a", "b"])
flags = st.booleans()
vote = st.builds(Vote, peers, manifests, flags, flags, flags, digests)
votes = st.lists(vote, max_size=12)


@given(votes)
def test_votes_come_back_as_they_were_cast(cast: list[Vote]) -> None:
    again = decode_votes(encode_votes(cast))
    assert sorted(again, key=repr) == sorted(cast, key=repr)
    assert encode_votes(again) == encode_votes(decode_votes(encode_votes(again)))


def test_equal_manifests_are_encoded_once() -> None:
    manifest = Manifest(100, 1 << 30, "0123456789abcdef")
    group = [Vote(Peer("12", rank, 1), manifest) for rank in range(8)]
    together = len(encode_votes(group))
    apart = sum(len(core.encode_vote(vote)) for vote in group)
    assert together < apart / 3


@pytest.mark.parametrize("word", [b"", b"[{}]", b'{"a":1}', b'[{"manifest":{}}]'])
def test_invalid_vote_bundle_is_refused(word: bytes) -> None:
    with pytest.raises(UnreadableMessage):
        decode_votes(word)


def test_lists_of_rival_proposals_lie_apart() -> None:
    rivals = [
        epoch(number=3),
        epoch(number=4),
        epoch(number=3, by=Peer("0", 0, 2)),
        epoch(number=3, by=Peer("0", 1, 1)),
        epoch(number=3, by=Peer("1", 0, 1)),
    ]
    assert len({list_name(record) for record in rivals}) == len(rivals)
    other = epoch(number=3, by=rivals[0].by)
    other = replace(other, members=other.members[:1])
    assert list_name(other) != list_name(rivals[0]), "one proposer's second attempt"
    assert list_name(Wire().pack(other)) == list_name(other)
