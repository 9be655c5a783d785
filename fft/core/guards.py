"""Guards by name: pure questions about one participant and the event at hand.

``GUARDS`` is what a spec may name. A guard's first docstring line is shown by ``fft spec``.
"""

from __future__ import annotations

from collections.abc import Callable

from fft.core.local import (
    Config,
    Local,
    committed,
    member_peers,
    next_epoch,
    waited_for,
    whole_groups,
)
from fft.core.messages import (
    Ballot,
    Decision,
    Event,
    Join,
    Manifest,
    Prepared,
    Record,
    Token,
)

Guard = Callable[[Local, Config, Event], bool]
GUARDS: dict[str, Guard] = {}


def guard(function: Guard) -> Guard:
    """Register a guard under its function name."""
    GUARDS[function.__name__] = function
    return function


def _record(event: Event) -> Record | None:
    return event.record if isinstance(event, Decision) else None


@guard
def votes_yes(s: Local, c: Config, event: Event) -> bool:
    """The body ended well and took part in the reductions that the policy asks for."""
    return isinstance(event, Prepared) and event.yes and event.manifest.count >= c.min_reductions


@guard
def all_voted(s: Local, c: Config, event: Event) -> bool:
    """The ballot holds a YES of every participant of the epoch."""
    return isinstance(event, Ballot) and {v.peer for v in event.votes} == set(member_peers(s))


@guard
def manifests_fit(s: Local, c: Config, event: Event) -> bool:
    """Ranks of one number did the same reductions in every group; all ranks did as many."""
    if not isinstance(event, Ballot):
        return False
    by_rank: dict[int, set[Manifest]] = {}
    for vote in event.votes:
        by_rank.setdefault(vote.peer.rank, set()).add(vote.manifest)
    counts = {m.count for ms in by_rank.values() for m in ms}
    return len(counts) == 1 and all(len(ms) == 1 for ms in by_rank.values())


@guard
def decided_commit(s: Local, c: Config, event: Event) -> bool:
    """The register says COMMIT for the txn I stand at."""
    record = _record(event)
    return record is not None and record.kind == "commit" and record.token == s.token


@guard
def decided_abort(s: Local, c: Config, event: Event) -> bool:
    """The register says ABORT for the txn I stand at."""
    record = _record(event)
    return record is not None and record.kind == "abort" and record.token == s.token


@guard
def epoch_ends(s: Local, c: Config, event: Event) -> bool:
    """This commit is the last of its epoch."""
    record = _record(event)
    return record is not None and record.change


@guard
def i_leave(s: Local, c: Config, event: Event) -> bool:
    """My group leaves with this commit."""
    record = _record(event)
    return record is not None and c.me.group in record.leavers


@guard
def epoch_with_me(s: Local, c: Config, event: Event) -> bool:
    """A newer epoch is formed, and this incarnation is in it."""
    record = _record(event)
    return (
        record is not None
        and record.kind == "epoch"
        and record.epoch > s.token.epoch
        and any(c.me in g.peers() for g in record.members)
    )


@guard
def moved_on(s: Local, c: Config, event: Event) -> bool:
    """The job is in a newer epoch without me: I am fenced."""
    record = _record(event)
    return record is not None and record.epoch > s.token.epoch


@guard
def settled_commit(s: Local, c: Config, event: Event) -> bool:
    """The register moved on, and its lineage shows that my txn was committed."""
    record = _record(event)
    return (
        record is not None
        and record.token > s.token
        and s.vote is not None
        and record.lineage == committed(s, c)[0]
    )


@guard
def head_is_beyond(s: Local, c: Config, event: Event) -> bool:
    """The register has gone past the txn I am applying: rolled back after it, or a newer epoch."""
    return s.head is not None and s.head.token > s.token


@guard
def fenced(s: Local, c: Config, event: Event) -> bool:
    """The head is in a newer epoch than I am."""
    return s.head is not None and s.head.epoch > s.token.epoch


@guard
def change_due(s: Local, c: Config, event: Event) -> bool:
    """The commit being applied ends the epoch."""
    return s.head is not None and s.head.kind == "commit" and s.head.change


@guard
def adopted(s: Local, c: Config, event: Event) -> bool:
    """The epoch I stand in is open: its record is the head."""
    return s.head is not None and s.head.kind == "epoch" and s.head.epoch == s.token.epoch


@guard
def misjudged(s: Local, c: Config, event: Event) -> bool:
    """The new epoch counts on a state that I do not hold (it was torn after I had said so)."""
    record = _record(event) or s.head
    if record is None or record.kind != "epoch" or record.lineage == s.lineage:
        return False
    mine = [g for g in record.members if c.me in g.peers()]
    return bool(mine) and mine[0].ranks[c.me.rank].current


@guard
def forming(s: Local, c: Config, event: Event) -> bool:
    """The epoch I stand in is closed and the next one is not formed yet."""
    return s.head is not None and s.head.kind != "epoch" and s.head.epoch == s.token.epoch


@guard
def member_lost(s: Local, c: Config, event: Event) -> bool:
    """A participant of my epoch has ended, or is outside and asks to come in."""
    gone = s.dead | s.joining
    return any(p in gone for p in member_peers(s))


@guard
def all_stopped(s: Local, c: Config, event: Event) -> bool:
    """Every live member has acknowledged the end of the epoch."""
    return all(s.stopped.get(p, Token(0, 0)) >= s.token for p in waited_for(s))


@guard
def epoch_possible(s: Local, c: Config, event: Event) -> bool:
    """Enough whole groups are there, and together they hold the state."""
    return next_epoch(s, c) is not None


@guard
def not_paused(s: Local, c: Config, event: Event) -> bool:
    """No pause after repeated rollbacks is running."""
    return not s.paused


@guard
def not_proposed(s: Local, c: Config, event: Event) -> bool:
    """I have no proposal on its way."""
    return not s.proposed


@guard
def is_restored(s: Local, c: Config, event: Event) -> bool:
    """The main thread has put back the start of the step."""
    return s.restored


@guard
def said_unwinding(s: Local, c: Config, event: Event) -> bool:
    """My last word was that my main thread was still unwinding."""
    said = s.hellos.get((c.me.group, c.me.rank))
    return said is not None and said.peer == c.me and said.unwinding


@guard
def is_healed(s: Local, c: Config, event: Event) -> bool:
    """Groups are rebuilt and my state is current."""
    return s.healed


@guard
def all_ready(s: Local, c: Config, event: Event) -> bool:
    """Every participant of the epoch is in its barrier."""
    return all(s.ready.get(p, 0) == s.token.epoch for p in member_peers(s))


@guard
def no_head(s: Local, c: Config, event: Event) -> bool:
    """The job has no history yet."""
    return s.head_read and s.head is None


@guard
def has_history(s: Local, c: Config, event: Event) -> bool:
    """The register answered with a record."""
    return _record(event) is not None


@guard
def head_known(s: Local, c: Config, event: Event) -> bool:
    """The head register has been read."""
    return s.head_read


@guard
def all_expected_joined(s: Local, c: Config, event: Event) -> bool:
    """As many whole groups as the launcher announced want to join."""
    return len(whole_groups(s, c)) >= max(c.expected_groups, c.min_groups)


@guard
def bus_is_down(s: Local, c: Config, event: Event) -> bool:
    """The bus has not been heard of since an operation on it failed."""
    return s.bus_down or s.deaf


@guard
def superseded(s: Local, c: Config, event: Event) -> bool:
    """A newer incarnation of my own identity has joined."""
    if not isinstance(event, Join):
        return False
    other = event.hello.peer
    return (other.group, other.rank) == (c.me.group, c.me.rank) and other.inc > c.me.inc


@guard
def answers_joiners(s: Local, c: Config, event: Event) -> bool:
    """The last decision of the job is mine, or that of nobody in my epoch."""
    return s.head is not None and (s.head.by == c.me or s.head.by not in member_peers(s))


@guard
def asked_to_leave(s: Local, c: Config, event: Event) -> bool:
    """A drain has named my group."""
    return c.me in s.leaving


@guard
def peers_moved_on(s: Local, c: Config, event: Event) -> bool:
    """Nobody who stays still needs me: all have stopped for the next epoch, or formed it."""
    return fenced(s, c, event) or all_stopped(s, c, event)
