"""Guards: the result of a step function, the votes of a txn, and its decision."""

from __future__ import annotations

from fft.messages.protocol import Ballot, Decision, Event, Manifest, Prepared
from fft.protocol.equality import differing, gradient_digest, ranks_to_heal, unequal_data
from fft.protocol.guards.base import guard, record_of
from fft.protocol.state import Config, Local, committed, learners, member_peers


@guard
def votes_yes(s: Local, c: Config, event: Event) -> bool:
    """The step function succeeded with the minimum number of reductions; live blocks need none."""
    if not isinstance(event, Prepared) or not event.yes:
        return False
    return event.manifest.count >= c.min_reductions or bool(event.manifest.block)


@guard
def says_skip(s: Local, c: Config, event: Event) -> bool:
    """The step function succeeded, and the user skips the step on this rank."""
    return isinstance(event, Prepared) and event.yes and event.skip


@guard
def reduced_too_little(s: Local, c: Config, event: Event) -> bool:
    """The step function succeeded and is not skipped, but took part in too few reductions."""
    if not isinstance(event, Prepared) or not event.yes or event.skip:
        return False
    return event.manifest.count < c.min_reductions


@guard
def is_healed(s: Local, c: Config, event: Event) -> bool:
    """The process groups are rebuilt and this participant's state is current."""
    return s.healed


@guard
def learned_meanwhile(s: Local, c: Config, event: Event) -> bool:
    """This group fetched its state in this txn; tables of older traces name it."""
    return c.me.group in learners(s)


@guard
def all_voted(s: Local, c: Config, event: Event) -> bool:
    """The ballot holds a YES of every member of the epoch."""
    return isinstance(event, Ballot) and {v.peer for v in event.votes} == set(member_peers(s))


@guard
def manifests_fit(s: Local, c: Config, event: Event) -> bool:
    """Ranks of one number did the same reductions in every group, and all drew matching data.

    Ranks of one group may reduce different tensors because they hold different parameters, such as
    the stages of a pipeline. All ranks that draw from one shard of the data must have drawn the
    same.
    """
    if not isinstance(event, Ballot):
        return False
    by_rank: dict[int, set[Manifest]] = {}
    for vote in event.votes:
        by_rank.setdefault(vote.peer.rank, set()).add(vote.manifest.reduced)
    is_alike = bool(by_rank) and all(len(ms) == 1 for ms in by_rank.values())
    return is_alike and not unequal_data(event.votes)


@guard
def blocks_differ(s: Local, c: Config, event: Event) -> bool:
    """Some ranks are in a live block, and others in another one or in a step."""
    return isinstance(event, Ballot) and len({v.manifest.block for v in event.votes}) > 1


@guard
def beside_a_step(s: Local, c: Config, event: Event) -> bool:
    """At least one vote is for a step."""
    return isinstance(event, Ballot) and not all(v.manifest.block for v in event.votes)


@guard
def in_live_block(s: Local, c: Config, event: Event) -> bool:
    """The votes are those of a live block."""
    return isinstance(event, Ballot) and any(v.manifest.block for v in event.votes)


@guard
def gradients_fit(s: Local, c: Config, event: Event) -> bool:
    """Ranks of one number have equal reduced gradients, as far as their votes contain a digest."""
    return isinstance(event, Ballot) and not differing(event.votes, gradient_digest)


@guard
def data_differ(s: Local, c: Config, event: Event) -> bool:
    """Ranks that draw from one shard of the data have drawn different data."""
    return isinstance(event, Ballot) and bool(unequal_data(event.votes))


@guard
def somebody_skips(s: Local, c: Config, event: Event) -> bool:
    """At least one vote asks to skip the step."""
    return isinstance(event, Ballot) and any(vote.skip for vote in event.votes)


@guard
def digests_fit(s: Local, c: Config, event: Event) -> bool:
    """Ranks of one number have equal state digests, as far as their votes contain one."""
    return isinstance(event, Ballot) and not differing(event.votes)


@guard
def odd_ones_known(s: Local, c: Config, event: Event) -> bool:
    """The votes show which ranks diverge: joiners, or a minority if the policy is to heal it."""
    return isinstance(event, Ballot) and ranks_to_heal(s, c, event.votes) is not None


@guard
def decided_commit(s: Local, c: Config, event: Event) -> bool:
    """The register decides COMMIT for the current txn."""
    record = record_of(event)
    return record is not None and record.kind == "commit" and record.token == s.token


@guard
def decided_abort(s: Local, c: Config, event: Event) -> bool:
    """The register decides ABORT for the current txn."""
    record = record_of(event)
    return record is not None and record.kind == "abort" and record.token == s.token


@guard
def epoch_ends(s: Local, c: Config, event: Event) -> bool:
    """The commit is the last one of its epoch."""
    record = record_of(event)
    return record is not None and record.change


@guard
def i_leave(s: Local, c: Config, event: Event) -> bool:
    """This group leaves with the commit."""
    record = record_of(event)
    return record is not None and c.me.group in record.leavers


@guard
def settled_commit(s: Local, c: Config, event: Event) -> bool:
    """A later record's lineage shows that the current txn was committed."""
    record = record_of(event)
    return (
        record is not None
        and record.token > s.token
        and s.vote is not None
        and record.lineage in (committed(s, c).lineage, committed(s, c, skip=True).lineage)
    )


@guard
def head_is_beyond(s: Local, c: Config, event: Event) -> bool:
    """The register is past the txn being applied: an ABORT of a later txn, or a newer epoch."""
    return s.head is not None and s.head.token > s.token


@guard
def change_due(s: Local, c: Config, event: Event) -> bool:
    """The commit being applied ends the epoch."""
    return s.head is not None and s.head.kind == "commit" and s.head.change


@guard
def was_compared(s: Local, c: Config, event: Event) -> bool:
    """This vote has a state digest, so a missed decision may name this rank as divergent."""
    return s.vote is not None and s.vote.digest is not None


@guard
def missed_decisions(s: Local, c: Config, event: Event) -> bool:
    """Records before this one were missed, among them perhaps the decision of the current txn."""
    record, known = record_of(event), s.head.n if s.head is not None else 0
    return record is not None and record.n > known + 1


@guard
def says_why(s: Local, c: Config, event: Event) -> bool:
    """The decision is an ABORT with a cause."""
    record = record_of(event)
    return record is not None and record.kind == "abort" and bool(record.cause)


@guard
def gives_my_state_up(s: Local, c: Config, event: Event) -> bool:
    """The decision names this rank as divergent."""
    record = record_of(event)
    return record is not None and c.me in record.odd


@guard
def i_won(s: Local, c: Config, event: Event) -> bool:
    """The decision is the one that this participant proposed."""
    return isinstance(event, Decision) and event.won and event.record is not None


@guard
def i_decided(s: Local, c: Config, event: Event) -> bool:
    """This participant wrote the newest decision that it knows."""
    return s.head is not None and s.head.by == c.me


@guard
def ends_a_txn(s: Local, c: Config, event: Event) -> bool:
    """The decision is about a txn, not about the next epoch."""
    record = record_of(event)
    return record is not None and record.kind != "epoch"


@guard
def not_proposed(s: Local, c: Config, event: Event) -> bool:
    """This participant has no proposal under way."""
    return not s.proposed
