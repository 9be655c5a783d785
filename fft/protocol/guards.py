"""Guards by name: pure questions about one participant and the event at hand.

``GUARDS`` is what a spec may name. A guard's first docstring line is shown by ``fft spec``.
"""

from __future__ import annotations

from collections.abc import Callable

from fft.messages.protocol import (
    Ballot,
    Begin,
    Decision,
    Drain,
    Event,
    Here,
    Join,
    Leave,
    Manifest,
    Prepared,
    Record,
    Restored,
    Suspect,
    Token,
)
from fft.protocol.equality import differing
from fft.protocol.state import (
    FREE_ROLLBACKS,
    Config,
    Local,
    all_in_barrier,
    behind,
    committed,
    coordinator,
    is_member,
    leavers,
    member_peers,
    members,
    missing_mates,
    next_epoch,
    peers_meant,
    waited_for,
    whole_groups,
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
def digests_fit(s: Local, c: Config, event: Event) -> bool:
    """Ranks of one number brought equal digests of their states, as far as they brought any."""
    return isinstance(event, Ballot) and not differing(event.votes)


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
        and record.lineage in (committed(s, c).lineage, committed(s, c, skip=True).lineage)
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
    return s.head is not None and s.epoch is not None and s.head.n == s.epoch.n


@guard
def misjudged(s: Local, c: Config, event: Event) -> bool:
    """The new epoch counts on a state that I do not hold (it was torn after I had said so)."""
    record = _record(event) or s.head
    held = "" if says_torn(s, c, event) else s.lineage
    if record is None or record.kind != "epoch" or record.lineage == held:
        return False
    mine = [g for g in record.members if c.me in g.peers()]
    return bool(mine) and mine[0].ranks[c.me.rank].current


@guard
def member_lost(s: Local, c: Config, event: Event) -> bool:
    """A participant of my epoch has ended, is suspected, or is outside and asks to come in."""
    return any(is_member(s, p) for p in s.dead | s.joining | s.suspected)


@guard
def about_me(s: Local, c: Config, event: Event) -> bool:
    """It is my own main thread that was seen not to move."""
    return isinstance(event, Suspect) and c.me in peers_meant(s, event)


@guard
def i_coordinate(s: Local, c: Config, event: Event) -> bool:
    """The others tell me that they have stopped, and that they are in the barrier."""
    return coordinator(s) == c.me


@guard
def i_gather(s: Local, c: Config, event: Event) -> bool:
    """I coordinate, or nobody does, and everyone tells everyone."""
    return coordinator(s) in (None, c.me)


@guard
def coordinator_changed(s: Local, c: Config, event: Event) -> bool:
    """Whom I told that I have stopped no longer gathers that."""
    return s.told != coordinator(s)


@guard
def from_coordinator(s: Local, c: Config, event: Event) -> bool:
    """It is a sign of life from who forms the next epoch."""
    return isinstance(event, Here) and event.peer == coordinator(s)


@guard
def all_stopped(s: Local, c: Config, event: Event) -> bool:
    """Every live member has acknowledged the end of the epoch, as its coordinator knows."""
    gone = len(s.dead) + len(s.suspected) + len(s.joining)
    if len(s.stopped) + gone + len(leavers(s)) * c.world < len(member_peers(s)):
        return False  # the long way round only when it can come out otherwise
    return all(s.stopped.get(p, Token(0, 0)) >= s.token for p in waited_for(s))


@guard
def epoch_possible(s: Local, c: Config, event: Event) -> bool:
    """Enough whole groups are there, and together they hold the state."""
    return next_epoch(s, c) is not None


@guard
def learners_can_follow(s: Local, c: Config, event: Event) -> bool:
    """Some groups are behind after a commit, and enough others can compute meanwhile.

    After a rollback who is behind has lost its state, and the same gradients shall count again; who
    joins after a commit has none to give yet. Where bodies change gradients, a learner would change
    them by weights that are not the job's.
    """
    record = next_epoch(s, c)
    if record is None or s.head is None or s.head.kind != "commit" or s.edits:
        return False
    late = behind(record)
    return bool(late) and len(record.members) - len(late) >= max(1, c.min_groups)


@guard
def fails_too_often(s: Local, c: Config, event: Event) -> bool:
    """The rollbacks in a row are more than those that nobody pauses after."""
    return s.rollbacks > FREE_ROLLBACKS


@guard
def counts_as_failure(s: Local, c: Config, event: Event) -> bool:
    """The rollback is not because the user skipped a step."""
    return s.head is not None and not s.head.skip


@guard
def i_decided(s: Local, c: Config, event: Event) -> bool:
    """The last decision of the job that I know is mine."""
    return s.head is not None and s.head.by == c.me


@guard
def asks_to_come_in(s: Local, c: Config, event: Event) -> bool:
    """It is no member's word from before it was let in.

    A member that knows of this epoch's record, or of later ones, and still asks is not in it, and
    will not be.
    """
    if not isinstance(event, Join):
        return False
    hello = event.hello
    return s.epoch is None or not is_member(s, hello.peer) or hello.head >= s.epoch.n


@guard
def i_won(s: Local, c: Config, event: Event) -> bool:
    """The decision is the one that I proposed."""
    return isinstance(event, Decision) and event.won and event.record is not None


@guard
def ends_a_txn(s: Local, c: Config, event: Event) -> bool:
    """The decision is about a txn, not about the next epoch."""
    record = _record(event)
    return record is not None and record.kind != "epoch"


@guard
def another_gathers(s: Local, c: Config, event: Event) -> bool:
    """Somebody else coordinates."""
    return coordinator(s) not in (None, c.me)


@guard
def asked_here(s: Local, c: Config, event: Event) -> bool:
    """The drain was asked for in this process."""
    return isinstance(event, Drain) and event.local


@guard
def heard_first(s: Local, c: Config, event: Event) -> bool:
    """It is the first word of another participant."""
    if not isinstance(event, Join) or event.hello.peer == c.me:
        return False
    peer = event.hello.peer
    known = s.hellos.get((peer.group, peer.rank))
    return known is None or known.peer != peer


@guard
def mates_are_here(s: Local, c: Config, event: Event) -> bool:
    """All ranks of my group ask to come in, as far as I have heard.

    While one is missing nobody can let us in: it may have left, and its word of that may be lost.
    """
    return not missing_mates(s, c)


@guard
def not_paused(s: Local, c: Config, event: Event) -> bool:
    """No pause after repeated rollbacks is running."""
    return not s.paused


@guard
def not_proposed(s: Local, c: Config, event: Event) -> bool:
    """I have no proposal on its way."""
    return not s.proposed


@guard
def says_torn(s: Local, c: Config, event: Event) -> bool:
    """The start of the step could not be put back as a whole."""
    return isinstance(event, Restored) and event.torn


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
    """Every participant of the epoch is in its barrier, as its coordinator knows."""
    return all_in_barrier(s)


@guard
def begun(s: Local, c: Config, event: Event) -> bool:
    """All members of the epoch that I stand in are in its barrier, says its coordinator."""
    return isinstance(event, Begin) and event.epoch == s.token.epoch


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
    expected = max(c.expected_groups, c.min_groups)
    return len(s.joining) >= expected * c.world and len(whole_groups(s, c)) >= expected


@guard
def bus_is_down(s: Local, c: Config, event: Event) -> bool:
    """The bus has not been heard of since an operation on it failed."""
    return s.bus_down or s.deaf


@guard
def only_deaf(s: Local, c: Config, event: Event) -> bool:
    """I cannot follow the order of decisions any more, but the bus answers."""
    return s.deaf and not s.bus_down


@guard
def superseded(s: Local, c: Config, event: Event) -> bool:
    """A newer incarnation of my own identity has joined."""
    if not isinstance(event, Join):
        return False
    other = event.hello.peer
    return (other.group, other.rank) == (c.me.group, c.me.rank) and other.inc > c.me.inc


@guard
def mate_left(s: Local, c: Config, event: Event) -> bool:
    """A rank of my own group instance has left by its own word."""
    if not isinstance(event, Leave):
        return False
    known = s.hellos.get((event.peer.group, event.peer.rank))
    mine = known is not None and known.peer == event.peer and known.store == c.store
    return mine and event.peer.group == c.me.group and event.peer != c.me


@guard
def all_others_left(s: Local, c: Config, event: Event) -> bool:
    """All groups but mine left with the last commit; mine alone is too few, and nobody comes."""
    others = {g.group for g in members(s)} - {c.me.group}
    return c.min_groups > 1 and not s.joining and others <= set(leavers(s))


@guard
def replaced(s: Local, c: Config, event: Event) -> bool:
    """The newest record forms an epoch with a newer incarnation of my own identity."""
    entry = s.head.entries.get((c.me.group, c.me.rank)) if s.head else None
    return entry is not None and entry.inc > c.me.inc


@guard
def answers_joiners(s: Local, c: Config, event: Event) -> bool:
    """The last decision of the job is mine, or that of nobody in my epoch."""
    return s.head is not None and (s.head.by == c.me or not is_member(s, s.head.by))


@guard
def asked_to_leave(s: Local, c: Config, event: Event) -> bool:
    """A drain has named my group."""
    return c.me in s.leaving


@guard
def job_diverged(s: Local, c: Config, event: Event) -> bool:
    """The last decision ends the job: replicas differ, and nobody can tell who is right."""
    return s.head is not None and s.head.diverged


@guard
def job_ended(s: Local, c: Config, event: Event) -> bool:
    """All members left with the last decision."""
    return s.head is not None and s.head.last


@guard
def peers_moved_on(s: Local, c: Config, event: Event) -> bool:
    """Nobody who stays still needs me: the next epoch is formed, or nobody stays."""
    return fenced(s, c, event) or not waited_for(s)
