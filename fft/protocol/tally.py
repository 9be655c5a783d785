"""The verdict on the votes of one txn. Pure.

`Tally` is a value: the tallies of any parts of the members combine into the tally of all of them,
in any order, and a part that is counted twice changes nothing. `Tally.verdict` reads the result.
The first condition that holds decides:

== ============================================================== ================================
1  a member's vote is missing, or a vote is not a member's        Pending
2  votes for a live block and for a step                          Abort(BLOCK_BESIDE_STEP)
3  votes for different live blocks                                Abort(BLOCKS_DIFFER)
4  states differ, and only joiners without a committed step do    Abort(REPLICAS_DIFFER), ranks
5  states differ, a minority does, and the policy is to heal it   Abort(REPLICAS_DIFFER), ranks
6  states differ otherwise                                        Abort(REPLICAS_DIFFER), ends_job
7  reductions or data do not match, and a rank skips the step     Abort(SKIPPED), skip
8  data do not match                                              Abort(DATA_DIFFERS)
9  reductions do not match                                        Abort(MANIFESTS_DIFFER)
10 the votes are for a live block                                 Live
11 reduced gradients differ                                       Abort(GRADIENTS_DIFFER)
12 otherwise                                                      Commit
== ============================================================== ================================

A block beside a step (2) repeats the step and is not entered. Rows 4 to 6 come before all other
comparisons, because equal replicas must stay equal whatever the txn is. A replay repairs gradients
that a fault has changed (11). A NO is no vote: a rank that fails, refuses a result, misses a
gradient or stops alone proposes ABORT instead of voting, so a tally never contains it.

States, reductions and gradients are compared among the ranks of one number, which hold the same
shard; data among the ranks that draw from one shard of it. A digest that was not taken is not
compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from fft.messages.causes import Cause, CauseCode
from fft.messages.protocol import Manifest, Peer, Seen, Vote, content_of
from fft.protocol.equality import (
    LONGEST,
    differing,
    digests_text,
    divergent_joiners,
    divergent_ranks,
    unequal_data,
    wrong_gradients,
)
from fft.protocol.state import Config, Local, unproven


@dataclass(frozen=True, slots=True)
class Expected:
    """The members of the txn, and the policy if their states differ."""

    members: frozenset[Peer]
    joiners: frozenset[Peer] = frozenset()
    """Members that have fetched their state and committed no step since."""
    heals: bool = False
    """A minority whose state differs fetches the state of the majority."""
    step: int = 0
    """Number of the last committed step, for the texts of causes."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Not all members have voted."""


@dataclass(frozen=True, slots=True)
class Commit:
    """All members voted YES and their votes match."""

    skip: bool = False
    """At least one rank skips the step, so all do."""
    leaving: frozenset[str] = frozenset()
    """Groups that leave with the commit."""
    is_last: bool = False
    """All members declare that no step follows."""
    seen: tuple[Seen, ...] = ()
    """Positions of other scopes, as the first voter knows them; any vote's allow the txn."""
    checkpoint: bool = False
    """A durable checkpoint is due: a vote asks for it, and the txn is a step or the last one."""


@dataclass(frozen=True, slots=True)
class Live(Commit):
    """All members enter or end the same live block."""

    part: str = ""
    """As in ``Record.live``."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The votes do not match."""

    cause: Cause
    ranks: tuple[Peer, ...] = ()
    """Divergent ranks, whose state counts as lost."""
    ends_job: bool = False
    skip: bool = False
    """The txn is rolled back because a rank skips the step."""

    @property
    def accused(self) -> tuple[Peer, ...]:
        """Ranks that the votes are evidence against."""
        return self.ranks or self.cause.accused


Verdict = Pending | Commit | Abort


class Content(NamedTuple):
    """A vote without its voter."""

    manifest: Manifest
    leaving: bool
    last: bool
    skip: bool
    digest: str | None
    seen: tuple[Seen, ...]
    checkpoint: bool


@dataclass(frozen=True)
class Tally:
    """The votes of some of the members: the voters of each content."""

    voters: Mapping[Content, frozenset[Peer]] = field(default_factory=dict)

    @classmethod
    def of(cls, votes: Iterable[Vote]) -> Tally:
        """Return the tally of single votes."""
        found: dict[Content, set[Peer]] = {}
        for content, same in groupby(votes, content_of):  # equal ones are adjacent in an entry
            found.setdefault(Content(*content), set()).update(vote.peer for vote in same)
        return cls({content: frozenset(peers) for content, peers in found.items()})

    def combine(self, other: Tally) -> Tally:
        """Return the tally of both parts; associative, commutative and idempotent."""
        both = {c: self.voters.get(c, frozenset()) | peers for c, peers in other.voters.items()}
        return Tally({**self.voters, **both})

    @property
    def votes(self) -> list[Vote]:
        """The single votes, in the order of their voters."""
        each = ((peer, content) for content, peers in self.voters.items() for peer in peers)
        return [Vote(peer, *content) for peer, content in sorted(each, key=lambda x: x[0])]

    @cached_property
    def commit(self) -> Commit:
        """The result of a commit of these votes, whether or not they match."""
        skip = any(content.skip for content in self.voters)
        leaving = frozenset(
            peer.group
            for content, peers in self.voters.items()
            if content.leaving or (content.last and (not skip or content.manifest.block))
            for peer in peers
        )
        is_last = all(content.last for content in self.voters)
        checkpoint = any(c.checkpoint and (c.last or not skip) for c in self.voters)
        first = min(self.voters.items(), key=lambda each: min(each[1]), default=None)
        seen = first[0].seen if first is not None else ()
        if part := max((content.manifest.part for content in self.voters), default=""):
            return Live(skip, leaving, is_last, seen, part=part)
        return Commit(skip, leaving, is_last, seen, checkpoint)

    def verdict(self, expected: Expected) -> Verdict:
        """Return the first verdict of the table above whose condition holds."""
        if not self.voters or frozenset().union(*self.voters.values()) != expected.members:
            return Pending()
        manifests = [content.manifest for content in self.voters]
        if len({manifest.block for manifest in manifests}) > 1:
            return Abort(blocks_cause(self.votes))
        ranked = [(r, c) for c, peers in self.voters.items() for r in {p.rank for p in peers}]
        if _differ((rank, content.digest) for rank, content in ranked):
            return _unequal_states(self.votes, expected)
        is_sharded = {bool(m.shard) for m in manifests if m.data is not None}
        data_differ = len(is_sharded) > 1 or _differ((m.shard, m.data) for m in manifests)
        if data_differ or _differ((rank, content.manifest.reduced) for rank, content in ranked):
            return _misfit(self.votes)
        commit = self.commit
        fingerprints = ((rank, content.manifest.fingerprint) for rank, content in ranked)
        if not isinstance(commit, Live) and _differ(fingerprints):
            return Abort(gradients_cause(self.votes))
        return commit


_newest: tuple[Sequence[Vote], Tally] = (), Tally()
"""The votes of the newest ballot, which guards and effects ask about; replaced as a whole."""


def tally_of(votes: Sequence[Vote]) -> Tally:
    """Return the tally of the votes of a ballot; computed once for all that ask for the newest."""
    global _newest
    held, found = _newest
    if held is not votes:
        found = Tally.of(votes)
        _newest = votes, found
    return found


def tally(votes: Iterable[Vote], expected: Expected) -> Verdict:
    """Return the verdict on the votes of a txn."""
    return Tally.of(votes).verdict(expected)


def verdict_on(s: Local, c: Config, votes: Sequence[Vote]) -> Verdict:
    """Return the verdict on the votes of the current txn."""
    members = s.epoch.peer_set if s.epoch is not None else frozenset()
    expected = Expected(members, unproven(s), c.on_divergence == "heal", s.step)
    return tally_of(votes).verdict(expected)


def _differ(pairs: Iterable[tuple[Hashable, Hashable | None]]) -> bool:
    """Whether one key has two values; None is no value."""
    found: dict[Hashable, Hashable] = {}
    return any(value is not None and found.setdefault(key, value) != value for key, value in pairs)


def _unequal_states(votes: Sequence[Vote], expected: Expected) -> Abort:
    cause = states_cause(votes, expected.step)
    odd = ranks_to_heal(votes, expected)
    return Abort(cause, ends_job=True) if odd is None else Abort(cause, odd)


def ranks_to_heal(votes: Sequence[Vote], expected: Expected) -> tuple[Peer, ...] | None:
    """Return the ranks whose state counts as lost because the states in the votes differ.

    These are the joiners that have committed no step yet, if they alone differ. Otherwise they are
    the divergent ranks, if the policy is to heal them.

    Returns:
        None if the job must end.
    """
    if found := divergent_joiners(votes, expected.joiners):
        return found
    return divergent_ranks(votes) if expected.heals else None


def _misfit(votes: Sequence[Vote]) -> Abort:
    cause = data_cause(votes) or manifests_cause(votes)
    if any(vote.skip for vote in votes):
        return Abort(skip_cause(votes, cause), skip=True)
    return Abort(cause)


# --- causes ---------------------------------------------------------------------------------------


def blocks_cause(votes: Iterable[Vote]) -> Cause:
    """Name the live block, or the step, that each rank is in."""
    votes = tuple(votes)
    places = ", ".join(f"{vote.peer}: {vote.manifest.place}" for vote in votes)
    text = f"the ranks are not in the same live block ({places})"[:LONGEST]
    in_blocks = all(vote.manifest.block for vote in votes)
    return Cause(CauseCode.BLOCKS_DIFFER if in_blocks else CauseCode.BLOCK_BESIDE_STEP, text)


def states_cause(votes: Iterable[Vote], step: int) -> Cause:
    """Name the replicas whose states differ."""
    text = f"replicas differ after step {step}: {digests_text(differing(votes))}"[:LONGEST]
    return Cause(CauseCode.REPLICAS_DIFFER, text)


def manifests_cause(votes: Iterable[Vote]) -> Cause:
    """Name the reductions of each rank."""
    counts = ", ".join(f"{v.peer}: {v.manifest.count}x/{v.manifest.bytes}B" for v in votes)
    text = f"the votes' manifests do not fit together ({counts})"[:LONGEST]
    return Cause(CauseCode.MANIFESTS_DIFFER, text)


def data_cause(votes: Iterable[Vote]) -> Cause | None:
    """Name the ranks that have drawn different data, if there are any."""
    if not (found := unequal_data(votes)):
        return None
    text = f"the ranks have drawn different data ({found})"[:LONGEST]
    return Cause(CauseCode.DATA_DIFFERS, text)


def skip_cause(votes: Iterable[Vote], misfit: Cause) -> Cause:
    """Name the ranks that skip a step whose votes do not match."""
    skipping = ", ".join(str(vote.peer) for vote in votes if vote.skip)
    text = f"the user skipped this step on {skipping}; {misfit.text}"[:LONGEST]
    return Cause(CauseCode.SKIPPED, text)


def gradients_cause(votes: Iterable[Vote]) -> Cause:
    """Name the reduced gradients that differ, and accuse the ranks that are wrong."""
    text, accused = wrong_gradients(votes)
    return Cause(CauseCode.GRADIENTS_DIFFER, text, accused)
