"""How records, votes and messages cross the bus. Pure data: touches neither bus nor clock.

An epoch record lists all members with some hundred bytes per rank, and every rank reads it. To keep
the cost of an epoch with unchanged members constant, a record crosses the bus without the list and
carries its digest instead (``Packed``). The list is in a register of its own, which is written
before the record is proposed; a rank that does not hold the list yet reads it (``Wire``). The core
and the traces only see whole records. The newest epoch record has a register too, so that an
observer finds the members after the head has moved on to a commit.

Lists are compressed. Repeated names, hosts and addresses shrink to some 30 bytes per rank, so that
``MAX_VALUE_BYTES`` of the bus hold the list of more than 100,000 ranks.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

import fft.messages.protocol as core
from fft.errors import FftError
from fft.messages.codec import Codec
from fft.messages.protocol import (
    MAX_MESSAGE,
    BusMessage,
    Decision,
    GroupEntry,
    Manifest,
    Peer,
    Record,
    UnreadableMessage,
    Vote,
    content_of,
)

SCOPES = "scopes"
"""Register of a job whose stages have scopes of their own: the names of all scopes but the first,
whose bus is the job's, as JSON."""
EPOCH = "epoch"
"""Register of the newest epoch record; the winner writes it after the decision."""

MAX_LIST = 64 * 1024 * 1024
"""Maximum size in bytes of a member list before compression; enough for about 500,000 ranks."""

LEFT = "left/"
"""Prefix of the registers that name the incarnation of a rank that left in good order."""

_KEEP = 4
"""Number of lists kept: the current epoch's, a proposed one, and those that late messages name."""

_CONFIG = ConfigDict(strict=True, extra="forbid")
Members = tuple[GroupEntry, ...]


@dataclass(frozen=True, config=_CONFIG)
class Packed:
    """A record without its members, as stored in the head register and announced."""

    members: str
    """Digest of the member list; empty if there are no members."""
    record: Record
    type: Literal["record"] = "record"


Register = Packed | Members | int
"""The value of a register: a record, the member list of an epoch, or an incarnation that left."""


@dataclass(frozen=True, config=_CONFIG)
class _Ballots:
    """YES votes that differ only in their voter."""

    manifest: Manifest
    peers: tuple[Peer, ...]
    leaving: bool = False
    last: bool = False
    skip: bool = False
    digest: str | None = None
    checkpoint: bool = False


class MissingList(FftError):
    """The member list of a record is missing from its register."""


_PACKED = Codec[Packed](Packed, omit="defaults")
_MEMBERS = Codec[Members](Members)
_BALLOTS = Codec[tuple[_Ballots, ...]](tuple[_Ballots, ...], omit="defaults")

encode_packed = _PACKED.encode
"""Encode a packed record canonically: equal records have equal bytes."""


# --- names on the bus -----------------------------------------------------------------------


def left_name(group: str, rank: int) -> str:
    """Return the key of the incarnation of a rank that left its scope in good order."""
    return f"{LEFT}{group}.{rank}"


def inbox_name(peer: Peer) -> str:
    """Return the inbox of one incarnation of a participant, which excludes stale messages."""
    return f"inbox/{peer.group}/{peer.rank}/{peer.inc}"


def list_name(record: Record | Packed) -> str:
    """Return the register for the members of an epoch record, which never holds another list.

    The name differs from that of the same proposer's next attempt, because this one's outcome may
    still be open. The writer removes its register: the proposer of the next epoch removes that of
    the last one, and every proposer removes those of its lost proposals.
    """
    if isinstance(record, Packed):
        digest, record = record.members, record.record
    else:
        digest = _digest_of(record.members)
    by, epoch = record.by, record.epoch
    return f"members/{by.group}/{by.rank}/{by.inc}/{epoch % 2}/{digest}"


def _digest_of(members: Members) -> str:
    global _digested
    digest = next((digest for held, digest in _digested if held is members), None)
    if digest is None:
        digest = hashlib.blake2b(_MEMBERS.encode(members), digest_size=16).hexdigest()
        _digested = ((members, digest), *_digested[: _KEEP - 1])
    return digest


_digested: tuple[tuple[Members, str], ...] = ()
"""The lists whose digests were computed last; replaced as a whole, so any thread may read it."""


# --- votes ----------------------------------------------------------------------------------


def encode_votes(votes: Iterable[Vote]) -> bytes:
    """Encode votes as one ballot entry, with equal contents stored once."""
    alike: dict[tuple[Any, ...], list[Peer]] = {}
    for vote in votes:
        alike.setdefault(content_of(vote), []).append(vote.peer)
    word = tuple(_Ballots(key[0], tuple(peers), *key[1:]) for key, peers in alike.items())
    return _BALLOTS.encode(word)


def decode_votes(data: bytes) -> tuple[Vote, ...]:
    """Decode a ballot entry into votes; votes with equal contents are adjacent.

    Raises:
        UnreadableMessage: The data are not a ballot entry.
    """
    return tuple(
        Vote(peer, *content_of(some)) for some in _BALLOTS.decode(data) for peer in some.peers
    )


# --- records and messages -------------------------------------------------------------------


def decode(payload: bytes) -> BusMessage | Packed:
    """Decode a message of the topic ``protocol``; a record may still lack its members.

    Raises:
        UnreadableMessage: The message is too long, or not exactly in the form of a message.
    """
    if len(payload) > MAX_MESSAGE:
        raise UnreadableMessage(f"message of {len(payload)} bytes; the limit is {MAX_MESSAGE}")
    if payload.startswith(b'{"members":'):  # how every packed record begins, and nothing else
        return decode_packed(payload)
    return core.decode(payload)


def decode_packed(data: bytes) -> Packed:
    """Decode a record without its members. Raises ``UnreadableMessage``."""
    packed = _PACKED.decode(data)
    if packed.record.members:
        raise UnreadableMessage("record.members: a packed record names its members by digest")
    return packed


class Wire:
    """Packs and unpacks records, keeping the newest member lists. For use by one thread."""

    def __init__(self) -> None:
        self._held: dict[str, Members] = {}

    def pack(self, record: Record) -> Packed:
        """Return the record without its members, and keep their list."""
        if not record.members:
            return Packed("", record)
        return Packed(self._digest(record.members), replace(record, members=()))

    def encode_record(self, record: Record) -> bytes:
        """Encode a record canonically for the head register."""
        return encode_packed(self.pack(record))

    def encode(self, message: BusMessage) -> bytes:
        """Encode a message for the bus."""
        if isinstance(message, Decision) and message.record is not None and not message.won:
            return self.encode_record(message.record)
        return core.encode(message)

    def whole(self, packed: Packed) -> Record | None:
        """Return the whole record, or None if its list is not held."""
        if not packed.members:
            return packed.record
        members = self._held.get(packed.members)
        return None if members is None else replace(packed.record, members=members)

    def found(self, packed: Packed, read: Callable[[str], bytes | None]) -> Record | None:
        """Return the whole record, fetching a missing list by ``read``; None if the list is
        gone."""
        if (record := self.whole(packed)) is not None:
            return record
        try:
            return self.complete(packed, read(list_name(packed)))
        except MissingList:
            return None

    def complete(self, packed: Packed, data: bytes | Members | None) -> Record:
        """Return the whole record, given the contents of its list's register, encoded or not.

        Raises:
            MissingList: The register is empty or has another list than the digest names.
        """
        where = f"register {list_name(packed)!r}"
        if data is None:
            raise MissingList(f"{where} is empty; expected the members of {_name(packed)}")
        members = _read_members(data, where) if isinstance(data, bytes) else data
        if self._digest(members) != packed.members:
            raise MissingList(f"{where} does not have the members of {_name(packed)}")
        return replace(packed.record, members=members)

    def _digest(self, members: Members) -> str:
        # Quick where the entries are the same objects, as in all records that were read here.
        digest = next((d for d, held in self._held.items() if held == members), None)
        if digest is None:
            digest = _digest_of(members)
        self._held[digest] = self._held.pop(digest, members)
        while len(self._held) > _KEEP:
            del self._held[next(iter(self._held))]
        return digest


def encode_register(value: Register) -> bytes:
    """Encode the value of a register: a packed record, a member list, or a rank's incarnation."""
    if isinstance(value, Packed):
        return encode_packed(value)
    if isinstance(value, int):
        return b"%d" % value
    return zlib.compress(_MEMBERS.encode(value), 1)


def _read_members(data: bytes, where: str) -> Members:
    try:
        unpacking = zlib.decompressobj()
        plain = unpacking.decompress(data, MAX_LIST)
        if not unpacking.eof:
            raise MissingList(f"{where} is truncated, or unpacks to more than {MAX_LIST} bytes")
        return _MEMBERS.decode(plain)
    except (zlib.error, UnreadableMessage) as error:
        raise MissingList(f"{where} has no list of members: {error}"[:500]) from None


def _name(packed: Packed) -> str:
    return f"epoch {packed.record.epoch}, proposed by {packed.record.by}"
