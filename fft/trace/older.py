"""Names in the tables of older traces, which name each step from a ballot to its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from fft.messages.causes import Cause, CauseCode
from fft.messages.effects import Decide, Effect
from fft.messages.protocol import Ballot, Event, Vote
from fft.protocol.effects import EFFECTS, STOPS, Action, abort_record
from fft.protocol.equality import differing, gradient_digest, unequal_data
from fft.protocol.guards import GUARDS, Guard
from fft.protocol.participant import Participant
from fft.protocol.state import Config, Local, learners, member_peers
from fft.protocol.tally import (
    Abort,
    blocks_cause,
    data_cause,
    gradients_cause,
    manifests_cause,
    skip_cause,
    states_cause,
    verdict_on,
)

Votes = tuple[Vote, ...]


def _manifests_fit(votes: Votes) -> bool:
    kinds = {(vote.peer.rank, vote.manifest.reduced) for vote in votes}
    return (
        bool(votes) and len(kinds) == len({v.peer.rank for v in votes}) and not unequal_data(votes)
    )


_OF_VOTES: Mapping[str, Callable[[Votes], bool]] = {
    "manifests_fit": _manifests_fit,
    "blocks_differ": lambda votes: len({v.manifest.block for v in votes}) > 1,
    "beside_a_step": lambda votes: not all(v.manifest.block for v in votes),
    "in_live_block": lambda votes: any(v.manifest.block for v in votes),
    "gradients_fit": lambda votes: not differing(votes, gradient_digest),
    "data_differ": lambda votes: bool(unequal_data(votes)),
    "somebody_skips": lambda votes: any(v.skip for v in votes),
    "digests_fit": lambda votes: not differing(votes),
}


def _guard(holds: Callable[[Votes], bool]) -> Guard:
    return lambda s, c, event: isinstance(event, Ballot) and holds(event.votes)


def _all_voted(s: Local, c: Config, event: Event) -> bool:
    return isinstance(event, Ballot) and {v.peer for v in event.votes} == set(member_peers(s))


def _odd_ones_known(s: Local, c: Config, event: Event) -> bool:
    if not isinstance(event, Ballot):
        return False
    verdict = verdict_on(s, c, event.votes)
    return isinstance(verdict, Abort) and bool(verdict.ranks)


def _note(cause: Callable[[Local, Votes], Cause]) -> Action:
    def act(s: Local, c: Config, event: Event) -> Iterable[Effect]:
        assert isinstance(event, Ballot)
        s.cause = cause(s, event.votes)
        s.skip |= s.cause.code == CauseCode.SKIPPED
        return ()

    return act


def _propose_end(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    s.proposed = True
    yield Decide(s.head, replace(abort_record(s, c), diverged=True))


def _forget_digest(s: Local, c: Config, event: Event) -> Iterable[Effect]:
    assert s.vote is not None, "it is noted"
    s.vote = replace(s.vote, digest=None)
    return ()


def _not(name: str) -> Guard:
    return lambda s, c, event: not GUARDS[name](s, c, event)


_ARMED = (
    *("bus_retry", "bus_limit", "bus_quiet", "reform_window", "ready_window"),
    *("join_window", "quorum", "ack_window", "coordinator_window", "apart_window"),
)


class OlderParticipant(Participant):
    """The core with the names of older tables."""

    guards = {
        **GUARDS,
        **{name: _guard(holds) for name, holds in _OF_VOTES.items()},
        "all_voted": _all_voted,
        "odd_ones_known": _odd_ones_known,
        "learned_meanwhile": lambda s, c, event: c.me.group in learners(s),
        "all_others_left": GUARDS["too_few_remain"],
        "not_proposed": _not("proposed"),
        "not_paused": _not("paused"),
        "in_first_txn": lambda s, c, event: s.token.txn == 1,
        "nobody_reforms": _not("awaits_successor"),
        "i_report": _not("i_coordinate"),
        "another_gathers": _not("i_gather"),
        "no_retry_due": lambda s, *_: "bus_retry" not in s.timers,
        "no_limit_set": lambda s, *_: "bus_limit" not in s.timers,
    }
    actions = {
        **EFFECTS,
        "note_differing": _note(lambda s, votes: states_cause(votes, s.step)),
        "note_misfit": _note(lambda s, votes: manifests_cause(votes)),
        "note_blocks": _note(lambda s, votes: blocks_cause(votes)),
        "note_beside_step": _note(lambda s, votes: blocks_cause(votes)),
        "note_unequal_data": _note(lambda s, votes: data_cause(votes) or s.cause),
        "note_unequal_gradients": _note(lambda s, votes: gradients_cause(votes)),
        "note_skippers": _note(lambda s, votes: skip_cause(votes, s.cause)),
        "propose_odd": EFFECTS["propose_refusal"],
        "propose_end": _propose_end,
        "propose_live": EFFECTS["propose_commit"],
        "forget_digest": _forget_digest,
        **{f"stop_{reason}": partial(EFFECTS["stop"], reason=reason) for reason in STOPS},
        **{f"arm_{timer}": partial(EFFECTS["arm"], timer=timer) for timer in _ARMED},
        **{f"rearm_{timer}": partial(EFFECTS["arm"], timer=timer) for timer in _ARMED},
        "arm_longer_ready_window": partial(EFFECTS["arm"], timer="ready_window 1.5"),
    }
