"""Guards: what a body did, what the votes of a txn say, and what was decided of it."""

from __future__ import annotations

from dataclasses import replace

from fft.messages.protocol import Ballot, Decision, Event, Manifest, Prepared
from fft.protocol.equality import differing, odd_ones, unequal_data
from fft.protocol.guards.base import guard, record_of
from fft.protocol.state import Config, Local, committed, learners, member_peers


@guard
def votes_yes(s: Local, c: Config, event: Event) -> bool:
    """The body ended well and took part in the reductions that the policy asks for."""
    return isinstance(event, Prepared) and event.yes and event.manifest.count >= c.min_reductions


@guard
def says_skip(s: Local, c: Config, event: Event) -> bool:
    """The body ended well, and the user wants no step here."""
    return isinstance(event, Prepared) and event.yes and event.skip


@guard
def reduced_too_little(s: Local, c: Config, event: Event) -> bool:
    """The body ended well and is no skip, but took part in too few reductions."""
    if not isinstance(event, Prepared) or not event.yes or event.skip:
        return False
    return event.manifest.count < c.min_reductions


@guard
def is_healed(s: Local, c: Config, event: Event) -> bool:
    """Groups are rebuilt and my state is current."""
    return s.healed


@guard
def learned_meanwhile(s: Local, c: Config, event: Event) -> bool:
    """My group is a learner of this txn: its state has come while the others computed."""
    return c.me.group in learners(s)


@guard
def all_voted(s: Local, c: Config, event: Event) -> bool:
    """The ballot holds a YES of every participant of the epoch."""
    return isinstance(event, Ballot) and {v.peer for v in event.votes} == set(member_peers(s))


@guard
def manifests_fit(s: Local, c: Config, event: Event) -> bool:
    """Ranks of one number did the same reductions in every group, on data that fit together.

    Ranks of one group may reduce different tensors: they hold other parameters, such as stages of
    a pipeline. All ranks that draw from one shard of the data must have drawn the same.
    """
    if not isinstance(event, Ballot):
        return False
    by_rank: dict[int, set[Manifest]] = {}
    for vote in event.votes:
        reduced = replace(vote.manifest, data=None, shard="")
        by_rank.setdefault(vote.peer.rank, set()).add(reduced)
    is_alike = bool(by_rank) and all(len(ms) == 1 for ms in by_rank.values())
    return is_alike and not unequal_data(event.votes)


@guard
def data_differ(s: Local, c: Config, event: Event) -> bool:
    """Ranks that draw from one shard of the data have drawn different data."""
    return isinstance(event, Ballot) and bool(unequal_data(event.votes))


@guard
def somebody_skips(s: Local, c: Config, event: Event) -> bool:
    """Some vote says that the user wants no step."""
    return isinstance(event, Ballot) and any(vote.skip for vote in event.votes)


@guard
def digests_fit(s: Local, c: Config, event: Event) -> bool:
    """Ranks of one number brought equal digests of their states, as far as they brought any."""
    return isinstance(event, Ballot) and not differing(event.votes)


@guard
def odd_ones_known(s: Local, c: Config, event: Event) -> bool:
    """Whoever differs from most shall be healed, and there is a majority that tells who that is."""
    heals = c.on_divergence == "heal"
    return heals and isinstance(event, Ballot) and odd_ones(event.votes) is not None


@guard
def decided_commit(s: Local, c: Config, event: Event) -> bool:
    """The register says COMMIT for the txn I stand at."""
    record = record_of(event)
    return record is not None and record.kind == "commit" and record.token == s.token


@guard
def decided_abort(s: Local, c: Config, event: Event) -> bool:
    """The register says ABORT for the txn I stand at."""
    record = record_of(event)
    return record is not None and record.kind == "abort" and record.token == s.token


@guard
def epoch_ends(s: Local, c: Config, event: Event) -> bool:
    """This commit is the last of its epoch."""
    record = record_of(event)
    return record is not None and record.change


@guard
def i_leave(s: Local, c: Config, event: Event) -> bool:
    """My group leaves with this commit."""
    record = record_of(event)
    return record is not None and c.me.group in record.leavers


@guard
def settled_commit(s: Local, c: Config, event: Event) -> bool:
    """The register moved on, and its lineage shows that my txn was committed."""
    record = record_of(event)
    return (
        record is not None
        and record.token > s.token
        and s.vote is not None
        and record.lineage in (committed(s, c).lineage, committed(s, c, skip=True).lineage)
    )


@guard
def head_is_beyond(s: Local, c: Config, event: Event) -> bool:
    """The register has gone past the txn I am applying: rolled back after it, or a newer epoch."""
    return s.head is not None and s.head.token > s.token


@guard
def change_due(s: Local, c: Config, event: Event) -> bool:
    """The commit being applied ends the epoch."""
    return s.head is not None and s.head.kind == "commit" and s.head.change


@guard
def was_compared(s: Local, c: Config, event: Event) -> bool:
    """My vote carried a digest of my state: I may be the odd one of a decision I have missed."""
    return s.vote is not None and s.vote.digest is not None


@guard
def missed_decisions(s: Local, c: Config, event: Event) -> bool:
    """There are records between the newest that I know and this one: my txn's decision, if any."""
    record, known = record_of(event), s.head.n if s.head is not None else 0
    return record is not None and record.n > known + 1


@guard
def says_why(s: Local, c: Config, event: Event) -> bool:
    """The decision is an ABORT, with its cause."""
    record = record_of(event)
    return record is not None and record.kind == "abort" and bool(record.cause)


@guard
def gives_my_state_up(s: Local, c: Config, event: Event) -> bool:
    """The decision names me as one whose state differs from most."""
    record = record_of(event)
    return record is not None and c.me in record.odd


@guard
def i_won(s: Local, c: Config, event: Event) -> bool:
    """The decision is the one that I proposed."""
    return isinstance(event, Decision) and event.won and event.record is not None


@guard
def i_decided(s: Local, c: Config, event: Event) -> bool:
    """The last decision of the job that I know is mine."""
    return s.head is not None and s.head.by == c.me


@guard
def ends_a_txn(s: Local, c: Config, event: Event) -> bool:
    """The decision is about a txn, not about the next epoch."""
    record = record_of(event)
    return record is not None and record.kind != "epoch"


@guard
def not_proposed(s: Local, c: Config, event: Event) -> bool:
    """I have no proposal on its way."""
    return not s.proposed
