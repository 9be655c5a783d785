"""Planted bugs: small changes of table, core or bus, each of which the checker must detect.

A mutant names the property that detects it, and the smallest known bounds that suffice for that.
The shipped table must be clean within these bounds. A mutant that survives is a gap in the
properties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from fft.messages.causes import CauseCode
from fft.messages.effects import Apply, CastVote, Decide, Effect
from fft.messages.protocol import (
    Ballot,
    Begin,
    Decision,
    Event,
    GroupEntry,
    Join,
    Peer,
    Prepared,
    Record,
    Token,
)
from fft.protocol.effects import EFFECTS, Action
from fft.protocol.equality import divergent_ranks
from fft.protocol.forming import next_epoch
from fft.protocol.guards import GUARDS, Guard
from fft.protocol.participant import Outcome, Participant
from fft.protocol.state import Config, Local, committed, learners, member_peers
from fft.prove.bounds import World
from fft.prove.mutant import Mutant
from fft.prove.mutants_of_paradigms import OF_PARADIGMS
from fft.prove.planting import (
    Raw,
    begins,
    blind,
    instead,
    on,
    planted,
    proposing,
    small,
    state_of,
    way_to,
    without,
    without_fields,
)


def _too_few_live(s: Local, c: Config, event: Event) -> bool:
    return len(set(member_peers(s)) - s.dead) < c.min_groups * c.world


def _seeing(
    other: Callable[[Local], Local], *guards: str
) -> tuple[dict[str, Guard], dict[str, Action]]:
    """Return guards, and ``propose_epoch``, that see the state as changed by ``other``."""

    def ask(name: str) -> Guard:
        return lambda s, c, event: GUARDS[name](other(s), c, event)

    def propose(s: Local, c: Config, event: Event) -> Iterable[Effect]:
        proposal = next_epoch(other(s), c)
        assert proposal is not None
        s.proposed = True
        if s.head is not None:
            proposal = replace(proposal, n=s.head.n + 1, epoch=s.head.epoch + 1)
        yield Decide(s.head, proposal)

    return {name: ask(name) for name in guards}, {"propose_epoch": propose}


# --- deciding -------------------------------------------------------------------------------------


def _majority(s: Local, c: Config, event: Event) -> bool:
    return isinstance(event, Ballot) and 2 * len(event.votes) > len(member_peers(s))


def _cast_for_majority(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    for effect in EFFECTS["cast_vote"](s, c, event):
        assert isinstance(effect, CastVote)
        yield replace(effect, voters=len(member_peers(s)) // 2 + 1)


def _yes_unless_failed(s: Local, c: Config, event: Event) -> bool:
    return isinstance(event, Prepared) and event.yes


def _apply_at_once(raw: Raw) -> None:
    """Apply in the vote's row, defer the results until COMMIT, and remove apply from the decision's
    rows."""
    on(raw, "training", "prepared")[0]["effects"].append("apply")
    prepared = state_of(raw, "voting")
    prepared["defer"] |= {"applied": "not decided yet", "apply_failed": "not decided yet"}
    for row in prepared["on"]["decision"]:
        row["effects"] = [name for name in row["effects"] if not name.startswith("apply")]


def _restored_while_applying(raw: Raw) -> None:
    """Allow a rollback while applying, as other states do; the shipped table refuses it."""
    on(raw, "applying", "restore")[:] = on(raw, "waiting", "restore")


# --- skips ----------------------------------------------------------------------------------------


def _vote_without_fingerprint(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    yield from EFFECTS["note_vote"](s, c, event)
    assert s.vote is not None
    s.vote = replace(s.vote, manifest=replace(s.vote.manifest, fingerprint=None))


def _commit_as_step(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    assert isinstance(event, Ballot)
    votes = tuple(replace(vote, skip=False) for vote in event.votes)
    return EFFECTS["propose_commit"](s, c, replace(event, votes=votes))


def _count_always(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    skipped = s.skip
    EFFECTS["note_applied"](s, c, event)
    s.step += skipped
    return ()


def _missed_is_a_step(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    (effect,) = EFFECTS["apply_settled"](s, c, event)
    assert isinstance(effect, Apply)
    s.skip = False
    yield replace(effect, skip=False)


def _settled_by_a_step(s: Local, c: Config, event: Event) -> bool:
    settled = GUARDS["settled_commit"](s, c, event)
    assert isinstance(event, Decision)
    return settled and event.record is not None and event.record.lineage == committed(s, c).lineage


# --- rules for active groups ----------------------------------------------------------------------


def _some_are_behind(s: Local, c: Config, event: Event) -> bool:
    return GUARDS["learners_can_follow"](s, replace(c, rules=()), event)


def _all_contribute(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    (effect,) = EFFECTS["propose_epoch"](s, c, event)
    assert isinstance(effect, Decide)
    everyone = tuple(g.group for g in effect.proposal.members)
    yield replace(effect, proposal=replace(effect.proposal, active=everyone))


# --- states that differ ---------------------------------------------------------------------------


def _minority_known(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    for effect in EFFECTS["propose_refusal"](s, c, event):
        assert isinstance(effect, Decide) and isinstance(event, Ballot)
        record = effect.proposal
        if record.code == CauseCode.REPLICAS_DIFFER:
            odd = divergent_ranks(event.votes) if c.on_divergence == "heal" else None
            record = replace(record, odd=odd or (), accused=odd or (), diverged=odd is None)
        yield replace(effect, proposal=record)


def _joiner_known_in_first_txn(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    assert s.epoch is not None
    known = s.token.txn == 1 and s.epoch.late
    return (EFFECTS["propose_refusal"] if known else _minority_known)(s, c, event)


def _most_are_odd(s: Local, record: Record) -> Record:
    odd = record.odd
    return replace(record, odd=tuple(p for p in member_peers(s) if p not in odd) if odd else ())


def _same_txn(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    return ()


def _unseen_in_lineage(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    lineage = s.lineage
    EFFECTS["note_applied"](s, c, event)
    s.lineage = lineage
    return ()


# --- fencing --------------------------------------------------------------------------------------


class _NoEpochs(Participant):
    def stale(self, s: Local, event: Event) -> Outcome | None:
        out = super().stale(s, event)
        return None if out and out.verdict == "fenced" and "I stand at" in out.reason else out


class _NoIncarnations(Participant):
    def stale(self, s: Local, event: Event) -> Outcome | None:
        out = super().stale(s, event)
        return None if out and out.verdict == "fenced" and "replaced by" in out.reason else out


class _FirstDeferredOnly(Participant):
    def _retry_deferred(self, s: Local, out: Outcome, tried_in: str, now: float) -> None:
        if s.state != tried_in:
            s.deferred = s.deferred[:1]
        super()._retry_deferred(s, out, tried_in, now)


# --- epochs ---------------------------------------------------------------------------------------


def _any_begin(s: Local, c: Config, event: Event) -> bool:
    return isinstance(event, Begin)


def _own_batches(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    batches = s.batches
    EFFECTS["note_healed"](s, c, event)
    s.batches = batches
    return ()


def _wait_for_all(s: Local, c: Config, event: Event) -> bool:
    return all(s.stopped.get(p, Token(0, 0)) >= s.token for p in member_peers(s))


def _current_by_step(s: Local, record: Record) -> Record:
    def entry(group: GroupEntry) -> GroupEntry:
        ranks = tuple(
            replace(r, current=s.hellos[group.group, r.rank].step == record.step)
            for r in group.ranks
        )
        return replace(group, ranks=ranks)

    return replace(record, members=tuple(entry(g) for g in record.members))


def _leavers_forgotten(s: Local) -> Local:
    return replace(s, head=replace(s.head, leavers=())) if s.head and s.head.leavers else s


def _head_forgotten(s: Local) -> Local:
    return replace(s, head=None)


def _leaver_says_ack(raw: Raw) -> None:
    (row,) = (r for r in on(raw, "voting", "decision") if "say_ack_committed" in r["effects"])
    row["guard"].remove("not i_leave")


def _leave_at_once(raw: Raw) -> None:
    out = way_to(raw, "terminal")
    row = {"guard": ["asked_to_leave"], "to": out, "effects": ["say_leave", "finish"]}
    state_of(raw, "training")["exit"].insert(0, row)


def _without_the_dead(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    EFFECTS["adopt_epoch"](s, c, event)
    assert s.epoch is not None
    members = tuple(g for g in s.epoch.members if not s.dead & set(g.peers()))
    s.epoch = replace(s.epoch, members=members)
    return ()


def _asks_if_no_member(s: Local, c: Config, event: Event) -> bool:
    return isinstance(event, Join) and event.hello.peer not in member_peers(s)


def _lost_or_joining(s: Local, c: Config, event: Event) -> bool:
    return bool(s.joining) or GUARDS["member_lost"](s, c, event)


def _votes_without_state(raw: Raw) -> None:
    on(raw, "training", "prepared")[0]["guard"] = ["votes_yes"]


def _ends_while_learning(raw: Raw) -> None:
    for inner in state_of(raw, "computing")["states"].values():
        if inner["on"]["prepared"][0]["guard"]:
            inner["on"]["prepared"].append({"to": way_to(raw, "waiting")})


def _able(s: Local) -> set[Peer]:
    return {p for p in member_peers(s) if p.group not in learners(s)}


def _able_voted(s: Local, c: Config, event: Event) -> bool:
    return isinstance(event, Ballot) and {v.peer for v in event.votes} >= _able(s)


def _cast_for_the_able(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    for effect in EFFECTS["cast_vote"](s, c, event):
        assert isinstance(effect, CastVote)
        yield replace(effect, voters=len(_able(s)))


def _never_armed(raw: Raw) -> None:
    on(raw, "joining", "start")[0]["to"] = None


# --- state ----------------------------------------------------------------------------------------


def _no_rollback_after_the_body(raw: Raw) -> None:
    del state_of(raw, "waiting")["on"]["restore"]


def _out_of_the_body(raw: Raw) -> None:
    on(raw, "computing", "restore")[0]["to"] = raw["initial"]


def _torn_is_good(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    return EFFECTS["note_applied"](s, c, event)


def _propose_again(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    EFFECTS["note_bus_down"](s, c, event)
    s.proposed = False
    return ()


# --- the bugs -------------------------------------------------------------------------------------

MUTANTS: tuple[Mutant, ...] = (
    # deciding
    Mutant(
        "local_commit",
        "Nobody communicates: whose reductions succeeded applies the step (a teaching spec).",
        "validity",
        small(),
        base="local_commit",
    ),
    Mutant(
        "plain_votes",
        "Decisions are broadcast, not written to the register; who is in doubt aborts (a teaching "
        "spec).",
        "agreement",
        small(lose=1),
        base="plain_votes",
    ),
    Mutant(
        "majority",
        "A majority of YES votes commits.",
        "validity",
        small(groups=3),
        participant=planted({"tally_commits": _majority}, {"cast_vote": _cast_for_majority}),
    ),
    Mutant(
        "apply_before_decision",
        "The optimizer step runs with the vote, before the decision.",
        "replicas_equal",
        small(no=1),
        _apply_at_once,
        thread=_restored_while_applying,
    ),
    Mutant(
        "phantom_step",
        "Who took part in no reduction may vote YES.",
        "validity",
        small(groups=1, misfit=1),
        participant=planted({"votes_yes": _yes_unless_failed}),
    ),
    Mutant(
        "manifests_not_compared",
        "Votes commit though ranks of one number took part in different numbers of reductions.",
        "validity",
        small(misfit=1),
        participant=without_fields("count", "bytes", "shapes", "data", "shard"),
    ),
    Mutant(
        "shapes_not_compared",
        "Votes commit though ranks of one number reduced other tensors, as many.",
        "validity",
        small(misfit=1),
        participant=without_fields("bytes", "shapes", "data", "shard"),
    ),
    Mutant(
        "data_not_compared",
        "Votes commit though their ranks have drawn different data.",
        "validity",
        small(misfit=1),
        participant=without_fields("data"),
    ),
    Mutant(
        "votes_counted_per_step",
        "The ballot of a step keeps the votes of an attempt that was rolled back.",
        "validity",
        small(no=1),
        world=World(attempts=False),
    ),
    Mutant(
        "register_overwritten",
        "The register takes any value, whatever it holds.",
        "agreement",
        small(formed=False, commits=0),
        world=World(write_once=False),
    ),
    Mutant(
        "abort_after_commit",
        "A fault while the committed step is applied rolls it back.",
        "exactly_once",
        small(fault=1),
        instead(
            "committing", "fault", to="aborting", effects=["note_cause", "propose_abort"], guard=[]
        ),
    ),
    Mutant(
        "commit_not_finished",
        "Who learns of the next decision while it applies a committed step drops the step.",
        "exactly_once",
        small(fault=1, commits=2),
        instead(
            "committing",
            "decision",
            to="rolling_back",
            effects=["note_head", "say_ack", "unwind"],
        ),
    ),
    # skips
    Mutant(
        "skip_ignored",
        "Who proposes COMMIT does not look whether somebody skips the step.",
        "skip",
        small(skip=1),
        participant=planted(actions={"propose_commit": _commit_as_step}),
    ),
    Mutant(
        "skip_counted_as_step",
        "A txn that was committed as a skip counts as a step.",
        "exactly_once",
        small(skip=1),
        participant=planted(actions={"note_applied": _count_always}),
    ),
    Mutant(
        "skip_not_recognised",
        "A lineage does not tell who missed the decision that the txn was committed as a skip.",
        "protocol",
        small(skip=1, lose=1),
        participant=planted({"settled_commit": _settled_by_a_step}),
    ),
    Mutant(
        "missed_skip_is_a_step",
        "Who missed the decision of a skip, and learns that it was committed, runs the step.",
        "skip",
        small(skip=1, lose=1),
        participant=planted(actions={"apply_settled": _missed_is_a_step}),
    ),
    # live blocks
    Mutant(
        "block_as_skip",
        "The end of a live block is recorded as a skipped step, which consumes data.",
        "samples_once",
        small(block=2),
        participant=planted(actions=proposing("propose_commit", lambda s, r: replace(r, live=""))),
    ),
    Mutant(
        "block_beside_a_step",
        "The proposer of a COMMIT ignores that one rank is in a live block and another in a step.",
        "validity",
        small(block=1),
        participant=without_fields("count", "bytes", "shapes", "data", "block"),
    ),
    Mutant(
        "block_not_recognised",
        "A participant that missed the COMMIT of a live block takes the block for aborted.",
        "protocol",
        small(block=2, lose=1),
        participant=planted({"settled_commit": _settled_by_a_step}),
    ),
    # rules for active groups
    Mutant(
        "rules_not_applied",
        "The proposer of an epoch lets all members contribute, whatever the rules choose.",
        "live_set",
        small(rules=(("max_active", 1),), formed=False),
        participant=planted(actions={"propose_epoch": _all_contribute}),
    ),
    Mutant(
        "active_group_fetches",
        "A group that the rules choose may fetch its state while the others compute.",
        "live_set",
        small(rules=(("max_active", 2),), crash=1, restart=1),
        participant=planted({"learners_can_follow": _some_are_behind}),
    ),
    # divergent states
    Mutant(
        "digests_not_compared",
        "Votes commit though they tell that states of replicas differ.",
        "divergence",
        small(corrupt=1, digests=True),
        participant=blind(lambda vote: replace(vote, digest=None)),
    ),
    Mutant(
        "gradients_not_compared",
        "Votes commit though the digests show that reduced gradients of replicas differ.",
        "divergence",
        small(flip=1, digests=True),
        participant=without_fields("fingerprint"),
    ),
    Mutant(
        "fingerprint_not_voted",
        "A vote leaves the digest of the reduced gradients out, though it was taken.",
        "divergence",
        small(flip=1, digests=True),
        participant=planted(actions={"note_vote": _vote_without_fingerprint}),
    ),
    Mutant(
        "majority_given_up",
        "Those whose states agree fetch the state of the one that differs.",
        "divergence",
        small(groups=3, corrupt=1, digests=True, heals=True),
        participant=planted(actions=proposing("propose_refusal", _most_are_odd)),
    ),
    Mutant(
        "joiner_ends_the_job",
        "A joiner whose state is not that of all others ends the job, as an old member would.",
        "divergence",
        small(torn=1, corrupt=1, commits=2, digests=True),
        participant=planted(actions={"propose_refusal": _minority_known}),
    ),
    Mutant(
        "joiner_unlike_after_a_rollback_ends_the_job",
        "A joiner counts as an old member once the first txn of its epoch is over.",
        "divergence",
        small(torn=1, corrupt=1, fault=1, commits=2, digests=True),
        participant=planted(actions={"propose_refusal": _joiner_known_in_first_txn}),
    ),
    Mutant(
        "joiner_keeps_its_state",
        "The others fetch from a joiner whose state differs from theirs.",
        "divergence",
        small(torn=1, corrupt=1, commits=2, digests=True),
        participant=planted(actions=proposing("propose_refusal", _most_are_odd)),
    ),
    # in doubt
    Mutant(
        "presumed_commit",
        "Who is in doubt when its time is up takes COMMIT for granted.",
        "validity",
        small(early=1),
        instead("voting", "timer.vote_window", to="committing", effects=["assume_commit", "apply"]),
    ),
    Mutant(
        "presumed_abort",
        "Who is in doubt when its time is up takes ABORT for granted.",
        "agreement",
        small(early=1),
        instead(
            "voting",
            "timer.vote_window",
            to="rolling_back",
            effects=["assume_abort", "say_ack", "unwind"],
        ),
    ),
    Mutant(
        "leaves_in_doubt",
        "Who is in doubt when its time is up ends, though the register could be asked.",
        "decided",
        small(early=1),
        instead(
            "voting", "timer.vote_window", to="terminal", effects=["say_leave", "stop in_doubt"]
        ),
    ),
    # numbers and fences
    Mutant(
        "no_fencing_by_epoch",
        "Words from an older epoch count.",
        "fencing",
        small(no=1, twice=1),
        participant=_NoEpochs,
    ),
    Mutant(
        "no_fencing_by_incarnation",
        "Words of an incarnation that has been replaced count.",
        "fencing",
        small(twin=1),
        participant=_NoIncarnations,
    ),
    Mutant(
        "bus_restart_unnoticed",
        "The bus comes back empty, numbers begin again, and nobody notices.",
        "agreement",
        small(forget=1, formed=False, commits=0),
        world=World(generations=False),
    ),
    Mutant(
        "epoch_number_repeats",
        "What hands out epoch numbers has restarted: the next epoch is number 1 again.",
        "protocol",
        small(no=1),
        participant=planted(
            actions=proposing("propose_epoch", lambda s, record: replace(record, epoch=1))
        ),
    ),
    Mutant(
        "txn_number_repeats",
        "The txn after a commit has the number of the one before.",
        "shard_unity",
        small(commits=2),
        participant=planted(actions={"next_txn": _same_txn}),
    ),
    Mutant(
        "step_not_in_lineage",
        "An applied step does not show in the lineage.",
        "exactly_once",
        small(),
        participant=planted(actions={"note_applied": _unseen_in_lineage}),
    ),
    Mutant(
        "first_deferred_only",
        "Of several decisions that were put off during the optimizer step only one is obeyed.",
        "agreement",
        small(fault=1, early=1, commits=2),
        participant=_FirstDeferredOnly,
    ),
    # the next epoch
    Mutant(
        "begin_of_any_epoch",
        "A member leaves its barrier at the word for any epoch.",
        "live_set",
        small(formed=False, commits=0, early=1, lose=2),
        participant=planted({"begun": _any_begin}),
    ),
    Mutant(
        "waits_for_the_dead",
        "The next epoch waits for the acknowledgements of dead members, too.",
        "eventually",
        small(crash=1),
        participant=planted({"all_stopped": _wait_for_all}),
    ),
    Mutant(
        "acknowledges_once",
        "An acknowledgement that was lost is never said again, nor its sender suspected.",
        "eventually",
        small(no=1, lapse=1),
        without("say_ack", "suspect_silent", events=("timer.ack_window", "timer.bus_retry")),
    ),
    Mutant(
        "barrier_left_early",
        "A member begins the epoch's first txn as soon as it is ready itself.",
        "live_set",
        small(formed=False),
        participant=planted({"all_ready": GUARDS["i_am_ready"]}),
    ),
    Mutant(
        "own_member_list",
        "Each member strikes from the epoch's list whom it knows to be dead.",
        "live_set",
        small(no=1, crash=1),
        participant=planted(actions={"adopt_epoch": _without_the_dead}),
    ),
    Mutant(
        "committed_state_given_up",
        "The next epoch begins with the furthest state that is left, committed or not.",
        "samples_once",
        small(torn=1, crash=1),
        participant=planted(*_seeing(_head_forgotten, "epoch_possible", "learners_can_follow")),
    ),
    Mutant(
        "heals_by_step",
        "Whose step number is that of the epoch fetches nothing, whatever its lineage.",
        "replicas_equal",
        small(formed=False, alike=False, commits=0),
        participant=planted(actions=proposing("propose_epoch", _current_by_step)),
    ),
    Mutant(
        "join_taken_for_late",
        "A member that asks to join is taken for a late word from before it was let in.",
        "join",
        small(heal=1, fault=1, formed=False, alike=False, commits=0),
        participant=planted({"asks_to_come_in": _asks_if_no_member}),
    ),
    Mutant(
        "no_timers_at_start",
        "The start does not enter INIT, so that its timers are not armed.",
        "eventually",
        small(crash=1, formed=False, commits=0),
        _never_armed,
    ),
    Mutant(
        "joiner_ends_the_attempt",
        "Who asks to come in ends the running attempt, as a lost member does.",
        "join",
        small(crash=1, restart=1),
        participant=planted({"member_lost": _lost_or_joining}),
    ),
    Mutant(
        "joiner_unmarked",
        "A commit does not end the epoch because somebody waits to come in.",
        "join",
        small(crash=1, restart=1),
        participant=planted(
            actions=proposing("propose_commit", lambda s, r: replace(r, change=bool(r.leavers)))
        ),
    ),
    Mutant(
        "learner_votes_early",
        "A learner votes when its body has ended, whether or not its state has come.",
        "validity",
        small(crash=1, restart=1, commits=2),
        _votes_without_state,
        thread=_ends_while_learning,
    ),
    Mutant(
        "learner_not_counted",
        "A commit waits for the votes of those only who had the state when the epoch began.",
        "validity",
        small(crash=1, restart=1, commits=2),
        participant=planted({"tally_commits": _able_voted}, {"cast_vote": _cast_for_the_able}),
    ),
    # state and data
    Mutant(
        "rollback_not_expected",
        "The main thread's table has no row for a rollback once its body is over.",
        "protocol",
        small(no=1),
        thread=_no_rollback_after_the_body,
    ),
    Mutant(
        "rollback_not_carried_out",
        "A rollback leads the main thread out of its body, and nothing is unwound.",
        "eventually",
        small(no=1),
        thread=_out_of_the_body,
    ),
    Mutant(
        "not_restored",
        "A rollback leaves buffers, RNG states and gradients as the attempt left them.",
        "replicas_equal",
        small(fault=1),
        world=World(restores=False),
    ),
    Mutant(
        "torn_taken_for_good",
        "A step that failed half way counts as applied.",
        "replicas_equal",
        small(torn=1, commits=2),
        participant=planted(actions={"mark_torn": _torn_is_good}),
    ),
    Mutant(
        "batches_not_healed",
        "Who fetches a state keeps its own count of batches.",
        "replicas_equal",
        small(torn=1),
        participant=planted(actions={"note_healed": _own_batches}),
    ),
    Mutant(
        "first_slice_for_all",
        "Every group takes the first slice of a txn's data.",
        "samples_once",
        small(formed=False, alike=False, commits=0),
        participant=planted(actions=begins(index=lambda start: 0)),
    ),
    Mutant(
        "contributors_miscounted",
        "A txn begins with one contributor more than it has.",
        "samples_once",
        small(formed=False, commits=0),
        participant=planted(actions=begins(participants=lambda start: start.participants + 1)),
    ),
    Mutant(
        "other_data_begun",
        "A txn begins with data that are not those it commits.",
        "samples_once",
        small(),
        participant=planted(actions=begins(cursor=lambda start: start.cursor + 1)),
    ),
    Mutant(
        "returned_group_gets_no_slice",
        "All slices of a fixed number stay with one group, although another one has joined.",
        "samples_once",
        small(formed=False, commits=0, slices=3),
        participant=planted(
            actions=begins(participants=lambda _: 1, index=lambda start: start.index and None)
        ),
    ),
    Mutant(
        "fixed_slices_not_committed",
        "A COMMIT takes one slice for each group, although the number of slices is fixed.",
        "samples_once",
        small(slices=3),
        participant=planted(
            actions=proposing(
                "propose_commit",
                lambda s, r: replace(r, cursor=r.cursor - 1, batches=r.batches - 1),
            )
        ),
    ),
    Mutant(
        "cursor_moves_on_abort",
        "An ABORT moves the data cursor.",
        "samples_once",
        small(no=1),
        participant=planted(
            actions=proposing("propose_abort", lambda s, r: replace(r, cursor=r.cursor + 2))
        ),
    ),
    Mutant(
        "cursor_stands_on_commit",
        "A COMMIT leaves the data cursor where it was.",
        "samples_once",
        small(),
        participant=planted(
            actions=proposing("propose_commit", lambda s, r: replace(r, cursor=s.cursor))
        ),
    ),
    # leaving
    Mutant(
        "drains_before_commit",
        "A group that is asked to leave leaves in the middle of a txn.",
        "drain",
        small(drain=1),
        _leave_at_once,
    ),
    Mutant(
        "leaver_in_next_epoch",
        "The epoch after a drain still has the group that left.",
        "drain",
        small(drain=1),
        _leaver_says_ack,
        planted(*_seeing(_leavers_forgotten, "all_stopped", "epoch_possible")),
    ),
    Mutant(
        "leaver_unmarked",
        "The commit with which a group leaves does not end the epoch.",
        "drain",
        small(drain=1, commits=2),
        participant=planted(
            actions=proposing("propose_commit", lambda s, r: replace(r, change=False))
        ),
    ),
    Mutant(
        "ended_too_early",
        "The commit with which some leave says that the job ends.",
        "drain",
        small(drain=1),
        participant=planted(
            actions=proposing("propose_commit", lambda s, r: replace(r, last=bool(r.leavers)))
        ),
    ),
    Mutant(
        "every_death_is_for_good",
        "A group that is to leave does not wait for a dead group, which its supervisor restarts.",
        "drain",
        replace(small(drain=1, crash=1), least=2),
        participant=planted({"too_few_remain": _too_few_live}),
    ),
    Mutant(
        "proposal_repeated_at_once",
        "A proposal that fails with the bus is repeated at once: no timer ever has its turn.",
        "eventually",
        small(forget=1, formed=False),
        participant=planted(actions={"note_bus_down": _propose_again}),
    ),
    *OF_PARADIGMS,
)
