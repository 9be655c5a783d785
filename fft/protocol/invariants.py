"""The guarantees, each as a function from one move to claims. Pure.

A **move** is one event handled by one participant. An invariant says of a move what must hold:
of the move alone (``Holds``), or together with what other moves tell (``Same``, ``Given``). Claims
are weighed against **facts**, which name no order between participants, so that one definition
serves those who see moves as they happen (simulator, checker) and those who read traces that were
written side by side (audit). ``INVARIANTS`` lists the functions by name; a new one is picked up by
everyone. Numbers in docstrings are those of the guarantees in DESIGN.md. Guarantee 6 (data flow
between parameter groups) has nothing to decide while a spec has one parameter group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, assert_never

from fft.messages.protocol import (
    Ack,
    Applied,
    ApplyFailed,
    Ballot,
    Begin,
    Connected,
    Decide,
    Decision,
    Event,
    Fault,
    Finish,
    Healed,
    Join,
    Manifest,
    Peer,
    Prepared,
    Ready,
    Record,
    StartTxn,
    Stop,
    Timer,
    Token,
    next_lineage,
)
from fft.protocol.participant import Outcome
from fft.protocol.roles import COMMITTING, OUTSIDE, Role
from fft.protocol.state import Local, member_peers


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

    def entered(self, *roles: Role) -> bool:
        """Whether the move went into a state of one of the roles from one of another role."""
        return any(now in roles and was != now for was, now in self.roles)

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


# --- claims ---------------------------------------------------------------------------------------

Key = tuple[Hashable, ...]
"""What a fact is about; the first element names the kind."""


@dataclass(frozen=True, slots=True)
class Know:
    """A fact that other claims may ask for. Nothing is claimed."""

    key: Key
    value: Any = True


@dataclass(frozen=True, slots=True)
class Same:
    """Whoever speaks of ``key`` gives it this value. ``{was}`` in ``text``: what came first."""

    key: Key
    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class Holds:
    """True of the move by itself."""

    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
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
INVARIANTS: dict[str, Invariant] = {}


def invariant(function: Invariant) -> Invariant:
    """Register an invariant under its function name."""
    INVARIANTS[function.__name__] = function
    return function


# --- judging --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Finding:
    """What one invariant says of a history."""

    name: str
    checks: int = 0
    violation: str | None = None
    place: str = ""
    compared: int = 0
    """Of the checks: digests of a state compared with that of another participant."""

    def expect(self, holds: bool, text: str, place: str) -> None:
        """Count one check; keep the first violation."""
        self.checks += 1
        if not holds and self.violation is None:
            self.violation, self.place = text, place


class Judge:
    """Weighs claims as moves come in, in any order between participants.

    Args:
        names: invariants to evaluate; all by default.
        traced: participants whose moves will come in; None: all that there are.
        cut: those of whom not all moves will; nothing is claimed of what they may have done.
    """

    def __init__(
        self,
        names: Iterable[str] | None = None,
        traced: Collection[Peer] | None = None,
        cut: Collection[Peer] = (),
    ) -> None:
        self.findings = {name: Finding(name) for name in names or INVARIANTS}
        self._traced, self._cut = traced, cut
        self._facts: dict[Key, Any] = {}
        self._waiting: list[tuple[Finding, Given, str]] = []

    def feed(self, move: Move) -> None:
        """Take one move."""
        for name, finding in self.findings.items():
            for claim in INVARIANTS[name](move):
                self._weigh(finding, claim, move.place)

    def consumed(self, peer: Peer, token: Token, number: int, place: str) -> None:
        """Take the note of a data loader: this slice went into that txn."""
        if "samples_once" in self.findings:
            finding = self.findings["samples_once"]
            text = f"slice {number} was served to {peer} in {token}, and to {{was}}"
            key = ("served", number, peer.rank)
            self._weigh(finding, Same(key, f"{peer} in {token}", text), place)
            text = f"{peer} consumed slice {number} in txn {token}, which has others"
            given = Given((("data of", token),), text, lambda data: data[0] <= number < data[1])
            self._weigh(finding, given, place)

    def finish(self) -> list[Finding]:
        """Weigh what had to wait for facts, and tell what was found."""
        for finding, claim, place in self._waiting:
            self._ask(finding, claim, place)
        self._waiting.clear()
        return list(self.findings.values())

    def _weigh(self, finding: Finding, claim: Claim, place: str) -> None:
        match claim:
            case Know(key=key, value=value):
                self._facts.setdefault(key, value)
            case Same(key=key, value=value, text=text):
                finding.compared += key[0] == "digest" and key in self._facts
                was = self._facts.setdefault(key, value)
                finding.expect(was == value, text.replace("{was}", str(was)), place)
            case Holds(ok=ok, text=text):
                finding.expect(ok, text, place)
            case Given():
                if all(key in self._facts for key in claim.keys):
                    self._ask(finding, claim, place)
                else:
                    self._waiting.append((finding, claim, place))
            case _:
                assert_never(claim)

    def _ask(self, finding: Finding, claim: Given, place: str) -> None:
        missing = [key for key in claim.keys if key not in self._facts]
        if missing and (not claim.needed or any(map(self._may_be_cut, missing))):
            return
        for peer in (part for key in missing for part in key if isinstance(part, Peer)):
            if self._traced is not None and peer not in self._traced:
                finding.expect(False, f"there is no trace of {peer}, a member", place)
                return
        holds = False if missing else claim.test(*(self._facts[key] for key in claim.keys))
        if holds is not None:
            finding.expect(holds, claim.text, place)

    def _may_be_cut(self, key: Key) -> bool:
        """Whether a fact may be missing because the move that made it is."""
        made_by = [part for part in key if isinstance(part, Peer)]
        return any(peer in self._cut for peer in made_by) if made_by else bool(self._cut)


def judge(history: History, names: Iterable[str] | None = None) -> list[Finding]:
    """Evaluate the invariants, all of them by default, on a whole history."""
    bench = Judge(names, history.moves.keys(), history.cut)
    for move in history.all():
        bench.feed(move)
    for peer, token, number, place in history.consumed:
        bench.consumed(peer, token, number, place)
    return bench.finish()


# --- what a move did ------------------------------------------------------------------------------


def obeyed(move: Move) -> str | None:
    """``commit`` or ``abort``, if the move obeys a decision about the txn it stands at.

    What a participant goes by is its head, however it came to it.
    """
    if move.entered(*COMMITTING):
        return "commit"
    before, head = move.before, move.after.head
    took = head is not None and head != before.head and head.kind == "abort"
    return "abort" if took and head is not None and head.token == before.token else None


def _applied(move: Move) -> bool:
    return isinstance(move.event, Applied) and move.out.verdict == "row"


# --- the guarantees -------------------------------------------------------------------------------


@invariant
def agreement(move: Move) -> Iterator[Claim]:
    """1: no txn is decided differently by two participants; the register never changes its mind."""
    token = move.before.token
    if outcome := obeyed(move):
        text = f"txn {token}: {move.peer} obeyed {outcome}, another participant obeyed {{was}}"
        yield Same(("outcome", token), outcome, text)
    if (record := move.record) is not None:
        text = f"{move.peer} saw another value of register record {record.n} than others"
        yield Same(("record", record.n), record, text)
    after = move.after
    for event in move.before.deferred if after.role != "terminal" else ():
        if isinstance(event, Decision) and event.record is not None:
            known = event in after.deferred or (after.head and after.head.n >= event.record.n)
            text = f"{move.peer} forgot record {event.record.n}, which it had put off"
            yield Holds(bool(known), text)


@invariant
def validity(move: Move) -> Iterator[Claim]:
    """2: COMMIT only if every participant of the epoch voted YES, with manifests that fit."""
    token, event = move.before.token, move.event
    if move.entered("voting") and isinstance(event, Prepared):
        yield Holds(event.yes, f"{move.peer} voted YES in txn {token} in spite of: {event.cause}")
        text = f"{move.peer} voted YES in txn {token} without the state that it begins with"
        yield Holds(move.after.healed, text)
    yield from _voted(move)
    if obeyed(move) != "commit":
        return
    voters = member_peers(move.before)
    yield Holds(bool(voters), f"{move.peer} committed txn {token} outside every epoch")
    for peer in voters:
        text = f"txn {token} was committed, but {peer} did not vote YES in it"
        yield Given((("yes", token, peer),), text)
    votes = tuple(("yes", token, peer) for peer in voters)
    yield Given(
        votes,
        f"txn {token} was committed though somebody reduced nothing",
        lambda *yes: all(y.manifest.count > 0 for y in yes),
        needed=False,
    )
    yield Given(
        votes,
        f"txn {token} was committed though ranks of one number did different reductions",
        lambda *yes: (
            len({(p.rank, y.manifest) for p, y in zip(voters, yes, strict=True)})
            == len({p.rank for p in voters})
        ),
        needed=False,
    )


class _Yes(NamedTuple):
    """What a YES says."""

    manifest: Manifest
    skip: bool
    digest: str | None


def _voted(move: Move) -> Iterator[Claim]:
    """For later claims: the YES of the move, if it is one."""
    if move.entered("voting") and isinstance(event := move.event, Prepared):
        digest = move.after.vote.digest if move.after.vote else None
        yes = _Yes(event.manifest, event.skip, digest)
        yield Know(("yes", move.before.token, move.peer), yes)


@invariant
def exactly_once(move: Move) -> Iterator[Claim]:
    """3: a step is applied after its COMMIT, once, and the lineage tells it."""
    if (record := move.record) is not None and record.kind == "commit":
        yield Know(("committed", record.token), record.skip)
    for step in move.out.steps:
        was, now = step.roles
        if was in COMMITTING and now not in (was, "terminal"):
            text = f"{move.peer} left {step.source} of txn {move.before.token} without applying it"
            yield Holds(step.event in ("applied", "apply_failed"), text)
    if not _applied(move):
        return
    before, after = move.before, move.after
    text = f"{move.peer} applied txn {before.token}, which was never committed"
    yield Given((("committed", before.token),), text)
    text = f"{move.peer} applied a step and went from step {before.step} to {after.step}"
    yield Holds(after.step == before.step + (not before.skip), text)
    expected = next_lineage(before.lineage, before.token, after.step, after.cursor, before.skip)
    yield Holds(after.lineage == expected, f"{move.peer} broke the lineage chain")
    where = (before.step, before.lineage)
    text = f"{move.peer} applied txn {before.token} at {where} and at {{was}}"
    yield Same(("applied", before.token, move.peer), where, text)


@invariant
def samples_once(move: Move) -> Iterator[Claim]:
    """3: each slice of data is consumed by exactly one committed txn, none is left out."""
    record, before = move.record, move.before
    for effect in move.out.effects:
        if isinstance(effect, StartTxn):
            yield from _takes_its_place(move, effect)
    if record is not None:
        yield Know(("record", record.n), record)
        yield Given(
            (("record", record.n - 1), ("record", record.n)),
            f"record {record.n} ({record.kind}) does not go on where the data before it end",
            _cursor_goes_on,
            needed=False,
        )
        if record.kind == "commit":
            yield Given(
                (("start", record.token, record.step - (not record.skip)),),
                f"record {record.n} commits other data than txn {record.token} began with",
                lambda start: record.cursor == start[0] + start[1],
                needed=False,
            )
    token = before.token
    decided = record is not None and obeyed(move) == "commit" and record.token == token
    if decided or _applied(move):
        # Within a txn the places in the member list, which all share, keep the members apart.
        data = (before.cursor, record.cursor if decided and record else move.after.cursor)
        text = f"txn {token} has data {data} for {move.peer}, and {{was}} for another"
        yield Same(("data of", token), data, text)
        text = f"the data from {before.cursor} on went into txn {token} and into {{was}}"
        yield Same(("data from", before.cursor), token, text)


def _takes_its_place(move: Move, start: StartTxn) -> Iterator[Claim]:
    """Which slice a group takes in a txn: those that contribute have one each, in their order."""
    token, begun = start.token, (start.cursor, start.participants)
    text = f"{move.peer} began txn {token} with (cursor, participants) {begun}, another with"
    yield Same(("start", token, start.step), begun, text + " {was}")
    epoch = move.after.epoch
    late = epoch.learners if epoch and token.txn == 1 else ()
    able = [g.group for g in epoch.members if g.group not in late] if epoch else []
    mine = able.index(move.peer.group) if move.peer.group in able else None
    if mine is not None and mine >= start.participants:
        mine = None  # a spare
    text = f"{move.peer} has slice {start.index} of {start.participants} in txn {token}, not {mine}"
    yield Holds(start.index == mine and 0 < start.participants <= len(able), text)


def _cursor_goes_on(before: Record, after: Record) -> bool:
    moved, batches = after.cursor - before.cursor, after.batches - before.batches
    if after.kind != "commit":
        return moved == batches == 0
    return moved > 0 and batches == (0 if after.skip else moved)


@invariant
def shard_unity(move: Move) -> Iterator[Claim]:
    """4: all ranks of a group begin a txn at the same step and with the same lineage.

    A learner begins it where its epoch does: that state comes before it votes.
    """
    has_come = isinstance(move.event, Healed) and move.out.verdict == "row"
    if move.entered("training") or (has_come and move.after.role == "training"):
        start = move.after if move.after.healed else move.after.epoch
        assert start is not None, "a txn begins in an epoch"
        at = (start.step, start.lineage)
        text = f"{move.peer} began txn {move.after.token} at {at}, another rank at {{was}}"
        yield Same(("begin", move.after.token, move.peer.group), at, text)


@invariant
def replicas_equal(move: Move) -> Iterator[Claim]:
    """5: after a commit all replicas have equal lineage, and equal digests where taken."""
    event, after = move.event, move.after
    if not isinstance(event, (Applied, Healed)) or move.out.verdict != "row":
        return
    if isinstance(event, Applied):
        token = move.before.token
        text = f"after txn {token} {move.peer} has lineage {after.lineage}, another has {{was}}"
        yield Same(("lineage", token), after.lineage, text)
    held = (after.step, after.cursor, after.batches)
    text = f"{move.peer} has (step, cursor, batches) {held}, another of its lineage {{was}}"
    yield Same(("held", after.lineage), held, text)
    if event.digest is not None:
        text = (
            f"at step {after.step} the state of {move.peer} (digest {event.digest}) differs from "
            "another's ({was}) although their lineage is equal"
        )
        yield Same(("digest", after.lineage, move.peer.rank), event.digest, text)


@invariant
def divergence(move: Move) -> Iterator[Claim]:
    """5: no txn is committed whose voters' states differ; whose state is given up is no majority.

    As far as votes bring digests.
    """
    yield from _voted(move)
    token, members, outcome = move.before.token, member_peers(move.before), obeyed(move)
    head, votes = move.after.head, tuple(("yes", token, peer) for peer in members)
    if outcome == "commit":
        text = f"txn {token} was committed though the states of replicas differ"
        yield Given(votes, text, lambda *yes: _are_alike(members, yes), needed=False)
    elif outcome == "abort" and head is not None and (head.odd or head.diverged):
        odd, at = head.odd, head.n
        text = f"record {at} ends the job, though no replicas differ"
        if head.diverged:
            yield Given(votes, text, lambda *yes: bool(_apart(members, yes)), needed=False)
        text = f"record {at} gives up {', '.join(map(str, odd))}, which are no minority"
        if odd:
            yield Given(votes, text, lambda *yes: _are_few(odd, members, yes), needed=False)
        if move.peer in odd:
            text = f"{move.peer} keeps a state that record {at} gives up"
            yield Holds(move.after.lineage == "", text)


def _apart(members: Sequence[Peer], yes: Sequence[_Yes]) -> set[int]:
    """Numbers of the ranks whose states differ, by the digests that there are."""
    held: dict[int, set[str]] = {}
    for peer, vote in zip(members, yes, strict=True):
        if vote.digest is not None:
            held.setdefault(peer.rank, set()).add(vote.digest)
    return {rank for rank, found in held.items() if len(found) > 1}


def _are_alike(members: Sequence[Peer], yes: Sequence[_Yes]) -> bool | None:
    """Whether no states differ; None: no two digests are of one rank number."""
    ranks = [p.rank for p, vote in zip(members, yes, strict=True) if vote.digest is not None]
    return None if len(ranks) == len(set(ranks)) else not _apart(members, yes)


def _are_few(odd: Collection[Peer], members: Sequence[Peer], yes: Sequence[_Yes]) -> bool:
    """Whether those who are not odd have one digest each rank number, and are more than half."""
    for rank in {peer.rank for peer in odd}:
        held = {p: y.digest for p, y in zip(members, yes, strict=True) if p.rank == rank}
        held = {peer: digest for peer, digest in held.items() if digest is not None}
        rest = [digest for peer, digest in held.items() if peer not in odd]
        if len(set(rest)) != 1 or 2 * len(rest) <= len(held):
            return False
    return True


@invariant
def skip(move: Move) -> Iterator[Claim]:
    """12: what one user skips all skip: no step is counted, and nobody waits because of it."""
    yield from _voted(move)
    before, after, token = move.before, move.after, move.before.token
    if obeyed(move) == "commit":
        members = member_peers(before)
        said = "a skip" if after.skip else "a step"
        yield Given(
            tuple(("yes", token, peer) for peer in members),
            f"{move.peer} takes txn {token} for {said}, against the votes",
            lambda *yes: any(vote.skip for vote in yes) == after.skip,
            needed=False,
        )
        yield Same(("skip", token), after.skip, f"{move.peer} takes txn {token} for {said}")
    took = after.head is not None and after.head != before.head and after.head.kind == "abort"
    if took and after.head is not None and after.head.skip:
        text = f"{move.peer} counts txn {token} as a failure, though its user skipped it"
        waits = after.paused and not before.paused
        yield Holds(after.rollbacks <= before.rollbacks and not waits, text)


@invariant
def fencing(move: Move) -> Iterator[Claim]:
    """7: nothing from an older epoch, txn or incarnation changes state."""
    if move.out.verdict != "row":
        return
    here, event, peer = move.before.token, move.event, move.peer
    if isinstance(event, (Prepared, Ballot, Applied, ApplyFailed, Fault)):
        yield Holds(event.token == here, f"{peer} at {here} took {event.type} of {event.token}")
    if isinstance(event, Ack):
        yield Holds(
            event.token.epoch >= here.epoch, f"{peer} at {here} took an ack of an old epoch"
        )
    if isinstance(event, (Ready, Begin)):
        text = f"{peer} took {event.type} for epoch {event.epoch}"
        yield Holds(event.epoch >= here.epoch, text)
    if isinstance(event, (Connected, Healed)):
        text = f"{peer} took {event.type} for epoch {event.epoch}"
        yield Holds(event.epoch == here.epoch, text)
    if isinstance(event, Ballot):
        strangers = sorted({v.peer for v in event.votes} - set(member_peers(move.before)))
        yield Holds(not strangers, f"{peer} counted votes of {strangers}")
    speaker = _speaker(event)
    if speaker is not None:
        known = move.before.hellos.get((speaker.group, speaker.rank))
        newer = known is not None and known.peer.inc > speaker.inc
        yield Holds(not newer, f"{peer} listened to {speaker}, which had been replaced")


def _speaker(event: Event) -> Peer | None:
    """Whose word the event is, if it is a participant's about itself."""
    hello = getattr(event, "hello", None)
    found = hello.peer if hello is not None else getattr(event, "peer", None)
    return found if isinstance(found, Peer) else None


@invariant
def live_set(move: Move) -> Iterator[Claim]:
    """8: an epoch's members are the same set for all, and all were in the barrier at one instant.

    After the formal semantics of JAX's ``live_devices``: whoever leaves the barrier has seen that
    every member had entered it, and nobody else is given that epoch.
    """
    before, after, peer = move.before, move.after, move.peer
    if move.came_ready:
        yield Know(("in barrier", before.token.epoch, peer))
    new = after.epoch
    if new is not None and (before.epoch is None or before.epoch.n != new.n):
        text = f"{peer} and others have different member lists for epoch {new.epoch}"
        yield Same(("epoch", new.epoch), new, text)
        inside = any(peer in g.peers() for g in new.members)
        yield Holds(inside, f"{peer} entered epoch {new.epoch} uninvited")
    for effect in move.out.effects:
        if isinstance(effect, Decide) and effect.proposal.kind == "epoch":
            left = sorted(_left_out(after, effect.proposal))
            names = ", ".join(map(str, left))
            text = f"{peer} leaves {names} out of epoch {effect.proposal.epoch}, and nothing is"
            yield Holds(not left, text + " said against them")
    if move.entered("training") and before.role == "healing":
        epoch = after.token.epoch
        if isinstance(move.event, Begin):
            text = f"{peer} left the barrier of epoch {epoch} at the word for {move.event.epoch}"
            yield Holds(move.event.epoch == epoch, text)
        for member in member_peers(after):
            text = f"{peer} left the barrier of epoch {epoch} without {member}"
            if not isinstance(move.event, Begin):  # the coordinator: all have told it
                yield Holds(after.ready.get(member) == epoch, text)
            yield Given((("in barrier", epoch, member),), text)


def _left_out(s: Local, proposal: Record) -> Iterator[Peer]:
    """Members whose group is not in the next epoch, though none of it was lost, or leaves."""
    gone, inside = s.dead | s.suspected | s.joining, proposal.peer_set
    for group in s.epoch.members if s.epoch else ():
        peers = group.peers()
        said = [s.hellos.get((p.group, p.rank)) for p in peers]
        stuck = any(h is not None and h.unwinding for h in said)
        leaves = s.head is not None and group.group in _leavers(s.head)
        if not (stuck or leaves or gone & set(peers) or inside & set(peers)):
            yield from peers


@invariant
def drain(move: Move) -> Iterator[Claim]:
    """9: who leaves on purpose leaves after a commit, and nobody rolls back because of it.

    Or between two epochs: all others left with the last commit, or none could be formed in time.
    """
    record = move.record
    if move.entered("terminal"):
        exit_ = next(step for step in move.out.steps if step.roles[1] == "terminal")
        gone = [e for e in move.out.effects if isinstance(e, Finish)]
        on_purpose = bool(gone) and gone[0].error is None and not isinstance(move.event, Stop)
        if on_purpose:
            text = f"{move.peer} left on purpose in state {exit_.source}, not after a commit"
            yield Holds(exit_.roles[0] in OUTSIDE or _nobody_to_go_on_with(move), text)
    if record is None:
        return
    yield Know(("record", record.n), record)
    if record.kind == "epoch":
        members = frozenset(peer for g in record.members for peer in g.peers())
        yield Know(("members", record.epoch), members)
    if record.kind == "commit" and record.last:
        text, left = f"record {record.n} ends the job, though some stay", _leavers(record)
        members_of = (("members", record.epoch),)
        yield Given(members_of, text, lambda all_: {p.group for p in all_} <= set(left), False)
    # Looking back from each record serves those, too, who see moves as they happen.
    last, n = ("record", record.n - 1), record.n
    text = f"after participants left with record {n - 1} came a rollback"
    left_well = record.kind == "epoch"
    yield Given((last,), text, lambda was: left_well or not _leavers(was), needed=False)
    if record.kind == "epoch":
        yield Given(
            (("members", record.epoch - 1), last),
            f"some who left with record {n - 1} are in the next epoch",
            lambda members, was: not _stayed(members, was, record),
            needed=False,
        )


def _nobody_to_go_on_with(move: Move) -> bool:
    s, head = move.after, move.after.head
    if head is None or head.kind == "epoch" or head.epoch != s.token.epoch:
        return False
    others = {g.group for g in s.epoch.members} - {move.peer.group} if s.epoch else set()
    gave_up = isinstance(move.event, Timer) and move.event.name == "quorum"
    return gave_up or others <= set(_leavers(head))


def _leavers(record: Record) -> tuple[str, ...]:
    return record.leavers if record.kind == "commit" else ()


def _stayed(members: frozenset[Peer], last: Record, after: Record) -> set[Peer]:
    """Participants that left with ``last`` and are members of the epoch after it."""
    left = {peer for peer in members if peer.group in _leavers(last)}
    return left & {peer for group in after.members for peer in group.peers()}


@invariant
def join(move: Move) -> Iterator[Claim]:
    """11: who asks to come in does so after a commit; no attempt is lost because of it."""
    event, record = move.event, move.record
    if isinstance(event, Join):
        who = event.hello.peer
        known = any(p[:2] == who[:2] for p in member_peers(move.before))
        aborts = any(isinstance(e, Decide) and e.proposal.kind == "abort" for e in move.out.effects)
        yield Holds(
            known or not aborts, f"{move.peer} gave an attempt up because {who} asks to join"
        )
    for effect in move.out.effects:
        if isinstance(effect, Decide) and effect.proposal.kind == "commit":
            left_out = sorted(_asking(move.after)) if not effect.proposal.change else []
            yield Holds(not left_out, f"{move.peer} commits and goes on without {left_out}")
    if record is None:
        return
    yield Know(("record", record.n), record)
    text = f"record {record.n - 1} ended its epoch with a commit, and then came a rollback"
    formed = record.kind == "epoch"
    last = (("record", record.n - 1),)
    yield Given(last, text, lambda was: formed or not was.change, needed=False)


def _asking(s: Local) -> set[str]:
    """Whole groups that are known to be there and to ask to come in."""
    ranks: dict[tuple[str, str, int], set[int]] = {}
    for hello in s.hellos.values():
        if hello.peer in s.joining - s.dead - s.suspected and not hello.unwinding:
            ranks.setdefault((hello.peer.group, hello.store, hello.world), set()).add(
                hello.peer.rank
            )
    inside = {peer.group for peer in member_peers(s)}
    return {
        group
        for (group, _, world), there in ranks.items()
        if group not in inside and there == set(range(world))
    }


@invariant
def decided(move: Move) -> Iterator[Claim]:
    """10: nobody leaves in doubt, but at its user's word or at that of a newer process."""
    if move.entered("terminal"):
        before = move.before
        errors = {e.error for e in move.out.effects if isinstance(e, Finish)}
        head, fenced = move.after.head, "Fenced" in errors
        # The register has decided this txn, or has left it behind: that is known, and ends the job.
        told = "Diverged" in errors and head is not None and head.token >= before.token
        yield Holds(
            before.vote is None
            or before.role in COMMITTING
            or told
            or fenced
            or isinstance(move.event, Stop),
            f"{move.peer} stopped in doubt about txn {before.token}: {move.after.cause}",
        )
