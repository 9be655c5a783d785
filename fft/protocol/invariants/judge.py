"""Checks the claims of the guarantees, on moves as they happen or on traces. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import assert_never, cast

from fft.messages.effects import Decide
from fft.messages.protocol import Ballot, Begin, Decision, Peer, Ready, Token
from fft.protocol.invariants.bounded import bounded, contributes
from fft.protocol.invariants.claims import (
    Claim,
    Given,
    History,
    Holds,
    Invariant,
    Key,
    Know,
    Move,
    Same,
)
from fft.protocol.invariants.decisions import agreement, exactly_once, validity
from fft.protocol.invariants.facts import Facts, Numbers
from fft.protocol.invariants.flow import data_flow
from fft.protocol.invariants.membership import decided, drain, join, live_set, reform
from fft.protocol.invariants.replicas import divergence, fencing, replicas_equal, shard_unity, skip
from fft.protocol.invariants.samples import samples_once

INVARIANTS: dict[str, Invariant] = {
    function.__name__: function
    for function in (
        agreement,
        validity,
        exactly_once,
        samples_once,
        shard_unity,
        replicas_equal,
        divergence,
        data_flow,
        skip,
        fencing,
        live_set,
        drain,
        join,
        reform,
        bounded,
        decided,
    )
}
"""All invariants by name; checker, simulator and audit evaluate them."""


@dataclass(slots=True)
class Finding:
    """The result of one invariant on a history."""

    name: str
    checks: int = 0
    violation: str | None = None
    place: str = ""
    compared: int = 0
    """Number of checks that compared the digest of a state with that of another participant."""

    def expect(self, holds: bool, text: str, place: str) -> None:
        """Count one check; keep the first violation."""
        self.checks += 1
        if not holds and self.violation is None:
            self.violation, self.place = text, place


class Judge:
    """Checks claims as moves arrive, in any order between participants.

    Args:
        names: Invariants to evaluate; all by default.
        traced: Participants whose moves will arrive; None for all.
        cut: Participants whose moves will not arrive completely; nothing is claimed about missing
            ones.
        window: Number of register records after which facts that no move has mentioned since are
            judged and forgotten; None keeps them all. Moves then arrive in the order of the records
            (see `reach`).
    """

    def __init__(
        self,
        names: Iterable[str] | None = None,
        traced: Collection[Peer] | None = None,
        cut: Collection[Peer] = (),
        window: int | None = None,
    ) -> None:
        self.findings = {name: Finding(name) for name in names or INVARIANTS}
        self.truncated: dict[Peer, str] = {}
        """Messages about participants whose trace ends before a message that others received from
        them."""
        self._traced, self._cut = traced, set(cut)
        self._facts = Facts(window)
        self._served: dict[int, Numbers] = {}
        """Slices that were served, by rank, as far as their facts are forgotten."""
        self._waiting: dict[int, list[tuple[Finding, Given, str]]] = {}
        self._ended: set[Peer] = set()
        """Participants whose moves have all arrived."""

    def reach(self, record: int, epoch: int) -> None:
        """Declare that the next moves start at this register record and epoch, or later."""
        for number in self._facts.due(record, epoch):
            for finding, claim, place in self._waiting.pop(number, ()):
                self._ask(finding, claim, place)
            # Forgotten only now, because the claims above may have used these facts.
            for kind, *about in self._facts.forget(number - 1):
                if kind == "served":
                    served, rank = cast("list[int]", about)
                    self._served.setdefault(rank, Numbers()).add(served)

    def ended(self, peer: Peer) -> None:
        """Declare that the trace of ``peer`` has ended, so moves that have not arrived are
        missing."""
        self._ended.add(peer)

    def feed(self, move: Move) -> None:
        """Check one move."""
        self._facts.at = max(self._facts.at, move.after.head.n if move.after.head else 0)
        self._note_others(move)
        weigh, place = self.weigh, move.place
        for name, finding in self.findings.items():
            for claim in INVARIANTS[name](move):
                weigh(finding, claim, place)

    def consumed(self, peer: Peer, token: Token, number: int, place: str) -> None:
        """Check the report of a data loader that this slice went into that txn."""
        if "samples_once" in self.findings:
            finding = self.findings["samples_once"]
            text = f"slice {number} was served to {peer} in {token}, and to {{was}}"
            key = ("served", number, peer.rank)
            long_ago = number in self._served.get(peer.rank, ()) and key not in self._facts
            if long_ago:
                finding.expect(False, text.replace("{was}", "another, long before"), place)
            self.weigh(finding, Same(key, f"{peer} in {token}", text), place)
            text = f"{peer} consumed slice {number} in txn {token}, which has others"
            given = Given((("data of", token),), text, lambda data: number in data)
            self.weigh(finding, given, place)

    def contributed(self, peer: Peer, token: Token, base: int, place: str) -> None:
        """Check the report of an asynchronous group that its contribution started from ``base``."""
        if "bounded" in self.findings:
            self.weigh(self.findings["bounded"], contributes(peer, token, base), place)

    def finish(self) -> list[Finding]:
        """Check the claims that had to wait for facts, and return all findings."""
        for waiting in self._waiting.values():
            for finding, claim, place in waiting:
                self._ask(finding, claim, place)
        self._waiting.clear()
        return list(self.findings.values())

    def weigh(self, finding: Finding, claim: Claim, place: str) -> None:
        """Check one claim and record the result in ``finding``."""
        facts = self._facts
        if isinstance(claim, Holds):
            finding.expect(claim.ok, claim.text, place)
        elif isinstance(claim, Know):
            facts.put(claim.key, claim.value)
        elif isinstance(claim, Same):
            value = claim.value
            finding.compared += claim.key[0] == "digest" and claim.key in facts
            was = facts.put(claim.key, value)
            if was is value or was == value:
                finding.checks += 1
            else:  # formats ``was``, which may be long, only for a violation
                finding.expect(False, claim.text.replace("{was}", str(was)), place)
        elif isinstance(claim, Given):
            if facts.has(claim.keys):
                self._ask(finding, claim, place)
            else:
                self._waiting.setdefault(facts.bucket, []).append((finding, claim, place))
        else:
            assert_never(claim)

    def _ask(self, finding: Finding, claim: Given, place: str) -> None:
        missing = [key for key in claim.keys if key not in self._facts]
        if missing:
            self._look_for_truncated(missing)
        if missing and (not claim.needed or any(map(self._may_be_cut, missing))):
            return
        for peer in (part for key in missing for part in key if isinstance(part, Peer)):
            if self._traced is not None and peer not in self._traced:
                finding.expect(False, f"there is no trace of {peer}, a member", place)
                return
        holds = False if missing else claim.test(*(self._facts[key] for key in claim.keys))
        if holds is not None:
            finding.expect(holds, claim.text, place)

    def _note_others(self, move: Move) -> None:
        """Remember what the move shows about other participants, even if their moves never
        arrive."""
        match move.event:
            case Ballot(token=token, votes=votes):
                for vote in votes:
                    self._others_had("yes", token, vote.peer, move)
            case Decision(record=record) if record is not None and record.kind == "commit":
                self._others_had("yes", record.token, record.by, move)
            case Ready(peer=peer, epoch=epoch) | Begin(peer=peer, epoch=epoch):
                self._others_had("in barrier", epoch, peer, move)
        for effect in move.out.effects:
            if isinstance(effect, Decide) and effect.proposal.kind == "commit":
                self._facts.put(("proposed", move.before.token, move.peer), True)

    def _others_had(self, kind: str, at: Token | int, peer: Peer, move: Move) -> None:
        if peer != move.peer:
            self._facts.put(("others had", kind, at, peer), move.place)

    def _look_for_truncated(self, missing: Iterable[Key]) -> None:
        """Find participants whose trace is truncated.

        Others have received something that only the missing move can have sent, so the move was
        made. The participants that relied on it have then done nothing wrong.
        """
        for key in missing:
            if (had := ("others had", *key)) not in self._facts:
                continue
            kind, at, peer = cast("tuple[str, Token | int, Peer]", key)
            if peer not in self._ended - self._cut or ("proposed", at, peer) in self._facts:
                continue
            of = f"its vote in txn {at}" if kind == "yes" else f"its ready for epoch {at}"
            text = f"the trace of {peer} ends before {of}, which others had of it"
            self.truncated[peer] = f"{text} ({self._facts[had]}): lines are missing at its end"
            self._cut.add(peer)

    def _may_be_cut(self, key: Key) -> bool:
        """Whether a fact may be missing because the move that establishes it is missing."""
        made_by = [part for part in key if isinstance(part, Peer)]
        return any(peer in self._cut for peer in made_by) if made_by else bool(self._cut)


def judge(history: History, names: Iterable[str] | None = None) -> list[Finding]:
    """Evaluate the invariants on a whole history.

    Args:
        names: Invariants to evaluate; all by default.
    """
    bench = Judge(names, history.moves.keys(), history.cut)
    for move in history.all():
        bench.feed(move)
    for peer, token, number, place in history.consumed:
        bench.consumed(peer, token, number, place)
    for peer, token, base, place in history.contributed:
        bench.contributed(peer, token, base, place)
    return bench.finish()
