"""What a guarantee says: moves, and claims about them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fft.messages.protocol import Applied, Decision, Event, Manifest, Peer, Prepared, Record, Token
from fft.protocol.participant import Outcome
from fft.protocol.roles import COMMITTING, Role
from fft.protocol.state import Local

# Not frozen: to make a frozen object takes four times as long, and an audit makes millions. Nobody
# changes one; the checker keeps claims by their hashes.


@dataclass(slots=True)
class Move:
    """One event handled by one participant. ``place`` says where it stands (file and line)."""

    peer: Peer
    before: Local
    event: Event
    after: Local
    out: Outcome
    place: str = ""
    at: float = 0.0
    _entered: tuple[Role, ...] = field(init=False)
    obeyed: str | None = field(init=False)
    """``commit`` or ``abort``, if the move obeys a decision about the txn it stands at.

    What a participant goes by is its head, however it came to it.
    """

    def __post_init__(self) -> None:
        self._entered = tuple([now for was, now in self.roles if was != now])
        self.obeyed = self._find_obeyed()

    def _find_obeyed(self) -> str | None:
        if self.entered(*COMMITTING):
            return "commit"
        before, head = self.before, self.after.head
        if head is None or head.kind != "abort" or head is before.head or head == before.head:
            return None
        return "abort" if head.token == before.token else None

    def entered(self, *roles: Role) -> bool:
        """Whether the move went into a state of one of the roles from one of another role."""
        for now in self._entered:  # noqa: SIM110 - a generator costs more than the question
            if now in roles:
                return True
        return False

    @property
    def came_ready(self) -> bool:
        """Whether it brought the participant into the barrier of its epoch."""
        return any(
            step.event in ("connected", "healed") and step.source != step.dest
            for step in self.out.steps
        )

    @property
    def roles(self) -> list[tuple[Role, Role]]:
        """Of the states that its rows lead from and to."""
        return [step.roles for step in self.out.steps]

    @property
    def record(self) -> Record | None:
        """The register record that the event brings, if any."""
        return self.event.record if isinstance(self.event, Decision) else None


@dataclass(slots=True)
class History:
    """Moves of every participant, each in its own order; slices that committed txns consumed."""

    moves: dict[Peer, list[Move]] = field(default_factory=dict)
    consumed: list[tuple[Peer, Token, int, str]] = field(default_factory=list)
    """(who, txn, slice, place), as the data loaders noted it."""
    contributed: list[tuple[Peer, Token, int, str]] = field(default_factory=list)
    """(who, txn, base, place): the state that a contribution to a committed txn began from."""
    cut: set[Peer] = field(default_factory=set)
    """Whose moves are not all here: a part of the trace could not be written."""

    def all(self) -> Iterator[Move]:
        """Every move, participant by participant."""
        for moves in self.moves.values():
            yield from moves

    def records(self) -> dict[int, tuple[Record, str]]:
        """Values of the head register by number, as first seen, with the place."""
        seen: dict[int, tuple[Record, str]] = {}
        for move in self.all():
            if move.record is not None:
                seen.setdefault(move.record.n, (move.record, move.place))
        return seen


Key = tuple[Hashable, ...]
"""What a fact is about; the first element names the kind."""


@dataclass(slots=True, unsafe_hash=True)
class Know:
    """A fact that other claims may ask for. Nothing is claimed."""

    key: Key
    value: Any = True


@dataclass(slots=True, unsafe_hash=True)
class Same:
    """Whoever speaks of ``key`` gives it this value. ``{was}`` in ``text``: what came first."""

    key: Key
    value: Any
    text: str


@dataclass(slots=True, unsafe_hash=True)
class Holds:
    """True of the move by itself."""

    ok: bool
    text: str


@dataclass(slots=True, unsafe_hash=True)
class Given:
    """``test`` holds of the values of ``keys``. Unknown keys: wrong if ``needed``, else no claim.

    What is needed has happened before the move that claims it. A test that says None had nothing
    to compare: no claim either.
    """

    keys: tuple[Key, ...]
    text: str
    test: Callable[..., bool | None] = lambda *values: True
    needed: bool = True


Claim = Know | Same | Holds | Given
Invariant = Callable[[Move], Iterable[Claim]]


def applied(move: Move) -> bool:
    return isinstance(move.event, Applied) and move.out.verdict == "row"


class Yes(NamedTuple):
    """What a YES says."""

    manifest: Manifest
    skip: bool
    digest: str | None


def voted(move: Move) -> Iterator[Claim]:
    """For later claims: the YES of the move, if it is one."""
    if move.entered("voting") and isinstance(event := move.event, Prepared):
        digest = move.after.vote.digest if move.after.vote else None
        yes = Yes(event.manifest, event.skip, digest)
        yield Know(("yes", move.before.token, move.peer), yes)


def leavers_of(record: Record) -> tuple[str, ...]:
    return record.leavers if record.kind == "commit" else ()
