"""The types of the guarantees: moves, and claims about them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fft.messages.protocol import Applied, Decision, Event, Manifest, Peer, Prepared, Record, Token
from fft.protocol.participant import Outcome
from fft.protocol.roles import COMMITTING, Role
from fft.protocol.state import Local

# Not frozen, although never changed (the checker stores claims by hash): a frozen object takes four
# times as long to construct, and an audit constructs millions.


@dataclass(slots=True)
class Move:
    """One event handled by one participant. ``place`` is its file and line in a trace."""

    peer: Peer
    before: Local
    event: Event
    after: Local
    out: Outcome
    place: str = ""
    at: float = 0.0
    _entered: tuple[Role, ...] = field(init=False)
    obeyed: str | None = field(init=False)
    """``commit`` or ``abort``, if the move carries out a decision about its current txn.

    The decision is that of the participant's head, however it was learned.
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
        """Return whether the move went from a state of another role into one of these roles."""
        for now in self._entered:  # noqa: SIM110 - a generator costs more than the question
            if now in roles:
                return True
        return False

    @property
    def came_ready(self) -> bool:
        """Whether the move brought the participant into the barrier of its epoch.

        In older traces the barrier is a state of its own.
        """
        was, now = (s.ready.get(self.peer) == s.token.epoch for s in (self.before, self.after))
        entered = now and not was
        return any(
            step.event in ("connected", "healed") and (entered or step.source != step.dest)
            for step in self.out.steps
        )

    @property
    def roles(self) -> list[tuple[Role, Role]]:
        """Roles of the states that its rows lead from and to."""
        return [step.roles for step in self.out.steps]

    @property
    def record(self) -> Record | None:
        """The register record that the event carries, if any."""
        return self.event.record if isinstance(self.event, Decision) else None


@dataclass(slots=True)
class History:
    """The moves of every participant, in its own order, and the slices that txns consumed."""

    moves: dict[Peer, list[Move]] = field(default_factory=dict)
    consumed: list[tuple[Peer, Token, int, str]] = field(default_factory=list)
    """(participant, txn, slice, place), as the data loaders traced it."""
    contributed: list[tuple[Peer, Token, int, str]] = field(default_factory=list)
    """(participant, txn, base, place): the base of each contribution to a committed txn."""
    cut: set[Peer] = field(default_factory=set)
    """Participants whose moves are incomplete, because a part of the trace could not be written."""

    def all(self) -> Iterator[Move]:
        """Yield every move, participant by participant."""
        for moves in self.moves.values():
            yield from moves

    def records(self) -> dict[int, tuple[Record, str]]:
        """Return the values of the head register by number, as first seen, with the place."""
        seen: dict[int, tuple[Record, str]] = {}
        for move in self.all():
            if move.record is not None:
                seen.setdefault(move.record.n, (move.record, move.place))
        return seen


Key = tuple[Hashable, ...]
"""The subject of a fact; its first element is the kind."""


@dataclass(slots=True, unsafe_hash=True)
class Know:
    """A fact that other claims may use; it claims nothing."""

    key: Key
    value: Any = True


@dataclass(slots=True, unsafe_hash=True)
class Same:
    """All moves that mention ``key`` give it this value; ``{was}`` in ``text`` is the first one."""

    key: Key
    value: Any
    text: str


@dataclass(slots=True, unsafe_hash=True)
class Holds:
    """A claim about the move alone."""

    ok: bool
    text: str


@dataclass(slots=True, unsafe_hash=True)
class Given:
    """``test`` holds for the values of ``keys``.

    If a key is unknown, the claim fails if ``needed``, and is dropped otherwise. A needed fact must
    have happened before the move that claims it. A test returns None if it has nothing to compare;
    the claim is then dropped, too.
    """

    keys: tuple[Key, ...]
    text: str
    test: Callable[..., bool | None] = lambda *values: True
    needed: bool = True


Claim = Know | Same | Holds | Given
Invariant = Callable[[Move], Iterable[Claim]]


def applied(move: Move) -> bool:
    """Return whether the move records an applied step or skip."""
    return isinstance(move.event, Applied) and move.out.verdict == "row"


class Yes(NamedTuple):
    """The content of a YES vote."""

    manifest: Manifest
    skip: bool
    digest: str | None
    checkpoint: bool


def voted(move: Move) -> Iterator[Claim]:
    """Yield the move's YES vote, if it is one, as a fact for later claims."""
    if move.entered("voting") and isinstance(event := move.event, Prepared):
        digest = move.after.vote.digest if move.after.vote else None
        yes = Yes(event.manifest, event.skip, digest, event.checkpoint)
        yield Know(("yes", move.before.token, move.peer), yes)


def leavers_of(record: Record) -> tuple[str, ...]:
    """Return the groups that leave with the record; only a commit has any."""
    return record.leavers if record.kind == "commit" else ()
