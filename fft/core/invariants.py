"""The guarantees as functions over a history of moves: one function each, pure.

A history is what audit, simulator and checker all have: for every participant the events it
handled, with its state before and after. ``INVARIANTS`` lists the functions by name; a new one is
picked up by everyone who judges a history. Numbers in docstrings are those of the guarantees in
DESIGN.md. Guarantee 6 (data flow between parameter groups) has nothing to decide while a spec
has one parameter group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from fft.core.local import Local, member_peers
from fft.core.messages import (
    Ack,
    Applied,
    ApplyFailed,
    Ballot,
    Decision,
    Event,
    Fault,
    Healed,
    Peer,
    Prepared,
    Ready,
    Record,
    Token,
    next_lineage,
)
from fft.core.participant import Outcome

_COMMITTING = frozenset({"COMMIT", "DRAIN_COMMIT"})


@dataclass(frozen=True, slots=True)
class Move:
    """One event handled by one participant. ``place`` says where it stands (file and line)."""

    peer: Peer
    before: Local
    event: Event
    after: Local
    out: Outcome
    place: str = ""
    at: float = 0.0

    def entered(self, *states: str) -> bool:
        """Whether the move went into one of the states from another one."""
        return any(s.dest in states and s.source != s.dest for s in self.out.steps)


@dataclass(slots=True)
class History:
    """Moves of every participant, each in its own order; slices that committed txns consumed."""

    moves: dict[Peer, list[Move]] = field(default_factory=dict)
    consumed: list[tuple[Peer, Token, int, str]] = field(default_factory=list)
    """(who, txn, slice, place)"""

    def all(self) -> Iterator[Move]:
        """Every move, participant by participant."""
        for moves in self.moves.values():
            yield from moves

    def records(self) -> dict[int, tuple[Record, str]]:
        """Values of the head register by number, as first seen, with the place."""
        seen: dict[int, tuple[Record, str]] = {}
        for move in self.all():
            if isinstance(move.event, Decision) and move.event.record is not None:
                seen.setdefault(move.event.record.n, (move.event.record, move.place))
        return seen


@dataclass(slots=True)
class Finding:
    """What one invariant says of a history."""

    name: str
    checks: int = 0
    violation: str | None = None
    place: str = ""

    def expect(self, holds: bool, text: str, place: str) -> None:
        """Count one check; keep the first violation."""
        self.checks += 1
        if not holds and self.violation is None:
            self.violation, self.place = text, place


Invariant = Callable[[History, Finding], None]
INVARIANTS: dict[str, Invariant] = {}


def invariant(function: Invariant) -> Invariant:
    """Register an invariant under its function name."""
    INVARIANTS[function.__name__] = function
    return function


def judge(history: History, names: Iterable[str] | None = None) -> list[Finding]:
    """Evaluate the invariants, all of them by default."""
    findings = []
    for name in names or INVARIANTS:
        finding = Finding(name)
        INVARIANTS[name](history, finding)
        findings.append(finding)
    return findings


# --- what happened --------------------------------------------------------------------------------


def decisions(history: History) -> Iterator[tuple[Move, Token, str]]:
    """(move, txn, ``commit`` or ``abort``) for every decision that a participant obeyed."""
    for move in history.all():
        if move.entered(*_COMMITTING):
            yield move, move.before.token, "commit"
        elif isinstance(move.event, Decision) and move.event.record is not None:
            record = move.event.record
            if record.kind == "abort" and record.token == move.before.token and move.out.steps:
                yield move, record.token, "abort"


def votes(history: History) -> dict[tuple[Token, Peer], Move]:
    """The YES of every participant by txn."""
    return {(m.before.token, m.peer): m for m in history.all() if m.entered("PREPARED")}


def epochs(history: History) -> dict[int, list[tuple[Move, Record]]]:
    """Who took part in each epoch, with the record it was given."""
    found: dict[int, list[tuple[Move, Record]]] = defaultdict(list)
    for move in history.all():
        new = move.after.epoch
        if new is not None and (move.before.epoch is None or move.before.epoch.n != new.n):
            found[new.epoch].append((move, new))
    return found


def _applied(moves: Iterable[Move]) -> Iterator[Move]:
    return (m for m in moves if isinstance(m.event, Applied) and m.out.verdict == "row")


# --- the guarantees -------------------------------------------------------------------------------


@invariant
def agreement(history: History, finding: Finding) -> None:
    """1: no txn is decided differently by two participants; the register never changes its mind."""
    first: dict[Token, tuple[str, Peer]] = {}
    for move, token, outcome in decisions(history):
        known = first.setdefault(token, (outcome, move.peer))
        finding.expect(
            known[0] == outcome,
            f"txn {token}: {move.peer} obeyed {outcome}, {known[1]} obeyed {known[0]}",
            move.place,
        )
    seen = history.records()
    for move in history.all():
        if isinstance(move.event, Decision) and move.event.record is not None:
            record = move.event.record
            finding.expect(
                seen[record.n][0] == record,
                f"{move.peer} saw another value of register record {record.n} than others",
                move.place,
            )


@invariant
def validity(history: History, finding: Finding) -> None:
    """2: COMMIT only if every participant of the epoch voted YES, with manifests that fit."""
    yes = votes(history)
    for move, token, outcome in decisions(history):
        if outcome != "commit":
            continue
        for peer in member_peers(move.before):
            if peer not in history.moves:
                finding.expect(False, f"there is no trace of {peer}, a member", move.place)
                continue
            finding.expect(
                (token, peer) in yes,
                f"txn {token} was committed, but {peer} did not vote YES in it",
                move.place,
            )
    counts: dict[Token, set[int]] = defaultdict(set)
    for (token, _), move in yes.items():
        if isinstance(move.event, Prepared):
            counts[token].add(move.event.manifest.count)
    committed = {token for _, token, outcome in decisions(history) if outcome == "commit"}
    for token in committed:
        finding.expect(
            len(counts[token]) <= 1 and 0 not in counts[token],
            f"txn {token} was committed with {sorted(counts[token])} reductions",
            "",
        )


@invariant
def exactly_once(history: History, finding: Finding) -> None:
    """3: on a lineage each step is applied once and only once to each participant's state."""
    for moves in history.moves.values():
        for move in _applied(moves):
            before, after = move.before, move.after
            finding.expect(
                after.step == before.step + 1,
                f"{move.peer} applied a step and went from step {before.step} to {after.step}",
                move.place,
            )
            expected = next_lineage(before.lineage, before.token, after.step, after.cursor)
            finding.expect(
                after.lineage == expected, f"{move.peer} broke the lineage chain", move.place
            )
        for earlier, later in pairwise(moves):
            same = earlier.after.lineage == later.before.lineage
            finding.expect(same, f"{later.peer} changed its lineage between events", later.place)


@invariant
def samples_once(history: History, finding: Finding) -> None:
    """3: each slice of data is consumed by exactly one committed txn, none is left out."""
    previous: Record | None = None
    ranges: dict[Token, range] = {}
    for _, (record, place) in sorted(history.records().items()):
        if record.kind == "commit" and previous is not None and previous.n == record.n - 1:
            ranges[record.token] = range(previous.cursor, record.cursor)
            finding.expect(record.cursor > previous.cursor, f"{record.token}: no slice", place)
        if previous is not None and previous.n == record.n - 1 and record.kind != "commit":
            finding.expect(
                record.cursor == previous.cursor,
                f"record {record.n} ({record.kind}) moved the cursor",
                place,
            )
        previous = record
    taken: dict[tuple[int, int], tuple[Peer, Token]] = {}
    for peer, token, number, place in history.consumed:
        if token in ranges:
            finding.expect(
                number in ranges[token],
                f"{peer} consumed slice {number} in txn {token}, which is {ranges[token]}",
                place,
            )
        known = taken.setdefault((number, peer.rank), (peer, token))
        finding.expect(
            known == (peer, token),
            f"slice {number} was consumed by {known[0]} in {known[1]} and by {peer} in {token}",
            place,
        )


@invariant
def shard_unity(history: History, finding: Finding) -> None:
    """4: all ranks of a group begin a txn at the same step and with the same lineage."""
    starts: dict[tuple[Token, str], tuple[int, str]] = {}
    for move in history.all():
        if move.entered("NORMAL"):
            at = (move.after.step, move.after.lineage)
            known = starts.setdefault((move.after.token, move.peer.group), at)
            finding.expect(
                known == at,
                f"{move.peer} began txn {move.after.token} at {at}, another rank at {known}",
                move.place,
            )


@invariant
def replicas_equal(history: History, finding: Finding) -> None:
    """5: after a commit all replicas have equal lineage, and equal digests where taken."""
    lineages: dict[Token, tuple[str, Peer]] = {}
    digests: dict[tuple[str, int], tuple[str, Peer]] = {}
    for move in history.all():
        event, after = move.event, move.after
        if not isinstance(event, (Applied, Healed)) or move.out.verdict != "row":
            continue
        if isinstance(event, Applied):
            known = lineages.setdefault(move.before.token, (after.lineage, move.peer))
            finding.expect(
                known[0] == after.lineage,
                f"after txn {move.before.token} {move.peer} and {known[1]} differ in lineage",
                move.place,
            )
        if event.digest is not None:
            where = (after.lineage, move.peer.rank)
            first = digests.setdefault(where, (event.digest, move.peer))
            finding.expect(
                first[0] == event.digest,
                f"at step {after.step} the states of {move.peer} and {first[1]} differ "
                "although their lineage is equal",
                move.place,
            )


@invariant
def fencing(history: History, finding: Finding) -> None:
    """7: nothing from an older epoch, txn or incarnation changes state."""
    for move in history.all():
        if move.out.verdict != "row":
            continue
        here, event = move.before.token, move.event
        if isinstance(event, (Prepared, Ballot, Applied, ApplyFailed, Fault)):
            finding.expect(
                event.token == here, f"{move.peer} took {event.type} of {event.token}", move.place
            )
        if isinstance(event, Ack):
            finding.expect(
                event.token.epoch >= here.epoch, f"{move.peer} took an old ack", move.place
            )
        if isinstance(event, Ready):
            finding.expect(event.epoch >= here.epoch, f"{move.peer} took an old ready", move.place)
        if isinstance(event, Ballot):
            strangers = {v.peer for v in event.votes} - set(member_peers(move.before))
            finding.expect(
                not strangers, f"{move.peer} counted votes of {sorted(strangers)}", move.place
            )


@invariant
def live_set(history: History, finding: Finding) -> None:
    """8: an epoch's members are the same set for all, and all were in the barrier at one instant.

    After the formal semantics of JAX's ``live_devices``: whoever leaves the barrier has seen that
    every member had entered it, and nobody else is given that epoch.
    """
    ready: dict[Peer, set[int]] = {
        peer: {m.before.token.epoch for m in moves if isinstance(m.event, Healed)}
        for peer, moves in history.moves.items()
    }
    for number, entries in epochs(history).items():
        for move, record in entries:
            finding.expect(
                record == entries[0][1], f"two member lists for epoch {number}", move.place
            )
            inside = {p for g in record.members for p in g.peers()}
            finding.expect(
                move.peer in inside, f"{move.peer} entered epoch {number} uninvited", move.place
            )
    for move in history.all():
        if not move.entered("NORMAL") or move.before.state != "HEALING":
            continue
        epoch = move.after.token.epoch
        for peer in member_peers(move.after):
            finding.expect(
                move.after.ready.get(peer) == epoch and epoch in ready.get(peer, {epoch}),
                f"{move.peer} left the barrier of epoch {epoch} without {peer}",
                move.place,
            )


@invariant
def drain(history: History, finding: Finding) -> None:
    """9: who leaves on purpose leaves after a commit, and nobody rolls back because of it."""
    records = history.records()
    for moves in history.moves.values():
        for move in moves:
            if move.entered("EXIT") and move.before.state in ("DRAIN_COMMIT", "DRAIN_WAIT"):
                head = move.before.head
                finding.expect(
                    head is not None, f"{move.peer} drained without a commit", move.place
                )
    for n, (record, place) in records.items():
        if record.kind == "commit" and record.leavers and n + 1 in records:
            after = records[n + 1][0]
            finding.expect(
                after.kind == "epoch",
                f"after {record.leavers} left with record {n} came a rollback: {after.cause}",
                place,
            )
            stayed = {p for g in after.members for p in g.peers()} & _left(records, record)
            finding.expect(not stayed, f"{stayed} drained, but are in the next epoch", place)


def _left(records: Mapping[int, tuple[Record, str]], commit: Record) -> set[Peer]:
    """Participants that leave with ``commit``, as the record of their epoch lists them."""
    return {
        peer
        for record, _ in records.values()
        if record.kind == "epoch" and record.epoch == commit.epoch
        for group in record.members
        if group.group in commit.leavers
        for peer in group.peers()
    }


@invariant
def decided(history: History, finding: Finding) -> None:
    """10: nobody leaves in doubt; every YES that is followed by anything is decided."""
    for moves in history.moves.values():
        for move in moves:
            if move.entered("EXIT"):
                finding.expect(
                    move.before.vote is None or move.before.state in _COMMITTING,
                    f"{move.peer} stopped in doubt about txn {move.before.token}: "
                    f"{move.after.cause}",
                    move.place,
                )
